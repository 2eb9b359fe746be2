"""The solver as a baseline: the cases of a seed solved on a grid of choice, and the cost of one case.

A surrogate on a coarse grid must not be compared with the solver's fine grid alone: the solver on the surrogate's own
grid costs far less, and has an error too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from sigmasolver.simulate.darcy import Darcy, interpolation, solve
from sigmasolver.simulate.simulator import Simulator
from sigmasolver.simulate.vorticity import Vorticity

__all__ = ["Work", "coarse_work", "full_work"]


@dataclass(frozen=True)
class Work:
    """A computation to be timed."""

    grid: tuple[int, ...]
    call: Callable[[], torch.Tensor]
    """Returns frames at the points of the model, `(B, frames, *grid)`."""
    share: float = 1.0
    """Which part of the horizon one call computes: steps of equal cost need not all be timed."""


def full_work(
    simulator: Simulator, seed: int, index: int, leads: int, time_stride: int, device: torch.device | str = "cpu"
) -> Work | None:
    """One case on the grid that the truth was computed on; None where this simulator is not known here.

    Of a flow only what follows the given frames counts: neither the burn-in nor the history.
    """
    if isinstance(simulator, Darcy):
        coefficient = simulator.coefficient(seed, [index], device)
        return Work((simulator.grid,) * 2, lambda: simulator.pressure(coefficient)[:, None])
    if isinstance(simulator, Vorticity):
        initial, short = simulator.initial(seed, [index], device), replace(simulator, burn_in=0.0, frames=time_stride)
        return Work((simulator.grid,) * 2, lambda: short.evolve(initial), 1 / leads)
    return None


def coarse_work(
    simulator: Simulator,
    seed: int,
    indices: Sequence[int],
    history: torch.Tensor,
    points: np.ndarray,
    leads: int,
    time_stride: int,
    grid: int | None = None,
) -> Work | None:
    """These cases on `grid` points a side (None: the model's grid), at the model's `points` along each axis.

    Darcy: the coefficient is sampled at the cell centres of the coarse grid, and the pressure interpolated to `points`.
    A flow starts from the last frame of `history`, so it is solved on the model's grid and no other.
    """
    if isinstance(simulator, Vorticity) and grid not in (None, len(points)):
        return None
    grid = grid or len(points)
    if isinstance(simulator, Darcy):
        fine = simulator.coefficient(seed, indices, history.device)
        nearest = torch.from_numpy(((np.arange(grid) + 0.5) / grid * simulator.grid).astype(int))
        coefficient = fine[:, nearest][:, :, nearest]
        centres, nodes = (np.arange(grid) + 0.5) / grid, np.linspace(0, 1, grid)
        to_nodes, to_points = (interpolation(*pair).to(fine) for pair in ((centres, nodes), (nodes, points)))

        def pressure() -> torch.Tensor:
            at_nodes = to_nodes @ coefficient @ to_nodes.T
            at_nodes = at_nodes.clamp(simulator.low, simulator.high) if simulator.clip else at_nodes
            solution = solve(at_nodes, simulator.source, simulator.tolerance, simulator.iterations)
            return (to_points @ solution @ to_points.T)[:, None]

        return Work((grid, grid), pressure)
    if isinstance(simulator, Vorticity):
        coarse = replace(simulator, grid=grid, stored=grid, burn_in=0.0, frames=leads * time_stride)
        initial = history[:, -1, ..., 0]
        return Work((grid, grid), lambda: coarse.evolve(initial)[:, time_stride - 1 :: time_stride])
    return None
