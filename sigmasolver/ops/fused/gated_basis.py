"""From points to basis functions and back, through gates (N x heads x functions) that are never stored.

    G = softmax over functions of x = (R W + b) / tau      E = G * Phi      S = E^T F  (gather)      O = E Z  (spread)

Each has one pass over the points forward and one backward, both of which recompute E tile by tile:

    gather:   dE = F dS^T,  dF = E dS           spread:   dE = dO Z^T,  dZ = E^T dO
    both:     dG = dE * Phi,  dx = G (dG - sum_k G dG),  dR = dx W^T / tau,  dW = R^T dx / tau,  db = sum dx / tau,
              dtau = -sum x dx / tau

Phi has no gradient. It is read again for each head and sample, from the L2 cache. Sums over points are accumulated in
chunks, then over the chunks in a fixed order.

Letters: B batch, H heads, N points, M functions (K elsewhere), D head width, C = H D channels. The functions correspond
to slices: SLICES is their number.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch.autograd.function import once_differentiable

from sigmasolver.ops.fused import tuning
from sigmasolver.ops.fused.jit import jit
from sigmasolver.ops.fused.slices import (
    LN2,
    Sizes,
    first_row,
    inverse_temperature,
    load_points,
    load_routing_map,
    load_states,
    route_gradients,
    slice_softmax,
)
from sigmasolver.ops.modules import SliceMap

__all__ = ["gather", "spread"]


@jit
def _load_basis(Phi: tl.tensor, n: tl.tensor, m: tl.tensor, points: tl.tensor, SLICES: tl.constexpr) -> tl.tensor:
    """A tile (TILE_POINTS, TILE_SLICES) of Phi (N, M) in float32; 0 beyond the last point."""
    keep = (n[:, None] < points) & (m[None, :] < SLICES)
    return tl.load(Phi + n[:, None] * SLICES + m[None, :], mask=keep, other=0.0).to(tl.float32)


@jit
def _through(
    R: tl.tensor, F: tl.tensor, Phi: tl.tensor, W: tl.tensor,
    b: tl.tensor, tau: tl.tensor, Z: tl.tensor, out: tl.tensor,
    points: tl.tensor, channels: tl.tensor, chunks: tl.tensor,
    HEADS: tl.constexpr, HEAD_WIDTH: tl.constexpr, SLICES: tl.constexpr, GATHER: tl.constexpr,
    COLDEST: tl.constexpr, HOTTEST: tl.constexpr,
    TILE_POINTS: tl.constexpr, TILE_SLICES: tl.constexpr, TILE_CHANNELS: tl.constexpr, CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """GATHER: `out` (B, H, chunks, M, D) are partial sums of E^T F. Else `out` (B, N, C) = E Z, with Z (B, H, M, D)."""
    head, chunk, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = batch.to(tl.int64) * points * channels
    d, m = tl.arange(0, TILE_CHANNELS), tl.arange(0, TILE_SLICES)
    w, bias = load_routing_map(W, b, inverse_temperature(tau + head, COLDEST, HOTTEST), 0, d, m, HEAD_WIDTH, SLICES)
    w = tl.trans(w).to(R.dtype.element_ty)
    if not GATHER:
        z = load_states(Z, batch * HEADS + head, 0, d, m, HEAD_WIDTH, SLICES).to(R.dtype.element_ty)
    acc = tl.zeros((TILE_SLICES, TILE_CHANNELS), tl.float32)
    for start in range(0, CHUNK, TILE_POINTS):
        n = chunk * CHUNK + start + tl.arange(0, TILE_POINTS)
        r = load_points(R + first, n, head * HEAD_WIDTH, d, points, channels, HEAD_WIDTH)
        x = tl.dot(r, w, input_precision=PRECISION) + bias[None, :]
        e = slice_softmax(x, m[None, :] < SLICES, 1, TILE_SLICES == SLICES)
        e = (e * _load_basis(Phi, n, m, points, SLICES)).to(R.dtype.element_ty)
        if GATHER:
            f = load_points(F + first, n, head * HEAD_WIDTH, d, points, channels, HEAD_WIDTH)
            acc = tl.dot(tl.trans(e), f, acc, input_precision=PRECISION)
        else:
            o = tl.dot(e, z, input_precision=PRECISION)
            keep = (n[:, None] < points) & (d[None, :] < HEAD_WIDTH)
            target = out + first + n[:, None] * channels + head * HEAD_WIDTH
            tl.store(target + d[None, :], o.to(out.dtype.element_ty), mask=keep)
    if GATHER:
        target = out + ((((batch * HEADS + head) * chunks + chunk).to(tl.int64) * SLICES + m) * HEAD_WIDTH)[:, None]
        tl.store(target + d[None, :], acc, mask=(m[:, None] < SLICES) & (d[None, :] < HEAD_WIDTH))


@jit
def _through_backward(
    R: tl.tensor, A: tl.tensor, Phi: tl.tensor, W: tl.tensor, b: tl.tensor,
    tau: tl.tensor, Z: tl.tensor, dR: tl.tensor, dA: tl.tensor, sums: tl.tensor,
    points: tl.tensor, channels: tl.tensor, chunks: tl.tensor,
    HEADS: tl.constexpr, HEAD_WIDTH: tl.constexpr, SLICES: tl.constexpr, GATHER: tl.constexpr,
    COLDEST: tl.constexpr, HOTTEST: tl.constexpr,
    TILE_POINTS: tl.constexpr, TILE_SLICES: tl.constexpr, TILE_CHANNELS: tl.constexpr, CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """dR (B, N, C) = dx W^T / tau with dx = G (dG - sum_k G dG), dG = Phi * (A Z^T); dA depends on GATHER:

        GATHER: A = F, Z = dS, dA = dF = E dS (B, N, C)      else: A = dO, dA = sums of dZ = E^T dO (B, H, chunks, M, D)

    A row of `sums` (B, chunks, H): dW (M, D) = R^T dx / tau, db (M) = sum dx / tau, dtau = -sum x dx / tau.
    """
    head, chunk, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = batch.to(tl.int64) * points * channels
    d, m = tl.arange(0, TILE_CHANNELS), tl.arange(0, TILE_SLICES)
    inverse_tau = inverse_temperature(tau + head, COLDEST, HOTTEST)
    w, bias = load_routing_map(W, b, inverse_tau, 0, d, m, HEAD_WIDTH, SLICES)
    w = w.to(R.dtype.element_ty)
    z = load_states(Z, batch * HEADS + head, 0, d, m, HEAD_WIDTH, SLICES).to(R.dtype.element_ty)
    ones = tl.full((16, TILE_POINTS), 1.0, R.dtype.element_ty)
    sum_W, sum_b = tl.zeros((TILE_CHANNELS, TILE_SLICES), tl.float32), tl.zeros((16, TILE_SLICES), tl.float32)
    acc, sum_x = tl.zeros((TILE_SLICES, TILE_CHANNELS), tl.float32), tl.zeros((TILE_POINTS,), tl.float32)
    for start in range(0, CHUNK, TILE_POINTS):
        n = chunk * CHUNK + start + tl.arange(0, TILE_POINTS)
        r = load_points(R + first, n, head * HEAD_WIDTH, d, points, channels, HEAD_WIDTH)
        a = load_points(A + first, n, head * HEAD_WIDTH, d, points, channels, HEAD_WIDTH)
        phi = _load_basis(Phi, n, m, points, SLICES)
        x = tl.dot(r, tl.trans(w), input_precision=PRECISION) + bias[None, :]
        p = slice_softmax(x, m[None, :] < SLICES, 1, TILE_SLICES == SLICES)
        e = (p * phi).to(R.dtype.element_ty)
        weighted = p * phi * tl.dot(a, tl.trans(z), input_precision=PRECISION)
        dx_float32 = weighted - p * tl.sum(weighted, axis=1)[:, None]
        sum_x += tl.sum(x * dx_float32, axis=1)  # in float32: the terms cancel, bf16 would leave only round-off
        dx = dx_float32.to(R.dtype.element_ty)
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
            acc = tl.dot(tl.trans(e), a, acc, input_precision=PRECISION)
    weight_mask = (m[None, :] < SLICES) & (d[:, None] < HEAD_WIDTH)
    if not GATHER:
        target = dA + ((((batch * HEADS + head) * chunks + chunk).to(tl.int64) * SLICES + m) * HEAD_WIDTH)[:, None]
        tl.store(target + d[None, :], acc, mask=(m[:, None] < SLICES) & (d[None, :] < HEAD_WIDTH))
    target = sums + ((batch * chunks + chunk) * HEADS + head).to(tl.int64) * (SLICES * HEAD_WIDTH + SLICES + 1)
    tl.store(target + m[None, :] * HEAD_WIDTH + d[:, None], sum_W * inverse_tau, mask=weight_mask)
    db = first_row(sum_b)
    tl.store(target + SLICES * HEAD_WIDTH + m, db * inverse_tau, mask=m < SLICES)
    sum_x_dx = tl.sum(sum_x, axis=0) * (LN2 * inverse_tau)
    t = tl.load(tau + head).to(tl.float32)
    tl.store(target + SLICES * HEAD_WIDTH + SLICES, tl.where((t >= COLDEST) & (t <= HOTTEST), -sum_x_dx, 0.0))


def _tile(sizes: Sizes) -> dict[str, Any]:
    return sizes.tile(tuning.GATED_TILES[sizes.bytes][sizes.wide])


class _GatedBasis(torch.autograd.Function):
    """R (B, N, C), then the operand: F (B, N, C) to gather, or Z (B, H, M, D) to spread."""

    @staticmethod
    def forward(
        ctx: Any, gathers: bool, limits: tuple[float, float], R: torch.Tensor, operand: torch.Tensor, Phi: torch.Tensor,
        W: torch.Tensor, b: torch.Tensor, tau: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        sizes = Sizes(R, W, limits)
        out = sizes.empty_sums(R) if gathers else torch.empty_like(R)
        _through[sizes.programs](
            R, operand, Phi, W, b, tau, operand, out, sizes.points, sizes.channels, sizes.chunks, GATHER=gathers,
            **_tile(sizes),
        )  # fmt: skip
        ctx.save_for_backward(R, operand, Phi, W, b, tau)
        ctx.gathers, ctx.limits = gathers, limits
        return out.sum(2) if gathers else out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        R, operand, Phi, W, b, tau = ctx.saved_tensors
        sizes, gradient = Sizes(R, W, ctx.limits), gradient.contiguous()
        points, states = (operand, gradient) if ctx.gathers else (gradient, operand)
        dR, doperand = torch.empty_like(R), torch.empty_like(R) if ctx.gathers else sizes.empty_sums(R)
        routes = sizes.empty_route_sums(R)
        _through_backward[sizes.programs](
            R, points, Phi, W, b, tau, states, dR, doperand, routes, sizes.points, sizes.channels, sizes.chunks,
            GATHER=ctx.gathers, **_tile(sizes),
        )  # fmt: skip
        doperand = doperand if ctx.gathers else doperand.sum(2).to(operand.dtype)
        return None, None, dR, doperand, None, *route_gradients(routes, W, b, tau)


def _apply(gathers: bool, R: torch.Tensor, operand: torch.Tensor, Phi: torch.Tensor, route: SliceMap) -> torch.Tensor:
    tensors = (x.contiguous() for x in (R, operand, Phi, route.weight, route.bias, route.temperature))
    return _GatedBasis.apply(gathers, route.limits, *tensors)


def gather(R_BNC: torch.Tensor, F_BNC: torch.Tensor, Phi_NM: torch.Tensor, route: SliceMap) -> torch.Tensor:
    """E^T F (B, H, M, D) in float32."""
    return _apply(True, R_BNC, F_BNC.to(R_BNC.dtype), Phi_NM, route)


def spread(R_BNC: torch.Tensor, Z_BHMD: torch.Tensor, Phi_NM: torch.Tensor, route: SliceMap) -> torch.Tensor:
    """E Z (B, N, C)."""
    return _apply(False, R_BNC, Z_BHMD, Phi_NM, route)
