"""Arrays with named dimensions, as trajectories `(frames, *grid, fields)`.

The readers of NetCDF, Zarr, VTK, The Well, PDEBench, PDEArena and xarray all use this: variables with named dimensions,
sliced along every one of them. The names identify the dimensions of trajectories, time and space; spatial axes are
transposed to the order x, y, z, and decreasing ones are reversed. A variable without a time or trajectory dimension is
broadcast along it.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from sigmasolver.data.formats.dimensions import CHANNEL, COUNT, SPACE, TIME, is_longitude, role_of
from sigmasolver.data.formats.metadata import check_strings
from sigmasolver.data.formats.source import ForeignData, Ranges, listed
from sigmasolver.data.header import BOUNDARIES
from sigmasolver.data.layout import Layout
from sigmasolver.settings import suggest

__all__ = ["MARK", "Labelled", "Variable", "as_trajectories", "coordinate"]

MAX_CHANNELS = 64
MARK = "sigmasolver"
"""Attribute of a data set with the provenance of its values as JSON; this package writes it."""


@dataclass(frozen=True)
class Variable:
    """An array with named dimensions."""

    dims: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[Ranges], np.ndarray]
    """Read the half-open range `(start, stop)` of each dimension."""
    attributes: Mapping[str, Any] = field(default_factory=dict)
    coordinate: bool = False
    fault: str | None = None
    """Why its values cannot be read, as the predicate of a sentence."""
    labels: tuple[str, ...] = ()
    """Names of the components, if it has a dimension of components."""
    repeat: bool = False
    """Whether to broadcast it along missing spatial axes; otherwise a variable that lacks one is skipped."""

    def whole(self) -> np.ndarray:
        return self.read([(0, size) for size in self.shape])


def coordinate(dimension: str, values: np.ndarray, attributes: Mapping[str, Any] | None = None) -> Variable:
    """Return the coordinate variable of a dimension."""
    values = values.astype(np.float64)
    return Variable(
        (dimension,), values.shape, values.dtype, partial(_slice, values), attributes or {}, coordinate=True
    )


def _slice(values: np.ndarray, ranges: Ranges) -> np.ndarray:
    return values[slice(*ranges[0])]


@dataclass(frozen=True)
class Labelled:
    """A data set of variables with named dimensions."""

    path: Path | str
    """The file, or a name for data in memory, for messages."""
    variables: Mapping[str, Variable]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Axis:
    """A spatial axis of the trajectories."""

    dimension: str
    points: np.ndarray
    stored: bool
    """Whether the points are in the file."""
    decreasing: bool
    boundary: str
    attributes: Mapping[str, Any]


def as_trajectories(data: Labelled, names: Sequence[str] | None = None, steady: bool | None = None) -> ForeignData:
    """Read the fields with the most spatial axes; missing metadata are filled with defaults and noted."""
    data = replace(data, variables={name: _as_numbers(variable) for name, variable in data.variables.items()})
    notes = list(data.notes)
    _check_sizes(data)
    roles = _dimension_roles(data)
    candidates = {name: variable for name, variable in data.variables.items() if _is_field(variable, roles)}
    if not candidates:
        available = (
            listed([f"{name} ({', '.join(variable.dims)})" for name, variable in data.variables.items()]) or "none"
        )
        raise ValueError(
            f"{data.path} has no real-valued variable on axes x, y or z (lon, lat, ...); its variables: {available}."
        )
    reference = max(
        candidates.values(), key=lambda variable: (len(_spatial_letters(variable, roles)), len(variable.dims))
    )
    space = _spatial_dimensions(reference, roles)
    fields = {
        name: variable
        for name, variable in candidates.items()
        if variable.repeat
        or (_spatial_letters(variable, roles) == set(space) and _shares_axes(variable, reference, roles))
    }
    fields = _select(data.path, _sorted_fields(fields, roles, data), names)
    for name, variable in fields.items():
        _check_variable(data.path, name, variable, roles)
    frames = _size(fields, roles, TIME)
    if steady and frames is not None and frames > 1:
        raise ValueError(f"{data.path} has {frames} frames, so it is not steady; omit --steady.")
    count = _size(fields, roles, COUNT)
    skipped = [
        f"{name} ({', '.join(variable.dims)})"
        for name, variable in data.variables.items()
        if name not in fields and not variable.coordinate and name not in variable.dims
    ]
    if skipped:
        notes.append(f"Skipped: {listed(skipped)}.")
    dropped = [
        dim
        for dim in dict.fromkeys(dim for variable in fields.values() for dim in variable.dims)
        if _is_dropped(dim, space, roles)
    ]
    if dropped:
        notes.append(f"Dropped dimensions of size 1: {', '.join(dropped)}.")
    axes = [_axis(data, space, letter, notes) for letter in space]
    missing = {letter for letter, axis in zip(SPACE, axes, strict=False) if not axis.stored}
    without_boundary = [axis.dimension for axis in axes if not axis.boundary]
    if without_boundary:
        notes.append(f"No boundary given for {', '.join(without_boundary)}: assumed open.")
        if len(without_boundary) == len(axes):
            missing.add("boundary")
    times, time_attributes = _times(data, fields, roles, frames, notes)
    if times is None:
        missing.add("times")
    readers = [
        _VariableReader(name, _with_labels(variable, roles, data), roles, axes) for name, variable in fields.items()
    ]
    # The variable and the component of each field.
    components = _components(data.path, readers, names)
    layout = Layout(
        fields=check_strings(
            f"The fields in {data.path}",
            [reader.fields[component] for reader, component in components],
            distinct=True,
        ),
        units=check_strings(f"The units in {data.path}", [reader.unit for reader, _ in components]),
        boundary=tuple(axis.boundary or "open" for axis in axes),
        coordinates=tuple(axis.points for axis in axes),
        times=np.arange(frames or 1, dtype=np.float64) if times is None else times,
    )
    unitless = [reader.name for reader in readers if "units" not in reader.variable.attributes]
    if unitless:
        notes.append(f"No units given for {listed(unitless)}: assumed dimensionless.")
        if len(unitless) == len(readers):
            missing.add("units")

    whole = components == _components(data.path, readers, None)

    def read_frames(index: int, start: int, stop: int) -> np.ndarray:
        if whole:
            return np.concatenate([reader.read(index, start, stop) for reader in readers], axis=-1)
        return np.stack(read_fields(index, start, stop, range(len(components))), axis=-1)

    def read_fields(index: int, start: int, stop: int, channels: Sequence[int]) -> list[np.ndarray]:
        values = {
            reader: reader.read(index, start, stop)
            for reader in dict.fromkeys(components[channel][0] for channel in channels)
        }
        return [values[reader][..., component] for reader, component in (components[channel] for channel in channels)]

    def read(start: int, stop: int) -> np.ndarray:
        return np.stack([read_frames(index, 0, len(layout.times)) for index in range(start, stop)])

    return ForeignData(
        layout,
        1 if count is None else count,
        read,
        tuple(notes),
        frames=read_frames,
        fields=read_fields,
        missing=frozenset(missing),
        parameters=_header_parameters(data, readers, axes, time_attributes, frames is not None),
    )


class _VariableReader:
    """Reads one variable as one field, or as one field per component."""

    def __init__(self, name: str, variable: Variable, roles: Mapping[str, str], axes: Sequence[_Axis]) -> None:
        self.name, self.variable, self.axes = name, variable, axes
        self.roles = [roles[dim] for dim in variable.dims]
        self.constant = TIME not in self.roles
        self.unit = str(variable.attributes.get("units", "1")) or "1"
        channel_sizes = [variable.shape[i] for i, role in enumerate(self.roles) if role == CHANNEL]
        labels = variable.labels or tuple(
            map("_".join, itertools.product(*(map(str, range(n)) for n in channel_sizes)))
        )
        self.fields = tuple(f"{name}_{label}" for label in labels) if prod(channel_sizes) > 1 else (name,)
        spatial = [axis.dimension for axis in axes if axis.dimension in variable.dims]
        # Transpose to the order of a trajectory: time, space, components. The remaining dimensions have size 1.
        self.order = [i for i, role in enumerate(self.roles) if role == TIME]
        self.order += [variable.dims.index(dimension) for dimension in spatial]
        self.order += [i for i, role in enumerate(self.roles) if role == CHANNEL]
        self.order += [i for i in range(len(variable.dims)) if i not in self.order]

    def read(self, index: int, start: int, stop: int) -> np.ndarray:
        """Read frames of one trajectory, `(stop - start, *grid, fields)`."""
        selected = {COUNT: (index, index + 1), TIME: (start, stop)}
        ranges = [selected.get(role, (0, size)) for role, size in zip(self.roles, self.variable.shape, strict=True)]
        values = self.variable.read(ranges).transpose(self.order)
        grid = [len(axis.points) for axis in self.axes]
        own_grid = [n if axis.dimension in self.variable.dims else 1 for axis, n in zip(self.axes, grid, strict=True)]
        values = values.reshape(1 if self.constant else stop - start, *own_grid, len(self.fields))
        values = values[(slice(None), *(slice(None, None, -1 if axis.decreasing else 1) for axis in self.axes))]
        return np.broadcast_to(values, (stop - start, *grid, len(self.fields)))


def _as_numbers(variable: Variable) -> Variable:
    """A boolean variable, such as a mask, as 0 and 1; others unchanged."""
    if variable.dtype.kind != "b":
        return variable
    return replace(
        variable, dtype=np.dtype(np.uint8), read=lambda ranges: variable.read(ranges).astype(np.uint8, copy=False)
    )


def _check_sizes(data: Labelled) -> None:
    """Raise ValueError if variables disagree on the size of a dimension."""
    sizes: dict[str, tuple[int, str]] = {}
    for name, variable in data.variables.items():
        if len(variable.dims) != len(variable.shape):
            raise ValueError(
                f"{name!r} in {data.path} has shape {variable.shape}; expected axes ({', '.join(variable.dims)})."
            )
        for dim, size in zip(variable.dims, variable.shape, strict=True):
            expected, other = sizes.setdefault(dim, (size, name))
            if size != expected and dim != CHANNEL:
                raise ValueError(
                    f"{name!r} in {data.path} has {size} entries along {dim}, but {other!r} has "
                    f"{expected}; all must agree."
                )


def _dimension_roles(data: Labelled) -> dict[str, str]:
    """Return the role of each dimension; an unknown dimension of size 1 gets the role "single"."""
    roles: dict[str, str] = {}
    for variable in data.variables.values():
        for dimension, size in zip(variable.dims, variable.shape, strict=True):
            if dimension in roles:
                continue
            coordinate = data.variables.get(dimension)
            role = role_of(dimension, {} if coordinate is None else coordinate.attributes)
            if role is not None or size == 1:
                roles[dimension] = role or "single"
    return roles


def _is_field(variable: Variable, roles: Mapping[str, str]) -> bool:
    if variable.coordinate or variable.dtype.kind not in "fiu" or 0 in variable.shape:
        return False
    return (
        variable.repeat
        or any(roles.get(dim) in SPACE for dim in variable.dims)
        or any(dim not in roles for dim in variable.dims[1:])
    )


def _spatial_letters(variable: Variable, roles: Mapping[str, str]) -> set[str]:
    """Return the letters of its spatial axes with more than one point."""
    return {
        roles[dim]
        for dim, size in zip(variable.dims, variable.shape, strict=True)
        if roles.get(dim) in SPACE and size > 1
    }


def _spatial_dimensions(variable: Variable, roles: Mapping[str, str]) -> dict[str, str]:
    """Return the spatial dimensions of a variable by letter, in the order x, y, z."""
    letters = _spatial_letters(variable, roles)
    return {
        letter: next(dim for dim in variable.dims if roles.get(dim) == letter) for letter in SPACE if letter in letters
    }


def _shares_axes(variable: Variable, reference: Variable, roles: Mapping[str, str]) -> bool:
    """Whether it has the dimensions of the reference variable; on a staggered grid they differ."""
    for dim, size in zip(variable.dims, variable.shape, strict=True):
        role = roles.get(dim)
        same_role = [other for other in reference.dims if roles.get(other) == role]
        if role in (COUNT, TIME, *SPACE) and size > 1 and same_role and dim not in same_role:
            return False
    return True


def _with_labels(variable: Variable, roles: Mapping[str, str], data: Labelled) -> Variable:
    """Add the names of its components, if the coordinate of their dimension holds strings."""
    channels = [dim for dim in variable.dims if roles[dim] == CHANNEL]
    coordinate = data.variables.get(channels[0]) if len(channels) == 1 and not variable.labels else None
    if coordinate is None or coordinate.dims != tuple(channels) or coordinate.dtype.kind not in "SU":
        return variable
    return replace(variable, labels=check_strings(f"The components in {data.path}", coordinate.whole()))


def _is_dropped(dim: str, space: Mapping[str, str], roles: Mapping[str, str]) -> bool:
    return roles[dim] == "single" or (roles[dim] in SPACE and dim not in space.values())


def _sorted_fields(fields: dict[str, Variable], roles: Mapping[str, str], data: Labelled) -> dict[str, Variable]:
    """Sort fields as this package wrote them, or in file order; fields constant in time come last."""
    varies = {name: any(roles.get(dim) == TIME for dim in variable.dims) for name, variable in fields.items()}
    written = list(_provenance(data.attributes.get(MARK)).get("made", {}).get("fields", ()))
    rank = {name: written.index(name) if name in written else len(written) for name in fields}
    return {name: fields[name] for name in sorted(fields, key=lambda name: (not varies[name], rank[name]))}


def _select(path: Path | str, fields: dict[str, Variable], names: Sequence[str] | None) -> dict[str, Variable]:
    """The variables with these names, or with components of these names (the variable and the component: u_0)."""
    if names is None:
        return fields
    selected = {}
    for name in names:
        owners = [variable for variable in fields if name == variable or name.startswith(f"{variable}_")]
        if not owners:
            raise ValueError(f"{path} has no field {name!r}; {suggest(name, list(fields))}")
        owner = max(owners, key=len)
        selected[owner] = fields[owner]
    return selected


def _components(
    path: Path | str, readers: Sequence[_VariableReader], names: Sequence[str] | None
) -> list[tuple[_VariableReader, int]]:
    """The variable and the component of each named field, where a variable stands for all its components."""
    by_name = {reader.name: [(reader, component) for component in range(len(reader.fields))] for reader in readers}
    if names is None:
        return [field for fields in by_name.values() for field in fields]
    for reader in readers:
        by_name = {name: [(reader, component)] for component, name in enumerate(reader.fields)} | by_name
    for name in names:
        if name not in by_name:
            raise ValueError(f"{path} has no field {name!r}; {suggest(name, list(by_name))}")
    return [field for name in names for field in by_name[name]]


def _check_variable(path: Path | str, name: str, variable: Variable, roles: Mapping[str, str]) -> None:
    unknown = [dim for dim in variable.dims if dim not in roles]
    if unknown:
        raise ValueError(
            f"{name!r} in {path} has dimensions ({', '.join(variable.dims)}), of which "
            f"{', '.join(unknown)} cannot be identified; rename to count, time, x, y, z or channel."
        )
    long_roles = [roles[dim] for dim, size in zip(variable.dims, variable.shape, strict=True) if size > 1]
    repeated = next((role for role in (COUNT, TIME, *SPACE) if long_roles.count(role) > 1), None)
    if repeated is not None:
        dimensions = ", ".join(dim for dim in variable.dims if roles[dim] == repeated)
        raise ValueError(f"{name!r} in {path} has several {repeated} dimensions ({dimensions}); rename one of them.")
    if variable.fault is not None:
        raise ValueError(f"{name!r} in {path} {variable.fault}.")
    channels = prod(size for dim, size in zip(variable.dims, variable.shape, strict=True) if roles[dim] == CHANNEL)
    if channels > MAX_CHANNELS:
        raise ValueError(f"{name!r} in {path} has {channels} components; the maximum is {MAX_CHANNELS}.")


def _size(fields: Mapping[str, Variable], roles: Mapping[str, str], role: str) -> int | None:
    """Return the size of the dimension with this role; None if no field has one."""
    sizes = [
        size
        for variable in fields.values()
        for dim, size in zip(variable.dims, variable.shape, strict=True)
        if roles[dim] == role
    ]
    return max(sizes, default=None)


def _axis(data: Labelled, space: Mapping[str, str], letter: str, notes: list[str]) -> _Axis:
    dimension = space[letter]
    points = next(
        size
        for variable in data.variables.values()
        for dim, size in zip(variable.dims, variable.shape, strict=True)
        if dim == dimension
    )
    coordinate = data.variables.get(dimension)
    stored = coordinate is not None and coordinate.dims == (dimension,) and coordinate.dtype.kind in "fiu"
    if coordinate is not None and stored:
        values, attributes = coordinate.whole().astype(np.float64), coordinate.attributes
    else:
        values, attributes = np.arange(points, dtype=np.float64), {}
        notes.append(f"No {dimension} coordinates: assumed 0, 1, 2, ….")
    decreasing = len(values) > 1 and values[0] > values[-1]
    if decreasing:
        values = values[::-1]
        notes.append(f"{dimension} is decreasing in the file and was reversed.")
    boundary = _boundary(data, space, letter, attributes, values if stored else values[:0], notes)
    return _Axis(dimension, values, stored, decreasing, boundary, attributes)


def _boundary(
    data: Labelled,
    space: Mapping[str, str],
    letter: str,
    attributes: Mapping[str, Any],
    values: np.ndarray,
    notes: list[str],
) -> str:
    """Return periodic, wall or open, from an attribute of the coordinate or of the data set, or from the `values` of a
    longitude, which are empty if the file does not give them; "" if unspecified."""
    dimension = space[letter]
    boundary = attributes.get("boundary")
    for name in (f"boundary_{dimension}", f"boundary_{letter}"):
        boundary = data.attributes.get(name) if boundary is None else boundary
    if boundary is None and "boundary" in data.attributes:
        attribute = data.attributes["boundary"]
        parts = re.split(r"[,;\s]+", attribute.strip()) if isinstance(attribute, str) else list(attribute)
        if len(parts) not in (1, len(space)):
            raise ValueError(
                f"{data.path} has boundary {attribute!r}; expected one value for each of {', '.join(space)}."
            )
        boundary = parts[0] if len(parts) == 1 else parts[list(space).index(letter)]
    if boundary is None and attributes.get("topology") == "circular":
        boundary = "periodic"
    if boundary is None and is_longitude(dimension, attributes) and len(values) > 1:
        step = (values[-1] - values[0]) / (len(values) - 1)
        if abs(values[-1] - values[0] + step - 360) < 1e-3 * step:
            notes.append(f"{dimension} covers the full circle: taken as periodic.")
            boundary = "periodic"
    if boundary is None:
        return ""
    if str(boundary).strip().lower() not in BOUNDARIES:
        raise ValueError(f"{data.path} has boundary {boundary!r} for {dimension}; choose from {', '.join(BOUNDARIES)}.")
    return str(boundary).strip().lower()


def _times(
    data: Labelled, fields: Mapping[str, Variable], roles: Mapping[str, str], frames: int | None, notes: list[str]
) -> tuple[np.ndarray | None, Mapping[str, Any]]:
    """Return the times of the frames, None if there are none, and the attributes of the time coordinate."""
    if frames is None:
        return None, {}
    dimension = next(dim for variable in fields.values() for dim in variable.dims if roles[dim] == TIME)
    coordinate = data.variables.get(dimension)
    if coordinate is not None and coordinate.dims == (dimension,) and coordinate.dtype.kind in "fiu":
        return coordinate.whole().astype(np.float64), {"name": dimension, **coordinate.attributes}
    notes.append("No times: assumed 0, 1, 2, ….")
    return None, {"name": dimension}


def _header_parameters(
    data: Labelled,
    readers: Sequence[_VariableReader],
    axes: Sequence[_Axis],
    time_attributes: Mapping[str, Any],
    has_time: bool,
) -> dict[str, Any]:
    """Return the attributes, which a written forecast keeps, and the fields constant in time, which are inputs of a
    model but not forecast."""
    data_set = dict(data.attributes)
    provenance = data_set.pop(MARK, None)
    attributes = {
        "data set": data_set,
        "fields": {name: dict(reader.variable.attributes) for reader in readers for name in reader.fields},
        # A store names its axes x, y, z by position: a plane x-z has the axes x and y there.
        "axes": {
            letter: {"name": axis.dimension, **axis.attributes} for letter, axis in zip(SPACE, axes, strict=False)
        },
    }
    if time_attributes:
        attributes["axes"]["t"] = dict(time_attributes)
    constant = [name for reader in readers for name in reader.fields if reader.constant and has_time]
    return {"attributes": attributes} | ({"constant": constant} if constant else {}) | _provenance(provenance)


def _provenance(text: Any) -> dict[str, Any]:
    """Parse the attribute `MARK` into the parameter "made"; empty unless this package wrote it."""
    try:
        provenance = json.loads(text)
    except (TypeError, ValueError):
        return {}
    types = {"source": str, "parameters": dict, "fields": list}
    complete = isinstance(provenance, dict) and all(isinstance(provenance.get(key), t) for key, t in types.items())
    return {"made": provenance} if complete else {}
