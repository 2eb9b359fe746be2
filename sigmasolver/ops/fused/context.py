"""The entry of a block in one kernel: depthwise convolution, residual, and the layer norm of each group of channels.

    H' = H + conv(H),      y_i = LN_i(H'_i)            dH' = dout + sum_i LN_i'(dy_i),      dH = dH' + conv^T(dH')

Letters as in `convolution`: X Y Z points per axis, C channels, G channels of a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from sigmasolver.ops.fused import product_dtype, tuning
from sigmasolver.ops.fused.convolution import RUN, Shape, taps_of, window
from sigmasolver.ops.fused.layer_norm import centred, load_channels, norms_backward
from sigmasolver.ops.fused.stream import load_stream, store_stream
from sigmasolver.ops.modules import Affine
from sigmasolver.ops.stream import Residual, split, stream_of

__all__ = ["add_context"]


@triton.jit
def _interleaved(four: tl.tuple) -> tl.tensor:
    """(n, 4) of four times (n,): stored together they wait for each other once."""
    pairs = tl.join(tl.join(four[0], four[2]), tl.join(four[1], four[3]))
    return tl.reshape(pairs, (pairs.shape[0], 4))


@triton.jit
def _context(
    H: tl.tensor, H_low: tl.tensor, taps: tl.tensor, conv_bias: tl.tensor, weight0: tl.tensor,
    bias0: tl.tensor, weight1: tl.tensor, bias1: tl.tensor, out: tl.tensor,
    out_low: tl.tensor, y0: tl.tensor, y1: tl.tensor, mean: tl.tensor, r: tl.tensor,
    X: tl.tensor, Y: tl.tensor, Z: tl.tensor, C: tl.tensor, N: tl.tensor, tiles_z: tl.tensor, eps: tl.constexpr,
    KX: tl.constexpr, KY: tl.constexpr, KZ: tl.constexpr,
    CIRCULAR_X: tl.constexpr, CIRCULAR_Y: tl.constexpr, CIRCULAR_Z: tl.constexpr,
    TWO_PARTS: tl.constexpr, G: tl.constexpr, LINES: tl.constexpr, RUNS: tl.constexpr, COLUMNS: tl.constexpr,
) -> None:  # fmt: skip
    """out = H + conv(H) and y_i = LN_i(out_i) of one group of G channels, which the program holds whole.

    H and out (B, X, Y, Z, C), each with a low part where TWO_PARTS; the convolution reads the main part alone. y_i
    (N, G), mean and r (groups, N); taps (KX KY KZ, C), weight_i and bias_i (G,) of the norms."""
    tile, group, plane = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    p, j = tl.arange(0, LINES * RUNS), tl.arange(0, COLUMNS)
    y, z = (tile // tiles_z) * LINES + p // RUNS, ((tile % tiles_z) * RUNS + p % RUNS) * RUN
    c = group * G + j
    points, channels = (y < Y) & (z < Z), j < G
    sums = window(
        H, H, taps, taps, plane // X, plane % X, y, z, c, points, channels, X, Y, Z, C, KX, KY, KZ,
        CIRCULAR_X, CIRCULAR_Y, CIRCULAR_Z, False, False, False, LINES * RUNS, COLUMNS,
    )[0]  # fmt: skip
    offset = tl.load(conv_bias + c, mask=channels, other=0.0).to(tl.float32)[None, :]
    if group == 0:
        weight = load_channels(weight0, j, G)
        bias = load_channels(bias0, j, G)
        normed = y0
    else:
        weight = load_channels(weight1, j, G)
        bias = load_channels(bias1, j, G)
        normed = y1
    means: tl.tuple = ()
    scales: tl.tuple = ()
    for run in tl.static_range(RUN):
        keep = (points & (z + run < Z))[:, None] & channels[None, :]
        row = plane.to(tl.int64) * Y * Z + y * Z + z + run
        offsets = row[:, None] * C + c[None, :]
        x = sums[run] + offset + load_stream(H, H_low, offsets, keep, TWO_PARTS)
        store_stream(out, out_low, offsets, x, keep, TWO_PARTS)
        if COLUMNS != G:
            x = tl.where(channels[None, :], x, 0.0)
        x, m, s = centred(x, channels[None, :], eps, G)
        y_i = x * s[:, None] * weight[None, :] + bias[None, :]
        tl.store(normed + row[:, None] * G + j[None, :], y_i.to(y0.dtype.element_ty), mask=keep)
        means += (m,)
        scales += (s,)
    on = z[:, None] + tl.arange(0, RUN)[None, :]
    row = group * N + plane.to(tl.int64) * Y * Z + (y * Z)[:, None] + on
    keep = points[:, None] & (on < Z)
    tl.store(mean + row, _interleaved(means), mask=keep)
    tl.store(r + row, _interleaved(scales), mask=keep)


class _ContextNorms(torch.autograd.Function):
    """H and its low part, weight, bias, padding, eps, type of the normed, weight and bias of norms -> H + convolution
    and its low part, normed."""

    @staticmethod
    def forward(
        ctx: Any, H: torch.Tensor, H_low: torch.Tensor | None, weight: torch.Tensor, bias: torch.Tensor,
        padding: tuple[str, ...], eps: float, dtype: torch.dtype, *norms: torch.Tensor,
    ) -> Any:  # fmt: skip
        shape = Shape(H, weight, padding)
        X, Y, Z = shape.grid
        C, groups, N = shape.channels, len(norms) // 2, H[..., 0].numel()
        G = C // groups
        out, taps = torch.empty_like(H), taps_of(weight, H.dtype)
        out_low = None if H_low is None else torch.empty_like(H)
        normed = [torch.empty(*H.shape[:-1], G, device=H.device, dtype=dtype) for _ in range(groups)]
        statistics = torch.empty(2, groups, N, device=H.device, dtype=torch.float32)
        COLUMNS = triton.next_power_of_2(G)
        LINES, RUNS = shape.tiles(max(1, tuning.CONTEXT_TILE // COLUMNS))
        tiles = (triton.cdiv(Y, LINES), triton.cdiv(Z, RUNS * RUN.value))
        _context[(tiles[0] * tiles[1], groups, shape.batch * X)](
            H, H if H_low is None else H_low, taps, bias, norms[0], norms[1], norms[-2], norms[-1],
            out, out if out_low is None else out_low, normed[0], normed[-1], *statistics,
            X, Y, Z, C, N, tiles[1], eps, **shape.constants, TWO_PARTS=H_low is not None, G=G, LINES=LINES, RUNS=RUNS,
            COLUMNS=COLUMNS, num_warps=tuning.CONTEXT_WARPS,
        )  # fmt: skip
        ctx.save_for_backward(H, taps, out, statistics, norms[0], norms[-2])
        ctx.shape, ctx.like = shape, [(one.shape, one.dtype) for one in (weight, bias)]
        ctx.set_materialize_grads(False)  # no zeros for the low part
        if out_low is not None:
            ctx.mark_non_differentiable(out_low)
        return out, out_low, *normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor | None, _: None, *dnormed: torch.Tensor | None) -> Any:
        H, taps, out, statistics, *weights = ctx.saved_tensors
        shape: Shape = ctx.shape
        missing = (*out.shape[:-1], out.shape[-1] // len(dnormed))
        gradients = [out.new_zeros(missing) if one is None else one for one in dnormed]
        more = None if dout is None else dout.contiguous()
        total, norms = norms_backward(out, gradients, statistics, weights, more)
        dH, found = shape.backward(H, [total], [taps], ctx.like, residual=True)
        return dH, None, *found, None, None, None, *norms


def add_context(
    H: Residual, convolution: Affine, padding: Sequence[str], norms: Sequence[Affine], eps: float
) -> tuple[Residual, list[torch.Tensor]]:
    """H + convolution of H, and the layer norm of each of one or two equal groups of its channels."""
    main, low = split(H)
    dtype = product_dtype(main, convolution[0].dtype)
    flat = [one for norm in norms for one in norm]
    given = main.contiguous(), low if low is None else low.contiguous()
    out, low, *normed = _ContextNorms.apply(*given, *convolution, tuple(padding), eps, dtype, *flat)
    return stream_of(out, low), normed
