"""A roofline: the minimum memory traffic and FLOPs of one update of Transolver-sigma, and its time on a device.

A pass is one full-width tensor, `width x itemsize` bytes per point, read or written once; half a pass is one of the two
halves. Only the blocks are counted: lift, readout, loss and optimiser are a few per cent, so the floor is slightly too
low. One kernel does one operation of the block (models/block.py), fused with all pointwise operations around it; data
between operations go through memory once; activations for the backward pass are stored or, if cheaper, recomputed.
Routing weights are never stored.

Letters: C width, d axes, K modes and n points of an axis, f inner width of the SwiGLU over C, M slices, h heads,
e head width of the physical half.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from sigmasolver.models import SolverConfig
from sigmasolver.recipes import Recipe

__all__ = ["Floor", "Rates", "block_flops", "block_passes", "floor", "measured_rates"]


def block_passes(config: SolverConfig) -> dict[str, tuple[float, float]]:
    """Passes of each operation of a block: (forward, backward)."""
    d, f = config.axes, 2 * config.options.expansion * config.width // 3 / config.width
    modes = sum(K / n for K, n in zip(config.modes_per_axis, config.grid, strict=True))
    return {
        # Forward: read H; write H + CPE(H) for the residuals and both normalised halves for the branches.
        # Backward: read the gradient, and H for the gradient of the kernel; write the gradient of H.
        "context and half norms": (3, 3),
        # The forward transform reads the half once per axis; one inverse for all axes reads the residual and writes.
        # A mode is two half-width numbers for K of n points: written and read, and read again for the gradient of W.
        # Backward: the same with gradients; the norm before it needs the normalised half as well.
        "spectral half": (d / 2 + 1 + 2 * modes, d / 2 + 1.5 + 3 * modes),
        # Read the half; write both convolved fields, which the pointwise gradients need. Backward: read both
        # gradients, the normalised half (for the kernels and the norm) and the residual's gradient; write one gradient.
        "two depthwise convolutions": (0.5 + 1, 1 + 0.5 + 0.5 + 0.5),
        # Write R and F. Backward: read their gradients and the convolved fields, write the convolved ones' gradients.
        "two pointwise maps": (1, 1 + 1 + 1),
        # Read R and F. Backward: read R, F and the output's gradient (the deslicing part), write both gradients.
        "slice": (1, 1 + 0.5 + 1),
        # Read R and the residual, write the half. Backward: read R and the output's gradient for the slices' gradient,
        # which must be complete before the gradient of any point can be computed.
        "deslice, projection, residual": (1.5, 1),
        # Forward: read, write; the inner values stay on chip. Backward: read the gradient and the input, recompute the
        # inner values, write the input's gradient. The weight gradients, 3 f C^2 sums over all points, do not fit into
        # the shared memory of one SM: the product and the gradients of gate and up are written and read once, and
        # gradient and input are read again with them.
        "norm, SwiGLU, residual": (2, 3 + 2 * 3 * f + 2),
    }


def block_flops(config: SolverConfig) -> tuple[float, float]:
    """FLOPs of the forward pass of a block: (per point, per sample); a multiply-add counts as two."""
    C, d, M, h = config.width, config.axes, config.slices, config.heads
    half, e, inner = C // 2, C // 2 // h, 2 * config.options.expansion * C // 3
    per_point = {
        "context": 2 * 3**d * C,
        # To 2K real modes and back; one real matrix of 2 half x 2 half for each of K modes of n points.
        "spectral": sum(
            2 * 4 * K * half + 2 * (2 * half) ** 2 * K / n
            for K, n in zip(config.modes_per_axis, config.grid, strict=True)
        ),
        "paths": 2 * (2 * 5**d * half + 2 * half**2),
        "route, slice, deslice": 3 * 2 * half * M,
        "projection": 2 * half**2,
        "SwiGLU": 3 * 2 * C * inner,
    }
    attention = h * (3 * 2 * M * e**2 + 2 * 2 * M**2 * e)
    return sum(per_point.values()), attention


@dataclass(frozen=True)
class Rates:
    """Rates that the device achieves for a copy and a matrix product."""

    bytes_per_second: float
    flops_per_second: float


@dataclass(frozen=True)
class Floor:
    bytes: float
    flops: float

    def milliseconds(self, rates: Rates) -> float:
        """The longer of memory traffic and compute, which overlap at best."""
        return 1e3 * max(self.bytes / rates.bytes_per_second, self.flops / rates.flops_per_second)


def floor(recipe: Recipe, itemsize: int = 2) -> Floor:
    """The floor of one update; `itemsize` is in bytes (bf16: 2). A backward pass has twice the forward FLOPs."""
    if recipe.model.name != "transolver-sigma":
        raise ValueError(f"The floor is counted for transolver-sigma; {recipe.model.name} has other blocks.")
    config, task, train = recipe.model.config(recipe.task), recipe.task, recipe.train
    samples = train.batch * (task.horizon if train.objective == "teacher_forced" else 1)
    points, calls = samples * math.prod(task.grid), train.calls_at(train.push_after)
    forward, backward = (sum(passes) for passes in zip(*block_passes(config).values(), strict=True))
    per_point, per_sample = block_flops(config)
    return Floor(
        bytes=(calls * forward + backward) * config.depth * points * config.width * itemsize,
        flops=(calls + 2) * config.depth * (points * per_point + samples * per_sample),
    )


def measured_rates(device: torch.device) -> Rates:
    """Time a large copy (read and write) and a large matrix product: bf16 on a GPU, float32 on a CPU."""
    on_gpu = device.type == "cuda"
    elements, size, dtype = (2**30, 8192, torch.bfloat16) if on_gpu else (2**24, 1024, torch.float32)
    source = torch.zeros(elements, dtype=dtype, device=device)
    target = torch.empty_like(source)
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))

    def best(call: Callable[[], object], repeats: int = 10) -> float:
        seconds = []
        for _ in range(repeats):
            start = time.perf_counter()
            call()
            if on_gpu:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        return min(seconds)

    bytes_moved = 2 * source.numel() * source.element_size()
    return Rates(bytes_moved / best(lambda: target.copy_(source)), 2 * size**3 / best(lambda: torch.mm(a, b)))
