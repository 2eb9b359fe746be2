"""How much a call of the forecaster can amplify an error in its history (app:error-propagation).

    e_{k+1} = δ_k + J̄_k e_k,      J̄_k = ∫₀¹ Df(s_k + t e_k) dt,      e_k = ŝ_k - s_k        (eq:error-propagation)

f is the full history update: predict a block, append it, keep the newest T_in frames; given fields are held fixed.
s_k is the true history before call k, ŝ_k that of the free forecast, δ_k the error added by the call itself. The
integral is a Gauss-Legendre sum. ‖J̄_k‖₂ comes from a Lanczos iteration on J̄ᵀJ̄ with exact derivatives, which
approaches the norm from below, so the result is a lower estimate. States are in physical units.

Letters: B batch, T frames, q forecast fields.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from sigmasolver.diagnose.linearise import Linearised, StateMap
from sigmasolver.forecast import Forecaster, feed_back

__all__ = ["MeanJacobian", "block_output", "history_update", "largest_gain", "mean_products"]

NODES = 2
"""Gauss-Legendre nodes: exact for Jacobians that are cubic along the segment."""
FINE_NODES = 8
"""Gauss-Legendre nodes for single products instead of a norm: one linearisation per node."""
MIN_PRODUCTS, MAX_PRODUCTS = 8, 64
"""Products of an iteration. Frames that are only shifted have gain one, so the first steps may look converged."""
TOLERANCE = 5e-3
"""Relative to the squared gain: some singular value is within a quarter of a percent of the result."""
SEED = 0


def history_update(forecaster: Forecaster, given: torch.Tensor, time: torch.Tensor | None = None) -> StateMap:
    """f: (B, T_in, *grid, q) -> the same shape. The `given` fields (B, T_in, *grid, more) and the `time` (B,) of the
    call are held fixed."""

    def update(state: torch.Tensor) -> torch.Tensor:
        history = _append_given(state, given)
        return feed_back(history, forecaster(history, time=_repeat(time, len(state))))[..., : state.shape[-1]]

    return update


def block_output(forecaster: Forecaster, given: torch.Tensor, time: torch.Tensor | None = None) -> StateMap:
    """B of eq:rollout-block-output-bound: (B, T_in, *grid, q) -> all frames of the block, (B, T_out, *grid, q)."""
    return lambda state: forecaster(_append_given(state, given), time=_repeat(time, len(state)))


def _append_given(state: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    """The full history; the samples of `given` are repeated to match those of `state`."""
    return torch.cat((state, given.repeat(len(state) // len(given), *(1,) * (given.ndim - 1))), dim=-1)


def _repeat(time: torch.Tensor | None, samples: int) -> torch.Tensor | None:
    return None if time is None else time.repeat(samples // len(time))


class MeanJacobian:
    """J̄ of a map between the states `true` and `visited`, (B, ...) each: one matrix per sample.

    The map must act on each sample independently. It is linearised once for all products.
    """

    def __init__(self, function: StateMap, true: torch.Tensor, visited: torch.Tensor) -> None:
        points, weights = _quadrature(true, visited, NODES)
        self._weights = torch.tensor(weights).to(true)
        self._at_nodes = Linearised(function, torch.cat(points))

    def __matmul__(self, v: torch.Tensor) -> torch.Tensor:
        """J̄ v, sample by sample."""
        return self._mean(self._at_nodes @ self._repeat(v))

    def transposed(self, u: torch.Tensor) -> torch.Tensor:
        """J̄ᵀ u, sample by sample."""
        return self._mean(self._at_nodes.transposed(self._repeat(u)))

    def _repeat(self, v: torch.Tensor) -> torch.Tensor:
        return v.repeat(len(self._weights), *(1,) * (v.ndim - 1))

    def _mean(self, images: torch.Tensor) -> torch.Tensor:
        by_node = images.unflatten(0, (len(self._weights), -1))
        return (by_node * self._weights.view(-1, *(1,) * images.ndim)).sum(0)


def mean_products(
    function: StateMap,
    true: torch.Tensor,
    visited: torch.Tensor,
    vectors: Sequence[torch.Tensor],
    nodes: int,
) -> list[torch.Tensor]:
    """J̄ v of a map between states, for several vectors; holds one linearisation in memory at a time."""
    products = [torch.zeros_like(v) for v in vectors]
    for point, weight in zip(*_quadrature(true, visited, nodes), strict=True):
        J = Linearised(function, point)
        products = [product + weight * (J @ v) for product, v in zip(products, vectors, strict=True)]
    return products


def _quadrature(true: torch.Tensor, visited: torch.Tensor, nodes: int) -> tuple[list[torch.Tensor], list[float]]:
    """Quadrature nodes on the segment and their weights, which sum to one; a segment of zero length has one node."""
    legendre_nodes, weights = np.polynomial.legendre.leggauss(1 if torch.equal(true, visited) else nodes)
    return [true + (visited - true) * float(node + 1) / 2 for node in legendre_nodes], (weights / 2).tolist()


def largest_gain(
    forward: StateMap,
    backward: StateMap,
    like: torch.Tensor,
    tolerance: float = TOLERANCE,
    tick: Callable[[int], None] | None = None,
) -> torch.Tensor:
    """(B,): a lower estimate of the norm of `forward`, whose transpose is `backward`, for every sample of `like`.

    A Lanczos iteration with full reorthogonalisation of V = (v_1, v_2, ...): the largest eigenvalue θ of
    T = VᵀJᵀJV, with eigenvector s, increases to the squared norm. Stops when y = V s satisfies
    ‖JᵀJ y - θ y‖ ≤ tolerance · θ in all samples, or after `MAX_PRODUCTS` products; `tick` gets their number. NaN where
    a product is not finite.
    """
    start = torch.randn(like.shape, generator=torch.Generator().manual_seed(SEED), dtype=torch.float64)
    directions = [_normalise(start.to(like).flatten(1))[0]]
    T = torch.zeros(len(like), MAX_PRODUCTS, MAX_PRODUCTS, dtype=torch.float64)
    non_finite = torch.zeros(len(like), dtype=torch.bool, device=like.device)
    theta = torch.zeros(len(like), dtype=torch.float64)
    for step in range(MAX_PRODUCTS):
        image = backward(forward(directions[-1].view_as(like))).flatten(1)
        non_finite = non_finite | ~image.isfinite().all(1)
        image = image.masked_fill(non_finite[:, None], 0.0)
        V_BKN = torch.stack(directions, dim=1)
        coefficients, remainder = _orthogonalise(V_BKN, image)
        _, remainder = _orthogonalise(V_BKN, remainder)  # a second pass removes the round-off of the first
        # If only round-off is left, the Krylov space is exhausted.
        round_off = 32 * torch.finfo(like.dtype).eps * torch.linalg.vector_norm(image, dim=1)
        direction, size = _normalise(remainder, round_off)
        T[:, : step + 1, step] = coefficients.cpu().double()
        values, vectors = torch.linalg.eigh(T[:, : step + 1, : step + 1], UPLO="U")
        theta, residual = values[:, -1], size.cpu().double() * vectors[:, -1, -1].abs()
        if step + 1 >= MIN_PRODUCTS and bool((residual <= tolerance * theta).all()):
            break
        directions.append(direction)
        if tick is not None:
            tick(step + 1)
    return theta.clamp(min=0).sqrt().to(like).masked_fill(non_finite, torch.nan)


def _orthogonalise(V_BKN: torch.Tensor, v_BN: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Coefficients of v along the directions V, and the remainder orthogonal to them."""
    coefficients_BK = torch.einsum("bkn,bn->bk", V_BKN, v_BN)
    return coefficients_BK, v_BN - torch.einsum("bkn,bk->bn", V_BKN, coefficients_BK)


def _normalise(v_BN: torch.Tensor, min_norm_B: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows divided by their norms, and the norms; a row that is zero, or not longer than `min_norm`, becomes zero."""
    size = torch.linalg.vector_norm(v_BN, dim=1)
    nonzero = size > (0 if min_norm_B is None else min_norm_B)
    return torch.where(nonzero[:, None], v_BN / size[:, None], 0.0), torch.where(nonzero, size, 0.0)
