"""An `xarray.Dataset` in memory: read like any arrays with named dimensions, made of trajectories or a forecast."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from sigmasolver.data.formats.dimensions import SPACE, TIME, role_of
from sigmasolver.data.formats.labelled import MARK, Labelled, Variable, as_trajectories
from sigmasolver.data.formats.source import Foreign, Ranges
from sigmasolver.data.header import Header
from sigmasolver.data.layout import Layout
from sigmasolver.data.worker import plain_value

if TYPE_CHECKING:
    import xarray

__all__ = ["as_dataset", "forecast_as_dataset", "is_dataset", "read_dataset"]


def is_dataset(source: object) -> bool:
    """Whether this is an `xarray.Dataset`, which need not be installed to ask."""
    return type(source).__module__.partition(".")[0] == "xarray" and type(source).__name__ == "Dataset"


def read_dataset(dataset: xarray.Dataset, names: Sequence[str] | None = None, steady: bool | None = None) -> Foreign:
    """What a NetCDF file of the same data set would give. Dates become seconds after the first."""
    variables = {
        str(name): _variable(str(name), one, name in dataset.coords) for name, one in dataset.variables.items()
    }
    return as_trajectories(Labelled("The data set", variables, _attributes(dataset)), names, steady)


def _variable(name: str, values: Any, coordinate: bool) -> Variable:
    dims, attributes = tuple(map(str, values.dims)), _attributes(values)
    if coordinate and dims == (name,) and values.dtype.kind in "Mm":
        dates = values.values
        seconds = (dates - dates[0] if values.dtype.kind == "M" else dates) / np.timedelta64(1, "s")
        return Variable(dims, seconds.shape, seconds.dtype, partial(_cut, seconds), attributes, coordinate)
    axis = coordinate and dims == (name,) and role_of(name, attributes) in (TIME, *SPACE)
    if axis and values.dtype.kind not in "fiu":
        raise ValueError(f"The coordinate {name} has dtype {values.dtype}; expected numbers or dates.")
    return Variable(dims, values.shape, values.dtype, partial(_cut, values), attributes, coordinate)


def _cut(values: Any, ranges: Ranges) -> np.ndarray:
    return np.asarray(values[tuple(slice(*one) for one in ranges)])


def _attributes(held: Any) -> dict[str, Any]:
    return {str(key): plain_value(value) for key, value in held.attrs.items()}


def as_dataset(trajectories: np.ndarray, header: Header) -> xarray.Dataset:
    """Trajectories `(count, frames, *grid, fields)` with everything that their header says.

    Axes have the names and attributes of the files that the header came from, else those of the layout and time.
    """
    import xarray

    layout, kept = header.layout, _kept(header)
    axes = {letter: kept["axes"].get(letter, {}) for letter in (*layout.axis_names, "t")}
    names = {letter: str(said.get("name", "time" if letter == "t" else letter)) for letter, said in axes.items()}
    inner = {letter: {key: value for key, value in said.items() if key != "name"} for letter, said in axes.items()}
    for letter, boundary in zip(layout.axis_names, layout.boundary, strict=True):
        inner[letter]["boundary"] = boundary
        inner[letter].setdefault("axis", letter.upper())
    inner["t"].setdefault("axis", "T")
    values = dict(zip(layout.axis_names, layout.coordinates, strict=True)) | {"t": layout.times}
    dims = ("trajectory", names["t"], *(names[letter] for letter in layout.axis_names))
    fields = {
        name: (dims, trajectories[..., place], {**kept["fields"].get(name, {}), "units": layout.units[place]})
        for place, name in enumerate(layout.fields)
    }
    coordinates = {names[letter]: ((names[letter],), values[letter], inner[letter]) for letter in names}
    # A Zarr group has no order of its arrays.
    made: dict[str, Any] = {
        "source": header.source,
        "parameters": _without(header.parameters),
        "seed": header.seed,
        "fields": layout.fields,
    }
    if layout.axis_names != SPACE[: len(layout.axis_names)]:
        made["axes"] = layout.axis_names
    about = {"Conventions": "CF-1.11", **kept["data set"], MARK: json.dumps(made)}
    return xarray.Dataset(fields, coordinates, about)


def forecast_as_dataset(values: np.ndarray, fields: Sequence[str], layout: Layout | None = None) -> xarray.Dataset:
    """Frames `(count, frames, *grid, fields)`; with a `layout`, its coordinates, units and boundaries too.

    The second axis is called time where the layout has as many times as there are frames, and lead (from 1) elsewhere.
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
    second = "time" if timed else "lead"
    coordinates[second] = layout.times if timed and layout is not None else np.arange(1, frames + 1)
    dims = ("trajectory", second, *letters)
    variables = {
        name: (dims, values[..., place], {"units": units[name]} if name in units else {})
        for place, name in enumerate(fields)
    }
    return xarray.Dataset(variables, coordinates)


def _kept(header: Header) -> dict[str, Any]:
    kept = dict(header.parameters.get("attributes", {}))
    return {part: dict(kept.get(part, {})) for part in ("data set", "fields", "axes")}


def _without(parameters: Any) -> dict[str, Any]:
    """The attributes stand where they belong."""
    return {name: value for name, value in parameters.items() if name != "attributes"}
