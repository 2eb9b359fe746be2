"""The exit of a block: branches joined to the stream, layer norm, SwiGLU, residual.

    x = H + [s_1, s_2]      y = LN(x)      a = SiLU(y Wg^T + bg) * (y Wu^T + bu)      out = x + a Wd^T + bd

Only H, the branches and, of small streams, y are kept. Up to `gate.CHANNELS` channels one kernel does the whole forward
pass, so that nothing but the stream passes through memory; wider ones, and most products of the backward pass, are left
to the library, with one kernel for all that lies between two of them. The backward pass makes gate and up again.

    dgate, dup (`gate`)      dy = dgate Wg + dup Wu      dx = dout + LN'(dy)        ds_i = dx_i

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

from sigmasolver.ops.affine import Affine
from sigmasolver.ops.fused import dot_precision
from sigmasolver.ops.fused import gate as inner_channels
from sigmasolver.ops.fused.lanes import aside
from sigmasolver.ops.fused.linear import product
from sigmasolver.ops.fused.rows import folded
from sigmasolver.ops.fused.tables import Form, form_of
from sigmasolver.ops.swiglu import ALIGNED

__all__ = ["mixing_residual"]

PROGRAMS = 264
"""That the backward pass is cut into at least, where there are points enough; each leaves one row of partial sums."""
KEPT = 10**8
"""Bytes of a stream from which on y is made again rather than kept: there memory is dearer than a pass."""
TILES = {2: (64, 64), 4: (32, 32)}
"""Points and inner channels of a tile, by the bytes of a number."""


@triton.jit
def _joined(H, s0, s1, row, c, keep, C: tl.constexpr, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """One tile of x in float32."""
    x = tl.load(H + row * C + c[None, :], mask=keep, other=0.0).to(tl.float32)
    if PARTS == 1:
        x += tl.load(s0 + row * C + c[None, :], mask=keep, other=0.0).to(tl.float32)
    if PARTS == 2:
        half: tl.constexpr = C // 2
        first, second = keep & (c[None, :] < half), keep & (c[None, :] >= half)
        x += tl.load(s0 + row * half + c[None, :], mask=first, other=0.0).to(tl.float32)
        x += tl.load(s1 + row * half + c[None, :] - half, mask=second, other=0.0).to(tl.float32)
    return x


@triton.jit
def _normed(x, w, b, c, keep, eps, C: tl.constexpr):  # type: ignore[no-untyped-def]
    """Normalised rows, their scale, the weight, and y."""
    m = tl.sum(x, axis=1) / C
    centred = tl.where(keep, x - m[:, None], 0.0)
    r = 1 / tl.sqrt(tl.sum(centred * centred, axis=1) / C + eps)
    weight = tl.load(w + c, mask=c < C, other=0.0).to(tl.float32)
    bias = tl.load(b + c, mask=c < C, other=0.0).to(tl.float32)
    hat = centred * r[:, None]
    return hat, r, weight, hat * weight[None, :] + bias[None, :]


@triton.jit
def _whole(  # type: ignore[no-untyped-def]
    H, s0, s1, w, b, win, b_in, wout, bout, out, normed, N, eps,
    C: tl.constexpr, W: tl.constexpr, PARTS: tl.constexpr, KEEP: tl.constexpr,
    BN: tl.constexpr, BC: tl.constexpr, BF: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The forward pass of a tile of points, with KEEP also y. win (2 W, C), b_in (2 W), wout (W, C)."""
    n, c = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BC)
    keep = (n[:, None] < N) & (c[None, :] < C)
    row = n.to(tl.int64)[:, None]
    y = _normed(_joined(H, s0, s1, row, c, keep, C, PARTS), w, b, c, keep, eps, C)[3].to(win.dtype.element_ty)
    total = tl.zeros((BN, BC), tl.float32)
    for start in range(0, W, BF):
        f = start + tl.arange(0, BF)
        known = (f[:, None] < W) & (c[None, :] < C)
        place = f[:, None] * C + c[None, :]
        gate = tl.dot(y, tl.trans(tl.load(win + place, mask=known, other=0.0)), input_precision=PRECISION)
        up = tl.dot(y, tl.trans(tl.load(win + W * C + place, mask=known, other=0.0)), input_precision=PRECISION)
        gate += tl.load(b_in + f, mask=f < W, other=0.0)[None, :]
        up += tl.load(b_in + W + f, mask=f < W, other=0.0)[None, :]
        a = gate / (1 + tl.exp(-gate)) * up
        wd = tl.load(wout + place, mask=known, other=0.0)
        total = tl.dot(a.to(y.dtype), wd, total, input_precision=PRECISION)
    total += tl.load(bout + c, mask=c < C, other=0.0).to(tl.float32)[None, :]
    x = _joined(H, s0, s1, row, c, keep, C, PARTS)  # read again: cheaper than registers held over the loop
    if KEEP:
        again = _normed(x, w, b, c, keep, eps, C)[3]
        tl.store(normed + row * C + c[None, :], again.to(normed.dtype.element_ty), mask=keep)
    total += x
    tl.store(out + row * C + c[None, :], total.to(out.dtype.element_ty), mask=keep)


@triton.jit
def _join_norm(  # type: ignore[no-untyped-def]
    H, s0, s1, w, b, y, N, eps, C: tl.constexpr, PARTS: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr
):
    """y alone."""
    n, c = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BC)
    keep = (n[:, None] < N) & (c[None, :] < C)
    row = n.to(tl.int64)[:, None]
    out = _normed(_joined(H, s0, s1, row, c, keep, C, PARTS), w, b, c, keep, eps, C)[3]
    tl.store(y + row * C + c[None, :], out.to(y.dtype.element_ty), mask=keep)


@triton.jit
def _join_add(  # type: ignore[no-untyped-def]
    H, s0, s1, m, bias, out, N, C: tl.constexpr, PARTS: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr
):
    """x + m + bias."""
    n, c = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BC)
    keep = (n[:, None] < N) & (c[None, :] < C)
    row = n.to(tl.int64)[:, None]
    total = _joined(H, s0, s1, row, c, keep, C, PARTS)
    total += tl.load(m + row * C + c[None, :], mask=keep, other=0.0).to(tl.float32)
    total += tl.load(bias + c, mask=c < C, other=0.0).to(tl.float32)[None, :]
    tl.store(out + row * C + c[None, :], total.to(out.dtype.element_ty), mask=keep)


@triton.jit
def _join_backward(  # type: ignore[no-untyped-def]
    H, s0, s1, w, b, dy, dout, dx, d0, d1, sums, N, eps,
    C: tl.constexpr, PARTS: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Through the norm to x and the branches. A row of `sums`: weight and bias of the norm, sum of dout."""
    c = tl.arange(0, BC)
    sum_w = tl.zeros((BN, BC), tl.float32)
    sum_b = tl.zeros((BN, BC), tl.float32)
    sum_o = tl.zeros((BN, BC), tl.float32)
    for start in range(0, SPAN, BN):
        n = tl.program_id(0) * SPAN + start + tl.arange(0, BN)
        keep = (n[:, None] < N) & (c[None, :] < C)
        row = n.to(tl.int64)[:, None]
        x = _joined(H, s0, s1, row, c, keep, C, PARTS)
        hat, r, weight = _normed(x, w, b, c, keep, eps, C)[:3]
        g = tl.load(dy + row * C + c[None, :], mask=keep, other=0.0).to(tl.float32)
        more = tl.load(dout + row * C + c[None, :], mask=keep, other=0.0).to(tl.float32)
        sum_w += g * hat
        sum_b += g
        sum_o += more
        g = g * weight[None, :]
        first, second = tl.sum(g, axis=1) / C, tl.sum(g * hat, axis=1) / C
        total = (g - first[:, None] - hat * second[:, None]) * r[:, None] + more
        tl.store(dx + row * C + c[None, :], total.to(dx.dtype.element_ty), mask=keep)
        if PARTS == 1:
            tl.store(d0 + row * C + c[None, :], total.to(d0.dtype.element_ty), mask=keep)
        if PARTS == 2:
            half: tl.constexpr = C // 2
            left, right = keep & (c[None, :] < half), keep & (c[None, :] >= half)
            tl.store(d0 + row * half + c[None, :], total.to(d0.dtype.element_ty), mask=left)
            tl.store(d1 + row * half + c[None, :] - half, total.to(d1.dtype.element_ty), mask=right)
    sums += tl.program_id(0) * 3 * C
    tl.store(sums + c, tl.sum(sum_w, axis=0), mask=c < C)
    tl.store(sums + C + c, tl.sum(sum_b, axis=0), mask=c < C)
    tl.store(sums + 2 * C + c, tl.sum(sum_o, axis=0), mask=c < C)


class _Steps:
    """The kernels above on one stream and its branches."""

    def __init__(self, H: torch.Tensor, parts: Sequence[torch.Tensor], norm: Affine, eps: float) -> None:
        self.H, self.norm, self.eps = H, norm, eps
        self.N, self.C = H.shape
        self.joined = (H, *(*parts, H, H)[:2])
        BC = max(16, triton.next_power_of_2(self.C))
        self.tile = {"C": self.C, "PARTS": len(parts), "BN": max(1, 2048 // BC), "BC": BC}
        self.blocks = (triton.cdiv(self.N, self.tile["BN"]),)

    def whole(
        self, win: torch.Tensor, b_in: torch.Tensor, wout: torch.Tensor, bout: torch.Tensor, keep: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """out, and y if it is to be kept."""
        BN, BF = TILES[win.element_size()]
        tile = self.tile | {"BN": BN, "BF": BF, "W": len(wout)}
        out, y = torch.empty_like(self.H), win.new_empty(self.H.shape) if keep else None
        _whole[(triton.cdiv(self.N, tile["BN"]),)](
            *self.joined, *self.norm, win, b_in, wout, bout, out, out if y is None else y, self.N, self.eps,
            KEEP=keep, PRECISION=dot_precision(), **tile, num_warps=4, num_stages=2,
        )  # fmt: skip
        return out, y

    def normed(self, dtype: torch.dtype) -> torch.Tensor:
        y = torch.empty(self.N, self.C, device=self.H.device, dtype=dtype)
        _join_norm[self.blocks](*self.joined, *self.norm, y, self.N, self.eps, **self.tile)
        return y

    def added(self, m: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(self.H)
        _join_add[self.blocks](*self.joined, m, bias, out, self.N, **self.tile)
        return out

    def backward(
        self, dy: torch.Tensor, dout: torch.Tensor, parts: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
        """dx, those of the branches, and partial sums: dw and db of the norm, db of the way down."""
        dx, dparts = torch.empty_like(self.H), [torch.empty_like(part) for part in parts]
        span = self.tile["BN"] * max(1, min(8, self.blocks[0] // PROGRAMS))
        chunks = triton.cdiv(self.N, span)
        sums = torch.empty(chunks, 3 * self.C, device=dx.device, dtype=torch.float32)
        _join_backward[(chunks,)](
            *self.joined,
            *self.norm,
            dy,
            dout,
            dx,
            *(*dparts, dx, dx)[:2],
            sums,
            self.N,
            self.eps,
            SPAN=span,
            **self.tile,
        )
        return dx, dparts, sums


def _filled(tensor: torch.Tensor, W: int, dtype: torch.dtype) -> torch.Tensor:
    """Gate's rows, then up's, each filled up to W."""
    half, row = tensor.numel() // 2, tensor[0].numel()
    return form_of(tensor, Form((2 * W, *tensor.shape[1:]), (2, half), (W * row, 1), dtype))


class _Mixing(torch.autograd.Function):
    """eps, the type of products, whether y is kept, H (N, C), norm, gate and up, down, then the branches."""

    @staticmethod
    def forward(
        ctx: Any, eps: float, dtype: torch.dtype, keep: bool, H: torch.Tensor, w: torch.Tensor, b: torch.Tensor,
        win: torch.Tensor, b_in: torch.Tensor, wout: torch.Tensor, bout: torch.Tensor, *parts: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        C, F = wout.shape
        W = -(-F // ALIGNED) * ALIGNED
        up, bias = _filled(win, W, dtype), _filled(b_in, W, torch.float32)
        down = form_of(wout, Form((W, C), (C, F), (1, C), dtype))
        steps = _Steps(H, parts, (w, b), eps)
        if C <= inner_channels.CHANNELS:
            out, y = steps.whole(up, bias, down, bout, keep)
        else:
            y = steps.normed(dtype)
            out = steps.added(inner_channels.gate(y @ up.T, bias, None)[0] @ down, bout)
        ctx.save_for_backward(H, w, b, up, bias, down, y if keep else None, *parts)
        ctx.eps, ctx.F, ctx.kinds = eps, F, [one.dtype for one in (w, b, win, b_in, wout, bout)]
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> Any:
        H, w, b, up, bias, down, y, *parts = ctx.saved_tensors
        dout = dout.contiguous()
        F, (W, C) = ctx.F, down.shape
        steps = _Steps(H, parts, (w, b), ctx.eps)
        y, narrow = steps.normed(up.dtype) if y is None else y, dout.to(up.dtype)
        a, inner, sums = inner_channels.through_gate(y, narrow, up, bias, down)
        kind_w, kind_b, *kinds, kind_bout = ctx.kinds

        def inner_maps() -> list[torch.Tensor]:
            din = product(inner.T, y).view(2, W, C)[:, :F].flatten(0, 1)
            dbin = folded(sums).view(2, W)[:, :F].flatten()
            found = din, dbin, product(narrow.T, a)[:, :F].contiguous()
            return [one.to(kind) for one, kind in zip(found, kinds, strict=True)]

        dinner = aside(inner_maps, inner, y, sums, narrow, a)
        dx, dparts, ends = steps.backward(inner @ up, dout, parts)

        def outer_maps() -> list[torch.Tensor]:
            return [one.to(kind) for one, kind in zip(folded(ends).split(C), (kind_w, kind_b, kind_bout), strict=True)]

        dw, db, dbout = aside(outer_maps, ends)
        return None, None, None, dx, dw, db, *dinner, dbout, *dparts


def mixing_residual(
    H: torch.Tensor, parts: Sequence[torch.Tensor], norm: Affine, gate_up: Affine, down: Affine, eps: float
) -> torch.Tensor:
    """`ops.mixing.mixing_residual` for none, one or two branches; products in the narrow type under autocast."""
    narrow = torch.is_autocast_enabled(H.device.type)
    dtype = torch.get_autocast_dtype(H.device.type) if narrow else H.dtype
    rows = [one.reshape(-1, one.shape[-1]).contiguous() for one in (H, *parts)]
    keep = torch.is_grad_enabled() and H.nbytes < KEPT
    with torch.autocast(H.device.type, enabled=False):
        return _Mixing.apply(eps, dtype, keep, rows[0], *norm, *gate_up, *down, *rows[1:]).view(H.shape)
