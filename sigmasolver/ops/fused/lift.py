"""The lift of a solver, with everything that lies between its two products.

    pre = positions Wp^T      h = pre + x Wx^T + b1      g = GELU(h)      H = g W2^T + b2 + offset

Positions belong to the grid: `pre` is made once, not for every sample. One kernel does the rest of the forward pass, so
that the inner channels never pass through memory. The backward pass makes h again and stores

    g      dh = (dH W2) GELU'(h),   GELU(h) = h cdf(h),   GELU'(h) = cdf(h) + h exp(-h^2 / 2) / sqrt(2 pi)

for the library's products. Samples are summed before positions meet them: dWp = (sum over samples of dh)^T positions.

Letters: N points of all samples, G of the grid, Q fields, I inner width, C channels; BN, BQ, BF, BC tile sizes.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from sigmasolver.ops.fused import dot_precision, product_dtype, shared_memory
from sigmasolver.ops.fused.linear import product
from sigmasolver.ops.fused.reductions import column_sums
from sigmasolver.ops.fused.stream import store_stream
from sigmasolver.ops.fused.tuning import tile_size
from sigmasolver.ops.fused.weight_cache import WeightLayout, cast_weight
from sigmasolver.ops.modules import Affine
from sigmasolver.ops.side_streams import on_side_stream
from sigmasolver.ops.stream import LOW_PRECISION, Residual, stream_of

__all__ = ["lift"]

PROGRAMS = 396
"""That the backward pass is cut into, where there are points enough."""
FORWARD, BACKWARD = {2: (64, 32, 4, 2), 4: (32, 32, 4, 2)}, {2: (64, 64, 8, 2), 4: (32, 32, 4, 2)}
"""Points and inner channels of a tile, warps, and stages of the pipeline, by the bytes of a number."""
THIN, ROOM = (32, 16, 4, 2), 108_544
"""The same backward for four bytes and more than 128 channels where a program has less shared memory, in bytes."""


@triton.jit
def _fields(x, n, N, Q: tl.constexpr, BQ: tl.constexpr):  # type: ignore[no-untyped-def]
    """One tile of x as it is stored."""
    q = tl.arange(0, BQ)
    keep = (n[:, None] < N) & (q[None, :] < Q)
    return tl.load(x + n.to(tl.int64)[:, None] * Q + q[None, :], mask=keep, other=0.0)


@triton.jit
def _normal(h):  # type: ignore[no-untyped-def]
    """The distribution function of the normal distribution, to 1e-7, and its density times sqrt(2 pi).

    A rational function of Abramowitz and Stegun (7.1.26), an exponential and a division; the library's error function
    takes several times as long.
    """
    density = tl.exp2(h * h * (-0.5 * 1.4426950408889634))
    root = tl.rsqrt(1 + 0.3275911 * 0.7071067811865476 * tl.abs(h))  # cheaper than a division
    t = root * root
    tail = ((((1.061405429 * t - 1.453152027) * t + 1.421413741) * t - 0.284496736) * t + 0.254829592) * t
    tail *= 0.5 * density
    return tl.where(h < 0, tail, 1 - tail), density


@triton.jit
def _inner(  # type: ignore[no-untyped-def]
    fields, wx, pre, b, n, f, N, G, I: tl.constexpr, PRECISION: tl.constexpr
):
    """h; wx (BQ, BF)."""
    keep = (n[:, None] < N) & (f[None, :] < I)
    h = tl.dot(fields, wx, input_precision=PRECISION)
    h += tl.load(pre + (n % G).to(tl.int64)[:, None] * I + f[None, :], mask=keep, other=0.0)
    h += tl.load(b + f, mask=f < I, other=0.0).to(tl.float32)[None, :]
    return h


@triton.jit
def _lift_forward(  # type: ignore[no-untyped-def]
    x, pre, wx, b1, w2, b2, offset, out, rest, N, G,
    Q: tl.constexpr, I: tl.constexpr, C: tl.constexpr, SPLIT: tl.constexpr,
    BN: tl.constexpr, BQ: tl.constexpr, BF: tl.constexpr, BC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """H of a tile of points. pre (G, I) in float32, wx (I, BQ), w2 (C, I)."""
    n, c, q = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BC), tl.arange(0, BQ)
    fields = _fields(x, n, N, Q, BQ).to(wx.dtype.element_ty)
    total = tl.zeros((BN, BC), tl.float32)
    for start in range(0, I, BF):
        f = start + tl.arange(0, BF)
        into = tl.load(wx + f[:, None] * BQ + q[None, :], mask=f[:, None] < I, other=0.0)
        h = _inner(fields, tl.trans(into), pre, b1, n, f, N, G, I, PRECISION)
        known = (c[:, None] < C) & (f[None, :] < I)
        outof = tl.load(w2 + c[:, None] * I + f[None, :], mask=known, other=0.0)
        total = tl.dot((h * _normal(h)[0]).to(outof.dtype), tl.trans(outof), total, input_precision=PRECISION)
    total += tl.load(b2 + c, mask=c < C, other=0.0).to(tl.float32)[None, :]
    total += tl.load(offset + c, mask=c < C, other=0.0).to(tl.float32)[None, :]
    keep = (n[:, None] < N) & (c[None, :] < C)
    store_stream(out, rest, n.to(tl.int64)[:, None] * C + c[None, :], total, keep, SPLIT)


@triton.jit
def _lift_backward(  # type: ignore[no-untyped-def]
    x, pre, wx, b1, w2, dH, g, dh, N, G,
    Q: tl.constexpr, I: tl.constexpr, C: tl.constexpr, BN: tl.constexpr, BQ: tl.constexpr, BF: tl.constexpr,
    BC: tl.constexpr, SPAN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """g and dh (N, I) of a chunk of points and a tile of inner channels, whose weights stay while points pass by."""
    chunk, f = tl.program_id(0), tl.program_id(1) * BF + tl.arange(0, BF)
    c, q = tl.arange(0, BC), tl.arange(0, BQ)
    into = tl.trans(tl.load(wx + f[:, None] * BQ + q[None, :], mask=f[:, None] < I, other=0.0))
    known = (c[:, None] < C) & (f[None, :] < I)
    outof = tl.load(w2 + c[:, None] * I + f[None, :], mask=known, other=0.0)
    for start in range(0, SPAN, BN):
        n = chunk * SPAN + start + tl.arange(0, BN)
        row = n.to(tl.int64)[:, None]
        fields = _fields(x, n, N, Q, BQ).to(wx.dtype.element_ty)
        h = _inner(fields, into, pre, b1, n, f, N, G, I, PRECISION)
        cdf, density = _normal(h)
        given = tl.load(dH + row * C + c[None, :], mask=(n[:, None] < N) & (c[None, :] < C), other=0.0)
        d = tl.dot(given, outof, input_precision=PRECISION)
        d *= cdf + h * density * 0.3989422804014327
        keep = (n[:, None] < N) & (f[None, :] < I)
        tl.store(g + row * I + f[None, :], (h * cdf).to(g.dtype.element_ty), mask=keep)
        tl.store(dh + row * I + f[None, :], d.to(dh.dtype.element_ty), mask=keep)


def _padded(matrix: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Zeros for the columns that are missing."""
    rows, n = matrix.shape
    return WeightLayout((rows, tile_size(n)), (rows, n), (tile_size(n), 1), dtype).copy(matrix)


def _tile(tiles: dict[int, tuple[int, int, int, int]], x: torch.Tensor, w2: torch.Tensor) -> dict[str, Any]:
    (C, I), Q = w2.shape, x.shape[1]
    BN, BF, warps, stages = tiles[w2.element_size()]
    sizes = {"Q": Q, "I": I, "C": C, "BN": BN, "BQ": tile_size(Q), "BF": BF, "BC": tile_size(C)}
    return sizes | {"PRECISION": dot_precision(), "num_warps": warps, "num_stages": stages}


class _Lift(torch.autograd.Function):
    """The type of products, whether the stream is split, x (N, Q), positions (G, P), the two maps, the offset -> the
    stream and its rest."""

    @staticmethod
    def forward(
        ctx: Any, dtype: torch.dtype, split: bool, x: torch.Tensor, positions: torch.Tensor,
        w1: torch.Tensor, b1: torch.Tensor, w2: torch.Tensor, b2: torch.Tensor, offset: torch.Tensor,
    ) -> Any:  # fmt: skip
        N, (G, P), C = len(x), positions.shape, len(w2)
        pre = product(_padded(positions, dtype), _padded(w1[:, :P], dtype).T)
        wx, narrow = _padded(w1[:, P:], dtype), cast_weight(w2, dtype).contiguous()
        kind = LOW_PRECISION if split else torch.promote_types(dtype, offset.dtype)
        out = torch.empty(N, C, device=x.device, dtype=kind)
        rest, tile = torch.empty_like(out) if split else None, _tile(FORWARD, x, narrow)
        _lift_forward[(triton.cdiv(N, tile["BN"]),)](
            x, pre, wx, b1, narrow, b2, offset, out, out if rest is None else rest, N, G, SPLIT=split, **tile
        )
        ctx.set_materialize_grads(False)  # no zeros for the rest
        if rest is not None:
            ctx.mark_non_differentiable(rest)
        ctx.save_for_backward(x, positions, pre, wx, b1, narrow)
        ctx.kinds = [one.dtype for one in (w1, b1, w2, b2, offset)]
        return out, rest

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dH: torch.Tensor, _: None) -> Any:
        x, positions, pre, wx, b1, w2 = ctx.saved_tensors
        (N, Q), (G, I), dtype = x.shape, pre.shape, w2.dtype
        dH = dH.contiguous()
        narrow = dH.to(dtype)
        tight = len(w2) > 128 and shared_memory(x) < ROOM
        tile = _tile({**BACKWARD, 4: THIN} if tight else BACKWARD, x, w2)
        across = triton.cdiv(I, tile["BF"])
        span = triton.cdiv(N * across, PROGRAMS * tile["BN"]) * tile["BN"]
        g, dh = (torch.empty(N, I, device=x.device, dtype=dtype) for _ in range(2))
        _lift_backward[(triton.cdiv(N, span), across)](x, pre, wx, b1, w2, narrow, g, dh, N, G, SPAN=span, **tile)

        def first() -> list[torch.Tensor]:
            samples = dh.view(N // G, G, I).sum(0, dtype=torch.float32)
            with torch.autocast(x.device.type, enabled=False):  # not narrow: a sum over samples has bits to lose
                dwp = samples.T @ positions.float()
            dwx = product(dh.T, _padded(x, dtype))[:, :Q]
            found = torch.cat((dwp, dwx), dim=1), column_sums(samples)
            return [one.to(kind) for one, kind in zip(found, ctx.kinds[:2], strict=True)]

        def second() -> list[torch.Tensor]:
            ends = column_sums(dH)
            found = product(narrow.T, g), ends, ends.clone()
            return [one.to(kind) for one, kind in zip(found, ctx.kinds[2:], strict=True)]

        found = *on_side_stream(first, dh, x, positions), *on_side_stream(second, dH, narrow, g)
        dx = product(dh, wx)[:, :Q].to(x.dtype).contiguous() if ctx.needs_input_grad[2] else None
        return None, None, dx, None, *found


def lift(
    x: torch.Tensor, positions: torch.Tensor, first: Affine, second: Affine, offset: torch.Tensor, two_parts: bool
) -> Residual:
    """`ops.lift.lift` for positions without a gradient; products in autocast's type."""
    dtype = product_dtype(x, x.dtype)
    rows, points = (one.reshape(-1, one.shape[-1]).contiguous() for one in (x, positions))
    with torch.autocast(x.device.type, enabled=False):
        main, low = _Lift.apply(dtype, two_parts, rows, points, *first, *second, offset)
    shape = *x.shape[:-1], len(offset)
    return stream_of(main.view(shape), low if low is None else low.view(shape))
