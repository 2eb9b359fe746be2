"""The exit of a block: branches joined to the stream, layer norm, SwiGLU, residual.

    x = H + [s_1, s_2]      y = LN(x)      a = SiLU(y Wg^T + bg) * (y Wu^T + bu)      out = x + a Wd^T + bd

Only H, the branches and, of small streams, y are kept. Up to `gate.CHANNELS` channels one kernel does the whole forward
pass, so that nothing but the stream passes through memory, and one the way back to y; wider ones leave their products
to the library, with one kernel for all that lies between two of them. The backward pass makes gate and up again.

    dy, dgate, dup (`gate`)      dx = dout + LN'(dy)        ds_i = dx_i, a view of dx where it is of the same type

Inner channels are filled up to a multiple of ALIGNED with zeros: matrix units read whole multiples.

Letters: N points, C channels, F inner width, W the same filled up; BN, BC, BF tile sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from sigmasolver.ops.fused import dot_precision, product_dtype
from sigmasolver.ops.fused.linear import product
from sigmasolver.ops.fused.reductions import sum_partials
from sigmasolver.ops.fused.stream import load_stream, store_stream
from sigmasolver.ops.fused.swiglu import CHANNELS, EXTRA, gated, sigmoid, through_gate
from sigmasolver.ops.fused.tuning import ALIGNED, tile_size
from sigmasolver.ops.fused.weight_cache import WeightLayout, arrange
from sigmasolver.ops.modules import Affine
from sigmasolver.ops.side_streams import on_side_stream
from sigmasolver.ops.stream import Residual, split, stream_of

__all__ = ["add_mixing"]

PROGRAMS = 2048
"""That the backward pass is cut into at least, where there are points enough; each leaves one row of partial sums."""
KEPT = 10**8
"""Bytes of a stream from which on y is made again rather than kept: there memory is dearer than a pass."""
TILES = {2: (64, 32, 4, 2), 4: (32, 32, 4, 2)}
"""Points and inner channels of a tile, warps, and stages of the pipeline, by the bytes of a number."""
TILE, BACK = 2048, 512
"""Elements of a tile of the passes without products, of four warps, and of the backward pass, of one."""


@triton.jit
def _share(s0, s1, n, c, C: tl.constexpr, EVEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where channel c of row n lies in the first half or the second. EVEN: eight in a row lie together, aligned."""
    half: tl.constexpr = C // 2
    place = tl.where(c < half, s0, s1 - half) + n * half + c
    if EVEN:
        place = tl.multiple_of(tl.max_contiguous(place, [1, 8]), [1, 16])
    return place


@triton.jit
def _joined(  # type: ignore[no-untyped-def]
    H, rest, s0, s1, n, c, keep, C: tl.constexpr, SPLIT: tl.constexpr, PARTS: tl.constexpr, EVEN: tl.constexpr
):
    """One tile of x in float32; n and c as (BN, 1) and (1, BC)."""
    x = load_stream(H, rest, n * C + c, keep, SPLIT)
    if PARTS == 1:
        x += tl.load(s0 + n * C + c, mask=keep, other=0.0).to(tl.float32)
    if PARTS == 2:
        x += tl.load(_share(s0, s1, n, c, C, EVEN), mask=keep, other=0.0).to(tl.float32)
    return x


@triton.jit
def _normed(x, w, b, c, keep, eps: tl.constexpr, C: tl.constexpr):  # type: ignore[no-untyped-def]
    """Normalised rows, their scale, the weight, and y."""
    m = tl.sum(x, axis=1) / C
    hat = x - m[:, None]
    if x.shape[1] != C:
        hat = tl.where(keep, hat, 0.0)
    r = tl.rsqrt(tl.sum(hat * hat, axis=1) / C + eps)
    weight = tl.load(w + c, mask=c < C, other=0.0).to(tl.float32)
    bias = tl.load(b + c, mask=c < C, other=0.0).to(tl.float32)
    hat = hat * r[:, None]
    return hat, r, weight, hat * weight[None, :] + bias[None, :]


@triton.jit
def _keep(normed, y, n, c, keep, left, C: tl.constexpr):  # type: ignore[no-untyped-def]
    """y, and behind it what `gate` wants there."""
    tl.store(normed + n * (C + EXTRA) + c, y.to(normed.dtype.element_ty), mask=keep)
    e = tl.arange(0, EXTRA)[None, :]
    one = tl.where((e == 0) & (n < left), 1.0, 0.0).to(normed.dtype.element_ty)
    tl.store(normed + n * (C + EXTRA) + C + e, one, mask=(n < left) & (e < EXTRA))


@triton.jit
def _whole(  # type: ignore[no-untyped-def]
    H, rest, s0, s1, w, b, win, b_in, wout, bout, out, left_over, normed, N, eps: tl.constexpr,
    C: tl.constexpr, W: tl.constexpr, SPLIT: tl.constexpr, PARTS: tl.constexpr, EVEN: tl.constexpr, KEEP: tl.constexpr,
    BN: tl.constexpr, BC: tl.constexpr, BF: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The forward pass of a tile of points, with KEEP also y. win (2 W, C), b_in (2 W), wout (W, C)."""
    first = tl.program_id(0).to(tl.int64) * BN
    n, c = tl.arange(0, BN)[:, None], tl.arange(0, BC)
    left = N - tl.program_id(0) * BN
    keep = (n < left) & (c[None, :] < C)
    share: tl.constexpr = C // 2 if PARTS == 2 else C
    H, rest, s0, s1 = H + first * C, rest + first * C, s0 + first * share, s1 + first * share
    x = _joined(H, rest, s0, s1, n, c[None, :], keep, C, SPLIT, PARTS, EVEN)
    wide = _normed(x, w, b, c, keep, eps, C)[3]
    if KEEP:
        _keep(normed + first * (C + EXTRA), wide, n, c[None, :], keep, left, C)
    y = wide.to(win.dtype.element_ty)
    total = x + tl.load(bout + c, mask=c < C, other=0.0).to(tl.float32)[None, :]  # not later: x need not be held then
    for start in range(0, W, BF):
        f = start + tl.arange(0, BF)
        known = (f[:, None] < W) & (c[None, :] < C)
        place = f[:, None] * C + c[None, :]
        gate = tl.dot(y, tl.trans(tl.load(win + place, mask=known, other=0.0)), input_precision=PRECISION)
        up = tl.dot(y, tl.trans(tl.load(win + W * C + place, mask=known, other=0.0)), input_precision=PRECISION)
        gate += tl.load(b_in + f, mask=f < W, other=0.0)[None, :]
        up += tl.load(b_in + W + f, mask=f < W, other=0.0)[None, :]
        a = gate * up * sigmoid(gate)
        wd = tl.load(wout + place, mask=known, other=0.0)
        total = tl.dot(a.to(y.dtype), wd, total, input_precision=PRECISION)
    store_stream(out + first * C, left_over + first * C, n * C + c[None, :], total, keep, SPLIT)


@triton.jit
def _join_norm(  # type: ignore[no-untyped-def]
    H, rest, s0, s1, w, b, y, N, eps: tl.constexpr,
    C: tl.constexpr, SPLIT: tl.constexpr, PARTS: tl.constexpr, EVEN: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """y alone."""
    n, c = (tl.program_id(0) * BN + tl.arange(0, BN)).to(tl.int64)[:, None], tl.arange(0, BC)
    keep = (n < N) & (c[None, :] < C)
    x = _joined(H, rest, s0, s1, n, c[None, :], keep, C, SPLIT, PARTS, EVEN)
    _keep(y, _normed(x, w, b, c, keep, eps, C)[3], n, c[None, :], keep, N, C)


@triton.jit
def _join_add(  # type: ignore[no-untyped-def]
    H, rest, s0, s1, m, bias, out, left_over, N,
    C: tl.constexpr, SPLIT: tl.constexpr, PARTS: tl.constexpr, EVEN: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """x + m + bias."""
    n, c = (tl.program_id(0) * BN + tl.arange(0, BN)).to(tl.int64)[:, None], tl.arange(0, BC)
    keep = (n < N) & (c[None, :] < C)
    total = _joined(H, rest, s0, s1, n, c[None, :], keep, C, SPLIT, PARTS, EVEN)
    total += tl.load(m + n * C + c[None, :], mask=keep, other=0.0).to(tl.float32)
    total += tl.load(bias + c, mask=c < C, other=0.0).to(tl.float32)[None, :]
    store_stream(out, left_over, n * C + c[None, :], total, keep, SPLIT)


@triton.jit
def _join_backward(  # type: ignore[no-untyped-def]
    H, rest, s0, s1, w, b, dy, dout, dx, d0, d1, sums, N, eps: tl.constexpr,
    C: tl.constexpr, SPLIT: tl.constexpr, PARTS: tl.constexpr, EVEN: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr,
    COPY: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Through the norm to x and, with COPY, the branches. A row of `sums`: weight and bias of the norm, sum of dout."""
    first = tl.program_id(0).to(tl.int64) * SPAN
    c = tl.arange(0, BC)
    share: tl.constexpr = C // 2 if PARTS == 2 else C
    H, dy, dout, dx = H + first * C, dy + first * C, dout + first * C, dx + first * C
    s0, s1, d0, d1 = s0 + first * share, s1 + first * share, d0 + first * share, d1 + first * share
    sum_w = tl.zeros((BN, BC), tl.float32)
    sum_b = tl.zeros((BN, BC), tl.float32)
    sum_o = tl.zeros((BN, BC), tl.float32)
    for start in range(0, SPAN, BN):
        n = (start + tl.arange(0, BN))[:, None]
        keep = (n < N - tl.program_id(0) * SPAN) & (c[None, :] < C)
        place = n * C + c[None, :]
        x = _joined(H, rest, s0, s1, n, c[None, :], keep, C, SPLIT, PARTS, EVEN)
        hat, r, weight = _normed(x, w, b, c, keep, eps, C)[:3]
        g = tl.load(dy + place, mask=keep, other=0.0).to(tl.float32)
        more = tl.load(dout + place, mask=keep, other=0.0).to(tl.float32)
        sum_w += g * hat
        sum_b += g
        sum_o += more
        g = g * weight[None, :]
        mean, slope = tl.sum(g, axis=1) / C, tl.sum(g * hat, axis=1) / C
        total = (g - mean[:, None] - hat * slope[:, None]) * r[:, None] + more
        tl.store(dx + place, total.to(dx.dtype.element_ty), mask=keep)
        if COPY and PARTS == 1:
            tl.store(d0 + place, total.to(d0.dtype.element_ty), mask=keep)
        if COPY and PARTS == 2:
            tl.store(_share(d0, d1, n, c[None, :], C, EVEN), total.to(d0.dtype.element_ty), mask=keep)
    sums += tl.program_id(0) * 3 * C
    tl.store(sums + c, tl.sum(sum_w, axis=0), mask=c < C)
    tl.store(sums + C + c, tl.sum(sum_b, axis=0), mask=c < C)
    tl.store(sums + 2 * C + c, tl.sum(sum_o, axis=0), mask=c < C)


class _Steps:
    """The kernels above on one stream and its branches."""

    def __init__(
        self, H: torch.Tensor, rest: torch.Tensor | None, parts: Sequence[torch.Tensor], norm: Affine, eps: float
    ) -> None:
        self.H, self.norm, self.eps, self.split = H, norm, eps, rest is not None
        self.N, self.C = H.shape
        self.joined = (H, H if rest is None else rest, *(*parts, H, H)[:2])
        BC = tile_size(self.C)
        self.tile = {"C": self.C, "SPLIT": self.split, "PARTS": len(parts), "EVEN": self.C % 16 == 0}
        self.tile |= {"BN": max(1, TILE // BC), "BC": BC}
        self.blocks = (triton.cdiv(self.N, self.tile["BN"]),)

    def whole(
        self, win: torch.Tensor, b_in: torch.Tensor, wout: torch.Tensor, bout: torch.Tensor, keep: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """out, its rest where H has one, and y if it is to be kept."""
        BN, BF, warps, stages = TILES[win.element_size()]
        tile = self.tile | {"BN": BN, "BF": BF, "W": len(wout)}
        out, rest = self._ends()
        y = win.new_empty(self.N, self.C + EXTRA.value) if keep else None
        _whole[(triton.cdiv(self.N, tile["BN"]),)](
            *self.joined, *self.norm, win, b_in, wout, bout, out, out if rest is None else rest,
            out if y is None else y, self.N, self.eps, KEEP=keep, PRECISION=dot_precision(), **tile,
            num_warps=warps, num_stages=stages,
        )  # fmt: skip
        return out, rest, y

    def normed(self, dtype: torch.dtype) -> torch.Tensor:
        y = torch.empty(self.N, self.C + EXTRA.value, device=self.H.device, dtype=dtype)
        _join_norm[self.blocks](*self.joined, *self.norm, y, self.N, self.eps, **self.tile)
        return y

    def added(self, m: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """out, and its rest where H has one."""
        out, rest = self._ends()
        _join_add[self.blocks](*self.joined, m, bias, out, out if rest is None else rest, self.N, **self.tile)
        return out, rest

    def backward(
        self, dy: torch.Tensor, dout: torch.Tensor, parts: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
        """dx, those of the branches, and partial sums: dw and db of the norm, db of the way down."""
        dx = torch.empty_like(self.H)
        copy = any(part.dtype != dx.dtype for part in parts)
        shares = [dx.narrow(1, place * one.shape[1], one.shape[1]) for place, one in enumerate(parts)]
        dparts = [torch.empty_like(one) for one in parts] if copy else shares
        tile = self.tile | {"BN": max(1, BACK // self.tile["BC"])}
        span = tile["BN"] * max(1, min(16, self.N // (tile["BN"] * PROGRAMS)))
        chunks = triton.cdiv(self.N, span)
        sums = torch.empty(chunks, 3 * self.C, device=dx.device, dtype=torch.float32)
        _join_backward[(chunks,)](
            *self.joined, *self.norm, dy, dout, dx, *(*dparts, dx, dx)[:2], sums, self.N, self.eps,
            COPY=copy, SPAN=span, **tile, num_warps=1,
        )  # fmt: skip
        return dx, dparts, sums

    def _ends(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        return torch.empty_like(self.H), torch.empty_like(self.H) if self.split else None


def _filled(tensor: torch.Tensor, W: int, dtype: torch.dtype) -> torch.Tensor:
    """Gate's rows, then up's, each filled up to W."""
    half, row = tensor.numel() // 2, tensor[0].numel()
    return arrange(tensor, WeightLayout((2 * W, *tensor.shape[1:]), (2, half), (W * row, 1), dtype))


class _Mixing(torch.autograd.Function):
    """eps, the type of products, whether y is kept, H (N, C), its rest, norm, gate and up, down, then the branches ->
    the stream and its rest."""

    @staticmethod
    def forward(
        ctx: Any, eps: float, dtype: torch.dtype, keep: bool, H: torch.Tensor, rest: torch.Tensor | None,
        w: torch.Tensor, b: torch.Tensor, win: torch.Tensor, b_in: torch.Tensor, wout: torch.Tensor, bout: torch.Tensor,
        *parts: torch.Tensor,
    ) -> Any:  # fmt: skip
        C, F = wout.shape
        W = -(-F // ALIGNED) * ALIGNED
        up, bias = _filled(win, W, dtype), _filled(b_in, W, torch.float32)
        down = arrange(wout, WeightLayout((W, C), (C, F), (1, C), dtype))
        steps = _Steps(H, rest, parts, (w, b), eps)
        if C <= CHANNELS:
            out, rest, y = steps.whole(up, bias, down, bout, keep)
        else:
            y = steps.normed(dtype)
            out, rest = steps.added(gated(y[:, :C] @ up.T, bias, None) @ down, bout)
        ctx.save_for_backward(H, w, b, up, bias, down, y if keep else None, *parts)
        ctx.eps, ctx.F, ctx.kinds = eps, F, [one.dtype for one in (w, b, win, b_in, wout, bout)]
        ctx.set_materialize_grads(False)  # no zeros for the rest
        if rest is not None:
            ctx.mark_non_differentiable(rest)
        return out, rest

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor, _: None) -> Any:
        H, w, b, up, bias, down, y, *parts = ctx.saved_tensors
        dout = dout.contiguous()
        F, (W, C) = ctx.F, down.shape
        steps = _Steps(H, None, parts, (w, b), ctx.eps)
        y = steps.normed(up.dtype) if y is None else y
        a, inner, dy, narrow = through_gate(y, dout, up, bias, down)
        kind_w, kind_b, *kinds, kind_bout = ctx.kinds

        def inner_maps() -> list[torch.Tensor]:
            both = product(inner.T, y).view(2, W, -1)[:, :F].flatten(0, 1)
            found = both[:, :C].contiguous(), both[:, C].contiguous(), product(narrow.T, a)[:, :F].contiguous()
            return [one.to(kind) for one, kind in zip(found, kinds, strict=True)]

        dinner = on_side_stream(inner_maps, inner, y, narrow, a)
        dx, dparts, ends = steps.backward(dy, dout, parts)

        def outer_maps() -> list[torch.Tensor]:
            return [
                one.to(kind) for one, kind in zip(sum_partials(ends).split(C), (kind_w, kind_b, kind_bout), strict=True)
            ]

        dw, db, dbout = on_side_stream(outer_maps, ends)
        return None, None, None, dx, None, dw, db, *dinner, dbout, *dparts


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """Contiguous, from an address on that is a multiple of 16 bytes."""
    x = x.contiguous()
    return x if x.storage_offset() % 8 == 0 else x.clone()


def add_mixing(
    H: Residual, responses: Sequence[torch.Tensor], norm: Affine, gate_up: Affine, down: Affine, eps: float
) -> Residual:
    """`ops.mixing.add_mixing` for none, one or two branches; products in autocast's type."""
    parts = split(H)
    dtype = product_dtype(parts[0], gate_up[0].dtype)
    rows = [one if one is None else _aligned(one.reshape(-1, one.shape[-1])) for one in (*parts, *responses)]
    keep = torch.is_grad_enabled() and parts[0].nbytes < KEPT
    with torch.autocast(parts[0].device.type, enabled=False):
        out, low = _Mixing.apply(eps, dtype, keep, *rows[:2], *norm, *gate_up, *down, *rows[2:])
    return stream_of(out.view(parts[0].shape), low if low is None else low.view(parts[0].shape))
