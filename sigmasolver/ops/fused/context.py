"""The entry of a block in one kernel: depthwise convolution, residual, and layer norm of each group of channels.

    H' = H + conv(H),      y_i = LN_i(H'_i)            dH' = dout + sum_i LN_i'(dy_i),      dH = dH' + conv^T(dH')

Letters as in `convolution`: B batch, X Y Z points per axis, C channels; N points of all samples, G channels of a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from sigmasolver.ops.fused import product_dtype, tuning
from sigmasolver.ops.fused.convolution import RUN, Shape, run_start, to_taps, window_sums
from sigmasolver.ops.fused.jit import jit
from sigmasolver.ops.fused.layer_norm import centre_rows, load_channels, norms_backward
from sigmasolver.ops.fused.stream import load_stream, store_stream
from sigmasolver.ops.modules import Affine
from sigmasolver.ops.stream import Residual, split, stream_of

__all__ = ["add_context"]


@jit
def _interleave(four: tl.tuple) -> tl.tensor:
    """Interleave four tensors (n,) to (n, 4): a single store, with one barrier, writes them all."""
    pairs = tl.join(tl.join(four[0], four[2]), tl.join(four[1], four[3]))
    return tl.reshape(pairs, (pairs.shape[0], 4))


@jit
def _context(
    H: tl.tensor, H_low: tl.tensor, taps: tl.tensor, conv_bias: tl.tensor, weight0: tl.tensor,
    bias0: tl.tensor, weight1: tl.tensor, bias1: tl.tensor, out: tl.tensor,
    out_low: tl.tensor, y0: tl.tensor, y1: tl.tensor, mean: tl.tensor, r: tl.tensor,
    points_x: tl.tensor, points_y: tl.tensor, points_z: tl.tensor, channels: tl.tensor, points: tl.tensor,
    tiles_z: tl.tensor, EPS: tl.constexpr,
    KERNEL_X: tl.constexpr, KERNEL_Y: tl.constexpr, KERNEL_Z: tl.constexpr,
    CIRCULAR_X: tl.constexpr, CIRCULAR_Y: tl.constexpr, CIRCULAR_Z: tl.constexpr,
    TWO_PARTS: tl.constexpr, GROUP_CHANNELS: tl.constexpr,
    TILE_LINES: tl.constexpr, TILE_RUNS: tl.constexpr, TILE_CHANNELS: tl.constexpr,
) -> None:  # fmt: skip
    """out = H + conv(H) and y_i = LN_i(out_i) for one group of channels, all of which the program holds.

    H and out (B, X, Y, Z, C), each with a low part if TWO_PARTS; the convolution reads the main part only. y_i (N, G),
    mean and r (groups, N); taps (taps, C), weight_i and bias_i (G,) of the norms."""
    tile, group, plane = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    p, j = tl.arange(0, TILE_LINES * TILE_RUNS), tl.arange(0, TILE_CHANNELS)
    y, z = run_start(p, tile, tiles_z, TILE_LINES, TILE_RUNS)
    c = group * GROUP_CHANNELS + j
    keep_points, keep_channels = (y < points_y) & (z < points_z), j < GROUP_CHANNELS
    sums = window_sums(
        H, H, taps, taps, plane // points_x, plane % points_x, y, z, c, keep_points, keep_channels,
        points_x, points_y, points_z, channels, KERNEL_X, KERNEL_Y, KERNEL_Z, CIRCULAR_X, CIRCULAR_Y, CIRCULAR_Z,
        False, False, False, TILE_LINES * TILE_RUNS, TILE_CHANNELS,
    )[0]  # fmt: skip
    shift = tl.load(conv_bias + c, mask=keep_channels, other=0.0).to(tl.float32)[None, :]
    if group == 0:
        weight = load_channels(weight0, j, GROUP_CHANNELS)
        bias = load_channels(bias0, j, GROUP_CHANNELS)
        normed = y0
    else:
        weight = load_channels(weight1, j, GROUP_CHANNELS)
        bias = load_channels(bias1, j, GROUP_CHANNELS)
        normed = y1
    means: tl.tuple = ()
    scales: tl.tuple = ()
    for run in tl.static_range(RUN):
        keep = (keep_points & (z + run < points_z))[:, None] & keep_channels[None, :]
        row = plane.to(tl.int64) * points_y * points_z + y * points_z + z + run
        offsets = row[:, None] * channels + c[None, :]
        x = sums[run] + shift + load_stream(H, H_low, offsets, keep, TWO_PARTS)
        store_stream(out, out_low, offsets, x, keep, TWO_PARTS)
        if TILE_CHANNELS != GROUP_CHANNELS:
            x = tl.where(keep_channels[None, :], x, 0.0)
        x, m, s = centre_rows(x, keep_channels[None, :], EPS, GROUP_CHANNELS)
        y_i = x * s[:, None] * weight[None, :] + bias[None, :]
        tl.store(normed + row[:, None] * GROUP_CHANNELS + j[None, :], y_i.to(y0.dtype.element_ty), mask=keep)
        means += (m,)
        scales += (s,)
    z_run = z[:, None] + tl.arange(0, RUN)[None, :]
    row = group * points + plane.to(tl.int64) * points_y * points_z + (y * points_z)[:, None] + z_run
    keep = keep_points[:, None] & (z_run < points_z)
    tl.store(mean + row, _interleave(means), mask=keep)
    tl.store(r + row, _interleave(scales), mask=keep)


class _ContextNorms(torch.autograd.Function):
    """H and its low part, weight, bias, padding, eps, dtype of the normalised groups, weight and bias of each norm ->
    H + conv(H) and its low part, the normalised groups."""

    @staticmethod
    def forward(
        ctx: Any, H: torch.Tensor, H_low: torch.Tensor | None, weight: torch.Tensor, bias: torch.Tensor,
        padding: tuple[str, ...], eps: float, dtype: torch.dtype, *norms: torch.Tensor,
    ) -> Any:  # fmt: skip
        shape = Shape(H, weight, padding)
        points_x, points_y, points_z = shape.grid
        channels, groups, points = shape.channels, len(norms) // 2, H[..., 0].numel()
        group_channels = channels // groups
        out, taps = torch.empty_like(H), to_taps(weight, H.dtype)
        out_low = None if H_low is None else torch.empty_like(H)
        normed = [torch.empty(*H.shape[:-1], group_channels, device=H.device, dtype=dtype) for _ in range(groups)]
        statistics = torch.empty(2, groups, points, device=H.device, dtype=torch.float32)
        tile_channels = triton.next_power_of_2(group_channels)
        tile_lines, tile_runs = shape.tiles(max(1, tuning.CONTEXT_TILE // tile_channels))
        tiles = (triton.cdiv(points_y, tile_lines), triton.cdiv(points_z, tile_runs * RUN.value))
        _context[(tiles[0] * tiles[1], groups, shape.batch * points_x)](
            H, H if H_low is None else H_low, taps, bias, norms[0], norms[1], norms[-2], norms[-1],
            out, out if out_low is None else out_low, normed[0], normed[-1], *statistics,
            *shape.grid, channels, points, tiles[1], eps, **shape.constants, TWO_PARTS=H_low is not None,
            GROUP_CHANNELS=group_channels, TILE_LINES=tile_lines, TILE_RUNS=tile_runs, TILE_CHANNELS=tile_channels,
            num_warps=tuning.CONTEXT_WARPS,
        )  # fmt: skip
        ctx.save_for_backward(H, taps, out, statistics, norms[0], norms[-2])
        ctx.shape, ctx.specs = shape, [(tensor.shape, tensor.dtype) for tensor in (weight, bias)]
        ctx.set_materialize_grads(False)  # no zero gradients for the low part
        if out_low is not None:
            ctx.mark_non_differentiable(out_low)
        return out, out_low, *normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor | None, _: None, *dnormed: torch.Tensor | None) -> Any:
        H, taps, out, statistics, *weights = ctx.saved_tensors
        shape: Shape = ctx.shape
        group_shape = (*out.shape[:-1], out.shape[-1] // len(dnormed))
        gradients = [out.new_zeros(group_shape) if gradient is None else gradient for gradient in dnormed]
        residual_gradient = None if dout is None else dout.contiguous()
        total, norms = norms_backward(out, gradients, statistics, weights, residual_gradient)
        dH, convolution_gradients = shape.backward(H, [total], [taps], ctx.specs, residual=True)
        return dH, None, *convolution_gradients, None, None, None, *norms


def add_context(
    H: Residual, convolution: Affine, padding: Sequence[str], norms: Sequence[Affine], eps: float
) -> tuple[Residual, list[torch.Tensor]]:
    """H + conv(H), and the layer norm of each of its one or two equal groups of channels."""
    main, low = split(H)
    dtype = product_dtype(main, convolution[0].dtype)
    norm_parameters = [parameter for norm in norms for parameter in norm]
    parts = main.contiguous(), low if low is None else low.contiguous()
    out, low, *normed = _ContextNorms.apply(*parts, *convolution, tuple(padding), eps, dtype, *norm_parameters)
    return stream_of(out, low), normed
