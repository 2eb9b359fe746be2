"""The exported module: one rollout step, with inputs and outputs in physical units."""

from __future__ import annotations

import torch
from torch import nn

from sigmasolver.forecast import Forecaster, feed_back

__all__ = ["RolloutStep"]


class RolloutStep(nn.Module):
    """history `(B, T_in, *grid, q_in)` -> the next frames `(B, T_out, *grid, q_out)`, and the history after them.

    Normaliser, model and boundary operator are those of the forecaster. A forecast that cannot be fed back (a steady
    one, whose inputs are other fields) has no next history. A time-dependent model takes the time of the last input
    frame, `(B,)`, as a second input.
    """

    def __init__(self, forecaster: Forecaster) -> None:
        super().__init__()
        self.forecaster = forecaster
        targets = forecaster.targets.fields
        self.feeds_back = forecaster.inputs.fields[: len(targets)] == targets

    @property
    def inputs(self) -> tuple[str, ...]:
        return ("history",) if self.forecaster.time_scale is None else ("history", "time")

    @property
    def outputs(self) -> tuple[str, ...]:
        return ("frames", "next_history") if self.feeds_back else ("frames",)

    def forward(self, history: torch.Tensor, time: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        frames = self.forecaster(history, time=time)
        return (frames, feed_back(history, frames)) if self.feeds_back else (frames,)
