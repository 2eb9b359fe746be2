"""The update of slice states, one program for one head of one sample: small enough to stay in registers, in float32.

    Z = sums / (mass + eps)      Z+ = Z + gamma Delta (residual),   Delta (replace),   Z (keep)
    Delta = A V,  A = softmax(Q K^T / sqrt(D)),   Q = Z Wq^T,  K = Z Wk^T,  V = Z Wv^T

The gradients that come back are those of the sums and the mass: G = dZ / (mass + eps), g = -sum_d dZ Z / (mass + eps).

Letters: M slices, D head width; a tile has SLICES and COLUMNS of them.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["update", "update_backward"]


@triton.jit
def _transposed(w: tl.tensor, d: tl.tensor, D: tl.constexpr) -> tl.tensor:
    """(in, out) in float32 of a weight (out, in)."""
    known = (d[:, None] < D) & (d[None, :] < D)
    return tl.load(w + d[None, :] * D + d[:, None], mask=known, other=0.0).to(tl.float32)


@triton.jit
def _attend(
    z: tl.tensor, wq: tl.tensor, wk: tl.tensor, wv: tl.tensor,
    d: tl.tensor, m: tl.tensor, D: tl.constexpr, M: tl.constexpr, ROOT: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Queries, keys, values (SLICES, COLUMNS) and A (SLICES, SLICES) of the states z of one head."""
    q = tl.dot(z, _transposed(wq, d, D), input_precision="ieee")
    k = tl.dot(z, _transposed(wk, d, D), input_precision="ieee")
    v = tl.dot(z, _transposed(wv, d, D), input_precision="ieee")
    x = tl.dot(q, tl.trans(k), input_precision="ieee") * ROOT
    x = tl.where(m[None, :] < M, x, float("-inf"))
    e = tl.exp(x - tl.max(x, axis=1)[:, None])
    return q, k, v, e / tl.sum(e, axis=1)[:, None]


@triton.jit
def update(
    partials: tl.tensor, wq: tl.tensor, wk: tl.tensor, wv: tl.tensor,
    gamma: tl.tensor, Z: tl.tensor, mass: tl.tensor, new: tl.tensor,
    chunks: tl.tensor,
    D: tl.constexpr, M: tl.constexpr, KIND: tl.constexpr, ROOT: tl.constexpr, EPS: tl.constexpr,
    SLICES: tl.constexpr, COLUMNS: tl.constexpr,
) -> None:  # fmt: skip
    """One head of one sample: Z and Z+ = `new` (heads, M, D), mass + eps (heads, M), of partial sums
    (heads, chunks, M, D + 1), the last of which is the mass.

        Z = sums / (mass + eps)      new = Z + gamma A V (residual),   A V (replace),   Z (keep)
    """
    head = tl.program_id(0)
    d, m = tl.arange(0, COLUMNS), tl.arange(0, SLICES)
    inside = (m[:, None] < M) & (d[None, :] < D)
    partials += head.to(tl.int64) * chunks * M * (D + 1)
    total, weight = tl.zeros((SLICES, COLUMNS), tl.float32), tl.zeros((SLICES,), tl.float32)
    for _chunk in tl.range(0, chunks, loop_unroll_factor=8):
        total += tl.load(partials + m[:, None] * (D + 1) + d[None, :], mask=inside, other=0.0)
        weight += tl.load(partials + m * (D + 1) + D, mask=m < M, other=0.0)
        partials += M * (D + 1)
    weight += EPS
    z = total / weight[:, None]
    out = z
    if KIND != "keep":
        v, a = _attend(z, wq, wk, wv, d, m, D, M, ROOT)[2:]
        out = tl.dot(a, v, input_precision="ieee")
        if KIND == "residual":
            out = z + tl.load(gamma).to(tl.float32) * out
    offsets = (head * M + m[:, None]) * D + d[None, :]
    tl.store(Z + offsets, z, mask=inside)
    tl.store(mass + head * M + m, weight, mask=m < M)
    tl.store(new + offsets, out, mask=inside)


@triton.jit
def update_backward(
    partials: tl.tensor, wq: tl.tensor, wk: tl.tensor, wv: tl.tensor, gamma: tl.tensor,
    Z: tl.tensor, mass: tl.tensor, G: tl.tensor, g: tl.tensor, sums: tl.tensor,
    chunks: tl.tensor,
    D: tl.constexpr, M: tl.constexpr, KIND: tl.constexpr, ROOT: tl.constexpr,
    SLICES: tl.constexpr, COLUMNS: tl.constexpr,
) -> None:  # fmt: skip
    """One head of one sample: G (heads, M, D) and g (heads, M) of partial sums of dZ+ (heads, chunks, M, D). A row of
    `sums`: dWq, dWk, dWv (D, D) each, dgamma.

        dV = A^T dDelta      dA = dDelta V^T      dx = A (dA - sum A dA) / sqrt(D)      dQ = dx K      dK = dx^T Q
        dZ = dQ Wq + dK Wk + dV Wv (+ dZ+, residual)      dWi = di^T Z      dgamma = sum dZ+ A V
        G = dZ / (mass + eps)      g = -sum_d dZ Z / (mass + eps)      dDelta = gamma dZ+ (residual),   dZ+ (replace)
    """
    head = tl.program_id(0)
    d, m = tl.arange(0, COLUMNS), tl.arange(0, SLICES)
    inside = (m[:, None] < M) & (d[None, :] < D)
    known = (d[:, None] < D) & (d[None, :] < D)
    offsets = (head * M + m[:, None]) * D + d[None, :]
    z = tl.load(Z + offsets, mask=inside, other=0.0)
    weight = tl.load(mass + head * M + m, mask=m < M, other=1.0)
    dnew = tl.zeros((SLICES, COLUMNS), tl.float32)
    partials += head.to(tl.int64) * chunks * M * D
    for _chunk in tl.range(0, chunks, loop_unroll_factor=8):
        dnew += tl.load(partials + m[:, None] * D + d[None, :], mask=inside, other=0.0)
        partials += M * D
    dz = dnew
    if KIND != "keep":
        q, k, v, a = _attend(z, wq, wk, wv, d, m, D, M, ROOT)
        a = tl.where(m[:, None] < M, a, 0.0)  # rows beyond the slices attend to nothing
        sums += head * (3 * D * D + 1)
        delta = dnew
        if KIND == "residual":
            tl.store(sums + 3 * D * D, tl.sum(tl.sum(dnew * tl.dot(a, v, input_precision="ieee"), axis=1), axis=0))
            delta = dnew * tl.load(gamma).to(tl.float32)
        else:
            tl.store(sums + 3 * D * D, 0.0)
        da = tl.dot(delta, tl.trans(v), input_precision="ieee")
        dx = a * (da - tl.sum(a * da, axis=1)[:, None]) * ROOT
        dq = tl.dot(dx, k, input_precision="ieee")
        dk = tl.dot(tl.trans(dx), q, input_precision="ieee")
        dv = tl.dot(tl.trans(a), delta, input_precision="ieee")
        to = d[:, None] * D + d[None, :]
        tl.store(sums + to, tl.dot(tl.trans(dq), z, input_precision="ieee"), mask=known)
        tl.store(sums + D * D + to, tl.dot(tl.trans(dk), z, input_precision="ieee"), mask=known)
        tl.store(sums + 2 * D * D + to, tl.dot(tl.trans(dv), z, input_precision="ieee"), mask=known)
        through = tl.dot(dq, tl.load(wq + to, mask=known, other=0.0).to(tl.float32), input_precision="ieee")
        through += tl.dot(dk, tl.load(wk + to, mask=known, other=0.0).to(tl.float32), input_precision="ieee")
        through += tl.dot(dv, tl.load(wv + to, mask=known, other=0.0).to(tl.float32), input_precision="ieee")
        dz = dnew + through if KIND == "residual" else through
    tl.store(G + offsets, dz / weight[:, None], mask=inside)
    tl.store(g + head * M + m, -tl.sum(dz * z, axis=1) / weight, mask=m < M)
