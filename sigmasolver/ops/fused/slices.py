"""Fused slice attention, from routed points to points, which never stores the routing P (N x heads x slices).

    P = softmax over slices of (R W + b) / tau      Z = P^T F / (mass + eps)      Z+ = update(Z)      o = P Z+ Wo^T + bo

    update:   residual Z + gamma Delta,   replace Delta,   keep Z      Delta = A V,  A = softmax(Q K^T / sqrt(D)),
              Q = Z Wq^T,  K = Z Wk^T,  V = Z Wv^T

Temperatures tau are clipped. P is recomputed, tile by tile, wherever it is needed. The backward pass reads the points
twice, with the backward pass of the update in between:

    dO = do Wo     dZ+ = P^T dO                                                            (the kernel `_slice` again)
    G = d(P^T F) = dZ / (mass + eps)     g = d(mass) = -sum_d dZ Z / (mass + eps)          (`slice_update`)
    dF = P G     dP = dO Z+^T + F G^T + g     dx = P (dP - sum_m P dP),  x = (R W + b) / tau
    dR = dx W^T / tau,  dW = R^T dx / tau,  db, dtau = -sum x dx / tau        O = P Z+,  dWo = do^T O

Two narrow heads share the rows of a tile, which are loaded once: the matrices of each head are zero on the channels of
the other, so that products with full rows involve its own channels only. Sums over points of quantities without
channels, the mass and db, are products with ones; P is 0 in rows beyond the last point. W and b are divided by tau, and
scaled for exp2, before the loop over points; sum x dx is the sum of (W, b) / tau times its gradient. Sums over points
are accumulated in chunks, then over the chunks in a fixed order.

Letters: B batch, H heads, N points, M slices, D head width, C = H D channels. A program handles TILE_HEADS heads.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from sigmasolver.ops.fused import dot_precision, rows_of, tuning
from sigmasolver.ops.fused.jit import jit
from sigmasolver.ops.fused.linear import map_gradients
from sigmasolver.ops.fused.reductions import replace_at, sum_partials
from sigmasolver.ops.fused.slice_update import update, update_backward
from sigmasolver.ops.fused.tuning import tile_size
from sigmasolver.ops.fused.weight_cache import cast_weight
from sigmasolver.ops.modules import EPSILON, Affine, SliceMap
from sigmasolver.ops.side_streams import on_side_stream

__all__ = [
    "LN2",
    "Sizes",
    "first_row",
    "inverse_temperature",
    "load_points",
    "load_routing_map",
    "load_states",
    "route_gradients",
    "slice_attention",
    "slice_softmax",
]

LOG2E, LN2 = tl.constexpr(1.4426950408889634), tl.constexpr(0.6931471805599453)


@jit
def load_points(
    X: tl.tensor,
    n: tl.tensor, first: tl.tensor, d: tl.tensor, points: tl.tensor, channels: tl.tensor, WIDTH: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """A tile (TILE_POINTS, TILE_CHANNELS): WIDTH channels, starting at `first`, of rows n of X (N, C)."""
    keep = (n[:, None] < points) & (d[None, :] < WIDTH)
    return tl.load(X + n[:, None] * channels + first + d[None, :], mask=keep, other=0.0)


@jit
def load_states(
    Z: tl.tensor, head: tl.tensor, j: tl.constexpr,
    d: tl.tensor, m: tl.tensor, HEAD_WIDTH: tl.constexpr, SLICES: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """A tile (TILE_SLICES, TILE_CHANNELS) of one head of Z (heads, M, D), the j-th head of the program; zero on the
    channels of its other heads."""
    channel = d - j * HEAD_WIDTH
    keep = (m[:, None] < SLICES) & (channel >= 0)[None, :] & (channel < HEAD_WIDTH)[None, :]
    return tl.load(Z + (head * SLICES + m[:, None]) * HEAD_WIDTH + channel[None, :], mask=keep, other=0.0)


@jit
def load_routing_map(
    W: tl.tensor, b: tl.tensor, inverse_tau: tl.tensor, j: tl.constexpr,
    d: tl.tensor, m: tl.tensor, HEAD_WIDTH: tl.constexpr, SLICES: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """W / tau (TILE_SLICES, TILE_CHANNELS) and b / tau (TILE_SLICES,), scaled for exp2."""
    scale = inverse_tau * LOG2E
    bias = tl.load(b + m, mask=m < SLICES, other=0.0).to(tl.float32)
    return load_states(W, 0, j, d, m, HEAD_WIDTH, SLICES).to(tl.float32) * scale, bias * scale


@jit
def inverse_temperature(tau: tl.tensor, COLDEST: tl.constexpr, HOTTEST: tl.constexpr) -> tl.tensor:
    """1 / tau of the clipped temperature; NaN propagates."""
    clipped = tl.maximum(tl.load(tau).to(tl.float32), COLDEST, propagate_nan=tl.PropagateNan.ALL)
    return 1 / tl.minimum(clipped, HOTTEST, propagate_nan=tl.PropagateNan.ALL)


@jit
def slice_softmax(x: tl.tensor, mask: tl.tensor, axis: tl.constexpr, FULL: tl.constexpr) -> tl.tensor:
    """Softmax over the slices with exp2; without FULL, part of the tile is beyond the last slice and is masked."""
    if not FULL:
        x = tl.where(mask, x, float("-inf"))
    e = tl.exp2(x - tl.expand_dims(tl.max(x, axis=axis), axis))
    root = tl.rsqrt(tl.sum(e, axis=axis))  # its square is cheaper than a division
    return e * tl.expand_dims(root * root, axis)


@jit
def first_row(x: tl.tensor) -> tl.tensor:
    """x[0] of x (16, columns), a product with sixteen rows of ones, all of which are equal."""
    return tl.sum(tl.where(tl.arange(0, 16)[:, None] == 0, x, 0.0), axis=0)


@jit
def _slice(
    R: tl.tensor, F: tl.tensor, W: tl.tensor, b: tl.tensor, tau: tl.tensor, S: tl.tensor,
    points: tl.tensor, channels: tl.tensor, chunks: tl.tensor,
    HEADS: tl.constexpr, HEAD_WIDTH: tl.constexpr, SLICES: tl.constexpr, WITH_MASS: tl.constexpr,
    TILE_HEADS: tl.constexpr, WHOLE_CHUNKS: tl.constexpr,
    COLDEST: tl.constexpr, HOTTEST: tl.constexpr,
    TILE_POINTS: tl.constexpr, TILE_SLICES: tl.constexpr, TILE_CHANNELS: tl.constexpr, CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """S (B, H, chunks, M, D + WITH_MASS): partial sums of P^T F, then of the mass. R, F (B, N, C), W (M, D), b (M),
    tau (H).

    P is computed transposed, as the product needs it."""
    head, chunk, batch = tl.program_id(0) * TILE_HEADS, tl.program_id(1), tl.program_id(2)
    R += batch.to(tl.int64) * points * channels
    F += batch.to(tl.int64) * points * channels
    d, m = tl.arange(0, TILE_CHANNELS), tl.arange(0, TILE_SLICES)
    ones = tl.full((TILE_POINTS, 16), 1.0, F.dtype.element_ty)
    maps: tl.tuple = ()
    biases: tl.tuple = ()
    for j in tl.static_range(TILE_HEADS):
        w, bias = load_routing_map(
            W, b, inverse_temperature(tau + head + j, COLDEST, HOTTEST), j, d, m, HEAD_WIDTH, SLICES
        )
        maps += (w.to(R.dtype.element_ty),)
        biases += (bias,)
    totals = (tl.zeros((TILE_SLICES, TILE_CHANNELS), tl.float32),) * TILE_HEADS
    masses = (tl.zeros((TILE_SLICES, 16), tl.float32),) * TILE_HEADS
    for start in range(0, CHUNK, TILE_POINTS):
        n = chunk * CHUNK + start + tl.arange(0, TILE_POINTS)
        r = load_points(R, n, head * HEAD_WIDTH, d, points, channels, TILE_HEADS * HEAD_WIDTH)
        f = load_points(F, n, head * HEAD_WIDTH, d, points, channels, TILE_HEADS * HEAD_WIDTH)
        for j in tl.static_range(TILE_HEADS):
            x = tl.dot(maps[j], tl.trans(r), input_precision=PRECISION) + biases[j][:, None]
            p = slice_softmax(x, m[:, None] < SLICES, 0, TILE_SLICES == SLICES)
            if WITH_MASS and not WHOLE_CHUNKS:
                p = tl.where((n < points)[None, :], p, 0.0)
            p = p.to(f.dtype)
            totals = replace_at(totals, j, tl.dot(p, f, totals[j], input_precision=PRECISION))
            if WITH_MASS:
                masses = replace_at(masses, j, tl.dot(p, ones, masses[j], input_precision=PRECISION))
    for j in tl.static_range(TILE_HEADS):
        row = ((batch * HEADS + head + j) * chunks + chunk).to(tl.int64) * SLICES + m
        target = S + (row * (HEAD_WIDTH + WITH_MASS))[:, None]
        channel = (d - j * HEAD_WIDTH)[None, :]
        tl.store(target + channel, totals[j], mask=(m[:, None] < SLICES) & (channel >= 0) & (channel < HEAD_WIDTH))
        if WITH_MASS:
            column = tl.arange(0, 16)[None, :]
            tl.store(target + HEAD_WIDTH + column, masses[j], mask=(m[:, None] < SLICES) & (column == 0))


@jit
def _deslice(
    R: tl.tensor, W: tl.tensor, b: tl.tensor, tau: tl.tensor, new: tl.tensor, O: tl.tensor,
    points: tl.tensor, channels: tl.tensor,
    HEADS: tl.constexpr, HEAD_WIDTH: tl.constexpr, SLICES: tl.constexpr, TILE_HEADS: tl.constexpr,
    COLDEST: tl.constexpr, HOTTEST: tl.constexpr,
    TILE_POINTS: tl.constexpr, TILE_SLICES: tl.constexpr, TILE_CHANNELS: tl.constexpr, CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """O (B, N, C) = P Z+ for the heads of a program; `new` (B H, M, D) is Z+."""
    head, chunk, batch = tl.program_id(0) * TILE_HEADS, tl.program_id(1), tl.program_id(2)
    R += batch.to(tl.int64) * points * channels
    O += batch.to(tl.int64) * points * channels
    d, m = tl.arange(0, TILE_CHANNELS), tl.arange(0, TILE_SLICES)
    maps: tl.tuple = ()
    biases: tl.tuple = ()
    states: tl.tuple = ()
    for j in tl.static_range(TILE_HEADS):
        w, bias = load_routing_map(
            W, b, inverse_temperature(tau + head + j, COLDEST, HOTTEST), j, d, m, HEAD_WIDTH, SLICES
        )
        maps += (tl.trans(w).to(R.dtype.element_ty),)
        biases += (bias,)
        states += (load_states(new, batch * HEADS + head + j, j, d, m, HEAD_WIDTH, SLICES).to(R.dtype.element_ty),)
    for start in range(0, CHUNK, TILE_POINTS):
        n = chunk * CHUNK + start + tl.arange(0, TILE_POINTS)
        r = load_points(R, n, head * HEAD_WIDTH, d, points, channels, TILE_HEADS * HEAD_WIDTH)
        o = tl.zeros((TILE_POINTS, TILE_CHANNELS), tl.float32)
        for j in tl.static_range(TILE_HEADS):
            x = tl.dot(r, maps[j], input_precision=PRECISION) + biases[j][None, :]
            p = slice_softmax(x, m[None, :] < SLICES, 1, TILE_SLICES == SLICES).to(r.dtype)
            o = tl.dot(p, states[j], o, input_precision=PRECISION)
        keep = (n[:, None] < points) & (d[None, :] < TILE_HEADS * HEAD_WIDTH)
        tl.store(O + n[:, None] * channels + head * HEAD_WIDTH + d[None, :], o.to(O.dtype.element_ty), mask=keep)


@jit
def _backward(
    R: tl.tensor, F: tl.tensor, dO: tl.tensor, W: tl.tensor, b: tl.tensor, tau: tl.tensor, new: tl.tensor,
    G: tl.tensor, g: tl.tensor, dR: tl.tensor, dF: tl.tensor, O: tl.tensor, sums: tl.tensor,
    points: tl.tensor, channels: tl.tensor, chunks: tl.tensor,
    HEADS: tl.constexpr, HEAD_WIDTH: tl.constexpr, SLICES: tl.constexpr,
    TILE_HEADS: tl.constexpr, WHOLE_CHUNKS: tl.constexpr, COLDEST: tl.constexpr, HOTTEST: tl.constexpr,
    TILE_POINTS: tl.constexpr, TILE_SLICES: tl.constexpr, TILE_CHANNELS: tl.constexpr, CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """dR, dF and the recomputed O, all (B, N, C) like R, F and dO. `new` = Z+ and G (B H, M, D), g (B H, M).

        dP = dO Z+^T + F G^T + g      dx = P (dP - sum_m P dP)      dR = dx W^T / tau      dF = P G      O = P Z+

    A row of `sums` (B, chunks, H): dW (M, D) = R^T dx / tau, db (M) = sum dx / tau, dtau = -sum x dx / tau."""
    head, chunk, batch = tl.program_id(0) * TILE_HEADS, tl.program_id(1), tl.program_id(2)
    first = batch.to(tl.int64) * points * channels
    d, m = tl.arange(0, TILE_CHANNELS), tl.arange(0, TILE_SLICES)
    ones = tl.full((16, TILE_POINTS), 1.0, R.dtype.element_ty)
    routes: tl.tuple = ()
    biases: tl.tuple = ()
    states: tl.tuple = ()
    sum_gradients: tl.tuple = ()
    mass_gradients: tl.tuple = ()
    for j in tl.static_range(TILE_HEADS):
        w, bias = load_routing_map(
            W, b, inverse_temperature(tau + head + j, COLDEST, HOTTEST), j, d, m, HEAD_WIDTH, SLICES
        )
        routes += (w.to(R.dtype.element_ty),)
        biases += (bias,)
        states += (load_states(new, batch * HEADS + head + j, j, d, m, HEAD_WIDTH, SLICES).to(R.dtype.element_ty),)
        sum_gradients += (load_states(G, batch * HEADS + head + j, j, d, m, HEAD_WIDTH, SLICES).to(R.dtype.element_ty),)
        mass_gradients += (tl.load(g + (batch * HEADS + head + j) * SLICES + m, mask=m < SLICES, other=0.0),)
    sum_W = (tl.zeros((TILE_CHANNELS, TILE_SLICES), tl.float32),) * TILE_HEADS
    sum_b = (tl.zeros((16, TILE_SLICES), tl.float32),) * TILE_HEADS
    for start in range(0, CHUNK, TILE_POINTS):
        n = chunk * CHUNK + start + tl.arange(0, TILE_POINTS)
        r = load_points(R + first, n, head * HEAD_WIDTH, d, points, channels, TILE_HEADS * HEAD_WIDTH)
        f = load_points(F + first, n, head * HEAD_WIDTH, d, points, channels, TILE_HEADS * HEAD_WIDTH)
        do = load_points(dO + first, n, head * HEAD_WIDTH, d, points, channels, TILE_HEADS * HEAD_WIDTH)
        dr = tl.zeros((TILE_POINTS, TILE_CHANNELS), tl.float32)
        df = tl.zeros((TILE_POINTS, TILE_CHANNELS), tl.float32)
        o = tl.zeros((TILE_POINTS, TILE_CHANNELS), tl.float32)
        for j in tl.static_range(TILE_HEADS):
            x = tl.dot(r, tl.trans(routes[j]), input_precision=PRECISION) + biases[j][None, :]
            p = slice_softmax(x, m[None, :] < SLICES, 1, TILE_SLICES == SLICES)
            if not WHOLE_CHUNKS:
                p = tl.where((n < points)[:, None], p, 0.0)
            dP = tl.dot(f, tl.trans(sum_gradients[j]), input_precision=PRECISION)
            dP = tl.dot(do, tl.trans(states[j]), dP, input_precision=PRECISION) + mass_gradients[j][None, :]
            p_cast = p.to(f.dtype)
            weighted = p * dP
            dx = (weighted - p * tl.sum(weighted, axis=1)[:, None]).to(f.dtype)
            sum_W = replace_at(sum_W, j, tl.dot(tl.trans(r), dx, sum_W[j], input_precision=PRECISION))
            sum_b = replace_at(sum_b, j, tl.dot(ones, dx, sum_b[j], input_precision=PRECISION))
            dr = tl.dot(dx, routes[j], dr, input_precision=PRECISION)
            df = tl.dot(p_cast, sum_gradients[j], df, input_precision=PRECISION)
            o = tl.dot(p_cast, states[j], o, input_precision=PRECISION)
        keep = (n[:, None] < points) & (d[None, :] < TILE_HEADS * HEAD_WIDTH)
        offsets = first + n[:, None] * channels + head * HEAD_WIDTH + d[None, :]
        tl.store(dR + offsets, (dr * LN2).to(dR.dtype.element_ty), mask=keep)
        tl.store(dF + offsets, df.to(dF.dtype.element_ty), mask=keep)
        tl.store(O + offsets, o.to(O.dtype.element_ty), mask=keep)
    for j in tl.static_range(TILE_HEADS):
        inverse_tau = inverse_temperature(tau + head + j, COLDEST, HOTTEST)
        target = sums + ((batch * chunks + chunk) * HEADS + head + j).to(tl.int64) * (SLICES * HEAD_WIDTH + SLICES + 1)
        channel = (d - j * HEAD_WIDTH)[:, None]
        mask = (m[None, :] < SLICES) & (channel >= 0) & (channel < HEAD_WIDTH)
        tl.store(target + m[None, :] * HEAD_WIDTH + channel, sum_W[j] * inverse_tau, mask=mask)
        db = first_row(sum_b[j])
        tl.store(target + SLICES * HEAD_WIDTH + m, db * inverse_tau, mask=m < SLICES)
        sum_x_dx = tl.sum(tl.sum(tl.where(mask, tl.trans(routes[j]).to(tl.float32) * sum_W[j], 0.0), axis=1), axis=0)
        sum_x_dx += tl.sum(biases[j] * db, axis=0)
        t = tl.load(tau + head + j).to(tl.float32)
        target = target + SLICES * HEAD_WIDTH + SLICES
        tl.store(target, tl.where((t >= COLDEST) & (t <= HOTTEST), -sum_x_dx * (LN2 * inverse_tau), 0.0))


class Sizes:
    """Sizes, tiles and grid of one call; with `pairs`, two narrow heads share a tile."""

    def __init__(
        self, R_BNC: torch.Tensor, weight_MD: torch.Tensor, limits: tuple[float, float], pairs: bool = False
    ) -> None:
        self.batch_size, self.points, self.channels = R_BNC.shape
        self.slices, self.head_width = weight_MD.shape
        self.heads = self.channels // self.head_width
        narrow = self.heads % 2 == 0 and 2 * self.head_width <= tuning.SHARED_TILE_CHANNELS
        self.tile_heads = 2 if pairs and narrow else 1
        self.tile_slices = tile_size(self.slices)
        self.tile_channels = tile_size(self.tile_heads * self.head_width)
        self.wide = self.tile_slices * self.tile_channels > tuning.WIDE_HEAD
        self.bytes, self.limits = R_BNC.element_size(), limits
        unit = min(tuning.SLICE_POINTS, tile_size(self.points))
        per_program = triton.cdiv(self.points * self.batch_size * self.heads, tuning.SLICE_PROGRAMS)
        self.chunk = triton.cdiv(min(tuning.MAX_SLICE_CHUNK, max(per_program, unit), self.points), unit) * unit
        self.chunks = triton.cdiv(self.points, self.chunk)
        # Heads first: heads of the same points share cache lines, so they should run at the same time.
        self.programs = (self.heads // self.tile_heads, self.chunks, self.batch_size)

    def tile(self, launch: tuple[int, int, int]) -> dict[str, Any]:
        """Keyword arguments of a kernel over points and slices; `launch`: points of a tile, warps, stages."""
        points, warps, stages = launch
        sizes: dict[str, Any] = {"HEADS": self.heads, "HEAD_WIDTH": self.head_width, "SLICES": self.slices}
        sizes |= {"TILE_POINTS": min(points, tile_size(self.points)), "TILE_SLICES": self.tile_slices}
        sizes |= {"TILE_CHANNELS": self.tile_channels, "CHUNK": self.chunk, "PRECISION": dot_precision()}
        sizes |= {"COLDEST": self.limits[0], "HOTTEST": self.limits[1]}
        # Large heads need more warps to hold their accumulators in registers.
        warps *= max(1, self.tile_slices * self.tile_channels // tuning.WIDE_HEAD)
        return {**sizes, "num_warps": min(tuning.MAX_WARPS, warps), "num_stages": stages}

    def empty_sums(self, R: torch.Tensor, extra: int = 0) -> torch.Tensor:
        """An empty tensor for the partial sums of each chunk (B, H, chunks, M, D + extra)."""
        shape = self.batch_size, self.heads, self.chunks, self.slices, self.head_width + extra
        return torch.empty(shape, device=R.device, dtype=torch.float32)

    def empty_route_sums(self, R: torch.Tensor) -> torch.Tensor:
        """An empty tensor for the gradients of W, b and tau from each chunk (B chunks, H, M D + M + 1)."""
        row = self.slices * self.head_width + self.slices + 1
        return torch.empty(self.batch_size * self.chunks, self.heads, row, device=R.device, dtype=torch.float32)


def route_gradients(
    routes: torch.Tensor, W: torch.Tensor, b: torch.Tensor, tau: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dW (M, D), db (M,) and dtau (H,) from the partial sums of `Sizes.empty_route_sums`."""
    by_head = sum_partials(routes)
    dW, db, _ = sum_partials(by_head).split((W.numel(), len(b), 1))
    return dW.view(W.shape).to(W.dtype), db.to(b.dtype), by_head[:, -1].contiguous().to(tau.dtype)


class _Tiles:
    """Keyword arguments of the kernels of one call."""

    def __init__(self, sizes: Sizes) -> None:
        shared = {"TILE_HEADS": sizes.tile_heads}
        even = {"WHOLE_CHUNKS": sizes.points % sizes.chunk == 0}
        self.deslice = sizes.tile(tuning.SLICE_TILES[sizes.bytes][sizes.wide]) | shared
        self.slice, self.backward = sizes.tile(tuning.SLICE_TILE) | shared | even, self.deslice | even
        tile_channels = tile_size(sizes.head_width)
        wide = sizes.tile_slices * tile_channels > tuning.WIDE_HEAD
        self.update: dict[str, Any] = {"HEAD_WIDTH": sizes.head_width, "SLICES": sizes.slices}
        self.update |= {"TILE_SLICES": sizes.tile_slices, "TILE_CHANNELS": tile_channels}
        self.update |= {"ROOT": 1 / math.sqrt(sizes.head_width), "num_warps": tuning.UPDATE_WARPS[wide]}


class _SliceAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, kind: str, limits: tuple[float, float], R: torch.Tensor, F: torch.Tensor,
        W: torch.Tensor, b: torch.Tensor, tau: torch.Tensor,
        wq: torch.Tensor, wk: torch.Tensor, wv: torch.Tensor, gamma: torch.Tensor, wo: torch.Tensor, bo: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        sizes = Sizes(R, W, limits, pairs=True)
        tiles, points, channels, chunks = _Tiles(sizes), sizes.points, sizes.channels, sizes.chunks
        partials = sizes.empty_sums(R, extra=1)
        _slice[sizes.programs](R, F, W, b, tau, partials, points, channels, chunks, WITH_MASS=True, **tiles.slice)
        heads = sizes.batch_size * sizes.heads
        Z, new = torch.empty(2, heads, *W.shape, device=R.device, dtype=torch.float32)
        mass = torch.empty(heads, sizes.slices, device=R.device, dtype=torch.float32)
        update[(heads,)](partials, wq, wk, wv, gamma, Z, mass, new, chunks, KIND=kind, EPS=EPSILON, **tiles.update)
        O, project = torch.empty_like(R), cast_weight(wo, R.dtype)
        _deslice[sizes.programs](R, W, b, tau, new, O, points, channels, **tiles.deslice)
        ctx.save_for_backward(R, F, W, b, tau, wq, wk, wv, gamma, project, Z, mass, new)
        ctx.kind, ctx.limits, ctx.dtypes = kind, limits, (wo.dtype, bo.dtype)
        return torch.addmm(cast_weight(bo, R.dtype), O.view(-1, channels), project.T).view(R.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: torch.Tensor) -> Any:
        R, F, W, b, tau, wq, wk, wv, gamma, project, Z, mass, new = ctx.saved_tensors
        sizes = Sizes(R, W, ctx.limits, pairs=True)
        tiles, points, channels, chunks = _Tiles(sizes), sizes.points, sizes.channels, sizes.chunks
        rows = rows_of(do)
        dO = rows @ project
        dnew = sizes.empty_sums(R)
        _slice[sizes.programs](R, dO, W, b, tau, dnew, points, channels, chunks, WITH_MASS=False, **tiles.slice)
        heads, weights = sizes.batch_size * sizes.heads, sizes.head_width**2
        G, g = torch.empty_like(Z), torch.empty_like(mass)
        attention_sums = torch.empty(heads, 3 * weights + 1, device=R.device, dtype=torch.float32)
        update_backward[(heads,)](
            dnew, wq, wk, wv, gamma, Z, mass, G, g, attention_sums, chunks, KIND=ctx.kind, **tiles.update
        )
        dR, dF, O, route_sums = torch.empty_like(R), torch.empty_like(F), torch.empty_like(R), sizes.empty_route_sums(R)
        _backward[sizes.programs](
            R, F, dO, W, b, tau, new, G, g, dR, dF, O, route_sums, points, channels, chunks, **tiles.backward
        )

        def weight_gradients() -> list[torch.Tensor]:
            gradients = [*route_gradients(route_sums, W, b, tau)]
            if ctx.kind != "keep":
                *dqkv, dgamma = sum_partials(attention_sums).split((weights, weights, weights, 1))
                gradients += [dw.view(wq.shape).to(wq.dtype) for dw in dqkv]
                gradients += [dgamma.to(gamma.dtype)] if ctx.kind == "residual" else []
            projection = zip(map_gradients(rows, O.view(-1, channels)), ctx.dtypes, strict=True)
            return [*gradients, *(gradient.to(dtype) for gradient, dtype in projection)]

        *gradients, dwo, dbo = on_side_stream(weight_gradients, route_sums, attention_sums, rows, O)
        return None, None, dR, dF, *gradients, *(None,) * (7 - len(gradients)), dwo, dbo


def slice_attention(
    R_BNC: torch.Tensor, F_BNC: torch.Tensor, route: SliceMap, attention: tuple[torch.Tensor, ...], project: Affine
) -> torch.Tensor:
    """R, F (B, N, C) -> o (B, N, C). `attention`: empty (keep), W_q W_k W_v (replace), these and gamma (residual)."""
    kind = {0: "keep", 3: "replace", 4: "residual"}[len(attention)]
    weight = route.weight
    padded = (*attention, *(weight,) * (4 - len(attention)))  # placeholders, which the kernels never read
    inputs = R_BNC.contiguous(), F_BNC.contiguous(), weight.contiguous(), route.bias, route.temperature
    return _SliceAttention.apply(kind, route.limits, *inputs, *padded, *project)
