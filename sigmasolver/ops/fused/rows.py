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

from sigmasolver.ops.fused.lanes import aside

__all__ = [
    "added",
    "column_sums",
    "folded",
    "layer_norm",
    "norms_backward",
    "put",
    "rows_of",
    "silu_product",
    "stream_at",
    "stream_to",
]

CHUNK, PROGRAMS, TILE = 512, 4096, 512
"""Rows of a chunk at most; programs there should be at least; elements of a tile, of one warp."""


@triton.jit
def put(several, i: tl.constexpr, new):  # type: ignore[no-untyped-def]
    """Several tensors, with `new` in the place of the i-th."""
    return several[:i] + (new,) + several[i + 1 :]  # noqa: RUF005, Triton knows no stars


@triton.jit
def added(sums, i: tl.constexpr, more):  # type: ignore[no-untyped-def]
    """Several sums, with `more` added to the i-th."""
    return put(sums, i, sums[i] + more)


@triton.jit
def stream_at(main, rest, place, keep, SPLIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Numbers of a stream in float32 (`ops.stream`); not SPLIT: `main` is all of it."""
    x = tl.load(main + place, mask=keep, other=0.0).to(tl.float32)
    if SPLIT:
        x += tl.load(rest + place, mask=keep, other=0.0).to(tl.float32)
    return x


@triton.jit
def stream_to(main, rest, place, x, keep, SPLIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """The way back. SPLIT: `main` is bf16, the upper half of a float32."""
    if SPLIT:
        # Rounded by whole numbers: to convert there and back again would take four times as long.
        near = ((x.to(tl.int32, bitcast=True) + 0x8000) & -0x10000).to(tl.float32, bitcast=True)
        # The rest first: x need not be held then, twenty registers in `mixing._whole`.
        tl.store(rest + place, (x - near).to(rest.dtype.element_ty), mask=keep)
        tl.store(main + place, near.to(main.dtype.element_ty), mask=keep)
    else:
        tl.store(main + place, x.to(main.dtype.element_ty), mask=keep)


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


@triton.jit
def _silu_forward(x, y, N, F: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr):  # type: ignore[no-untyped-def]
    n, c = tl.program_id(0) * BN + tl.arange(0, BN), tl.program_id(1) * BC + tl.arange(0, BC)
    keep = (n[:, None] < N) & (c[None, :] < F)
    place = n.to(tl.int64)[:, None]
    gate = tl.load(x + place * 2 * F + c[None, :], mask=keep, other=0.0).to(tl.float32)
    up = tl.load(x + place * 2 * F + F + c[None, :], mask=keep, other=0.0).to(tl.float32)
    out = gate / (1 + tl.exp(-gate)) * up
    tl.store(y + place * F + c[None, :], out.to(y.dtype.element_ty), mask=keep)


@triton.jit
def _silu_backward(x, g, dx, N, F: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr):  # type: ignore[no-untyped-def]
    n, c = tl.program_id(0) * BN + tl.arange(0, BN), tl.program_id(1) * BC + tl.arange(0, BC)
    keep = (n[:, None] < N) & (c[None, :] < F)
    place = n.to(tl.int64)[:, None]
    gate = tl.load(x + place * 2 * F + c[None, :], mask=keep, other=0.0).to(tl.float32)
    up = tl.load(x + place * 2 * F + F + c[None, :], mask=keep, other=0.0).to(tl.float32)
    dy = tl.load(g + place * F + c[None, :], mask=keep, other=0.0).to(tl.float32)
    s = 1 / (1 + tl.exp(-gate))
    dgate, dup = dy * up * s * (1 + gate * (1 - s)), dy * gate * s
    tl.store(dx + place * 2 * F + c[None, :], dgate.to(dx.dtype.element_ty), mask=keep)
    tl.store(dx + place * 2 * F + F + c[None, :], dup.to(dx.dtype.element_ty), mask=keep)


@triton.jit
def _column_sums(x, s, N, C, BN: tl.constexpr, BC: tl.constexpr, SPAN: tl.constexpr):  # type: ignore[no-untyped-def]
    chunk, c = tl.program_id(0), tl.program_id(1) * BC + tl.arange(0, BC)
    total = tl.zeros((BN, BC), tl.float32)
    for start in range(0, SPAN, BN):
        n = chunk * SPAN + start + tl.arange(0, BN)
        keep = (n[:, None] < N) & (c[None, :] < C)
        total += tl.load(x + n.to(tl.int64)[:, None] * C + c[None, :], mask=keep, other=0.0).to(tl.float32)
    tl.store(s + chunk * C + c, tl.sum(total, axis=0), mask=c < C)


@triton.jit
def _fold(x, y, N, S, BN: tl.constexpr, BS: tl.constexpr):  # type: ignore[no-untyped-def]
    s = tl.program_id(0) * BS + tl.arange(0, BS)
    total = tl.zeros((BN, BS), tl.float32)
    for start in range(0, N, BN):
        n = start + tl.arange(0, BN)
        keep = (n[:, None] < N) & (s[None, :] < S)
        total += tl.load(x + n.to(tl.int64)[:, None] * S + s[None, :], mask=keep, other=0.0)
    tl.store(y + s, tl.sum(total, axis=0), mask=s < S)


def folded(parts: torch.Tensor) -> torch.Tensor:
    """The sum over the first axis of contiguous float32 partial sums, few rows as a rule, always in the same order."""
    N, S = len(parts), parts[0].numel()
    out = torch.empty(parts.shape[1:], device=parts.device, dtype=torch.float32)
    BS = 8 if S <= 1024 else 32  # narrow tiles, so that there are programs enough
    _fold[(triton.cdiv(S, BS),)](parts, out, N, S, BN=2048 // BS, BS=BS)
    return out


def column_sums(x_NC: torch.Tensor) -> torch.Tensor:
    """(C,) in float32: the sum of the rows, always in the same order."""
    N, C = x_NC.shape
    span, block = 128, min(128, triton.next_power_of_2(C))
    chunks = triton.cdiv(N, span)
    sums = torch.empty(chunks, C, device=x_NC.device, dtype=torch.float32)
    _column_sums[(chunks, triton.cdiv(C, block))](x_NC, sums, N, C, BN=32, BC=block, SPAN=span)
    return folded(sums)


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
    found = aside(lambda: [one.to(kind) for one, kind in zip(folded(sums).split(C), kinds, strict=True)], sums)
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


class _SiluProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        N, F = x.shape[0], x.shape[1] // 2
        y = torch.empty(N, F, device=x.device, dtype=x.dtype)
        _silu_forward[(triton.cdiv(N, 16), triton.cdiv(F, 128))](x, y, N, F=F, BN=16, BC=128)
        ctx.save_for_backward(x)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        N, F = x.shape[0], x.shape[1] // 2
        dx = torch.empty_like(x)
        _silu_backward[(triton.cdiv(N, 16), triton.cdiv(F, 128))](x, g.contiguous(), dx, N, F=F, BN=16, BC=128)
        return dx


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """Over the last axis of `x`, whose rows may lie apart; under autocast the result is narrow at once."""
    narrow = torch.is_autocast_enabled(x.device.type)
    dtype = torch.get_autocast_dtype(x.device.type) if narrow else x.dtype
    return _Norm.apply(rows_of(x), weight, bias, eps, dtype).view(x.shape)


def silu_product(x: torch.Tensor) -> torch.Tensor:
    """SiLU(first half) * second half of the last axis."""
    return _SiluProduct.apply(x.contiguous().flatten(0, -2)).view(*x.shape[:-1], -1)


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """(N, C) without a copy where the rows are evenly apart, as those of a half of the channels are."""
    whole = x.shape[-1]
    if x.is_contiguous():
        return x.view(-1, whole)  # as_strided would be gone back by a copy
    apart = x.stride(-2)
    even = x.stride(-1) == 1
    expected = apart
    for size, stride in zip(reversed(x.shape[:-1]), reversed(x.stride()[:-1]), strict=True):
        even = even and stride == expected
        expected *= size
    if not even:
        return x.contiguous().view(-1, whole)
    return x.as_strided((x[..., 0].numel(), whole), (apart, 1))
