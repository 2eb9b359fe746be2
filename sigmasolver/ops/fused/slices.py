"""Slice and deslice without ever storing the routing P (N x heads x slices): it is made again, tile by tile.

    P = softmax over slices of (R W + b) / tau      Z = P^T F / (mass + eps)      O = P Z

Forward of `slice_points`: partial sums of P^T F and of the mass over chunks of points; their sum over chunks is done
in a fixed order. Backward, with G = d(P^T F) and g = d(mass), or with dO of `deslice_points`:

    dF = P G      dP = F G^T + g      |      dZ = P^T dO      dP = dO Z^T
    dx = P (dP - sum_m P dP),  x = (R W + b) / tau:   dR = dx W^T / tau,  dW = R^T dx / tau,  db, dtau = -sum x dx / tau

Letters: B batch, H heads, N points, M slices, D head width, C = H D channels; BN, BM, BD tile sizes.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from sigmasolver.ops.slices import EPSILON

__all__ = ["deslice_points", "slice_points"]

TILE, CHUNK = 128, 2048


@triton.jit
def _routing(R, W, b, tau, h, rows, d, m, N, C, D: tl.constexpr, M: tl.constexpr, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """One tile: R (BN, BD), W (BD, BM), tau, x = (R W + b) / tau and P (BN, BM) in float32."""
    r = tl.load(R + rows[:, None] * C + h * D + d[None, :], mask=(rows[:, None] < N) & (d[None, :] < D), other=0.0)
    w = tl.load(W + d[:, None] * M + m[None, :], mask=(d[:, None] < D) & (m[None, :] < M), other=0.0).to(r.dtype)
    bias = tl.load(b + m, mask=m < M, other=0.0).to(tl.float32)
    heat = tl.load(tau + h).to(tl.float32)
    x = (tl.dot(r, w, input_precision=PRECISION) + bias[None, :]) / heat
    x = tl.where(m[None, :] < M, x, float("-inf"))
    e = tl.exp(x - tl.max(x, axis=1)[:, None])
    p = e / tl.sum(e, axis=1)[:, None]
    p = tl.where(rows[:, None] < N, p, 0.0)
    return r, w, heat, tl.where(m[None, :] < M, x, 0.0), p


@triton.jit
def _slice_forward(  # type: ignore[no-untyped-def]
    R, F, W, b, tau, S, mass, N, C, chunks,
    H: tl.constexpr, D: tl.constexpr, M: tl.constexpr,
    BN: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, SPAN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    chunk, h, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    R += batch.to(tl.int64) * N * C
    F += batch.to(tl.int64) * N * C
    d, m = tl.arange(0, BD), tl.arange(0, BM)
    total, weight = tl.zeros((BM, BD), tl.float32), tl.zeros((BM,), tl.float32)
    for start in range(0, SPAN, BN):
        rows = chunk * SPAN + start + tl.arange(0, BN)
        _, _, _, _, p = _routing(R, W, b, tau, h, rows, d, m, N, C, D, M, PRECISION)
        f = tl.load(F + rows[:, None] * C + h * D + d[None, :], mask=(rows[:, None] < N) & (d[None, :] < D), other=0.0)
        total += tl.dot(tl.trans(p).to(f.dtype), f, input_precision=PRECISION)
        weight += tl.sum(p, axis=0)
    place = (batch * H + h) * chunks + chunk
    S += place.to(tl.int64) * M * D
    tl.store(S + m[:, None] * D + d[None, :], total, mask=(m[:, None] < M) & (d[None, :] < D))
    tl.store(mass + place * M + m, weight, mask=m < M)


@triton.jit
def _deslice_forward(  # type: ignore[no-untyped-def]
    R, W, b, tau, Z, O, N, C,
    H: tl.constexpr, D: tl.constexpr, M: tl.constexpr,
    BN: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, SPAN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    chunk, h, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    R += batch.to(tl.int64) * N * C
    O += batch.to(tl.int64) * N * C
    d, m = tl.arange(0, BD), tl.arange(0, BM)
    inside = (m[:, None] < M) & (d[None, :] < D)
    z = tl.load(Z + ((batch * H + h) * M + m[:, None]) * D + d[None, :], mask=inside, other=0.0)
    for start in range(0, SPAN, BN):
        rows = chunk * SPAN + start + tl.arange(0, BN)
        r, _, _, _, p = _routing(R, W, b, tau, h, rows, d, m, N, C, D, M, PRECISION)
        o = tl.dot(p.to(r.dtype), z.to(r.dtype), input_precision=PRECISION)
        keep = (rows[:, None] < N) & (d[None, :] < D)
        tl.store(O + rows[:, None] * C + h * D + d[None, :], o.to(r.dtype), mask=keep)


@triton.jit
def _backward(  # type: ignore[no-untyped-def]
    R, A, W, b, tau, G, g, dR, dA, dG, dW, db, dtau, N, C, chunks,
    H: tl.constexpr, D: tl.constexpr, M: tl.constexpr, SLICING: tl.constexpr,
    BN: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, SPAN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Slicing: A = F, G and g are given, dA = dF comes out. Deslicing: A = dO, G = Z is given, dG = dZ comes out."""
    chunk, h, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    R += batch.to(tl.int64) * N * C
    A += batch.to(tl.int64) * N * C
    dR += batch.to(tl.int64) * N * C
    dA += batch.to(tl.int64) * N * C
    d, m = tl.arange(0, BD), tl.arange(0, BM)
    inside = (m[:, None] < M) & (d[None, :] < D)
    slot = (batch * H + h) * M
    G_MD = tl.load(G + (slot + m[:, None]) * D + d[None, :], mask=inside, other=0.0)
    g_M = tl.load(g + slot + m, mask=m < M, other=0.0) if SLICING else tl.zeros((BM,), tl.float32)
    sum_W, sum_b = tl.zeros((BD, BM), tl.float32), tl.zeros((BM,), tl.float32)
    sum_G, sum_tau = tl.zeros((BM, BD), tl.float32), tl.zeros((BN,), tl.float32)
    for start in range(0, SPAN, BN):
        rows = chunk * SPAN + start + tl.arange(0, BN)
        keep = (rows[:, None] < N) & (d[None, :] < D)
        place = rows[:, None] * C + h * D + d[None, :]
        r, w, heat, x, p = _routing(R, W, b, tau, h, rows, d, m, N, C, D, M, PRECISION)
        a = tl.load(A + place, mask=keep, other=0.0)
        small = G_MD.to(a.dtype)
        dP = tl.dot(a, tl.trans(small), input_precision=PRECISION) + g_M[None, :]
        if SLICING:
            tl.store(dA + place, tl.dot(p.to(a.dtype), small, input_precision=PRECISION).to(a.dtype), mask=keep)
        else:
            sum_G += tl.dot(tl.trans(p).to(a.dtype), a, input_precision=PRECISION)
        dx = p * (dP - tl.sum(p * dP, axis=1)[:, None])
        sum_tau -= tl.sum(x * dx, axis=1) / heat
        dx = dx / heat
        sum_b += tl.sum(dx, axis=0)
        narrow = dx.to(r.dtype)
        tl.store(dR + place, tl.dot(narrow, tl.trans(w), input_precision=PRECISION).to(r.dtype), mask=keep)
        sum_W += tl.dot(tl.trans(r), narrow, input_precision=PRECISION)
    part = (batch * H + h) * chunks + chunk
    far = part.to(tl.int64) * M * D
    tl.store(dW + far + d[:, None] * M + m[None, :], sum_W, mask=(d[:, None] < D) & (m[None, :] < M))
    tl.store(db + part * M + m, sum_b, mask=m < M)
    tl.store(dtau + part, tl.sum(sum_tau, axis=0))
    if not SLICING:
        tl.store(dG + far + m[:, None] * D + d[None, :], sum_G, mask=inside)


def _sizes(R_BNC: torch.Tensor, weight_DM: torch.Tensor) -> tuple[int, int, int, int, int, int]:
    B, N, C = R_BNC.shape
    D, M = weight_DM.shape
    return B, N, C, C // D, D, M


def _tiles(D: int, M: int, N: int) -> dict[str, Any]:
    # A matrix unit multiplies tiles of at least 16; what lies beyond D or M is masked.
    tile = min(TILE, max(16, triton.next_power_of_2(N)))
    precision = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    return {
        "BN": tile,
        "BM": max(16, triton.next_power_of_2(M)),
        "BD": max(16, triton.next_power_of_2(D)),
        "SPAN": min(CHUNK, -(-N // tile) * tile),
        "PRECISION": precision,
        "num_warps": 4,
    }


class _Slice(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, R: torch.Tensor, F: torch.Tensor, W: torch.Tensor, b: torch.Tensor, tau: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        B, N, C, H, D, M = _sizes(R, W)
        tiles = _tiles(D, M, N)
        chunks = triton.cdiv(N, tiles["SPAN"])
        S = torch.empty(B, H, chunks, M, D, device=R.device, dtype=torch.float32)
        mass = torch.empty(B, H, chunks, M, device=R.device, dtype=torch.float32)
        _slice_forward[(chunks, H, B)](R, F, W, b, tau, S, mass, N, C, chunks, H=H, D=D, M=M, **tiles)
        ctx.save_for_backward(R, F, W, b, tau)
        return S.sum(2), mass.sum(2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, G: torch.Tensor, g: torch.Tensor) -> Any:
        R, F, W, b, tau = ctx.saved_tensors
        dR, dF, _, dW, db, dtau = _run_backward(R, F, W, b, tau, G.contiguous(), g.contiguous())
        return dR, dF, dW, db, dtau


class _Deslice(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, R: torch.Tensor, W: torch.Tensor, b: torch.Tensor, tau: torch.Tensor, Z: torch.Tensor
    ) -> torch.Tensor:
        B, N, C, H, D, M = _sizes(R, W)
        tiles = _tiles(D, M, N)
        O = torch.empty_like(R)
        grid = (triton.cdiv(N, tiles["SPAN"]), H, B)
        _deslice_forward[grid](R, W, b, tau, Z, O, N, C, H=H, D=D, M=M, **tiles)
        ctx.save_for_backward(R, W, b, tau, Z)
        return O

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dO: torch.Tensor) -> Any:
        R, W, b, tau, Z = ctx.saved_tensors
        dR, _, dZ, dW, db, dtau = _run_backward(R, dO.contiguous(), W, b, tau, Z, None)
        return dR, dW, db, dtau, dZ


def _run_backward(
    R: torch.Tensor, A: torch.Tensor, W: torch.Tensor, b: torch.Tensor, tau: torch.Tensor, G: torch.Tensor,
    g: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    B, N, C, H, D, M = _sizes(R, W)
    tiles = _tiles(D, M, N)
    chunks, slicing = triton.cdiv(N, tiles["SPAN"]), g is not None
    parts = {"device": R.device, "dtype": torch.float32}
    dR, dA = torch.empty_like(R), torch.empty_like(R) if slicing else R
    dG = torch.empty(B, H, chunks, M, D, **parts)  # type: ignore[call-overload]
    dW = torch.empty(B, H, chunks, D, M, **parts)  # type: ignore[call-overload]
    db = torch.empty(B, H, chunks, M, **parts)  # type: ignore[call-overload]
    dtau = torch.empty(B, H, chunks, **parts)  # type: ignore[call-overload]
    _backward[(chunks, H, B)](
        R, A, W, b, tau, G, G if g is None else g, dR, dA, dG, dW, db, dtau, N, C, chunks,
        H=H, D=D, M=M, SLICING=slicing, **tiles,
    )  # fmt: skip
    return (
        dR,
        dA,
        dG.sum(2).to(G.dtype),
        dW.sum((0, 1, 2)).to(W.dtype),
        db.sum((0, 1, 2)).to(b.dtype),
        dtau.sum((0, 2)).to(tau.dtype),
    )


def slice_points(
    R_BNC: torch.Tensor, F_BNC: torch.Tensor, weight_DM: torch.Tensor, bias_M: torch.Tensor, temperature_H: torch.Tensor
) -> torch.Tensor:
    """Z (B, H, M, D) of features F routed by R, both (B, N, C); in the type of F."""
    S_BHMD, mass_BHM = _Slice.apply(
        R_BNC.contiguous(), F_BNC.contiguous(), weight_DM.contiguous(), bias_M, temperature_H
    )
    return (S_BHMD / (mass_BHM + EPSILON)[..., None]).to(F_BNC.dtype)


def deslice_points(
    R_BNC: torch.Tensor,
    weight_DM: torch.Tensor,
    bias_M: torch.Tensor,
    temperature_H: torch.Tensor,
    Z_BHMD: torch.Tensor,
) -> torch.Tensor:
    """O (B, N, C): every point reads the slice states Z (B, H, M, D) with the weights it was routed by."""
    return _Deslice.apply(R_BNC.contiguous(), weight_DM.contiguous(), bias_M, temperature_H, Z_BHMD.contiguous())
