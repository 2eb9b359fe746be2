"""Export formats: how to write a program to one file, and how to load and run the file to check it.

onnx           ONNX, for onnxruntime and other engines
torch-export   a PyTorch program, for torch.export.load
aoti           machine code for this CPU type, for C++ and Python without the model's source
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
"""The function that an exported file computes."""


@dataclass(frozen=True)
class Format:
    """An export format."""

    suffix: str
    need: Callable[[], None]
    """Raises ValueError if a requirement is missing on this machine."""
    write: Callable[[ExportedProgram, Path, Mapping[str, str], Sequence[str], Sequence[str]], None]
    """Program, file, metadata, names of the inputs and of the outputs."""
    read: Callable[[Path], Compute]


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the exporters' logs and warnings; errors are raised as exceptions."""
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

    # Not `optimize=True`: it drops summands up to 1e-8, such as the epsilon of a normalisation.
    exported = torch.onnx.export(
        program, dynamo=True, input_names=list(inputs), output_names=list(outputs), verbose=False, optimize=False
    )
    assert exported is not None
    optimizer.inline(exported.model)
    optimizer.fold_constants(exported.model)
    optimizer.remove_unused_nodes(exported.model)
    for node in exported.model.graph.all_nodes():
        node.metadata_props.clear()  # stack traces with paths of this machine
    exported.model.metadata_props.update(facts)
    exported.save(path)


def _read_onnx(path: Path) -> Compute:
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]

    def run(*tensors: torch.Tensor) -> Sequence[torch.Tensor]:
        inputs = dict(zip(names, (np.asarray(tensor) for tensor in tensors), strict=True))
        return [torch.from_numpy(output) for output in session.run(None, inputs)]

    return run


def _require_onnx() -> None:
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


def _require_compiler() -> None:
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        raise ValueError("C++ compiler not found, which aoti requires; install g++ or clang.") from None


def _read_compiled(path: Path) -> Compute:
    return torch._inductor.aoti_load_package(str(path))


FORMATS = {
    "onnx": Format(".onnx", _require_onnx, _write_onnx, _read_onnx),
    "torch-export": Format(".pt2", lambda: None, _write_program, _read_program),
    "aoti": Format(".pt2", _require_compiler, _write_compiled, _read_compiled),
}
