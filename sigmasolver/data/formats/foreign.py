"""What every reader of a foreign file gives: its trajectories, a few at a time, and what they mean."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from sigmasolver.simulate.simulator import Layout

__all__ = ["Foreign", "check_numbers", "periodic"]


@dataclass(frozen=True)
class Foreign:
    """A foreign data set, opened but not yet read."""

    layout: Layout
    count: int
    read: Callable[[int, int], np.ndarray]
    """The trajectories from `start` to before `stop`, `(stop - start, frames, *grid, fields)`."""
    notes: tuple[str, ...] = ()
    """What the file does not say and was taken as known, one sentence each."""


def check_numbers(where: str, values: np.ndarray, axes: Sequence[str]) -> None:
    """Refuse what is not an array of real numbers with these axes."""
    if values.dtype.kind not in "fiu":
        raise ValueError(f"{where} holds {values.dtype} values; real numbers are needed.")
    if values.ndim != len(axes) or 0 in values.shape:
        raise ValueError(f"{where} has the shape {values.shape}; the axes ({', '.join(axes)}) are needed.")


def periodic(points: int, length: float) -> np.ndarray:
    """The coordinates of a periodic axis: its end is its beginning, and is left out."""
    return np.arange(points) * (length / points)
