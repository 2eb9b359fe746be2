"""How to read files of a user's own: what the user says about them, beyond what they say themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from sigmasolver.data.formats.metadata import BESIDE, check_names, is_list
from sigmasolver.data.formats.source import Array, Ranges, listed
from sigmasolver.data.header import BOUNDARIES
from sigmasolver.data.layout import Layout
from sigmasolver.settings import check_types, suggest, to_plain

__all__ = ["AXES", "Reading"]

AXES = ("count", "time", "x", "y", "z", "field")
"""The axes of a user's arrays, in the order in which they are stored here."""


@dataclass(frozen=True)
class Reading:
    """What the user says; None: the file says it, or it is inferred."""

    fields: tuple[str, ...] | None = None
    """The fields to take, in order; where the file does not name them, their names."""
    steady: bool | None = None
    """Whether the arrays have no axis of time."""
    axes: tuple[str, ...] | None = None
    """What each axis of the arrays is, in their order: some of `AXES`."""
    boundary: tuple[str, ...] | None = None
    """How each spatial axis ends; one word holds for all."""
    dt: float | None = None
    """The time from one frame to the next."""
    units: tuple[str, ...] | None = None
    """One for each field that is taken."""
    mask: str | None = None
    """The field that is 1 in a solid and 0 in the fluid."""
    skip_bad: bool = False
    """Leave out trajectories with values that are not finite."""

    def __post_init__(self) -> None:
        if self.fields is not None:
            object.__setattr__(self, "fields", check_names(self.fields))
        check_types(self)
        if self.mask is not None and self.fields is not None and self.mask not in self.fields:
            object.__setattr__(self, "fields", (*self.fields, self.mask))
        if self.dt is not None and self.dt <= 0:
            raise ValueError(f"The time step is {self.dt:g}; it must be positive.")
        for word in self.boundary or ():
            if word not in BOUNDARIES:
                raise ValueError(f'Unknown boundary "{word}"; choose from {", ".join(BOUNDARIES)}.')
        if self.axes is not None:
            self._check_axes(self.axes)

    def _check_axes(self, axes: tuple[str, ...]) -> None:
        for name in axes:
            if name not in AXES:
                raise ValueError(f'Unknown axis "{name}"; {suggest(name, AXES)}')
            if axes.count(name) > 1:
                raise ValueError(f"Duplicate axis {name}; give each axis of the arrays once.")
        spatial = [name for name in "xyz" if name in axes]
        if not spatial or spatial != list("xyz"[: len(spatial)]):
            raise ValueError(f"The axes {', '.join(axes)} must include x, or x and y, or x, y and z.")
        steady = "time" not in axes
        if self.steady is not None and self.steady != steady:
            has, word = ("no", "--unsteady") if steady else ("a", "--steady")
            raise ValueError(f"The axes {', '.join(axes)} have {has} time axis; omit {word}.")
        object.__setattr__(self, "steady", steady)

    @property
    def spatial(self) -> int | None:
        """How many axes of space the user tells of."""
        if self.axes is not None:
            return len(set(self.axes) & set("xyz"))
        return len(self.boundary) if self.boundary is not None and len(self.boundary) > 1 else None

    @property
    def channels(self) -> bool | None:
        """Whether one array holds all fields along an axis of its own."""
        return None if self.axes is None else "field" in self.axes

    @property
    def recorded(self) -> dict[str, Any]:
        """What a header keeps of it, beside the layout."""
        said = {name: getattr(self, name) for name in ("axes", "boundary", "dt", "units")}
        said = {name: to_plain(value) for name, value in said.items() if value is not None}
        return ({"reading": said} if said else {}) | ({"mask": self.mask} if self.mask is not None else {})

    def applied(self, layout: Layout) -> Layout:
        """The layout with what the user says in place of what the file says."""
        boundary, units, times = layout.boundary, layout.units, layout.times
        if self.boundary is not None:
            boundary = self.boundary * len(boundary) if len(self.boundary) == 1 else self.boundary
            if len(boundary) != len(layout.boundary):
                raise ValueError(
                    f"Got {len(boundary)} boundary values for {len(layout.boundary)} spatial axes; give one for "
                    "each axis, or one for all."
                )
        if self.units is not None:
            units = self.units
            if len(units) != len(layout.fields):
                raise ValueError(
                    f"Got {len(units)} units for the fields {', '.join(layout.fields)}; give one for each."
                )
        if self.dt is not None:
            times = float(times[0]) + self.dt * np.arange(len(times))
        if self.mask is not None and self.mask not in layout.fields:
            raise ValueError(f'Mask field "{self.mask}" not found; {suggest(self.mask, layout.fields)}')
        return replace(layout, boundary=boundary, units=units, times=times)

    def arranged(self, path: Path, arrays: Mapping[str, Array], leading: int) -> dict[str, Array]:
        """The arrays of a file with their axes in the order of `AXES`; `leading` is 1 where the first is `count`."""
        if self.axes is None:
            return dict(arrays)
        if not leading and "count" in self.axes:
            raise ValueError(f"{path} is one trajectory, as is each file of a folder; omit count from the axes.")
        able = {n: array for n, array in arrays.items() if array.real and not (n in BESIDE and is_list(array))}
        axes = self.axes
        if leading and not any(len(array.shape) == len(axes) for array in able.values()):
            axes = tuple(name for name in axes if name != "count")  # a single trajectory may come without
        fitting = {
            name: _arranged(array, axes, leading) for name, array in able.items() if len(array.shape) == len(axes)
        }
        if not fitting:
            there = listed([f"{name} {array.shape}".strip() for name, array in arrays.items()]) or "none"
            raise ValueError(f"{path} has no array with axes {', '.join(self.axes)}; available arrays: {there}.")
        if self.channels and not {"", "fields"} & set(fitting):
            if len(fitting) > 1:
                raise ValueError(
                    f"{path} has several arrays with a channels axis: {listed(fitting)}; merge them "
                    "into one array `fields`."
                )
            fitting = {"fields": next(iter(fitting.values()))}
        beside = {name: array for name, array in arrays.items() if name in BESIDE and is_list(array)}
        return {**beside, **fitting}


def _arranged(array: Array, axes: tuple[str, ...], leading: int) -> Array:
    kept = [name for name in AXES if name in axes]
    order = [axes.index(name) for name in kept]
    shape = tuple(array.shape[place] for place in order)
    alone = bool(leading) and "count" not in axes

    def box(ranges: Ranges) -> np.ndarray:
        inner = ranges[1:] if alone else ranges
        values = array.part([inner[order.index(place)] for place in range(len(order))]).transpose(order)
        return values[None][slice(*ranges[0])] if alone else values

    if leading and axes[0] == "count":  # its trajectories can be read one by one
        rows = lambda start, stop: array.rows(start, stop).transpose(order)  # noqa: E731
    else:
        whole = cache(lambda: array.whole().transpose(order))
        rows = lambda start, stop: (whole()[None] if alone else whole())[start:stop]  # noqa: E731
    chunks = None if array.chunk_shape is None else (1,) * alone + tuple(array.chunk_shape[place] for place in order)
    return replace(array, shape=(1,) * alone + shape, rows=rows, box=box, chunk_shape=chunks)
