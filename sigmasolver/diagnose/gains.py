"""How much a call of the forecaster can enlarge an error in its history (app:error-propagation).

    e_{k+1} = δ_k + J̄_k e_k,      J̄_k = ∫₀¹ Df(s_k + t e_k) dt,      e_k = ŝ_k - s_k        (eq:error-propagation)

f is the whole history update: predict a block, append it, keep the newest T_in frames; fields that are given are held
fixed. s_k is the true history before call k, ŝ_k that of the free forecast, δ_k the error that the call adds itself.
The integral is a Gauss-Legendre sum. ‖J̄_k‖₂ comes from an iteration on J̄ᵀJ̄ with exact derivatives, which approaches
the norm from below: what it finds is a lower estimate. States are in physical units.

Letters: B batch, T frames, q forecast fields.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from sigmasolver.diagnose.linearise import Linear, Linearised
from sigmasolver.forecast import Forecaster, feed_back

__all__ = ["MeanJacobian", "block_output", "history_update", "largest_gain", "mean_products"]

NODES = 2
"""Points of the Gauss-Legendre sum: exact for Jacobians that are cubic along the segment."""
FINE_NODES = 8
"""Points of the sum where single products are wanted and not a norm: each point is one linearisation."""
FEWEST, MOST = 8, 64
"""Products of an iteration. Frames that only shift have gain one; a start among very many of them looks converged."""
TOLERANCE = 5e-3
"""Of the squared gain: a singular value lies within a quarter of a percent of what is found."""
SEED = 0


def history_update(forecaster: Forecaster, given: torch.Tensor, time: torch.Tensor | None = None) -> Linear:
    """f: (B, T_in, *grid, q) -> the same shape; `given` (B, T_in, *grid, more) are the fields that stay as they are,
    and so does the `time` (B,) of the call."""

    def update(state: torch.Tensor) -> torch.Tensor:
        history = _with_given(state, given)
        return feed_back(history, forecaster(history, time=_repeated(time, len(state))))[..., : state.shape[-1]]

    return update


def block_output(forecaster: Forecaster, given: torch.Tensor, time: torch.Tensor | None = None) -> Linear:
    """B of eq:rollout-block-output-bound: (B, T_in, *grid, q) -> all frames of the block, (B, T_out, *grid, q)."""
    return lambda state: forecaster(_with_given(state, given), time=_repeated(time, len(state)))


def _with_given(state: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    """A history; `state` may hold the samples of `given` several times over."""
    return torch.cat((state, given.repeat(len(state) // len(given), *(1,) * (given.ndim - 1))), dim=-1)


def _repeated(time: torch.Tensor | None, samples: int) -> torch.Tensor | None:
    return None if time is None else time.repeat(samples // len(time))


class MeanJacobian:
    """J̄ of a map between the states `true` and `visited`, (B, ...) each: one matrix for every sample.

    The map must treat samples separately. It is linearised once, for all products.
    """

    def __init__(self, function: Linear, true: torch.Tensor, visited: torch.Tensor) -> None:
        points, weights = _quadrature(true, visited, NODES)
        self._weights = torch.tensor(weights).to(true)
        self._at_nodes = Linearised(function, torch.cat(points))

    def __matmul__(self, v: torch.Tensor) -> torch.Tensor:
        """J̄ v, sample by sample."""
        return self._mean(self._at_nodes @ self._repeated(v))

    def transposed(self, u: torch.Tensor) -> torch.Tensor:
        """J̄ᵀ u, sample by sample."""
        return self._mean(self._at_nodes.transposed(self._repeated(u)))

    def _repeated(self, v: torch.Tensor) -> torch.Tensor:
        return v.repeat(len(self._weights), *(1,) * (v.ndim - 1))

    def _mean(self, images: torch.Tensor) -> torch.Tensor:
        by_node = images.unflatten(0, (len(self._weights), -1))
        return (by_node * self._weights.view(-1, *(1,) * images.ndim)).sum(0)


def mean_products(
    function: Linear,
    true: torch.Tensor,
    visited: torch.Tensor,
    vectors: Sequence[torch.Tensor],
    nodes: int,
) -> list[torch.Tensor]:
    """J̄ v of a map between states, for each of a few vectors; one point of the segment is in memory at a time."""
    products = [torch.zeros_like(v) for v in vectors]
    for point, weight in zip(*_quadrature(true, visited, nodes), strict=True):
        J = Linearised(function, point)
        products = [held + weight * (J @ v) for held, v in zip(products, vectors, strict=True)]
    return products


def _quadrature(true: torch.Tensor, visited: torch.Tensor, nodes: int) -> tuple[list[torch.Tensor], list[float]]:
    """States on the segment and their weights, which sum to one; a segment without length is one point."""
    places, weights = np.polynomial.legendre.leggauss(1 if torch.equal(true, visited) else nodes)
    return [true + (visited - true) * float(place + 1) / 2 for place in places], (weights / 2).tolist()


def largest_gain(
    forward: Linear,
    backward: Linear,
    like: torch.Tensor,
    tolerance: float = TOLERANCE,
    tick: Callable[[int], None] | None = None,
) -> torch.Tensor:
    """(B,): a lower estimate of the norm of `forward`, whose transpose is `backward`, for every sample of `like`.

    A power iteration that keeps its directions V = (v_1, v_2, ...), orthogonal to each other (Lanczos): the largest
    eigenvalue θ of T = VᵀJᵀJV, with eigenvector s, rises to the squared norm. Stops when y = V s satisfies
    ‖JᵀJ y - θ y‖ ≤ tolerance · θ in all samples, or after `MOST` products, which are counted to `tick`. NaN where a
    product is not finite.
    """
    start = torch.randn(like.shape, generator=torch.Generator().manual_seed(SEED), dtype=torch.float64)
    directions = [_unit(start.to(like).flatten(1))[0]]
    T = torch.zeros(len(like), MOST, MOST, dtype=torch.float64)
    dead = torch.zeros(len(like), dtype=torch.bool, device=like.device)
    theta = torch.zeros(len(like), dtype=torch.float64)
    for step in range(MOST):
        image = backward(forward(directions[-1].view_as(like))).flatten(1)
        dead = dead | ~image.isfinite().all(1)
        image = image.masked_fill(dead[:, None], 0.0)
        V_BKN = torch.stack(directions, dim=1)
        shares, rest = _split(V_BKN, image)
        _, rest = _split(V_BKN, rest)  # once leaves what rounding brought back
        # Where nothing but rounding is left, all directions that the operator has were found.
        rounding = 32 * torch.finfo(like.dtype).eps * torch.linalg.vector_norm(image, dim=1)
        direction, size = _unit(rest, rounding)
        T[:, : step + 1, step] = shares.cpu().double()
        values, vectors = torch.linalg.eigh(T[:, : step + 1, : step + 1], UPLO="U")
        theta, residual = values[:, -1], size.cpu().double() * vectors[:, -1, -1].abs()
        if step + 1 >= FEWEST and bool((residual <= tolerance * theta).all()):
            break
        directions.append(direction)
        if tick is not None:
            tick(step + 1)
    return theta.clamp(min=0).sqrt().to(like).masked_fill(dead, torch.nan)


def _split(V_BKN: torch.Tensor, v_BN: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The shares of v along the directions V, and what is orthogonal to them."""
    shares_BK = torch.einsum("bkn,bn->bk", V_BKN, v_BN)
    return shares_BK, v_BN - torch.einsum("bkn,bk->bn", V_BKN, shares_BK)


def _unit(v_BN: torch.Tensor, least_B: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Every row divided by its norm, and the norms; a row that is zero, or no longer than `least`, becomes zero."""
    size = torch.linalg.vector_norm(v_BN, dim=1)
    kept = size > (0 if least_B is None else least_B)
    return torch.where(kept[:, None], v_BN / size[:, None], 0.0), torch.where(kept, size, 0.0)
