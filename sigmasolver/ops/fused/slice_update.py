"""The update of slice states, with one program per head and sample: small enough to stay in registers, in float32.

    Z = sums / (mass + eps)      Z+ = Z + gamma Delta (residual),   Delta (replace),   Z (keep)
    Delta = A V,  A = softmax(Q K^T / sqrt(D)),   Q = Z Wq^T,  K = Z Wk^T,  V = Z Wv^T

The backward pass returns the gradients of the sums and the mass: G = dZ / (mass + eps), g = -sum_d dZ Z / (mass + eps).

Letters: M slices, D head width, the channels of a head.
"""

from __future__ import annotations

import triton.language as tl

from sigmasolver.ops.fused.jit import jit

__all__ = ["update", "update_backward"]


@jit
def _load_transposed(w: tl.tensor, d: tl.tensor, HEAD_WIDTH: tl.constexpr) -> tl.tensor:
    """A weight (out, in) as (in, out) in float32."""
    w_mask = (d[:, None] < HEAD_WIDTH) & (d[None, :] < HEAD_WIDTH)
    return tl.load(w + d[None, :] * HEAD_WIDTH + d[:, None], mask=w_mask, other=0.0).to(tl.float32)


@jit
def _attend(
    z: tl.tensor, wq: tl.tensor, wk: tl.tensor, wv: tl.tensor,
    d: tl.tensor, m: tl.tensor, HEAD_WIDTH: tl.constexpr, SLICES: tl.constexpr, ROOT: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Queries, keys, values (TILE_SLICES, TILE_CHANNELS) and A (TILE_SLICES, TILE_SLICES) of the states z of a head."""
    q = tl.dot(z, _load_transposed(wq, d, HEAD_WIDTH), input_precision="ieee")
    k = tl.dot(z, _load_transposed(wk, d, HEAD_WIDTH), input_precision="ieee")
    v = tl.dot(z, _load_transposed(wv, d, HEAD_WIDTH), input_precision="ieee")
    x = tl.dot(q, tl.trans(k), input_precision="ieee") * ROOT
    x = tl.where(m[None, :] < SLICES, x, float("-inf"))
    e = tl.exp(x - tl.max(x, axis=1)[:, None])
    return q, k, v, e / tl.sum(e, axis=1)[:, None]


@jit
def update(
    partials: tl.tensor, wq: tl.tensor, wk: tl.tensor, wv: tl.tensor,
    gamma: tl.tensor, Z: tl.tensor, mass: tl.tensor, new: tl.tensor,
    chunks: tl.tensor,
    HEAD_WIDTH: tl.constexpr, SLICES: tl.constexpr, KIND: tl.constexpr, ROOT: tl.constexpr, EPS: tl.constexpr,
    TILE_SLICES: tl.constexpr, TILE_CHANNELS: tl.constexpr,
) -> None:  # fmt: skip
    """For one head of one sample: Z and Z+ = `new` (heads, M, D), mass + eps (heads, M), from partial sums
    (heads, chunks, M, D + 1), whose last column is the mass.

        Z = sums / (mass + eps)      new = Z + gamma A V (residual),   A V (replace),   Z (keep)
    """
    head = tl.program_id(0)
    d, m = tl.arange(0, TILE_CHANNELS), tl.arange(0, TILE_SLICES)
    inside = (m[:, None] < SLICES) & (d[None, :] < HEAD_WIDTH)
    partials += head.to(tl.int64) * chunks * SLICES * (HEAD_WIDTH + 1)
    total, total_mass = tl.zeros((TILE_SLICES, TILE_CHANNELS), tl.float32), tl.zeros((TILE_SLICES,), tl.float32)
    for _chunk in tl.range(0, chunks, loop_unroll_factor=8):
        total += tl.load(partials + m[:, None] * (HEAD_WIDTH + 1) + d[None, :], mask=inside, other=0.0)
        total_mass += tl.load(partials + m * (HEAD_WIDTH + 1) + HEAD_WIDTH, mask=m < SLICES, other=0.0)
        partials += SLICES * (HEAD_WIDTH + 1)
    total_mass += EPS
    z = total / total_mass[:, None]
    out = z
    if KIND != "keep":
        v, a = _attend(z, wq, wk, wv, d, m, HEAD_WIDTH, SLICES, ROOT)[2:]
        out = tl.dot(a, v, input_precision="ieee")
        if KIND == "residual":
            out = z + tl.load(gamma).to(tl.float32) * out
    offsets = (head * SLICES + m[:, None]) * HEAD_WIDTH + d[None, :]
    tl.store(Z + offsets, z, mask=inside)
    tl.store(mass + head * SLICES + m, total_mass, mask=m < SLICES)
    tl.store(new + offsets, out, mask=inside)


@jit
def update_backward(
    partials: tl.tensor, wq: tl.tensor, wk: tl.tensor, wv: tl.tensor, gamma: tl.tensor,
    Z: tl.tensor, mass: tl.tensor, G: tl.tensor, g: tl.tensor, sums: tl.tensor,
    chunks: tl.tensor,
    HEAD_WIDTH: tl.constexpr, SLICES: tl.constexpr, KIND: tl.constexpr, ROOT: tl.constexpr,
    TILE_SLICES: tl.constexpr, TILE_CHANNELS: tl.constexpr,
) -> None:  # fmt: skip
    """For one head of one sample: G (heads, M, D) and g (heads, M) from partial sums of dZ+ (heads, chunks, M, D). A
    row of `sums`: dWq, dWk, dWv (D, D) each, dgamma.

        dV = A^T dDelta      dA = dDelta V^T      dx = A (dA - sum A dA) / sqrt(D)      dQ = dx K      dK = dx^T Q
        dZ = dQ Wq + dK Wk + dV Wv (+ dZ+, residual)      dWi = di^T Z      dgamma = sum dZ+ A V
        G = dZ / (mass + eps)      g = -sum_d dZ Z / (mass + eps)      dDelta = gamma dZ+ (residual),   dZ+ (replace)
    """
    head = tl.program_id(0)
    d, m = tl.arange(0, TILE_CHANNELS), tl.arange(0, TILE_SLICES)
    inside = (m[:, None] < SLICES) & (d[None, :] < HEAD_WIDTH)
    w_mask = (d[:, None] < HEAD_WIDTH) & (d[None, :] < HEAD_WIDTH)
    offsets = (head * SLICES + m[:, None]) * HEAD_WIDTH + d[None, :]
    z = tl.load(Z + offsets, mask=inside, other=0.0)
    total_mass = tl.load(mass + head * SLICES + m, mask=m < SLICES, other=1.0)
    dnew = tl.zeros((TILE_SLICES, TILE_CHANNELS), tl.float32)
    partials += head.to(tl.int64) * chunks * SLICES * HEAD_WIDTH
    for _chunk in tl.range(0, chunks, loop_unroll_factor=8):
        dnew += tl.load(partials + m[:, None] * HEAD_WIDTH + d[None, :], mask=inside, other=0.0)
        partials += SLICES * HEAD_WIDTH
    dz = dnew
    if KIND != "keep":
        q, k, v, a = _attend(z, wq, wk, wv, d, m, HEAD_WIDTH, SLICES, ROOT)
        a = tl.where(m[:, None] < SLICES, a, 0.0)  # rows beyond the last slice attend to nothing
        WEIGHTS: tl.constexpr = HEAD_WIDTH * HEAD_WIDTH
        sums += head * (3 * WEIGHTS + 1)
        delta = dnew
        if KIND == "residual":
            dgamma = sums + 3 * WEIGHTS
            tl.store(dgamma, tl.sum(tl.sum(dnew * tl.dot(a, v, input_precision="ieee"), axis=1), axis=0))
            delta = dnew * tl.load(gamma).to(tl.float32)
        else:
            tl.store(sums + 3 * WEIGHTS, 0.0)
        da = tl.dot(delta, tl.trans(v), input_precision="ieee")
        dx = a * (da - tl.sum(a * da, axis=1)[:, None]) * ROOT
        dq = tl.dot(dx, k, input_precision="ieee")
        dk = tl.dot(tl.trans(dx), q, input_precision="ieee")
        dv = tl.dot(tl.trans(a), delta, input_precision="ieee")
        w_offsets = d[:, None] * HEAD_WIDTH + d[None, :]
        tl.store(sums + w_offsets, tl.dot(tl.trans(dq), z, input_precision="ieee"), mask=w_mask)
        tl.store(sums + WEIGHTS + w_offsets, tl.dot(tl.trans(dk), z, input_precision="ieee"), mask=w_mask)
        tl.store(sums + 2 * WEIGHTS + w_offsets, tl.dot(tl.trans(dv), z, input_precision="ieee"), mask=w_mask)
        dz_qkv = tl.dot(dq, tl.load(wq + w_offsets, mask=w_mask, other=0.0).to(tl.float32), input_precision="ieee")
        dz_qkv += tl.dot(dk, tl.load(wk + w_offsets, mask=w_mask, other=0.0).to(tl.float32), input_precision="ieee")
        dz_qkv += tl.dot(dv, tl.load(wv + w_offsets, mask=w_mask, other=0.0).to(tl.float32), input_precision="ieee")
        dz = dnew + dz_qkv if KIND == "residual" else dz_qkv
    tl.store(G + offsets, dz / total_mass[:, None], mask=inside)
    tl.store(g + head * SLICES + m, -tl.sum(dz * z, axis=1) / total_mass, mask=m < SLICES)
