"""Conversion from and to an `xarray.Dataset` in memory: read as trajectories, made from trajectories or a forecast."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from sigmasolver.data.formats.dimensions import SPACE, TIME, role_of
from sigmasolver.data.formats.labelled import MARK, Labelled, Variable, as_trajectories
from sigmasolver.data.formats.source import ForeignData, Ranges
from sigmasolver.data.header import Header
from sigmasolver.data.layout import Layout
from sigmasolver.data.worker import plain_value

if TYPE_CHECKING:
    import xarray

__all__ = ["as_dataset", "forecast_as_dataset", "is_dataset", "read_dataset"]


def is_dataset(source: object) -> bool:
    """Whether this is an `xarray.Dataset`, checked without importing xarray."""
    return type(source).__module__.partition(".")[0] == "xarray" and type(source).__name__ == "Dataset"


def read_dataset(
    dataset: xarray.Dataset, names: Sequence[str] | None = None, steady: bool | None = None
) -> ForeignData:
    """Read a data set like a NetCDF file with the same content. Dates become seconds since the first."""
    variables = {
        str(name): _variable(str(name), variable, name in dataset.coords)
        for name, variable in dataset.variables.items()
    }
    return as_trajectories(Labelled("The data set", variables, _attributes(dataset)), names, steady)


def _variable(name: str, values: Any, coordinate: bool) -> Variable:
    dims, attributes = tuple(map(str, values.dims)), _attributes(values)
    if coordinate and dims == (name,) and values.dtype.kind in "Mm":
        dates = values.values
        seconds = (dates - dates[0] if values.dtype.kind == "M" else dates) / np.timedelta64(1, "s")
        return Variable(dims, seconds.shape, seconds.dtype, partial(_read_ranges, seconds), attributes, coordinate)
    axis = coordinate and dims == (name,) and role_of(name, attributes) in (TIME, *SPACE)
    if axis and values.dtype.kind not in "fiu":
        raise ValueError(f"The coordinate {name} has dtype {values.dtype}; expected numbers or dates.")
    return Variable(dims, values.shape, values.dtype, partial(_read_ranges, values), attributes, coordinate)


def _read_ranges(values: Any, ranges: Ranges) -> np.ndarray:
    return np.asarray(values[tuple(slice(*bounds) for bounds in ranges)])


def _attributes(source: Any) -> dict[str, Any]:
    return {str(key): plain_value(value) for key, value in source.attrs.items()}


def as_dataset(trajectories: np.ndarray, header: Header) -> xarray.Dataset:
    """Convert trajectories `(count, frames, *grid, fields)` with all metadata of their header.

    Axes keep the names and attributes of the original files, else they are named as in the layout, and time.
    """
    import xarray

    layout, stored = header.layout, _stored_attributes(header)
    axes = {letter: stored["axes"].get(letter, {}) for letter in (*layout.axis_names, "t")}
    names = {letter: str(attrs.get("name", "time" if letter == "t" else letter)) for letter, attrs in axes.items()}
    attributes = {
        letter: {key: value for key, value in attrs.items() if key != "name"} for letter, attrs in axes.items()
    }
    for letter, boundary in zip(layout.axis_names, layout.boundary, strict=True):
        attributes[letter]["boundary"] = boundary
        attributes[letter].setdefault("axis", letter.upper())
    attributes["t"].setdefault("axis", "T")
    values = dict(zip(layout.axis_names, layout.coordinates, strict=True)) | {"t": layout.times}
    dims = ("trajectory", names["t"], *(names[letter] for letter in layout.axis_names))
    fields = {
        name: (dims, trajectories[..., channel], {**stored["fields"].get(name, {}), "units": layout.units[channel]})
        for channel, name in enumerate(layout.fields)
    }
    coordinates = {names[letter]: ((names[letter],), values[letter], attributes[letter]) for letter in names}
    # The order of the fields is recorded, as the arrays of a Zarr group have none.
    provenance: dict[str, Any] = {
        "source": header.source,
        "parameters": _without_attributes(header.parameters),
        "seed": header.seed,
        "fields": layout.fields,
    }
    if layout.axis_names != SPACE[: len(layout.axis_names)]:
        provenance["axes"] = layout.axis_names
    metadata = {"Conventions": "CF-1.11", **stored["data set"], MARK: json.dumps(provenance)}
    return xarray.Dataset(fields, coordinates, metadata)


def forecast_as_dataset(values: np.ndarray, fields: Sequence[str], layout: Layout | None = None) -> xarray.Dataset:
    """Convert frames `(count, frames, *grid, fields)`; a `layout` adds coordinates, units and boundaries.

    The second axis is called time if the layout has as many times as there are frames, else lead (from 1).
    """
    try:
        import xarray
    except ImportError:
        raise ValueError("xarray is not installed; install it with pip install 'sigmasolver[data]'.") from None
    grid, frames = values.shape[2:-1], values.shape[1]
    letters = SPACE[: len(grid)] if layout is None else layout.axis_names
    coordinates: dict[str, Any] = {}
    units: dict[str, str] = {}
    timed = layout is not None and len(layout.times) == frames
    if layout is not None:
        if tuple(map(len, layout.coordinates)) != grid:
            sizes = tuple(map(len, layout.coordinates))
            raise ValueError(f"The layout has {sizes} points, but the values have {grid}; omit the layout.")
        units = dict(zip(layout.fields, layout.units, strict=True))
        for letter, axis, boundary in zip(letters, layout.coordinates, layout.boundary, strict=True):
            coordinates[letter] = ((letter,), axis, {"boundary": boundary})
    time_axis = "time" if timed else "lead"
    coordinates[time_axis] = layout.times if timed and layout is not None else np.arange(1, frames + 1)
    dims = ("trajectory", time_axis, *letters)
    variables = {
        name: (dims, values[..., channel], {"units": units[name]} if name in units else {})
        for channel, name in enumerate(fields)
    }
    return xarray.Dataset(variables, coordinates)


def _stored_attributes(header: Header) -> dict[str, Any]:
    stored = dict(header.parameters.get("attributes", {}))
    return {part: dict(stored.get(part, {})) for part in ("data set", "fields", "axes")}


def _without_attributes(parameters: Any) -> dict[str, Any]:
    """The parameters without the attributes, which are stored on the variables."""
    return {name: value for name, value in parameters.items() if name != "attributes"}
