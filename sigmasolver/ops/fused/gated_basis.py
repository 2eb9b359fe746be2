"""Points to the functions of a basis and back, through gates that are never stored (N x heads x functions).

    G = softmax over functions of x = (R W + b) / tau      E = G * Phi      S = E^T F  (gather)      O = E Z  (spread)

Each has one pass over the points forward and one backward, which make E again, tile by tile:

    gather:   dE = F dS^T,  dF = E dS           spread:   dE = dO Z^T,  dZ = E^T dO
    both:     dG = dE * Phi,  dx = G (dG - sum_k G dG),  dR = dx W^T / tau,  dW = R^T dx / tau,  db = sum dx / tau,
              dtau = -sum x dx / tau

Phi has no gradient. It is read again for every head and sample, from the second-level cache. Sums over points are made
in chunks, then over chunks in a fixed order.

Letters: B batch, H heads, N points, M functions (K elsewhere), D head width, C = H D channels. Functions take the place
of slices: SLICES counts them.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from sigmasolver.ops.fused import tuning
from sigmasolver.ops.fused.slices import (
    LN2,
    Sizes,
    coldness,
    first_row,
    load_points,
    load_route,
    load_states,
    route_gradients,
    slice_softmax,
)
from sigmasolver.ops.modules import SliceMap

__all__ = ["gather", "spread"]


@triton.jit
def _basis(Phi: tl.tensor, n: tl.tensor, m: tl.tensor, points: tl.tensor, SLICES: tl.constexpr) -> tl.tensor:
    """(TILE_POINTS, TILE_SLICES) of Phi (N, M) in float32; 0 beyond the last point."""
    keep = (n[:, None] < points) & (m[None, :] < SLICES)
    return tl.load(Phi + n[:, None] * SLICES + m[None, :], mask=keep, other=0.0).to(tl.float32)


@triton.jit
def _through(
    R: tl.tensor, F: tl.tensor, Phi: tl.tensor, W: tl.tensor,
    b: tl.tensor, tau: tl.tensor, Z: tl.tensor, out: tl.tensor,
    points: tl.tensor, channels: tl.tensor, chunks: tl.tensor,
    HEADS: tl.constexpr, HEAD_WIDTH: tl.constexpr, SLICES: tl.constexpr, GATHER: tl.constexpr,
    COLDEST: tl.constexpr, HOTTEST: tl.constexpr,
    TILE_POINTS: tl.constexpr, TILE_SLICES: tl.constexpr, TILE_CHANNELS: tl.constexpr, CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """GATHER: `out` (B, H, chunks, M, D), sums of E^T F. Else `out` (B, N, C) = E Z, with Z (B, H, M, D)."""
    head, chunk, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = batch.to(tl.int64) * points * channels
    d, m = tl.arange(0, TILE_CHANNELS), tl.arange(0, TILE_SLICES)
    w, bias = load_route(W, b, coldness(tau + head, COLDEST, HOTTEST), 0, d, m, HEAD_WIDTH, SLICES)
    w = tl.trans(w).to(R.dtype.element_ty)
    if not GATHER:
        z = load_states(Z, batch * HEADS + head, 0, d, m, HEAD_WIDTH, SLICES).to(R.dtype.element_ty)
    total = tl.zeros((TILE_SLICES, TILE_CHANNELS), tl.float32)
    for start in range(0, CHUNK, TILE_POINTS):
        n = chunk * CHUNK + start + tl.arange(0, TILE_POINTS)
        r = load_points(R + first, n, head * HEAD_WIDTH, d, points, channels, HEAD_WIDTH)
        x = tl.dot(r, w, input_precision=PRECISION) + bias[None, :]
        e = slice_softmax(x, m[None, :] < SLICES, 1, TILE_SLICES == SLICES)
        e = (e * _basis(Phi, n, m, points, SLICES)).to(R.dtype.element_ty)
        if GATHER:
            f = load_points(F + first, n, head * HEAD_WIDTH, d, points, channels, HEAD_WIDTH)
            total = tl.dot(tl.trans(e), f, total, input_precision=PRECISION)
        else:
            o = tl.dot(e, z, input_precision=PRECISION)
            keep = (n[:, None] < points) & (d[None, :] < HEAD_WIDTH)
            to = out + first + n[:, None] * channels + head * HEAD_WIDTH
            tl.store(to + d[None, :], o.to(out.dtype.element_ty), mask=keep)
    if GATHER:
        to = out + ((((batch * HEADS + head) * chunks + chunk).to(tl.int64) * SLICES + m) * HEAD_WIDTH)[:, None]
        tl.store(to + d[None, :], total, mask=(m[:, None] < SLICES) & (d[None, :] < HEAD_WIDTH))


@triton.jit
def _through_backward(
    R: tl.tensor, A: tl.tensor, Phi: tl.tensor, W: tl.tensor, b: tl.tensor,
    tau: tl.tensor, Z: tl.tensor, dR: tl.tensor, dA: tl.tensor, sums: tl.tensor,
    points: tl.tensor, channels: tl.tensor, chunks: tl.tensor,
    HEADS: tl.constexpr, HEAD_WIDTH: tl.constexpr, SLICES: tl.constexpr, GATHER: tl.constexpr,
    COLDEST: tl.constexpr, HOTTEST: tl.constexpr,
    TILE_POINTS: tl.constexpr, TILE_SLICES: tl.constexpr, TILE_CHANNELS: tl.constexpr, CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """dR (B, N, C) = dx W^T / tau of dx = G (dG - sum_k G dG), dG = Phi * (A Z^T); dA by GATHER:

        GATHER: A = F, Z = dS, dA = dF = E dS (B, N, C)      else: A = dO, dA = sums of dZ = E^T dO (B, H, chunks, M, D)

    A row of `sums` (B, chunks, H): dW (M, D) = R^T dx / tau, db (M) = sum dx / tau, dtau = -sum x dx / tau.
    """
    head, chunk, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = batch.to(tl.int64) * points * channels
    d, m = tl.arange(0, TILE_CHANNELS), tl.arange(0, TILE_SLICES)
    cold = coldness(tau + head, COLDEST, HOTTEST)
    w, bias = load_route(W, b, cold, 0, d, m, HEAD_WIDTH, SLICES)
    w = w.to(R.dtype.element_ty)
    z = load_states(Z, batch * HEADS + head, 0, d, m, HEAD_WIDTH, SLICES).to(R.dtype.element_ty)
    ones = tl.full((16, TILE_POINTS), 1.0, R.dtype.element_ty)
    sum_W, sum_b = tl.zeros((TILE_CHANNELS, TILE_SLICES), tl.float32), tl.zeros((16, TILE_SLICES), tl.float32)
    total, sum_x = tl.zeros((TILE_SLICES, TILE_CHANNELS), tl.float32), tl.zeros((TILE_POINTS,), tl.float32)
    for start in range(0, CHUNK, TILE_POINTS):
        n = chunk * CHUNK + start + tl.arange(0, TILE_POINTS)
        r = load_points(R + first, n, head * HEAD_WIDTH, d, points, channels, HEAD_WIDTH)
        a = load_points(A + first, n, head * HEAD_WIDTH, d, points, channels, HEAD_WIDTH)
        phi = _basis(Phi, n, m, points, SLICES)
        x = tl.dot(r, tl.trans(w), input_precision=PRECISION) + bias[None, :]
        p = slice_softmax(x, m[None, :] < SLICES, 1, TILE_SLICES == SLICES)
        e = (p * phi).to(R.dtype.element_ty)
        weighed = p * phi * tl.dot(a, tl.trans(z), input_precision=PRECISION)
        exact = weighed - p * tl.sum(weighed, axis=1)[:, None]
        sum_x += tl.sum(x * exact, axis=1)  # it cancels: what dx loses in bf16 would be as large as the sum
        dx = exact.to(R.dtype.element_ty)
        sum_W = tl.dot(tl.trans(r), dx, sum_W, input_precision=PRECISION)
        sum_b = tl.dot(ones, dx, sum_b, input_precision=PRECISION)
        dr = tl.dot(dx, w, input_precision=PRECISION)
        keep = (n[:, None] < points) & (d[None, :] < HEAD_WIDTH)
        offsets = first + n[:, None] * channels + head * HEAD_WIDTH + d[None, :]
        tl.store(dR + offsets, (dr * LN2).to(dR.dtype.element_ty), mask=keep)
        if GATHER:
            df = tl.dot(e, z, input_precision=PRECISION)
            tl.store(dA + offsets, df.to(dA.dtype.element_ty), mask=keep)
        else:
            total = tl.dot(tl.trans(e), a, total, input_precision=PRECISION)
    known = (m[None, :] < SLICES) & (d[:, None] < HEAD_WIDTH)
    if not GATHER:
        to = dA + ((((batch * HEADS + head) * chunks + chunk).to(tl.int64) * SLICES + m) * HEAD_WIDTH)[:, None]
        tl.store(to + d[None, :], total, mask=(m[:, None] < SLICES) & (d[None, :] < HEAD_WIDTH))
    to = sums + ((batch * chunks + chunk) * HEADS + head).to(tl.int64) * (SLICES * HEAD_WIDTH + SLICES + 1)
    tl.store(to + m[None, :] * HEAD_WIDTH + d[:, None], sum_W * cold, mask=known)
    db = first_row(sum_b)
    tl.store(to + SLICES * HEAD_WIDTH + m, db * cold, mask=m < SLICES)
    down = tl.sum(sum_x, axis=0) * (LN2 * cold)
    warm = tl.load(tau + head).to(tl.float32)
    tl.store(to + SLICES * HEAD_WIDTH + SLICES, tl.where((warm >= COLDEST) & (warm <= HOTTEST), -down, 0.0))


def _tile(sizes: Sizes) -> dict[str, Any]:
    return sizes.tile(tuning.GATED_TILES[sizes.bytes][sizes.wide])


class _Through(torch.autograd.Function):
    """R (B, N, C), then F (B, N, C) to gather or Z (B, H, M, D) to spread."""

    @staticmethod
    def forward(
        ctx: Any, gathers: bool, limits: tuple[float, float], R: torch.Tensor, given: torch.Tensor, Phi: torch.Tensor,
        W: torch.Tensor, b: torch.Tensor, tau: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        sizes = Sizes(R, W, limits)
        out = sizes.sums(R) if gathers else torch.empty_like(R)
        _through[sizes.programs](
            R, given, Phi, W, b, tau, given, out, sizes.points, sizes.channels, sizes.chunks, GATHER=gathers,
            **_tile(sizes),
        )  # fmt: skip
        ctx.save_for_backward(R, given, Phi, W, b, tau)
        ctx.gathers, ctx.limits = gathers, limits
        return out.sum(2) if gathers else out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        R, given, Phi, W, b, tau = ctx.saved_tensors
        sizes, gradient = Sizes(R, W, ctx.limits), gradient.contiguous()
        points, states = (given, gradient) if ctx.gathers else (gradient, given)
        dR, dgiven = torch.empty_like(R), torch.empty_like(R) if ctx.gathers else sizes.sums(R)
        routes = sizes.routes(R)
        _through_backward[sizes.programs](
            R, points, Phi, W, b, tau, states, dR, dgiven, routes, sizes.points, sizes.channels, sizes.chunks,
            GATHER=ctx.gathers, **_tile(sizes),
        )  # fmt: skip
        dgiven = dgiven if ctx.gathers else dgiven.sum(2).to(given.dtype)
        return None, None, dR, dgiven, None, *route_gradients(routes, W, b, tau)


def _apply(gathers: bool, R: torch.Tensor, given: torch.Tensor, Phi: torch.Tensor, route: SliceMap) -> torch.Tensor:
    ready = (one.contiguous() for one in (R, given, Phi, route.weight, route.bias, route.temperature))
    return _Through.apply(gathers, route.limits, *ready)


def gather(R_BNC: torch.Tensor, F_BNC: torch.Tensor, Phi_NM: torch.Tensor, route: SliceMap) -> torch.Tensor:
    """E^T F (B, H, M, D) in float32."""
    return _apply(True, R_BNC, F_BNC.to(R_BNC.dtype), Phi_NM, route)


def spread(R_BNC: torch.Tensor, Z_BHMD: torch.Tensor, Phi_NM: torch.Tensor, route: SliceMap) -> torch.Tensor:
    """E Z (B, N, C)."""
    return _apply(False, R_BNC, Z_BHMD, Phi_NM, route)
