"""What the axes and channels of a trajectory mean."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

__all__ = ["Layout", "shape_text", "turn", "upright"]


@dataclass(frozen=True)
class Layout:
    """What the axes and channels of a trajectory `(frames, *grid, fields)` mean."""

    fields: tuple[str, ...]
    units: tuple[str, ...]
    boundary: tuple[str, ...]
    """How each spatial axis ends: "periodic", "wall" or "open"."""
    coordinates: tuple[np.ndarray, ...]
    """One increasing array per spatial axis (for staggered fields: of the cell centres)."""
    times: np.ndarray
    axes: tuple[str, ...] = ()
    """Names of the spatial axes in the order in which they are stored; empty: x, y, z."""

    @property
    def axis_names(self) -> tuple[str, ...]:
        return self.axes or tuple("xyz"[: len(self.coordinates)])

    @property
    def upright(self) -> tuple[int, ...]:
        """The numbers of the spatial axes in the order x, y, z, in which they are drawn."""
        return upright(self.axis_names)

    def turned(self, order: Sequence[int]) -> Layout:
        """Of the same trajectories with the spatial axes of these numbers in turn."""
        return replace(
            self,
            boundary=tuple(self.boundary[axis] for axis in order),
            coordinates=tuple(self.coordinates[axis] for axis in order),
            axes=tuple(self.axis_names[axis] for axis in order),
        )


def upright(names: Sequence[str]) -> tuple[int, ...]:
    """The numbers of the axes of these names in the order x, y, z."""
    return tuple(sorted(range(len(names)), key=lambda axis: names[axis]))


def turn(values: np.ndarray, first: int, order: Sequence[int]) -> np.ndarray:
    """A view with the spatial axes, which begin at axis `first`, in this order."""
    rest = range(first + len(order), values.ndim)
    return values.transpose(*range(first), *(first + axis for axis in order), *rest)


def shape_text(lengths: Iterable[int]) -> str:
    """Lengths of axes as a person reads them: "64 × 64"."""
    return " × ".join(map(str, lengths))
