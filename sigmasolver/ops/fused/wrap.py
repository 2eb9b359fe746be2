"""Periodic padding of a channels-last grid in one pass forward and one backward.

    y_j = x_(j - p mod n)      dx_i = sum of dy_j over the images of i: j = i + p, i + p - n and i + p + n inside

along each axis. torch copies slice by slice, and again for each slice in the backward pass; and its result is
channels-first, which a convolution has to transpose again.

Letters: B batch, n points and p cells of an axis, C channels. Grids have three axes here, x, y and z; missing leading
axes have one point.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from sigmasolver.ops.fused import cast_for_products, tuning
from sigmasolver.ops.fused.jit import jit

__all__ = ["wrap"]


@jit
def _wrap(
    x: tl.tensor, y: tl.tensor,
    points: tl.tensor, points_x: tl.tensor, points_y: tl.tensor, points_z: tl.tensor,
    cells_x: tl.tensor, cells_y: tl.tensor, cells_z: tl.tensor,
    CHANNELS: tl.constexpr, TILE_POINTS: tl.constexpr, TILE_CHANNELS: tl.constexpr,
) -> None:  # fmt: skip
    """y (B, n + 2 p, C) from x (B, n, C): y_j = x_(j - p mod n) along each axis; a sample of y has `points` points."""
    j, c = tl.program_id(0) * TILE_POINTS + tl.arange(0, TILE_POINTS), tl.arange(0, TILE_CHANNELS)
    batch = tl.program_id(1).to(tl.int64)
    padded_y, padded_z = points_y + 2 * cells_y, points_z + 2 * cells_z
    iz = (j % padded_z - cells_z + points_z) % points_z
    iy = (j // padded_z % padded_y - cells_y + points_y) % points_y
    ix = (j // padded_z // padded_y - cells_x + points_x) % points_x
    source = (ix * points_y + iy) * points_z + iz
    keep = (j[:, None] < points) & (c[None, :] < CHANNELS)
    x += batch * points_x * points_y * points_z * CHANNELS
    v = tl.load(x + source[:, None] * CHANNELS + c[None, :], mask=keep, other=0.0)
    tl.store(y + batch * points * CHANNELS + j[:, None] * CHANNELS + c[None, :], v, mask=keep)


@jit
def _wrap_backward(
    dy: tl.tensor, dx: tl.tensor,
    points: tl.tensor, points_x: tl.tensor, points_y: tl.tensor, points_z: tl.tensor,
    cells_x: tl.tensor, cells_y: tl.tensor, cells_z: tl.tensor,
    CHANNELS: tl.constexpr, REACH_X: tl.constexpr, REACH_Y: tl.constexpr, REACH_Z: tl.constexpr,
    TILE_POINTS: tl.constexpr, TILE_CHANNELS: tl.constexpr,
) -> None:  # fmt: skip
    """dx (B, n, C) from dy (B, n + 2 p, C): dx_i = sum over k = -1, 0, 1 of dy_(i + p + k n) inside the padded grid.

    A sample of dx has `points` points. k runs from -REACH to REACH; REACH is 1 if p > 0, else 0.
    """
    i, c = tl.program_id(0) * TILE_POINTS + tl.arange(0, TILE_POINTS), tl.arange(0, TILE_CHANNELS)
    batch = tl.program_id(1).to(tl.int64)
    padded_x, padded_y, padded_z = points_x + 2 * cells_x, points_y + 2 * cells_y, points_z + 2 * cells_z
    dy += batch * padded_x * padded_y * padded_z * CHANNELS
    iz, iy, ix = i % points_z + cells_z, i // points_z % points_y + cells_y, i // points_z // points_y + cells_x
    keep = (i[:, None] < points) & (c[None, :] < CHANNELS)
    total = tl.zeros((TILE_POINTS, TILE_CHANNELS), tl.float32)
    for kx in tl.static_range(-REACH_X, REACH_X + 1):
        for ky in tl.static_range(-REACH_Y, REACH_Y + 1):
            for kz in tl.static_range(-REACH_Z, REACH_Z + 1):
                jx, jy, jz = ix + kx * points_x, iy + ky * points_y, iz + kz * points_z
                inside = (jx >= 0) & (jx < padded_x) & (jy >= 0) & (jy < padded_y) & (jz >= 0) & (jz < padded_z)
                offsets = ((jx * padded_y + jy) * padded_z + jz)[:, None] * CHANNELS + c[None, :]
                total += tl.load(dy + offsets, mask=keep & inside[:, None], other=0.0).to(tl.float32)
    dx += batch * points * CHANNELS
    tl.store(dx + i[:, None] * CHANNELS + c[None, :], total.to(dx.dtype.element_ty), mask=keep)


class _Wrap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cells: tuple[int, ...]) -> torch.Tensor:
        grid, padded = x.shape[1:-1], [size + 2 * width for size, width in zip(x.shape[1:-1], cells, strict=True)]
        y = torch.empty(x.shape[0], *padded, x.shape[-1], device=x.device, dtype=x.dtype)
        points, tile = y[0, ..., 0].numel(), _tile(x.shape[-1])
        _wrap[(triton.cdiv(points, tile["TILE_POINTS"]), len(x))](
            x, y, points, *_to_three_axes(grid, 1), *_to_three_axes(cells, 0), **tile
        )
        ctx.shape, ctx.cells = x.shape, cells
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        dx, cells = torch.empty(ctx.shape, device=dy.device, dtype=dy.dtype), _to_three_axes(ctx.cells, 0)
        points, tile = dx[0, ..., 0].numel(), _tile(ctx.shape[-1])
        reach = {f"REACH_{axis}": int(width > 0) for axis, width in zip("XYZ", cells, strict=True)}
        _wrap_backward[(triton.cdiv(points, tile["TILE_POINTS"]), len(dx))](
            dy.contiguous(), dx, points, *_to_three_axes(ctx.shape[1:-1], 1), *cells, **reach, **tile
        )
        return dx, None


def _to_three_axes(values: Sequence[int], default: int) -> list[int]:
    return [*(default,) * (3 - len(values)), *values]


def _tile(channels: int) -> dict[str, Any]:
    tile_channels = triton.next_power_of_2(channels)
    sizes = {"TILE_POINTS": max(1, tuning.WRAP_TILE // tile_channels), "TILE_CHANNELS": tile_channels}
    return {"CHANNELS": channels, **sizes, "num_warps": tuning.WRAP_WARPS}


def wrap(x: torch.Tensor, cells: Sequence[int]) -> torch.Tensor:
    """`ops.wrap.wrap`, contiguous, in the dtype of the matrix products that follow."""
    return _Wrap.apply(cast_for_products(x).contiguous(), tuple(cells))
