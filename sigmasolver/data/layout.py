"""Meaning of the axes and channels of a trajectory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

__all__ = ["Layout", "shape_text", "transpose_axes", "upright"]


@dataclass(frozen=True)
class Layout:
    """Meaning of the axes and channels of a trajectory `(frames, *grid, fields)`."""

    fields: tuple[str, ...]
    units: tuple[str, ...]
    boundary: tuple[str, ...]
    """Boundary of each spatial axis: "periodic", "wall" or "open"."""
    coordinates: tuple[np.ndarray, ...]
    """Increasing coordinates of each spatial axis (cell centres for staggered fields)."""
    times: np.ndarray
    axes: tuple[str, ...] = ()
    """Names of the spatial axes in stored order; empty: x, y, z."""

    @property
    def axis_names(self) -> tuple[str, ...]:
        return self.axes or tuple("xyz"[: len(self.coordinates)])

    @property
    def upright(self) -> tuple[int, ...]:
        """Permutation that sorts the spatial axes to x, y, z, the order of plots."""
        return upright(self.axis_names)

    def transposed(self, order: Sequence[int]) -> Layout:
        """The layout with the spatial axes permuted to this order."""
        return replace(
            self,
            boundary=tuple(self.boundary[axis] for axis in order),
            coordinates=tuple(self.coordinates[axis] for axis in order),
            axes=tuple(self.axis_names[axis] for axis in order),
        )


def upright(names: Sequence[str]) -> tuple[int, ...]:
    """Permutation that sorts axes of these names to x, y, z."""
    return tuple(sorted(range(len(names)), key=lambda axis: names[axis]))


def transpose_axes(values: np.ndarray, first: int, order: Sequence[int]) -> np.ndarray:
    """Transpose the spatial axes, which begin at axis `first`, to this order; returns a view."""
    trailing = range(first + len(order), values.ndim)
    return values.transpose(*range(first), *(first + axis for axis in order), *trailing)


def shape_text(lengths: Iterable[int]) -> str:
    """Format axis lengths, such as "64 × 64"."""
    return " × ".join(map(str, lengths))
