"""Slice attention from routed points to points, in one piece, without ever storing the routing P (N x heads x slices).

    P = softmax over slices of (R W + b) / tau      Z = P^T F / (mass + eps)      Z+ = update(Z)      o = P Z+ Wo^T + bo

    update:   residual Z + gamma Delta,   replace Delta,   keep Z      Delta = A V,  A = softmax(Q K^T / sqrt(D)),
              Q = Z Wq^T,  K = Z Wk^T,  V = Z Wv^T

Temperatures tau are clipped. P is recomputed, tile by tile, wherever it is needed. Backward there are two passes over
the points, with the update between them:

    dO = do Wo     dZ+ = P^T dO                                                            (as the slices are made)
    G = d(P^T F) = dZ / (mass + eps)     g = d(mass) = -sum_d dZ Z / (mass + eps)          (`slice_update`)
    dF = P G     dP = dO Z+^T + F G^T + g     dx = P (dP - sum_m P dP),  x = (R W + b) / tau
    dR = dx W^T / tau,  dW = R^T dx / tau,  db, dtau = -sum x dx / tau        O = P Z+,  dWo = do^T O

Two narrow heads share the rows of a tile, which are read once: a head's matrices have zeros where the other has its
channels, so that products with whole rows are those of its own. Sums over points of what has no channels, the mass and
db, are products with ones; in rows beyond the last point P is 0. W and b are divided by tau, and turned into powers of
2, before they meet the points; sum x dx is the sum of (W, b) / tau times its gradient. Sums over points are made in
chunks, then over chunks in a fixed order.

Letters: B batch, H heads, N points, M slices, D head width, C = H D channels. A program has TILE_HEADS heads.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from sigmasolver.ops.fused import dot_precision, rows_of, tuning
from sigmasolver.ops.fused.linear import map_gradients
from sigmasolver.ops.fused.reductions import replaced, sum_partials
from sigmasolver.ops.fused.slice_update import update, update_backward
from sigmasolver.ops.fused.tuning import tile_size
from sigmasolver.ops.fused.weight_cache import cast_weight
from sigmasolver.ops.modules import EPSILON, Affine, SliceMap
from sigmasolver.ops.side_streams import on_side_stream

__all__ = [
    "LN2",
    "Sizes",
    "coldness",
    "first_row",
    "load_points",
    "load_route",
    "load_states",
    "route_gradients",
    "slice_attention",
    "slice_softmax",
]

LOG2E, LN2 = tl.constexpr(1.4426950408889634), tl.constexpr(0.6931471805599453)


@triton.jit
def load_points(
    X: tl.tensor,
    n: tl.tensor, first: tl.tensor, d: tl.tensor, points: tl.tensor, channels: tl.tensor, WIDTH: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """(TILE_POINTS, TILE_CHANNELS): of rows n of X (N, C) the WIDTH channels from `first` on."""
    keep = (n[:, None] < points) & (d[None, :] < WIDTH)
    return tl.load(X + n[:, None] * channels + first + d[None, :], mask=keep, other=0.0)


@triton.jit
def load_states(
    Z: tl.tensor, head: tl.tensor, j: tl.constexpr,
    d: tl.tensor, m: tl.tensor, HEAD_WIDTH: tl.constexpr, SLICES: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """(TILE_SLICES, TILE_CHANNELS) of one head of Z (heads, M, D), the j-th of its program, with zeros where the
    program has the channels of others."""
    own = d - j * HEAD_WIDTH
    keep = (m[:, None] < SLICES) & (own >= 0)[None, :] & (own < HEAD_WIDTH)[None, :]
    return tl.load(Z + (head * SLICES + m[:, None]) * HEAD_WIDTH + own[None, :], mask=keep, other=0.0)


@triton.jit
def load_route(
    W: tl.tensor, b: tl.tensor, cold: tl.tensor, j: tl.constexpr,
    d: tl.tensor, m: tl.tensor, HEAD_WIDTH: tl.constexpr, SLICES: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """(TILE_SLICES, TILE_CHANNELS) and (TILE_SLICES,): W and b over tau, for powers of 2."""
    scale = cold * LOG2E
    bias = tl.load(b + m, mask=m < SLICES, other=0.0).to(tl.float32)
    return load_states(W, 0, j, d, m, HEAD_WIDTH, SLICES).to(tl.float32) * scale, bias * scale


@triton.jit
def coldness(tau: tl.tensor, COLDEST: tl.constexpr, HOTTEST: tl.constexpr) -> tl.tensor:
    """1 / temperature, clipped; a NaN stays one."""
    warm = tl.maximum(tl.load(tau).to(tl.float32), COLDEST, propagate_nan=tl.PropagateNan.ALL)
    return 1 / tl.minimum(warm, HOTTEST, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def slice_softmax(x: tl.tensor, known: tl.tensor, axis: tl.constexpr, FULL: tl.constexpr) -> tl.tensor:
    """Softmax over the slices, of powers of 2; not FULL: some lines of the tile are beyond the last slice."""
    if not FULL:
        x = tl.where(known, x, float("-inf"))
    e = tl.exp2(x - tl.expand_dims(tl.max(x, axis=axis), axis))
    root = tl.rsqrt(tl.sum(e, axis=axis))  # squared cheaper than a division
    return e * tl.expand_dims(root * root, axis)


@triton.jit
def first_row(x: tl.tensor) -> tl.tensor:
    """x[0] of x (16, columns): a product with sixteen rows of ones has the same sums in each."""
    return tl.sum(tl.where(tl.arange(0, 16)[:, None] == 0, x, 0.0), axis=0)


@triton.jit
def _slice(
    R: tl.tensor, F: tl.tensor, W: tl.tensor, b: tl.tensor, tau: tl.tensor, S: tl.tensor,
    points: tl.tensor, channels: tl.tensor, chunks: tl.tensor,
    HEADS: tl.constexpr, HEAD_WIDTH: tl.constexpr, SLICES: tl.constexpr, WITH_MASS: tl.constexpr,
    TILE_HEADS: tl.constexpr, WHOLE_CHUNKS: tl.constexpr,
    COLDEST: tl.constexpr, HOTTEST: tl.constexpr,
    TILE_POINTS: tl.constexpr, TILE_SLICES: tl.constexpr, TILE_CHANNELS: tl.constexpr, CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """S (B, H, chunks, M, D + WITH_MASS): sums of P^T F, last of the mass. R, F (B, N, C), W (M, D), b (M), tau (H).

    P is made transposed, as its product needs it."""
    head, chunk, batch = tl.program_id(0) * TILE_HEADS, tl.program_id(1), tl.program_id(2)
    R += batch.to(tl.int64) * points * channels
    F += batch.to(tl.int64) * points * channels
    d, m = tl.arange(0, TILE_CHANNELS), tl.arange(0, TILE_SLICES)
    ones = tl.full((TILE_POINTS, 16), 1.0, F.dtype.element_ty)
    maps: tl.tuple = ()
    biases: tl.tuple = ()
    for j in tl.static_range(TILE_HEADS):
        w, bias = load_route(W, b, coldness(tau + head + j, COLDEST, HOTTEST), j, d, m, HEAD_WIDTH, SLICES)
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
            totals = replaced(totals, j, tl.dot(p, f, totals[j], input_precision=PRECISION))
            if WITH_MASS:
                masses = replaced(masses, j, tl.dot(p, ones, masses[j], input_precision=PRECISION))
    for j in tl.static_range(TILE_HEADS):
        row = ((batch * HEADS + head + j) * chunks + chunk).to(tl.int64) * SLICES + m
        to = S + (row * (HEAD_WIDTH + WITH_MASS))[:, None]
        own = (d - j * HEAD_WIDTH)[None, :]
        tl.store(to + own, totals[j], mask=(m[:, None] < SLICES) & (own >= 0) & (own < HEAD_WIDTH))
        if WITH_MASS:
            one = tl.arange(0, 16)[None, :]
            tl.store(to + HEAD_WIDTH + one, masses[j], mask=(m[:, None] < SLICES) & (one == 0))


@triton.jit
def _deslice(
    R: tl.tensor, W: tl.tensor, b: tl.tensor, tau: tl.tensor, new: tl.tensor, O: tl.tensor,
    points: tl.tensor, channels: tl.tensor,
    HEADS: tl.constexpr, HEAD_WIDTH: tl.constexpr, SLICES: tl.constexpr, TILE_HEADS: tl.constexpr,
    COLDEST: tl.constexpr, HOTTEST: tl.constexpr,
    TILE_POINTS: tl.constexpr, TILE_SLICES: tl.constexpr, TILE_CHANNELS: tl.constexpr, CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """O (B, N, C) = P Z+ of the heads of a program; `new` (B H, M, D) is Z+."""
    head, chunk, batch = tl.program_id(0) * TILE_HEADS, tl.program_id(1), tl.program_id(2)
    R += batch.to(tl.int64) * points * channels
    O += batch.to(tl.int64) * points * channels
    d, m = tl.arange(0, TILE_CHANNELS), tl.arange(0, TILE_SLICES)
    maps: tl.tuple = ()
    biases: tl.tuple = ()
    states: tl.tuple = ()
    for j in tl.static_range(TILE_HEADS):
        w, bias = load_route(W, b, coldness(tau + head + j, COLDEST, HOTTEST), j, d, m, HEAD_WIDTH, SLICES)
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


@triton.jit
def _backward(
    R: tl.tensor, F: tl.tensor, dO: tl.tensor, W: tl.tensor, b: tl.tensor, tau: tl.tensor, new: tl.tensor,
    G: tl.tensor, g: tl.tensor, dR: tl.tensor, dF: tl.tensor, O: tl.tensor, sums: tl.tensor,
    points: tl.tensor, channels: tl.tensor, chunks: tl.tensor,
    HEADS: tl.constexpr, HEAD_WIDTH: tl.constexpr, SLICES: tl.constexpr,
    TILE_HEADS: tl.constexpr, WHOLE_CHUNKS: tl.constexpr, COLDEST: tl.constexpr, HOTTEST: tl.constexpr,
    TILE_POINTS: tl.constexpr, TILE_SLICES: tl.constexpr, TILE_CHANNELS: tl.constexpr, CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """dR, dF and, recomputed, O, all (B, N, C) as R, F and dO. `new` = Z+ and G (B H, M, D), g (B H, M).

        dP = dO Z+^T + F G^T + g      dx = P (dP - sum_m P dP)      dR = dx W^T / tau      dF = P G      O = P Z+

    A row of `sums` (B, chunks, H): dW (M, D) = R^T dx / tau, db (M) = sum dx / tau, dtau = -sum x dx / tau."""
    head, chunk, batch = tl.program_id(0) * TILE_HEADS, tl.program_id(1), tl.program_id(2)
    first = batch.to(tl.int64) * points * channels
    d, m = tl.arange(0, TILE_CHANNELS), tl.arange(0, TILE_SLICES)
    ones = tl.full((16, TILE_POINTS), 1.0, R.dtype.element_ty)
    routes: tl.tuple = ()
    biases: tl.tuple = ()
    zs: tl.tuple = ()
    states: tl.tuple = ()
    shifts: tl.tuple = ()
    for j in tl.static_range(TILE_HEADS):
        w, bias = load_route(W, b, coldness(tau + head + j, COLDEST, HOTTEST), j, d, m, HEAD_WIDTH, SLICES)
        routes += (w.to(R.dtype.element_ty),)
        biases += (bias,)
        zs += (load_states(new, batch * HEADS + head + j, j, d, m, HEAD_WIDTH, SLICES).to(R.dtype.element_ty),)
        states += (load_states(G, batch * HEADS + head + j, j, d, m, HEAD_WIDTH, SLICES).to(R.dtype.element_ty),)
        shifts += (tl.load(g + (batch * HEADS + head + j) * SLICES + m, mask=m < SLICES, other=0.0),)
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
            dP = tl.dot(f, tl.trans(states[j]), input_precision=PRECISION)
            dP = tl.dot(do, tl.trans(zs[j]), dP, input_precision=PRECISION) + shifts[j][None, :]
            p_cast = p.to(f.dtype)
            weighed = p * dP
            dx = (weighed - p * tl.sum(weighed, axis=1)[:, None]).to(f.dtype)
            sum_W = replaced(sum_W, j, tl.dot(tl.trans(r), dx, sum_W[j], input_precision=PRECISION))
            sum_b = replaced(sum_b, j, tl.dot(ones, dx, sum_b[j], input_precision=PRECISION))
            dr = tl.dot(dx, routes[j], dr, input_precision=PRECISION)
            df = tl.dot(p_cast, states[j], df, input_precision=PRECISION)
            o = tl.dot(p_cast, zs[j], o, input_precision=PRECISION)
        keep = (n[:, None] < points) & (d[None, :] < TILE_HEADS * HEAD_WIDTH)
        offsets = first + n[:, None] * channels + head * HEAD_WIDTH + d[None, :]
        tl.store(dR + offsets, (dr * LN2).to(dR.dtype.element_ty), mask=keep)
        tl.store(dF + offsets, df.to(dF.dtype.element_ty), mask=keep)
        tl.store(O + offsets, o.to(O.dtype.element_ty), mask=keep)
    for j in tl.static_range(TILE_HEADS):
        cold = coldness(tau + head + j, COLDEST, HOTTEST)
        to = sums + ((batch * chunks + chunk) * HEADS + head + j).to(tl.int64) * (SLICES * HEAD_WIDTH + SLICES + 1)
        own = (d - j * HEAD_WIDTH)[:, None]
        known = (m[None, :] < SLICES) & (own >= 0) & (own < HEAD_WIDTH)
        tl.store(to + m[None, :] * HEAD_WIDTH + own, sum_W[j] * cold, mask=known)
        db = first_row(sum_b[j])
        tl.store(to + SLICES * HEAD_WIDTH + m, db * cold, mask=m < SLICES)
        down = tl.sum(tl.sum(tl.where(known, tl.trans(routes[j]).to(tl.float32) * sum_W[j], 0.0), axis=1), axis=0)
        down += tl.sum(biases[j] * db, axis=0)
        warm = tl.load(tau + head + j).to(tl.float32)
        to = to + SLICES * HEAD_WIDTH + SLICES
        tl.store(to, tl.where((warm >= COLDEST) & (warm <= HOTTEST), -down * (LN2 * cold), 0.0))


class Sizes:
    """Sizes and tiles of one call; with `pairs`, two narrow heads share a tile."""

    def __init__(
        self, R_BNC: torch.Tensor, weight_MD: torch.Tensor, limits: tuple[float, float], pairs: bool = False
    ) -> None:
        self.batch_size, self.points, self.channels = R_BNC.shape
        self.slices, self.head_width = weight_MD.shape
        self.heads = self.channels // self.head_width
        narrow = self.heads % 2 == 0 and 2 * self.head_width <= tuning.SHARED_ROW
        self.tile_heads = 2 if pairs and narrow else 1
        self.tile_slices = tile_size(self.slices)
        self.tile_channels = tile_size(self.tile_heads * self.head_width)
        self.wide = self.tile_slices * self.tile_channels > tuning.WIDE_HEAD
        self.bytes, self.limits = R_BNC.element_size(), limits
        most = min(tuning.SLICE_POINTS, tile_size(self.points))
        share = triton.cdiv(self.points * self.batch_size * self.heads, tuning.SLICE_PROGRAMS)
        self.chunk = triton.cdiv(min(tuning.SLICE_LONGEST, max(share, most), self.points), most) * most
        self.chunks = triton.cdiv(self.points, self.chunk)
        # Heads first: those of the same points share lines of memory, so they should run at the same time.
        self.programs = (self.heads // self.tile_heads, self.chunks, self.batch_size)

    def tile(self, cut: tuple[int, int, int]) -> dict[str, Any]:
        """Constants of a kernel over points and slices whose tile is cut so: points, warps, stages."""
        points, warps, stages = cut
        sizes: dict[str, Any] = {"HEADS": self.heads, "HEAD_WIDTH": self.head_width, "SLICES": self.slices}
        sizes |= {"TILE_POINTS": min(points, tile_size(self.points)), "TILE_SLICES": self.tile_slices}
        sizes |= {"TILE_CHANNELS": self.tile_channels, "CHUNK": self.chunk, "PRECISION": dot_precision()}
        sizes |= {"COLDEST": self.limits[0], "HOTTEST": self.limits[1]}
        # Large heads need more warps to hold their sums.
        warps *= max(1, self.tile_slices * self.tile_channels // tuning.WIDE_HEAD)
        return {**sizes, "num_warps": min(tuning.MOST_WARPS, warps), "num_stages": stages}

    def sums(self, R: torch.Tensor, more: int = 0) -> torch.Tensor:
        """Room for sums over each chunk (B, H, chunks, M, D + more)."""
        shape = self.batch_size, self.heads, self.chunks, self.slices, self.head_width + more
        return torch.empty(shape, device=R.device, dtype=torch.float32)

    def routes(self, R: torch.Tensor) -> torch.Tensor:
        """Room for the gradients of W, b and tau from each chunk (B chunks, H, M D + M + 1)."""
        row = self.slices * self.head_width + self.slices + 1
        return torch.empty(self.batch_size * self.chunks, self.heads, row, device=R.device, dtype=torch.float32)


def route_gradients(
    routes: torch.Tensor, W: torch.Tensor, b: torch.Tensor, tau: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dW (M, D), db (M,) and dtau (H,) of what `Sizes.routes` has room for."""
    by_head = sum_partials(routes)
    dW, db, _ = sum_partials(by_head).split((W.numel(), len(b), 1))
    return dW.view(W.shape).to(W.dtype), db.to(b.dtype), by_head[:, -1].contiguous().to(tau.dtype)


class _Tiles:
    """Constants of the kernels of one call."""

    def __init__(self, sizes: Sizes) -> None:
        shared = {"TILE_HEADS": sizes.tile_heads}
        whole = {"WHOLE_CHUNKS": sizes.points % sizes.chunk == 0}
        self.deslice = sizes.tile(tuning.SLICE_TILES[sizes.bytes][sizes.wide]) | shared
        self.slice, self.backward = sizes.tile(tuning.SLICE_TILE) | shared | whole, self.deslice | whole
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
        parts = sizes.sums(R, more=1)
        _slice[sizes.programs](R, F, W, b, tau, parts, points, channels, chunks, WITH_MASS=True, **tiles.slice)
        heads = sizes.batch_size * sizes.heads
        Z, new = torch.empty(2, heads, *W.shape, device=R.device, dtype=torch.float32)
        mass = torch.empty(heads, sizes.slices, device=R.device, dtype=torch.float32)
        update[(heads,)](parts, wq, wk, wv, gamma, Z, mass, new, chunks, KIND=kind, EPS=EPSILON, **tiles.update)
        O, project = torch.empty_like(R), cast_weight(wo, R.dtype)
        _deslice[sizes.programs](R, W, b, tau, new, O, points, channels, **tiles.deslice)
        ctx.save_for_backward(R, F, W, b, tau, wq, wk, wv, gamma, project, Z, mass, new)
        ctx.kind, ctx.limits, ctx.types = kind, limits, (wo.dtype, bo.dtype)
        return torch.addmm(cast_weight(bo, R.dtype), O.view(-1, channels), project.T).view(R.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: torch.Tensor) -> Any:
        R, F, W, b, tau, wq, wk, wv, gamma, project, Z, mass, new = ctx.saved_tensors
        sizes = Sizes(R, W, ctx.limits, pairs=True)
        tiles, points, channels, chunks = _Tiles(sizes), sizes.points, sizes.channels, sizes.chunks
        rows = rows_of(do)
        dO = rows @ project
        dnew = sizes.sums(R)
        _slice[sizes.programs](R, dO, W, b, tau, dnew, points, channels, chunks, WITH_MASS=False, **tiles.slice)
        heads, weights = sizes.batch_size * sizes.heads, sizes.head_width**2
        G, g = torch.empty_like(Z), torch.empty_like(mass)
        attention = torch.empty(heads, 3 * weights + 1, device=R.device, dtype=torch.float32)
        update_backward[(heads,)](
            dnew, wq, wk, wv, gamma, Z, mass, G, g, attention, chunks, KIND=ctx.kind, **tiles.update
        )
        dR, dF, O, routes = torch.empty_like(R), torch.empty_like(F), torch.empty_like(R), sizes.routes(R)
        _backward[sizes.programs](
            R, F, dO, W, b, tau, new, G, g, dR, dF, O, routes, points, channels, chunks, **tiles.backward
        )

        def weight_gradients() -> list[torch.Tensor]:
            found = [*route_gradients(routes, W, b, tau)]
            if ctx.kind != "keep":
                *three, dgamma = sum_partials(attention).split((weights, weights, weights, 1))
                found += [one.view(wq.shape).to(wq.dtype) for one in three]
                found += [dgamma.to(gamma.dtype)] if ctx.kind == "residual" else []
            ends = zip(map_gradients(rows, O.view(-1, channels)), ctx.types, strict=True)
            return [*found, *(one.to(dtype) for one, dtype in ends)]

        *found, dwo, dbo = on_side_stream(weight_gradients, routes, attention, rows, O)
        return None, None, dR, dF, *found, *(None,) * (7 - len(found)), dwo, dbo


def slice_attention(
    R_BNC: torch.Tensor, F_BNC: torch.Tensor, route: SliceMap, attention: tuple[torch.Tensor, ...], project: Affine
) -> torch.Tensor:
    """R, F (B, N, C) -> o (B, N, C). `attention`: nothing (keep), W_q W_k W_v (replace), these and gamma (residual)."""
    kind = {0: "keep", 3: "replace", 4: "residual"}[len(attention)]
    weight = route.weight
    padded = (*attention, *(weight,) * (4 - len(attention)))  # what a kind does not have is not read
    ready = R_BNC.contiguous(), F_BNC.contiguous(), weight.contiguous(), route.bias, route.temperature
    return _SliceAttention.apply(kind, route.limits, *ready, *padded, *project)
