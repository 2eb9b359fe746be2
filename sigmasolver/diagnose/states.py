"""How far a state is from everything that was learned from.

    d(a, b) = sqrt( mean over points and fields of ((a − b) / σ)² ),     σ the deviation of a field over the states

Training states are frames, evenly spread over the training trajectories and in time. Their own typical distance is the
median, over them, of the distance to the nearest state of another trajectory: the next frame of the same one is near
because little time has passed, not because the data are dense there.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

from sigmasolver.data.mask import fluid_of, zero_in_solid
from sigmasolver.data.windows import Windows, spread_evenly

__all__ = ["States", "training_states"]

MOST = 512
"""States that are kept, at most."""
ROOM = 256e6
"""Bytes that they may take."""


@dataclass(frozen=True)
class States:
    """Scaled training states (S, points × fields) in float64, the trajectory of each (S,), and what scales a field."""

    values: torch.Tensor
    trajectories: torch.Tensor
    deviations: torch.Tensor

    def nearest(self, frames: torch.Tensor) -> torch.Tensor:
        """(...) from `frames` (..., *grid, fields), given as (B, H, *grid, fields): distance to the nearest state."""
        flat = (frames.double() / self.deviations).flatten(2)
        return self._distances(flat.flatten(0, 1)).amin(1).reshape(frames.shape[:2])

    def typical(self) -> torch.Tensor:
        """Median distance of a state to the nearest one of another trajectory."""
        distances = self._distances(self.values)
        own = self.trajectories[:, None] == self.trajectories[None]
        return distances.masked_fill(own, torch.inf).amin(1).median()

    def _distances(self, flat: torch.Tensor) -> torch.Tensor:
        return torch.cdist(flat, self.values) / self.values.shape[1] ** 0.5


def training_states(training: Windows, device: torch.device, mask: str | None = None) -> States | None:
    """Target frames of the training part, zero where `mask` is 1; None where it has a single trajectory, which nothing
    can be compared with."""
    fields = training.spec.targets
    most = max(2, min(MOST, int(ROOM / (8 * prod(training.grid) * len(fields)))))
    chosen = [training.trajectories[number] for number in spread_evenly(len(training.trajectories), most)]
    if len(chosen) < 2:
        return None
    channels = [training.fields.index(name) for name in fields]
    some, each = training.of_trajectories(chosen), max(1, most // len(chosen))
    kept = []
    for one in some.each_covered():
        frames = one[spread_evenly(len(one), each)]
        states = frames[..., channels].double()
        if mask is not None:
            states = zero_in_solid(states[None], fluid_of(frames[None], training.fields.index(mask)))[0]
        kept.append(states)
    values = torch.cat(kept).to(device)
    deviations = values.flatten(0, -2).std(0)
    # A field that is the same everywhere tells nothing; it counts in its own units.
    deviations = torch.where(deviations > 0, deviations, 1.0)
    numbers = torch.arange(len(kept)).repeat_interleave(torch.tensor([len(one) for one in kept])).to(device)
    return States((values / deviations).flatten(1), numbers, deviations)
