"""The inner channels of a SwiGLU: a = SiLU(gate) * up, and the gradients of gate and up.

    da = dout Wd     dgate = da up s (1 + gate (1 - s)),  dup = da gate s,  s = sigmoid(gate)

Up to CHANNELS channels one kernel goes from y and dout to the gradients, with its products inside; wider ones leave the
products to the library.

Letters: N points, C channels, W inner width, filled up; BN, BC, BF tile sizes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sigmasolver.ops.fused import dot_precision

__all__ = ["CHANNELS", "gate", "through_gate"]

CHANNELS = 128
"""Up to which products inside a kernel are quicker than the library's with passes over memory between them."""
PROGRAMS, INNER_PROGRAMS = 1024, 264
"""That a pass is cut into at least, where there are points enough; each leaves one row of partial sums."""
TILES = {2: (64, 64, 3), 4: (32, 32, 2)}
"""Points and inner channels of a tile and stages of the pipeline, by the bytes of a number."""


@triton.jit
def _gated(  # type: ignore[no-untyped-def]
    inner, bias, da, a, sums, N,
    W: tl.constexpr, BACK: tl.constexpr, BN: tl.constexpr, BF: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """a of inner (N, 2 W) without its bias; with BACK, inner becomes the gradients of gate and up, sums their sums."""
    chunk, f = tl.program_id(0), tl.program_id(1) * BF + tl.arange(0, BF)
    gate_bias = tl.load(bias + f, mask=f < W, other=0.0)[None, :]
    up_bias = tl.load(bias + W + f, mask=f < W, other=0.0)[None, :]
    sum_gate = tl.zeros((BN, BF), tl.float32)
    sum_up = tl.zeros((BN, BF), tl.float32)
    for start in range(0, SPAN, BN):
        n = chunk * SPAN + start + tl.arange(0, BN)
        keep = (n[:, None] < N) & (f[None, :] < W)
        row = n.to(tl.int64)[:, None]
        here = inner + row * (2 * W) + f[None, :]
        gate = tl.load(here, mask=keep, other=0.0).to(tl.float32) + gate_bias
        up = tl.load(here + W, mask=keep, other=0.0).to(tl.float32) + up_bias
        s = 1 / (1 + tl.exp(-gate))
        silu = gate * s
        tl.store(a + row * W + f[None, :], (silu * up).to(a.dtype.element_ty), mask=keep)
        if BACK:
            d = tl.load(da + row * W + f[None, :], mask=keep, other=0.0).to(tl.float32)
            dgate, dup = d * up * (s + silu * (1 - s)), d * silu
            tl.store(here, dgate.to(inner.dtype.element_ty), mask=keep)
            tl.store(here + W, dup.to(inner.dtype.element_ty), mask=keep)
            sum_gate += dgate
            sum_up += dup
    if BACK:
        sums += chunk * 2 * W
        tl.store(sums + f, tl.sum(sum_gate, axis=0), mask=f < W)
        tl.store(sums + W + f, tl.sum(sum_up, axis=0), mask=f < W)


@triton.jit
def _inner_backward(  # type: ignore[no-untyped-def]
    y, dout, win, b_in, wout, a, dinner, sums, N,
    C: tl.constexpr, W: tl.constexpr,
    BN: tl.constexpr, BC: tl.constexpr, BF: tl.constexpr, SPAN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """a and the gradients of gate and up, `dinner` (N, 2 W), with their sums: a chunk of points and a tile of inner
    channels, whose weights stay while points pass by."""
    chunk, f, c = tl.program_id(0), tl.program_id(1) * BF + tl.arange(0, BF), tl.arange(0, BC)
    known = (f[:, None] < W) & (c[None, :] < C)
    place = f[:, None] * C + c[None, :]
    gate_map = tl.trans(tl.load(win + place, mask=known, other=0.0))
    up_map = tl.trans(tl.load(win + W * C + place, mask=known, other=0.0))
    down_map = tl.trans(tl.load(wout + place, mask=known, other=0.0))
    gate_bias = tl.load(b_in + f, mask=f < W, other=0.0)[None, :]
    up_bias = tl.load(b_in + W + f, mask=f < W, other=0.0)[None, :]
    sum_gate, sum_up = tl.zeros((BF,), tl.float32), tl.zeros((BF,), tl.float32)
    for start in range(0, SPAN, BN):
        n = chunk * SPAN + start + tl.arange(0, BN)
        row = n.to(tl.int64)[:, None]
        inside = (n[:, None] < N) & (c[None, :] < C)
        t = tl.load(y + row * C + c[None, :], mask=inside, other=0.0)
        g = tl.load(dout + row * C + c[None, :], mask=inside, other=0.0)
        gate = tl.dot(t, gate_map, input_precision=PRECISION) + gate_bias
        up = tl.dot(t, up_map, input_precision=PRECISION) + up_bias
        d = tl.dot(g, down_map, input_precision=PRECISION)
        s = 1 / (1 + tl.exp(-gate))
        silu = gate * s
        dgate, dup = d * up * (s + silu * (1 - s)), d * silu
        keep = (n[:, None] < N) & (f[None, :] < W)
        tl.store(a + row * W + f[None, :], (silu * up).to(a.dtype.element_ty), mask=keep)
        here = dinner + row * (2 * W) + f[None, :]
        tl.store(here, dgate.to(dinner.dtype.element_ty), mask=keep)
        tl.store(here + W, dup.to(dinner.dtype.element_ty), mask=keep)
        sum_gate += tl.sum(dgate, axis=0)
        sum_up += tl.sum(dup, axis=0)
    sums += chunk * 2 * W
    tl.store(sums + f, sum_gate, mask=f < W)
    tl.store(sums + W + f, sum_up, mask=f < W)


def gate(inner: torch.Tensor, bias: torch.Tensor, da: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """a; and with `da` the sums of the gradients of gate and up, which replace `inner`."""
    N, W = inner.shape[0], inner.shape[1] // 2
    a, across = torch.empty(N, W, device=inner.device, dtype=inner.dtype), triton.cdiv(W, 64)
    span = 32 * max(1, min(16, N * across // (32 * PROGRAMS)))
    chunks = triton.cdiv(N, span)
    sums = torch.empty(chunks if da is not None else 0, 2 * W, device=inner.device, dtype=torch.float32)
    _gated[(chunks, across)](
        inner, bias, a if da is None else da, a, sums, N, W=W, BACK=da is not None, BN=32, BF=64, SPAN=span
    )
    return a, sums


def through_gate(
    y: torch.Tensor, dout: torch.Tensor, win: torch.Tensor, b_in: torch.Tensor, wout: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """a (N, W), the gradients of gate and up (N, 2 W), and partial sums of these."""
    (N, C), W = y.shape, len(wout)
    if C > CHANNELS:
        inner = y @ win.T
        a, sums = gate(inner, b_in, dout @ wout.T)
        return a, inner, sums
    BN, BF, stages = TILES[y.element_size()]
    across = triton.cdiv(W, BF)
    span = triton.cdiv(N * across, INNER_PROGRAMS * BN) * BN
    chunks = triton.cdiv(N, span)
    a, inner = y.new_empty(N, W), y.new_empty(N, 2 * W)
    sums = torch.empty(chunks, 2 * W, device=y.device, dtype=torch.float32)
    _inner_backward[(chunks, across)](
        y, dout, win, b_in, wout, a, inner, sums, N, C=C, W=W, BN=BN, BC=max(16, triton.next_power_of_2(C)), BF=BF,
        SPAN=span, PRECISION=dot_precision(), num_warps=4, num_stages=stages,
    )  # fmt: skip
    return a, inner, sums
