"""Depthwise convolutions on channels-last grids, one or two kernels over one input, with all gradients.

    y_i[n, c] = b_i[c] + sum_t w_i[t, c] x[n + t, c]  (+ x[n, c])        t over the kernel, i = 1 or 1, 2

    dx = sum_i sum_t w_i[t] dy_i[n - t] (+ dy)      dw_i[t] = sum_n x[n + t] dy_i[n]      db_i = sum_n dy_i[n]

The gradient of the input is the same operation with the kernel turned round. Weight gradients are summed over chunks of
points first, then over chunks in a fixed order. A single small kernel has all its gradients from one pass: what is
loaded for dx[n] = sum_t w[t] dy[n - t] makes dw[t] = sum_n x[n] dy[n - t] too. One and two axes are three axes of which
some have one point. Every lane holds RUN neighbours on the last axis, so that a number once loaded serves several of
them.

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

from sigmasolver.ops.fused import product_dtype
from sigmasolver.ops.fused.reductions import added, sum_partials
from sigmasolver.ops.fused.weight_cache import WeightLayout, arrange
from sigmasolver.ops.side_streams import on_side_stream

__all__ = ["Shape", "depthwise", "depthwise_pair", "taps_of", "window"]

RUN = tl.constexpr(4)
"""Points in a row along the last axis that a program holds for every lane; `window` spells them out."""
SINGLE, PAIR, TILE_Z = (8, 4), (32, 4), 4
"""Runs of a tile and warps, for one kernel and for two; runs of a tile along the last axis."""
GRADIENTS = 4, 2
"""The same for weight gradients."""
SHORTEST, LONGEST, PROGRAMS = 32, 256, 2560
"""Runs of a chunk, and programs there should be at least."""
TOGETHER, FEW = 27, 9
"""Taps up to which a single kernel has all its gradients from one pass, as the registers hold their sums, and up to
which it has them from the first kind of walk."""
WALKS = (4, 2, 512), (4, 4, 512)
"""Runs of a tile, warps, and programs there should be at least."""


@triton.jit
def _shifted(n, by, size, CIRCULAR: tl.constexpr):  # type: ignore[no-untyped-def]
    """Index and whether it is inside; what lies more than one period away belongs to no point."""
    moved = n + by
    if CIRCULAR:
        moved = tl.where(moved < 0, moved + size, tl.where(moved >= size, moved - size, moved))
    return moved, (moved >= 0) & (moved < size)


@triton.jit
def pick(i: tl.constexpr, a0, a1, a2, a3):  # type: ignore[no-untyped-def]
    """The i-th of four."""
    if i == 0:  # noqa: SIM116, a compile-time choice
        return a0
    elif i == 1:
        return a1
    elif i == 2:
        return a2
    else:
        return a3


@triton.jit
def window(  # type: ignore[no-untyped-def]
    i0, i1, w0, w1, batch, x, y, z, c, points, channels, X, Y, Z, C,
    KX: tl.constexpr, KY: tl.constexpr, KZ: tl.constexpr, CX: tl.constexpr, CY: tl.constexpr, CZ: tl.constexpr,
    TWO_IN: tl.constexpr, TWO_OUT: tl.constexpr, TURNED: tl.constexpr, TILE: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """The sums over the kernel for RUN points from each of (x, y, z) on, all of one plane x: what is loaded once serves
    every point of the run that it touches. Offsets inside a plane are 32 bits wide."""
    a0 = tl.zeros((TILE, BC), tl.float32)
    a1 = tl.zeros((TILE, BC), tl.float32)
    a2 = tl.zeros((TILE, BC), tl.float32)
    a3 = tl.zeros((TILE, BC), tl.float32)
    e0 = tl.zeros((TILE, BC), tl.float32)
    e1 = tl.zeros((TILE, BC), tl.float32)
    e2 = tl.zeros((TILE, BC), tl.float32)
    e3 = tl.zeros((TILE, BC), tl.float32)
    for line in range(KX * KY):  # not spelled out, which would only take the compiler longer
        sx, in_x = _shifted(x, line // KY - KX // 2, X, CX)
        sy, in_y = _shifted(y, line % KY - KY // 2, Y, CY)
        if in_x:
            plane = (batch * X + sx).to(tl.int64) * Y * Z * C
            for by in tl.static_range(KZ + RUN - 1):
                sz, in_z = _shifted(z, by - KZ // 2, Z, CZ)
                keep = (points & in_y & in_z)[:, None] & channels[None, :]
                place = ((sy * Z + sz) * C)[:, None] + c[None, :]
                v = tl.load(i0 + plane + place, mask=keep, other=0.0).to(tl.float32)
                if TWO_IN:
                    u = tl.load(i1 + plane + place, mask=keep, other=0.0).to(tl.float32)
                for run in tl.static_range(RUN):
                    if by - run >= 0 and by - run < KZ:
                        tap = line * KZ + by - run
                        if TURNED:
                            tap = KX * KY * KZ - 1 - tap
                        k0 = tl.load(w0 + tap * C + c, mask=channels, other=0.0).to(tl.float32)[None, :]
                        if TWO_IN or TWO_OUT:
                            k1 = tl.load(w1 + tap * C + c, mask=channels, other=0.0).to(tl.float32)[None, :]
                        if run == 0:
                            a0 += v * k0
                            if TWO_IN:
                                a0 += u * k1
                            if TWO_OUT:
                                e0 += v * k1
                        elif run == 1:
                            a1 += v * k0
                            if TWO_IN:
                                a1 += u * k1
                            if TWO_OUT:
                                e1 += v * k1
                        elif run == 2:
                            a2 += v * k0
                            if TWO_IN:
                                a2 += u * k1
                            if TWO_OUT:
                                e2 += v * k1
                        elif run == 3:
                            a3 += v * k0
                            if TWO_IN:
                                a3 += u * k1
                            if TWO_OUT:
                                e3 += v * k1
    return a0, a1, a2, a3, e0, e1, e2, e3


@triton.jit
def _convolve(  # type: ignore[no-untyped-def]
    i0, i1, w0, w1, b0, b1, o0, o1, X, Y, Z, C, tiles_z,
    KX: tl.constexpr, KY: tl.constexpr, KZ: tl.constexpr, CX: tl.constexpr, CY: tl.constexpr, CZ: tl.constexpr,
    TWO_IN: tl.constexpr, TWO_OUT: tl.constexpr, TURNED: tl.constexpr, RESIDUAL: tl.constexpr, BIAS: tl.constexpr,
    TY: tl.constexpr, TZ: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    tile, plane = tl.program_id(0), tl.program_id(2)
    p = tl.arange(0, TY * TZ)
    y, z = (tile // tiles_z) * TY + p // TZ, ((tile % tiles_z) * TZ + p % TZ) * RUN
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    points, channels = (y < Y) & (z < Z), c < C
    a0, a1, a2, a3, e0, e1, e2, e3 = window(
        i0, i1, w0, w1, plane // X, plane % X, y, z, c, points, channels, X, Y, Z, C, KX, KY, KZ, CX, CY, CZ,
        TWO_IN, TWO_OUT, TURNED, TY * TZ, BC,
    )  # fmt: skip
    for run in tl.static_range(RUN):
        a = pick(run, a0, a1, a2, a3)
        keep = (points & (z + run < Z))[:, None] & channels[None, :]
        place = plane.to(tl.int64) * Y * Z * C + ((y * Z + z + run) * C)[:, None] + c[None, :]
        if BIAS:
            a += tl.load(b0 + c, mask=channels, other=0.0)[None, :]
        if RESIDUAL:
            a += tl.load(i0 + place, mask=keep, other=0.0).to(tl.float32)
        tl.store(o0 + place, a.to(o0.dtype.element_ty), mask=keep)
        if TWO_OUT:
            e = pick(run, e0, e1, e2, e3)
            if BIAS:
                e += tl.load(b1 + c, mask=channels, other=0.0)[None, :]
            tl.store(o1 + place, e.to(o1.dtype.element_ty), mask=keep)


@triton.jit
def _weight_gradient(  # type: ignore[no-untyped-def]
    i, g0, g1, sums, B, X: tl.constexpr, Y: tl.constexpr, Z: tl.constexpr, C: tl.constexpr,
    KX: tl.constexpr, KY: tl.constexpr, KZ: tl.constexpr, CX: tl.constexpr, CY: tl.constexpr, CZ: tl.constexpr,
    TWO: tl.constexpr, SIZE: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """One row of KZ taps over one chunk of points. A row of `sums`: for each kernel (C, taps), then for each (C,)."""
    row, chunk = tl.program_id(0), tl.program_id(1)
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
    lines = tl.cdiv(Z, RUN)
    for start in range(0, SPAN, BN):
        n = chunk * SPAN + start + tl.arange(0, BN)
        z, rest = n % lines * RUN, n // lines
        y, rest = rest % Y, rest // Y
        x, batch = rest % X, rest // X
        sx, in_x = _shifted(x, kx - KX // 2, X, CX)
        sy, in_y = _shifted(y, ky - KY // 2, Y, CY)
        points = batch < B
        here, line = (((batch * X + x) * Y + y) * Z + z).to(SIZE), (((batch * X + sx) * Y + sy) * Z).to(SIZE)
        for by in tl.static_range(KZ + RUN - 1):
            sz, in_z = _shifted(z, by - KZ // 2, Z, CZ)
            inside = (points & in_x & in_y & in_z)[:, None] & channels[None, :]
            u = tl.load(i + ((line + sz) * C)[:, None] + c[None, :], mask=inside, other=0.0).to(tl.float32)
            for run in tl.static_range(RUN):
                if by - run >= 0 and by - run < KZ:
                    # The compiler loads the same place once.
                    keep = (points & (z + run < Z))[:, None] & channels[None, :]
                    v0 = tl.load(g0 + ((here + run) * C)[:, None] + c[None, :], mask=keep, other=0.0).to(tl.float32)
                    if by - run == 0:
                        a0 += u * v0
                    if by - run == 1:
                        a1 += u * v0
                    if by - run == 2:
                        a2 += u * v0
                    if by - run == 3:
                        a3 += u * v0
                    if by - run == 4:
                        a4 += u * v0
                    if TWO:
                        v1 = tl.load(g1 + ((here + run) * C)[:, None] + c[None, :], mask=keep, other=0.0).to(tl.float32)
                        if by - run == 0:
                            e0 += u * v1
                        if by - run == 1:
                            e1 += u * v1
                        if by - run == 2:
                            e2 += u * v1
                        if by - run == 3:
                            e3 += u * v1
                        if by - run == 4:
                            e4 += u * v1
                    if by == run:  # every point of the run once
                        t0 += v0
                        if TWO:
                            t1 += v1
    sums += chunk.to(tl.int64) * (1 + TWO) * C * (KX * KY * KZ + 1)
    to = c * (KX * KY * KZ) + row * KZ
    biases = (1 + TWO) * C * KX * KY * KZ + c
    for kz in tl.static_range(KZ):
        first = a0
        second = e0
        if kz == 1:
            first = a1
            second = e1
        if kz == 2:
            first = a2
            second = e2
        if kz == 3:
            first = a3
            second = e3
        if kz == 4:
            first = a4
            second = e4
        tl.store(sums + to + kz, tl.sum(first, axis=0), mask=channels)
        if TWO:
            tl.store(sums + C * KX * KY * KZ + to + kz, tl.sum(second, axis=0), mask=channels)
    if row == 0:
        tl.store(sums + biases, tl.sum(t0, axis=0), mask=channels)
        if TWO:
            tl.store(sums + C + biases, tl.sum(t1, axis=0), mask=channels)


@triton.jit
def _gradients(  # type: ignore[no-untyped-def]
    g, x, w, dx, sums, X, Y, Z, C, tiles_z,
    KX: tl.constexpr, KY: tl.constexpr, KZ: tl.constexpr, CX: tl.constexpr, CY: tl.constexpr, CZ: tl.constexpr,
    RESIDUAL: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """dx, and a row of `sums`: (C, taps), then (C,). A tile of runs walks along SPAN lines of a plane, so that masks
    and places on the last axis stay; offsets inside a plane are 32 bits wide."""
    tile, plane = tl.program_id(0), tl.program_id(2)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    channels = c < C
    z = ((tile % tiles_z) * BN + tl.arange(0, BN)) * RUN
    batch, own = plane // X, plane % X
    here = plane.to(tl.int64) * Y * Z * C
    TAPS: tl.constexpr = KX * KY * KZ
    zero = tl.zeros((BN, BC), tl.float32)
    sum_w = (zero,) * TAPS
    sum_b = zero
    taps = ()
    for t in tl.static_range(TAPS):
        tap = tl.load(w + (TAPS - 1 - t) * C + c, mask=channels, other=0.0).to(tl.float32)
        taps += (tap[None, :],)  # type: ignore[assignment]
    first = tile // tiles_z * SPAN
    for step in range(0, tl.minimum(SPAN, Y - first)):
        y = first + step
        inputs = ()
        outputs = (zero,) * RUN
        for run in tl.static_range(RUN):
            keep = (z + run < Z)[:, None] & channels[None, :]
            place = ((y * Z + z + run) * C)[:, None] + c[None, :]
            inputs += (tl.load(x + here + place, mask=keep, other=0.0).to(tl.float32),)  # type: ignore[assignment]
        for line in tl.static_range(KX * KY):
            sx, in_x = _shifted(own, line // KY - KX // 2, X, CX)
            sy, in_y = _shifted(y, line % KY - KY // 2, Y, CY)
            there = (batch * X + sx).to(tl.int64) * Y * Z * C
            known = tl.where(in_x & in_y, C, 0)  # channels of this line
            for by in tl.static_range(KZ + RUN - 1):
                sz, in_z = _shifted(z, by - KZ // 2, Z, CZ)
                keep = in_z[:, None] & (c < known)[None, :]
                v = tl.load(g + there + ((sy * Z + sz) * C)[:, None] + c[None, :], mask=keep, other=0.0).to(tl.float32)
                for run in tl.static_range(RUN):
                    if by - run >= 0 and by - run < KZ:
                        outputs = added(outputs, run, v * taps[line * KZ + by - run])
                        sum_w = added(sum_w, line * KZ + by - run, v * inputs[run])
                        if line * KZ + by - run == TAPS // 2:
                            sum_b += tl.where((z + run < Z)[:, None], v, 0.0)  # a run may go round
                            if RESIDUAL:
                                outputs = added(outputs, run, v)
        for run in tl.static_range(RUN):
            keep = (z + run < Z)[:, None] & channels[None, :]
            place = ((y * Z + z + run) * C)[:, None] + c[None, :]
            tl.store(dx + here + place, outputs[run].to(dx.dtype.element_ty), mask=keep)
    sums += (plane * tl.num_programs(0) + tile).to(tl.int64) * C * (TAPS + 1)
    for t in tl.static_range(TAPS):
        tl.store(sums + c * TAPS + (TAPS - 1 - t), tl.sum(sum_w[t], axis=0), mask=channels)
    tl.store(sums + C * TAPS + c, tl.sum(sum_b, axis=0), mask=channels)


class Shape:
    """Grid, kernel and padding as three axes."""

    def __init__(self, x: torch.Tensor, weight: torch.Tensor, padding: Sequence[str]) -> None:
        missing = 3 - len(padding)
        self.batch, self.channels = x.shape[0], x.shape[-1]
        self.grid = (1,) * missing + tuple(x.shape[1:-1])
        self.kernel = (1,) * missing + tuple(weight.shape[2:])
        circular = (False,) * missing + tuple(kind == "circular" for kind in padding)
        names = ("KX", "KY", "KZ", "CX", "CY", "CZ")
        self.constants: dict[str, Any] = dict(zip(names, (*self.kernel, *circular), strict=True))

    def tiles(self, points: int) -> tuple[int, int]:
        """How a plane is cut into tiles of at most so many runs of points: (TY, TZ)."""
        TZ = min(TILE_Z, points, triton.next_power_of_2(triton.cdiv(self.grid[2], RUN.value)))
        return min(points // TZ, triton.next_power_of_2(self.grid[1])), TZ

    def run(self, inputs: Sequence[torch.Tensor], weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor],
            outputs: Sequence[torch.Tensor], turned: bool, residual: bool) -> None:  # fmt: skip
        X, Y, Z = self.grid
        block = min(64, triton.next_power_of_2(self.channels))
        runs, warps = PAIR if max(len(inputs), len(outputs)) == 2 else SINGLE
        TY, TZ = self.tiles(runs)
        tiles = (triton.cdiv(Y, TY), triton.cdiv(Z, TZ * RUN.value))
        _convolve[(tiles[0] * tiles[1], triton.cdiv(self.channels, block), self.batch * X)](
            inputs[0], inputs[-1], weights[0], weights[-1], biases[0] if biases else weights[0],
            biases[-1] if biases else weights[0], outputs[0], outputs[-1], X, Y, Z, self.channels, tiles[1],
            **self.constants, TWO_IN=len(inputs) == 2, TWO_OUT=len(outputs) == 2, TURNED=turned, RESIDUAL=residual,
            BIAS=bool(biases), TY=TY, TZ=TZ, BC=block, num_warps=warps,
        )  # fmt: skip

    def backward(
        self, x: torch.Tensor, gradients: Sequence[torch.Tensor], taps: Sequence[torch.Tensor],
        like: Sequence[tuple[torch.Size, torch.dtype]], residual: bool,
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:  # fmt: skip
        """dx; then for each kernel its weights, then for each its bias, in these shapes and types."""
        dx = torch.empty_like(x)
        sizes = [self.channels * math.prod(self.kernel)] * len(taps) + [self.channels] * len(taps)

        def made(sums: torch.Tensor) -> list[torch.Tensor]:
            return [one.view(s).to(t) for one, (s, t) in zip(sum_partials(sums).split(sizes), like, strict=True)]

        if len(taps) == 1 and math.prod(self.kernel) <= TOGETHER:
            sums = self._gradients(x, gradients[0], taps[0], dx, residual)
            return dx, list(on_side_stream(lambda: made(sums), sums))
        found = on_side_stream(lambda: made(self._weight_sums(x, gradients)), x, *gradients)
        self.run(gradients, taps, [], [dx], turned=True, residual=residual)
        return dx, list(found)

    def _gradients(
        self, x: torch.Tensor, gradient: torch.Tensor, taps: torch.Tensor, dx: torch.Tensor, residual: bool
    ) -> torch.Tensor:
        """Fills `dx`. Partial sums: (C, taps), then (C,)."""
        (X, Y, Z), C, (BN, warps, programs) = self.grid, self.channels, WALKS[len(taps) > FEW]
        block, planes = min(64, triton.next_power_of_2(C)), self.batch * X
        tiles, blocks = triton.cdiv(Z, BN * RUN.value), triton.cdiv(C, block)
        span = triton.cdiv(Y, min(Y, triton.cdiv(programs, tiles * blocks * planes)))
        tiles_y = triton.cdiv(Y, span)
        sums = torch.empty(planes * tiles_y * tiles, len(taps) * C + C, device=x.device)
        _gradients[(tiles_y * tiles, blocks, planes)](
            gradient, x, taps, dx, sums, X, Y, Z, C, tiles, **self.constants, RESIDUAL=residual,
            BN=BN, BC=block, SPAN=span, num_warps=warps,
        )  # fmt: skip
        return sums

    def _weight_sums(self, x: torch.Tensor, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """Partial sums: for each kernel (C, taps), then for each (C,)."""
        taps, C, kernels = math.prod(self.kernel), self.channels, len(gradients)
        runs = self.batch * math.prod(self.grid[:2]) * triton.cdiv(self.grid[2], RUN.value)
        block, (BN, warps) = min(64, triton.next_power_of_2(C)), GRADIENTS
        rows = self.kernel[0] * self.kernel[1]
        span = triton.cdiv(min(LONGEST, max(SHORTEST, runs * rows // PROGRAMS)), BN) * BN
        chunks = triton.cdiv(runs, span)
        sums = torch.empty(chunks, kernels * C * (taps + 1), device=x.device)
        _weight_gradient[(rows, chunks, triton.cdiv(C, block))](
            x, gradients[0], gradients[-1], sums, self.batch, *self.grid, C, **self.constants, TWO=kernels == 2,
            SIZE=tl.int64 if x.numel() >= 2**31 else tl.int32, BN=BN, BC=block, SPAN=span, num_warps=warps,
        )  # fmt: skip
        return sums


def taps_of(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """(C, 1, *kernel) -> (taps, C)."""
    channels, taps = len(weight), weight[0].numel()
    return arrange(weight, WeightLayout((taps, channels), (channels, taps), (1, channels), dtype))


class _Depthwise(torch.autograd.Function):
    """x, padding, residual, then weight and bias of each kernel -> one output for each."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, padding: tuple[str, ...], residual: bool, *pairs: torch.Tensor) -> Any:
        weights, biases = pairs[::2], pairs[1::2]
        shape = Shape(x, weights[0], padding)
        outputs = [torch.empty_like(x) for _ in weights]
        taps = [taps_of(weight, x.dtype) for weight in weights]
        shape.run([x], taps, [bias.detach().float() for bias in biases], outputs, turned=False, residual=residual)
        ctx.save_for_backward(x, *taps)
        ctx.shape, ctx.residual, ctx.like = shape, residual, [(one.shape, one.dtype) for one in (*weights, *biases)]
        return tuple(outputs) if len(outputs) > 1 else outputs[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x, *taps = ctx.saved_tensors
        shape: Shape = ctx.shape
        dx, found = shape.backward(x, [one.contiguous() for one in gradients], taps, ctx.like, ctx.residual)
        kernels = len(taps)
        return dx, None, None, *(one for pair in zip(found[:kernels], found[kernels:], strict=True) for one in pair)


def depthwise(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, padding: Sequence[str], residual: bool = False
) -> torch.Tensor:
    """One convolution of `x` (B, *grid, C) by `weight` (C, 1, *kernel); with `residual`, x itself is added."""
    ready = (x if residual else x.to(product_dtype(x, x.dtype))).contiguous()  # what is added to must not be rounded
    return _Depthwise.apply(ready, tuple(padding), residual, weight, bias)


def depthwise_pair(
    x: torch.Tensor,
    first: tuple[torch.Tensor, torch.Tensor],
    second: tuple[torch.Tensor, torch.Tensor],
    padding: Sequence[str],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two convolutions of one input, (weight, bias) each, which is read once."""
    return _Depthwise.apply(x.to(product_dtype(x, x.dtype)).contiguous(), tuple(padding), False, *first, *second)
