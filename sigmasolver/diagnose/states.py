"""Distance of a state to the training data.

    d(a, b) = sqrt( mean over points and fields of ((a − b) / σ)² ),     σ the standard deviation of a field over states

Training states are frames, evenly spread over the training trajectories and in time. Their typical distance is the
median distance to the nearest state of another trajectory: the next frame of the same trajectory is close because
little time has passed, not because the data are dense there.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

from sigmasolver.data.mask import fluid_of, zero_in_solid
from sigmasolver.data.windows import Windows, spread_evenly

__all__ = ["States", "training_states"]

MAX_STATES = 512
"""Maximum number of states."""
MAX_BYTES = 256e6
"""Maximum size of all states."""


@dataclass(frozen=True)
class States:
    """Scaled training states (S, points × fields) in float64, their trajectories (S,), and the scale of each field."""

    values: torch.Tensor
    trajectories: torch.Tensor
    deviations: torch.Tensor

    def nearest(self, frames: torch.Tensor) -> torch.Tensor:
        """(B, H) from `frames` (B, H, *grid, fields): distance to the nearest state."""
        flat = (frames.double() / self.deviations).flatten(2)
        return self._distances(flat.flatten(0, 1)).amin(1).reshape(frames.shape[:2])

    def typical(self) -> torch.Tensor:
        """Median distance of a state to the nearest state of another trajectory."""
        distances = self._distances(self.values)
        own = self.trajectories[:, None] == self.trajectories[None]
        return distances.masked_fill(own, torch.inf).amin(1).median()

    def _distances(self, flat: torch.Tensor) -> torch.Tensor:
        return torch.cdist(flat, self.values) / self.values.shape[1] ** 0.5


def training_states(training: Windows, device: torch.device, mask: str | None = None) -> States | None:
    """Target frames of the training split, zero where `mask` is 1; None for a single trajectory, which has nothing to
    compare with."""
    fields = training.spec.targets
    most = max(2, min(MAX_STATES, int(MAX_BYTES / (8 * prod(training.grid) * len(fields)))))
    selected = [training.trajectories[number] for number in spread_evenly(len(training.trajectories), most)]
    if len(selected) < 2:
        return None
    channels = [training.fields.index(name) for name in fields]
    subset, per_trajectory = training.of_trajectories(selected), max(1, most // len(selected))
    parts = []
    for trajectory in subset.each_covered():
        frames = trajectory[spread_evenly(len(trajectory), per_trajectory)]
        states = frames[..., channels].double()
        if mask is not None:
            states = zero_in_solid(states[None], fluid_of(frames[None], training.fields.index(mask)))[0]
        parts.append(states)
    values = torch.cat(parts).to(device)
    deviations = values.flatten(0, -2).std(0)
    # A constant field has no scale and stays in its own units.
    deviations = torch.where(deviations > 0, deviations, 1.0)
    trajectories = torch.arange(len(parts)).repeat_interleave(torch.tensor([len(part) for part in parts])).to(device)
    return States((values / deviations).flatten(1), trajectories, deviations)
