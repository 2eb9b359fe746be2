"""Linear layers, y = x W^T + b, and the gradients of their weights, which are reductions over many points:

    dW = dy^T x      db = sum over points of dy

In low precision and up to MAX_LINEAR_CHANNELS channels, one pass over dy and x computes both, in chunks of points that
are summed in a fixed order; with cuBLAS the bias would need a separate pass.

Letters: N points, C and O channels in and out.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from sigmasolver.ops.dispatch import exceeded, prefers
from sigmasolver.ops.fused import cast_for_products, dot_precision, multiprocessors, tuning
from sigmasolver.ops.fused.jit import jit
from sigmasolver.ops.fused.reductions import column_sums, sum_partials
from sigmasolver.ops.fused.tuning import tile_size
from sigmasolver.ops.fused.weight_cache import cast_weight
from sigmasolver.ops.side_streams import on_side_stream

__all__ = ["linear", "map_gradients", "product"]


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b, accumulated and returned in float32 even for low-precision factors."""
    if a.dtype == torch.float32 or not a.is_cuda:
        return (a @ b).float()
    return torch.mm(a, b, out_dtype=torch.float32)


@jit
def _map_gradients(
    dy: tl.tensor, x: tl.tensor, sums: tl.tensor,
    points: tl.tensor, row_stride: tl.tensor, CHANNELS_IN: tl.constexpr, CHANNELS_OUT: tl.constexpr,
    TILE_POINTS: tl.constexpr, TILE_CHANNELS_IN: tl.constexpr, TILE_CHANNELS_OUT: tl.constexpr, CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """A row of `sums`: dW (O, C) = dy^T x, then db (O,), over one chunk of points.

    x (N, C); dy (N, O) with row stride `row_stride`.
    """
    chunk, o, c = tl.program_id(0), tl.arange(0, TILE_CHANNELS_OUT), tl.arange(0, TILE_CHANNELS_IN)
    ones = tl.full((TILE_POINTS, 16), 1.0, dy.dtype.element_ty)  # the smallest tile of a matrix unit
    acc_W = tl.zeros((TILE_CHANNELS_OUT, TILE_CHANNELS_IN), tl.float32)
    acc_b = tl.zeros((TILE_CHANNELS_OUT, 16), tl.float32)
    for start in range(0, CHUNK, TILE_POINTS):
        n = chunk * CHUNK + start + tl.arange(0, TILE_POINTS)
        row = n.to(tl.int64)[:, None]
        keep = (n[:, None] < points) & (o[None, :] < CHANNELS_OUT)
        g = tl.load(dy + row * row_stride + o[None, :], mask=keep, other=0.0)
        keep = (n[:, None] < points) & (c[None, :] < CHANNELS_IN)
        v = tl.load(x + row * CHANNELS_IN + c[None, :], mask=keep, other=0.0)
        acc_W = tl.dot(tl.trans(g), v, acc_W, input_precision=PRECISION)
        acc_b = tl.dot(tl.trans(g), ones, acc_b, input_precision=PRECISION)
    sums += chunk.to(tl.int64) * CHANNELS_OUT * (CHANNELS_IN + 1)
    weight_mask = (o[:, None] < CHANNELS_OUT) & (c[None, :] < CHANNELS_IN)
    tl.store(sums + o[:, None] * CHANNELS_IN + c[None, :], acc_W, mask=weight_mask)
    # The sixteen columns are equal.
    tl.store(sums + CHANNELS_OUT * CHANNELS_IN + o, tl.max(acc_b, axis=1), mask=o < CHANNELS_OUT)


def map_gradients(dy: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """dW (O, C) and db (O,) in float32 from dy (N, O), whose rows may be strided, and x (N, C)."""
    (points, channels_out), channels_in = dy.shape, x.shape[1]
    width = "width", max(channels_out, channels_in), tuning.MAX_LINEAR_CHANNELS
    size = "bytes of a number", dy.element_size(), tuning.MAX_LINEAR_BYTES
    if not prefers("linear backward", "one kernel", "cuBLAS", exceeded((width, size))):
        dy = dy.contiguous()
        return product(dy.T, x), column_sums(dy)
    tile_points, programs = tuning.LINEAR_POINTS, tuning.LINEAR_PROGRAMS * multiprocessors(x)
    chunk = triton.cdiv(points, programs * tile_points) * tile_points
    chunks = triton.cdiv(points, chunk)
    sums = torch.empty(chunks, channels_out * (channels_in + 1), device=x.device, dtype=torch.float32)
    tile_out, tile_in = tile_size(channels_out), tile_size(channels_in)
    small = tile_out * tile_in <= tuning.SMALL_MAP
    warps, stages = tuning.SMALL_MAP_LAUNCH if small else tuning.LARGE_MAP_LAUNCH
    _map_gradients[(chunks,)](
        dy, x.contiguous(), sums, points, dy.stride(0), CHANNELS_IN=channels_in, CHANNELS_OUT=channels_out,
        TILE_POINTS=tile_points, TILE_CHANNELS_IN=tile_in, TILE_CHANNELS_OUT=tile_out, CHUNK=chunk,
        PRECISION=dot_precision(), num_warps=warps, num_stages=stages,
    )  # fmt: skip
    dW, db = sum_partials(sums).split((channels_out * channels_in, channels_out))
    return dW.view(channels_out, channels_in), db


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        cast = cast_weight(weight, x.dtype)
        ctx.save_for_backward(x, cast)
        ctx.dtypes = weight.dtype, bias.dtype
        return F.linear(x, cast, cast_weight(bias, x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        dy = dy.contiguous()

        def weight_gradients() -> list[torch.Tensor]:
            return [gradient.to(dtype) for gradient, dtype in zip(map_gradients(dy, x), ctx.dtypes, strict=True)]

        dparameters = on_side_stream(weight_gradients, dy, x)
        return dy @ weight if ctx.needs_input_grad[0] else None, *dparameters


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """`torch.nn.functional.linear`, in autocast's dtype."""
    x = cast_for_products(x)
    with torch.autocast(x.device.type, enabled=False):
        return _Linear.apply(x.reshape(-1, x.shape[-1]), weight, bias).view(*x.shape[:-1], -1)
