"""Depthwise convolutions on channels-last grids, one or two kernels over one input, with all gradients.

    y_i[n, c] = b_i[c] + sum_t w_i[t, c] x[n + t, c]  (+ x[n, c])        t over the kernel, i = 1 or 1, 2

    dx = sum_i sum_t w_i[t] dy_i[n - t] (+ dy)      dw_i[t] = sum_n x[n + t] dy_i[n]      db_i = sum_n dy_i[n]

The gradient of the input is the same operation with the kernel turned round. Weight gradients are summed over chunks of
points first, then over chunks in a fixed order. One and two axes are three axes of which some have one point.

Letters: B batch, X Y Z points per axis, C channels; KX KY KZ kernel; BN points and BC channels of a tile.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

__all__ = ["depthwise", "depthwise_pair"]

CHUNK = 1024


@triton.jit
def _shifted(n, by, size, CIRCULAR: tl.constexpr):  # type: ignore[no-untyped-def]
    """Index and whether it is inside."""
    moved = n + by
    if CIRCULAR:
        moved = (moved + size) % size
    return moved, (moved >= 0) & (moved < size)


@triton.jit
def _convolve(  # type: ignore[no-untyped-def]
    i0, i1, w0, w1, b0, b1, o0, o1, X, Y, Z, C, tiles_z,
    KX: tl.constexpr, KY: tl.constexpr, KZ: tl.constexpr, CX: tl.constexpr, CY: tl.constexpr, CZ: tl.constexpr,
    TWO_IN: tl.constexpr, TWO_OUT: tl.constexpr, TURNED: tl.constexpr, RESIDUAL: tl.constexpr, BIAS: tl.constexpr,
    TY: tl.constexpr, TZ: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    tile, plane = tl.program_id(0), tl.program_id(2)
    p = tl.arange(0, TY * TZ)
    y, z = (tile // tiles_z) * TY + p // TZ, (tile % tiles_z) * TZ + p % TZ
    x, first = plane % X + tl.zeros_like(p), (plane // X).to(tl.int64) * X
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    points, channels = (y < Y) & (z < Z), c < C
    a0 = tl.zeros((TY * TZ, BC), tl.float32)
    a1 = tl.zeros((TY * TZ, BC), tl.float32)
    for kx in range(KX):
        sx, in_x = _shifted(x, kx - KX // 2, X, CX)
        for ky in range(KY):
            sy, in_y = _shifted(y, ky - KY // 2, Y, CY)
            for kz in range(KZ):
                sz, in_z = _shifted(z, kz - KZ // 2, Z, CZ)
                keep = (points & in_x & in_y & in_z)[:, None] & channels[None, :]
                place = (((first + sx) * Y + sy) * Z + sz)[:, None] * C + c[None, :]
                tap = (kx * KY + ky) * KZ + kz
                if TURNED:
                    tap = KX * KY * KZ - 1 - tap
                v = tl.load(i0 + place, mask=keep, other=0.0).to(tl.float32)
                k0 = tl.load(w0 + tap * C + c, mask=channels, other=0.0)
                a0 += v * k0[None, :]
                if TWO_OUT:
                    k1 = tl.load(w1 + tap * C + c, mask=channels, other=0.0)
                    a1 += v * k1[None, :]
                if TWO_IN:
                    u = tl.load(i1 + place, mask=keep, other=0.0).to(tl.float32)
                    k1 = tl.load(w1 + tap * C + c, mask=channels, other=0.0)
                    a0 += u * k1[None, :]
    keep = points[:, None] & channels[None, :]
    place = (((first + x) * Y + y) * Z + z)[:, None] * C + c[None, :]
    if BIAS:
        a0 += tl.load(b0 + c, mask=channels, other=0.0)[None, :]
    if RESIDUAL:
        a0 += tl.load(i0 + place, mask=keep, other=0.0).to(tl.float32)
    tl.store(o0 + place, a0.to(o0.dtype.element_ty), mask=keep)
    if TWO_OUT:
        if BIAS:
            a1 += tl.load(b1 + c, mask=channels, other=0.0)[None, :]
        tl.store(o1 + place, a1.to(o1.dtype.element_ty), mask=keep)


@triton.jit
def _weight_gradient(  # type: ignore[no-untyped-def]
    i, g0, g1, d0, d1, s0, s1, N, X, Y, Z, C,
    KX: tl.constexpr, KY: tl.constexpr, KZ: tl.constexpr, CX: tl.constexpr, CY: tl.constexpr, CZ: tl.constexpr,
    TWO: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """One row of KZ taps over one chunk of points; d (chunks, taps, C) and s (chunks, C) take the sums."""
    chunk, row = tl.program_id(0), tl.program_id(1)
    c = tl.program_id(2) * BC + tl.arange(0, BC)
    channels = c < C
    kx, ky = row // KY, row % KY
    a0 = tl.zeros((BN, BC), tl.float32)
    a1 = tl.zeros((BN, BC), tl.float32)
    a2 = tl.zeros((BN, BC), tl.float32)
    a3 = tl.zeros((BN, BC), tl.float32)
    a4 = tl.zeros((BN, BC), tl.float32)
    e0 = tl.zeros((BN, BC), tl.float32)
    e1 = tl.zeros((BN, BC), tl.float32)
    e2 = tl.zeros((BN, BC), tl.float32)
    e3 = tl.zeros((BN, BC), tl.float32)
    e4 = tl.zeros((BN, BC), tl.float32)
    t0 = tl.zeros((BN, BC), tl.float32)
    t1 = tl.zeros((BN, BC), tl.float32)
    for start in range(0, SPAN, BN):
        n = chunk * SPAN + start + tl.arange(0, BN)
        z, rest = n % Z, n // Z
        y, rest = rest % Y, rest // Y
        x, batch = rest % X, (rest // X).to(tl.int64)
        sx, in_x = _shifted(x, kx - KX // 2, X, CX)
        sy, in_y = _shifted(y, ky - KY // 2, Y, CY)
        points = n < N
        keep = points[:, None] & channels[None, :]
        here = n.to(tl.int64)[:, None] * C + c[None, :]
        v0 = tl.load(g0 + here, mask=keep, other=0.0).to(tl.float32)
        if row == 0:
            t0 += v0
        if TWO:
            v1 = tl.load(g1 + here, mask=keep, other=0.0).to(tl.float32)
            if row == 0:
                t1 += v1
        line = ((batch * X + sx) * Y + sy) * Z
        for kz in tl.static_range(KZ):
            sz, in_z = _shifted(z, kz - KZ // 2, Z, CZ)
            inside = (points & in_x & in_y & in_z)[:, None] & channels[None, :]
            u = tl.load(i + (line + sz)[:, None] * C + c[None, :], mask=inside, other=0.0).to(tl.float32)
            if kz == 0:
                a0 += u * v0
            if kz == 1:
                a1 += u * v0
            if kz == 2:
                a2 += u * v0
            if kz == 3:
                a3 += u * v0
            if kz == 4:
                a4 += u * v0
            if TWO:
                if kz == 0:
                    e0 += u * v1
                if kz == 1:
                    e1 += u * v1
                if kz == 2:
                    e2 += u * v1
                if kz == 3:
                    e3 += u * v1
                if kz == 4:
                    e4 += u * v1
    to = (chunk * KX * KY * KZ + row * KZ) * C + c
    for kz in tl.static_range(KZ):
        sums = a0
        others = e0
        if kz == 1:
            sums = a1
            others = e1
        if kz == 2:
            sums = a2
            others = e2
        if kz == 3:
            sums = a3
            others = e3
        if kz == 4:
            sums = a4
            others = e4
        tl.store(d0 + to + kz * C, tl.sum(sums, axis=0), mask=channels)
        if TWO:
            tl.store(d1 + to + kz * C, tl.sum(others, axis=0), mask=channels)
    if row == 0:
        tl.store(s0 + chunk * C + c, tl.sum(t0, axis=0), mask=channels)
        if TWO:
            tl.store(s1 + chunk * C + c, tl.sum(t1, axis=0), mask=channels)


class _Shape:
    """Grid, kernel and padding as three axes."""

    def __init__(self, x: torch.Tensor, weight: torch.Tensor, padding: Sequence[str]) -> None:
        missing = 3 - len(padding)
        self.batch, self.channels = x.shape[0], x.shape[-1]
        self.grid = (1,) * missing + tuple(x.shape[1:-1])
        self.kernel = (1,) * missing + tuple(weight.shape[2:])
        circular = (False,) * missing + tuple(kind == "circular" for kind in padding)
        names = ("KX", "KY", "KZ", "CX", "CY", "CZ")
        self.constants: dict[str, Any] = dict(zip(names, (*self.kernel, *circular), strict=True))
        self.block = min(64, triton.next_power_of_2(self.channels))

    def run(self, inputs: Sequence[torch.Tensor], weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor],
            outputs: Sequence[torch.Tensor], turned: bool, residual: bool) -> None:  # fmt: skip
        X, Y, Z = self.grid
        TZ = min(16, triton.next_power_of_2(Z))
        TY = min(64 // TZ, triton.next_power_of_2(Y))
        tiles = (triton.cdiv(Y, TY), triton.cdiv(Z, TZ))
        _convolve[(tiles[0] * tiles[1], triton.cdiv(self.channels, self.block), self.batch * X)](
            inputs[0], inputs[-1], weights[0], weights[-1], biases[0] if biases else weights[0],
            biases[-1] if biases else weights[0], outputs[0], outputs[-1], X, Y, Z, self.channels, tiles[1],
            **self.constants, TWO_IN=len(inputs) == 2, TWO_OUT=len(outputs) == 2, TURNED=turned, RESIDUAL=residual,
            BIAS=bool(biases), TY=TY, TZ=TZ, BC=self.block, num_warps=4,
        )  # fmt: skip

    def weight_gradients(
        self, x: torch.Tensor, gradients: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Each (taps, C) and (C,) in float32."""
        points, taps = self.batch * math.prod(self.grid), math.prod(self.kernel)
        block, BN = min(32, self.block), 32
        span = min(CHUNK, -(-points // BN) * BN)
        chunks = triton.cdiv(points, span)
        sums = [torch.empty(chunks, taps, self.channels, device=x.device) for _ in gradients]
        totals = [torch.empty(chunks, self.channels, device=x.device) for _ in gradients]
        rows = self.kernel[0] * self.kernel[1]
        _weight_gradient[(chunks, rows, triton.cdiv(self.channels, block))](
            x, gradients[0], gradients[-1], sums[0], sums[-1], totals[0], totals[-1], points, *self.grid, self.channels,
            **self.constants, TWO=len(gradients) == 2, BN=BN, BC=block, SPAN=span, num_warps=4,
        )  # fmt: skip
        return [one.sum(0) for one in sums], [one.sum(0) for one in totals]


def _taps(weight: torch.Tensor) -> torch.Tensor:
    """(C, 1, *kernel) -> (taps, C), float32."""
    return weight.detach().flatten(1).T.to(torch.float32).contiguous()


class _Depthwise(torch.autograd.Function):
    """x, padding, residual, then weight and bias of each kernel -> one output for each."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, padding: tuple[str, ...], residual: bool, *pairs: torch.Tensor) -> Any:
        weights, biases = pairs[::2], pairs[1::2]
        shape = _Shape(x, weights[0], padding)
        outputs = [torch.empty_like(x) for _ in weights]
        wide = [bias.detach().to(torch.float32) for bias in biases]
        shape.run([x], [_taps(weight) for weight in weights], wide, outputs, turned=False, residual=residual)
        ctx.save_for_backward(x, *weights)
        ctx.shape, ctx.residual, ctx.kinds = shape, residual, [bias.dtype for bias in biases]
        return tuple(outputs) if len(outputs) > 1 else outputs[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x, *weights = ctx.saved_tensors
        shape: _Shape = ctx.shape
        given = [gradient.contiguous() for gradient in gradients]
        dx = torch.empty_like(x)
        shape.run(given, [_taps(weight) for weight in weights], [], [dx], turned=True, residual=ctx.residual)
        taps, sums = shape.weight_gradients(x, given)
        pairs = []
        for weight, tap, total, kind in zip(weights, taps, sums, ctx.kinds, strict=True):
            pairs += [tap.T.reshape(weight.shape).to(weight.dtype), total.to(kind)]
        return dx, None, None, *pairs


def _ready(x: torch.Tensor) -> torch.Tensor:
    """Contiguous, and in the narrow type where autocast would have a convolution run in it."""
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    return x.contiguous()


def depthwise(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, padding: Sequence[str], residual: bool = False
) -> torch.Tensor:
    """One convolution of `x` (B, *grid, C) by `weight` (C, 1, *kernel); with `residual`, x itself is added."""
    ready = x.contiguous() if residual else _ready(x)  # what is added to must not be rounded
    return _Depthwise.apply(ready, tuple(padding), residual, weight, bias)


def depthwise_pair(
    x: torch.Tensor,
    first: tuple[torch.Tensor, torch.Tensor],
    second: tuple[torch.Tensor, torch.Tensor],
    padding: Sequence[str],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two convolutions of one input, (weight, bias) each, which is read once."""
    return _Depthwise.apply(_ready(x), tuple(padding), False, *first, *second)
