"""The least that one update of Transolver-sigma has to move and to compute, and the time that takes on a device.

A pass is one tensor of the width, `width x itemsize` bytes for every point, read or written once; half a pass is one
of the two halves. Counted are the blocks: lift, readout, loss and optimiser are a few per cent and left out, which
makes the floor a little too low. One kernel does one operation of the block (models/block.py) together with all that
acts point by point around it; what one operation hands to another passes through memory once; what the backward pass
needs is kept or, where that is cheaper, computed again. Routing weights are never stored.

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
        # Backward: read the gradient, and H for the kernel's own gradient; write the gradient of H.
        "context and half norms": (3, 3),
        # Analysis reads the half once for each axis; one synthesis for all axes reads the residual and writes.
        # A mode is two half-width numbers for K of n points: written and read, and read again for W's gradient.
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
        # which must be whole before any point's gradient can be made.
        "deslice, projection, residual": (1.5, 1),
        # Forward: read, write; the inner values stay on the chip. Backward: read the gradient and the input, compute
        # the inner values again, write the input's gradient. The weights' gradients, 3 f C^2 sums over all points, are
        # too many for one processor's own memory: product, gate's and up's gradients are written and read once,
        # and gradient and input are read again with them.
        "norm, SwiGLU, residual": (2, 3 + 2 * 3 * f + 2),
    }


def block_flops(config: SolverConfig) -> tuple[float, float]:
    """Floating point operations of a block, forward: (for each point, for each sample); a multiply-add is two."""
    C, d, M, h = config.width, config.axes, config.slices, config.heads
    half, e, inner = C // 2, C // 2 // h, 2 * config.options.expansion * C // 3
    point = {
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
    return sum(point.values()), attention


@dataclass(frozen=True)
class Rates:
    """What the device reaches on the two simplest tasks."""

    bytes_per_second: float
    flops_per_second: float


@dataclass(frozen=True)
class Floor:
    bytes: float
    flops: float

    def milliseconds(self, rates: Rates) -> float:
        """Moving and computing overlap at best: the longer of the two."""
        return 1e3 * max(self.bytes / rates.bytes_per_second, self.flops / rates.flops_per_second)


def floor(recipe: Recipe, itemsize: int = 2) -> Floor:
    """Of one update; a number has `itemsize` bytes (bf16: 2). A backward pass computes twice what a forward does."""
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
    """A large copy (read and written) and a large matrix product: bf16 on a GPU, float32 on a CPU."""
    on_gpu = device.type == "cuda"
    numbers, side, dtype = (2**30, 8192, torch.bfloat16) if on_gpu else (2**24, 1024, torch.float32)
    source = torch.zeros(numbers, dtype=dtype, device=device)
    target = torch.empty_like(source)
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))

    def best(call: Callable[[], object], count: int = 10) -> float:
        seconds = []
        for _ in range(count):
            start = time.perf_counter()
            call()
            if on_gpu:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        return min(seconds)

    moved = 2 * source.numel() * source.element_size()
    return Rates(moved / best(lambda: target.copy_(source)), 2 * side**3 / best(lambda: torch.mm(a, b)))
