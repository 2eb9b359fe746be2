"""The exit of a block: branches joined to the stream, layer norm, SwiGLU, residual.

    x = H + [s_1, s_2]      y = LN(x)      a = SiLU(y Wg^T + bg) * (y Wu^T + bu)      out = x + a Wd^T + bd

Only H, the branches and, of small streams, y are saved. Up to PRODUCTS_INSIDE channels one kernel does the whole
forward pass, so that nothing but the stream passes through memory, and one the way back to y; wider ones leave their
products to cuBLAS, with one kernel for all that lies between two of them. The backward pass recomputes gate and up.

    dy, dgate, dup (`swiglu`)      dx = dout + LN'(dy)        ds_i = dx_i, a view of dx where it is of the same type

Inner channels are padded with zeros to a multiple of ALIGNED: matrix units read whole multiples.

Letters: N points, C channels, F inner width, W the same padded; s0, s1 the responses of the branches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from sigmasolver.ops.fused import dot_precision, product_dtype, tuning
from sigmasolver.ops.fused.layer_norm import centred, load_channels, norm_gradient
from sigmasolver.ops.fused.linear import product
from sigmasolver.ops.fused.reductions import sum_partials
from sigmasolver.ops.fused.stream import load_stream, store_stream
from sigmasolver.ops.fused.swiglu import EXTRA, gated, sigmoid, through_gate
from sigmasolver.ops.fused.weight_cache import WeightLayout, arrange
from sigmasolver.ops.modules import Affine
from sigmasolver.ops.side_streams import on_side_stream
from sigmasolver.ops.stream import Residual, split, stream_of

__all__ = ["add_mixing"]


@triton.jit
def _share(s0: tl.tensor, s1: tl.tensor, n: tl.tensor, c: tl.tensor, C: tl.constexpr, EVEN: tl.constexpr) -> tl.tensor:
    """Where channel c of row n lies in the first half or the second. EVEN: eight in a row lie together, aligned."""
    half: tl.constexpr = C // 2
    offsets = tl.where(c < half, s0, s1 - half) + n * half + c
    if EVEN:
        offsets = tl.multiple_of(tl.max_contiguous(offsets, [1, 8]), [1, 16])
    return offsets


@triton.jit
def _joined(
    H: tl.tensor, H_low: tl.tensor, s0: tl.tensor, s1: tl.tensor,
    n: tl.tensor, c: tl.tensor, keep: tl.tensor, C: tl.constexpr,
    TWO_PARTS: tl.constexpr, BRANCHES: tl.constexpr, EVEN: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """One tile of x = H + [s0, s1] in float32; n and c as (ROWS, 1) and (1, COLUMNS)."""
    x = load_stream(H, H_low, n * C + c, keep, TWO_PARTS)
    if BRANCHES == 1:
        x += tl.load(s0 + n * C + c, mask=keep, other=0.0).to(tl.float32)
    if BRANCHES == 2:
        x += tl.load(_share(s0, s1, n, c, C, EVEN), mask=keep, other=0.0).to(tl.float32)
    return x


@triton.jit
def _normed(
    x: tl.tensor, w: tl.tensor, b: tl.tensor, c: tl.tensor, keep: tl.tensor, eps: tl.constexpr, C: tl.constexpr
) -> tl.tensor:
    """y = hat w + b of a tile of x."""
    x, _, r = centred(x, keep, eps, C)
    weight, bias = load_channels(w, c, C), load_channels(b, c, C)
    return x * r[:, None] * weight[None, :] + bias[None, :]


@triton.jit
def _store_normed(
    normed: tl.tensor, y: tl.tensor, n: tl.tensor, c: tl.tensor, keep: tl.tensor, left: tl.tensor, C: tl.constexpr
) -> None:
    """y into rows of C + EXTRA channels, and behind it what `swiglu` wants there: 1, then zeros."""
    tl.store(normed + n * (C + EXTRA) + c, y.to(normed.dtype.element_ty), mask=keep)
    e = tl.arange(0, EXTRA)[None, :]
    one = tl.where((e == 0) & (n < left), 1.0, 0.0).to(normed.dtype.element_ty)
    tl.store(normed + n * (C + EXTRA) + C + e, one, mask=(n < left) & (e < EXTRA))


@triton.jit
def _mixing_forward(
    H: tl.tensor, H_low: tl.tensor, s0: tl.tensor, s1: tl.tensor, w: tl.tensor, b: tl.tensor, W_in: tl.tensor,
    b_in: tl.tensor, W_out: tl.tensor, b_out: tl.tensor, out: tl.tensor, out_low: tl.tensor, normed: tl.tensor,
    N: tl.tensor, eps: tl.constexpr,
    C: tl.constexpr, W: tl.constexpr, TWO_PARTS: tl.constexpr, BRANCHES: tl.constexpr, EVEN: tl.constexpr,
    SAVE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """out (N, C) of a tile of points, where SAVE also y in `normed` (N, C + EXTRA).

    W_in (2 W, C) and b_in (2 W) of gate, then up; W_out (W, C), b_out (C).
    """
    first = tl.program_id(0).to(tl.int64) * ROWS
    n, c = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)
    left = N - tl.program_id(0) * ROWS
    keep = (n < left) & (c[None, :] < C)
    share: tl.constexpr = C // 2 if BRANCHES == 2 else C
    H, H_low, s0, s1 = H + first * C, H_low + first * C, s0 + first * share, s1 + first * share
    x = _joined(H, H_low, s0, s1, n, c[None, :], keep, C, TWO_PARTS, BRANCHES, EVEN)
    wide = _normed(x, w, b, c, keep, eps, C)
    if SAVE:
        _store_normed(normed + first * (C + EXTRA), wide, n, c[None, :], keep, left, C)
    y = wide.to(W_in.dtype.element_ty)
    total = x + load_channels(b_out, c, C)[None, :]  # not later: x then needs no registers
    for start in range(0, W, INNER):
        f = start + tl.arange(0, INNER)
        known = (f[:, None] < W) & (c[None, :] < C)
        offsets = f[:, None] * C + c[None, :]
        gate = tl.dot(y, tl.trans(tl.load(W_in + offsets, mask=known, other=0.0)), input_precision=PRECISION)
        up = tl.dot(y, tl.trans(tl.load(W_in + W * C + offsets, mask=known, other=0.0)), input_precision=PRECISION)
        gate += tl.load(b_in + f, mask=f < W, other=0.0)[None, :]
        up += tl.load(b_in + W + f, mask=f < W, other=0.0)[None, :]
        a = gate * up * sigmoid(gate)
        down = tl.load(W_out + offsets, mask=known, other=0.0)
        total = tl.dot(a.to(y.dtype), down, total, input_precision=PRECISION)
    store_stream(out + first * C, out_low + first * C, n * C + c[None, :], total, keep, TWO_PARTS)


@triton.jit
def _join_norm(
    H: tl.tensor, H_low: tl.tensor, s0: tl.tensor, s1: tl.tensor, w: tl.tensor, b: tl.tensor, normed: tl.tensor,
    N: tl.tensor, eps: tl.constexpr,
    C: tl.constexpr, TWO_PARTS: tl.constexpr, BRANCHES: tl.constexpr, EVEN: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
) -> None:  # fmt: skip
    """normed (N, C + EXTRA): y = LN(x) of a tile of points."""
    n, c = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None], tl.arange(0, COLUMNS)
    keep = (n < N) & (c[None, :] < C)
    x = _joined(H, H_low, s0, s1, n, c[None, :], keep, C, TWO_PARTS, BRANCHES, EVEN)
    _store_normed(normed, _normed(x, w, b, c, keep, eps, C), n, c[None, :], keep, N, C)


@triton.jit
def _join_add(
    H: tl.tensor, H_low: tl.tensor, s0: tl.tensor, s1: tl.tensor,
    mixed: tl.tensor, bias: tl.tensor, out: tl.tensor, out_low: tl.tensor,
    N: tl.tensor,
    C: tl.constexpr, TWO_PARTS: tl.constexpr, BRANCHES: tl.constexpr, EVEN: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
) -> None:  # fmt: skip
    """out = x + mixed + bias of a tile of points; mixed (N, C), bias (C)."""
    n, c = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None], tl.arange(0, COLUMNS)
    keep = (n < N) & (c[None, :] < C)
    total = _joined(H, H_low, s0, s1, n, c[None, :], keep, C, TWO_PARTS, BRANCHES, EVEN)
    total += tl.load(mixed + n * C + c[None, :], mask=keep, other=0.0).to(tl.float32)
    total += load_channels(bias, c, C)[None, :]
    store_stream(out, out_low, n * C + c[None, :], total, keep, TWO_PARTS)


@triton.jit
def _join_backward(
    H: tl.tensor, H_low: tl.tensor, s0: tl.tensor, s1: tl.tensor, w: tl.tensor, b: tl.tensor,
    dy: tl.tensor, dout: tl.tensor, dx: tl.tensor, ds0: tl.tensor, ds1: tl.tensor, sums: tl.tensor,
    N: tl.tensor, eps: tl.constexpr,
    C: tl.constexpr, TWO_PARTS: tl.constexpr, BRANCHES: tl.constexpr, EVEN: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, COPY: tl.constexpr, CHUNK: tl.constexpr,
) -> None:  # fmt: skip
    """dx = dout + LN'(dy) of a chunk of points, where COPY also into ds0, ds1 of the branches.

    All (N, C), shares of the branches (N, C / BRANCHES). A row of `sums`: dw (C), db (C) of the norm, sum of dout (C).
    """
    first = tl.program_id(0).to(tl.int64) * CHUNK
    c = tl.arange(0, COLUMNS)
    share: tl.constexpr = C // 2 if BRANCHES == 2 else C
    H, dy, dout, dx = H + first * C, dy + first * C, dout + first * C, dx + first * C
    s0, s1, ds0, ds1 = s0 + first * share, s1 + first * share, ds0 + first * share, ds1 + first * share
    sum_w = tl.zeros((ROWS, COLUMNS), tl.float32)
    sum_b = tl.zeros((ROWS, COLUMNS), tl.float32)
    sum_out = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, CHUNK, ROWS):
        n = (start + tl.arange(0, ROWS))[:, None]
        keep = (n < N - tl.program_id(0) * CHUNK) & (c[None, :] < C)
        offsets = n * C + c[None, :]
        x = _joined(H, H_low, s0, s1, n, c[None, :], keep, C, TWO_PARTS, BRANCHES, EVEN)
        x, _, r = centred(x, keep, eps, C)
        weight = load_channels(w, c, C)
        hat = x * r[:, None]
        g = tl.load(dy + offsets, mask=keep, other=0.0).to(tl.float32)
        more = tl.load(dout + offsets, mask=keep, other=0.0).to(tl.float32)
        sum_w += g * hat
        sum_b += g
        sum_out += more
        total = norm_gradient(g * weight[None, :], hat, r, C) + more
        tl.store(dx + offsets, total.to(dx.dtype.element_ty), mask=keep)
        if COPY and BRANCHES == 1:
            tl.store(ds0 + offsets, total.to(ds0.dtype.element_ty), mask=keep)
        if COPY and BRANCHES == 2:
            tl.store(_share(ds0, ds1, n, c[None, :], C, EVEN), total.to(ds0.dtype.element_ty), mask=keep)
    sums += tl.program_id(0) * 3 * C
    tl.store(sums + c, tl.sum(sum_w, axis=0), mask=c < C)
    tl.store(sums + C + c, tl.sum(sum_b, axis=0), mask=c < C)
    tl.store(sums + 2 * C + c, tl.sum(sum_out, axis=0), mask=c < C)


class _Launches:
    """The kernels above on one stream H (N, C) and the responses of its branches."""

    def __init__(
        self,
        H: torch.Tensor,
        low: torch.Tensor | None,
        responses: Sequence[torch.Tensor],
        norm: Affine,
        eps: float,
    ) -> None:
        self.H, self.norm, self.eps, self.two_parts = H, norm, eps, low is not None
        self.N, self.C = H.shape
        self.joined = (H, H if low is None else low, *(*responses, H, H)[:2])
        columns = tuning.tile_size(self.C)
        self.tile = {"C": self.C, "TWO_PARTS": self.two_parts, "BRANCHES": len(responses), "EVEN": self.C % 16 == 0}
        self.tile |= {"ROWS": max(1, tuning.MIXING_TILE // columns), "COLUMNS": columns}
        self.blocks = (triton.cdiv(self.N, self.tile["ROWS"]),)

    def forward(
        self, W_in: torch.Tensor, b_in: torch.Tensor, W_out: torch.Tensor, b_out: torch.Tensor, save: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """out, its low part where H has one, and y if it is to be saved."""
        cut = tuning.MIXING_TILES[W_in.element_size()]
        tile = self.tile | {"ROWS": cut.points, "INNER": cut.inner, "W": len(W_out)}
        out, low = self._outputs()
        y = W_in.new_empty(self.N, self.C + EXTRA.value) if save else None
        _mixing_forward[(triton.cdiv(self.N, cut.points),)](
            *self.joined, *self.norm, W_in, b_in, W_out, b_out, out, out if low is None else low,
            out if y is None else y, self.N, self.eps, SAVE=save, PRECISION=dot_precision(), **tile,
            num_warps=cut.warps, num_stages=cut.stages,
        )  # fmt: skip
        return out, low, y

    def normed(self, dtype: torch.dtype) -> torch.Tensor:
        """y (N, C + EXTRA)."""
        y = torch.empty(self.N, self.C + EXTRA.value, device=self.H.device, dtype=dtype)
        _join_norm[self.blocks](*self.joined, *self.norm, y, self.N, self.eps, **self.tile)
        return y

    def add(self, mixed: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """out, and its low part where H has one."""
        out, low = self._outputs()
        _join_add[self.blocks](*self.joined, mixed, bias, out, out if low is None else low, self.N, **self.tile)
        return out, low

    def backward(
        self, dy: torch.Tensor, dout: torch.Tensor, responses: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
        """dx, those of the branches, and partial sums: dw and db of the norm, db of the down projection."""
        dx = torch.empty_like(self.H)
        copy = any(one.dtype != dx.dtype for one in responses)
        shares = [dx.narrow(1, i * one.shape[1], one.shape[1]) for i, one in enumerate(responses)]
        gradients = [torch.empty_like(one) for one in responses] if copy else shares
        rows = max(1, tuning.MIXING_BACKWARD_TILE // self.tile["COLUMNS"])
        chunk = rows * max(1, min(tuning.MIXING_LONGEST, self.N // (rows * tuning.MIXING_PROGRAMS)))
        chunks = triton.cdiv(self.N, chunk)
        sums = torch.empty(chunks, 3 * self.C, device=dx.device, dtype=torch.float32)
        _join_backward[(chunks,)](
            *self.joined, *self.norm, dy, dout, dx, *(*gradients, dx, dx)[:2], sums, self.N, self.eps,
            COPY=copy, CHUNK=chunk, **self.tile | {"ROWS": rows}, num_warps=tuning.MIXING_BACKWARD_WARPS,
        )  # fmt: skip
        return dx, gradients, sums

    def _outputs(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        return torch.empty_like(self.H), torch.empty_like(self.H) if self.two_parts else None


def _padded(tensor: torch.Tensor, W: int, dtype: torch.dtype) -> torch.Tensor:
    """Gate's rows, then up's, each padded to W."""
    half, row = tensor.numel() // 2, tensor[0].numel()
    return arrange(tensor, WeightLayout((2 * W, *tensor.shape[1:]), (2, half), (W * row, 1), dtype))


class _Mixing(torch.autograd.Function):
    """eps, the type of products, whether y is saved, H (N, C), its low part, norm, gate and up, down, then the
    responses of the branches -> the stream and its low part."""

    @staticmethod
    def forward(
        ctx: Any, eps: float, dtype: torch.dtype, save: bool, H: torch.Tensor, low: torch.Tensor | None,
        w: torch.Tensor, b: torch.Tensor, W_in: torch.Tensor, b_in: torch.Tensor, W_out: torch.Tensor,
        b_out: torch.Tensor, *responses: torch.Tensor,
    ) -> Any:  # fmt: skip
        C, F = W_out.shape
        W = -(-F // tuning.ALIGNED) * tuning.ALIGNED
        up, bias = _padded(W_in, W, dtype), _padded(b_in, W, torch.float32)
        down = arrange(W_out, WeightLayout((W, C), (C, F), (1, C), dtype))
        launches = _Launches(H, low, responses, (w, b), eps)
        if C <= tuning.PRODUCTS_INSIDE:
            out, low, y = launches.forward(up, bias, down, b_out, save)
        else:
            y = launches.normed(dtype)
            out, low = launches.add(gated(y[:, :C] @ up.T, bias, None) @ down, b_out)
        ctx.save_for_backward(H, w, b, up, bias, down, y if save else None, *responses)
        ctx.eps, ctx.F, ctx.types = eps, F, [one.dtype for one in (w, b, W_in, b_in, W_out, b_out)]
        ctx.set_materialize_grads(False)  # no zeros for the low part
        if low is not None:
            ctx.mark_non_differentiable(low)
        return out, low

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor, _: None) -> Any:
        H, w, b, up, bias, down, y, *responses = ctx.saved_tensors
        dout = dout.contiguous()
        F, (W, C) = ctx.F, down.shape
        launches = _Launches(H, None, responses, (w, b), ctx.eps)
        y = launches.normed(up.dtype) if y is None else y
        a, inner, dy, dout_cast = through_gate(y, dout, up, bias, down)
        type_w, type_b, *types, type_out = ctx.types

        def inner_maps() -> list[torch.Tensor]:
            both = product(inner.T, y).view(2, W, -1)[:, :F].flatten(0, 1)
            found = both[:, :C].contiguous(), both[:, C].contiguous(), product(dout_cast.T, a)[:, :F].contiguous()
            return [one.to(dtype) for one, dtype in zip(found, types, strict=True)]

        dinner = on_side_stream(inner_maps, inner, y, dout_cast, a)
        dx, gradients, sums = launches.backward(dy, dout, responses)

        def outer_maps() -> list[torch.Tensor]:
            totals = zip(sum_partials(sums).split(C), (type_w, type_b, type_out), strict=True)
            return [one.to(dtype) for one, dtype in totals]

        dw, db, db_out = on_side_stream(outer_maps, sums)
        return None, None, None, dx, None, dw, db, *dinner, db_out, *gradients


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
    save = torch.is_grad_enabled() and parts[0].nbytes < tuning.SAVED_BYTES
    with torch.autocast(parts[0].device.type, enabled=False):
        out, low = _Mixing.apply(eps, dtype, save, *rows[:2], *norm, *gate_up, *down, *rows[2:])
    return stream_of(out.view(parts[0].shape), low if low is None else low.view(parts[0].shape))
