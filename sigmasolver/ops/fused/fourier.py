"""The axis-factorised Fourier operator with both gradients; between its three products no tensor is moved around.

    modes = A V (thin product along the axis)      mixed_k = modes_k W(k) (complex)      out += S mixed

    dmixed = S^T dout      dmodes_k = dmixed_k W(k)^H      dV += A^T dmodes      dW(k) = modes_k^H dmixed_k

The input is not kept for the backward pass, only the few modes. Real and imaginary part of mode k are rows 2k and 2k+1.
Weight gradients are summed over chunks of lines, then over chunks in a fixed order.

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
from sigmasolver.ops.fused import dot_precision, product_dtype, rows_of, tuning
from sigmasolver.ops.fused.reductions import sum_partials
from sigmasolver.ops.fused.tuning import tile_size
from sigmasolver.ops.side_streams import on_side_stream

__all__ = ["axis_fourier"]


@triton.jit
def _thin(
    basis: tl.tensor, x: tl.tensor, y: tl.tensor,
    I: tl.tensor, J: tl.tensor, L: tl.tensor, tiles_l: tl.tensor,
    along_i: tl.tensor, along_j: tl.tensor, row: tl.tensor, row_stride: tl.tensor,
    ADD: tl.constexpr, EVEN: tl.constexpr, ROWS_OUT: tl.constexpr, ROWS_IN: tl.constexpr, COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """y (P, I, L) = basis (I, J) x (P, J, L), added to y where ADD.

    basis has the strides along_i and along_j. Rows of `row` numbers of x lie `row_stride` apart; EVEN: eight in a row
    are contiguous and aligned."""
    p = (tl.program_id(0) // tiles_l).to(tl.int64)
    i, l = (
        tl.program_id(1) * ROWS_OUT + tl.arange(0, ROWS_OUT),
        (tl.program_id(0) % tiles_l) * COLUMNS + tl.arange(0, COLUMNS),
    )
    line = L // row * row_stride
    x += p * J * line
    y += p * I * L
    from_l = l // row * row_stride + l % row
    if EVEN:
        from_l = tl.multiple_of(tl.max_contiguous(from_l, 8), 8)
    total = tl.zeros((ROWS_OUT, COLUMNS), tl.float32)
    for start in range(0, J, ROWS_IN):
        j = start + tl.arange(0, ROWS_IN)
        t = tl.load(
            basis + i[:, None] * along_i + j[None, :] * along_j, mask=(i[:, None] < I) & (j[None, :] < J), other=0.0
        )
        v = tl.load(x + j[:, None] * line + from_l[None, :], mask=(j[:, None] < J) & (l[None, :] < L), other=0.0)
        total = tl.dot(t, v, total, input_precision=PRECISION)
    keep = (i[:, None] < I) & (l[None, :] < L)
    to = y + i[:, None] * L + l[None, :]
    if ADD:
        total += tl.load(to, mask=keep, other=0.0).to(tl.float32)
    tl.store(to, total.to(y.dtype.element_ty), mask=keep)


@triton.jit
def _complex(
    w: tl.tensor,
    first: tl.tensor, second: tl.tensor, rows: tl.tensor,
    columns: tl.tensor, row_stride: tl.tensor, COLUMNS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """Real and imaginary part, (first, COLUMNS) each, of rows `first` of the complex matrix w (rows, columns) from
    column `second` on; the two parts of a number are neighbours."""
    pair = tl.arange(0, 2 * COLUMNS)
    keep = (first[:, None] < rows) & (second + pair[None, :] // 2 < columns)
    both = tl.load(w + first[:, None] * row_stride + 2 * second + pair[None, :], mask=keep, other=0.0)
    return tl.split(tl.reshape(both, (first.shape[0], COLUMNS, 2)))


@triton.jit
def _mix(
    x: tl.tensor, w: tl.tensor, y: tl.tensor,
    lines: tl.tensor, K: tl.tensor, Q: tl.tensor, C: tl.tensor, O: tl.tensor,
    HERMITIAN: tl.constexpr, LINES: tl.constexpr, COLUMNS_IN: tl.constexpr, COLUMNS_OUT: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """y (P, K, 2, Q, O) = x (P, K, 2, Q, C) times W(k) (C, O), or times the Hermitian transpose of W(k) (O, C)."""
    k = tl.program_id(1)
    r, o = tl.program_id(0) * LINES + tl.arange(0, LINES), tl.program_id(2) * COLUMNS_OUT + tl.arange(0, COLUMNS_OUT)
    inside = r < lines
    real_line = ((r // Q) * K + k).to(tl.int64) * 2 * Q + r % Q
    real = tl.zeros((LINES, COLUMNS_OUT), tl.float32)
    imaginary = tl.zeros((LINES, COLUMNS_OUT), tl.float32)
    w += k * C * O * 2
    for start in range(0, C, COLUMNS_IN):
        c = start + tl.arange(0, COLUMNS_IN)
        keep = inside[:, None] & (c[None, :] < C)
        xr = tl.load(x + real_line[:, None] * C + c[None, :], mask=keep, other=0.0)
        xi = tl.load(x + (real_line + Q)[:, None] * C + c[None, :], mask=keep, other=0.0)
        if HERMITIAN:
            wr, wi = _complex(w, o, start, O, C, 2 * C, COLUMNS_IN)
            wr, wi = tl.trans(wr), -tl.trans(wi)
        else:
            wr, wi = _complex(w, c, tl.program_id(2) * COLUMNS_OUT, C, O, 2 * O, COLUMNS_OUT)
        wr, wi = wr.to(xr.dtype), wi.to(xr.dtype)
        real = tl.dot(xr, wr, real, input_precision=PRECISION)
        real = tl.dot(xi, -wi, real, input_precision=PRECISION)
        imaginary = tl.dot(xr, wi, imaginary, input_precision=PRECISION)
        imaginary = tl.dot(xi, wr, imaginary, input_precision=PRECISION)
    keep = inside[:, None] & (o[None, :] < O)
    tl.store(y + real_line[:, None] * O + o[None, :], real.to(y.dtype.element_ty), mask=keep)
    tl.store(y + (real_line + Q)[:, None] * O + o[None, :], imaginary.to(y.dtype.element_ty), mask=keep)


@triton.jit
def _mix_gradient(
    x: tl.tensor, g: tl.tensor, sums: tl.tensor,
    lines: tl.tensor, K: tl.tensor, Q: tl.tensor, C: tl.tensor, O: tl.tensor, tiles_o: tl.tensor,
    LINES: tl.constexpr, COLUMNS_IN: tl.constexpr, COLUMNS_OUT: tl.constexpr, CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """sums (chunks, K, C, O, 2): real and imaginary part of x^H g over one chunk of lines; x (P, K, 2, Q, C), g
    (P, K, 2, Q, O)."""
    chunk, k, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    c, o = (
        (tile // tiles_o) * COLUMNS_IN + tl.arange(0, COLUMNS_IN),
        (tile % tiles_o) * COLUMNS_OUT + tl.arange(0, COLUMNS_OUT),
    )
    real = tl.zeros((COLUMNS_IN, COLUMNS_OUT), tl.float32)
    imaginary = tl.zeros((COLUMNS_IN, COLUMNS_OUT), tl.float32)
    for start in range(0, CHUNK, LINES):
        r = chunk * CHUNK + start + tl.arange(0, LINES)
        line = ((r // Q) * K + k).to(tl.int64) * 2 * Q + r % Q
        keep_x, keep_g = (r[:, None] < lines) & (c[None, :] < C), (r[:, None] < lines) & (o[None, :] < O)
        xr = tl.trans(tl.load(x + line[:, None] * C + c[None, :], mask=keep_x, other=0.0))
        xi = tl.trans(tl.load(x + (line + Q)[:, None] * C + c[None, :], mask=keep_x, other=0.0))
        gr = tl.load(g + line[:, None] * O + o[None, :], mask=keep_g, other=0.0)
        gi = tl.load(g + (line + Q)[:, None] * O + o[None, :], mask=keep_g, other=0.0)
        real = tl.dot(xr, gr, real, input_precision=PRECISION)
        real = tl.dot(xi, gi, real, input_precision=PRECISION)
        imaginary = tl.dot(xr, gi, imaginary, input_precision=PRECISION)
        imaginary = tl.dot(-xi, gr, imaginary, input_precision=PRECISION)
    pair = tl.arange(0, 2 * COLUMNS_OUT)
    to = (
        sums
        + (chunk.to(tl.int64) * K + k) * C * O * 2
        + c[:, None] * (2 * O)
        + (tile % tiles_o) * 2 * COLUMNS_OUT
        + pair[None, :]
    )
    keep = (c[:, None] < C) & ((tile % tiles_o) * COLUMNS_OUT + pair[None, :] // 2 < O)
    tl.store(to, tl.reshape(tl.join(real, imaginary), (COLUMNS_IN, 2 * COLUMNS_OUT)), mask=keep)


def _at_most(size: int, most: int) -> int:
    return min(most, tile_size(size))


def _apply_basis(
    basis: torch.Tensor, x: torch.Tensor, y: torch.Tensor, sizes: tuple[int, int, int], add: bool,
    rows: tuple[int, int] | None = None,
) -> None:  # fmt: skip
    """`sizes`: P, J, L; basis (I, J) may be a transposed view; `rows`: length and stride of those of x."""
    P, J, L = sizes
    row, row_stride = rows or (L, L)
    I = basis.shape[0]
    tiles = [_at_most(size, most) for size, most in zip((I, J, L), tuning.THIN_TILES[x.element_size()], strict=True)]
    across = triton.cdiv(L, tiles[2])
    _thin[(P * across, triton.cdiv(I, tiles[0]))](
        basis, x, y, I, J, L, across, *basis.stride(), row, row_stride, ADD=add,
        EVEN=row % 8 == 0 and row_stride % 8 == 0, ROWS_OUT=tiles[0], ROWS_IN=tiles[1], COLUMNS=tiles[2],
        PRECISION=dot_precision(), num_warps=tuning.FOURIER_WARPS,
    )  # fmt: skip


def _apply_weight(
    x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor, sizes: tuple[int, int, int], hermitian: bool
) -> None:
    """`sizes`: P, K, Q; `hermitian`: with the Hermitian transpose of the weight."""
    P, K, Q = sizes
    C, O = weight.shape[1:3]
    if hermitian:
        C, O = O, C
    lines, columns_in, columns_out = tuning.MODE_LINES, *(_at_most(size, tuning.MODE_CHANNELS) for size in (C, O))
    _mix[(triton.cdiv(P * Q, lines), K, triton.cdiv(O, columns_out))](
        x, weight, y, P * Q, K, Q, C, O, HERMITIAN=hermitian, LINES=lines, COLUMNS_IN=columns_in,
        COLUMNS_OUT=columns_out, PRECISION=dot_precision(), num_warps=tuning.FOURIER_WARPS,
    )  # fmt: skip


def _weight_gradient(
    x: torch.Tensor, g: torch.Tensor, weight: torch.Tensor, sizes: tuple[int, int, int]
) -> tuple[torch.Tensor]:
    P, K, Q = sizes
    C, O = weight.shape[1:3]
    lines, columns_in, columns_out = tuning.MODE_LINES, *(_at_most(size, tuning.MODE_CHANNELS) for size in (C, O))
    chunk = min(tuning.MODE_CHUNK, triton.cdiv(P * Q, lines) * lines)
    chunks, across = triton.cdiv(P * Q, chunk), triton.cdiv(O, columns_out)
    sums = torch.empty(chunks, K, C, O, 2, device=x.device, dtype=torch.float32)
    _mix_gradient[(chunks, K, triton.cdiv(C, columns_in) * across)](
        x, g, sums, P * Q, K, Q, C, O, across, LINES=lines, COLUMNS_IN=columns_in, COLUMNS_OUT=columns_out,
        CHUNK=chunk, PRECISION=dot_precision(), num_warps=tuning.FOURIER_WARPS,
    )  # fmt: skip
    total = sum_partials(sums).to(weight.dtype)
    missing = weight.shape[0] - K  # modes that this grid does not have
    return (torch.cat((total, total.new_zeros(missing, C, O, 2))) if missing else total,)


class _AxisFourier(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, V: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        out = torch.empty(*V.shape[:-1], weights[0].shape[2], device=V.device, dtype=V.dtype)
        kept = []
        for axis, weight in enumerate(weights, start=1):
            P, n, Q, K, C, O = _sizes(V, axis, weight)
            analyse, synthesise = _bases(V, n, K)
            modes, mixed = V.new_empty(P, 2 * K, Q, C), V.new_empty(P, 2 * K, Q, O)
            _apply_basis(analyse, V, modes, (P, n, Q * C), add=False)
            _apply_weight(modes, weight, mixed, (P, K, Q), hermitian=False)
            _apply_basis(synthesise, mixed, out, (P, 2 * K, Q * O), add=axis > 1)
            kept.append(modes)
        ctx.save_for_backward(*weights, *kept)
        ctx.shape = V.shape
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> Any:
        given = rows_of(dout)
        saved = ctx.saved_tensors  # once: what recomputation gives back may be asked for only once
        weights, kept = saved[: len(saved) // 2], saved[len(saved) // 2 :]
        dV = dout.new_empty(ctx.shape)
        gradients: list[torch.Tensor] = []
        for axis, (weight, modes) in enumerate(zip(weights, kept, strict=True), start=1):
            P, n, Q, K, C, O = _sizes(dV, axis, weight)
            analyse, synthesise = _bases(dV, n, K)
            dmixed, dmodes = dout.new_empty(P, 2 * K, Q, O), torch.empty_like(modes)
            _apply_basis(synthesise.T, given, dmixed, (P, n, Q * O), add=False, rows=(O, given.stride(0)))
            _apply_weight(dmixed, weight, dmodes, (P, K, Q), hermitian=True)
            _apply_basis(analyse.T, dmodes, dV, (P, 2 * K, Q * C), add=axis > 1)
            made = partial(_weight_gradient, modes, dmixed, weight, (P, K, Q))
            gradients += on_side_stream(made, modes, dmixed)
        return dV, *gradients


def _sizes(V: torch.Tensor, axis: int, weight: torch.Tensor) -> tuple[int, int, int, int, int, int]:
    n = V.shape[axis]
    K = min(weight.shape[0], available_modes(n))
    return math.prod(V.shape[:axis]), n, math.prod(V.shape[axis + 1 : -1]), K, weight.shape[1], weight.shape[2]


def _bases(V: torch.Tensor, n: int, K: int) -> tuple[torch.Tensor, torch.Tensor]:
    return analysis_basis(n, K, V.dtype, V.device), synthesis_basis(n, K, V.dtype, V.device)


def axis_fourier(V: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
    """`ops.fourier.axis_fourier`, in autocast's type."""
    V = V.to(product_dtype(V, V.dtype)).contiguous()
    return _AxisFourier.apply(V, *(weight.contiguous() for weight in weights))
