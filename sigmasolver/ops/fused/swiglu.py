"""The inner channels of a SwiGLU: a = SiLU(gate) * up, and the way back through them.

    da = dout Wd     dgate = da up s (1 + gate (1 - s)),  dup = da gate s,  s = sigmoid(gate)     dy = dgate Wg + dup Wu

Up to PRODUCTS_INSIDE channels one kernel goes from y and dout to all of these, with its products inside; wider ones
leave the products to cuBLAS.

Rows of y come with EXTRA channels more, the first of which is 1: the product that makes the gradient of the weights of
gate and up then makes that of their biases too.

Letters: N points, C channels, W inner width, padded.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from sigmasolver.ops.fused import dot_precision, shared_memory, tuning

__all__ = ["EXTRA", "gated", "sigmoid", "silu_product", "through_gate"]

EXTRA = tl.constexpr(tuning.EXTRA_CHANNELS)


@triton.jit
def sigmoid(x: tl.tensor) -> tl.tensor:
    """1 / (1 + exp(-x)), by a reciprocal root: five instructions where a division makes it twelve."""
    root = tl.rsqrt(1 + tl.exp2(x * -1.4426950408889634))
    return root * root


@triton.jit
def _slopes(gate: tl.tensor, up: tl.tensor, da: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """a = SiLU(gate) up, dgate, dup."""
    s = sigmoid(gate)
    silu = gate * s
    return silu * up, da * up * (s + (silu - silu * s)), da * silu


@triton.jit
def _gated(
    inner: tl.tensor, bias: tl.tensor, da: tl.tensor, a: tl.tensor,
    N: tl.tensor, W: tl.constexpr, BACKWARD: tl.constexpr, ROWS: tl.constexpr, INNER: tl.constexpr,
) -> None:  # fmt: skip
    """a (N, W) of inner (N, 2 W) = [gate, up] without its bias (2 W); BACKWARD: inner becomes [dgate, dup], from da."""
    n, f = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * INNER + tl.arange(0, INNER)
    keep = (n[:, None] < N) & (f[None, :] < W)
    row = n.to(tl.int64)[:, None]
    here = inner + row * (2 * W) + f[None, :]
    gate = tl.load(here, mask=keep, other=0.0).to(tl.float32) + tl.load(bias + f, mask=f < W, other=0.0)[None, :]
    up = tl.load(here + W, mask=keep, other=0.0).to(tl.float32) + tl.load(bias + W + f, mask=f < W, other=0.0)[None, :]
    if BACKWARD:
        d = tl.load(da + row * W + f[None, :], mask=keep, other=0.0).to(tl.float32)
        out, dgate, dup = _slopes(gate, up, d)
        tl.store(here, dgate.to(inner.dtype.element_ty), mask=keep)
        tl.store(here + W, dup.to(inner.dtype.element_ty), mask=keep)
    else:
        out = gate * up * sigmoid(gate)
    tl.store(a + row * W + f[None, :], out.to(a.dtype.element_ty), mask=keep)


@triton.jit
def _inner_backward(
    y: tl.tensor, dout: tl.tensor, W_in: tl.tensor, b_in: tl.tensor, W_out: tl.tensor,
    dout_cast: tl.tensor, a: tl.tensor, dinner: tl.tensor, dy: tl.tensor,
    N: tl.tensor,
    C: tl.constexpr, W: tl.constexpr, CAST: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """Of a tile of points: a (N, W), dinner (N, 2 W) = [dgate, dup], dy (N, C), and where CAST dout in the type of y.

    y (N, C + EXTRA), dout (N, C); W_in (2 W, C) and b_in (2 W) of gate, then up; W_out (W, C).
    """
    first = tl.program_id(0).to(tl.int64) * ROWS
    n, c = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    left = N - tl.program_id(0) * ROWS
    keep = (n[:, None] < left) & (c[None, :] < C)
    offsets = first * C + n[:, None] * C + c[None, :]
    t = tl.load(y + first * (C + EXTRA) + n[:, None] * (C + EXTRA) + c[None, :], mask=keep, other=0.0)
    g = tl.load(dout + offsets, mask=keep, other=0.0).to(t.dtype)
    if CAST:
        tl.store(dout_cast + offsets, g, mask=keep)
    a += first * W
    dinner += first * (2 * W)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, W, INNER):
        f = start + tl.arange(0, INNER)
        known = (f[:, None] < W) & (c[None, :] < C)
        here = f[:, None] * C + c[None, :]
        gate_map = tl.load(W_in + here, mask=known, other=0.0)
        up_map = tl.load(W_in + W * C + here, mask=known, other=0.0)
        down_map = tl.load(W_out + here, mask=known, other=0.0)
        gate = tl.dot(t, tl.trans(gate_map), input_precision=PRECISION)
        up = tl.dot(t, tl.trans(up_map), input_precision=PRECISION)
        da = tl.dot(g, tl.trans(down_map), input_precision=PRECISION)
        gate += tl.load(b_in + f, mask=f < W, other=0.0)[None, :]
        up += tl.load(b_in + W + f, mask=f < W, other=0.0)[None, :]
        out, dgate, dup = _slopes(gate, up, da)
        inside = (n[:, None] < left) & (f[None, :] < W)
        tl.store(a + n[:, None] * W + f[None, :], out.to(t.dtype), mask=inside)
        dgate, dup = dgate.to(t.dtype), dup.to(t.dtype)
        tl.store(dinner + n[:, None] * (2 * W) + f[None, :], dgate, mask=inside)
        tl.store(dinner + n[:, None] * (2 * W) + W + f[None, :], dup, mask=inside)
        total = tl.dot(dgate, gate_map, total, input_precision=PRECISION)
        total = tl.dot(dup, up_map, total, input_precision=PRECISION)
    tl.store(dy + offsets, total.to(t.dtype), mask=keep)


# The next two have the sigmoid as a quotient, not as in `sigmoid` and `_slopes`, which round differently: to share them
# would change the bits of models that train with these.
@triton.jit
def _silu_forward(
    x: tl.tensor, y: tl.tensor, N: tl.tensor, F: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
) -> None:
    """y (N, F) = SiLU(gate) up of x (N, 2 F) = [gate, up]."""
    n, c = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    keep = (n[:, None] < N) & (c[None, :] < F)
    row = n.to(tl.int64)[:, None]
    gate = tl.load(x + row * 2 * F + c[None, :], mask=keep, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * F + F + c[None, :], mask=keep, other=0.0).to(tl.float32)
    out = gate / (1 + tl.exp(-gate)) * up
    tl.store(y + row * F + c[None, :], out.to(y.dtype.element_ty), mask=keep)


@triton.jit
def _silu_backward(
    x: tl.tensor, dy: tl.tensor, dx: tl.tensor, N: tl.tensor, F: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
) -> None:
    """dx (N, 2 F) = [dgate, dup] of x (N, 2 F) = [gate, up] and dy (N, F).

    dgate = dy up s (1 + gate (1 - s)), dup = dy gate s, s = sigmoid(gate)."""
    n, c = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    keep = (n[:, None] < N) & (c[None, :] < F)
    row = n.to(tl.int64)[:, None]
    gate = tl.load(x + row * 2 * F + c[None, :], mask=keep, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * F + F + c[None, :], mask=keep, other=0.0).to(tl.float32)
    d = tl.load(dy + row * F + c[None, :], mask=keep, other=0.0).to(tl.float32)
    s = 1 / (1 + tl.exp(-gate))
    dgate, dup = d * up * s * (1 + gate * (1 - s)), d * gate * s
    tl.store(dx + row * 2 * F + c[None, :], dgate.to(dx.dtype.element_ty), mask=keep)
    tl.store(dx + row * 2 * F + F + c[None, :], dup.to(dx.dtype.element_ty), mask=keep)


def gated(inner: torch.Tensor, bias: torch.Tensor, da: torch.Tensor | None) -> torch.Tensor:
    """a; with `da` the gradients of gate and up replace `inner`."""
    N, W = inner.shape[0], inner.shape[1] // 2
    a = inner.new_empty(N, W)
    tile = {"ROWS": tuning.GATE_POINTS, "INNER": tuning.GATE_CHANNELS}
    grid = (triton.cdiv(N, tile["ROWS"]), triton.cdiv(W, tile["INNER"]))
    _gated[grid](inner, bias, a if da is None else da, a, N, W=W, BACKWARD=da is not None, **tile)
    return a


def through_gate(
    y: torch.Tensor, dout: torch.Tensor, W_in: torch.Tensor, b_in: torch.Tensor, W_out: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """a (N, W), the gradients of gate and up (N, 2 W), dy (N, C), and dout in the type of y (N, C + EXTRA)."""
    (W, C), N = W_out.shape, len(y)
    if C > tuning.PRODUCTS_INSIDE:
        inner, dout_cast = y[:, :C] @ W_in.T, dout.to(y.dtype)
        a = gated(inner, b_in, dout_cast @ W_out.T)
        return a, inner, inner @ W_in, dout_cast
    roomy = y.element_size() == 2 and shared_memory(y) >= tuning.SWIGLU_SHARED_MEMORY
    tile = tuning.SWIGLU_BACKWARD_LARGE if roomy else tuning.SWIGLU_BACKWARD_TILES[y.element_size()]
    a, inner, dy = y.new_empty(N, W), y.new_empty(N, 2 * W), y.new_empty(N, C)
    dout_cast = dout if dout.dtype == y.dtype else y.new_empty(N, C)
    _inner_backward[(triton.cdiv(N, tile.points),)](
        y, dout, W_in, b_in, W_out, dout_cast, a, inner, dy, N, C=C, W=W, CAST=dout_cast is not dout,
        ROWS=tile.points, COLUMNS=tuning.tile_size(C), INNER=tile.inner, PRECISION=dot_precision(),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return a, inner, dy, dout_cast


class _SiluProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        N, F = x.shape[0], x.shape[1] // 2
        y = torch.empty(N, F, device=x.device, dtype=x.dtype)
        grid, tile = _silu_tiles(N, F)
        _silu_forward[grid](x, y, N, F=F, **tile)
        ctx.save_for_backward(x)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        N, F = x.shape[0], x.shape[1] // 2
        dx = torch.empty_like(x)
        grid, tile = _silu_tiles(N, F)
        _silu_backward[grid](x, dy.contiguous(), dx, N, F=F, **tile)
        return dx


def _silu_tiles(N: int, F: int) -> tuple[tuple[int, int], dict[str, int]]:
    ROWS, COLUMNS = tuning.SILU_POINTS, tuning.SILU_CHANNELS
    return (triton.cdiv(N, ROWS), triton.cdiv(F, COLUMNS)), {"ROWS": ROWS, "COLUMNS": COLUMNS}


def silu_product(x: torch.Tensor) -> torch.Tensor:
    """SiLU(first half) * second half of the last axis."""
    return _SiluProduct.apply(x.contiguous().flatten(0, -2)).view(*x.shape[:-1], -1)
