"""The formats: how a program is written into one file, and how the file is run again to be checked.

onnx           ONNX, for onnxruntime and other engines
torch-export   a PyTorch program, for torch.export.load
aoti           machine code for this kind of processor, for C++ and Python without the model's code
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.export import ExportedProgram

__all__ = ["FORMATS", "Compute", "Format", "quiet"]

Compute = Callable[..., Sequence[torch.Tensor]]
"""Inputs to outputs, as the file computes them."""


@dataclass(frozen=True)
class Format:
    """One way to write a program."""

    suffix: str
    need: Callable[[], None]
    """Says what is missing on this machine."""
    write: Callable[[ExportedProgram, Path, Mapping[str, str], Sequence[str], Sequence[str]], None]
    """Program, file, metadata, names of the inputs and of the outputs."""
    read: Callable[[Path], Compute]


@contextmanager
def quiet() -> Iterator[None]:
    """Exporters talk about themselves; what concerns the user is an exception."""
    logger = logging.getLogger("torch")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _write_onnx(
    program: ExportedProgram, path: Path, facts: Mapping[str, str], inputs: Sequence[str], outputs: Sequence[str]
) -> None:
    from onnxscript import optimizer

    # Not `optimize=True`: it takes any summand up to 1e-8 for zero, such as the epsilon of a normalisation.
    made = torch.onnx.export(
        program, dynamo=True, input_names=list(inputs), output_names=list(outputs), verbose=False, optimize=False
    )
    assert made is not None
    optimizer.inline(made.model)
    optimizer.fold_constants(made.model)
    optimizer.remove_unused_nodes(made.model)
    for node in made.model.graph.all_nodes():
        node.metadata_props.clear()  # stack traces with paths of this machine
    made.model.metadata_props.update(facts)
    made.save(path)


def _read_onnx(path: Path) -> Compute:
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [one.name for one in session.get_inputs()]

    def run(*tensors: torch.Tensor) -> Sequence[torch.Tensor]:
        given = dict(zip(names, (np.asarray(one) for one in tensors), strict=True))
        return [torch.from_numpy(one) for one in session.run(None, given)]

    return run


def _need_onnx() -> None:
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as missing:
        raise ValueError(
            f"ONNX export requires the package {missing.name}; install it with: pip install 'sigmasolver[export]'."
        ) from None


def _write_program(
    program: ExportedProgram, path: Path, facts: Mapping[str, str], inputs: Sequence[str], outputs: Sequence[str]
) -> None:
    torch.export.save(program, path, extra_files={"metadata.json": json.dumps(dict(facts))})


def _read_program(path: Path) -> Compute:
    return torch.export.load(path).module()


def _write_compiled(
    program: ExportedProgram, path: Path, facts: Mapping[str, str], inputs: Sequence[str], outputs: Sequence[str]
) -> None:
    torch._inductor.aoti_compile_and_package(
        program, package_path=str(path), inductor_configs={"aot_inductor.metadata": dict(facts)}
    )


def _need_compiler() -> None:
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        raise ValueError("C++ compiler not found, which aoti requires; install g++ or clang.") from None


def _read_compiled(path: Path) -> Compute:
    return torch._inductor.aoti_load_package(str(path))


FORMATS = {
    "onnx": Format(".onnx", _need_onnx, _write_onnx, _read_onnx),
    "torch-export": Format(".pt2", lambda: None, _write_program, _read_program),
    "aoti": Format(".pt2", _need_compiler, _write_compiled, _read_compiled),
}
