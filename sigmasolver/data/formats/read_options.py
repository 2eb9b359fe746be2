"""How to read a user's own files: what the user specifies beyond what the files contain."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from sigmasolver.data.formats.metadata import METADATA_NAMES, check_names, is_list
from sigmasolver.data.formats.source import Array, Ranges, listed
from sigmasolver.data.header import BOUNDARIES
from sigmasolver.data.layout import Layout
from sigmasolver.settings import check_types, suggest, to_plain

__all__ = ["AXES", "ReadOptions"]

AXES = ("count", "time", "x", "y", "z", "field")
"""The axes of a user's arrays, in the order of the store."""


@dataclass(frozen=True)
class ReadOptions:
    """What the user specifies; None: taken from the file, or inferred."""

    fields: tuple[str, ...] | None = None
    """The fields to read, in order; if the file does not name them, their names."""
    steady: bool | None = None
    """Whether the arrays have no time axis."""
    axes: tuple[str, ...] | None = None
    """The meaning of each axis of the arrays, in order: some of `AXES`."""
    boundary: tuple[str, ...] | None = None
    """The boundary of each spatial axis; a single one applies to all."""
    dt: float | None = None
    """The time between frames."""
    units: tuple[str, ...] | None = None
    """One for each field that is read."""
    mask: str | None = None
    """The field that is 1 in a solid and 0 in the fluid."""
    skip_bad: bool = False
    """Skip trajectories with non-finite values."""
    defaults: tuple[str, ...] = ()
    """Those of boundary, units and times that files may specify themselves; the others override the files."""

    def __post_init__(self) -> None:
        if self.fields is not None:
            object.__setattr__(self, "fields", check_names(self.fields))
        check_types(self)
        if self.mask is not None and self.fields is not None and self.mask not in self.fields:
            object.__setattr__(self, "fields", (*self.fields, self.mask))
        if self.dt is not None and self.dt <= 0:
            raise ValueError(f"The time step is {self.dt:g}; it must be positive.")
        for boundary in self.boundary or ():
            if boundary not in BOUNDARIES:
                raise ValueError(f'Unknown boundary "{boundary}"; choose from {", ".join(BOUNDARIES)}.')
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
            has, option = ("no", "--unsteady") if steady else ("a", "--steady")
            raise ValueError(f"The axes {', '.join(axes)} have {has} time axis; omit {option}.")
        object.__setattr__(self, "steady", steady)

    def only(self, fields: tuple[str, ...]) -> ReadOptions:
        """The options for these fields only; their units are known if those of all of them are."""
        units = dict(zip(self.fields or (), self.units or (), strict=False))
        mask = self.mask if self.mask in fields else None
        chosen = tuple(units[name] for name in fields) if units.keys() >= set(fields) else None
        return replace(self, fields=fields, units=chosen, mask=mask)

    @property
    def spatial(self) -> int | None:
        """The number of spatial axes, if the user specifies it."""
        if self.axes is not None:
            return len(set(self.axes) & set("xyz"))
        return len(self.boundary) if self.boundary is not None and len(self.boundary) > 1 else None

    @property
    def channels(self) -> bool | None:
        """Whether the fields are channels of one array."""
        return None if self.axes is None else "field" in self.axes

    @property
    def recorded(self) -> dict[str, Any]:
        """What a header records of it, in addition to the layout."""
        specified = {name: getattr(self, name) for name in ("axes", "boundary", "dt", "units")}
        specified = {name: to_plain(value) for name, value in specified.items() if value is not None}
        return ({"reading": specified} if specified else {}) | ({"mask": self.mask} if self.mask is not None else {})

    def applied(self, layout: Layout, missing: Collection[str] = ()) -> Layout:
        """The layout, overridden by what the user specifies; `missing` as in `ForeignData`."""
        boundary, units, times = layout.boundary, layout.units, layout.times
        kept = set(self.defaults) - set(missing)
        if self.boundary is not None and "boundary" not in kept:
            boundary = self.boundary * len(boundary) if len(self.boundary) == 1 else self.boundary
            if len(boundary) != len(layout.boundary):
                raise ValueError(
                    f"Got {len(boundary)} boundary values for {len(layout.boundary)} spatial axes; give one for "
                    "each axis, or one for all."
                )
        if self.units is not None and "units" not in kept:
            units = self.units
            if len(units) != len(layout.fields):
                raise ValueError(
                    f"Got {len(units)} units for the fields {', '.join(layout.fields)}; give one for each."
                )
        if self.dt is not None and "times" not in kept:
            times = float(times[0]) + self.dt * np.arange(len(times))
        if self.mask is not None and self.mask not in layout.fields:
            raise ValueError(f'Mask field "{self.mask}" not found; {suggest(self.mask, layout.fields)}')
        return replace(layout, boundary=boundary, units=units, times=times)

    def reorder_axes(self, path: Path, arrays: Mapping[str, Array], leading: int) -> dict[str, Array]:
        """The arrays of a file with their axes in the order of `AXES` and a boolean mask as 0 and 1; `leading` is 1 if
        the first axis must be `count`."""
        arrays = self._with_numeric_mask(arrays)
        if self.axes is None:
            return dict(arrays)
        if not leading and "count" in self.axes:
            raise ValueError(f"{path} is one trajectory, as is each file of a folder; omit count from the axes.")
        candidates = {
            n: array for n, array in arrays.items() if array.real and not (n in METADATA_NAMES and is_list(array))
        }
        axes = self.axes
        if leading and not any(len(array.shape) == len(axes) for array in candidates.values()):
            axes = tuple(name for name in axes if name != "count")  # a single trajectory may lack this axis
        matching = {
            name: _reorder(array, axes, leading) for name, array in candidates.items() if len(array.shape) == len(axes)
        }
        if not matching:
            available = listed([f"{name} {array.shape}".strip() for name, array in arrays.items()]) or "none"
            raise ValueError(f"{path} has no array with axes {', '.join(self.axes)}; available arrays: {available}.")
        if self.channels and not {"", "fields"} & set(matching):
            if len(matching) > 1:
                raise ValueError(
                    f"{path} has several arrays with a channels axis: {listed(matching)}; merge them "
                    "into one array `fields`."
                )
            matching = {"fields": next(iter(matching.values()))}
        metadata = {name: array for name, array in arrays.items() if name in METADATA_NAMES and is_list(array)}
        return {**metadata, **matching}

    def _with_numeric_mask(self, arrays: Mapping[str, Array]) -> Mapping[str, Array]:
        """The arrays with the mask as numbers; raise ValueError if its shape differs from that of every other field."""
        mask = None if self.mask is None else arrays.get(self.mask)
        if self.mask is None or mask is None:
            return arrays
        if mask.dtype.kind == "b":
            mask = _as_integers(mask)
        shapes = {
            array.shape
            for name, array in arrays.items()
            if name != self.mask and array.real and not is_list(array) and (self.fields is None or name in self.fields)
        }
        if mask.real and "fields" not in arrays and len(shapes) == 1 and mask.shape not in shapes:
            (shape,) = shapes
            raise ValueError(
                f"The mask {self.mask} has shape {mask.shape}, but the fields have {shape}; save it with that shape, "
                "repeated along the axes that it lacks (np.broadcast_to)."
            )
        return {**arrays, self.mask: mask}


def _as_integers(array: Array) -> Array:
    read_box = array.box
    box = None if read_box is None else lambda ranges: read_box(ranges).astype(np.uint8)
    rows = lambda start, stop: array.rows(start, stop).astype(np.uint8)  # noqa: E731
    return replace(array, dtype=np.dtype(np.uint8), rows=rows, box=box)


def _reorder(array: Array, axes: tuple[str, ...], leading: int) -> Array:
    names = [name for name in AXES if name in axes]
    order = [axes.index(name) for name in names]
    shape = tuple(array.shape[axis] for axis in order)
    single = bool(leading) and "count" not in axes

    def box(ranges: Ranges) -> np.ndarray:
        inner = ranges[1:] if single else ranges
        values = array.part([inner[order.index(axis)] for axis in range(len(order))]).transpose(order)
        return values[None][slice(*ranges[0])] if single else values

    if leading and axes[0] == "count":  # trajectories can be read one by one
        rows = lambda start, stop: array.rows(start, stop).transpose(order)  # noqa: E731
    else:
        load = cache(lambda: array.whole().transpose(order))
        rows = lambda start, stop: (load()[None] if single else load())[start:stop]  # noqa: E731
    chunks = None if array.chunk_shape is None else (1,) * single + tuple(array.chunk_shape[axis] for axis in order)
    return replace(array, shape=(1,) * single + shape, rows=rows, box=box, chunk_shape=chunks)
