"""Operations on the channels of every point: layer normalisation, SiLU(gate) * up, sums over points.

    y = (x - mean) / sqrt(var + eps) * w + b       dx = r (g - mean(g) - xhat mean(g xhat)),  g = w dy,  r = 1/sqrt(.)
    a = silu(gate) * up         dgate = dy up s (1 + gate (1 - s)),  dup = dy gate s,  s = sigmoid(gate)

Rows may lie apart (a half of the channels of a wider tensor). Statistics and sums are float32; sums over points are
made in chunks, then over chunks in a fixed order.

Letters: N rows, C channels; BN and BC tile sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from sigmasolver.ops.fused import product_dtype, rows_of
from sigmasolver.ops.fused.reductions import sum_partials
from sigmasolver.ops.side_streams import on_side_stream

__all__ = ["layer_norm", "norms_backward"]

CHUNK, PROGRAMS, TILE = 512, 4096, 512
"""Rows of a chunk at most; programs there should be at least; elements of a tile, of one warp."""


@triton.jit
def _norm_forward(  # type: ignore[no-untyped-def]
    x, w, b, y, mean, scale, N, apart, eps: tl.constexpr, C: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr
):
    n, c = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BC)
    keep = (n[:, None] < N) & (c[None, :] < C)
    place = n.to(tl.int64)[:, None]
    v = tl.load(x + place * apart + c[None, :], mask=keep, other=0.0).to(tl.float32)
    m = tl.sum(v, axis=1) / C
    centred = tl.where(keep, v - m[:, None], 0.0)
    r = tl.rsqrt(tl.sum(centred * centred, axis=1) / C + eps)
    weight = tl.load(w + c, mask=c < C, other=0.0)
    bias = tl.load(b + c, mask=c < C, other=0.0)
    out = centred * r[:, None] * weight[None, :] + bias[None, :]
    tl.store(y + place * C + c[None, :], out.to(y.dtype.element_ty), mask=keep)
    tl.store(mean + n, m, mask=n < N)
    tl.store(scale + n, r, mask=n < N)


@triton.jit
def _norm_backward(  # type: ignore[no-untyped-def]
    x, w0, w1, g0, g1, mean, scale, more, dx, sums, N, apart,
    C: tl.constexpr, MORE: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Of one group of C channels; `more` is a gradient that is added. A row of `sums`: for each group dw, db."""
    chunk, group, c = tl.program_id(0), tl.program_id(1), tl.arange(0, BC)
    groups = tl.num_programs(1)
    channels = c < C
    if group == 0:
        weight = tl.load(w0 + c, mask=channels, other=0.0).to(tl.float32)
    else:
        weight = tl.load(w1 + c, mask=channels, other=0.0).to(tl.float32)
    sum_w = tl.zeros((BN, BC), tl.float32)
    sum_b = tl.zeros((BN, BC), tl.float32)
    for start in range(0, SPAN, BN):
        n = chunk * SPAN + start + tl.arange(0, BN)
        keep = (n[:, None] < N) & channels[None, :]
        place = n.to(tl.int64)[:, None]
        v = tl.load(x + place * apart + group * C + c[None, :], mask=keep, other=0.0).to(tl.float32)
        if group == 0:
            dy = tl.load(g0 + place * C + c[None, :], mask=keep, other=0.0).to(tl.float32)
        else:
            dy = tl.load(g1 + place * C + c[None, :], mask=keep, other=0.0).to(tl.float32)
        m = tl.load(mean + group * N + n, mask=n < N, other=0.0)
        r = tl.load(scale + group * N + n, mask=n < N, other=0.0)
        hat = tl.where(keep, (v - m[:, None]) * r[:, None], 0.0)
        inner = dy * weight[None, :]
        first = tl.sum(inner, axis=1) / C
        second = tl.sum(inner * hat, axis=1) / C
        out = (inner - first[:, None] - hat * second[:, None]) * r[:, None]
        to = place * (groups * C) + group * C + c[None, :]
        if MORE:
            out += tl.load(more + to, mask=keep, other=0.0).to(tl.float32)
        tl.store(dx + to, out.to(dx.dtype.element_ty), mask=keep)
        sum_w += dy * hat
        sum_b += dy
    sums += (chunk * groups + group) * 2 * C
    tl.store(sums + c, tl.sum(sum_w, axis=0), mask=channels)
    tl.store(sums + C + c, tl.sum(sum_b, axis=0), mask=channels)


def _row_tile(C: int) -> dict[str, int]:
    block = triton.next_power_of_2(C)
    return {"BN": max(1, min(32, TILE // block)), "BC": block, "num_warps": 1}


def norms_backward(
    x_NC: torch.Tensor,
    gradients: Sequence[torch.Tensor],
    statistics: torch.Tensor,
    weights: Sequence[torch.Tensor],
    more: torch.Tensor | None,
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """The gradient of the rows of `x`, whose equal groups of channels were normed, plus `more`; then dw, db of each, in
    the type of its weight.

    `statistics` (2, groups, N): mean and 1 / deviation.
    """
    groups, N = statistics.shape[1:]
    C = x_NC.shape[-1] // groups
    tile = _row_tile(C)
    span = triton.cdiv(max(1, min(CHUNK, N * groups // PROGRAMS)), tile["BN"]) * tile["BN"]
    chunks = triton.cdiv(N, span)
    dx = torch.empty(x_NC.shape, device=x_NC.device, dtype=x_NC.dtype)
    sums = torch.empty(chunks, groups * 2 * C, device=x_NC.device, dtype=torch.float32)
    given = [one.contiguous() for one in gradients]
    _norm_backward[(chunks, groups)](
        x_NC, weights[0], weights[-1], given[0], given[-1], *statistics, dx if more is None else more, dx, sums, N,
        x_NC.stride(-2), C=C, MORE=more is not None, SPAN=span, **tile,
    )  # fmt: skip
    kinds = [one.dtype for one in weights[:groups] for _ in range(2)]
    found = on_side_stream(
        lambda: [one.to(kind) for one, kind in zip(sum_partials(sums).split(C), kinds, strict=True)], sums
    )
    return dx, tuple(found)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, eps: float, dtype: torch.dtype
    ) -> torch.Tensor:
        N, C = x.shape
        y = torch.empty(N, C, device=x.device, dtype=dtype)
        statistics = torch.empty(2, 1, N, device=x.device, dtype=torch.float32)
        tile = _row_tile(C)
        _norm_forward[(triton.cdiv(N, tile["BN"]),)](x, w, b, y, *statistics, N, x.stride(0), eps, C=C, **tile)
        ctx.save_for_backward(x, w, statistics)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        x, w, statistics = ctx.saved_tensors
        dx, (dw, db) = norms_backward(x, [g], statistics, [w], None)
        return dx, dw, db, None, None


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """Over the last axis of `x`, whose rows may lie apart; under autocast the result is narrow at once."""
    return _Norm.apply(rows_of(x), weight, bias, eps, product_dtype(x, x.dtype)).view(x.shape)
