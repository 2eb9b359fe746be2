"""Forecasts averaged over symmetries of the equation, and how much they differ.

    x_g = g⁻¹ F(g h),    mean m = (1/R) Σ x_g,    spread s² = (1/R) Σ (x_g − m)²      at each point

h history, F the rollout of the forecaster, g the first R symmetries of a group (`GridSymmetries.first`). The exact
solution does not depend on g, so whatever the x_g differ by is error: for any truth y,

    (1/R) Σ (x_g − y)² = (m − y)² + s².

The spread, which needs no truth, is thus at most the root mean square error of the x_g. What they all get wrong alike
remains in m.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from sigmasolver.forecast.forecaster import Forecaster, Rollout, native
from sigmasolver.symmetries import SymmetryGroup

__all__ = ["SymmetricRollout", "symmetric_forecasts", "symmetric_rollout"]


@dataclass(frozen=True)
class SymmetricRollout:
    """Mean and spread of the forecasts of one flow."""

    mean: Rollout
    """`stopped` is the first lead at which one of the forecasts is not finite."""
    spread: torch.Tensor
    """Deviation of the forecasts at each point: (B, horizon, *grid, q)."""

    def relative_spread(self) -> torch.Tensor:
        """Norm of the spread over points, relative to the root mean square norm of the forecasts: (B, horizon, q)."""
        spread, mean = (frames.double().flatten(2, -2).norm(dim=2) for frames in (self.spread, self.mean.frames))
        ratio: torch.Tensor = spread / torch.hypot(spread, mean)
        return ratio


def symmetric_rollout(
    forecaster: Forecaster,
    history: torch.Tensor | np.ndarray,
    steps: int,
    group: SymmetryGroup,
    copies: int,
    time: torch.Tensor | np.ndarray | float | None = None,
) -> SymmetricRollout:
    """Average free forecasts of transformed histories.

    Args:
        forecaster: rolled out once for each symmetry.
        history: `(B, T_in, *grid, q_in)`, as for `Forecaster.rollout`.
        steps: number of frames.
        group: symmetries of the equation, such as `symmetries_of(task)`.
        copies: number of symmetries, at least 2; the first one is the identity.
        time: as for `Forecaster.rollout`.

    Returns:
        The mean of the forecasts, in the units of the data, and their deviation at each point.

    Example:
        >>> import sigmasolver, torch
        >>> from sigmasolver.forecast.symmetric import symmetric_rollout
        >>> from sigmasolver.symmetries import SYMMETRIES
        >>> coefficient = torch.full((1, 1, 85, 85, 1), 3.0)
        >>> forecast = symmetric_rollout(sigmasolver.load("darcy"), coefficient, 1, SYMMETRIES["square"], copies=2)
        >>> forecast.mean.frames.shape == forecast.spread.shape
        True
    """
    if copies < 2:
        raise ValueError(f"A spread needs at least 2 symmetries, got {copies}.")
    forecasts = symmetric_forecasts(forecaster, history, steps, group, copies, time)
    first = next(forecasts)
    mean, squares = first.frames, torch.zeros_like(first.frames)
    stopped = [] if first.stopped is None else [first.stopped]
    for number, result in enumerate(forecasts, start=2):
        change = result.frames - mean
        mean = mean + change / number
        squares = squares + change * (result.frames - mean)
        stopped += [] if result.stopped is None else [result.stopped]
    average = Rollout(mean, min(stopped, default=None), forecaster.targets.fields)
    return SymmetricRollout(average, (squares / copies).sqrt())


def symmetric_forecasts(
    forecaster: Forecaster,
    history: torch.Tensor | np.ndarray,
    steps: int,
    group: SymmetryGroup,
    copies: int,
    time: torch.Tensor | np.ndarray | float | None = None,
) -> Iterator[Rollout]:
    """The forecasts that `symmetric_rollout` averages, one after the other; the first is the usual one."""
    frames = torch.as_tensor(native(history))
    symmetries = group.on(frames.shape[2:-1])
    for row in symmetries.first(copies):
        rows = row.expand(len(frames), -1)
        moved = symmetries.apply(frames, forecaster.inputs.fields, rows.to(frames.device))
        result = forecaster.rollout(moved, steps, time=time)
        back = symmetries.undo(result.frames, forecaster.targets.fields, rows.to(result.frames.device))
        yield replace(result, frames=back)
