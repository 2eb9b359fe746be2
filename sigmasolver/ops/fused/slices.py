"""Slice attention from routed points to points, in one piece, without ever storing the routing P (N x heads x slices).

    P = softmax over slices of (R W + b) / tau      Z = P^T F / (mass + eps)      Z+ = update(Z)      o = P Z+ Wo^T + bo

    update:   residual Z + gamma Delta,   replace Delta,   keep Z      Delta = A V,  A = softmax(Q K^T / sqrt(D)),
              Q = Z Wq^T,  K = Z Wk^T,  V = Z Wv^T

Temperatures tau are clipped. P is made again, tile by tile, wherever it is needed. Backward there are two passes over
the points, with the update between them:

    dO = do Wo     dZ+ = P^T dO                                                            (as the slices are made)
    G = d(P^T F) = dZ / (mass + eps)     g = d(mass) = -sum_d dZ Z / (mass + eps)          (`slice_update`)
    dF = P G     dP = dO Z+^T + F G^T + g     dx = P (dP - sum_m P dP),  x = (R W + b) / tau
    dR = dx W^T / tau,  dW = R^T dx / tau,  db, dtau = -sum x dx / tau        O = P Z+,  dWo = do^T O

Rows of R and F get one more channel, which is 1: the sums of P F then hold the mass, the product R W the bias, and
R^T dx its gradient. It is 0 in rows beyond the last point, so that these count nowhere. W and b are divided by tau, and
turned into powers of 2, before they meet the points; sum x dx is the sum of (W, b) / tau times R^T dx. Sums over points
are made in chunks, then over chunks in a fixed order.

Letters: B batch, H heads, N points, M slices, D head width, C = H D channels; BN, BM, BD tile sizes.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from sigmasolver.ops.affine import Affine
from sigmasolver.ops.fused import dot_precision, shared_memory
from sigmasolver.ops.fused.lanes import aside
from sigmasolver.ops.fused.linear import map_gradients
from sigmasolver.ops.fused.rows import folded, rows_of
from sigmasolver.ops.fused.slice_update import update, update_backward
from sigmasolver.ops.fused.tables import narrowed
from sigmasolver.ops.slices import EPSILON, SliceMap

__all__ = ["fits", "shared_bytes", "slice_attention"]

LONGEST, PROGRAMS = 2048, 2048
"""Points of a chunk at most; programs that a pass is cut into at least, where there are points enough."""
LARGEST = 64
"""Points of the largest tile; chunks are whole multiples of it."""
SLICE, DESLICE, BACKWARD = (16, 1), (32, 2), (32, 2)
"""Points of a tile and warps of a program: few, so that small products hardly wait for each other at barriers."""
MOST, WIDEST, HEAVIEST = 128, 64, 4096
"""Slices, head width, and their product, both filled up, of the largest head: beyond, the update of its states takes
minutes to compile."""
WIDE = 2048
"""Numbers of a tile (BM x BD) beyond which float32 takes FEWER, as its operands fill the shared memory."""
FEWER = 16, 1
"""Points of a tile, stages of the pipeline."""
SHARED = {"bf16": (28, 26), "tf32": (58, 31), "tf32x3": (88, 54)}
"""Bytes of shared memory for each of these numbers at most, up to WIDE and beyond (tests/ops/test_compiled.py)."""
LOG2E, LN2 = tl.constexpr(1.4426950408889634), tl.constexpr(0.6931471805599453)


@triton.jit
def _points(X, rows, h, d, N, C, D: tl.constexpr, ONE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Channels of one head (BN, BD), with ONE a 1 behind the last."""
    x = tl.load(X + rows[:, None] * C + h * D + d[None, :], mask=(rows[:, None] < N) & (d[None, :] < D), other=0.0)
    if ONE:
        x = tl.where((d[None, :] == D) & (rows[:, None] < N), 1.0, x).to(X.dtype.element_ty)
    return x


@triton.jit
def _route_map(W, b, cold, d, m, D: tl.constexpr, M: tl.constexpr):  # type: ignore[no-untyped-def]
    """(BM, BD): W, and the bias behind its last column, both over tau and for powers of 2."""
    w = tl.load(W + m[:, None] * D + d[None, :], mask=(m[:, None] < M) & (d[None, :] < D), other=0.0).to(tl.float32)
    bias = tl.load(b + m, mask=m < M, other=0.0).to(tl.float32)
    return tl.where(d[None, :] == D, bias[:, None], w) * (cold * LOG2E)


@triton.jit
def _states(Z, head, d, m, D: tl.constexpr, M: tl.constexpr):  # type: ignore[no-untyped-def]
    """(BM, BD) of one head."""
    return tl.load(Z + (head * M + m[:, None]) * D + d[None, :], mask=(m[:, None] < M) & (d[None, :] < D), other=0.0)


@triton.jit
def _coldness(tau, COLDEST: tl.constexpr, HOTTEST: tl.constexpr):  # type: ignore[no-untyped-def]
    """1 / temperature, clipped; a NaN stays one."""
    warm = tl.maximum(tl.load(tau).to(tl.float32), COLDEST, propagate_nan=tl.PropagateNan.ALL)
    return 1 / tl.minimum(warm, HOTTEST, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _softmax(x, known, axis: tl.constexpr, FULL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Over the slices, of powers of 2; not FULL: some lines of the tile are beyond the last slice."""
    if not FULL:
        x = tl.where(known, x, float("-inf"))
    e = tl.exp2(x - tl.expand_dims(tl.max(x, axis=axis), axis))
    root = tl.rsqrt(tl.sum(e, axis=axis))  # squared cheaper than a division
    return e * tl.expand_dims(root * root, axis)


@triton.jit
def _slice(  # type: ignore[no-untyped-def]
    R, F, W, b, tau, S, N, C, chunks,
    H: tl.constexpr, D: tl.constexpr, M: tl.constexpr, MASS: tl.constexpr,
    COLDEST: tl.constexpr, HOTTEST: tl.constexpr,
    BN: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, SPAN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """S (B, H, chunks, M, D + MASS): sums of P^T F, last of the mass. P is made turned, as its product needs it."""
    h, chunk, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    R += batch.to(tl.int64) * N * C
    F += batch.to(tl.int64) * N * C
    d, m = tl.arange(0, BD), tl.arange(0, BM)
    w = _route_map(W, b, _coldness(tau + h, COLDEST, HOTTEST), d, m, D, M).to(R.dtype.element_ty)
    total = tl.zeros((BM, BD), tl.float32)
    for start in range(0, SPAN, BN):
        rows = chunk * SPAN + start + tl.arange(0, BN)
        r, f = _points(R, rows, h, d, N, C, D, True), _points(F, rows, h, d, N, C, D, MASS)
        x = tl.dot(w, tl.trans(r), input_precision=PRECISION)
        p = _softmax(x, m[:, None] < M, 0, BM == M).to(f.dtype)
        total = tl.dot(p, f, total, input_precision=PRECISION)
    S += ((((batch * H + h) * chunks + chunk).to(tl.int64) * M + m) * (D + MASS))[:, None]
    tl.store(S + d[None, :], total, mask=(m[:, None] < M) & (d[None, :] < D + MASS))


@triton.jit
def _deslice(  # type: ignore[no-untyped-def]
    R, W, b, tau, new, O, N, C,
    H: tl.constexpr, D: tl.constexpr, M: tl.constexpr, COLDEST: tl.constexpr, HOTTEST: tl.constexpr,
    BN: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, SPAN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """O = P Z+ of one head."""
    h, chunk, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    R += batch.to(tl.int64) * N * C
    O += batch.to(tl.int64) * N * C
    d, m = tl.arange(0, BD), tl.arange(0, BM)
    w = tl.trans(_route_map(W, b, _coldness(tau + h, COLDEST, HOTTEST), d, m, D, M)).to(R.dtype.element_ty)
    z = _states(new, batch * H + h, d, m, D, M).to(R.dtype.element_ty)
    for start in range(0, SPAN, BN):
        rows = chunk * SPAN + start + tl.arange(0, BN)
        x = tl.dot(_points(R, rows, h, d, N, C, D, True), w, input_precision=PRECISION)
        p = _softmax(x, m[None, :] < M, 1, BM == M).to(z.dtype)
        o = tl.dot(p, z, input_precision=PRECISION)
        keep = (rows[:, None] < N) & (d[None, :] < D)
        tl.store(O + rows[:, None] * C + h * D + d[None, :], o.to(O.dtype.element_ty), mask=keep)


@triton.jit
def _backward(  # type: ignore[no-untyped-def]
    R, F, dO, W, b, tau, new, G, g, dR, dF, O, sums, N, C, chunks,
    H: tl.constexpr, D: tl.constexpr, M: tl.constexpr, COLDEST: tl.constexpr, HOTTEST: tl.constexpr,
    BN: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, SPAN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dR, dF and, made again, O. A row of `sums`: dW (M, D), db (M), dtau."""
    h, chunk, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = batch.to(tl.int64) * N * C
    d, m = tl.arange(0, BD), tl.arange(0, BM)
    cold = _coldness(tau + h, COLDEST, HOTTEST)
    route = _route_map(W, b, cold, d, m, D, M).to(R.dtype.element_ty)
    turned = tl.trans(route)
    z = _states(new, batch * H + h, d, m, D, M).to(R.dtype.element_ty)
    states = _states(G, batch * H + h, d, m, D, M).to(R.dtype.element_ty)
    turned_z, turned_states = tl.trans(z), tl.trans(states)
    g_M = tl.load(g + (batch * H + h) * M + m, mask=m < M, other=0.0)
    sum_W = tl.zeros((BD, BM), tl.float32)
    for start in range(0, SPAN, BN):
        rows = chunk * SPAN + start + tl.arange(0, BN)
        r = _points(R + first, rows, h, d, N, C, D, True)
        f, do = _points(F + first, rows, h, d, N, C, D, False), _points(dO + first, rows, h, d, N, C, D, False)
        p = _softmax(tl.dot(r, turned, input_precision=PRECISION), m[None, :] < M, 1, BM == M)
        dP = tl.dot(f, turned_states, input_precision=PRECISION)
        dP = tl.dot(do, turned_z, dP, input_precision=PRECISION) + g_M[None, :]
        narrow = p.to(f.dtype)
        weighed = p * dP
        dx = (weighed - p * tl.sum(weighed, axis=1)[:, None]).to(f.dtype)
        sum_W = tl.dot(tl.trans(r), dx, sum_W, input_precision=PRECISION)
        keep = (rows[:, None] < N) & (d[None, :] < D)
        place = first + rows[:, None] * C + h * D + d[None, :]
        dr = tl.dot(dx, route, input_precision=PRECISION) * LN2
        tl.store(dR + place, dr.to(dR.dtype.element_ty), mask=keep)
        df = tl.dot(narrow, states, input_precision=PRECISION)
        tl.store(dF + place, df.to(dF.dtype.element_ty), mask=keep)
        o = tl.dot(narrow, z, input_precision=PRECISION)
        tl.store(O + place, o.to(O.dtype.element_ty), mask=keep)
    sums += ((batch * chunks + chunk) * H + h).to(tl.int64) * (M * D + M + 1)
    to = tl.where(d[:, None] < D, m[None, :] * D + d[:, None], M * D + m[None, :])
    tl.store(sums + to, sum_W * cold, mask=(m[None, :] < M) & (d[:, None] <= D))
    warm = tl.load(tau + h).to(tl.float32)
    down = -tl.sum(tl.sum(turned.to(tl.float32) * sum_W, axis=1), axis=0) * (LN2 * cold)
    dtau = tl.where((warm >= COLDEST) & (warm <= HOTTEST), down, 0.0)
    tl.store(sums + M * D + M, dtau)


def _filled(size: int) -> int:
    """A matrix unit multiplies tiles of at least 16; what lies beyond the size is masked."""
    return max(16, triton.next_power_of_2(size))


def _kind(x: torch.Tensor) -> str:
    return "bf16" if x.element_size() == 2 else dot_precision()


class _Plan:
    """Sizes and tiles of one call."""

    def __init__(self, R_BNC: torch.Tensor, weight_MD: torch.Tensor, limits: tuple[float, float]) -> None:
        self.B, self.N, self.C = R_BNC.shape
        self.M, self.D = weight_MD.shape
        self.limits = {"COLDEST": limits[0], "HOTTEST": limits[1]}
        self.H = self.C // self.D
        self.BM, self.BD = _filled(self.M), _filled(self.D + 1)
        most = min(LARGEST, _filled(self.N))
        span = triton.cdiv(self.N * self.B * self.H, PROGRAMS)
        self.span = triton.cdiv(min(LONGEST, max(span, most), self.N), most) * most
        self.chunks = triton.cdiv(self.N, self.span)
        # Heads first: those of the same points share lines of memory, so they should run at the same time.
        self.passes = (self.H, self.chunks, self.B)
        self.fewer = _kind(R_BNC) != "bf16" and self.BM * self.BD > WIDE
        BD = _filled(self.D)
        self.small: dict[str, Any] = {"D": self.D, "M": self.M, "BM": self.BM, "BD": BD, "ROOT": 1 / math.sqrt(self.D)}
        self.small["num_warps"] = 4 if self.BM * BD <= 1024 else 8

    def tiles(self, points: int, warps: int) -> dict[str, Any]:
        points, stages = FEWER if self.fewer else (min(points, _filled(self.N)), 3)
        sizes: dict[str, Any] = {"H": self.H, "D": self.D, "M": self.M, "BM": self.BM, "BD": self.BD, "SPAN": self.span}
        # Large heads need more warps to hold their sums.
        sizes |= {"num_warps": min(8, warps * max(1, self.BM * self.BD // 1024)), "num_stages": stages}
        return {**sizes, **self.limits, "BN": points, "PRECISION": dot_precision()}


class _SliceAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, kind: str, limits: tuple[float, float], R: torch.Tensor, F: torch.Tensor,
        W: torch.Tensor, b: torch.Tensor, tau: torch.Tensor,
        wq: torch.Tensor, wk: torch.Tensor, wv: torch.Tensor, gamma: torch.Tensor, wo: torch.Tensor, bo: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        plan = _Plan(R, W, limits)
        B, N, C, H, D, M = plan.B, plan.N, plan.C, plan.H, plan.D, plan.M
        parts = torch.empty(B * H, plan.chunks, M, D + 1, device=R.device, dtype=torch.float32)
        _slice[plan.passes](R, F, W, b, tau, parts, N, C, plan.chunks, MASS=True, **plan.tiles(*SLICE))
        Z, new = torch.empty(2, B * H, M, D, device=R.device, dtype=torch.float32)
        mass = torch.empty(B * H, M, device=R.device, dtype=torch.float32)
        update[(B * H,)](parts, wq, wk, wv, gamma, Z, mass, new, plan.chunks, KIND=kind, EPS=EPSILON, **plan.small)
        O, project = torch.empty_like(R), narrowed(wo, R.dtype)
        _deslice[plan.passes](R, W, b, tau, new, O, N, C, **plan.tiles(*DESLICE))
        ctx.save_for_backward(R, F, W, b, tau, wq, wk, wv, gamma, project, Z, mass, new)
        ctx.kind, ctx.limits, ctx.kinds = kind, limits, (wo.dtype, bo.dtype)
        return torch.addmm(narrowed(bo, R.dtype), O.view(-1, C), project.T).view(R.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: torch.Tensor) -> Any:
        R, F, W, b, tau, wq, wk, wv, gamma, project, Z, mass, new = ctx.saved_tensors
        plan = _Plan(R, W, ctx.limits)
        B, N, C, H, D, M, chunks = plan.B, plan.N, plan.C, plan.H, plan.D, plan.M, plan.chunks
        wide = {"device": R.device, "dtype": torch.float32}
        rows = rows_of(do)
        dO = rows @ project
        dnew = torch.empty(B * H, chunks, M, D, **wide)
        _slice[plan.passes](R, dO, W, b, tau, dnew, N, C, chunks, MASS=False, **plan.tiles(*SLICE))
        G, g = torch.empty_like(Z), torch.empty_like(mass)
        attention = torch.empty(B * H, 3 * D * D + 1, **wide)
        update_backward[(B * H,)](
            dnew, wq, wk, wv, gamma, Z, mass, G, g, attention, chunks, KIND=ctx.kind, **plan.small
        )
        dR, dF, O = torch.empty_like(R), torch.empty_like(F), torch.empty_like(R)
        routes = torch.empty(B * chunks, H, M * D + M + 1, **wide)
        _backward[plan.passes](R, F, dO, W, b, tau, new, G, g, dR, dF, O, routes, N, C, chunks, **plan.tiles(*BACKWARD))

        def maps() -> list[torch.Tensor]:
            by_head = folded(routes)
            dW, db, _ = folded(by_head).split((M * D, M, 1))
            found = [dW.view(M, D).to(W.dtype), db.to(b.dtype), by_head[:, -1].contiguous().to(tau.dtype)]
            if ctx.kind != "keep":
                *three, dgamma = folded(attention).split((D * D, D * D, D * D, 1))
                found += [one.view(D, D).to(wq.dtype) for one in three]
                found += [dgamma.to(gamma.dtype)] if ctx.kind == "residual" else []
            ends = zip(map_gradients(rows, O.view(-1, C)), ctx.kinds, strict=True)
            return [*found, *(one.to(kind) for one, kind in ends)]

        *found, dwo, dbo = aside(maps, routes, attention, rows, O)
        return None, None, dR, dF, *found, *(None,) * (7 - len(found)), dwo, dbo


def fits(R: torch.Tensor, heads: int, slices: int) -> bool:
    """Whether R (B, ..., C) has heads that a program can hold, on its device and in its type."""
    D = R.shape[-1] // heads
    small = slices <= MOST and D <= WIDEST and _filled(slices) * _filled(D) <= HEAVIEST
    return small and (not R.is_cuda or shared_bytes(_kind(R), slices, D) <= shared_memory(R))


def shared_bytes(kind: str, M: int, D: int) -> int:
    """What no program needs more than: the tiles of points and slices, or the matrices of the update."""
    BM, BD, tile = _filled(M), _filled(D), _filled(M) * _filled(D + 1)
    return max(SHARED[kind][tile > WIDE] * tile, 8 * BM * BM + 16 * BM * BD + 4 * BD * BD)


def slice_attention(
    R_BNC: torch.Tensor, F_BNC: torch.Tensor, route: SliceMap, attention: tuple[torch.Tensor, ...], project: Affine
) -> torch.Tensor:
    """R, F (B, N, C) -> o (B, N, C). `attention`: nothing (keep), W_q W_k W_v (replace), these and gamma (residual)."""
    kind = {0: "keep", 3: "replace", 4: "residual"}[len(attention)]
    weight = route.weight
    filled = (*attention, *(weight,) * (4 - len(attention)))  # what a kind does not have is not read
    ready = R_BNC.contiguous(), F_BNC.contiguous(), weight.contiguous(), route.bias, route.temperature
    return _SliceAttention.apply(kind, route.limits, *ready, *filled, *project)
