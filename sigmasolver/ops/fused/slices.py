"""Slice attention from routed points to points, in one piece, without ever storing the routing P (N x heads x slices).

    P = softmax over slices of (R W + b) / tau      Z = P^T F / (mass + eps)      Z+ = update(Z)      o = P Z+ Wo^T + bo

    update:   residual Z + gamma Delta,   replace Delta,   keep Z      Delta = A V,  A = softmax(Q K^T / sqrt(D)),
              Q = Z Wq^T,  K = Z Wk^T,  V = Z Wv^T

P is made again, tile by tile, wherever it is needed. Backward, first along the way out, then through the update, then
along the way in:

    dO = do Wo     dWo = do^T O     dZ+ = P^T dO     dP = dO Z+^T
    G = d(P^T F) = dZ / (mass + eps)     g = d(mass) = -sum_d dZ Z / (mass + eps)     dF = P G     dP = F G^T + g
    dx = P (dP - sum_m P dP),  x = (R W + b) / tau:   dR = dx W^T / tau,  dW = R^T dx / tau,  db, dtau = -sum x dx / tau

Sums over points are made in chunks, then over chunks in a fixed order.

Letters: B batch, H heads, N points, M slices, D head width, C = H D channels; BN, BM, BD, BC tile sizes.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from sigmasolver.ops.affine import Affine
from sigmasolver.ops.fused import dot_precision
from sigmasolver.ops.fused.rows import folded
from sigmasolver.ops.fused.slice_update import update, update_backward
from sigmasolver.ops.slices import EPSILON, SliceMap

__all__ = ["slice_attention"]

LONGEST, PROGRAMS = 2048, 2048
"""Points of a chunk at most; programs that a pass is cut into at least, where there are points enough."""
LARGEST = 128
"""Points of the largest tile; chunks are whole multiples of it."""


@triton.jit
def _route_map(W, b, tau, h, d, m, D: tl.constexpr, M: tl.constexpr):  # type: ignore[no-untyped-def]
    """W (BD, BM), bias and 1 / tau of one head."""
    w = tl.load(W + m[None, :] * D + d[:, None], mask=(d[:, None] < D) & (m[None, :] < M), other=0.0)
    return w, tl.load(b + m, mask=m < M, other=0.0).to(tl.float32), 1 / tl.load(tau + h).to(tl.float32)


@triton.jit
def _routing(r, w, bias, cold, m, alive, M: tl.constexpr, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """One tile: x = (R W + b) / tau and P, both (BN, BM) in float32; rows that are not `alive` have P = 0."""
    x = (tl.dot(r, w.to(r.dtype), input_precision=PRECISION) + bias[None, :]) * cold
    x = tl.where(m[None, :] < M, x, float("-inf"))
    e = tl.exp(x - tl.max(x, axis=1)[:, None])
    p = e * (1 / tl.sum(e, axis=1))[:, None]
    return tl.where(m[None, :] < M, x, 0.0), tl.where(alive[:, None], p, 0.0)


@triton.jit
def _slice(  # type: ignore[no-untyped-def]
    R, F, W, b, tau, S, N, C, chunks,
    H: tl.constexpr, D: tl.constexpr, M: tl.constexpr,
    BN: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, SPAN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """S (B, H, chunks, M, D + 1): sums of P^T F and, last, of the mass."""
    chunk, h, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    R += batch.to(tl.int64) * N * C
    F += batch.to(tl.int64) * N * C
    d, m = tl.arange(0, BD), tl.arange(0, BM)
    w, bias, cold = _route_map(W, b, tau, h, d, m, D, M)
    total, weight = tl.zeros((BM, BD), tl.float32), tl.zeros((BM,), tl.float32)
    for start in range(0, SPAN, BN):
        rows = chunk * SPAN + start + tl.arange(0, BN)
        keep = (rows[:, None] < N) & (d[None, :] < D)
        place = rows[:, None] * C + h * D + d[None, :]
        r = tl.load(R + place, mask=keep, other=0.0)
        f = tl.load(F + place, mask=keep, other=0.0)
        p = _routing(r, w, bias, cold, m, rows < N, M, PRECISION)[1]
        total += tl.dot(tl.trans(p).to(f.dtype), f, input_precision=PRECISION)
        weight += tl.sum(p, axis=0)
    S += (((batch * H + h) * chunks + chunk).to(tl.int64) * M + m) * (D + 1)
    tl.store(S[:, None] + d[None, :], total, mask=(m[:, None] < M) & (d[None, :] < D))
    tl.store(S + D, weight, mask=m < M)


@triton.jit
def _states(Z, head, d, m, D: tl.constexpr, M: tl.constexpr):  # type: ignore[no-untyped-def]
    """(BM, BD) of one head."""
    return tl.load(Z + (head * M + m[:, None]) * D + d[None, :], mask=(m[:, None] < M) & (d[None, :] < D), other=0.0)


@triton.jit
def _deslice(  # type: ignore[no-untyped-def]
    R, W, b, tau, new, wo, bo, o, N, C,
    H: tl.constexpr, D: tl.constexpr, M: tl.constexpr,
    BN: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, BC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """All heads of one tile of points: o = sum_h P_h Z+_h Wo_h^T + bo."""
    batch = tl.program_id(1)
    R += batch.to(tl.int64) * N * C
    o += batch.to(tl.int64) * N * C
    rows, c = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BC)
    total = tl.zeros((BN, BC), tl.float32) + tl.load(bo + c, mask=c < C, other=0.0).to(tl.float32)[None, :]
    d, m = tl.arange(0, BD), tl.arange(0, BM)
    known = d < D
    for h in range(H):
        w, bias, cold = _route_map(W, b, tau, h, d, m, D, M)
        first = h * D
        r = tl.load(R + rows[:, None] * C + first + d[None, :], mask=(rows[:, None] < N) & known[None, :], other=0.0)
        p = _routing(r, w, bias, cold, m, rows < N, M, PRECISION)[1]
        z = _states(new, batch * H + h, d, m, D, M).to(r.dtype)
        read = tl.dot(p.to(r.dtype), z, input_precision=PRECISION).to(r.dtype)
        project = tl.load(wo + c[None, :] * C + first + d[:, None], mask=known[:, None] & (c[None, :] < C), other=0.0)
        total = tl.dot(read, project.to(r.dtype), total, input_precision=PRECISION)
    keep = (rows[:, None] < N) & (c[None, :] < C)
    tl.store(o + rows[:, None] * C + c[None, :], total.to(o.dtype.element_ty), mask=keep)


@triton.jit
def _through_routing(r, w, cold, x, p, dP, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """From dP to dR, and this tile's share of dW (BD, BM), db and dtau (BM, to be summed)."""
    weighed = p * dP
    dx = (weighed - p * tl.sum(weighed, axis=1)[:, None]) * cold
    narrow = dx.to(r.dtype)
    dr = tl.dot(narrow, tl.trans(w.to(r.dtype)), input_precision=PRECISION)
    dw = tl.dot(tl.trans(r), narrow, input_precision=PRECISION)
    return dr, dw, tl.sum(dx, axis=0), -tl.sum(x * dx, axis=0)


@triton.jit
def _store_routing(sums, part, sum_W, sum_b, sum_tau, d, m, D: tl.constexpr, M: tl.constexpr):  # type: ignore[no-untyped-def]
    """A row of `sums`: dW (M, D), db (M), dtau."""
    sums += part.to(tl.int64) * (M * D + M + 1)
    tl.store(sums + m[None, :] * D + d[:, None], sum_W, mask=(d[:, None] < D) & (m[None, :] < M))
    tl.store(sums + M * D + m, sum_b, mask=m < M)
    tl.store(sums + M * D + M, tl.sum(sum_tau, axis=0))


@triton.jit
def _deslice_backward(  # type: ignore[no-untyped-def]
    R, W, b, tau, new, wo, do, dR, dnew, sums, out, N, C, chunks,
    H: tl.constexpr, D: tl.constexpr, M: tl.constexpr,
    BN: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, BC: tl.constexpr, SPAN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    chunk, h, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    R += batch.to(tl.int64) * N * C
    do += batch.to(tl.int64) * N * C
    dR += batch.to(tl.int64) * N * C
    d, m = tl.arange(0, BD), tl.arange(0, BM)
    w, bias, cold = _route_map(W, b, tau, h, d, m, D, M)
    c, first = tl.arange(0, BC), h * D
    known = (c[:, None] < C) & (d[None, :] < D)
    project = tl.load(wo + c[:, None] * C + first + d[None, :], mask=known, other=0.0)
    wide = _states(new, batch * H + h, d, m, D, M)
    sum_W, sum_b = tl.zeros((BD, BM), tl.float32), tl.zeros((BM,), tl.float32)
    sum_z, sum_tau = tl.zeros((BM, BD), tl.float32), tl.zeros((BM,), tl.float32)
    sum_o, sum_c = tl.zeros((BC, BD), tl.float32), tl.zeros((BC,), tl.float32)
    for start in range(0, SPAN, BN):
        rows = chunk * SPAN + start + tl.arange(0, BN)
        keep = (rows[:, None] < N) & (d[None, :] < D)
        place = rows[:, None] * C + first + d[None, :]
        r = tl.load(R + place, mask=keep, other=0.0)
        given = tl.load(do + rows[:, None] * C + c[None, :], mask=(rows[:, None] < N) & (c[None, :] < C), other=0.0)
        if h == 0:
            sum_c += tl.sum(given.to(tl.float32), axis=0)
        x, p = _routing(r, w, bias, cold, m, rows < N, M, PRECISION)
        z, narrow = wide.to(r.dtype), p.to(r.dtype)
        dO = tl.dot(given, project.to(r.dtype), input_precision=PRECISION).to(r.dtype)
        read = tl.dot(narrow, z, input_precision=PRECISION).to(r.dtype)
        sum_o += tl.dot(tl.trans(given), read, input_precision=PRECISION)
        sum_z += tl.dot(tl.trans(narrow), dO, input_precision=PRECISION)
        dP = tl.dot(dO, tl.trans(z), input_precision=PRECISION)
        dr, more_W, more_b, more_tau = _through_routing(r, w, cold, x, p, dP, PRECISION)
        tl.store(dR + place, dr.to(dR.dtype.element_ty), mask=keep)
        sum_W += more_W
        sum_b += more_b
        sum_tau += more_tau
    part = batch * chunks + chunk
    _store_routing(sums, part * H + h, sum_W, sum_b, sum_tau, d, m, D, M)
    to = (((batch * H + h) * chunks + chunk).to(tl.int64) * M + m)[:, None] * D + d[None, :]
    tl.store(dnew + to, sum_z, mask=(m[:, None] < M) & (d[None, :] < D))
    out += part.to(tl.int64) * (C * C + C)  # dWo (C, C), of which the columns of this head, and dbo
    tl.store(out + c[:, None] * C + first + d[None, :], sum_o, mask=known)
    if h == 0:
        tl.store(out + C * C + c, sum_c, mask=c < C)


@triton.jit
def _slice_backward(  # type: ignore[no-untyped-def]
    R, F, W, b, tau, G, g, dR, dF, sums, N, C, chunks,
    H: tl.constexpr, D: tl.constexpr, M: tl.constexpr,
    BN: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, SPAN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds to dR, which the way out has begun."""
    chunk, h, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    R += batch.to(tl.int64) * N * C
    F += batch.to(tl.int64) * N * C
    dR += batch.to(tl.int64) * N * C
    dF += batch.to(tl.int64) * N * C
    d, m = tl.arange(0, BD), tl.arange(0, BM)
    w, bias, cold = _route_map(W, b, tau, h, d, m, D, M)
    wide = _states(G, batch * H + h, d, m, D, M)
    g_M = tl.load(g + (batch * H + h) * M + m, mask=m < M, other=0.0)
    sum_W, sum_b = tl.zeros((BD, BM), tl.float32), tl.zeros((BM,), tl.float32)
    sum_tau = tl.zeros((BM,), tl.float32)
    for start in range(0, SPAN, BN):
        rows = chunk * SPAN + start + tl.arange(0, BN)
        keep = (rows[:, None] < N) & (d[None, :] < D)
        place = rows[:, None] * C + h * D + d[None, :]
        r = tl.load(R + place, mask=keep, other=0.0)
        f = tl.load(F + place, mask=keep, other=0.0)
        x, p = _routing(r, w, bias, cold, m, rows < N, M, PRECISION)
        states = wide.to(f.dtype)
        dP = tl.dot(f, tl.trans(states), input_precision=PRECISION) + g_M[None, :]
        df = tl.dot(p.to(f.dtype), states, input_precision=PRECISION)
        tl.store(dF + place, df.to(dF.dtype.element_ty), mask=keep)
        dr, more_W, more_b, more_tau = _through_routing(r, w, cold, x, p, dP, PRECISION)
        dr += tl.load(dR + place, mask=keep, other=0.0).to(tl.float32)
        tl.store(dR + place, dr.to(dR.dtype.element_ty), mask=keep)
        sum_W += more_W
        sum_b += more_b
        sum_tau += more_tau
    part = batch * chunks + chunk
    _store_routing(sums, part * H + h, sum_W, sum_b, sum_tau, d, m, D, M)


class _Plan:
    """Sizes and tiles of one call."""

    def __init__(self, R_BNC: torch.Tensor, weight_MD: torch.Tensor) -> None:
        self.B, self.N, self.C = R_BNC.shape
        self.M, self.D = weight_MD.shape
        self.H = self.C // self.D
        # A matrix unit multiplies tiles of at least 16; what lies beyond D, M or C is masked.
        self.BM, self.BD, self.BC = (max(16, triton.next_power_of_2(size)) for size in (self.M, self.D, self.C))
        most = min(LARGEST, max(16, triton.next_power_of_2(self.N)))
        span = triton.cdiv(self.N * self.B * self.H, PROGRAMS)
        self.span = triton.cdiv(min(LONGEST, max(span, most), self.N), most) * most
        self.chunks = triton.cdiv(self.N, self.span)
        self.passes = (self.chunks, self.H, self.B)
        self.small = {"D": self.D, "M": self.M, "BM": self.BM, "BD": self.BD, "ROOT": 1 / math.sqrt(self.D)}

    def tiles(self, points: int, warps: int) -> dict[str, Any]:
        """For a kernel whose tile has so many points where there are 64 channels or less."""
        points = min(points if self.BC <= 64 else points // 2, max(16, triton.next_power_of_2(self.N)))
        sizes = {"H": self.H, "D": self.D, "M": self.M, "BM": self.BM, "BD": self.BD}
        return {**sizes, "BN": points, "PRECISION": dot_precision(), "num_warps": warps}


class _SliceAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, kind: str, R: torch.Tensor, F: torch.Tensor, W: torch.Tensor, b: torch.Tensor, tau: torch.Tensor,
        wq: torch.Tensor, wk: torch.Tensor, wv: torch.Tensor, gamma: torch.Tensor, wo: torch.Tensor, bo: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        plan = _Plan(R, W)
        B, N, C, H, D, M = plan.B, plan.N, plan.C, plan.H, plan.D, plan.M
        parts = torch.empty(B * H, plan.chunks, M, D + 1, device=R.device, dtype=torch.float32)
        _slice[plan.passes](R, F, W, b, tau, parts, N, C, plan.chunks, SPAN=plan.span, **plan.tiles(32, 1))
        Z, new = torch.empty(2, B * H, M, D, device=R.device, dtype=torch.float32)
        mass = torch.empty(B * H, M, device=R.device, dtype=torch.float32)
        update[(B * H,)](parts, wq, wk, wv, gamma, Z, mass, new, plan.chunks, KIND=kind, EPS=EPSILON, **plan.small)
        o = torch.empty_like(R)
        tiles = plan.tiles(64, 4)
        _deslice[(triton.cdiv(N, tiles["BN"]), B)](R, W, b, tau, new, wo, bo, o, N, C, BC=plan.BC, **tiles)
        ctx.save_for_backward(R, F, W, b, tau, wq, wk, wv, gamma, wo, bo, Z, mass, new)
        ctx.kind = kind
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: torch.Tensor) -> Any:
        R, F, W, b, tau, wq, wk, wv, gamma, wo, bo, Z, mass, new = ctx.saved_tensors
        plan = _Plan(R, W)
        B, N, C, H, D, M, chunks = plan.B, plan.N, plan.C, plan.H, plan.D, plan.M, plan.chunks
        wide = {"device": R.device, "dtype": torch.float32}
        dR, dF = torch.empty_like(R), torch.empty_like(F)
        routes = torch.empty(2, B * chunks, H, M * D + M + 1, **wide)
        dnew = torch.empty(B * H, chunks, M, D, **wide)
        out = torch.empty(B * chunks, C * C + C, **wide)
        _deslice_backward[plan.passes](
            R, W, b, tau, new, wo, do.contiguous(), dR, dnew, routes[0], out, N, C, chunks,
            BC=plan.BC, SPAN=plan.span, **plan.tiles(128, 4),
        )  # fmt: skip
        G, g = torch.empty_like(Z), torch.empty_like(mass)
        attention = torch.empty(B * H, 3 * D * D + 1, **wide)
        update_backward[(B * H,)](
            dnew, wq, wk, wv, gamma, Z, mass, G, g, attention, chunks, KIND=ctx.kind, **plan.small
        )
        _slice_backward[plan.passes](
            R, F, W, b, tau, G, g, dR, dF, routes[1], N, C, chunks, SPAN=plan.span, **plan.tiles(128, 4)
        )
        by_head = folded(routes.flatten(0, 1))
        dW, db, _ = folded(by_head).split((M * D, M, 1))
        dwo, dbo = folded(out).split((C * C, C))
        dattention: tuple[torch.Tensor | None, ...] = (None,) * 4
        if ctx.kind != "keep":
            *maps, dgamma = folded(attention).split((D * D, D * D, D * D, 1))
            dgamma = dgamma.to(gamma.dtype) if ctx.kind == "residual" else None
            dattention = (*(one.view(D, D).to(wq.dtype) for one in maps), dgamma)
        return (
            None, dR, dF, dW.view(M, D).to(W.dtype), db.to(b.dtype), by_head[:, -1].to(tau.dtype), *dattention,
            dwo.view(C, C).to(wo.dtype), dbo.to(bo.dtype),
        )  # fmt: skip


def slice_attention(
    R_BNC: torch.Tensor, F_BNC: torch.Tensor, route: SliceMap, attention: tuple[torch.Tensor, ...], project: Affine
) -> torch.Tensor:
    """R, F (B, N, C) -> o (B, N, C). `attention`: nothing (keep), W_q W_k W_v (replace), these and gamma (residual)."""
    kind = {0: "keep", 3: "replace", 4: "residual"}[len(attention)]
    weight = route.weight
    filled = (*attention, *(weight,) * (4 - len(attention)))  # what a kind does not have is not read
    ready = R_BNC.contiguous(), F_BNC.contiguous(), weight.contiguous(), route.bias, route.temperature
    return _SliceAttention.apply(kind, *ready, *filled, *project)
