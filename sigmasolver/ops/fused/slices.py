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

Letters: B batch, H heads, N points, M slices, D head width, C = H D channels; J heads of a program. A tile has ROWS
points, SLICES and COLUMNS of the two other widths.
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

__all__ = ["LN2", "coldness", "load_points", "load_route", "load_states", "slice_attention", "slice_softmax"]

LOG2E, LN2 = tl.constexpr(1.4426950408889634), tl.constexpr(0.6931471805599453)


@triton.jit
def load_points(
    X: tl.tensor, rows: tl.tensor, first: tl.tensor, d: tl.tensor, N: tl.tensor, C: tl.tensor, WIDTH: tl.constexpr
) -> tl.tensor:
    """Rows of X (N, C): channels of the heads of a program (ROWS, COLUMNS)."""
    keep = (rows[:, None] < N) & (d[None, :] < WIDTH)
    return tl.load(X + rows[:, None] * C + first + d[None, :], mask=keep, other=0.0)


@triton.jit
def load_states(
    Z: tl.tensor, head: tl.tensor, j: tl.constexpr, d: tl.tensor, m: tl.tensor, D: tl.constexpr, M: tl.constexpr
) -> tl.tensor:
    """(SLICES, COLUMNS) of one head of Z (heads, M, D), with zeros where the program has the channels of others."""
    own = d - j * D
    keep = (m[:, None] < M) & (own >= 0)[None, :] & (own < D)[None, :]
    return tl.load(Z + (head * M + m[:, None]) * D + own[None, :], mask=keep, other=0.0)


@triton.jit
def load_route(
    W: tl.tensor, b: tl.tensor, cold: tl.tensor, j: tl.constexpr,
    d: tl.tensor, m: tl.tensor, D: tl.constexpr, M: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """(SLICES, COLUMNS) and (SLICES,): W and b over tau, for powers of 2."""
    scale = cold * LOG2E
    bias = tl.load(b + m, mask=m < M, other=0.0).to(tl.float32)
    return load_states(W, 0, j, d, m, D, M).to(tl.float32) * scale, bias * scale


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
def _slice(
    R: tl.tensor, F: tl.tensor, W: tl.tensor, b: tl.tensor, tau: tl.tensor, S: tl.tensor,
    N: tl.tensor, C: tl.tensor, chunks: tl.tensor,
    H: tl.constexpr, D: tl.constexpr, M: tl.constexpr, WITH_MASS: tl.constexpr, J: tl.constexpr, EVEN: tl.constexpr,
    COLDEST: tl.constexpr, HOTTEST: tl.constexpr,
    ROWS: tl.constexpr, SLICES: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """S (B, H, chunks, M, D + WITH_MASS): sums of P^T F, last of the mass. R, F (B, N, C), W (M, D), b (M), tau (H).

    P is made transposed, as its product needs it."""
    head, chunk, batch = tl.program_id(0) * J, tl.program_id(1), tl.program_id(2)
    R += batch.to(tl.int64) * N * C
    F += batch.to(tl.int64) * N * C
    d, m = tl.arange(0, COLUMNS), tl.arange(0, SLICES)
    ones = tl.full((ROWS, 16), 1.0, F.dtype.element_ty)
    maps: tl.tuple = ()
    biases: tl.tuple = ()
    for j in tl.static_range(J):
        w, bias = load_route(W, b, coldness(tau + head + j, COLDEST, HOTTEST), j, d, m, D, M)
        maps += (w.to(R.dtype.element_ty),)
        biases += (bias,)
    totals = (tl.zeros((SLICES, COLUMNS), tl.float32),) * J
    masses = (tl.zeros((SLICES, 16), tl.float32),) * J
    for start in range(0, CHUNK, ROWS):
        rows = chunk * CHUNK + start + tl.arange(0, ROWS)
        r = load_points(R, rows, head * D, d, N, C, J * D)
        f = load_points(F, rows, head * D, d, N, C, J * D)
        for j in tl.static_range(J):
            x = tl.dot(maps[j], tl.trans(r), input_precision=PRECISION) + biases[j][:, None]
            p = slice_softmax(x, m[:, None] < M, 0, SLICES == M)
            if WITH_MASS and not EVEN:
                p = tl.where((rows < N)[None, :], p, 0.0)
            p = p.to(f.dtype)
            totals = replaced(totals, j, tl.dot(p, f, totals[j], input_precision=PRECISION))
            if WITH_MASS:
                masses = replaced(masses, j, tl.dot(p, ones, masses[j], input_precision=PRECISION))
    for j in tl.static_range(J):
        to = S + ((((batch * H + head + j) * chunks + chunk).to(tl.int64) * M + m) * (D + WITH_MASS))[:, None]
        own = (d - j * D)[None, :]
        tl.store(to + own, totals[j], mask=(m[:, None] < M) & (own >= 0) & (own < D))
        if WITH_MASS:
            one = tl.arange(0, 16)[None, :]
            tl.store(to + D + one, masses[j], mask=(m[:, None] < M) & (one == 0))


@triton.jit
def _deslice(
    R: tl.tensor, W: tl.tensor, b: tl.tensor, tau: tl.tensor, new: tl.tensor, O: tl.tensor,
    N: tl.tensor, C: tl.tensor,
    H: tl.constexpr, D: tl.constexpr, M: tl.constexpr, J: tl.constexpr, COLDEST: tl.constexpr, HOTTEST: tl.constexpr,
    ROWS: tl.constexpr, SLICES: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """O (B, N, C) = P Z+ of the heads of a program; `new` (B H, M, D) is Z+."""
    head, chunk, batch = tl.program_id(0) * J, tl.program_id(1), tl.program_id(2)
    R += batch.to(tl.int64) * N * C
    O += batch.to(tl.int64) * N * C
    d, m = tl.arange(0, COLUMNS), tl.arange(0, SLICES)
    maps: tl.tuple = ()
    biases: tl.tuple = ()
    states: tl.tuple = ()
    for j in tl.static_range(J):
        w, bias = load_route(W, b, coldness(tau + head + j, COLDEST, HOTTEST), j, d, m, D, M)
        maps += (tl.trans(w).to(R.dtype.element_ty),)
        biases += (bias,)
        states += (load_states(new, batch * H + head + j, j, d, m, D, M).to(R.dtype.element_ty),)
    for start in range(0, CHUNK, ROWS):
        rows = chunk * CHUNK + start + tl.arange(0, ROWS)
        r = load_points(R, rows, head * D, d, N, C, J * D)
        o = tl.zeros((ROWS, COLUMNS), tl.float32)
        for j in tl.static_range(J):
            x = tl.dot(r, maps[j], input_precision=PRECISION) + biases[j][None, :]
            p = slice_softmax(x, m[None, :] < M, 1, SLICES == M).to(r.dtype)
            o = tl.dot(p, states[j], o, input_precision=PRECISION)
        keep = (rows[:, None] < N) & (d[None, :] < J * D)
        tl.store(O + rows[:, None] * C + head * D + d[None, :], o.to(O.dtype.element_ty), mask=keep)


@triton.jit
def _backward(
    R: tl.tensor, F: tl.tensor, dO: tl.tensor, W: tl.tensor, b: tl.tensor, tau: tl.tensor, new: tl.tensor,
    G: tl.tensor, g: tl.tensor, dR: tl.tensor, dF: tl.tensor, O: tl.tensor, sums: tl.tensor,
    N: tl.tensor, C: tl.tensor, chunks: tl.tensor,
    H: tl.constexpr, D: tl.constexpr, M: tl.constexpr, J: tl.constexpr, EVEN: tl.constexpr,
    COLDEST: tl.constexpr, HOTTEST: tl.constexpr,
    ROWS: tl.constexpr, SLICES: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """dR, dF and, recomputed, O, all (B, N, C) as R, F and dO. `new` = Z+ and G (B H, M, D), g (B H, M).

        dP = dO Z+^T + F G^T + g      dx = P (dP - sum_m P dP)      dR = dx W^T / tau      dF = P G      O = P Z+

    A row of `sums` (B, chunks, H): dW (M, D) = R^T dx / tau, db (M) = sum dx / tau, dtau = -sum x dx / tau."""
    head, chunk, batch = tl.program_id(0) * J, tl.program_id(1), tl.program_id(2)
    first = batch.to(tl.int64) * N * C
    d, m = tl.arange(0, COLUMNS), tl.arange(0, SLICES)
    ones = tl.full((16, ROWS), 1.0, R.dtype.element_ty)
    routes: tl.tuple = ()
    biases: tl.tuple = ()
    zs: tl.tuple = ()
    states: tl.tuple = ()
    shifts: tl.tuple = ()
    for j in tl.static_range(J):
        w, bias = load_route(W, b, coldness(tau + head + j, COLDEST, HOTTEST), j, d, m, D, M)
        routes += (w.to(R.dtype.element_ty),)
        biases += (bias,)
        zs += (load_states(new, batch * H + head + j, j, d, m, D, M).to(R.dtype.element_ty),)
        states += (load_states(G, batch * H + head + j, j, d, m, D, M).to(R.dtype.element_ty),)
        shifts += (tl.load(g + (batch * H + head + j) * M + m, mask=m < M, other=0.0),)
    sum_W = (tl.zeros((COLUMNS, SLICES), tl.float32),) * J
    sum_b = (tl.zeros((16, SLICES), tl.float32),) * J
    for start in range(0, CHUNK, ROWS):
        rows = chunk * CHUNK + start + tl.arange(0, ROWS)
        r = load_points(R + first, rows, head * D, d, N, C, J * D)
        f = load_points(F + first, rows, head * D, d, N, C, J * D)
        do = load_points(dO + first, rows, head * D, d, N, C, J * D)
        dr = tl.zeros((ROWS, COLUMNS), tl.float32)
        df = tl.zeros((ROWS, COLUMNS), tl.float32)
        o = tl.zeros((ROWS, COLUMNS), tl.float32)
        for j in tl.static_range(J):
            x = tl.dot(r, tl.trans(routes[j]), input_precision=PRECISION) + biases[j][None, :]
            p = slice_softmax(x, m[None, :] < M, 1, SLICES == M)
            if not EVEN:
                p = tl.where((rows < N)[:, None], p, 0.0)
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
        keep = (rows[:, None] < N) & (d[None, :] < J * D)
        offsets = first + rows[:, None] * C + head * D + d[None, :]
        tl.store(dR + offsets, (dr * LN2).to(dR.dtype.element_ty), mask=keep)
        tl.store(dF + offsets, df.to(dF.dtype.element_ty), mask=keep)
        tl.store(O + offsets, o.to(O.dtype.element_ty), mask=keep)
    for j in tl.static_range(J):
        cold = coldness(tau + head + j, COLDEST, HOTTEST)
        to = sums + ((batch * chunks + chunk) * H + head + j).to(tl.int64) * (M * D + M + 1)
        own = (d - j * D)[:, None]
        known = (m[None, :] < M) & (own >= 0) & (own < D)
        tl.store(to + m[None, :] * D + own, sum_W[j] * cold, mask=known)
        db = tl.sum(tl.where(tl.arange(0, 16)[:, None] == 0, sum_b[j], 0.0), axis=0)
        tl.store(to + M * D + m, db * cold, mask=m < M)
        down = tl.sum(tl.sum(tl.where(known, tl.trans(routes[j]).to(tl.float32) * sum_W[j], 0.0), axis=1), axis=0)
        down += tl.sum(biases[j] * db, axis=0)
        warm = tl.load(tau + head + j).to(tl.float32)
        tl.store(to + M * D + M, tl.where((warm >= COLDEST) & (warm <= HOTTEST), -down * (LN2 * cold), 0.0))


class _Sizes:
    """Sizes and tiles of one call."""

    def __init__(self, R_BNC: torch.Tensor, weight_MD: torch.Tensor, limits: tuple[float, float]) -> None:
        self.B, self.N, self.C = R_BNC.shape
        self.M, self.D = weight_MD.shape
        self.limits = {"COLDEST": limits[0], "HOTTEST": limits[1]}
        self.H = self.C // self.D
        self.J = 2 if self.H % 2 == 0 and 2 * self.D <= tuning.SHARED_ROW else 1
        self.slices, self.columns = tile_size(self.M), tile_size(self.J * self.D)
        most = min(tuning.SLICE_POINTS, tile_size(self.N))
        points = triton.cdiv(self.N * self.B * self.H, tuning.SLICE_PROGRAMS)
        self.chunk = triton.cdiv(min(tuning.SLICE_LONGEST, max(points, most), self.N), most) * most
        self.chunks = triton.cdiv(self.N, self.chunk)
        # Heads first: those of the same points share lines of memory, so they should run at the same time.
        self.programs = (self.H // self.J, self.chunks, self.B)
        self.even = {"EVEN": self.N % self.chunk == 0}
        wide = self.slices * self.columns > tuning.WIDE_HEAD
        float32 = tuning.SLICE_WIDE_FLOAT32 if wide else tuning.SLICE_FLOAT32
        self.others = self.tile(*(tuning.SLICE_BF16 if R_BNC.element_size() == 2 else float32))
        self.slicing = self.tile(*tuning.SLICE_TILE)
        columns = tile_size(self.D)
        self.update: dict[str, Any] = {"D": self.D, "M": self.M, "SLICES": self.slices, "COLUMNS": columns}
        self.update |= {"ROOT": 1 / math.sqrt(self.D), "num_warps": 4 if self.slices * columns <= 1024 else 8}

    def tile(self, points: int, warps: int, stages: int) -> dict[str, Any]:
        sizes: dict[str, Any] = {"H": self.H, "D": self.D, "M": self.M, "J": self.J, "CHUNK": self.chunk}
        sizes |= {"ROWS": min(points, tile_size(self.N)), "SLICES": self.slices, "COLUMNS": self.columns}
        # Large heads need more warps to hold their sums.
        sizes |= {"num_warps": min(8, warps * max(1, self.slices * self.columns // 1024)), "num_stages": stages}
        return {**sizes, **self.limits, "PRECISION": dot_precision()}


class _SliceAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, kind: str, limits: tuple[float, float], R: torch.Tensor, F: torch.Tensor,
        W: torch.Tensor, b: torch.Tensor, tau: torch.Tensor,
        wq: torch.Tensor, wk: torch.Tensor, wv: torch.Tensor, gamma: torch.Tensor, wo: torch.Tensor, bo: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        sizes = _Sizes(R, W, limits)
        B, N, C, H, D, M = sizes.B, sizes.N, sizes.C, sizes.H, sizes.D, sizes.M
        parts = torch.empty(B * H, sizes.chunks, M, D + 1, device=R.device, dtype=torch.float32)
        _slice[sizes.programs](
            R, F, W, b, tau, parts, N, C, sizes.chunks, WITH_MASS=True, **sizes.even, **sizes.slicing
        )
        Z, new = torch.empty(2, B * H, M, D, device=R.device, dtype=torch.float32)
        mass = torch.empty(B * H, M, device=R.device, dtype=torch.float32)
        update[(B * H,)](parts, wq, wk, wv, gamma, Z, mass, new, sizes.chunks, KIND=kind, EPS=EPSILON, **sizes.update)
        O, project = torch.empty_like(R), cast_weight(wo, R.dtype)
        _deslice[sizes.programs](R, W, b, tau, new, O, N, C, **sizes.others)
        ctx.save_for_backward(R, F, W, b, tau, wq, wk, wv, gamma, project, Z, mass, new)
        ctx.kind, ctx.limits, ctx.types = kind, limits, (wo.dtype, bo.dtype)
        return torch.addmm(cast_weight(bo, R.dtype), O.view(-1, C), project.T).view(R.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: torch.Tensor) -> Any:
        R, F, W, b, tau, wq, wk, wv, gamma, project, Z, mass, new = ctx.saved_tensors
        sizes = _Sizes(R, W, ctx.limits)
        B, N, C, H, D, M, chunks = sizes.B, sizes.N, sizes.C, sizes.H, sizes.D, sizes.M, sizes.chunks
        wide = {"device": R.device, "dtype": torch.float32}
        rows = rows_of(do)
        dO = rows @ project
        dnew = torch.empty(B * H, chunks, M, D, **wide)
        _slice[sizes.programs](R, dO, W, b, tau, dnew, N, C, chunks, WITH_MASS=False, **sizes.even, **sizes.slicing)
        G, g = torch.empty_like(Z), torch.empty_like(mass)
        attention = torch.empty(B * H, 3 * D * D + 1, **wide)
        update_backward[(B * H,)](
            dnew, wq, wk, wv, gamma, Z, mass, G, g, attention, chunks, KIND=ctx.kind, **sizes.update
        )
        dR, dF, O = torch.empty_like(R), torch.empty_like(F), torch.empty_like(R)
        routes = torch.empty(B * chunks, H, M * D + M + 1, **wide)
        _backward[sizes.programs](
            R, F, dO, W, b, tau, new, G, g, dR, dF, O, routes, N, C, chunks, **sizes.even, **sizes.others
        )

        def weight_gradients() -> list[torch.Tensor]:
            by_head = sum_partials(routes)
            dW, db, _ = sum_partials(by_head).split((M * D, M, 1))
            found = [dW.view(M, D).to(W.dtype), db.to(b.dtype), by_head[:, -1].contiguous().to(tau.dtype)]
            if ctx.kind != "keep":
                *three, dgamma = sum_partials(attention).split((D * D, D * D, D * D, 1))
                found += [one.view(D, D).to(wq.dtype) for one in three]
                found += [dgamma.to(gamma.dtype)] if ctx.kind == "residual" else []
            ends = zip(map_gradients(rows, O.view(-1, C)), ctx.types, strict=True)
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
