"""Affine maps of the channels, y = x W^T + b, and the gradients of their weights, sums over many points:

    dW = dy^T x      db = sum over points of dy

Of narrow numbers and up to CHANNELS channels one pass over dy and x makes both, in chunks of points that are summed in
a fixed order; the library's product would leave the bias to a pass of its own.

Letters: N points, C and O channels in and out; BN, BC, BO tile sizes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from sigmasolver.ops.fused import dot_precision, product_dtype
from sigmasolver.ops.fused.reductions import column_sums, sum_partials
from sigmasolver.ops.fused.tuning import tile_size
from sigmasolver.ops.fused.weight_cache import cast_weight
from sigmasolver.ops.side_streams import on_side_stream

__all__ = ["linear", "map_gradients", "product"]

CHANNELS, BYTES = 128, 2
"""Up to which a program holds the sums of a whole map, and bytes of a number up to which it is quicker so."""
TILE, PROGRAMS = 64, 264
"""Points of a tile; programs there should be at most."""


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b, summed and given in float32 also where the factors are narrow."""
    if a.dtype == torch.float32 or not a.is_cuda:
        return (a @ b).float()
    return torch.mm(a, b, out_dtype=torch.float32)


@triton.jit
def _map_gradients(  # type: ignore[no-untyped-def]
    dy, x, sums, N, apart, C: tl.constexpr, O: tl.constexpr,
    BN: tl.constexpr, BC: tl.constexpr, BO: tl.constexpr, SPAN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A row of `sums`: (O, C), then (O,), of one chunk of points. Rows of dy lie `apart`."""
    chunk, o, c = tl.program_id(0), tl.arange(0, BO), tl.arange(0, BC)
    ones = tl.full((BN, 16), 1.0, dy.dtype.element_ty)  # what a matrix unit takes at least
    weights, biases = tl.zeros((BO, BC), tl.float32), tl.zeros((BO, 16), tl.float32)
    for start in range(0, SPAN, BN):
        n = chunk * SPAN + start + tl.arange(0, BN)
        row = n.to(tl.int64)[:, None]
        g = tl.load(dy + row * apart + o[None, :], mask=(n[:, None] < N) & (o[None, :] < O), other=0.0)
        v = tl.load(x + row * C + c[None, :], mask=(n[:, None] < N) & (c[None, :] < C), other=0.0)
        weights = tl.dot(tl.trans(g), v, weights, input_precision=PRECISION)
        biases = tl.dot(tl.trans(g), ones, biases, input_precision=PRECISION)
    sums += chunk.to(tl.int64) * O * (C + 1)
    tl.store(sums + o[:, None] * C + c[None, :], weights, mask=(o[:, None] < O) & (c[None, :] < C))
    tl.store(sums + O * C + o, tl.max(biases, axis=1), mask=o < O)  # sixteen times the same


def map_gradients(dy: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """dW (O, C) and db (O,) in float32, of dy (N, O), whose rows may lie apart, and x (N, C)."""
    (N, O), C = dy.shape, x.shape[1]
    if max(O, C) > CHANNELS or dy.element_size() > BYTES:
        dy = dy.contiguous()
        return product(dy.T, x), column_sums(dy)
    span = triton.cdiv(N, PROGRAMS * TILE) * TILE
    chunks = triton.cdiv(N, span)
    sums = torch.empty(chunks, O * (C + 1), device=x.device, dtype=torch.float32)
    BO, BC = tile_size(O), tile_size(C)
    warps, stages = (4, 4) if BO * BC <= 64 * 64 else (8, 3)
    _map_gradients[(chunks,)](
        dy, x.contiguous(), sums, N, dy.stride(0), C=C, O=O, BN=TILE, BC=BC, BO=BO, SPAN=span,
        PRECISION=dot_precision(), num_warps=warps, num_stages=stages,
    )  # fmt: skip
    dW, db = sum_partials(sums).split((O * C, O))
    return dW.view(O, C), db


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        narrow = cast_weight(weight, x.dtype)
        ctx.save_for_backward(x, narrow)
        ctx.kinds = weight.dtype, bias.dtype
        return F.linear(x, narrow, cast_weight(bias, x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        dy = dy.contiguous()

        def maps() -> list[torch.Tensor]:
            return [one.to(kind) for one, kind in zip(map_gradients(dy, x), ctx.kinds, strict=True)]

        found = on_side_stream(maps, dy, x)
        return dy @ weight if ctx.needs_input_grad[0] else None, *found


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """`torch.nn.functional.linear`; under autocast in the narrow type."""
    x = x.to(product_dtype(x, x.dtype))
    with torch.autocast(x.device.type, enabled=False):
        return _Linear.apply(x.reshape(-1, x.shape[-1]), weight, bias).view(*x.shape[:-1], -1)
