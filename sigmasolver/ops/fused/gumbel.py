"""Gumbel softmax in one pass forward and one backward, storing nothing but the result.

    g = -log(-log(u + tiny) + tiny)      P = softmax over slices of x = (s + g) / t
    dx = P (dP - sum_m P dP)      ds = dx / t      dt = -sum_m x dx / t

The backward pass recomputes P from s and u. Since dx sums to zero, x may be shifted by its maximum.

Letters: N rows (points of all heads and samples), M slices.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from sigmasolver.ops.fused import tuning
from sigmasolver.ops.fused.jit import jit
from sigmasolver.ops.softmax import TINY

__all__ = ["gumbel_softmax"]


@jit
def _noisy_softmax(
    s: tl.tensor, u: tl.tensor, t: tl.tensor,
    rows: tl.tensor, SLICES: tl.constexpr, TINY: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_SLICES: tl.constexpr,
) -> tuple[tl.tensor, ...]:  # fmt: skip
    """For a tile of rows: x minus its maximum, P (TILE_ROWS, TILE_SLICES), 1 / t (TILE_ROWS,), row indices, offsets and
    mask."""
    n, m = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS), tl.arange(0, TILE_SLICES)
    keep = (n[:, None] < rows) & (m[None, :] < SLICES)
    offsets = n.to(tl.int64)[:, None] * SLICES + m[None, :]
    noise = -tl.log(TINY - tl.log(tl.load(u + offsets, mask=keep, other=0.5) + TINY))
    inverse_t = 1 / tl.load(t + n, mask=n < rows, other=1.0).to(tl.float32)
    x = (tl.load(s + offsets, mask=keep, other=0.0).to(tl.float32) + noise) * inverse_t[:, None]
    x = tl.where(m[None, :] < SLICES, x, float("-inf"))
    x -= tl.max(x, axis=1)[:, None]
    e = tl.exp(x)
    return tl.where(m[None, :] < SLICES, x, 0.0), e / tl.sum(e, axis=1)[:, None], inverse_t, n, offsets, keep


@jit
def _gumbel_forward(
    s: tl.tensor, u: tl.tensor, t: tl.tensor, P: tl.tensor,
    rows: tl.tensor, SLICES: tl.constexpr, TINY: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_SLICES: tl.constexpr,
) -> None:  # fmt: skip
    """P (N, M) = softmax over slices of (s - log(-log(u + TINY) + TINY)) / t, with s, u (N, M), t (N,)."""
    _, p, _, _, offsets, keep = _noisy_softmax(s, u, t, rows, SLICES, TINY, TILE_ROWS, TILE_SLICES)
    tl.store(P + offsets, p.to(P.dtype.element_ty), mask=keep)


@jit
def _gumbel_backward(
    s: tl.tensor, u: tl.tensor, t: tl.tensor, dP: tl.tensor, ds: tl.tensor, dt: tl.tensor,
    rows: tl.tensor, SLICES: tl.constexpr, TINY: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_SLICES: tl.constexpr,
) -> None:  # fmt: skip
    """ds (N, M) = dx / t and dt (N,) = -sum_m x dx / t, with dx = P (dP - sum_m P dP), dP (N, M)."""
    x, p, inverse_t, n, offsets, keep = _noisy_softmax(s, u, t, rows, SLICES, TINY, TILE_ROWS, TILE_SLICES)
    g = tl.load(dP + offsets, mask=keep, other=0.0).to(tl.float32)
    dx = p * (g - tl.sum(p * g, axis=1)[:, None])
    tl.store(ds + offsets, (dx * inverse_t[:, None]).to(ds.dtype.element_ty), mask=keep)
    tl.store(dt + n, (-inverse_t * tl.sum(x * dx, axis=1)).to(dt.dtype.element_ty), mask=n < rows)


class _GumbelSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, s: torch.Tensor, u: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        P, tile = torch.empty_like(s), _tile(s)
        _gumbel_forward[_programs(s, tile)](s, u, t, P, len(s), **tile)
        ctx.save_for_backward(s, u, t)
        return P

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dP: torch.Tensor) -> Any:
        s, u, t = ctx.saved_tensors
        ds, dt, tile = torch.empty_like(s), torch.empty_like(t), _tile(s)
        _gumbel_backward[_programs(s, tile)](s, u, t, dP.contiguous(), ds, dt, len(s), **tile)
        return ds, None, dt


def _tile(s: torch.Tensor) -> dict[str, Any]:
    slices = s.shape[-1]
    tile = triton.next_power_of_2(slices)
    sizes: dict[str, Any] = {"SLICES": slices, "TINY": TINY, "TILE_ROWS": tuning.GUMBEL_TILE // tile}
    return sizes | {"TILE_SLICES": tile, "num_warps": tuning.GUMBEL_WARPS}


def _programs(s: torch.Tensor, tile: dict[str, Any]) -> tuple[int]:
    return (triton.cdiv(len(s), tile["TILE_ROWS"]),)


def gumbel_softmax(logits: torch.Tensor, uniform: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """`ops.softmax.gumbel_softmax` with noise; the result has the dtype of the logits."""
    slices = logits.shape[-1]
    rows = logits.reshape(-1, slices), uniform.reshape(-1, slices), temperature.reshape(-1)
    return _GumbelSoftmax.apply(*(x.contiguous() for x in rows)).view(logits.shape)
