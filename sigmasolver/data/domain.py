"""Physical meaning of a data set: units, boundaries, box and time step, and the differences between two data sets.

A run records the domain of its training data, so that other data can be compared before a forecast.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sigmasolver.data.layout import Layout
from sigmasolver.settings import check_types

__all__ = ["STEP_TOLERANCE", "Domain", "time_steps", "unevenly_spaced"]

STEP_TOLERANCE, RELATIVE_TOLERANCE = 1e-2, 1e-3
"""Relative tolerances: between the time steps of a data set (float32 times are rounded), and between two data sets."""


@dataclass(frozen=True)
class Domain:
    """Units, boundaries, extents and time steps of some fields and frames of a data set."""

    fields: tuple[str, ...]
    units: tuple[str, ...]
    boundary: tuple[str, ...]
    lengths: tuple[float | None, ...]
    """Distance from the first to the last point of each axis; None if the coordinates are just 0, 1, 2, ..."""
    points: tuple[int, ...]
    time_steps: tuple[float, ...]
    """Smallest and largest time between neighbouring frames; empty for a single frame."""
    axes: tuple[str, ...] = ()
    """Names of the spatial axes in order; empty: x, y, z."""
    coordinates: tuple[tuple[float, ...], ...] = ()
    """Coordinates of each axis; empty if they were not recorded."""

    def __post_init__(self) -> None:
        check_types(self)
        axis_counts = {len(self.boundary), len(self.lengths), len(self.points)}
        if self.axes:
            axis_counts.add(len(self.axes))
        if self.coordinates:
            axis_counts.add(len(self.coordinates))
        if len(self.fields) != len(self.units) or len(axis_counts) > 1 or len(self.time_steps) not in (0, 2):
            raise ValueError("The units, axes and time steps of a domain are inconsistent; record it again.")

    @staticmethod
    def of(layout: Layout, fields: Sequence[str], times: np.ndarray) -> Domain:
        """The domain of these fields and the times of these (strided) frames."""
        units = dict(zip(layout.fields, layout.units, strict=True))
        names = [name for name in fields if name in units]
        return Domain(
            tuple(names),
            tuple(units[name] for name in names),
            layout.boundary,
            tuple(None if _is_index_axis(axis) else float(axis[-1] - axis[0]) for axis in layout.coordinates),
            tuple(len(axis) for axis in layout.coordinates),
            time_steps(times),
            layout.axes,
            tuple(tuple(float(value) for value in axis) for axis in layout.coordinates),
        )

    @property
    def axis_names(self) -> tuple[str, ...]:
        return self.axes or tuple("xyz"[: len(self.points)])

    def differences(self, other: Domain, with_times: bool = True) -> list[str]:
        """Describe how `other` differs from this reference domain; `with_times` includes the time step."""
        units = dict(zip(self.fields, self.units, strict=True))
        differences = [
            f"the unit of {name} is {unit}, not {units[name]}"
            for name, unit in zip(other.fields, other.units, strict=True)
            if unit != units.get(name, unit)
        ]
        if self.axis_names != other.axis_names:
            return [*differences, f"its axes are {', '.join(other.axis_names)}, not {', '.join(self.axis_names)}"]
        for axis, (boundary, expected) in enumerate(zip(other.boundary, self.boundary, strict=True)):
            name = self.axis_names[axis]
            if boundary != expected:
                differences.append(f"axis {name} is {boundary}, not {expected}")
            elif not _same_length(self.side(axis), other.side(axis), self._tolerance(axis, other)):
                differences.append(
                    f"axis {name} is {_describe_length(other.side(axis))}, not {_describe_length(self.side(axis))}"
                )
        if with_times and self.time_steps and other.time_steps:
            uneven = unevenly_spaced(other.time_steps)
            if uneven is not None:
                differences.append(f"its frames are {uneven}, not {self.step:g}")
            elif not self.has_step(other.step):
                differences.append(f"its frames are {other.step:g} apart, not {self.step:g}")
        return differences

    @property
    def step(self) -> float | None:
        """Mean time between neighbouring frames; None for a single frame."""
        return sum(self.time_steps) / 2 if self.time_steps else None

    def has_step(self, step: float | None) -> bool:
        """Whether this is the mean time between its frames."""
        if step is None or self.step is None:
            return step is self.step
        return abs(step - self.step) <= RELATIVE_TOLERANCE * self.step

    def is_spaced_like(self, times: np.ndarray) -> bool:
        """Whether the mean time between these frames is that between its frames."""
        steps = time_steps(times)
        return bool(steps) and self.has_step(sum(steps) / 2)

    def points_of(self, axis: int) -> np.ndarray:
        """Coordinates of an axis; evenly spaced from 0 if they were not recorded."""
        length, points = self.lengths[axis], self.points[axis]
        if self.coordinates:
            return np.array(self.coordinates[axis])
        return np.linspace(0.0, points - 1.0 if length is None else length, points)

    def side(self, axis: int) -> float | None:
        """Period of a periodic axis, otherwise the distance between its outermost points."""
        length, points = self.lengths[axis], self.points[axis]
        if length is None or self.boundary[axis] != "periodic" or points < 2:
            return length
        return length * points / (points - 1)

    def _tolerance(self, axis: int, other: Domain) -> float:
        """Absolute tolerance: on a coarser grid the outermost points of a box lie up to one spacing further inside."""
        sides = [domain.lengths[axis] or 0.0 for domain in (self, other)]
        if self.boundary[axis] == "periodic":
            return RELATIVE_TOLERANCE * max(sides)
        spacings = [side / max(1, domain.points[axis] - 1) for side, domain in zip(sides, (self, other), strict=True)]
        return (1 + RELATIVE_TOLERANCE) * max(spacings)


def time_steps(times: np.ndarray) -> tuple[float, ...]:
    """Smallest and largest difference between neighbouring times; empty for a single time."""
    steps = np.diff(np.asarray(times, np.float64))
    return (float(steps.min()), float(steps.max())) if len(steps) else ()


def unevenly_spaced(steps: tuple[float, ...]) -> str | None:
    """Describe uneven `time_steps`; None if the spacing is uniform."""
    if not steps or steps[1] <= (1 + STEP_TOLERANCE) * steps[0]:
        return None
    return f"unevenly spaced in time, {steps[0]:g} to {steps[1]:g} apart"


def _is_index_axis(axis: np.ndarray) -> bool:
    return bool(np.array_equal(axis, np.arange(len(axis))))


def _same_length(first: float | None, second: float | None, tolerance: float) -> bool:
    if first is None or second is None:
        return first is second
    return math.isclose(first, second, rel_tol=0, abs_tol=tolerance)


def _describe_length(side: float | None) -> str:
    return "without coordinates" if side is None else f"{side:g} long"
