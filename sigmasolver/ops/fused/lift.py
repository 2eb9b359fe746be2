"""The lift of a solver, with everything between its two matrix products.

    pre = positions Wp^T      h = pre + x Wx^T + b1      g = GELU(h)      H = g W2^T + b2 + offset

Positions belong to the grid: `pre` is computed once for all samples. One kernel does the rest of the forward pass, so
that the inner channels never go through memory. The backward pass recomputes h and stores

    g      dh = (dH W2) GELU'(h),   GELU(h) = h cdf(h),   GELU'(h) = cdf(h) + h exp(-h^2 / 2) / sqrt(2 pi)

for products with cuBLAS. Samples are summed before the product with the positions: dWp = (sum over samples of
dh)^T positions.

Letters: N points of all samples, G of the grid, Q fields, I inner width, C channels.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from sigmasolver.ops.fused import dot_precision, gpu_class, multiprocessors, product_dtype, tuning
from sigmasolver.ops.fused.jit import jit
from sigmasolver.ops.fused.linear import product
from sigmasolver.ops.fused.reductions import column_sums
from sigmasolver.ops.fused.stream import store_stream
from sigmasolver.ops.fused.tuning import Tile, tile_size
from sigmasolver.ops.fused.weight_cache import WeightLayout, cast_weight
from sigmasolver.ops.modules import Affine
from sigmasolver.ops.side_streams import on_side_stream
from sigmasolver.ops.stream import LOW_PRECISION, Residual, stream_of

__all__ = ["lift"]


@jit
def _load_fields(
    x: tl.tensor, n: tl.tensor, points: tl.tensor, FIELDS: tl.constexpr, TILE_FIELDS: tl.constexpr
) -> tl.tensor:
    """Rows n of x (N, Q), in the dtype of x."""
    q = tl.arange(0, TILE_FIELDS)
    keep = (n[:, None] < points) & (q[None, :] < FIELDS)
    return tl.load(x + n.to(tl.int64)[:, None] * FIELDS + q[None, :], mask=keep, other=0.0)


@jit
def _normal_cdf(h: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """CDF of the standard normal distribution, to 1e-7, and its density times sqrt(2 pi).

    The approximation 7.1.26 of Abramowitz and Stegun: a polynomial, an exponential and a division. CUDA's erf takes
    several times as long.
    """
    density = tl.exp2(h * h * (-0.5 * 1.4426950408889634))
    root = tl.rsqrt(1 + 0.3275911 * 0.7071067811865476 * tl.abs(h))  # cheaper than a division
    t = root * root
    tail = ((((1.061405429 * t - 1.453152027) * t + 1.421413741) * t - 0.284496736) * t + 0.254829592) * t
    tail *= 0.5 * density
    return tl.where(h < 0, tail, 1 - tail), density


@jit
def _inner(
    fields: tl.tensor, W_x: tl.tensor, pre: tl.tensor, b1: tl.tensor,
    n: tl.tensor, f: tl.tensor, points: tl.tensor, grid_points: tl.tensor, INNER: tl.constexpr, PRECISION: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """h (TILE_POINTS, TILE_INNER) = pre + x Wx^T + b1 for inner channels f; W_x is a tile (TILE_FIELDS, TILE_INNER),
    pre (G, I)."""
    keep = (n[:, None] < points) & (f[None, :] < INNER)
    h = tl.dot(fields, W_x, input_precision=PRECISION)
    h += tl.load(pre + (n % grid_points).to(tl.int64)[:, None] * INNER + f[None, :], mask=keep, other=0.0)
    h += tl.load(b1 + f, mask=f < INNER, other=0.0).to(tl.float32)[None, :]
    return h


@jit
def _lift_forward(
    x: tl.tensor, pre: tl.tensor, W_x: tl.tensor, b1: tl.tensor, W2: tl.tensor,
    b2: tl.tensor, offset: tl.tensor, out: tl.tensor, out_low: tl.tensor,
    points: tl.tensor, grid_points: tl.tensor,
    FIELDS: tl.constexpr, INNER: tl.constexpr, CHANNELS: tl.constexpr, TWO_PARTS: tl.constexpr,
    TILE_POINTS: tl.constexpr, TILE_FIELDS: tl.constexpr, TILE_INNER: tl.constexpr, TILE_CHANNELS: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """out (N, C) = GELU(h) W2^T + b2 + offset for a tile of points.

    x (N, Q), pre (G, I) in float32, W_x (I, TILE_FIELDS), b1 (I), W2 (C, I), b2 and offset (C).
    """
    n = tl.program_id(0) * TILE_POINTS + tl.arange(0, TILE_POINTS)
    c, q = tl.arange(0, TILE_CHANNELS), tl.arange(0, TILE_FIELDS)
    fields = _load_fields(x, n, points, FIELDS, TILE_FIELDS).to(W_x.dtype.element_ty)
    acc = tl.zeros((TILE_POINTS, TILE_CHANNELS), tl.float32)
    for start in range(0, INNER, TILE_INNER):
        f = start + tl.arange(0, TILE_INNER)
        wx = tl.load(W_x + f[:, None] * TILE_FIELDS + q[None, :], mask=f[:, None] < INNER, other=0.0)
        h = _inner(fields, tl.trans(wx), pre, b1, n, f, points, grid_points, INNER, PRECISION)
        w2_mask = (c[:, None] < CHANNELS) & (f[None, :] < INNER)
        w2 = tl.load(W2 + c[:, None] * INNER + f[None, :], mask=w2_mask, other=0.0)
        acc = tl.dot((h * _normal_cdf(h)[0]).to(w2.dtype), tl.trans(w2), acc, input_precision=PRECISION)
    acc += tl.load(b2 + c, mask=c < CHANNELS, other=0.0).to(tl.float32)[None, :]
    acc += tl.load(offset + c, mask=c < CHANNELS, other=0.0).to(tl.float32)[None, :]
    keep = (n[:, None] < points) & (c[None, :] < CHANNELS)
    store_stream(out, out_low, n.to(tl.int64)[:, None] * CHANNELS + c[None, :], acc, keep, TWO_PARTS)


@jit
def _lift_backward(
    x: tl.tensor, pre: tl.tensor, W_x: tl.tensor, b1: tl.tensor,
    W2: tl.tensor, dH: tl.tensor, g: tl.tensor, dh: tl.tensor,
    points: tl.tensor, grid_points: tl.tensor,
    FIELDS: tl.constexpr, INNER: tl.constexpr, CHANNELS: tl.constexpr,
    TILE_POINTS: tl.constexpr, TILE_FIELDS: tl.constexpr, TILE_INNER: tl.constexpr, TILE_CHANNELS: tl.constexpr,
    CHUNK: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """g = GELU(h) and dh = (dH W2) GELU'(h), both (N, I), for a chunk of points and a tile of inner channels, whose
    weights stay resident while the program loops over the points. dH (N, C), other inputs as in `_lift_forward`."""
    chunk, f = tl.program_id(0), tl.program_id(1) * TILE_INNER + tl.arange(0, TILE_INNER)
    c, q = tl.arange(0, TILE_CHANNELS), tl.arange(0, TILE_FIELDS)
    wx = tl.trans(tl.load(W_x + f[:, None] * TILE_FIELDS + q[None, :], mask=f[:, None] < INNER, other=0.0))
    w2_mask = (c[:, None] < CHANNELS) & (f[None, :] < INNER)
    w2 = tl.load(W2 + c[:, None] * INNER + f[None, :], mask=w2_mask, other=0.0)
    for start in range(0, CHUNK, TILE_POINTS):
        n = chunk * CHUNK + start + tl.arange(0, TILE_POINTS)
        row = n.to(tl.int64)[:, None]
        fields = _load_fields(x, n, points, FIELDS, TILE_FIELDS).to(W_x.dtype.element_ty)
        h = _inner(fields, wx, pre, b1, n, f, points, grid_points, INNER, PRECISION)
        cdf, density = _normal_cdf(h)
        keep = (n[:, None] < points) & (c[None, :] < CHANNELS)
        dH_tile = tl.load(dH + row * CHANNELS + c[None, :], mask=keep, other=0.0)
        d = tl.dot(dH_tile, w2, input_precision=PRECISION)
        d *= cdf + h * density * 0.3989422804014327
        keep = (n[:, None] < points) & (f[None, :] < INNER)
        tl.store(g + row * INNER + f[None, :], (h * cdf).to(g.dtype.element_ty), mask=keep)
        tl.store(dh + row * INNER + f[None, :], d.to(dh.dtype.element_ty), mask=keep)


def _pad_columns(matrix: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Pad the columns with zeros to the size of a tile."""
    rows, columns = matrix.shape
    return WeightLayout((rows, tile_size(columns)), (rows, columns), (tile_size(columns), 1), dtype).copy(matrix)


def _launch_options(tile: Tile, x: torch.Tensor, W2: torch.Tensor) -> dict[str, Any]:
    (channels, inner_width), fields = W2.shape, x.shape[1]
    sizes = {"FIELDS": fields, "INNER": inner_width, "CHANNELS": channels}
    sizes |= {"TILE_FIELDS": tile_size(fields), "TILE_INNER": tile.inner, "TILE_CHANNELS": tile_size(channels)}
    launch = {"PRECISION": dot_precision(), "num_warps": tile.warps, "num_stages": tile.stages}
    return {**sizes, "TILE_POINTS": tile.points, **launch}


class _Lift(torch.autograd.Function):
    """Dtype of the products, whether the stream has two parts, x (N, Q), positions (G, P), both layers, the offset ->
    the stream and its low part."""

    @staticmethod
    def forward(
        ctx: Any, dtype: torch.dtype, two_parts: bool, x: torch.Tensor, positions: torch.Tensor,
        W1: torch.Tensor, b1: torch.Tensor, W2: torch.Tensor, b2: torch.Tensor, offset: torch.Tensor,
    ) -> Any:  # fmt: skip
        points, (grid_points, position_channels), channels = len(x), positions.shape, len(W2)
        pre = product(_pad_columns(positions, dtype), _pad_columns(W1[:, :position_channels], dtype).T)
        W_x, W_cast = _pad_columns(W1[:, position_channels:], dtype), cast_weight(W2, dtype).contiguous()
        out_dtype = LOW_PRECISION if two_parts else torch.promote_types(dtype, offset.dtype)
        out = torch.empty(points, channels, device=x.device, dtype=out_dtype)
        low, tile = torch.empty_like(out) if two_parts else None, tuning.LIFT_TILES[W_cast.element_size()]
        _lift_forward[(triton.cdiv(points, tile.points),)](
            x, pre, W_x, b1, W_cast, b2, offset, out, out if low is None else low, points, grid_points,
            TWO_PARTS=two_parts, **_launch_options(tile, x, W_cast),
        )  # fmt: skip
        ctx.set_materialize_grads(False)  # no zero gradients for the low part
        if low is not None:
            ctx.mark_non_differentiable(low)
        ctx.save_for_backward(x, positions, pre, W_x, b1, W_cast)
        ctx.dtypes = [parameter.dtype for parameter in (W1, b1, W2, b2, offset)]
        return out, low

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dH: torch.Tensor, _: None) -> Any:
        x, positions, pre, W_x, b1, W2 = ctx.saved_tensors
        (points, fields), (grid_points, inner_width), dtype = x.shape, pre.shape, W2.dtype
        dH = dH.contiguous()
        dH_cast = dH.to(dtype)
        tile = tuning.LIFT_BACKWARD_TILES[gpu_class(x)][W2.element_size()][len(W2) > tuning.WIDE_LIFT]
        tiles_across = triton.cdiv(inner_width, tile.inner)
        programs = tuning.LIFT_PROGRAMS * multiprocessors(x)
        chunk = triton.cdiv(points * tiles_across, programs * tile.points) * tile.points
        g, dh = (torch.empty(points, inner_width, device=x.device, dtype=dtype) for _ in range(2))
        _lift_backward[(triton.cdiv(points, chunk), tiles_across)](
            x, pre, W_x, b1, W2, dH_cast, g, dh, points, grid_points, CHUNK=chunk, **_launch_options(tile, x, W2)
        )

        def first_layer_gradients() -> list[torch.Tensor]:
            sample_sum = dh.view(points // grid_points, grid_points, inner_width).sum(0, dtype=torch.float32)
            with torch.autocast(x.device.type, enabled=False):  # bf16 would round the sum over samples
                dW_positions = sample_sum.T @ positions.float()
            dW_fields = product(dh.T, _pad_columns(x, dtype))[:, :fields]
            gradients = torch.cat((dW_positions, dW_fields), dim=1), column_sums(sample_sum)
            return [gradient.to(dtype) for gradient, dtype in zip(gradients, ctx.dtypes[:2], strict=True)]

        def second_layer_gradients() -> list[torch.Tensor]:
            sums = column_sums(dH)
            gradients = product(dH_cast.T, g), sums, sums.clone()
            return [gradient.to(dtype) for gradient, dtype in zip(gradients, ctx.dtypes[2:], strict=True)]

        dlayers = (
            *on_side_stream(first_layer_gradients, dh, x, positions),
            *on_side_stream(second_layer_gradients, dH, dH_cast, g),
        )
        dx = product(dh, W_x)[:, :fields].to(x.dtype).contiguous() if ctx.needs_input_grad[2] else None
        return None, None, dx, None, *dlayers


def lift(
    x: torch.Tensor, positions: torch.Tensor, first: Affine, second: Affine, offset: torch.Tensor, two_parts: bool
) -> Residual:
    """`ops.lift.lift` for positions without a gradient; products in autocast's dtype."""
    dtype = product_dtype(x, x.dtype)
    rows, points = (tensor.reshape(-1, tensor.shape[-1]).contiguous() for tensor in (x, positions))
    with torch.autocast(x.device.type, enabled=False):
        main, low = _Lift.apply(dtype, two_parts, rows, points, *first, *second, offset)
    shape = *x.shape[:-1], len(offset)
    return stream_of(main.view(shape), low if low is None else low.view(shape))
