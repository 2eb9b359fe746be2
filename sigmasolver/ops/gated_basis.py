"""From points to basis functions and back, each function weighted by a gate at every point.

    G = softmax over functions of (R W + b) / tau      E = G * Phi      O = E between(E^T F)

Letters: B batch, H heads, N points, K functions, D head width, C = H D channels.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from sigmasolver.ops.dispatch import choose
from sigmasolver.ops.modules import RoutingModule
from sigmasolver.ops.slices import slice_limits, split_heads

__all__ = ["through_basis"]


def through_basis(
    R: torch.Tensor,
    F: torch.Tensor,
    gate: RoutingModule,
    basis: Callable[[torch.dtype], torch.Tensor],
    between: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """R and F (B, *grid, C) -> O (B, *grid, C). `basis` returns Phi (N, K) in a dtype; `between` maps coefficients
    (B, H, K, D) to new ones."""
    functions, heads = gate.map.weight.shape[0], len(gate.map.temperature)
    if fused := choose("gated_basis", R, limits=slice_limits(R, heads, functions), parts={"the gate": gate}):
        flat, Phi_NK = R.flatten(1, -2), basis(R.dtype)
        S_BHKD = fused.gather(flat, F.flatten(1, -2), Phi_NK, gate.map)
        return fused.spread(flat, between(S_BHKD), Phi_NK, gate.map).view(R.shape)
    G_BHNK = gate(split_heads(R, heads))
    E_BHNK = G_BHNK * basis(G_BHNK.dtype)
    O_BHND = E_BHNK @ between(E_BHNK.mT @ split_heads(F, heads))
    return O_BHND.transpose(1, 2).reshape(R.shape)
