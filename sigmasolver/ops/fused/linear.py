"""Affine maps of the channels, y = x W^T + b, and the gradients of their weights, sums over many points:

    dW = dy^T x      db = sum over points of dy

In low precision and up to LINEAR_CHANNELS channels one pass over dy and x makes both, in chunks of points that are
summed in a fixed order; cuBLAS would leave the bias to a pass of its own.

Letters: N points, C and O channels in and out.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from sigmasolver.ops.fused import dot_precision, multiprocessors, product_dtype, tuning
from sigmasolver.ops.fused.reductions import column_sums, sum_partials
from sigmasolver.ops.fused.tuning import tile_size
from sigmasolver.ops.fused.weight_cache import cast_weight
from sigmasolver.ops.side_streams import on_side_stream

__all__ = ["linear", "map_gradients", "product"]


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b, summed and given in float32 also where the factors are of low precision."""
    if a.dtype == torch.float32 or not a.is_cuda:
        return (a @ b).float()
    return torch.mm(a, b, out_dtype=torch.float32)


@triton.jit
def _map_gradients(
    dy: tl.tensor, x: tl.tensor, sums: tl.tensor,
    N: tl.tensor, row_stride: tl.tensor, C: tl.constexpr, O: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS_IN: tl.constexpr, COLUMNS_OUT: tl.constexpr, CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """A row of `sums`: dW (O, C) = dy^T x, then db (O,), of one chunk of points.

    x (N, C); dy (N, O), whose rows lie `row_stride` apart.
    """
    chunk, o, c = tl.program_id(0), tl.arange(0, COLUMNS_OUT), tl.arange(0, COLUMNS_IN)
    ones = tl.full((ROWS, 16), 1.0, dy.dtype.element_ty)  # what a matrix unit takes at least
    weights, biases = tl.zeros((COLUMNS_OUT, COLUMNS_IN), tl.float32), tl.zeros((COLUMNS_OUT, 16), tl.float32)
    for start in range(0, CHUNK, ROWS):
        n = chunk * CHUNK + start + tl.arange(0, ROWS)
        row = n.to(tl.int64)[:, None]
        g = tl.load(dy + row * row_stride + o[None, :], mask=(n[:, None] < N) & (o[None, :] < O), other=0.0)
        v = tl.load(x + row * C + c[None, :], mask=(n[:, None] < N) & (c[None, :] < C), other=0.0)
        weights = tl.dot(tl.trans(g), v, weights, input_precision=PRECISION)
        biases = tl.dot(tl.trans(g), ones, biases, input_precision=PRECISION)
    sums += chunk.to(tl.int64) * O * (C + 1)
    tl.store(sums + o[:, None] * C + c[None, :], weights, mask=(o[:, None] < O) & (c[None, :] < C))
    tl.store(sums + O * C + o, tl.max(biases, axis=1), mask=o < O)  # sixteen times the same


def map_gradients(dy: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """dW (O, C) and db (O,) in float32, of dy (N, O), whose rows may lie apart, and x (N, C)."""
    (N, O), C = dy.shape, x.shape[1]
    if max(O, C) > tuning.LINEAR_CHANNELS or dy.element_size() > tuning.LINEAR_BYTES:
        dy = dy.contiguous()
        return product(dy.T, x), column_sums(dy)
    ROWS, programs = tuning.LINEAR_POINTS, tuning.LINEAR_PROGRAMS * multiprocessors(x)
    chunk = triton.cdiv(N, programs * ROWS) * ROWS
    chunks = triton.cdiv(N, chunk)
    sums = torch.empty(chunks, O * (C + 1), device=x.device, dtype=torch.float32)
    columns_out, columns_in = tile_size(O), tile_size(C)
    small = columns_out * columns_in <= tuning.SMALL_MAP
    warps, stages = tuning.SMALL_MAP_STAGES if small else tuning.LARGE_MAP_STAGES
    _map_gradients[(chunks,)](
        dy, x.contiguous(), sums, N, dy.stride(0), C=C, O=O, ROWS=ROWS, COLUMNS_IN=columns_in,
        COLUMNS_OUT=columns_out, CHUNK=chunk, PRECISION=dot_precision(), num_warps=warps, num_stages=stages,
    )  # fmt: skip
    dW, db = sum_partials(sums).split((O * C, O))
    return dW.view(O, C), db


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        cast = cast_weight(weight, x.dtype)
        ctx.save_for_backward(x, cast)
        ctx.types = weight.dtype, bias.dtype
        return F.linear(x, cast, cast_weight(bias, x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        dy = dy.contiguous()

        def weight_gradients() -> list[torch.Tensor]:
            return [one.to(dtype) for one, dtype in zip(map_gradients(dy, x), ctx.types, strict=True)]

        found = on_side_stream(weight_gradients, dy, x)
        return dy @ weight if ctx.needs_input_grad[0] else None, *found


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """`torch.nn.functional.linear`; in autocast's type."""
    x = x.to(product_dtype(x, x.dtype))
    with torch.autocast(x.device.type, enabled=False):
        return _Linear.apply(x.reshape(-1, x.shape[-1]), weight, bias).view(*x.shape[:-1], -1)
