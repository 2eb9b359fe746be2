"""The numerical solver as a baseline: the cases of a seed solved on any grid, and the cost of one case.

A surrogate on a coarse grid must not be compared with the solver on its fine grid only: on the surrogate's own grid the
solver costs far less, and has an error too. On a coarser grid a flow also takes longer time steps, at the same Courant
number.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from scipy.fft import next_fast_len

from sigmasolver.simulate.darcy import Darcy, interpolation, solve
from sigmasolver.simulate.simulator import Simulator
from sigmasolver.simulate.spectral import resample
from sigmasolver.simulate.vorticity import Vorticity

__all__ = ["Work", "coarse_work", "finer_grid", "full_work"]

REFINEMENT = 1.2
"""Ratio from one grid to the next, in points per side."""


@dataclass(frozen=True)
class Work:
    """A computation to be timed."""

    grid: tuple[int, ...]
    call: Callable[[], torch.Tensor]
    """Returns frames `(B, frames, *grid)`; for `coarse_work`, at the points of the model."""


def full_work(
    simulator: Simulator, seed: int, index: int, frames: int, device: torch.device | str = "cpu"
) -> Work | None:
    """Solve one case on the grid of the ground truth, with this number of stored frames for a flow; None if the
    simulator is not supported here.

    For a flow only the forecast frames count, neither the burn-in nor the history; the starting point does not matter,
    because all steps cost the same.
    """
    if isinstance(simulator, Darcy):
        coefficient = simulator.coefficient(seed, [index], device)
        return Work((simulator.grid,) * 2, lambda: simulator.pressure(coefficient)[:, None])
    if isinstance(simulator, Vorticity):
        initial, short = simulator.initial(seed, [index], device), replace(simulator, burn_in=0.0, frames=frames)
        return Work((simulator.grid,) * 2, lambda: short.evolve(initial))
    return None


def coarse_work(
    simulator: Simulator,
    seed: int,
    start: torch.Tensor,
    points: np.ndarray,
    leads: int,
    time_stride: int,
    grid: int,
) -> Work | None:
    """Solve the first cases of a seed on `grid` points per side, with the result at the model's `points` along each
    axis; None if the simulator is not supported here.

    Darcy: `start` only sets the number of cases and the device; the coefficient is sampled at the cell centres of the
    coarse grid, and the pressure is interpolated to `points`. A flow continues from the vorticity `start` (B, n, n),
    with any number of points per side.
    """
    if isinstance(simulator, Darcy):
        fine = simulator.coefficient(seed, range(len(start)), start.device)
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
        steps = math.ceil(simulator.interval / simulator.step * grid / simulator.grid - 1e-6)  # tolerates round-off
        coarse = replace(
            simulator,
            grid=grid,
            stored=grid,
            step=simulator.interval / steps,
            burn_in=0.0,
            frames=leads * time_stride,
        )
        initial, factor = resample(start.double(), grid), math.ceil(grid / len(points))

        def vorticity() -> torch.Tensor:
            frames = coarse.evolve(initial)[:, time_stride - 1 :: time_stride]
            return resample(frames, factor * len(points))[..., ::factor, ::factor]

        return Work((grid, grid), vorticity)
    return None


def finer_grid(simulator: Simulator, grid: int) -> int:
    """Return the next grid to try; for a flow, one with fast Fourier transforms."""
    refined = math.ceil(REFINEMENT * grid)
    return next_fast_len(refined, real=True) if isinstance(simulator, Vorticity) else refined
