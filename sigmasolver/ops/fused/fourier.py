"""The axis-factorised Fourier operator with all gradients; no transposed copies between its three products.

    modes = A V (thin product along the axis)      mixed_k = modes_k W(k) (complex)      out += S mixed

    dmixed = S^T dout      dmodes_k = dmixed_k W(k)^H      dV += A^T dmodes      dW(k) = modes_k^H dmixed_k

Only the few modes are saved for backward, not the input. Real and imaginary part of mode k are rows 2k and 2k+1. Weight
gradients are summed over chunks of lines, then over the chunks in a fixed order.

Letters: P points before the axis (batch included), n on it, Q after it, K modes, C and O channels in and out. A line is
one of the P Q lines of points along the axis.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from sigmasolver.ops.fourier_bases import analysis_basis, available_modes, synthesis_basis
from sigmasolver.ops.fused import cast_for_products, dot_precision, rows_of, tuning
from sigmasolver.ops.fused.jit import jit
from sigmasolver.ops.fused.reductions import sum_partials
from sigmasolver.ops.fused.tuning import tile_size
from sigmasolver.ops.side_streams import on_side_stream

__all__ = ["axis_fourier"]


@jit
def _thin(
    basis: tl.tensor, x: tl.tensor, y: tl.tensor,
    rows_out: tl.tensor, rows_in: tl.tensor, columns: tl.tensor, tiles_across: tl.tensor,
    stride_out: tl.tensor, stride_in: tl.tensor, row: tl.tensor, row_stride: tl.tensor,
    ADD: tl.constexpr, EVEN: tl.constexpr,
    TILE_ROWS_OUT: tl.constexpr, TILE_ROWS_IN: tl.constexpr, TILE_COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """y (P, I, L) = basis (I, J) x (P, J, L), added to y if ADD; I rows out, J rows in, L columns.

    The strides are those of basis. Rows of `row` elements of x have the stride `row_stride`; EVEN: groups of eight
    elements are contiguous and aligned."""
    p = (tl.program_id(0) // tiles_across).to(tl.int64)
    i = tl.program_id(1) * TILE_ROWS_OUT + tl.arange(0, TILE_ROWS_OUT)
    column = (tl.program_id(0) % tiles_across) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    line = columns // row * row_stride
    x += p * rows_in * line
    y += p * rows_out * columns
    from_column = column // row * row_stride + column % row
    if EVEN:
        from_column = tl.multiple_of(tl.max_contiguous(from_column, 8), 8)
    acc = tl.zeros((TILE_ROWS_OUT, TILE_COLUMNS), tl.float32)
    for start in range(0, rows_in, TILE_ROWS_IN):
        j = start + tl.arange(0, TILE_ROWS_IN)
        keep = (i[:, None] < rows_out) & (j[None, :] < rows_in)
        t = tl.load(basis + i[:, None] * stride_out + j[None, :] * stride_in, mask=keep, other=0.0)
        keep = (j[:, None] < rows_in) & (column[None, :] < columns)
        v = tl.load(x + j[:, None] * line + from_column[None, :], mask=keep, other=0.0)
        acc = tl.dot(t, v, acc, input_precision=PRECISION)
    keep = (i[:, None] < rows_out) & (column[None, :] < columns)
    target = y + i[:, None] * columns + column[None, :]
    if ADD:
        acc += tl.load(target, mask=keep, other=0.0).to(tl.float32)
    tl.store(target, acc.to(y.dtype.element_ty), mask=keep)


@jit
def _load_complex(
    w: tl.tensor,
    first: tl.tensor, second: tl.tensor, rows: tl.tensor,
    columns: tl.tensor, row_stride: tl.tensor, TILE_COLUMNS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """Real and imaginary part, (first, TILE_COLUMNS) each, of rows `first` of the complex matrix w (rows, columns),
    starting at column `second`; the two parts are stored next to each other."""
    pair = tl.arange(0, 2 * TILE_COLUMNS)
    keep = (first[:, None] < rows) & (second + pair[None, :] // 2 < columns)
    pairs = tl.load(w + first[:, None] * row_stride + 2 * second + pair[None, :], mask=keep, other=0.0)
    return tl.split(tl.reshape(pairs, (first.shape[0], TILE_COLUMNS, 2)))


@jit
def _mix(
    x: tl.tensor, w: tl.tensor, y: tl.tensor,
    lines: tl.tensor, modes: tl.tensor, after: tl.tensor, channels_in: tl.tensor, channels_out: tl.tensor,
    HERMITIAN: tl.constexpr, TILE_LINES: tl.constexpr, TILE_CHANNELS_IN: tl.constexpr, TILE_CHANNELS_OUT: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """y (P, K, 2, Q, O) = x (P, K, 2, Q, C) times W(k) (C, O), or, if HERMITIAN, times W(k)^H with W(k) (O, C)."""
    k = tl.program_id(1)
    r, first_out = tl.program_id(0) * TILE_LINES + tl.arange(0, TILE_LINES), tl.program_id(2) * TILE_CHANNELS_OUT
    o = first_out + tl.arange(0, TILE_CHANNELS_OUT)
    inside = r < lines
    real_line = ((r // after) * modes + k).to(tl.int64) * 2 * after + r % after
    real = tl.zeros((TILE_LINES, TILE_CHANNELS_OUT), tl.float32)
    imaginary = tl.zeros((TILE_LINES, TILE_CHANNELS_OUT), tl.float32)
    w += k * channels_in * channels_out * 2
    for start in range(0, channels_in, TILE_CHANNELS_IN):
        c = start + tl.arange(0, TILE_CHANNELS_IN)
        keep = inside[:, None] & (c[None, :] < channels_in)
        xr = tl.load(x + real_line[:, None] * channels_in + c[None, :], mask=keep, other=0.0)
        xi = tl.load(x + (real_line + after)[:, None] * channels_in + c[None, :], mask=keep, other=0.0)
        if HERMITIAN:
            wr, wi = _load_complex(w, o, start, channels_out, channels_in, 2 * channels_in, TILE_CHANNELS_IN)
            wr, wi = tl.trans(wr), -tl.trans(wi)
        else:
            wr, wi = _load_complex(w, c, first_out, channels_in, channels_out, 2 * channels_out, TILE_CHANNELS_OUT)
        wr, wi = wr.to(xr.dtype), wi.to(xr.dtype)
        real = tl.dot(xr, wr, real, input_precision=PRECISION)
        real = tl.dot(xi, -wi, real, input_precision=PRECISION)
        imaginary = tl.dot(xr, wi, imaginary, input_precision=PRECISION)
        imaginary = tl.dot(xi, wr, imaginary, input_precision=PRECISION)
    keep = inside[:, None] & (o[None, :] < channels_out)
    tl.store(y + real_line[:, None] * channels_out + o[None, :], real.to(y.dtype.element_ty), mask=keep)
    tl.store(y + (real_line + after)[:, None] * channels_out + o[None, :], imaginary.to(y.dtype.element_ty), mask=keep)


@jit
def _mix_gradient(
    x: tl.tensor, g: tl.tensor, sums: tl.tensor,
    lines: tl.tensor, modes: tl.tensor, after: tl.tensor, channels_in: tl.tensor, channels_out: tl.tensor,
    tiles_out: tl.tensor,
    TILE_LINES: tl.constexpr, TILE_CHANNELS_IN: tl.constexpr, TILE_CHANNELS_OUT: tl.constexpr, CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """sums (chunks, K, C, O, 2): real and imaginary part of x^H g over one chunk of lines; x (P, K, 2, Q, C), g
    (P, K, 2, Q, O)."""
    chunk, k, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    c = (tile // tiles_out) * TILE_CHANNELS_IN + tl.arange(0, TILE_CHANNELS_IN)
    o = (tile % tiles_out) * TILE_CHANNELS_OUT + tl.arange(0, TILE_CHANNELS_OUT)
    real = tl.zeros((TILE_CHANNELS_IN, TILE_CHANNELS_OUT), tl.float32)
    imaginary = tl.zeros((TILE_CHANNELS_IN, TILE_CHANNELS_OUT), tl.float32)
    for start in range(0, CHUNK, TILE_LINES):
        r = chunk * CHUNK + start + tl.arange(0, TILE_LINES)
        line = ((r // after) * modes + k).to(tl.int64) * 2 * after + r % after
        keep_x = (r[:, None] < lines) & (c[None, :] < channels_in)
        keep_g = (r[:, None] < lines) & (o[None, :] < channels_out)
        xr = tl.trans(tl.load(x + line[:, None] * channels_in + c[None, :], mask=keep_x, other=0.0))
        xi = tl.trans(tl.load(x + (line + after)[:, None] * channels_in + c[None, :], mask=keep_x, other=0.0))
        gr = tl.load(g + line[:, None] * channels_out + o[None, :], mask=keep_g, other=0.0)
        gi = tl.load(g + (line + after)[:, None] * channels_out + o[None, :], mask=keep_g, other=0.0)
        real = tl.dot(xr, gr, real, input_precision=PRECISION)
        real = tl.dot(xi, gi, real, input_precision=PRECISION)
        imaginary = tl.dot(xr, gi, imaginary, input_precision=PRECISION)
        imaginary = tl.dot(-xi, gr, imaginary, input_precision=PRECISION)
    pair = tl.arange(0, 2 * TILE_CHANNELS_OUT)
    target = (
        sums
        + (chunk.to(tl.int64) * modes + k) * channels_in * channels_out * 2
        + c[:, None] * (2 * channels_out)
        + (tile % tiles_out) * 2 * TILE_CHANNELS_OUT
        + pair[None, :]
    )
    keep = (c[:, None] < channels_in) & ((tile % tiles_out) * TILE_CHANNELS_OUT + pair[None, :] // 2 < channels_out)
    tl.store(target, tl.reshape(tl.join(real, imaginary), (TILE_CHANNELS_IN, 2 * TILE_CHANNELS_OUT)), mask=keep)


def _bounded_tile(size: int, maximum: int) -> int:
    return min(maximum, tile_size(size))


def _apply_basis(
    basis: torch.Tensor, x: torch.Tensor, y: torch.Tensor, sizes: tuple[int, int, int], add: bool,
    rows: tuple[int, int] | None = None,
) -> None:  # fmt: skip
    """`sizes`: P, J, L of `_thin`; basis (I, J) may be a transposed view; `rows`: length and stride of rows of x."""
    before, rows_in, columns = sizes
    row, row_stride = rows or (columns, columns)
    rows_out = basis.shape[0]
    limits = tuning.THIN_TILES[x.element_size()]
    tile_out, tile_in, tile_columns = (
        _bounded_tile(*pair) for pair in zip((rows_out, rows_in, columns), limits, strict=True)
    )
    tiles_across = triton.cdiv(columns, tile_columns)
    _thin[(before * tiles_across, triton.cdiv(rows_out, tile_out))](
        basis, x, y, rows_out, rows_in, columns, tiles_across, *basis.stride(), row, row_stride, ADD=add,
        EVEN=row % 8 == 0 and row_stride % 8 == 0, TILE_ROWS_OUT=tile_out, TILE_ROWS_IN=tile_in,
        TILE_COLUMNS=tile_columns, PRECISION=dot_precision(), num_warps=tuning.FOURIER_WARPS,
    )  # fmt: skip


def _apply_weight(
    x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor, sizes: tuple[int, int, int], hermitian: bool
) -> None:
    """`sizes`: P, K, Q; `hermitian`: multiply by the Hermitian transpose of the weight."""
    before, modes, after = sizes
    channels_in, channels_out = weight.shape[1:3]
    if hermitian:
        channels_in, channels_out = channels_out, channels_in
    tile_in, tile_out = (_bounded_tile(size, tuning.MODE_CHANNELS) for size in (channels_in, channels_out))
    _mix[(triton.cdiv(before * after, tuning.MODE_LINES), modes, triton.cdiv(channels_out, tile_out))](
        x, weight, y, before * after, modes, after, channels_in, channels_out, HERMITIAN=hermitian,
        TILE_LINES=tuning.MODE_LINES, TILE_CHANNELS_IN=tile_in, TILE_CHANNELS_OUT=tile_out,
        PRECISION=dot_precision(), num_warps=tuning.FOURIER_WARPS,
    )  # fmt: skip


def _weight_gradient(
    x: torch.Tensor, g: torch.Tensor, weight: torch.Tensor, sizes: tuple[int, int, int]
) -> tuple[torch.Tensor]:
    before, modes, after = sizes
    channels_in, channels_out = weight.shape[1:3]
    lines, tile_lines = before * after, tuning.MODE_LINES
    tile_in, tile_out = (_bounded_tile(size, tuning.MODE_CHANNELS) for size in (channels_in, channels_out))
    chunk = min(tuning.MODE_CHUNK, triton.cdiv(lines, tile_lines) * tile_lines)
    chunks, tiles_across = triton.cdiv(lines, chunk), triton.cdiv(channels_out, tile_out)
    sums = torch.empty(chunks, modes, channels_in, channels_out, 2, device=x.device, dtype=torch.float32)
    _mix_gradient[(chunks, modes, triton.cdiv(channels_in, tile_in) * tiles_across)](
        x, g, sums, lines, modes, after, channels_in, channels_out, tiles_across, TILE_LINES=tile_lines,
        TILE_CHANNELS_IN=tile_in, TILE_CHANNELS_OUT=tile_out, CHUNK=chunk, PRECISION=dot_precision(),
        num_warps=tuning.FOURIER_WARPS,
    )  # fmt: skip
    total = sum_partials(sums).to(weight.dtype)
    missing = weight.shape[0] - modes  # modes beyond those of this grid
    return (torch.cat((total, total.new_zeros(missing, channels_in, channels_out, 2))) if missing else total,)


class _AxisFourier(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, V: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        out = torch.empty(*V.shape[:-1], weights[0].shape[2], device=V.device, dtype=V.dtype)
        modes_by_axis = []
        for axis, weight in enumerate(weights, start=1):
            P, n, Q, K, C, O = _sizes(V, axis, weight)
            analyse, synthesise = _bases(V, n, K)
            modes, mixed = V.new_empty(P, 2 * K, Q, C), V.new_empty(P, 2 * K, Q, O)
            _apply_basis(analyse, V, modes, (P, n, Q * C), add=False)
            _apply_weight(modes, weight, mixed, (P, K, Q), hermitian=False)
            _apply_basis(synthesise, mixed, out, (P, 2 * K, Q * O), add=axis > 1)
            modes_by_axis.append(modes)
        ctx.save_for_backward(*weights, *modes_by_axis)
        ctx.shape = V.shape
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> Any:
        dout_rows = rows_of(dout)
        saved = ctx.saved_tensors  # read once: with activation checkpointing a second read fails
        weights, modes_by_axis = saved[: len(saved) // 2], saved[len(saved) // 2 :]
        dV = dout.new_empty(ctx.shape)
        gradients: list[torch.Tensor] = []
        for axis, (weight, modes) in enumerate(zip(weights, modes_by_axis, strict=True), start=1):
            P, n, Q, K, C, O = _sizes(dV, axis, weight)
            analyse, synthesise = _bases(dV, n, K)
            dmixed, dmodes = dout.new_empty(P, 2 * K, Q, O), torch.empty_like(modes)
            _apply_basis(synthesise.T, dout_rows, dmixed, (P, n, Q * O), add=False, rows=(O, dout_rows.stride(0)))
            _apply_weight(dmixed, weight, dmodes, (P, K, Q), hermitian=True)
            _apply_basis(analyse.T, dmodes, dV, (P, 2 * K, Q * C), add=axis > 1)
            weight_gradient = partial(_weight_gradient, modes, dmixed, weight, (P, K, Q))
            gradients += on_side_stream(weight_gradient, modes, dmixed)
        return dV, *gradients


def _sizes(V: torch.Tensor, axis: int, weight: torch.Tensor) -> tuple[int, int, int, int, int, int]:
    n = V.shape[axis]
    K = min(weight.shape[0], available_modes(n))
    return math.prod(V.shape[:axis]), n, math.prod(V.shape[axis + 1 : -1]), K, weight.shape[1], weight.shape[2]


def _bases(V: torch.Tensor, n: int, K: int) -> tuple[torch.Tensor, torch.Tensor]:
    return analysis_basis(n, K, V.dtype, V.device), synthesis_basis(n, K, V.dtype, V.device)


def axis_fourier(V: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
    """`ops.fourier.axis_fourier`, in autocast's dtype."""
    return _AxisFourier.apply(cast_for_products(V).contiguous(), *(weight.contiguous() for weight in weights))
