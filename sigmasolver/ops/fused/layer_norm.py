"""Layer normalisation of the channels of every point.

    y = hat w + b,   hat = (x - mean) r,   r = 1 / sqrt(var + eps)
    dx = r (g - mean(g) - hat mean(g hat)),  g = w dy

Rows may be strided (a slice of the channels of a wider tensor). Statistics and sums are float32.

Letters: N points, C channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from sigmasolver.ops.fused import product_dtype, rows_of, tuning
from sigmasolver.ops.fused.jit import jit
from sigmasolver.ops.fused.reductions import sum_partials
from sigmasolver.ops.side_streams import on_side_stream

__all__ = ["centre_rows", "layer_norm", "load_channels", "norm_gradient", "normalise_rows", "norms_backward"]


@jit
def centre_rows(
    x: tl.tensor, keep: tl.tensor, EPS: tl.constexpr, CHANNELS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """x - mean, mean and r (points,) of a tile x (points, channels), which is 0 beyond CHANNELS, as is the result.

    Load the weights after this call, before hat = (x - mean) r: the reductions hide their latency.
    """
    mean = tl.sum(x, axis=1) / CHANNELS
    x = x - mean[:, None]
    if x.shape[1] != CHANNELS:
        x = tl.where(keep, x, 0.0)
    return x, mean, tl.rsqrt(tl.sum(x * x, axis=1) / CHANNELS + EPS)


@jit
def normalise_rows(
    x: tl.tensor, w: tl.tensor, b: tl.tensor, c: tl.tensor, keep: tl.tensor, EPS: tl.constexpr, CHANNELS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """y = hat w + b, mean and r of a tile x as in `centre_rows`."""
    x, mean, r = centre_rows(x, keep, EPS, CHANNELS)
    weight, bias = load_channels(w, c, CHANNELS), load_channels(b, c, CHANNELS)
    return x * r[:, None] * weight[None, :] + bias[None, :], mean, r


@jit
def norm_gradient(g: tl.tensor, hat: tl.tensor, r: tl.tensor, CHANNELS: tl.constexpr) -> tl.tensor:
    """dx = r (g - mean(g) - hat mean(g hat)) with g = w dy; g and hat (points, channels) are 0 beyond CHANNELS."""
    mean, projection = tl.sum(g, axis=1) / CHANNELS, tl.sum(g * hat, axis=1) / CHANNELS
    return (g - mean[:, None] - hat * projection[:, None]) * r[:, None]


@jit
def load_channels(x: tl.tensor, c: tl.tensor, CHANNELS: tl.constexpr) -> tl.tensor:
    """Channels c of x (C,) in float32, 0 beyond CHANNELS."""
    return tl.load(x + c, mask=c < CHANNELS, other=0.0).to(tl.float32)


@jit
def _norm_forward(
    x: tl.tensor, w: tl.tensor, b: tl.tensor, y: tl.tensor, mean: tl.tensor, r: tl.tensor,
    points: tl.tensor, row_stride: tl.tensor, EPS: tl.constexpr,
    CHANNELS: tl.constexpr, TILE_POINTS: tl.constexpr, TILE_CHANNELS: tl.constexpr,
) -> None:  # fmt: skip
    """y (N, C), mean (N,), r (N,) of x (N, C) with row stride `row_stride`."""
    n, c = tl.program_id(0) * TILE_POINTS + tl.arange(0, TILE_POINTS), tl.arange(0, TILE_CHANNELS)
    keep = (n[:, None] < points) & (c[None, :] < CHANNELS)
    row = n.to(tl.int64)[:, None]
    v = tl.load(x + row * row_stride + c[None, :], mask=keep, other=0.0).to(tl.float32)
    out, m, s = normalise_rows(v, w, b, c, keep, EPS, CHANNELS)
    tl.store(y + row * CHANNELS + c[None, :], out.to(y.dtype.element_ty), mask=keep)
    tl.store(mean + n, m, mask=n < points)
    tl.store(r + n, s, mask=n < points)


@jit
def _norm_backward(
    x: tl.tensor, w0: tl.tensor, w1: tl.tensor, dy0: tl.tensor, dy1: tl.tensor,
    mean: tl.tensor, r: tl.tensor, more: tl.tensor, dx: tl.tensor, sums: tl.tensor,
    points: tl.tensor, row_stride: tl.tensor,
    CHANNELS: tl.constexpr, MORE: tl.constexpr,
    TILE_POINTS: tl.constexpr, TILE_CHANNELS: tl.constexpr, CHUNK: tl.constexpr,
) -> None:  # fmt: skip
    """dx (N, groups C) for one or two groups of C channels of x, plus `more` (N, groups C) if MORE.

    dy_i (N, C) is the gradient of group i, mean and r are (groups, N). A row of `sums`: dw (C), db (C) of each group.
    """
    chunk, group, c = tl.program_id(0), tl.program_id(1), tl.arange(0, TILE_CHANNELS)
    groups = tl.num_programs(1)
    keep_channels = c < CHANNELS
    if group == 0:  # noqa: SIM108, a runtime branch
        weight = load_channels(w0, c, CHANNELS)
    else:
        weight = load_channels(w1, c, CHANNELS)
    sum_w = tl.zeros((TILE_POINTS, TILE_CHANNELS), tl.float32)
    sum_b = tl.zeros((TILE_POINTS, TILE_CHANNELS), tl.float32)
    for start in range(0, CHUNK, TILE_POINTS):
        n = chunk * CHUNK + start + tl.arange(0, TILE_POINTS)
        keep = (n[:, None] < points) & keep_channels[None, :]
        row = n.to(tl.int64)[:, None]
        v = tl.load(x + row * row_stride + group * CHANNELS + c[None, :], mask=keep, other=0.0).to(tl.float32)
        if group == 0:
            dy = tl.load(dy0 + row * CHANNELS + c[None, :], mask=keep, other=0.0).to(tl.float32)
        else:
            dy = tl.load(dy1 + row * CHANNELS + c[None, :], mask=keep, other=0.0).to(tl.float32)
        m = tl.load(mean + group * points + n, mask=n < points, other=0.0)
        s = tl.load(r + group * points + n, mask=n < points, other=0.0)
        hat = tl.where(keep, (v - m[:, None]) * s[:, None], 0.0)
        out = norm_gradient(dy * weight[None, :], hat, s, CHANNELS)
        offsets = row * (groups * CHANNELS) + group * CHANNELS + c[None, :]
        if MORE:
            out += tl.load(more + offsets, mask=keep, other=0.0).to(tl.float32)
        tl.store(dx + offsets, out.to(dx.dtype.element_ty), mask=keep)
        sum_w += dy * hat
        sum_b += dy
    sums += (chunk * groups + group) * 2 * CHANNELS
    tl.store(sums + c, tl.sum(sum_w, axis=0), mask=keep_channels)
    tl.store(sums + CHANNELS + c, tl.sum(sum_b, axis=0), mask=keep_channels)


def _tile(channels: int) -> dict[str, int]:
    tile_channels = triton.next_power_of_2(channels)
    tile_points = max(1, min(tuning.NORM_POINTS, tuning.NORM_TILE // tile_channels))
    return {"TILE_POINTS": tile_points, "TILE_CHANNELS": tile_channels, "num_warps": tuning.NORM_WARPS}


def norms_backward(
    x_NC: torch.Tensor,
    gradients: Sequence[torch.Tensor],
    statistics: torch.Tensor,
    weights: Sequence[torch.Tensor],
    residual_gradient: torch.Tensor | None,
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """The gradient of the rows of `x`, whose equal groups of channels were normalised, plus `residual_gradient`; then
    dw and db of each group, in the dtype of its weight.

    `statistics` (2, groups, N): mean and 1 / standard deviation.
    """
    groups, points = statistics.shape[1:]
    channels = x_NC.shape[-1] // groups
    tile = _tile(channels)
    points_per_program = max(1, min(tuning.NORM_CHUNK, points * groups // tuning.NORM_PROGRAMS))
    chunk = triton.cdiv(points_per_program, tile["TILE_POINTS"]) * tile["TILE_POINTS"]
    chunks = triton.cdiv(points, chunk)
    dx = torch.empty(x_NC.shape, device=x_NC.device, dtype=x_NC.dtype)
    sums = torch.empty(chunks, groups * 2 * channels, device=x_NC.device, dtype=torch.float32)
    dy = [gradient.contiguous() for gradient in gradients]
    _norm_backward[(chunks, groups)](
        x_NC, weights[0], weights[-1], dy[0], dy[-1], *statistics,
        dx if residual_gradient is None else residual_gradient, dx, sums, points, x_NC.stride(-2),
        CHANNELS=channels, MORE=residual_gradient is not None, CHUNK=chunk, **tile,
    )  # fmt: skip
    dtypes = [weight.dtype for weight in weights[:groups] for _ in range(2)]

    def weight_gradients() -> list[torch.Tensor]:
        return [total.to(dtype) for total, dtype in zip(sum_partials(sums).split(channels), dtypes, strict=True)]

    return dx, tuple(on_side_stream(weight_gradients, sums))


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, eps: float, dtype: torch.dtype
    ) -> torch.Tensor:
        points, channels = x.shape
        y = torch.empty(points, channels, device=x.device, dtype=dtype)
        statistics = torch.empty(2, 1, points, device=x.device, dtype=torch.float32)
        tile = _tile(channels)
        _norm_forward[(triton.cdiv(points, tile["TILE_POINTS"]),)](
            x, w, b, y, *statistics, points, x.stride(0), eps, CHANNELS=channels, **tile
        )
        ctx.save_for_backward(x, w, statistics)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        x, w, statistics = ctx.saved_tensors
        dx, (dw, db) = norms_backward(x, [dy], statistics, [w], None)
        return dx, dw, db, None, None


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise the last axis of `x`, whose rows may be strided; under autocast the result has autocast's dtype."""
    return _LayerNorm.apply(rows_of(x), weight, bias, eps, product_dtype(x, x.dtype)).view(x.shape)
