"""Input and output types of a diagnostic.

    diagnostic: Subject -> Findings

A subject is a forecaster with windows of data; findings are tidy rows and arrays. Both are plain values, so a
diagnostic works on any `nn.Module` inside a `Forecaster`, with or without a run folder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from sigmasolver.data.mask import zero_in_solid
from sigmasolver.data.windows import Windows
from sigmasolver.forecast import Forecaster
from sigmasolver.recipes import Recipe
from sigmasolver.runs import Run

__all__ = ["Findings", "NotApplicable", "Subject", "without_solid"]


class NotApplicable(ValueError):
    """The diagnostic is not defined for this model; the message says why."""


def without_solid(fluid: torch.Tensor | None, *frames: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Frames (B, T, *grid, q) set to zero in the solid, so that it does not contribute to norms and inner products."""
    return frames if fluid is None else tuple(zero_in_solid(values, fluid) for values in frames)


@dataclass(frozen=True)
class Subject:
    """A forecaster (eval mode) and the windows it is diagnosed on."""

    run: Run
    recipe: Recipe
    forecaster: Forecaster
    windows: Windows
    """All windows of the requested split, with at least `horizon` future frames."""
    indices: torch.Tensor
    """The selected windows."""
    horizon: int
    batch: int
    training: Windows | None = None
    """The windows the run was trained on; None if unknown."""
    peers: tuple[Forecaster, ...] = ()
    """The same model trained with other seeds."""
    tick: Callable[[int, int], None] | None = None
    """Called with the number of windows done and their total."""

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
        """A tensor with the device and dtype of the frames; CPU and float32 for a model without real parameters."""
        real = (p for p in self.forecaster.model.parameters() if p.is_floating_point())
        return next(real, torch.zeros(()))

    def batches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """indices (B,), history (B, T_in, *grid, q_in), truth (B, horizon, *grid, q_out): physical units, on the
        device and in the dtype of the model."""
        done = 0
        for indices in self.indices.split(self.batch):
            history, future = (frames.to(self._like) for frames in self.windows.batch(indices))
            truth = future[:, : self.horizon]
            self.windows.refuse_non_finite(indices, history, truth)
            yield indices, history, truth
            done += len(indices)
            if self.tick is not None:
                self.tick(done, len(self.indices))

    def times(self, indices: torch.Tensor) -> torch.Tensor:
        """Physical times (B, 1 + frames) of the last input frame of these windows and of the frames after it."""
        return self.windows.frame_times(indices).to(self.device)


@dataclass
class Findings:
    """Results of a diagnostic.

    A row has a `metric` and a `value` and, if applicable, `field` (null: all jointly), `lead` and `layer` (counted from
    1), `case` (the window number) and `deviation`; missing keys are null.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    skipped: str | None = None
    """Why the diagnostic is not defined for this model; None if it ran."""

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
        """Append a row."""
        row = {"metric": metric, "field": field, "lead": lead, "layer": layer, "case": case, "value": float(value)}
        self.rows.append({**row, "deviation": None if deviation is None else float(deviation)})
