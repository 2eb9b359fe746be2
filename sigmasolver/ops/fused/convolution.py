"""Depthwise convolutions on channels-last grids with all gradients, for one or two kernels on the same input.

    y_i[n, c] = b_i[c] + sum_t w_i[t, c] x[n + t, c]  (+ x[n, c])        t over the kernel, i = 1 or 1, 2

    dx = sum_i sum_t w_i[t] dy_i[n - t] (+ dy)      dw_i[t] = sum_n x[n + t] dy_i[n]      db_i = sum_n dy_i[n]

The gradient of the input is the same operation with the reversed kernel. Weight gradients are summed over chunks of
points first, then over the chunks in a fixed order. For a single small kernel one pass computes all gradients: the
loads of dx[n] = sum_t w[t] dy[n - t] are also those of dw[t] = sum_n x[n] dy[n - t]. Grids with one or two axes are
treated as three axes, some with a single point. Every lane holds a run of RUN neighbours on the last axis, which share
their loads.

Letters: B batch, X Y Z points per axis, C channels. A tile is TILE_LINES x TILE_RUNS runs of one plane (y, z) times
TILE_CHANNELS channels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from sigmasolver.ops.fused import cast_for_products, tuning
from sigmasolver.ops.fused.jit import jit
from sigmasolver.ops.fused.reductions import add_at, sum_partials
from sigmasolver.ops.fused.weight_cache import WeightLayout, arrange
from sigmasolver.ops.modules import Affine
from sigmasolver.ops.side_streams import on_side_stream

__all__ = ["RUN", "Shape", "depthwise", "depthwise_pair", "run_start", "to_taps", "window_sums"]

RUN = tl.constexpr(4)
"""Consecutive points on the last axis that each lane holds."""


@jit
def _shift_index(n: tl.tensor, by: tl.tensor, size: tl.tensor, CIRCULAR: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Index n + by and whether it is inside the grid; more than one period away counts as outside."""
    shifted = n + by
    if CIRCULAR:
        shifted = tl.where(shifted < 0, shifted + size, tl.where(shifted >= size, shifted - size, shifted))
    return shifted, (shifted >= 0) & (shifted < size)


@jit
def run_start(
    p: tl.tensor, tile: tl.tensor, tiles_z: tl.tensor, TILE_LINES: tl.constexpr, TILE_RUNS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Coordinates y and z of the first point of run p in a tile of a plane."""
    return (tile // tiles_z) * TILE_LINES + p // TILE_RUNS, ((tile % tiles_z) * TILE_RUNS + p % TILE_RUNS) * RUN


@jit
def window_sums(
    x0: tl.tensor, x1: tl.tensor, taps0: tl.tensor, taps1: tl.tensor,
    batch: tl.tensor, x: tl.tensor, y: tl.tensor, z: tl.tensor, c: tl.tensor,
    keep_points: tl.tensor, keep_channels: tl.tensor,
    points_x: tl.tensor, points_y: tl.tensor, points_z: tl.tensor, channels: tl.tensor,
    KERNEL_X: tl.constexpr, KERNEL_Y: tl.constexpr, KERNEL_Z: tl.constexpr,
    CIRCULAR_X: tl.constexpr, CIRCULAR_Y: tl.constexpr, CIRCULAR_Z: tl.constexpr,
    TWO_IN: tl.constexpr, TWO_OUT: tl.constexpr, REVERSED: tl.constexpr,
    TILE_LANES: tl.constexpr, TILE_CHANNELS: tl.constexpr,
) -> tuple[tl.tuple, tl.tuple]:  # fmt: skip
    """Two tuples of RUN sums (TILE_LANES, TILE_CHANNELS) over the kernel, one for each point of the runs that start at
    (x, y, z):

        taps0 x0 (+ taps1 x1 if TWO_IN)      taps1 x0 if TWO_OUT      x0, x1 (B, X, Y, Z, C), taps (taps, C)

    All runs are in one plane x; each value is loaded once for all points of a run that need it. Offsets inside a plane
    are 32 bits wide."""
    first = (tl.zeros((TILE_LANES, TILE_CHANNELS), tl.float32),) * RUN
    second = (tl.zeros((TILE_LANES, TILE_CHANNELS), tl.float32),) * RUN
    for line in range(KERNEL_X * KERNEL_Y):  # not unrolled: that would only increase compile time
        sx, in_x = _shift_index(x, line // KERNEL_Y - KERNEL_X // 2, points_x, CIRCULAR_X)
        sy, in_y = _shift_index(y, line % KERNEL_Y - KERNEL_Y // 2, points_y, CIRCULAR_Y)
        if in_x:
            plane = (batch * points_x + sx).to(tl.int64) * points_y * points_z * channels
            for by in tl.static_range(KERNEL_Z + RUN - 1):
                sz, in_z = _shift_index(z, by - KERNEL_Z // 2, points_z, CIRCULAR_Z)
                keep = (keep_points & in_y & in_z)[:, None] & keep_channels[None, :]
                offsets = ((sy * points_z + sz) * channels)[:, None] + c[None, :]
                v = tl.load(x0 + plane + offsets, mask=keep, other=0.0).to(tl.float32)
                if TWO_IN:
                    u = tl.load(x1 + plane + offsets, mask=keep, other=0.0).to(tl.float32)
                for run in tl.static_range(RUN):
                    if by - run >= 0 and by - run < KERNEL_Z:
                        tap = line * KERNEL_Z + by - run
                        if REVERSED:
                            tap = KERNEL_X * KERNEL_Y * KERNEL_Z - 1 - tap
                        row = tap * channels
                        k0 = tl.load(taps0 + row + c, mask=keep_channels, other=0.0).to(tl.float32)[None, :]
                        if TWO_IN or TWO_OUT:
                            k1 = tl.load(taps1 + row + c, mask=keep_channels, other=0.0).to(tl.float32)[None, :]
                        first = add_at(first, run, v * k0)
                        if TWO_IN:
                            first = add_at(first, run, u * k1)
                        if TWO_OUT:
                            second = add_at(second, run, v * k1)
    return first, second


@jit
def _convolve(
    x0: tl.tensor, x1: tl.tensor, taps0: tl.tensor, taps1: tl.tensor,
    bias0: tl.tensor, bias1: tl.tensor, y0: tl.tensor, y1: tl.tensor,
    points_x: tl.tensor, points_y: tl.tensor, points_z: tl.tensor, channels: tl.tensor, tiles_z: tl.tensor,
    KERNEL_X: tl.constexpr, KERNEL_Y: tl.constexpr, KERNEL_Z: tl.constexpr,
    CIRCULAR_X: tl.constexpr, CIRCULAR_Y: tl.constexpr, CIRCULAR_Z: tl.constexpr,
    TWO_IN: tl.constexpr, TWO_OUT: tl.constexpr, REVERSED: tl.constexpr, RESIDUAL: tl.constexpr, BIAS: tl.constexpr,
    TILE_LINES: tl.constexpr, TILE_RUNS: tl.constexpr, TILE_CHANNELS: tl.constexpr,
) -> None:  # fmt: skip
    """y_i (B, X, Y, Z, C) of a tile: the window sums, plus bias_i (C,) if BIAS and plus x0 if RESIDUAL."""
    tile, plane = tl.program_id(0), tl.program_id(2)
    p = tl.arange(0, TILE_LINES * TILE_RUNS)
    y, z = run_start(p, tile, tiles_z, TILE_LINES, TILE_RUNS)
    c = tl.program_id(1) * TILE_CHANNELS + tl.arange(0, TILE_CHANNELS)
    keep_points, keep_channels = (y < points_y) & (z < points_z), c < channels
    first, second = window_sums(
        x0, x1, taps0, taps1, plane // points_x, plane % points_x, y, z, c, keep_points, keep_channels,
        points_x, points_y, points_z, channels, KERNEL_X, KERNEL_Y, KERNEL_Z, CIRCULAR_X, CIRCULAR_Y, CIRCULAR_Z,
        TWO_IN, TWO_OUT, REVERSED, TILE_LINES * TILE_RUNS, TILE_CHANNELS,
    )  # fmt: skip
    for run in tl.static_range(RUN):
        out = first[run]
        keep = (keep_points & (z + run < points_z))[:, None] & keep_channels[None, :]
        plane_start = plane.to(tl.int64) * points_y * points_z * channels
        offsets = plane_start + ((y * points_z + z + run) * channels)[:, None] + c[None, :]
        if BIAS:
            out += tl.load(bias0 + c, mask=keep_channels, other=0.0)[None, :]
        if RESIDUAL:
            out += tl.load(x0 + offsets, mask=keep, other=0.0).to(tl.float32)
        tl.store(y0 + offsets, out.to(y0.dtype.element_ty), mask=keep)
        if TWO_OUT:
            out1 = second[run]
            if BIAS:
                out1 += tl.load(bias1 + c, mask=keep_channels, other=0.0)[None, :]
            tl.store(y1 + offsets, out1.to(y1.dtype.element_ty), mask=keep)


@jit
def _weight_gradient(
    x: tl.tensor, dy0: tl.tensor, dy1: tl.tensor, sums: tl.tensor,
    batch_size: tl.tensor,
    POINTS_X: tl.constexpr, POINTS_Y: tl.constexpr, POINTS_Z: tl.constexpr, CHANNELS: tl.constexpr,
    KERNEL_X: tl.constexpr, KERNEL_Y: tl.constexpr, KERNEL_Z: tl.constexpr,
    CIRCULAR_X: tl.constexpr, CIRCULAR_Y: tl.constexpr, CIRCULAR_Z: tl.constexpr,
    TWO: tl.constexpr, OFFSET: tl.constexpr, TILE_RUNS: tl.constexpr, TILE_CHANNELS: tl.constexpr, CHUNK: tl.constexpr,
) -> None:  # fmt: skip
    """dw_i[t] = sum_n x[n + t] dy_i[n] for one row of KERNEL_Z taps, and db_i, over one chunk of CHUNK runs.

    A row of `sums`: (C, taps) for each kernel, then (C,) for each. OFFSET is the dtype of offsets into x.
    """
    row, chunk = tl.program_id(0), tl.program_id(1)
    c = tl.program_id(2) * TILE_CHANNELS + tl.arange(0, TILE_CHANNELS)
    keep_channels = c < CHANNELS
    kx, ky = row // KERNEL_Y, row % KERNEL_Y
    zero = tl.zeros((TILE_RUNS, TILE_CHANNELS), tl.float32)
    taps0 = (zero,) * KERNEL_Z
    taps1 = (zero,) * KERNEL_Z
    bias0 = zero
    bias1 = zero
    runs = tl.cdiv(POINTS_Z, RUN)
    for start in range(0, CHUNK, TILE_RUNS):
        n = chunk * CHUNK + start + tl.arange(0, TILE_RUNS)
        z, remainder = n % runs * RUN, n // runs
        y, remainder = remainder % POINTS_Y, remainder // POINTS_Y
        x_index, batch = remainder % POINTS_X, remainder // POINTS_X
        sx, in_x = _shift_index(x_index, kx - KERNEL_X // 2, POINTS_X, CIRCULAR_X)
        sy, in_y = _shift_index(y, ky - KERNEL_Y // 2, POINTS_Y, CIRCULAR_Y)
        keep_points = batch < batch_size
        point = (((batch * POINTS_X + x_index) * POINTS_Y + y) * POINTS_Z + z).to(OFFSET)
        line = (((batch * POINTS_X + sx) * POINTS_Y + sy) * POINTS_Z).to(OFFSET)
        for by in tl.static_range(KERNEL_Z + RUN - 1):
            sz, in_z = _shift_index(z, by - KERNEL_Z // 2, POINTS_Z, CIRCULAR_Z)
            inside = (keep_points & in_x & in_y & in_z)[:, None] & keep_channels[None, :]
            u = tl.load(x + ((line + sz) * CHANNELS)[:, None] + c[None, :], mask=inside, other=0.0).to(tl.float32)
            for run in tl.static_range(RUN):
                if by - run >= 0 and by - run < KERNEL_Z:
                    # The compiler merges loads of the same address.
                    keep = (keep_points & (z + run < POINTS_Z))[:, None] & keep_channels[None, :]
                    offsets = ((point + run) * CHANNELS)[:, None]
                    v0 = tl.load(dy0 + offsets + c[None, :], mask=keep, other=0.0).to(tl.float32)
                    taps0 = add_at(taps0, by - run, u * v0)
                    if TWO:
                        v1 = tl.load(dy1 + offsets + c[None, :], mask=keep, other=0.0).to(tl.float32)
                        taps1 = add_at(taps1, by - run, u * v1)
                    if by == run:  # once for each point of the run
                        bias0 += v0
                        if TWO:
                            bias1 += v1
    TAPS: tl.constexpr = KERNEL_X * KERNEL_Y * KERNEL_Z
    sums += chunk.to(tl.int64) * (1 + TWO) * CHANNELS * (TAPS + 1)
    tap_offsets = c * TAPS + row * KERNEL_Z
    bias_offsets = (1 + TWO) * CHANNELS * TAPS + c
    for kz in tl.static_range(KERNEL_Z):
        tl.store(sums + tap_offsets + kz, tl.sum(taps0[kz], axis=0), mask=keep_channels)
        if TWO:
            tl.store(sums + CHANNELS * TAPS + tap_offsets + kz, tl.sum(taps1[kz], axis=0), mask=keep_channels)
    if row == 0:
        tl.store(sums + bias_offsets, tl.sum(bias0, axis=0), mask=keep_channels)
        if TWO:
            tl.store(sums + CHANNELS + bias_offsets, tl.sum(bias1, axis=0), mask=keep_channels)


@jit
def _gradients(
    dy: tl.tensor, x: tl.tensor, taps: tl.tensor, dx: tl.tensor, sums: tl.tensor,
    points_x: tl.tensor, points_y: tl.tensor, points_z: tl.tensor, channels: tl.tensor, tiles_z: tl.tensor,
    KERNEL_X: tl.constexpr, KERNEL_Y: tl.constexpr, KERNEL_Z: tl.constexpr,
    CIRCULAR_X: tl.constexpr, CIRCULAR_Y: tl.constexpr, CIRCULAR_Z: tl.constexpr,
    RESIDUAL: tl.constexpr, TILE_RUNS: tl.constexpr, TILE_CHANNELS: tl.constexpr, CHUNK: tl.constexpr,
) -> None:  # fmt: skip
    """dx[n] = sum_t w[t] dy[n - t] (+ dy[n]), and from the same loads a row of `sums`: dw (C, taps), then db (C,).

    A program loops over CHUNK lines of a plane, so that masks and offsets on the last axis are loop-invariant; offsets
    inside a plane are 32 bits wide."""
    tile, plane = tl.program_id(0), tl.program_id(2)
    c = tl.program_id(1) * TILE_CHANNELS + tl.arange(0, TILE_CHANNELS)
    keep_channels = c < channels
    z = ((tile % tiles_z) * TILE_RUNS + tl.arange(0, TILE_RUNS)) * RUN
    batch, plane_x = plane // points_x, plane % points_x
    plane_start = plane.to(tl.int64) * points_y * points_z * channels
    TAPS: tl.constexpr = KERNEL_X * KERNEL_Y * KERNEL_Z
    zero = tl.zeros((TILE_RUNS, TILE_CHANNELS), tl.float32)
    sum_w = (zero,) * TAPS
    sum_b = zero
    reversed_taps: tl.tuple = ()
    for t in tl.static_range(TAPS):
        tap = tl.load(taps + (TAPS - 1 - t) * channels + c, mask=keep_channels, other=0.0).to(tl.float32)
        reversed_taps += (tap[None, :],)
    first = tile // tiles_z * CHUNK
    for step in range(0, tl.minimum(CHUNK, points_y - first)):
        y = first + step
        inputs: tl.tuple = ()
        outputs = (zero,) * RUN
        for run in tl.static_range(RUN):
            keep = (z + run < points_z)[:, None] & keep_channels[None, :]
            offsets = ((y * points_z + z + run) * channels)[:, None] + c[None, :]
            inputs += (tl.load(x + plane_start + offsets, mask=keep, other=0.0).to(tl.float32),)
        for line in tl.static_range(KERNEL_X * KERNEL_Y):
            sx, in_x = _shift_index(plane_x, line // KERNEL_Y - KERNEL_X // 2, points_x, CIRCULAR_X)
            sy, in_y = _shift_index(y, line % KERNEL_Y - KERNEL_Y // 2, points_y, CIRCULAR_Y)
            source_plane = (batch * points_x + sx).to(tl.int64) * points_y * points_z * channels
            line_channels = tl.where(in_x & in_y, channels, 0)  # 0 masks out the line
            for by in tl.static_range(KERNEL_Z + RUN - 1):
                sz, in_z = _shift_index(z, by - KERNEL_Z // 2, points_z, CIRCULAR_Z)
                keep = in_z[:, None] & (c < line_channels)[None, :]
                source = dy + source_plane + ((sy * points_z + sz) * channels)[:, None]
                v = tl.load(source + c[None, :], mask=keep, other=0.0).to(tl.float32)
                for run in tl.static_range(RUN):
                    if by - run >= 0 and by - run < KERNEL_Z:
                        outputs = add_at(outputs, run, v * reversed_taps[line * KERNEL_Z + by - run])
                        sum_w = add_at(sum_w, line * KERNEL_Z + by - run, v * inputs[run])
                        if line * KERNEL_Z + by - run == TAPS // 2:
                            sum_b += tl.where((z + run < points_z)[:, None], v, 0.0)  # a run may wrap around
                            if RESIDUAL:
                                outputs = add_at(outputs, run, v)
        for run in tl.static_range(RUN):
            keep = (z + run < points_z)[:, None] & keep_channels[None, :]
            offsets = ((y * points_z + z + run) * channels)[:, None] + c[None, :]
            tl.store(dx + plane_start + offsets, outputs[run].to(dx.dtype.element_ty), mask=keep)
    sums += (plane * tl.num_programs(0) + tile).to(tl.int64) * channels * (TAPS + 1)
    for t in tl.static_range(TAPS):
        tl.store(sums + c * TAPS + (TAPS - 1 - t), tl.sum(sum_w[t], axis=0), mask=keep_channels)
    tl.store(sums + channels * TAPS + c, tl.sum(sum_b, axis=0), mask=keep_channels)


class Shape:
    """Grid, kernel and padding, extended to three axes."""

    def __init__(self, x: torch.Tensor, weight: torch.Tensor, padding: Sequence[str]) -> None:
        missing = 3 - len(padding)
        self.batch, self.channels = x.shape[0], x.shape[-1]
        self.grid = (1,) * missing + tuple(x.shape[1:-1])
        self.kernel = (1,) * missing + tuple(weight.shape[2:])
        circular = (False,) * missing + tuple(kind == "circular" for kind in padding)
        names = ("KERNEL_X", "KERNEL_Y", "KERNEL_Z", "CIRCULAR_X", "CIRCULAR_Y", "CIRCULAR_Z")
        self.constants: dict[str, Any] = dict(zip(names, (*self.kernel, *circular), strict=True))
        self.tile_channels = min(tuning.CONVOLUTION_CHANNELS, triton.next_power_of_2(self.channels))

    def tiles(self, runs: int) -> tuple[int, int]:
        """Shape (TILE_LINES, TILE_RUNS) of a tile of a plane with at most `runs` runs."""
        per_line = min(tuning.MAX_RUNS_PER_LINE, runs, triton.next_power_of_2(triton.cdiv(self.grid[2], RUN.value)))
        return min(runs // per_line, triton.next_power_of_2(self.grid[1])), per_line

    def convolve(
        self, inputs: Sequence[torch.Tensor], taps: Sequence[torch.Tensor], biases: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor], reverse: bool, residual: bool,
    ) -> None:  # fmt: skip
        """Write the outputs: one per kernel of a single input, or one sum over the inputs, each with its own kernel."""
        points_x, points_y, points_z = self.grid
        runs = tuning.PAIR_RUNS if max(len(inputs), len(outputs)) == 2 else tuning.SINGLE_RUNS
        tile_lines, tile_runs = self.tiles(runs)
        tiles = (triton.cdiv(points_y, tile_lines), triton.cdiv(points_z, tile_runs * RUN.value))
        _convolve[(tiles[0] * tiles[1], triton.cdiv(self.channels, self.tile_channels), self.batch * points_x)](
            inputs[0], inputs[-1], taps[0], taps[-1], biases[0] if biases else taps[0],
            biases[-1] if biases else taps[0], outputs[0], outputs[-1], *self.grid, self.channels, tiles[1],
            **self.constants, TWO_IN=len(inputs) == 2, TWO_OUT=len(outputs) == 2, REVERSED=reverse, RESIDUAL=residual,
            BIAS=bool(biases), TILE_LINES=tile_lines, TILE_RUNS=tile_runs, TILE_CHANNELS=self.tile_channels,
            num_warps=tuning.CONVOLUTION_WARPS,
        )  # fmt: skip

    def backward(
        self, x: torch.Tensor, gradients: Sequence[torch.Tensor], taps: Sequence[torch.Tensor],
        specs: Sequence[tuple[torch.Size, torch.dtype]], residual: bool,
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:  # fmt: skip
        """dx, then the weight gradients of all kernels, then their bias gradients; shapes and dtypes as in `specs`."""
        dx = torch.empty_like(x)
        sizes = [self.channels * math.prod(self.kernel)] * len(taps) + [self.channels] * len(taps)

        def parameter_gradients(sums: torch.Tensor) -> list[torch.Tensor]:
            totals = sum_partials(sums).split(sizes)
            return [total.view(shape).to(dtype) for total, (shape, dtype) in zip(totals, specs, strict=True)]

        if len(taps) == 1 and math.prod(self.kernel) <= tuning.MAX_SINGLE_PASS_TAPS:
            sums = self._single_pass_backward(x, gradients[0], taps[0], dx, residual)
            return dx, list(on_side_stream(lambda: parameter_gradients(sums), sums))
        dparameters = on_side_stream(lambda: parameter_gradients(self._weight_sums(x, gradients)), x, *gradients)
        self.convolve(gradients, taps, [], [dx], reverse=True, residual=residual)
        return dx, list(dparameters)

    def _single_pass_backward(
        self, x: torch.Tensor, gradient: torch.Tensor, taps: torch.Tensor, dx: torch.Tensor, residual: bool
    ) -> torch.Tensor:
        """Write `dx` and return partial sums: (C, taps), then (C,)."""
        (points_x, points_y, points_z), channels, tile_runs = self.grid, self.channels, tuning.SINGLE_PASS_RUNS
        planes, blocks = self.batch * points_x, triton.cdiv(channels, self.tile_channels)
        tiles = triton.cdiv(points_z, tile_runs * RUN.value)
        chunk = triton.cdiv(points_y, min(points_y, triton.cdiv(tuning.SINGLE_PASS_PROGRAMS, tiles * blocks * planes)))
        tiles_y = triton.cdiv(points_y, chunk)
        sums = torch.empty(planes * tiles_y * tiles, len(taps) * channels + channels, device=x.device)
        _gradients[(tiles_y * tiles, blocks, planes)](
            gradient, x, taps, dx, sums, *self.grid, channels, tiles, **self.constants, RESIDUAL=residual,
            TILE_RUNS=tile_runs, TILE_CHANNELS=self.tile_channels, CHUNK=chunk,
            num_warps=tuning.SINGLE_PASS_WARPS[len(taps) <= tuning.FEW_TAPS],
        )  # fmt: skip
        return sums

    def _weight_sums(self, x: torch.Tensor, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """Partial sums: (C, taps) for each kernel, then (C,) for each."""
        taps, channels, kernels = math.prod(self.kernel), self.channels, len(gradients)
        runs = self.batch * math.prod(self.grid[:2]) * triton.cdiv(self.grid[2], RUN.value)
        rows, tile_runs = self.kernel[0] * self.kernel[1], tuning.WEIGHT_GRADIENT_RUNS
        runs_per_program = max(tuning.MIN_WEIGHT_GRADIENT_CHUNK, runs * rows // tuning.WEIGHT_GRADIENT_PROGRAMS)
        chunk = triton.cdiv(min(tuning.MAX_WEIGHT_GRADIENT_CHUNK, runs_per_program), tile_runs) * tile_runs
        chunks = triton.cdiv(runs, chunk)
        sums = torch.empty(chunks, kernels * channels * (taps + 1), device=x.device)
        _weight_gradient[(rows, chunks, triton.cdiv(channels, self.tile_channels))](
            x, gradients[0], gradients[-1], sums, self.batch, *self.grid, channels, **self.constants, TWO=kernels == 2,
            OFFSET=tl.int64 if x.numel() >= 2**31 else tl.int32, TILE_RUNS=tile_runs, TILE_CHANNELS=self.tile_channels,
            CHUNK=chunk, num_warps=tuning.WEIGHT_GRADIENT_WARPS,
        )  # fmt: skip
        return sums


def to_taps(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """(C, 1, *kernel) -> (taps, C)."""
    channels, taps = len(weight), weight[0].numel()
    return arrange(weight, WeightLayout((taps, channels), (channels, taps), (1, channels), dtype))


class _Depthwise(torch.autograd.Function):
    """x, padding, residual, then weight and bias of each kernel -> one output per kernel."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, padding: tuple[str, ...], residual: bool, *pairs: torch.Tensor) -> Any:
        weights, biases = pairs[::2], pairs[1::2]
        shape = Shape(x, weights[0], padding)
        outputs = [torch.empty_like(x) for _ in weights]
        taps = [to_taps(weight, x.dtype) for weight in weights]
        shape.convolve([x], taps, [bias.detach().float() for bias in biases], outputs, reverse=False, residual=residual)
        ctx.save_for_backward(x, *taps)
        ctx.shape, ctx.residual, ctx.specs = shape, residual, [(t.shape, t.dtype) for t in (*weights, *biases)]
        return tuple(outputs) if len(outputs) > 1 else outputs[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x, *taps = ctx.saved_tensors
        shape: Shape = ctx.shape
        dx, dparams = shape.backward(x, [dy.contiguous() for dy in gradients], taps, ctx.specs, ctx.residual)
        kernels = len(taps)
        return dx, None, None, *(d for pair in zip(dparams[:kernels], dparams[kernels:], strict=True) for d in pair)


def depthwise(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, padding: Sequence[str], residual: bool = False
) -> torch.Tensor:
    """Convolve `x` (B, *grid, C) with `weight` (C, 1, *kernel); with `residual`, add x itself."""
    x = x if residual else cast_for_products(x)  # the residual must not be rounded
    return _Depthwise.apply(x.contiguous(), tuple(padding), residual, weight, bias)


def depthwise_pair(
    x: torch.Tensor, first: Affine, second: Affine, padding: Sequence[str]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two convolutions, (weight, bias) each, of the same input, which is read once; in autocast's dtype."""
    return _Depthwise.apply(cast_for_products(x).contiguous(), tuple(padding), False, *first, *second)
