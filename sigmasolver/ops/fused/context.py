"""The entry of a block in one kernel: depthwise convolution, residual, and the layer norm of each group of channels.

    H' = H + conv(H),      y_i = LN_i(H'_i)            dH' = dout + sum_i LN_i'(dy_i),      dH = dH' + conv^T(dH')

Letters as in `convolution`: X Y Z points per axis, C channels, G channels of a group; BC channels of a tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from sigmasolver.ops.fused import product_dtype
from sigmasolver.ops.fused.convolution import RUN, Shape, pick, taps_of, window
from sigmasolver.ops.fused.layer_norm import norms_backward
from sigmasolver.ops.fused.stream import load_stream, store_stream
from sigmasolver.ops.modules import Affine
from sigmasolver.ops.stream import Residual, split, stream_of

__all__ = ["add_context"]

TILE, WARPS = 512, 4
"""Elements of a tile, each of which stands for a run of points; warps of a program."""


@triton.jit
def _beside(four):  # type: ignore[no-untyped-def]
    """(n, 4) of four times (n,): stored together they wait for each other once."""
    pairs = tl.join(tl.join(four[0], four[2]), tl.join(four[1], four[3]))
    return tl.reshape(pairs, (pairs.shape[0], 4))


@triton.jit
def _context(  # type: ignore[no-untyped-def]
    i, rest, w, b, n0, m0, n1, m1, o, left_over, y0, y1, mean, scale, X, Y, Z, C, N, tiles_z, eps: tl.constexpr,
    KX: tl.constexpr, KY: tl.constexpr, KZ: tl.constexpr, CX: tl.constexpr, CY: tl.constexpr, CZ: tl.constexpr,
    SPLIT: tl.constexpr, G: tl.constexpr, TY: tl.constexpr, TZ: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Convolution (of `i` without its rest), residual and layer norm of one group of G channels, which the program
    holds whole."""
    tile, group, plane = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    p, j = tl.arange(0, TY * TZ), tl.arange(0, BC)
    y, z = (tile // tiles_z) * TY + p // TZ, ((tile % tiles_z) * TZ + p % TZ) * RUN
    c = group * G + j
    points, channels = (y < Y) & (z < Z), j < G
    a0, a1, a2, a3 = window(
        i, i, w, w, plane // X, plane % X, y, z, c, points, channels, X, Y, Z, C, KX, KY, KZ, CX, CY, CZ,
        False, False, False, TY * TZ, BC,
    )[:4]  # fmt: skip
    offset = tl.load(b + c, mask=channels, other=0.0).to(tl.float32)[None, :]
    if group == 0:
        weight = tl.load(n0 + j, mask=channels, other=0.0).to(tl.float32)
        bias = tl.load(m0 + j, mask=channels, other=0.0).to(tl.float32)
        normed = y0
    else:
        weight = tl.load(n1 + j, mask=channels, other=0.0).to(tl.float32)
        bias = tl.load(m1 + j, mask=channels, other=0.0).to(tl.float32)
        normed = y1
    means = ()
    scales = ()
    for run in tl.static_range(RUN):
        keep = (points & (z + run < Z))[:, None] & channels[None, :]
        row = plane.to(tl.int64) * Y * Z + y * Z + z + run
        place = row[:, None] * C + c[None, :]
        a = pick(run, a0, a1, a2, a3) + offset + load_stream(i, rest, place, keep, SPLIT)
        store_stream(o, left_over, place, a, keep, SPLIT)
        if BC != G:
            a = tl.where(channels[None, :], a, 0.0)
        m = tl.sum(a, axis=1) / G
        centred = a - m[:, None]
        if BC != G:
            centred = tl.where(channels[None, :], centred, 0.0)
        r = tl.rsqrt(tl.sum(centred * centred, axis=1) / G + eps)
        out = centred * r[:, None] * weight[None, :] + bias[None, :]
        tl.store(normed + row[:, None] * G + j[None, :], out.to(y0.dtype.element_ty), mask=keep)
        means += (m,)  # type: ignore[assignment]
        scales += (r,)  # type: ignore[assignment]
    on = z[:, None] + tl.arange(0, RUN)[None, :]
    row = group * N + plane.to(tl.int64) * Y * Z + (y * Z)[:, None] + on
    keep = points[:, None] & (on < Z)
    tl.store(mean + row, _beside(means), mask=keep)
    tl.store(scale + row, _beside(scales), mask=keep)


class _ContextNorms(torch.autograd.Function):
    """H, its rest, weight, bias, padding, eps, type of the normed, weight and bias of norms -> H + convolution, its
    rest, normed."""

    @staticmethod
    def forward(
        ctx: Any, H: torch.Tensor, rest: torch.Tensor | None, weight: torch.Tensor, bias: torch.Tensor,
        padding: tuple[str, ...], eps: float, dtype: torch.dtype, *norms: torch.Tensor,
    ) -> Any:  # fmt: skip
        shape = Shape(H, weight, padding)
        X, Y, Z = shape.grid
        C, groups, N = shape.channels, len(norms) // 2, H[..., 0].numel()
        G = C // groups
        out, taps = torch.empty_like(H), taps_of(weight, H.dtype)
        left_over = None if rest is None else torch.empty_like(H)
        normed = [torch.empty(*H.shape[:-1], G, device=H.device, dtype=dtype) for _ in range(groups)]
        statistics = torch.empty(2, groups, N, device=H.device, dtype=torch.float32)
        BC = triton.next_power_of_2(G)
        TY, TZ = shape.tiles(max(1, TILE // BC))
        tiles = (triton.cdiv(Y, TY), triton.cdiv(Z, TZ * RUN.value))
        _context[(tiles[0] * tiles[1], groups, shape.batch * X)](
            H, H if rest is None else rest, taps, bias, norms[0], norms[1], norms[-2], norms[-1],
            out, out if left_over is None else left_over, normed[0], normed[-1], *statistics,
            X, Y, Z, C, N, tiles[1], eps, **shape.constants, SPLIT=rest is not None, G=G, TY=TY, TZ=TZ, BC=BC,
            num_warps=WARPS,
        )  # fmt: skip
        ctx.save_for_backward(H, taps, out, statistics, norms[0], norms[-2])
        ctx.shape, ctx.like = shape, [(one.shape, one.dtype) for one in (weight, bias)]
        ctx.set_materialize_grads(False)  # no zeros for the rest
        if left_over is not None:
            ctx.mark_non_differentiable(left_over)
        return out, left_over, *normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor | None, _: None, *dnormed: torch.Tensor | None) -> Any:
        H, taps, out, statistics, *weights = ctx.saved_tensors
        shape: Shape = ctx.shape
        nothing = (*out.shape[:-1], out.shape[-1] // len(dnormed))
        gradients = [out.new_zeros(nothing) if one is None else one for one in dnormed]
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
