"""Compiles the kernels of pieces of work for a GPU, without one: `python -m tests.ops.compiled DEVICE KIND PIECE ...`.

What is launched is compiled with the arguments it was launched with, and does not run. The last line is JSON: for each
piece by kernel the most bytes of shared memory that one of its forms needs. A process of its own, since Triton's
interpreter is on wherever tests run without a GPU.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from sigmasolver.models import Options, build_model
from sigmasolver.ops import dispatch
from sigmasolver.ops.fused import lift, swiglu
from sigmasolver.ops.precision import matmul_precision

DEVICES = {"H200": (90, 232_448), "RTX 4090": (89, 101_376)}
"""Compute capability, and bytes of shared memory that a program may have."""
TYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.int64: "*i64", torch.int32: "*i32", torch.uint8: "*u8"}
most: dict[str, int] = {}


def compile_only(target: GPUTarget, kernel: JITFunction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """In place of a launch."""
    given = dict(zip(kernel.arg_names, args, strict=False)) | {
        n: kwargs.pop(n) for n in kernel.arg_names if n in kwargs
    }
    fixed = {p.name for p in kernel.params if p.is_constexpr}
    types, aligned = {}, {}
    for place, (name, value) in enumerate(given.items()):
        if name in fixed:
            types[name] = "constexpr"
            continue
        types[name] = (
            TYPES[value.dtype] if isinstance(value, torch.Tensor) else {int: "i32", float: "fp32"}[type(value)]
        )
        if isinstance(value, torch.Tensor) or value % 16 == 0:
            aligned[(place,)] = [["tt.divisibility", 16]]
    assert list(given) == list(kernel.arg_names)
    constants = {(kernel.arg_names.index(name),): given[name] for name in fixed}
    source = ASTSource(kernel, types, constants, aligned)
    made = triton.compile(source, target=target, options=kwargs)
    most[kernel.__name__] = max(most.get(kernel.__name__, 0), made.metadata.shared)


def slices(precision: str, M: int, D: int) -> None:
    """Slice attention of one head and back; of so many points that a program walks over several tiles."""
    from sigmasolver.ops.fused.slices import slice_attention
    from sigmasolver.ops.modules import SliceMap

    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    points = [torch.empty(1, 2**18, D, dtype=dtype, requires_grad=True) for _ in range(2)]
    route = SliceMap(torch.randn(M, D), torch.randn(M), torch.ones(1), (0.1, 5.0))
    attention = (*(torch.randn(D, D) for _ in range(3)), torch.ones(1))
    slice_attention(*points, route, attention, (torch.randn(D, D), torch.randn(D))).sum().backward()


def step(precision: str, name: str, grid: tuple[int, ...], **sizes: int) -> None:
    """One block of a solver on a periodic grid, forward and back."""
    options = Options(padding=("circular",) * len(grid))
    model = build_model(name, grid=grid, in_channels=3, out_channels=1, depth=1, options=options, **sizes)
    dispatch.interpreted = True
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        out = model(torch.randn(1, *grid, 3))
    out.float().square().mean().backward()


def main() -> None:
    capability, shared = DEVICES[sys.argv[1]]
    target = GPUTarget("cuda", capability, 32)
    swiglu.shared_memory = lift.shared_memory = lambda x: shared
    JITFunction.run = lambda kernel, *args, grid, warmup, **kwargs: compile_only(target, kernel, args, kwargs)
    work: Callable[..., None] = {"slices": slices, "step": step}[sys.argv[2]]
    found = []
    for precision, args, options in map(json.loads, sys.argv[3:]):
        most.clear()
        with matmul_precision(precision):
            work(precision, *args, **options)
        found.append(dict(most))
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
