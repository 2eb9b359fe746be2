"""Compile the kernels of workloads for a GPU, without one: `python -m tests.ops.compiled`.

Each line of its input is JSON: device, kind and workloads. Launched kernels are compiled for their arguments, but not
run. The answer is a line of JSON: for each workload a map from kernel to the maximum shared memory in bytes over its
variants, or the error. This is a separate process, since tests without a GPU enable Triton's interpreter.
"""

import json
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from sigmasolver.models import Options, build_model
from sigmasolver.ops import dispatch
from sigmasolver.ops.compile_server import NamedTarget
from sigmasolver.ops.fused import lift, swiglu
from sigmasolver.ops.fused.tuning import Gpu
from sigmasolver.ops.precision import matmul_precision
from sigmasolver.ops.precompile import intercept_launches

DEVICES = {"H200": (90, 232_448), "A100": (80, 166_912), "RTX 4090": (89, 101_376)}
"""Compute capability, and shared memory per program in bytes; one GPU of each class."""


class FakeDriver(NamedTarget):
    """A stand-in for Triton's GPU driver: names the GPU to compile for, and cannot launch."""

    def get_current_stream(self, device: int) -> int:
        return 0


def pretend(device: str) -> None:
    """Compile kernels for this GPU from now on, with the tiles of its class."""
    capability, shared = DEVICES[device]
    driver.set_active(FakeDriver(GPUTarget("cuda", capability, 32), list(DEVICES).index(device)))
    swiglu.gpu_class = lift.gpu_class = lambda x: Gpu.with_shared_memory(shared)
    dispatch.interpreted = True


def slices(precision: str, M: int, D: int) -> None:
    """Forward and backward pass of slice attention of one head, with enough points for several tiles per program."""
    from sigmasolver.ops.fused.slices import slice_attention
    from sigmasolver.ops.modules import SliceMap

    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    points = [torch.empty(1, 2**18, D, dtype=dtype, requires_grad=True) for _ in range(2)]
    route = SliceMap(torch.randn(M, D), torch.randn(M), torch.ones(1), (0.1, 5.0))
    attention = (*(torch.randn(D, D) for _ in range(3)), torch.ones(1))
    slice_attention(*points, route, attention, (torch.randn(D, D), torch.randn(D))).sum().backward()


def step(precision: str, name: str, grid: tuple[int, ...], **sizes: int) -> None:
    """Forward and backward pass of a solver with one block on a periodic grid."""
    options = Options(padding=("circular",) * len(grid))
    model = build_model(name, grid=grid, in_channels=3, out_channels=1, depth=1, options=options, **sizes)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        out = model(torch.randn(1, *grid, 3))
    out.float().square().mean().backward()


def compiled(device: str, kind: str, workloads: list[Any]) -> list[dict[str, int]]:
    pretend(device)
    work: Callable[..., None] = {"slices": slices, "step": step}[kind]
    shared_bytes: list[dict[str, int]] = []

    def record(compile: Callable[[], Any]) -> None:
        kernel = compile()
        shared_bytes[-1][kernel.name] = max(shared_bytes[-1].get(kernel.name, 0), kernel.metadata.shared)

    for precision, args, options in workloads:
        shared_bytes.append({})
        with matmul_precision(precision), intercept_launches(record):
            work(precision, *args, **options)
    return shared_bytes


def main() -> None:
    for line in sys.stdin:
        try:
            answer: Any = compiled(*json.loads(line))
        except Exception:
            answer = traceback.format_exc()
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
