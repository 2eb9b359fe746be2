"""What a diagnostic looks at, and what it hands back.

    diagnostic: Subject -> Findings

A subject is a forecaster with windows of data it is asked about; findings are tidy rows and arrays. Both are plain
values, so a diagnostic works on any `nn.Module` inside a `Forecaster`, with or without a run folder behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from sigmasolver.data.mask import fluid_of, zero_in_solid
from sigmasolver.data.windows import Windows
from sigmasolver.forecast import Forecaster
from sigmasolver.recipes import Recipe
from sigmasolver.runs import Run

__all__ = ["Findings", "NotApplicable", "Subject", "fluid_points", "without_solid"]


class NotApplicable(ValueError):
    """A diagnostic has no meaning for this model; the sentence says why."""


def fluid_points(forecaster: Forecaster, history: torch.Tensor) -> torch.Tensor | None:
    """(B, 1, *grid, 1) of bool: the points that count; None: all do."""
    if forecaster.mask is None:
        return None
    fluid = fluid_of(history, forecaster.inputs.fields.index(forecaster.mask))
    return None if bool(fluid.all()) else fluid


def without_solid(fluid: torch.Tensor | None, *frames: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The frames (B, T, *grid, q) with zeros in the solid, where they add nothing to a norm or an inner product."""
    return frames if fluid is None else tuple(zero_in_solid(one, fluid) for one in frames)


@dataclass(frozen=True)
class Subject:
    """A forecaster (eval mode) and the windows on which it is looked at."""

    run: Run
    recipe: Recipe
    forecaster: Forecaster
    windows: Windows
    """Of the part that was asked for, with futures of `horizon` frames."""
    indices: torch.Tensor
    """The windows that are looked at."""
    horizon: int
    batch: int
    training: Windows | None = None
    """What the run learned from, as its training cuts it; None where that is not known."""
    peers: tuple[Forecaster, ...] = ()
    """The same model trained with other seeds."""
    tick: Callable[[int, int], None] | None = None
    """Told how many windows are done, and of how many."""

    def __post_init__(self) -> None:
        if self.horizon > self.windows.spec.horizon:
            raise ValueError(
                f"The horizon is {self.horizon}, but the windows have only {self.windows.spec.horizon} future "
                "frames; use longer windows."
            )
        if len(self.indices) == 0:
            raise ValueError("No windows selected; choose at least one.")

    @property
    def device(self) -> torch.device:
        return self._like.device

    @property
    def fields(self) -> tuple[str, ...]:
        """The names of the forecast fields."""
        return self.recipe.task.targets

    @property
    def _like(self) -> torch.Tensor:
        """What frames are made like; a model without real parameters works on the CPU in float32."""
        real = (one for one in self.forecaster.model.parameters() if one.is_floating_point())
        return next(real, torch.zeros(()))

    def batches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """indices (B,), history (B, T_in, *grid, q_in), truth (B, horizon, *grid, q_out): physical units, on the
        device, in the precision of the model."""
        done = 0
        for indices in self.indices.split(self.batch):
            history, future = (one.to(self._like) for one in self.windows.batch(indices))
            truth = future[:, : self.horizon]
            self.windows.refuse_non_finite(indices, history, truth)
            yield indices, history, truth
            done += len(indices)
            if self.tick is not None:
                self.tick(done, len(self.indices))

    def times(self, indices: torch.Tensor) -> torch.Tensor:
        """Physical, (B, 1 + frames): of the last given frame of these windows and of the frames after it."""
        return self.windows.frame_times(indices).to(self.device)


@dataclass
class Findings:
    """What a diagnostic found.

    A row has a `metric` and a `value`, and where they mean something `field` (null: all together), `lead` and `layer`
    (counted from 1), `case` (the number of the window) and `deviation`; keys left out are null.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    skipped: str | None = None
    """Why there is nothing: the diagnostic has no meaning for this model."""

    def add(
        self,
        metric: str,
        value: float | torch.Tensor,
        deviation: float | torch.Tensor | None = None,
        *,
        field: str | None = None,
        lead: int | None = None,
        layer: int | None = None,
        case: int | None = None,
    ) -> None:
        """One row."""
        row = {"metric": metric, "field": field, "lead": lead, "layer": layer, "case": case, "value": float(value)}
        self.rows.append({**row, "deviation": None if deviation is None else float(deviation)})
