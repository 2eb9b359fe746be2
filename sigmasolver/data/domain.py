"""What the numbers of a data set mean: units, boundaries, box and time step; and how two sets differ in them.

A run records this of the data it learned from, so that other data can be compared before they are forecast.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sigmasolver.data.layout import Layout
from sigmasolver.settings import check_types

__all__ = ["Domain", "time_steps", "unevenly_spaced"]

EVEN, CLOSE = 1e-2, 1e-3
"""Relative tolerances: of the distances between frames of one set (float32 times round), and between two sets."""


@dataclass(frozen=True)
class Domain:
    """Of some fields and frames of a data set."""

    fields: tuple[str, ...]
    units: tuple[str, ...]
    boundary: tuple[str, ...]
    lengths: tuple[float | None, ...]
    """From the first to the last point along each axis; None: the points are only numbered 0, 1, 2, ..."""
    points: tuple[int, ...]
    time_steps: tuple[float, ...]
    """The shortest and the longest distance between two neighbouring frames; empty for a single frame."""
    axes: tuple[str, ...] = ()
    """Names of the spatial axes in their order; empty: x, y, z."""

    def __post_init__(self) -> None:
        check_types(self)
        axes = {len(self.boundary), len(self.lengths), len(self.points)}
        if self.axes:
            axes.add(len(self.axes))
        if len(self.fields) != len(self.units) or len(axes) > 1 or len(self.time_steps) not in (0, 2):
            raise ValueError("The units, axes and time steps of a domain are inconsistent; record it again.")

    @staticmethod
    def of(layout: Layout, fields: Sequence[str], times: np.ndarray) -> Domain:
        """Of these fields, and of these (thinned) frames."""
        known = dict(zip(layout.fields, layout.units, strict=True))
        kept = [name for name in fields if name in known]
        return Domain(
            tuple(kept),
            tuple(known[name] for name in kept),
            layout.boundary,
            tuple(None if _numbered(axis) else float(axis[-1] - axis[0]) for axis in layout.coordinates),
            tuple(len(axis) for axis in layout.coordinates),
            time_steps(times),
            layout.axes,
        )

    @property
    def axis_names(self) -> tuple[str, ...]:
        return self.axes or tuple("xyz"[: len(self.points)])

    def differences(self, other: Domain, with_times: bool = True) -> list[str]:
        """In what `other` differs from this one, the known one, in words; `with_times`: in its time step too."""
        units = dict(zip(self.fields, self.units, strict=True))
        found = [
            f"the unit of {name} is {unit}, not {units[name]}"
            for name, unit in zip(other.fields, other.units, strict=True)
            if unit != units.get(name, unit)
        ]
        if self.axis_names != other.axis_names:
            return [*found, f"its axes are {', '.join(other.axis_names)}, not {', '.join(self.axis_names)}"]
        for axis, (end, expected) in enumerate(zip(other.boundary, self.boundary, strict=True)):
            name = self.axis_names[axis]
            if end != expected:
                found.append(f"axis {name} is {end}, not {expected}")
            elif not _alike(self.side(axis), other.side(axis), self._tolerance(axis, other)):
                found.append(f"axis {name} is {_words(other.side(axis))}, not {_words(self.side(axis))}")
        if with_times and self.time_steps and other.time_steps:
            step, uneven = sum(self.time_steps) / 2, unevenly_spaced(other.time_steps)
            if uneven is not None:
                found.append(f"its frames are {uneven}, not {step:g}")
            elif abs(sum(other.time_steps) / 2 - step) > CLOSE * step:
                found.append(f"its frames are {sum(other.time_steps) / 2:g} apart, not {step:g}")
        return found

    def side(self, axis: int) -> float | None:
        """The period of a periodic axis, else the distance of its outermost points."""
        length, points = self.lengths[axis], self.points[axis]
        if length is None or self.boundary[axis] != "periodic" or points < 2:
            return length
        return length * points / (points - 1)

    def _tolerance(self, axis: int, other: Domain) -> float:
        """The outermost points of the same box lie up to one spacing further in on a coarser grid."""
        sides = [one.lengths[axis] or 0.0 for one in (self, other)]
        if self.boundary[axis] == "periodic":
            return CLOSE * max(sides)
        spacings = [side / max(1, one.points[axis] - 1) for side, one in zip(sides, (self, other), strict=True)]
        return (1 + CLOSE) * max(spacings)


def time_steps(times: np.ndarray) -> tuple[float, ...]:
    """The shortest and the longest distance between neighbours of these times; empty for a single one."""
    steps = np.diff(np.asarray(times, np.float64))
    return (float(steps.min()), float(steps.max())) if len(steps) else ()


def unevenly_spaced(steps: tuple[float, ...]) -> str | None:
    """In words, where the `time_steps` of a data set are not one; None where they are."""
    if not steps or steps[1] <= (1 + EVEN) * steps[0]:
        return None
    return f"unevenly spaced in time, {steps[0]:g} to {steps[1]:g} apart"


def _numbered(axis: np.ndarray) -> bool:
    return bool(np.array_equal(axis, np.arange(len(axis))))


def _alike(first: float | None, second: float | None, tolerance: float) -> bool:
    if first is None or second is None:
        return first is second
    return math.isclose(first, second, rel_tol=0, abs_tol=tolerance)


def _words(side: float | None) -> str:
    return "without coordinates" if side is None else f"{side:g} long"
