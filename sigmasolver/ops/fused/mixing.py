"""The exit of a block: add the branches to the stream, layer norm, SwiGLU, residual.

    x = H + [s_1, s_2]      y = LN(x)      a = SiLU(y Wg^T + bg) * (y Wu^T + bu)      out = x + a Wd^T + bd

Only H, the branches and, for small streams, y are saved for backward. Up to MAX_FUSED_MATMUL_CHANNELS channels, one
kernel does the entire forward pass, so that only the stream goes through memory, and one goes back to y; wider streams
leave the products to cuBLAS, with one kernel for everything between two products. The backward pass recomputes gate and
up.

    dy, dgate, dup (`swiglu`)      dx = dout + LN'(dy)        ds_i = dx_i, a view of dx if the dtypes agree

Inner channels are zero-padded to a multiple of ALIGNMENT, so that matrix units read aligned rows.

Letters: N points, C channels, F inner width, padded; s0, s1 the responses of the branches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from sigmasolver.ops.fused import dot_precision, product_dtype, tuning
from sigmasolver.ops.fused.jit import jit
from sigmasolver.ops.fused.layer_norm import centre_rows, load_channels, norm_gradient, normalise_rows
from sigmasolver.ops.fused.linear import product
from sigmasolver.ops.fused.reductions import sum_partials
from sigmasolver.ops.fused.stream import load_stream, store_stream
from sigmasolver.ops.fused.swiglu import EXTRA, apply_gate, fuses_products, gate_backward, silu_times
from sigmasolver.ops.fused.weight_cache import WeightLayout, arrange
from sigmasolver.ops.modules import Affine
from sigmasolver.ops.side_streams import on_side_stream
from sigmasolver.ops.stream import Residual, split, stream_of

__all__ = ["add_mixing"]


@jit
def _branch_pointers(
    s0: tl.tensor, s1: tl.tensor, n: tl.tensor, c: tl.tensor, CHANNELS: tl.constexpr, EVEN: tl.constexpr
) -> tl.tensor:
    """Pointers to channel c of row n in the response of the first or second branch. EVEN: groups of eight channels are
    contiguous and aligned."""
    HALF: tl.constexpr = CHANNELS // 2
    pointers = tl.where(c < HALF, s0, s1 - HALF) + n * HALF + c
    if EVEN:
        pointers = tl.multiple_of(tl.max_contiguous(pointers, [1, 8]), [1, 16])
    return pointers


@jit
def _load_joined(
    H: tl.tensor, H_low: tl.tensor, s0: tl.tensor, s1: tl.tensor,
    n: tl.tensor, c: tl.tensor, keep: tl.tensor, CHANNELS: tl.constexpr,
    TWO_PARTS: tl.constexpr, BRANCHES: tl.constexpr, EVEN: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """A tile of x = H + [s0, s1] in float32; n (TILE_POINTS, 1), c (1, TILE_CHANNELS)."""
    x = load_stream(H, H_low, n * CHANNELS + c, keep, TWO_PARTS)
    if BRANCHES == 1:
        x += tl.load(s0 + n * CHANNELS + c, mask=keep, other=0.0).to(tl.float32)
    if BRANCHES == 2:
        x += tl.load(_branch_pointers(s0, s1, n, c, CHANNELS, EVEN), mask=keep, other=0.0).to(tl.float32)
    return x


@jit
def _store_normed(
    saved: tl.tensor, y: tl.tensor,
    n: tl.tensor, c: tl.tensor, keep: tl.tensor, rows: tl.tensor, CHANNELS: tl.constexpr,
) -> None:  # fmt: skip
    """Store y in rows of C + EXTRA channels, followed by what `swiglu` expects: 1, then zeros."""
    tl.store(saved + n * (CHANNELS + EXTRA) + c, y.to(saved.dtype.element_ty), mask=keep)
    e = tl.arange(0, EXTRA)[None, :]
    extra = tl.where((e == 0) & (n < rows), 1.0, 0.0).to(saved.dtype.element_ty)
    tl.store(saved + n * (CHANNELS + EXTRA) + CHANNELS + e, extra, mask=(n < rows) & (e < EXTRA))


@jit
def _mixing_forward(
    H: tl.tensor, H_low: tl.tensor, s0: tl.tensor, s1: tl.tensor, w: tl.tensor, b: tl.tensor, W_in: tl.tensor,
    b_in: tl.tensor, W_out: tl.tensor, b_out: tl.tensor, out: tl.tensor, out_low: tl.tensor, saved: tl.tensor,
    points: tl.tensor, EPS: tl.constexpr,
    CHANNELS: tl.constexpr, INNER: tl.constexpr, TWO_PARTS: tl.constexpr, BRANCHES: tl.constexpr, EVEN: tl.constexpr,
    SAVE: tl.constexpr, TILE_POINTS: tl.constexpr, TILE_CHANNELS: tl.constexpr, TILE_INNER: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """out (N, C) for a tile of points; if SAVE, also y in `saved` (N, C + EXTRA).

    W_in (2 F, C) and b_in (2 F) of gate, then up; W_out (F, C), b_out (C).
    """
    first = tl.program_id(0).to(tl.int64) * TILE_POINTS
    n, c = tl.arange(0, TILE_POINTS)[:, None], tl.arange(0, TILE_CHANNELS)
    remaining = points - tl.program_id(0) * TILE_POINTS
    keep = (n < remaining) & (c[None, :] < CHANNELS)
    SHARE: tl.constexpr = CHANNELS // 2 if BRANCHES == 2 else CHANNELS
    H, H_low, s0, s1 = H + first * CHANNELS, H_low + first * CHANNELS, s0 + first * SHARE, s1 + first * SHARE
    x = _load_joined(H, H_low, s0, s1, n, c[None, :], keep, CHANNELS, TWO_PARTS, BRANCHES, EVEN)
    y_float32 = normalise_rows(x, w, b, c, keep, EPS, CHANNELS)[0]
    if SAVE:
        _store_normed(saved + first * (CHANNELS + EXTRA), y_float32, n, c[None, :], keep, remaining, CHANNELS)
    y = y_float32.to(W_in.dtype.element_ty)
    acc = x + load_channels(b_out, c, CHANNELS)[None, :]  # here, so that x occupies no registers in the loop
    for start in range(0, INNER, TILE_INNER):
        f = start + tl.arange(0, TILE_INNER)
        weight_mask = (f[:, None] < INNER) & (c[None, :] < CHANNELS)
        offsets = f[:, None] * CHANNELS + c[None, :]
        gate_map = tl.load(W_in + offsets, mask=weight_mask, other=0.0)
        gate = tl.dot(y, tl.trans(gate_map), input_precision=PRECISION)
        up_map = tl.load(W_in + INNER * CHANNELS + offsets, mask=weight_mask, other=0.0)
        up = tl.dot(y, tl.trans(up_map), input_precision=PRECISION)
        gate += tl.load(b_in + f, mask=f < INNER, other=0.0)[None, :]
        up += tl.load(b_in + INNER + f, mask=f < INNER, other=0.0)[None, :]
        a = silu_times(gate, up)
        down = tl.load(W_out + offsets, mask=weight_mask, other=0.0)
        acc = tl.dot(a.to(y.dtype), down, acc, input_precision=PRECISION)
    store_stream(out + first * CHANNELS, out_low + first * CHANNELS, n * CHANNELS + c[None, :], acc, keep, TWO_PARTS)


@jit
def _join_norm(
    H: tl.tensor, H_low: tl.tensor, s0: tl.tensor, s1: tl.tensor, w: tl.tensor, b: tl.tensor, saved: tl.tensor,
    points: tl.tensor, EPS: tl.constexpr,
    CHANNELS: tl.constexpr, TWO_PARTS: tl.constexpr, BRANCHES: tl.constexpr, EVEN: tl.constexpr,
    TILE_POINTS: tl.constexpr, TILE_CHANNELS: tl.constexpr,
) -> None:  # fmt: skip
    """saved (N, C + EXTRA): y = LN(x) for a tile of points."""
    n = (tl.program_id(0) * TILE_POINTS + tl.arange(0, TILE_POINTS)).to(tl.int64)[:, None]
    c = tl.arange(0, TILE_CHANNELS)
    keep = (n < points) & (c[None, :] < CHANNELS)
    x = _load_joined(H, H_low, s0, s1, n, c[None, :], keep, CHANNELS, TWO_PARTS, BRANCHES, EVEN)
    y = normalise_rows(x, w, b, c, keep, EPS, CHANNELS)[0]
    _store_normed(saved, y, n, c[None, :], keep, points, CHANNELS)


@jit
def _join_add(
    H: tl.tensor, H_low: tl.tensor, s0: tl.tensor, s1: tl.tensor,
    mixed: tl.tensor, bias: tl.tensor, out: tl.tensor, out_low: tl.tensor,
    points: tl.tensor,
    CHANNELS: tl.constexpr, TWO_PARTS: tl.constexpr, BRANCHES: tl.constexpr, EVEN: tl.constexpr,
    TILE_POINTS: tl.constexpr, TILE_CHANNELS: tl.constexpr,
) -> None:  # fmt: skip
    """out = x + mixed + bias for a tile of points; mixed (N, C), bias (C)."""
    n = (tl.program_id(0) * TILE_POINTS + tl.arange(0, TILE_POINTS)).to(tl.int64)[:, None]
    c = tl.arange(0, TILE_CHANNELS)
    keep = (n < points) & (c[None, :] < CHANNELS)
    total = _load_joined(H, H_low, s0, s1, n, c[None, :], keep, CHANNELS, TWO_PARTS, BRANCHES, EVEN)
    total += tl.load(mixed + n * CHANNELS + c[None, :], mask=keep, other=0.0).to(tl.float32)
    total += load_channels(bias, c, CHANNELS)[None, :]
    store_stream(out, out_low, n * CHANNELS + c[None, :], total, keep, TWO_PARTS)


@jit
def _join_backward(
    H: tl.tensor, H_low: tl.tensor, s0: tl.tensor, s1: tl.tensor, w: tl.tensor, b: tl.tensor,
    dy: tl.tensor, dout: tl.tensor, dx: tl.tensor, ds0: tl.tensor, ds1: tl.tensor, sums: tl.tensor,
    points: tl.tensor, EPS: tl.constexpr,
    CHANNELS: tl.constexpr, TWO_PARTS: tl.constexpr, BRANCHES: tl.constexpr, EVEN: tl.constexpr,
    TILE_POINTS: tl.constexpr, TILE_CHANNELS: tl.constexpr, COPY: tl.constexpr, CHUNK: tl.constexpr,
) -> None:  # fmt: skip
    """dx = dout + LN'(dy) for a chunk of points; if COPY, also stored in ds0, ds1 of the branches.

    All (N, C), those of the branches (N, C / BRANCHES). A row of `sums`: dw (C), db (C) of the norm, sum of dout (C).
    """
    first = tl.program_id(0).to(tl.int64) * CHUNK
    c = tl.arange(0, TILE_CHANNELS)
    SHARE: tl.constexpr = CHANNELS // 2 if BRANCHES == 2 else CHANNELS
    H, dy, dout, dx = H + first * CHANNELS, dy + first * CHANNELS, dout + first * CHANNELS, dx + first * CHANNELS
    s0, s1, ds0, ds1 = s0 + first * SHARE, s1 + first * SHARE, ds0 + first * SHARE, ds1 + first * SHARE
    sum_w = tl.zeros((TILE_POINTS, TILE_CHANNELS), tl.float32)
    sum_b = tl.zeros((TILE_POINTS, TILE_CHANNELS), tl.float32)
    sum_out = tl.zeros((TILE_POINTS, TILE_CHANNELS), tl.float32)
    for start in range(0, CHUNK, TILE_POINTS):
        n = (start + tl.arange(0, TILE_POINTS))[:, None]
        keep = (n < points - tl.program_id(0) * CHUNK) & (c[None, :] < CHANNELS)
        offsets = n * CHANNELS + c[None, :]
        x = _load_joined(H, H_low, s0, s1, n, c[None, :], keep, CHANNELS, TWO_PARTS, BRANCHES, EVEN)
        x, _, r = centre_rows(x, keep, EPS, CHANNELS)
        weight = load_channels(w, c, CHANNELS)
        hat = x * r[:, None]
        g = tl.load(dy + offsets, mask=keep, other=0.0).to(tl.float32)
        dout_tile = tl.load(dout + offsets, mask=keep, other=0.0).to(tl.float32)
        sum_w += g * hat
        sum_b += g
        sum_out += dout_tile
        total = norm_gradient(g * weight[None, :], hat, r, CHANNELS) + dout_tile
        tl.store(dx + offsets, total.to(dx.dtype.element_ty), mask=keep)
        if COPY and BRANCHES == 1:
            tl.store(ds0 + offsets, total.to(ds0.dtype.element_ty), mask=keep)
        if COPY and BRANCHES == 2:
            tl.store(
                _branch_pointers(ds0, ds1, n, c[None, :], CHANNELS, EVEN), total.to(ds0.dtype.element_ty), mask=keep
            )
    sums += tl.program_id(0) * 3 * CHANNELS
    tl.store(sums + c, tl.sum(sum_w, axis=0), mask=c < CHANNELS)
    tl.store(sums + CHANNELS + c, tl.sum(sum_b, axis=0), mask=c < CHANNELS)
    tl.store(sums + 2 * CHANNELS + c, tl.sum(sum_out, axis=0), mask=c < CHANNELS)


class _Launcher:
    """Launches the kernels above for a stream H (N, C) and the responses of its branches."""

    def __init__(
        self,
        H: torch.Tensor,
        low: torch.Tensor | None,
        responses: Sequence[torch.Tensor],
        norm: Affine,
        eps: float,
    ) -> None:
        self.H, self.norm, self.eps, self.two_parts = H, norm, eps, low is not None
        self.points, self.channels = H.shape
        self.inputs = (H, H if low is None else low, *(*responses, H, H)[:2])
        tile_channels = tuning.tile_size(self.channels)
        self.tile = {"CHANNELS": self.channels, "TWO_PARTS": self.two_parts, "BRANCHES": len(responses)}
        self.tile |= {"EVEN": self.channels % 16 == 0}
        self.tile |= {"TILE_POINTS": max(1, tuning.MIXING_TILE // tile_channels), "TILE_CHANNELS": tile_channels}
        self.programs = (triton.cdiv(self.points, self.tile["TILE_POINTS"]),)

    def forward(
        self, W_in: torch.Tensor, b_in: torch.Tensor, W_out: torch.Tensor, b_out: torch.Tensor, save: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """out, its low part if H has one, and y if `save`."""
        shape = tuning.MIXING_TILES[W_in.element_size()]
        tile = self.tile | {"INNER": len(W_out), "TILE_POINTS": shape.points, "TILE_INNER": shape.inner}
        out, low = self._outputs()
        y = W_in.new_empty(self.points, self.channels + EXTRA.value) if save else None
        _mixing_forward[(triton.cdiv(self.points, shape.points),)](
            *self.inputs, *self.norm, W_in, b_in, W_out, b_out, out, out if low is None else low,
            out if y is None else y, self.points, self.eps, SAVE=save, PRECISION=dot_precision(), **tile,
            num_warps=shape.warps, num_stages=shape.stages,
        )  # fmt: skip
        return out, low, y

    def normalise(self, dtype: torch.dtype) -> torch.Tensor:
        """y (N, C + EXTRA)."""
        y = torch.empty(self.points, self.channels + EXTRA.value, device=self.H.device, dtype=dtype)
        _join_norm[self.programs](*self.inputs, *self.norm, y, self.points, self.eps, **self.tile)
        return y

    def add(self, mixed: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """out, and its low part if H has one."""
        out, low = self._outputs()
        _join_add[self.programs](*self.inputs, mixed, bias, out, out if low is None else low, self.points, **self.tile)
        return out, low

    def backward(
        self, dy: torch.Tensor, dout: torch.Tensor, responses: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
        """dx, the gradients of the branches, and partial sums: dw and db of the norm, db of the down projection."""
        dx = torch.empty_like(self.H)
        copy = any(response.dtype != dx.dtype for response in responses)
        views = [dx.narrow(1, i * response.shape[1], response.shape[1]) for i, response in enumerate(responses)]
        gradients = [torch.empty_like(response) for response in responses] if copy else views
        tile_points = max(1, tuning.MIXING_BACKWARD_TILE // self.tile["TILE_CHANNELS"])
        tiles = self.points // (tile_points * tuning.MIXING_PROGRAMS)
        chunk = tile_points * max(1, min(tuning.MAX_MIXING_TILES, tiles))
        chunks = triton.cdiv(self.points, chunk)
        sums = torch.empty(chunks, 3 * self.channels, device=dx.device, dtype=torch.float32)
        _join_backward[(chunks,)](
            *self.inputs, *self.norm, dy, dout, dx, *(*gradients, dx, dx)[:2], sums, self.points, self.eps,
            COPY=copy, CHUNK=chunk, **self.tile | {"TILE_POINTS": tile_points},
            num_warps=tuning.MIXING_BACKWARD_WARPS,
        )  # fmt: skip
        return dx, gradients, sums

    def _outputs(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        return torch.empty_like(self.H), torch.empty_like(self.H) if self.two_parts else None


def _pad_gate_up(tensor: torch.Tensor, inner_width: int, dtype: torch.dtype) -> torch.Tensor:
    """The rows of gate, then those of up, each zero-padded to `inner_width`."""
    half, row = tensor.numel() // 2, tensor[0].numel()
    return arrange(tensor, WeightLayout((2 * inner_width, *tensor.shape[1:]), (2, half), (inner_width * row, 1), dtype))


class _Mixing(torch.autograd.Function):
    """eps, dtype of the products, whether to save y, H (N, C), its low part, norm, gate and up, down, then the
    responses of the branches -> the stream and its low part."""

    @staticmethod
    def forward(
        ctx: Any, eps: float, dtype: torch.dtype, save: bool, H: torch.Tensor, low: torch.Tensor | None,
        w: torch.Tensor, b: torch.Tensor, W_in: torch.Tensor, b_in: torch.Tensor, W_out: torch.Tensor,
        b_out: torch.Tensor, *responses: torch.Tensor,
    ) -> Any:  # fmt: skip
        channels, unpadded = W_out.shape
        inner_width = -(-unpadded // tuning.ALIGNMENT) * tuning.ALIGNMENT
        up, bias = _pad_gate_up(W_in, inner_width, dtype), _pad_gate_up(b_in, inner_width, torch.float32)
        down = arrange(W_out, WeightLayout((inner_width, channels), (channels, unpadded), (1, channels), dtype))
        launcher = _Launcher(H, low, responses, (w, b), eps)
        if fuses_products("mixing products", channels):
            out, low, y = launcher.forward(up, bias, down, b_out, save)
        else:
            y = launcher.normalise(dtype)
            out, low = launcher.add(apply_gate(y[:, :channels] @ up.T, bias, None) @ down, b_out)
        ctx.save_for_backward(H, w, b, up, bias, down, y if save else None, *responses)
        ctx.eps, ctx.unpadded, ctx.dtypes = eps, unpadded, [p.dtype for p in (w, b, W_in, b_in, W_out, b_out)]
        ctx.set_materialize_grads(False)  # no zero gradients for the low part
        if low is not None:
            ctx.mark_non_differentiable(low)
        return out, low

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor, _: None) -> Any:
        H, w, b, up, bias, down, y, *responses = ctx.saved_tensors
        dout = dout.contiguous()
        unpadded, (inner_width, channels) = ctx.unpadded, down.shape
        launcher = _Launcher(H, None, responses, (w, b), ctx.eps)
        y = launcher.normalise(up.dtype) if y is None else y
        a, inner, dy, dout_cast = gate_backward(y, dout, up, bias, down)
        dtype_w, dtype_b, *dtypes, dtype_out = ctx.dtypes

        def inner_gradients() -> list[torch.Tensor]:
            gate_up = product(inner.T, y).view(2, inner_width, -1)[:, :unpadded].flatten(0, 1)
            gradients = gate_up[:, :channels], gate_up[:, channels], product(dout_cast.T, a)[:, :unpadded]
            return [gradient.contiguous().to(dtype) for gradient, dtype in zip(gradients, dtypes, strict=True)]

        dinner = on_side_stream(inner_gradients, inner, y, dout_cast, a)
        dx, gradients, sums = launcher.backward(dy, dout, responses)

        def outer_gradients() -> list[torch.Tensor]:
            totals = zip(sum_partials(sums).split(channels), (dtype_w, dtype_b, dtype_out), strict=True)
            return [total.to(dtype) for total, dtype in totals]

        dw, db, db_out = on_side_stream(outer_gradients, sums)
        return None, None, None, dx, None, dw, db, *dinner, db_out, *gradients


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor whose address is a multiple of 16 bytes."""
    x = x.contiguous()
    return x if x.storage_offset() % 8 == 0 else x.clone()


def add_mixing(
    H: Residual, responses: Sequence[torch.Tensor], norm: Affine, gate_up: Affine, down: Affine, eps: float
) -> Residual:
    """`ops.mixing.add_mixing` for up to two branches; products in autocast's dtype."""
    parts = split(H)
    dtype = product_dtype(parts[0], gate_up[0].dtype)
    rows = [x if x is None else _aligned(x.reshape(-1, x.shape[-1])) for x in (*parts, *responses)]
    save = torch.is_grad_enabled() and parts[0].nbytes < tuning.MAX_SAVED_BYTES
    with torch.autocast(parts[0].device.type, enabled=False):
        out, low = _Mixing.apply(eps, dtype, save, *rows[:2], *norm, *gate_up, *down, *rows[2:])
    return stream_of(out.view(parts[0].shape), low if low is None else low.view(parts[0].shape))
