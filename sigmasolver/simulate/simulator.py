"""What every simulator is: a frozen set of physical and numerical parameters that yields trajectories.

A trajectory depends on (simulator, parameters, seed, index) and on nothing else. Its randomness is drawn on the
CPU from a generator of its own, in float64, so that the same index gives the same initial state whatever the batch,
the order, the number of trajectories asked for, or the device that integrates them.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch

from sigmasolver.data.layout import Layout
from sigmasolver.seeds import hashed_seed

__all__ = ["PRECISIONS", "Simulator", "Tick", "generator"]

PRECISIONS = {"float32": torch.float32, "float64": torch.float64}
"""What a simulator may integrate in; trajectories are float32 either way."""

Tick = Callable[[float], None]
"""Called now and then with the fraction of the present batch that is done (0 to 1)."""


class Simulator(ABC):
    """Abstract; each subclass is a frozen dataclass whose fields are the parameters, paper's values as defaults."""

    name: ClassVar[str]

    @property
    @abstractmethod
    def layout(self) -> Layout:
        """Names, units, boundaries, coordinates and times of what `simulate` returns."""

    @abstractmethod
    def simulate(
        self, seed: int, indices: Sequence[int], device: torch.device | str = "cpu", tick: Tick | None = None
    ) -> torch.Tensor:
        """The trajectories of these indices, one batch: float32 `(len(indices), frames, *grid, fields)` on `device`."""

    @abstractmethod
    def batch_size(self, device: torch.device | str = "cpu") -> int:
        """How many trajectories one call of `simulate` should hold on this device (memory and speed)."""


def generator(name: str, seed: int, index: int) -> torch.Generator:
    """The CPU generator of one trajectory: a hash, so that neighbouring seeds and indices are unrelated."""
    # operator.index: a float or a slice has a text too, and would silently name another trajectory.
    return torch.Generator("cpu").manual_seed(hashed_seed(f"{name}/{operator.index(seed)}/{operator.index(index)}"))
