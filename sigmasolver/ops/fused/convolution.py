"""Depthwise convolutions on channels-last grids, one or two kernels over one input, with all gradients.

    y_i[n, c] = b_i[c] + sum_t w_i[t, c] x[n + t, c]  (+ x[n, c])        t over the kernel, i = 1 or 1, 2

    dx = sum_i sum_t w_i[t] dy_i[n - t] (+ dy)      dw_i[t] = sum_n x[n + t] dy_i[n]      db_i = sum_n dy_i[n]

The gradient of the input is the same operation with the kernel reversed. Weight gradients are summed over chunks of
points first, then over chunks in a fixed order. A single small kernel has all its gradients from one pass: what is
loaded for dx[n] = sum_t w[t] dy[n - t] makes dw[t] = sum_n x[n] dy[n - t] too. One and two axes are three axes of which
some have one point. Every lane holds a run of RUN neighbours on the last axis, so that a number once loaded serves
several of them.

Letters: B batch, X Y Z points per axis, C channels; KX KY KZ points of the kernel. A tile is LINES x RUNS runs of one
plane (y, z) and CHANNELS channels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from sigmasolver.ops.fused import product_dtype, tuning
from sigmasolver.ops.fused.reductions import added, sum_partials
from sigmasolver.ops.fused.weight_cache import WeightLayout, arrange
from sigmasolver.ops.modules import Affine
from sigmasolver.ops.side_streams import on_side_stream

__all__ = ["RUN", "Shape", "depthwise", "depthwise_pair", "taps_of", "window"]

RUN = tl.constexpr(4)
"""Points in a row along the last axis that a program holds for every lane."""


@triton.jit
def _shifted(n: tl.tensor, by: tl.tensor, size: tl.tensor, CIRCULAR: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Index n + by and whether it is inside; what lies more than one period away belongs to no point."""
    moved = n + by
    if CIRCULAR:
        moved = tl.where(moved < 0, moved + size, tl.where(moved >= size, moved - size, moved))
    return moved, (moved >= 0) & (moved < size)


@triton.jit
def window(
    x0: tl.tensor, x1: tl.tensor, taps0: tl.tensor, taps1: tl.tensor,
    batch: tl.tensor, x: tl.tensor, y: tl.tensor, z: tl.tensor, c: tl.tensor, points: tl.tensor,
    channels: tl.tensor, X: tl.tensor, Y: tl.tensor, Z: tl.tensor, C: tl.tensor,
    KX: tl.constexpr, KY: tl.constexpr, KZ: tl.constexpr,
    CIRCULAR_X: tl.constexpr, CIRCULAR_Y: tl.constexpr, CIRCULAR_Z: tl.constexpr,
    TWO_IN: tl.constexpr, TWO_OUT: tl.constexpr, REVERSED: tl.constexpr, TILE: tl.constexpr, CHANNELS: tl.constexpr,
) -> tuple[tl.tuple, tl.tuple]:  # fmt: skip
    """Two tuples of RUN sums (TILE, CHANNELS) over the kernel, one for each point of the runs from (x, y, z) on:

        taps0 x0 (+ taps1 x1 where TWO_IN)      taps1 x0 where TWO_OUT      x0, x1 (B, X, Y, Z, C), taps (KX KY KZ, C)

    All runs are of one plane x; what is loaded once serves every point of the run that it touches. Offsets inside a
    plane are 32 bits wide."""
    first = (tl.zeros((TILE, CHANNELS), tl.float32),) * RUN
    second = (tl.zeros((TILE, CHANNELS), tl.float32),) * RUN
    for line in range(KX * KY):  # not unrolled, which would only take the compiler longer
        sx, in_x = _shifted(x, line // KY - KX // 2, X, CIRCULAR_X)
        sy, in_y = _shifted(y, line % KY - KY // 2, Y, CIRCULAR_Y)
        if in_x:
            plane = (batch * X + sx).to(tl.int64) * Y * Z * C
            for by in tl.static_range(KZ + RUN - 1):
                sz, in_z = _shifted(z, by - KZ // 2, Z, CIRCULAR_Z)
                keep = (points & in_y & in_z)[:, None] & channels[None, :]
                offsets = ((sy * Z + sz) * C)[:, None] + c[None, :]
                v = tl.load(x0 + plane + offsets, mask=keep, other=0.0).to(tl.float32)
                if TWO_IN:
                    u = tl.load(x1 + plane + offsets, mask=keep, other=0.0).to(tl.float32)
                for run in tl.static_range(RUN):
                    if by - run >= 0 and by - run < KZ:
                        tap = line * KZ + by - run
                        if REVERSED:
                            tap = KX * KY * KZ - 1 - tap
                        k0 = tl.load(taps0 + tap * C + c, mask=channels, other=0.0).to(tl.float32)[None, :]
                        if TWO_IN or TWO_OUT:
                            k1 = tl.load(taps1 + tap * C + c, mask=channels, other=0.0).to(tl.float32)[None, :]
                        first = added(first, run, v * k0)
                        if TWO_IN:
                            first = added(first, run, u * k1)
                        if TWO_OUT:
                            second = added(second, run, v * k1)
    return first, second


@triton.jit
def _convolve(
    x0: tl.tensor, x1: tl.tensor, taps0: tl.tensor, taps1: tl.tensor,
    bias0: tl.tensor, bias1: tl.tensor, y0: tl.tensor, y1: tl.tensor,
    X: tl.tensor, Y: tl.tensor, Z: tl.tensor, C: tl.tensor, tiles_z: tl.tensor,
    KX: tl.constexpr, KY: tl.constexpr, KZ: tl.constexpr,
    CIRCULAR_X: tl.constexpr, CIRCULAR_Y: tl.constexpr, CIRCULAR_Z: tl.constexpr,
    TWO_IN: tl.constexpr, TWO_OUT: tl.constexpr, REVERSED: tl.constexpr, RESIDUAL: tl.constexpr, BIAS: tl.constexpr,
    LINES: tl.constexpr, RUNS: tl.constexpr, CHANNELS: tl.constexpr,
) -> None:  # fmt: skip
    """y_i (B, X, Y, Z, C) of a tile: the sums of `window`, with bias_i (C,) where BIAS and x0 added where RESIDUAL."""
    tile, plane = tl.program_id(0), tl.program_id(2)
    p = tl.arange(0, LINES * RUNS)
    y, z = (tile // tiles_z) * LINES + p // RUNS, ((tile % tiles_z) * RUNS + p % RUNS) * RUN
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    points, channels = (y < Y) & (z < Z), c < C
    first, second = window(
        x0, x1, taps0, taps1, plane // X, plane % X, y, z, c, points, channels, X, Y, Z, C, KX, KY, KZ,
        CIRCULAR_X, CIRCULAR_Y, CIRCULAR_Z, TWO_IN, TWO_OUT, REVERSED, LINES * RUNS, CHANNELS,
    )  # fmt: skip
    for run in tl.static_range(RUN):
        out = first[run]
        keep = (points & (z + run < Z))[:, None] & channels[None, :]
        offsets = plane.to(tl.int64) * Y * Z * C + ((y * Z + z + run) * C)[:, None] + c[None, :]
        if BIAS:
            out += tl.load(bias0 + c, mask=channels, other=0.0)[None, :]
        if RESIDUAL:
            out += tl.load(x0 + offsets, mask=keep, other=0.0).to(tl.float32)
        tl.store(y0 + offsets, out.to(y0.dtype.element_ty), mask=keep)
        if TWO_OUT:
            other = second[run]
            if BIAS:
                other += tl.load(bias1 + c, mask=channels, other=0.0)[None, :]
            tl.store(y1 + offsets, other.to(y1.dtype.element_ty), mask=keep)


@triton.jit
def _weight_gradient(
    x: tl.tensor, dy0: tl.tensor, dy1: tl.tensor, sums: tl.tensor,
    B: tl.tensor, X: tl.constexpr, Y: tl.constexpr, Z: tl.constexpr, C: tl.constexpr,
    KX: tl.constexpr, KY: tl.constexpr, KZ: tl.constexpr,
    CIRCULAR_X: tl.constexpr, CIRCULAR_Y: tl.constexpr, CIRCULAR_Z: tl.constexpr,
    TWO: tl.constexpr, OFFSET: tl.constexpr, RUNS: tl.constexpr, CHANNELS: tl.constexpr, CHUNK: tl.constexpr,
) -> None:  # fmt: skip
    """dw_i[t] = sum_n x[n + t] dy_i[n] for one row of KZ taps, and db_i, over one chunk of CHUNK runs.

    A row of `sums`: for each kernel (C, taps), then for each (C,). OFFSET is the type of offsets into x.
    """
    row, chunk = tl.program_id(0), tl.program_id(1)
    c = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
    channels = c < C
    kx, ky = row // KY, row % KY
    zero = tl.zeros((RUNS, CHANNELS), tl.float32)
    taps0 = (zero,) * KZ
    taps1 = (zero,) * KZ
    bias0 = zero
    bias1 = zero
    runs = tl.cdiv(Z, RUN)
    for start in range(0, CHUNK, RUNS):
        n = chunk * CHUNK + start + tl.arange(0, RUNS)
        z, others = n % runs * RUN, n // runs
        y, others = others % Y, others // Y
        own_x, batch = others % X, others // X
        sx, in_x = _shifted(own_x, kx - KX // 2, X, CIRCULAR_X)
        sy, in_y = _shifted(y, ky - KY // 2, Y, CIRCULAR_Y)
        points = batch < B
        here, line = (((batch * X + own_x) * Y + y) * Z + z).to(OFFSET), (((batch * X + sx) * Y + sy) * Z).to(OFFSET)
        for by in tl.static_range(KZ + RUN - 1):
            sz, in_z = _shifted(z, by - KZ // 2, Z, CIRCULAR_Z)
            inside = (points & in_x & in_y & in_z)[:, None] & channels[None, :]
            u = tl.load(x + ((line + sz) * C)[:, None] + c[None, :], mask=inside, other=0.0).to(tl.float32)
            for run in tl.static_range(RUN):
                if by - run >= 0 and by - run < KZ:
                    # The compiler loads the same address once.
                    keep = (points & (z + run < Z))[:, None] & channels[None, :]
                    offsets = ((here + run) * C)[:, None]
                    v0 = tl.load(dy0 + offsets + c[None, :], mask=keep, other=0.0).to(tl.float32)
                    taps0 = added(taps0, by - run, u * v0)
                    if TWO:
                        v1 = tl.load(dy1 + offsets + c[None, :], mask=keep, other=0.0).to(tl.float32)
                        taps1 = added(taps1, by - run, u * v1)
                    if by == run:  # every point of the run once
                        bias0 += v0
                        if TWO:
                            bias1 += v1
    sums += chunk.to(tl.int64) * (1 + TWO) * C * (KX * KY * KZ + 1)
    to = c * (KX * KY * KZ) + row * KZ
    biases = (1 + TWO) * C * KX * KY * KZ + c
    for kz in tl.static_range(KZ):
        tl.store(sums + to + kz, tl.sum(taps0[kz], axis=0), mask=channels)
        if TWO:
            tl.store(sums + C * KX * KY * KZ + to + kz, tl.sum(taps1[kz], axis=0), mask=channels)
    if row == 0:
        tl.store(sums + biases, tl.sum(bias0, axis=0), mask=channels)
        if TWO:
            tl.store(sums + C + biases, tl.sum(bias1, axis=0), mask=channels)


@triton.jit
def _gradients(
    dy: tl.tensor, x: tl.tensor, taps: tl.tensor, dx: tl.tensor, sums: tl.tensor,
    X: tl.tensor, Y: tl.tensor, Z: tl.tensor, C: tl.tensor, tiles_z: tl.tensor,
    KX: tl.constexpr, KY: tl.constexpr, KZ: tl.constexpr,
    CIRCULAR_X: tl.constexpr, CIRCULAR_Y: tl.constexpr, CIRCULAR_Z: tl.constexpr,
    RESIDUAL: tl.constexpr, RUNS: tl.constexpr, CHANNELS: tl.constexpr, CHUNK: tl.constexpr,
) -> None:  # fmt: skip
    """dx[n] = sum_t w[t] dy[n - t] (+ dy[n]), and from the same loads a row of `sums`: dw (C, taps), then db (C,).

    A tile of runs walks along CHUNK lines of a plane, so that masks and offsets on the last axis stay; offsets inside a
    plane are 32 bits wide."""
    tile, plane = tl.program_id(0), tl.program_id(2)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    channels = c < C
    z = ((tile % tiles_z) * RUNS + tl.arange(0, RUNS)) * RUN
    batch, own = plane // X, plane % X
    here = plane.to(tl.int64) * Y * Z * C
    TAPS: tl.constexpr = KX * KY * KZ
    zero = tl.zeros((RUNS, CHANNELS), tl.float32)
    sum_w = (zero,) * TAPS
    sum_b = zero
    reversed_taps: tl.tuple = ()
    for t in tl.static_range(TAPS):
        tap = tl.load(taps + (TAPS - 1 - t) * C + c, mask=channels, other=0.0).to(tl.float32)
        reversed_taps += (tap[None, :],)
    first = tile // tiles_z * CHUNK
    for step in range(0, tl.minimum(CHUNK, Y - first)):
        y = first + step
        inputs: tl.tuple = ()
        outputs = (zero,) * RUN
        for run in tl.static_range(RUN):
            keep = (z + run < Z)[:, None] & channels[None, :]
            offsets = ((y * Z + z + run) * C)[:, None] + c[None, :]
            inputs += (tl.load(x + here + offsets, mask=keep, other=0.0).to(tl.float32),)
        for line in tl.static_range(KX * KY):
            sx, in_x = _shifted(own, line // KY - KX // 2, X, CIRCULAR_X)
            sy, in_y = _shifted(y, line % KY - KY // 2, Y, CIRCULAR_Y)
            there = (batch * X + sx).to(tl.int64) * Y * Z * C
            known = tl.where(in_x & in_y, C, 0)  # channels of this line
            for by in tl.static_range(KZ + RUN - 1):
                sz, in_z = _shifted(z, by - KZ // 2, Z, CIRCULAR_Z)
                keep = in_z[:, None] & (c < known)[None, :]
                v = tl.load(dy + there + ((sy * Z + sz) * C)[:, None] + c[None, :], mask=keep, other=0.0).to(tl.float32)
                for run in tl.static_range(RUN):
                    if by - run >= 0 and by - run < KZ:
                        outputs = added(outputs, run, v * reversed_taps[line * KZ + by - run])
                        sum_w = added(sum_w, line * KZ + by - run, v * inputs[run])
                        if line * KZ + by - run == TAPS // 2:
                            sum_b += tl.where((z + run < Z)[:, None], v, 0.0)  # a run may wrap around
                            if RESIDUAL:
                                outputs = added(outputs, run, v)
        for run in tl.static_range(RUN):
            keep = (z + run < Z)[:, None] & channels[None, :]
            offsets = ((y * Z + z + run) * C)[:, None] + c[None, :]
            tl.store(dx + here + offsets, outputs[run].to(dx.dtype.element_ty), mask=keep)
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
        names = ("KX", "KY", "KZ", "CIRCULAR_X", "CIRCULAR_Y", "CIRCULAR_Z")
        self.constants: dict[str, Any] = dict(zip(names, (*self.kernel, *circular), strict=True))
        self.block = min(tuning.CONVOLUTION_CHANNELS, triton.next_power_of_2(self.channels))

    def tiles(self, runs: int) -> tuple[int, int]:
        """How a plane is cut into tiles of at most so many runs: (LINES, RUNS)."""
        along = min(tuning.RUNS_ALONG, runs, triton.next_power_of_2(triton.cdiv(self.grid[2], RUN.value)))
        return min(runs // along, triton.next_power_of_2(self.grid[1])), along

    def convolve(
        self, inputs: Sequence[torch.Tensor], taps: Sequence[torch.Tensor], biases: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor], reverse: bool, residual: bool,
    ) -> None:  # fmt: skip
        """Fills the outputs: one for each kernel, or one of all inputs, each with a kernel of its own."""
        X, Y, Z = self.grid
        runs = tuning.PAIR_RUNS if max(len(inputs), len(outputs)) == 2 else tuning.SINGLE_RUNS
        LINES, RUNS = self.tiles(runs)
        tiles = (triton.cdiv(Y, LINES), triton.cdiv(Z, RUNS * RUN.value))
        _convolve[(tiles[0] * tiles[1], triton.cdiv(self.channels, self.block), self.batch * X)](
            inputs[0], inputs[-1], taps[0], taps[-1], biases[0] if biases else taps[0],
            biases[-1] if biases else taps[0], outputs[0], outputs[-1], X, Y, Z, self.channels, tiles[1],
            **self.constants, TWO_IN=len(inputs) == 2, TWO_OUT=len(outputs) == 2, REVERSED=reverse, RESIDUAL=residual,
            BIAS=bool(biases), LINES=LINES, RUNS=RUNS, CHANNELS=self.block, num_warps=tuning.CONVOLUTION_WARPS,
        )  # fmt: skip

    def backward(
        self, x: torch.Tensor, gradients: Sequence[torch.Tensor], taps: Sequence[torch.Tensor],
        like: Sequence[tuple[torch.Size, torch.dtype]], residual: bool,
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:  # fmt: skip
        """dx; then for each kernel its weights, then for each its bias, in these shapes and types."""
        dx = torch.empty_like(x)
        sizes = [self.channels * math.prod(self.kernel)] * len(taps) + [self.channels] * len(taps)

        def parameters(sums: torch.Tensor) -> list[torch.Tensor]:
            totals = sum_partials(sums).split(sizes)
            return [one.view(shape).to(dtype) for one, (shape, dtype) in zip(totals, like, strict=True)]

        if len(taps) == 1 and math.prod(self.kernel) <= tuning.MOST_TAPS_IN_ONE_PASS:
            sums = self._gradients(x, gradients[0], taps[0], dx, residual)
            return dx, list(on_side_stream(lambda: parameters(sums), sums))
        found = on_side_stream(lambda: parameters(self._weight_sums(x, gradients)), x, *gradients)
        self.convolve(gradients, taps, [], [dx], reverse=True, residual=residual)
        return dx, list(found)

    def _gradients(
        self, x: torch.Tensor, gradient: torch.Tensor, taps: torch.Tensor, dx: torch.Tensor, residual: bool
    ) -> torch.Tensor:
        """Fills `dx`. Partial sums: (C, taps), then (C,)."""
        (X, Y, Z), C, RUNS = self.grid, self.channels, tuning.WALK_RUNS
        planes, tiles, blocks = self.batch * X, triton.cdiv(Z, RUNS * RUN.value), triton.cdiv(C, self.block)
        chunk = triton.cdiv(Y, min(Y, triton.cdiv(tuning.WALK_PROGRAMS, tiles * blocks * planes)))
        tiles_y = triton.cdiv(Y, chunk)
        sums = torch.empty(planes * tiles_y * tiles, len(taps) * C + C, device=x.device)
        _gradients[(tiles_y * tiles, blocks, planes)](
            gradient, x, taps, dx, sums, X, Y, Z, C, tiles, **self.constants, RESIDUAL=residual,
            RUNS=RUNS, CHANNELS=self.block, CHUNK=chunk, num_warps=tuning.WALK_WARPS[len(taps) <= tuning.FEW_TAPS],
        )  # fmt: skip
        return sums

    def _weight_sums(self, x: torch.Tensor, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """Partial sums: for each kernel (C, taps), then for each (C,)."""
        taps, C, kernels = math.prod(self.kernel), self.channels, len(gradients)
        runs = self.batch * math.prod(self.grid[:2]) * triton.cdiv(self.grid[2], RUN.value)
        rows, RUNS = self.kernel[0] * self.kernel[1], tuning.WEIGHT_GRADIENT_RUNS
        share = max(tuning.SHORTEST_CHUNK, runs * rows // tuning.WEIGHT_GRADIENT_PROGRAMS)
        chunk = triton.cdiv(min(tuning.LONGEST_CHUNK, share), RUNS) * RUNS
        chunks = triton.cdiv(runs, chunk)
        sums = torch.empty(chunks, kernels * C * (taps + 1), device=x.device)
        _weight_gradient[(rows, chunks, triton.cdiv(C, self.block))](
            x, gradients[0], gradients[-1], sums, self.batch, *self.grid, C, **self.constants, TWO=kernels == 2,
            OFFSET=tl.int64 if x.numel() >= 2**31 else tl.int32, RUNS=RUNS, CHANNELS=self.block, CHUNK=chunk,
            num_warps=tuning.WEIGHT_GRADIENT_WARPS,
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
        shape.convolve([x], taps, [bias.detach().float() for bias in biases], outputs, reverse=False, residual=residual)
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
    x = x if residual else x.to(product_dtype(x, x.dtype))  # what is added to must not be rounded
    return _Depthwise.apply(x.contiguous(), tuple(padding), residual, weight, bias)


def depthwise_pair(
    x: torch.Tensor, first: Affine, second: Affine, padding: Sequence[str]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two convolutions of one input, (weight, bias) each, which is read once; in autocast's type."""
    return _Depthwise.apply(x.to(product_dtype(x, x.dtype)).contiguous(), tuple(padding), False, *first, *second)
