"""The inner channels of a SwiGLU: a = SiLU(gate) * up, and the backward pass through them.

    da = dout Wd     dgate = da up s (1 + gate (1 - s)),  dup = da gate s,  s = sigmoid(gate)     dy = dgate Wg + dup Wu

Up to MAX_FUSED_MATMUL_CHANNELS channels, one kernel computes all of these from y and dout, including the products;
wider streams leave the products to cuBLAS.

Rows of y have EXTRA additional channels, the first of which is 1: the product that yields the weight gradients of gate
and up then yields their bias gradients too.

Letters: N points, C channels, F inner width, padded where products follow.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from sigmasolver.ops.dispatch import exceeded, prefers
from sigmasolver.ops.fused import dot_precision, gpu_class, tuning
from sigmasolver.ops.fused.jit import jit

__all__ = ["EXTRA", "apply_gate", "fuses_products", "gate_backward", "silu_product", "silu_times"]

EXTRA = tl.constexpr(tuning.EXTRA_CHANNELS)


@jit
def _sigmoid(x: tl.tensor) -> tl.tensor:
    """1 / (1 + exp(-x)) with a reciprocal square root: five instructions, against twelve with a division."""
    root = tl.rsqrt(1 + tl.exp2(x * -1.4426950408889634))
    return root * root


@jit
def silu_times(gate: tl.tensor, up: tl.tensor) -> tl.tensor:
    """SiLU(gate) up."""
    return gate * up * _sigmoid(gate)


@jit
def _gate_gradients(gate: tl.tensor, up: tl.tensor, da: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """a = SiLU(gate) up, dgate, dup."""
    s = _sigmoid(gate)
    silu = gate * s
    return silu * up, da * up * (s + (silu - silu * s)), da * silu


@jit
def _gated(
    inner: tl.tensor, bias: tl.tensor, da: tl.tensor, a: tl.tensor,
    points: tl.tensor, INNER: tl.constexpr, BACKWARD: tl.constexpr, TILE_POINTS: tl.constexpr, TILE_INNER: tl.constexpr,
) -> None:  # fmt: skip
    """a (N, F) from inner (N, 2 F) = [gate, up] before its bias (2 F); BACKWARD: overwrite inner with [dgate, dup],
    from da."""
    n = tl.program_id(0) * TILE_POINTS + tl.arange(0, TILE_POINTS)
    f = tl.program_id(1) * TILE_INNER + tl.arange(0, TILE_INNER)
    keep = (n[:, None] < points) & (f[None, :] < INNER)
    row = n.to(tl.int64)[:, None]
    pointers = inner + row * (2 * INNER) + f[None, :]
    gate = tl.load(pointers, mask=keep, other=0.0).to(tl.float32)
    gate += tl.load(bias + f, mask=f < INNER, other=0.0)[None, :]
    up = tl.load(pointers + INNER, mask=keep, other=0.0).to(tl.float32)
    up += tl.load(bias + INNER + f, mask=f < INNER, other=0.0)[None, :]
    if BACKWARD:
        d = tl.load(da + row * INNER + f[None, :], mask=keep, other=0.0).to(tl.float32)
        out, dgate, dup = _gate_gradients(gate, up, d)
        tl.store(pointers, dgate.to(inner.dtype.element_ty), mask=keep)
        tl.store(pointers + INNER, dup.to(inner.dtype.element_ty), mask=keep)
    else:
        out = silu_times(gate, up)
    tl.store(a + row * INNER + f[None, :], out.to(a.dtype.element_ty), mask=keep)


@jit
def _inner_backward(
    y: tl.tensor, dout: tl.tensor, W_in: tl.tensor, b_in: tl.tensor, W_out: tl.tensor,
    dout_cast: tl.tensor, a: tl.tensor, dinner: tl.tensor, dy: tl.tensor,
    points: tl.tensor,
    CHANNELS: tl.constexpr, INNER: tl.constexpr, CAST: tl.constexpr,
    TILE_POINTS: tl.constexpr, TILE_CHANNELS: tl.constexpr, TILE_INNER: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """For a tile of points: a (N, F), dinner (N, 2 F) = [dgate, dup], dy (N, C), and if CAST, dout in the dtype of y.

    y (N, C + EXTRA), dout (N, C); W_in (2 F, C) and b_in (2 F) of gate, then up; W_out (F, C).
    """
    first = tl.program_id(0).to(tl.int64) * TILE_POINTS
    n, c = tl.arange(0, TILE_POINTS), tl.arange(0, TILE_CHANNELS)
    remaining = points - tl.program_id(0) * TILE_POINTS
    keep = (n[:, None] < remaining) & (c[None, :] < CHANNELS)
    offsets = first * CHANNELS + n[:, None] * CHANNELS + c[None, :]
    t = tl.load(y + first * (CHANNELS + EXTRA) + n[:, None] * (CHANNELS + EXTRA) + c[None, :], mask=keep, other=0.0)
    g = tl.load(dout + offsets, mask=keep, other=0.0).to(t.dtype)
    if CAST:
        tl.store(dout_cast + offsets, g, mask=keep)
    a += first * INNER
    dinner += first * (2 * INNER)
    acc = tl.zeros((TILE_POINTS, TILE_CHANNELS), tl.float32)
    for start in range(0, INNER, TILE_INNER):
        f = start + tl.arange(0, TILE_INNER)
        weight_mask = (f[:, None] < INNER) & (c[None, :] < CHANNELS)
        weight_offsets = f[:, None] * CHANNELS + c[None, :]
        gate_map = tl.load(W_in + weight_offsets, mask=weight_mask, other=0.0)
        up_map = tl.load(W_in + INNER * CHANNELS + weight_offsets, mask=weight_mask, other=0.0)
        down_map = tl.load(W_out + weight_offsets, mask=weight_mask, other=0.0)
        gate = tl.dot(t, tl.trans(gate_map), input_precision=PRECISION)
        up = tl.dot(t, tl.trans(up_map), input_precision=PRECISION)
        da = tl.dot(g, tl.trans(down_map), input_precision=PRECISION)
        gate += tl.load(b_in + f, mask=f < INNER, other=0.0)[None, :]
        up += tl.load(b_in + INNER + f, mask=f < INNER, other=0.0)[None, :]
        out, dgate, dup = _gate_gradients(gate, up, da)
        inside = (n[:, None] < remaining) & (f[None, :] < INNER)
        tl.store(a + n[:, None] * INNER + f[None, :], out.to(t.dtype), mask=inside)
        dgate, dup = dgate.to(t.dtype), dup.to(t.dtype)
        tl.store(dinner + n[:, None] * (2 * INNER) + f[None, :], dgate, mask=inside)
        tl.store(dinner + n[:, None] * (2 * INNER) + INNER + f[None, :], dup, mask=inside)
        acc = tl.dot(dgate, gate_map, acc, input_precision=PRECISION)
        acc = tl.dot(dup, up_map, acc, input_precision=PRECISION)
    tl.store(dy + offsets, acc.to(t.dtype), mask=keep)


@jit
def _load_gate_up(
    x: tl.tensor, row: tl.tensor, f: tl.tensor, keep: tl.tensor, INNER: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Gate and up in float32 of rows of x (N, 2 F) = [gate, up]."""
    gate = tl.load(x + row * 2 * INNER + f[None, :], mask=keep, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * INNER + INNER + f[None, :], mask=keep, other=0.0).to(tl.float32)
    return gate, up


# The next two kernels compute the sigmoid with a division. `_sigmoid` and `_gate_gradients` round differently: sharing
# them would change the results of models that train with these kernels.
@jit
def _silu_forward(
    x: tl.tensor, y: tl.tensor,
    points: tl.tensor, INNER: tl.constexpr, TILE_POINTS: tl.constexpr, TILE_INNER: tl.constexpr,
) -> None:  # fmt: skip
    """y (N, F) = SiLU(gate) up of x (N, 2 F) = [gate, up]."""
    n = tl.program_id(0) * TILE_POINTS + tl.arange(0, TILE_POINTS)
    f = tl.program_id(1) * TILE_INNER + tl.arange(0, TILE_INNER)
    keep = (n[:, None] < points) & (f[None, :] < INNER)
    row = n.to(tl.int64)[:, None]
    gate, up = _load_gate_up(x, row, f, keep, INNER)
    out = gate / (1 + tl.exp(-gate)) * up
    tl.store(y + row * INNER + f[None, :], out.to(y.dtype.element_ty), mask=keep)


@jit
def _silu_backward(
    x: tl.tensor, dy: tl.tensor, dx: tl.tensor,
    points: tl.tensor, INNER: tl.constexpr, TILE_POINTS: tl.constexpr, TILE_INNER: tl.constexpr,
) -> None:  # fmt: skip
    """dx (N, 2 F) = [dgate, dup] from x (N, 2 F) = [gate, up] and dy (N, F).

    dgate = dy up s (1 + gate (1 - s)), dup = dy gate s, s = sigmoid(gate)."""
    n = tl.program_id(0) * TILE_POINTS + tl.arange(0, TILE_POINTS)
    f = tl.program_id(1) * TILE_INNER + tl.arange(0, TILE_INNER)
    keep = (n[:, None] < points) & (f[None, :] < INNER)
    row = n.to(tl.int64)[:, None]
    gate, up = _load_gate_up(x, row, f, keep, INNER)
    d = tl.load(dy + row * INNER + f[None, :], mask=keep, other=0.0).to(tl.float32)
    s = 1 / (1 + tl.exp(-gate))
    dgate, dup = d * up * s * (1 + gate * (1 - s)), d * gate * s
    tl.store(dx + row * 2 * INNER + f[None, :], dgate.to(dx.dtype.element_ty), mask=keep)
    tl.store(dx + row * 2 * INNER + INNER + f[None, :], dup.to(dx.dtype.element_ty), mask=keep)


def fuses_products(operation: str, channels: int) -> bool:
    """Whether a kernel of `operation` also multiplies the matrices; for wider streams cuBLAS does."""
    width = "width", channels, tuning.MAX_FUSED_MATMUL_CHANNELS
    return prefers(operation, "inside the kernel", "cuBLAS", exceeded((width,)))


def apply_gate(inner: torch.Tensor, bias: torch.Tensor, da: torch.Tensor | None) -> torch.Tensor:
    """a; given `da`, overwrite `inner` with the gradients of gate and up."""
    points, inner_width = inner.shape[0], inner.shape[1] // 2
    a = inner.new_empty(points, inner_width)
    tile = {"TILE_POINTS": tuning.GATE_POINTS, "TILE_INNER": tuning.GATE_CHANNELS}
    grid = (triton.cdiv(points, tile["TILE_POINTS"]), triton.cdiv(inner_width, tile["TILE_INNER"]))
    _gated[grid](inner, bias, a if da is None else da, a, points, INNER=inner_width, BACKWARD=da is not None, **tile)
    return a


def gate_backward(
    y: torch.Tensor, dout: torch.Tensor, W_in: torch.Tensor, b_in: torch.Tensor, W_out: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """a (N, F), the gradients of gate and up (N, 2 F), dy (N, C), and dout in the dtype of y (N, C + EXTRA)."""
    (inner_width, channels), points = W_out.shape, len(y)
    if not fuses_products("mixing products, backward", channels):
        inner, dout_cast = y[:, :channels] @ W_in.T, dout.to(y.dtype)
        a = apply_gate(inner, b_in, dout_cast @ W_out.T)
        return a, inner, inner @ W_in, dout_cast
    tile = tuning.SWIGLU_BACKWARD_TILES[gpu_class(y)][y.element_size()]
    a, inner, dy = y.new_empty(points, inner_width), y.new_empty(points, 2 * inner_width), y.new_empty(points, channels)
    dout_cast = dout if dout.dtype == y.dtype else y.new_empty(points, channels)
    _inner_backward[(triton.cdiv(points, tile.points),)](
        y, dout, W_in, b_in, W_out, dout_cast, a, inner, dy, points, CHANNELS=channels, INNER=inner_width,
        CAST=dout_cast is not dout, TILE_POINTS=tile.points, TILE_CHANNELS=tuning.tile_size(channels),
        TILE_INNER=tile.inner, PRECISION=dot_precision(), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return a, inner, dy, dout_cast


class _SiluProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        points, inner_width = x.shape[0], x.shape[1] // 2
        y = torch.empty(points, inner_width, device=x.device, dtype=x.dtype)
        grid, tile = _silu_tiles(points, inner_width)
        _silu_forward[grid](x, y, points, INNER=inner_width, **tile)
        ctx.save_for_backward(x)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        points, inner_width = x.shape[0], x.shape[1] // 2
        dx = torch.empty_like(x)
        grid, tile = _silu_tiles(points, inner_width)
        _silu_backward[grid](x, dy.contiguous(), dx, points, INNER=inner_width, **tile)
        return dx


def _silu_tiles(points: int, inner_width: int) -> tuple[tuple[int, int], dict[str, int]]:
    tile = {"TILE_POINTS": tuning.SILU_POINTS, "TILE_INNER": tuning.SILU_CHANNELS}
    return (triton.cdiv(points, tile["TILE_POINTS"]), triton.cdiv(inner_width, tile["TILE_INNER"])), tile


def silu_product(x: torch.Tensor) -> torch.Tensor:
    """SiLU(first half) * second half of the last axis."""
    return _SiluProduct.apply(x.contiguous().flatten(0, -2)).view(*x.shape[:-1], -1)
