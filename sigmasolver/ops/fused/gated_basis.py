"""Points to the functions of a basis and back, through gates that are never stored (N x heads x functions).

    G = softmax over functions of x = (R W + b) / tau      E = G * Phi      S = E^T F  (gather)      O = E Z  (spread)

Each has one pass over the points forward and one backward, which make E again, tile by tile:

    gather:   dE = F dS^T,  dF = E dS           spread:   dE = dO Z^T,  dZ = E^T dO
    both:     dG = dE * Phi,  dx = G (dG - sum_k G dG),  dR = dx W^T / tau,  dW = R^T dx / tau,  db = sum dx / tau,
              dtau = -sum x dx / tau

Phi has no gradient. It is read again for every head and sample, from the second-level cache. Sums over points are made
in chunks, then over chunks in a fixed order.

Letters: B batch, H heads, N points, M functions (K elsewhere), D head width, C = H D channels. A tile has ROWS points,
SLICES functions and COLUMNS channels.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from sigmasolver.ops.fused import dot_precision, tuning
from sigmasolver.ops.fused.reductions import sum_partials
from sigmasolver.ops.fused.slices import LN2, coldness, load_points, load_route, load_states, slice_softmax
from sigmasolver.ops.fused.tuning import tile_size
from sigmasolver.ops.modules import SliceMap

__all__ = ["gather", "spread"]


@triton.jit
def _basis(Phi: tl.tensor, rows: tl.tensor, m: tl.tensor, N: tl.tensor, M: tl.constexpr) -> tl.tensor:
    """(ROWS, SLICES) of Phi (N, M) in float32; 0 beyond the last point."""
    keep = (rows[:, None] < N) & (m[None, :] < M)
    return tl.load(Phi + rows[:, None] * M + m[None, :], mask=keep, other=0.0).to(tl.float32)


@triton.jit
def _through(
    R: tl.tensor, F: tl.tensor, Phi: tl.tensor, W: tl.tensor,
    b: tl.tensor, tau: tl.tensor, Z: tl.tensor, out: tl.tensor,
    N: tl.tensor, C: tl.tensor, chunks: tl.tensor,
    H: tl.constexpr, D: tl.constexpr, M: tl.constexpr, GATHER: tl.constexpr,
    COLDEST: tl.constexpr, HOTTEST: tl.constexpr,
    ROWS: tl.constexpr, SLICES: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """GATHER: `out` (B, H, chunks, M, D), sums of E^T F. Else `out` (B, N, C) = E Z, with Z (B, H, M, D)."""
    head, chunk, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = batch.to(tl.int64) * N * C
    d, m = tl.arange(0, COLUMNS), tl.arange(0, SLICES)
    w, bias = load_route(W, b, coldness(tau + head, COLDEST, HOTTEST), 0, d, m, D, M)
    w = tl.trans(w).to(R.dtype.element_ty)
    if not GATHER:
        z = load_states(Z, batch * H + head, 0, d, m, D, M).to(R.dtype.element_ty)
    total = tl.zeros((SLICES, COLUMNS), tl.float32)
    for start in range(0, CHUNK, ROWS):
        rows = chunk * CHUNK + start + tl.arange(0, ROWS)
        r = load_points(R + first, rows, head * D, d, N, C, D)
        x = tl.dot(r, w, input_precision=PRECISION) + bias[None, :]
        e = slice_softmax(x, m[None, :] < M, 1, SLICES == M) * _basis(Phi, rows, m, N, M)
        e = e.to(R.dtype.element_ty)
        if GATHER:
            f = load_points(F + first, rows, head * D, d, N, C, D)
            total = tl.dot(tl.trans(e), f, total, input_precision=PRECISION)
        else:
            o = tl.dot(e, z, input_precision=PRECISION)
            keep = (rows[:, None] < N) & (d[None, :] < D)
            tl.store(out + first + rows[:, None] * C + head * D + d[None, :], o.to(out.dtype.element_ty), mask=keep)
    if GATHER:
        to = out + ((((batch * H + head) * chunks + chunk).to(tl.int64) * M + m) * D)[:, None]
        tl.store(to + d[None, :], total, mask=(m[:, None] < M) & (d[None, :] < D))


@triton.jit
def _through_backward(
    R: tl.tensor, A: tl.tensor, Phi: tl.tensor, W: tl.tensor, b: tl.tensor,
    tau: tl.tensor, Z: tl.tensor, dR: tl.tensor, dA: tl.tensor, sums: tl.tensor,
    N: tl.tensor, C: tl.tensor, chunks: tl.tensor,
    H: tl.constexpr, D: tl.constexpr, M: tl.constexpr, GATHER: tl.constexpr,
    COLDEST: tl.constexpr, HOTTEST: tl.constexpr,
    ROWS: tl.constexpr, SLICES: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """dR (B, N, C) = dx W^T / tau of dx = G (dG - sum_k G dG), dG = Phi * (A Z^T); dA by GATHER:

        GATHER: A = F, Z = dS, dA = dF = E dS (B, N, C)      else: A = dO, dA = sums of dZ = E^T dO (B, H, chunks, M, D)

    A row of `sums` (B, chunks, H): dW (M, D) = R^T dx / tau, db (M) = sum dx / tau, dtau = -sum x dx / tau.
    """
    head, chunk, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = batch.to(tl.int64) * N * C
    d, m = tl.arange(0, COLUMNS), tl.arange(0, SLICES)
    cold = coldness(tau + head, COLDEST, HOTTEST)
    w, bias = load_route(W, b, cold, 0, d, m, D, M)
    w = w.to(R.dtype.element_ty)
    z = load_states(Z, batch * H + head, 0, d, m, D, M).to(R.dtype.element_ty)
    ones = tl.full((16, ROWS), 1.0, R.dtype.element_ty)
    sum_W, sum_b = tl.zeros((COLUMNS, SLICES), tl.float32), tl.zeros((16, SLICES), tl.float32)
    total, sum_x = tl.zeros((SLICES, COLUMNS), tl.float32), tl.zeros((ROWS,), tl.float32)
    for start in range(0, CHUNK, ROWS):
        rows = chunk * CHUNK + start + tl.arange(0, ROWS)
        r = load_points(R + first, rows, head * D, d, N, C, D)
        a = load_points(A + first, rows, head * D, d, N, C, D)
        phi = _basis(Phi, rows, m, N, M)
        x = tl.dot(r, tl.trans(w), input_precision=PRECISION) + bias[None, :]
        p = slice_softmax(x, m[None, :] < M, 1, SLICES == M)
        e = (p * phi).to(R.dtype.element_ty)
        weighed = p * phi * tl.dot(a, tl.trans(z), input_precision=PRECISION)
        exact = weighed - p * tl.sum(weighed, axis=1)[:, None]
        sum_x += tl.sum(x * exact, axis=1)  # it cancels: what dx loses in bf16 would be as large as the sum
        dx = exact.to(R.dtype.element_ty)
        sum_W = tl.dot(tl.trans(r), dx, sum_W, input_precision=PRECISION)
        sum_b = tl.dot(ones, dx, sum_b, input_precision=PRECISION)
        dr = tl.dot(dx, w, input_precision=PRECISION)
        keep = (rows[:, None] < N) & (d[None, :] < D)
        offsets = first + rows[:, None] * C + head * D + d[None, :]
        tl.store(dR + offsets, (dr * LN2).to(dR.dtype.element_ty), mask=keep)
        if GATHER:
            df = tl.dot(e, z, input_precision=PRECISION)
            tl.store(dA + offsets, df.to(dA.dtype.element_ty), mask=keep)
        else:
            total = tl.dot(tl.trans(e), a, total, input_precision=PRECISION)
    known = (m[None, :] < M) & (d[:, None] < D)
    if not GATHER:
        to = dA + ((((batch * H + head) * chunks + chunk).to(tl.int64) * M + m) * D)[:, None]
        tl.store(to + d[None, :], total, mask=(m[:, None] < M) & (d[None, :] < D))
    to = sums + ((batch * chunks + chunk) * H + head).to(tl.int64) * (M * D + M + 1)
    tl.store(to + m[None, :] * D + d[:, None], sum_W * cold, mask=known)
    db = tl.sum(tl.where(tl.arange(0, 16)[:, None] == 0, sum_b, 0.0), axis=0)
    tl.store(to + M * D + m, db * cold, mask=m < M)
    down = tl.sum(sum_x, axis=0) * (LN2 * cold)
    warm = tl.load(tau + head).to(tl.float32)
    tl.store(to + M * D + M, tl.where((warm >= COLDEST) & (warm <= HOTTEST), -down, 0.0))


class _Sizes:
    """Sizes and tiles of one call."""

    def __init__(self, R_BNC: torch.Tensor, weight_MD: torch.Tensor, limits: tuple[float, float]) -> None:
        self.B, self.N, self.C = R_BNC.shape
        self.M, self.D = weight_MD.shape
        self.H = self.C // self.D
        slices, columns = tile_size(self.M), tile_size(self.D)
        wide = slices * columns > tuning.WIDE_HEAD
        float32 = tuning.SLICE_WIDE_FLOAT32 if wide else tuning.SLICE_FLOAT32
        points, warps, stages = tuning.GATED_BF16 if R_BNC.element_size() == 2 else float32
        most = min(tuning.SLICE_POINTS, tile_size(self.N))
        share = triton.cdiv(self.N * self.B * self.H, tuning.SLICE_PROGRAMS)
        chunk = triton.cdiv(min(tuning.SLICE_LONGEST, max(share, most), self.N), most) * most
        self.chunks = triton.cdiv(self.N, chunk)
        self.programs = (self.H, self.chunks, self.B)
        self.tile: dict[str, Any] = {"H": self.H, "D": self.D, "M": self.M, "COLDEST": limits[0], "HOTTEST": limits[1]}
        self.tile |= {"ROWS": min(points, tile_size(self.N)), "SLICES": slices, "COLUMNS": columns, "CHUNK": chunk}
        warps = min(8, warps * max(1, slices * columns // 1024))
        self.tile |= {"PRECISION": dot_precision(), "num_warps": warps, "num_stages": stages}

    def sums(self, R: torch.Tensor) -> torch.Tensor:
        """Room for sums (B, H, chunks, M, D)."""
        return torch.empty(self.B, self.H, self.chunks, self.M, self.D, device=R.device, dtype=torch.float32)


class _Through(torch.autograd.Function):
    """R (B, N, C), then F (B, N, C) to gather or Z (B, H, M, D) to spread."""

    @staticmethod
    def forward(
        ctx: Any, gathers: bool, limits: tuple[float, float], R: torch.Tensor, given: torch.Tensor, Phi: torch.Tensor,
        W: torch.Tensor, b: torch.Tensor, tau: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        sizes = _Sizes(R, W, limits)
        out = sizes.sums(R) if gathers else torch.empty_like(R)
        _through[sizes.programs](
            R, given, Phi, W, b, tau, given, out, sizes.N, sizes.C, sizes.chunks, GATHER=gathers, **sizes.tile
        )
        ctx.save_for_backward(R, given, Phi, W, b, tau)
        ctx.gathers, ctx.limits = gathers, limits
        return out.sum(2) if gathers else out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        R, given, Phi, W, b, tau = ctx.saved_tensors
        sizes, gradient = _Sizes(R, W, ctx.limits), gradient.contiguous()
        M, D = sizes.M, sizes.D
        points, states = (given, gradient) if ctx.gathers else (gradient, given)
        dR, dgiven = torch.empty_like(R), torch.empty_like(R) if ctx.gathers else sizes.sums(R)
        routes = torch.empty(sizes.B * sizes.chunks, sizes.H, M * D + M + 1, device=R.device, dtype=torch.float32)
        _through_backward[sizes.programs](
            R, points, Phi, W, b, tau, states, dR, dgiven, routes, sizes.N, sizes.C, sizes.chunks,
            GATHER=ctx.gathers, **sizes.tile,
        )  # fmt: skip
        by_head = sum_partials(routes)
        dW, db, _ = sum_partials(by_head).split((M * D, M, 1))
        dtau = by_head[:, -1].contiguous()
        dgiven = dgiven if ctx.gathers else dgiven.sum(2).to(given.dtype)
        return None, None, dR, dgiven, None, dW.view(M, D).to(W.dtype), db.to(b.dtype), dtau.to(tau.dtype)


def _apply(gathers: bool, R: torch.Tensor, given: torch.Tensor, Phi: torch.Tensor, route: SliceMap) -> torch.Tensor:
    ready = (one.contiguous() for one in (R, given, Phi, route.weight, route.bias, route.temperature))
    return _Through.apply(gathers, route.limits, *ready)


def gather(R_BNC: torch.Tensor, F_BNC: torch.Tensor, Phi_NM: torch.Tensor, route: SliceMap) -> torch.Tensor:
    """E^T F (B, H, M, D) in float32."""
    return _apply(True, R_BNC, F_BNC.to(R_BNC.dtype), Phi_NM, route)


def spread(R_BNC: torch.Tensor, Z_BHMD: torch.Tensor, Phi_NM: torch.Tensor, route: SliceMap) -> torch.Tensor:
    """E Z (B, N, C)."""
    return _apply(False, R_BNC, Z_BHMD, Phi_NM, route)
