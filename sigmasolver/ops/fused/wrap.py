"""Periodic padding of a channels-last grid, one pass each way.

    y_j = x_(j - p mod n)      dx_i = sum of dy_j over the images of i: j = i + p, i + p - n and i + p + n inside

along each axis. torch copies slice by slice, and backward once more for every slice; and its result is channels-first,
which a convolution turns round again.

Letters: B batch, n points and p cells of an axis, C channels. Grids have three axes here, the first of one point where
there are fewer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from sigmasolver.ops.fused import product_dtype, tuning

__all__ = ["wrap"]


@triton.jit
def _wrap(
    x: tl.tensor, y: tl.tensor,
    points: tl.tensor, n0: tl.tensor, n1: tl.tensor, n2: tl.tensor, p0: tl.tensor,
    p1: tl.tensor, p2: tl.tensor, C: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
) -> None:  # fmt: skip
    """y (B, n + 2 p, C), y_j = x_(j - p mod n) along each axis, of x (B, n, C); a sample of y has `points` points."""
    j, c = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    batch = tl.program_id(1).to(tl.int64)
    m1, m2 = n1 + 2 * p1, n2 + 2 * p2
    i2 = (j % m2 - p2 + n2) % n2
    i1 = (j // m2 % m1 - p1 + n1) % n1
    i0 = (j // m2 // m1 - p0 + n0) % n0
    source = (i0 * n1 + i1) * n2 + i2
    keep = (j[:, None] < points) & (c[None, :] < C)
    v = tl.load(x + batch * n0 * n1 * n2 * C + source[:, None] * C + c[None, :], mask=keep, other=0.0)
    tl.store(y + batch * points * C + j[:, None] * C + c[None, :], v, mask=keep)


@triton.jit
def _wrap_backward(
    dy: tl.tensor, dx: tl.tensor,
    points: tl.tensor, n0: tl.tensor, n1: tl.tensor, n2: tl.tensor, p0: tl.tensor, p1: tl.tensor, p2: tl.tensor,
    C: tl.constexpr, REACH0: tl.constexpr, REACH1: tl.constexpr, REACH2: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
) -> None:  # fmt: skip
    """dx (B, n, C), dx_i = sum over k = -1, 0, 1 of dy_(i + p + k n) inside, of dy (B, n + 2 p, C).

    A sample of dx has `points` points. REACH is 1 where p is not 0, else 0: k goes from -REACH to REACH.
    """
    i, c = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    batch = tl.program_id(1).to(tl.int64)
    m0, m1, m2 = n0 + 2 * p0, n1 + 2 * p1, n2 + 2 * p2
    dy += batch * m0 * m1 * m2 * C
    i2, i1, i0 = i % n2 + p2, i // n2 % n1 + p1, i // n2 // n1 + p0
    keep = (i[:, None] < points) & (c[None, :] < C)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for k0 in tl.static_range(-REACH0, REACH0 + 1):
        for k1 in tl.static_range(-REACH1, REACH1 + 1):
            for k2 in tl.static_range(-REACH2, REACH2 + 1):
                j0, j1, j2 = i0 + k0 * n0, i1 + k1 * n1, i2 + k2 * n2
                inside = (j0 >= 0) & (j0 < m0) & (j1 >= 0) & (j1 < m1) & (j2 >= 0) & (j2 < m2)
                at = ((j0 * m1 + j1) * m2 + j2)[:, None] * C + c[None, :]
                total += tl.load(dy + at, mask=keep & inside[:, None], other=0.0).to(tl.float32)
    tl.store(dx + batch * points * C + i[:, None] * C + c[None, :], total.to(dx.dtype.element_ty), mask=keep)


class _Wrap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cells: tuple[int, ...]) -> torch.Tensor:
        grid, larger = x.shape[1:-1], [n + 2 * p for n, p in zip(x.shape[1:-1], cells, strict=True)]
        y = torch.empty(x.shape[0], *larger, x.shape[-1], device=x.device, dtype=x.dtype)
        points, tile = y[0, ..., 0].numel(), _tile(x.shape[-1])
        _wrap[(triton.cdiv(points, tile["ROWS"]), len(x))](x, y, points, *_three(grid, 1), *_three(cells, 0), **tile)
        ctx.shape, ctx.cells = x.shape, cells
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        dx, cells = torch.empty(ctx.shape, device=dy.device, dtype=dy.dtype), _three(ctx.cells, 0)
        points, tile = dx[0, ..., 0].numel(), _tile(ctx.shape[-1])
        reach = {f"REACH{axis}": int(p > 0) for axis, p in enumerate(cells)}
        _wrap_backward[(triton.cdiv(points, tile["ROWS"]), len(dx))](
            dy.contiguous(), dx, points, *_three(ctx.shape[1:-1], 1), *cells, **reach, **tile
        )
        return dx, None


def _three(numbers: Sequence[int], other: int) -> list[int]:
    return [*(other,) * (3 - len(numbers)), *numbers]


def _tile(C: int) -> dict[str, Any]:
    columns = triton.next_power_of_2(C)
    return {"C": C, "ROWS": max(1, tuning.WRAP_TILE // columns), "COLUMNS": columns, "num_warps": tuning.WRAP_WARPS}


def wrap(x: torch.Tensor, cells: Sequence[int]) -> torch.Tensor:
    """`ops.wrap.wrap`, contiguous, in the type of the products that follow."""
    return _Wrap.apply(x.to(product_dtype(x, x.dtype)).contiguous(), tuple(cells))
