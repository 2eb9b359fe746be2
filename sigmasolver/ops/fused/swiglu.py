"""The inner channels of a SwiGLU: a = SiLU(gate) * up, and the way back through them.

    da = dout Wd     dgate = da up s (1 + gate (1 - s)),  dup = da gate s,  s = sigmoid(gate)     dy = dgate Wg + dup Wu

Up to CHANNELS channels one kernel goes from y and dout to all of these, with its products inside; wider ones leave the
products to the library.

Rows of y come with EXTRA channels more, the first of which is 1: the product that makes the gradient of the weights of
gate and up then makes that of their biases too.

Letters: N points, C channels, W inner width, filled up; BN, BC, BF tile sizes.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from sigmasolver.ops.fused import dot_precision, shared_memory
from sigmasolver.ops.fused.tuning import tile_size

__all__ = ["CHANNELS", "EXTRA", "gated", "sigmoid", "silu_product", "through_gate"]

CHANNELS = 128
"""Up to which products inside a kernel are quicker than the library's with passes over memory between them."""
EXTRA = tl.constexpr(8)
"""One is needed; rows of whole multiples of 16 bytes are read at full speed."""
TILES = {2: (64, 64, 4, 1), 4: (32, 32, 4, 2)}
"""Points and inner channels of a tile, warps, and stages of the pipeline, by the bytes of a number."""
LARGE, ROOM = (128, 64, 8, 2), 184_320
"""The same for two bytes where a program may have so many bytes of shared memory, as on H100 and later."""


@triton.jit
def sigmoid(x):  # type: ignore[no-untyped-def]
    """1 / (1 + exp(-x)), by a reciprocal root: five instructions where a division makes it twelve."""
    root = tl.rsqrt(1 + tl.exp2(x * -1.4426950408889634))
    return root * root


@triton.jit
def _slopes(gate, up, da):  # type: ignore[no-untyped-def]
    """a, dgate, dup."""
    s = sigmoid(gate)
    silu = gate * s
    return silu * up, da * up * (s + (silu - silu * s)), da * silu


@triton.jit
def _gated(inner, bias, da, a, N, W: tl.constexpr, BACK: tl.constexpr, BN: tl.constexpr, BF: tl.constexpr):  # type: ignore[no-untyped-def]
    """a of inner (N, 2 W) without its bias; with BACK, inner becomes the gradients of gate and up."""
    n, f = tl.program_id(0) * BN + tl.arange(0, BN), tl.program_id(1) * BF + tl.arange(0, BF)
    keep = (n[:, None] < N) & (f[None, :] < W)
    row = n.to(tl.int64)[:, None]
    here = inner + row * (2 * W) + f[None, :]
    gate = tl.load(here, mask=keep, other=0.0).to(tl.float32) + tl.load(bias + f, mask=f < W, other=0.0)[None, :]
    up = tl.load(here + W, mask=keep, other=0.0).to(tl.float32) + tl.load(bias + W + f, mask=f < W, other=0.0)[None, :]
    if BACK:
        d = tl.load(da + row * W + f[None, :], mask=keep, other=0.0).to(tl.float32)
        out, dgate, dup = _slopes(gate, up, d)
        tl.store(here, dgate.to(inner.dtype.element_ty), mask=keep)
        tl.store(here + W, dup.to(inner.dtype.element_ty), mask=keep)
    else:
        out = gate * up * sigmoid(gate)
    tl.store(a + row * W + f[None, :], out.to(a.dtype.element_ty), mask=keep)


@triton.jit
def _inner_backward(  # type: ignore[no-untyped-def]
    y, dout, win, b_in, wout, narrow, a, dinner, dy, N,
    C: tl.constexpr, W: tl.constexpr, NARROW: tl.constexpr,
    BN: tl.constexpr, BC: tl.constexpr, BF: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Of a tile of points: a, the gradients of gate and up `dinner` (N, 2 W), dy, and with NARROW dout as y is."""
    first = tl.program_id(0).to(tl.int64) * BN
    n, c = tl.arange(0, BN), tl.arange(0, BC)
    left = N - tl.program_id(0) * BN
    keep = (n[:, None] < left) & (c[None, :] < C)
    place = first * C + n[:, None] * C + c[None, :]
    t = tl.load(y + first * (C + EXTRA) + n[:, None] * (C + EXTRA) + c[None, :], mask=keep, other=0.0)
    g = tl.load(dout + place, mask=keep, other=0.0).to(t.dtype)
    if NARROW:
        tl.store(narrow + place, g, mask=keep)
    a += first * W
    dinner += first * (2 * W)
    total = tl.zeros((BN, BC), tl.float32)
    for start in range(0, W, BF):
        f = start + tl.arange(0, BF)
        known = (f[:, None] < W) & (c[None, :] < C)
        here = f[:, None] * C + c[None, :]
        gate_map = tl.load(win + here, mask=known, other=0.0)
        up_map = tl.load(win + W * C + here, mask=known, other=0.0)
        down_map = tl.load(wout + here, mask=known, other=0.0)
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
    tl.store(dy + place, total.to(t.dtype), mask=keep)


@triton.jit
def _silu_forward(x, y, N, F: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr):  # type: ignore[no-untyped-def]
    n, c = tl.program_id(0) * BN + tl.arange(0, BN), tl.program_id(1) * BC + tl.arange(0, BC)
    keep = (n[:, None] < N) & (c[None, :] < F)
    place = n.to(tl.int64)[:, None]
    gate = tl.load(x + place * 2 * F + c[None, :], mask=keep, other=0.0).to(tl.float32)
    up = tl.load(x + place * 2 * F + F + c[None, :], mask=keep, other=0.0).to(tl.float32)
    out = gate / (1 + tl.exp(-gate)) * up
    tl.store(y + place * F + c[None, :], out.to(y.dtype.element_ty), mask=keep)


@triton.jit
def _silu_backward(x, g, dx, N, F: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr):  # type: ignore[no-untyped-def]
    n, c = tl.program_id(0) * BN + tl.arange(0, BN), tl.program_id(1) * BC + tl.arange(0, BC)
    keep = (n[:, None] < N) & (c[None, :] < F)
    place = n.to(tl.int64)[:, None]
    gate = tl.load(x + place * 2 * F + c[None, :], mask=keep, other=0.0).to(tl.float32)
    up = tl.load(x + place * 2 * F + F + c[None, :], mask=keep, other=0.0).to(tl.float32)
    dy = tl.load(g + place * F + c[None, :], mask=keep, other=0.0).to(tl.float32)
    s = 1 / (1 + tl.exp(-gate))
    dgate, dup = dy * up * s * (1 + gate * (1 - s)), dy * gate * s
    tl.store(dx + place * 2 * F + c[None, :], dgate.to(dx.dtype.element_ty), mask=keep)
    tl.store(dx + place * 2 * F + F + c[None, :], dup.to(dx.dtype.element_ty), mask=keep)


def gated(inner: torch.Tensor, bias: torch.Tensor, da: torch.Tensor | None) -> torch.Tensor:
    """a; with `da` the gradients of gate and up replace `inner`."""
    N, W = inner.shape[0], inner.shape[1] // 2
    a = inner.new_empty(N, W)
    grid = (triton.cdiv(N, 32), triton.cdiv(W, 64))
    _gated[grid](inner, bias, a if da is None else da, a, N, W=W, BACK=da is not None, BN=32, BF=64)
    return a


def through_gate(
    y: torch.Tensor, dout: torch.Tensor, win: torch.Tensor, b_in: torch.Tensor, wout: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """a (N, W), the gradients of gate and up (N, 2 W), dy (N, C), and dout in the type of y (N, C + EXTRA)."""
    (W, C), N = wout.shape, len(y)
    if C > CHANNELS:
        inner, narrow = y[:, :C] @ win.T, dout.to(y.dtype)
        a = gated(inner, b_in, narrow @ wout.T)
        return a, inner, inner @ win, narrow
    roomy = y.element_size() == 2 and shared_memory(y) >= ROOM
    BN, BF, warps, stages = LARGE if roomy else TILES[y.element_size()]
    a, inner, dy = y.new_empty(N, W), y.new_empty(N, 2 * W), y.new_empty(N, C)
    narrow = dout if dout.dtype == y.dtype else y.new_empty(N, C)
    _inner_backward[(triton.cdiv(N, BN),)](
        y, dout, win, b_in, wout, narrow, a, inner, dy, N, C=C, W=W, NARROW=narrow is not dout,
        BN=BN, BC=tile_size(C), BF=BF, PRECISION=dot_precision(),
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return a, inner, dy, narrow


class _SiluProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        N, F = x.shape[0], x.shape[1] // 2
        y = torch.empty(N, F, device=x.device, dtype=x.dtype)
        _silu_forward[(triton.cdiv(N, 16), triton.cdiv(F, 128))](x, y, N, F=F, BN=16, BC=128)
        ctx.save_for_backward(x)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        N, F = x.shape[0], x.shape[1] // 2
        dx = torch.empty_like(x)
        _silu_backward[(triton.cdiv(N, 16), triton.cdiv(F, 128))](x, g.contiguous(), dx, N, F=F, BN=16, BC=128)
        return dx


def silu_product(x: torch.Tensor) -> torch.Tensor:
    """SiLU(first half) * second half of the last axis."""
    return _SiluProduct.apply(x.contiguous().flatten(0, -2)).view(*x.shape[:-1], -1)
