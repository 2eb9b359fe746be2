"""Arrays whose dimensions have names, as trajectories `(frames, *grid, fields)`.

NetCDF, Zarr, VTK, The Well, PDEBench, PDEArena and xarray all come to this: variables with named dimensions, of which
any box can be read. The names say which dimension counts trajectories, which is time and which are of space; spatial
axes are put in the order x, y, z, and those that run downwards are turned round. A variable that lacks the dimension of
time, or of trajectories, is repeated along it.
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

from sigmasolver.data.formats.dimensions import CHANNEL, COUNT, SPACE, TIME, role_of
from sigmasolver.data.formats.metadata import plain_words
from sigmasolver.data.formats.source import Foreign, Ranges, listed
from sigmasolver.data.header import BOUNDARIES
from sigmasolver.data.layout import Layout
from sigmasolver.settings import suggest

__all__ = ["MARK", "Labelled", "Variable", "as_trajectories", "coordinate"]

MOST_CHANNELS = 64
MARK = "sigmasolver"
"""The attribute of a data set that tells who made the values and with what, as JSON; this package writes it."""


@dataclass(frozen=True)
class Variable:
    """An array with named dimensions."""

    dims: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[Ranges], np.ndarray]
    """The entries from `start` to before `stop` along each dimension."""
    attributes: Mapping[str, Any] = field(default_factory=dict)
    coordinate: bool = False
    fault: str | None = None
    """Why its values cannot be had, as the end of a sentence."""
    labels: tuple[str, ...] = ()
    """The names of its components, where it has a dimension of them."""
    repeat: bool = False
    """Whether it is a field that is repeated along the spatial axes it lacks; others that lack some are left out."""

    def whole(self) -> np.ndarray:
        return self.read([(0, size) for size in self.shape])


def coordinate(dimension: str, values: np.ndarray, attributes: Mapping[str, Any] | None = None) -> Variable:
    """The values along a dimension."""
    values = values.astype(np.float64)
    return Variable((dimension,), values.shape, values.dtype, partial(_cut, values), attributes or {}, coordinate=True)


def _cut(values: np.ndarray, ranges: Ranges) -> np.ndarray:
    return values[slice(*ranges[0])]


@dataclass(frozen=True)
class Labelled:
    """A data set of such arrays."""

    path: Path | str
    """The file, or what a sentence calls data in memory."""
    variables: Mapping[str, Variable]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Axis:
    """A spatial axis of the trajectories."""

    dimension: str
    points: np.ndarray
    downwards: bool
    boundary: str
    attributes: Mapping[str, Any]


def as_trajectories(data: Labelled, names: Sequence[str] | None = None, steady: bool | None = None) -> Foreign:
    """The fields that share the most spatial axes; what the data set does not say is filled in and noted."""
    notes = list(data.notes)
    _check_sizes(data)
    roles = _roles(data)
    able = {name: one for name, one in data.variables.items() if _is_field(one, roles)}
    if not able:
        there = listed([f"{name} ({', '.join(one.dims)})" for name, one in data.variables.items()]) or "none"
        raise ValueError(
            f"{data.path} has no real-valued variable on axes x, y or z (lon, lat, ...); its variables: {there}."
        )
    first = max(able.values(), key=lambda one: (len(_spatial(one, roles)), len(one.dims)))
    space = _space(first, roles)
    fields = {
        name: one
        for name, one in able.items()
        if one.repeat or (_spatial(one, roles) == set(space) and _shares_axes(one, first, roles))
    }
    fields = _wanted(data.path, _in_order(fields, roles, data), names)
    for name, one in fields.items():
        _check(data.path, name, one, roles)
    frames = _size(fields, roles, TIME)
    if steady and frames is not None and frames > 1:
        raise ValueError(f"{data.path} has {frames} frames, so it is not steady; omit --steady.")
    count = _size(fields, roles, COUNT)
    rest = [
        f"{name} ({', '.join(one.dims)})"
        for name, one in data.variables.items()
        if name not in fields and not one.coordinate and name not in one.dims
    ]
    if rest:
        notes.append(f"Skipped: {listed(rest)}.")
    single = [
        dim for dim in dict.fromkeys(dim for one in fields.values() for dim in one.dims) if _dropped(dim, space, roles)
    ]
    if single:
        notes.append(f"Dropped dimensions of size 1: {', '.join(single)}.")
    axes = [_axis(data, space, letter, notes) for letter in space]
    assumed = [axis.dimension for axis in axes if not axis.boundary]
    if assumed:
        notes.append(f"No boundary given for {', '.join(assumed)}: assumed open.")
    times, clock = _times(data, fields, roles, frames, notes)
    plans = [_Plan(name, _with_labels(one, roles, data), roles, axes) for name, one in fields.items()]
    layout = Layout(
        fields=plain_words(
            f"The fields in {data.path}", [name for plan in plans for name in plan.fields], distinct=True
        ),
        units=plain_words(f"The units in {data.path}", [plan.unit for plan in plans for _ in plan.fields]),
        boundary=tuple(axis.boundary or "open" for axis in axes),
        coordinates=tuple(axis.points for axis in axes),
        times=times,
    )
    unitless = [plan.name for plan in plans if "units" not in plan.variable.attributes]
    if unitless:
        notes.append(f"No units given for {listed(unitless)}: assumed dimensionless.")

    def some(index: int, start: int, stop: int) -> np.ndarray:
        return np.concatenate([plan.take(index, start, stop) for plan in plans], axis=-1)

    places = [(plan, place) for plan in plans for place in range(len(plan.fields))]

    def apart(index: int, start: int, stop: int, channels: Sequence[int]) -> list[np.ndarray]:
        taken = {plan: plan.take(index, start, stop) for plan in dict.fromkeys(places[one][0] for one in channels)}
        return [taken[plan][..., place] for plan, place in (places[one] for one in channels)]

    def read(start: int, stop: int) -> np.ndarray:
        return np.stack([some(index, 0, len(times)) for index in range(start, stop)])

    return Foreign(
        layout,
        1 if count is None else count,
        read,
        tuple(notes),
        frames=some,
        fields=apart,
        parameters=_kept(data, plans, axes, clock, frames is not None),
    )


class _Plan:
    """How one variable becomes some of the fields."""

    def __init__(self, name: str, variable: Variable, roles: Mapping[str, str], axes: Sequence[_Axis]) -> None:
        self.name, self.variable, self.axes = name, variable, axes
        self.roles = [roles[dim] for dim in variable.dims]
        self.constant = TIME not in self.roles
        self.unit = str(variable.attributes.get("units", "1")) or "1"
        inner = [variable.shape[place] for place, role in enumerate(self.roles) if role == CHANNEL]
        labels = variable.labels or tuple(map("_".join, itertools.product(*(map(str, range(n)) for n in inner))))
        self.fields = tuple(f"{name}_{label}" for label in labels) if prod(inner) > 1 else (name,)
        kept = [axis.dimension for axis in axes if axis.dimension in variable.dims]
        # The axes of a box in the order of a trajectory: time, space, components. What is left has one entry.
        self.order = [place for place, role in enumerate(self.roles) if role == TIME]
        self.order += [variable.dims.index(dimension) for dimension in kept]
        self.order += [place for place, role in enumerate(self.roles) if role == CHANNEL]
        self.order += [place for place in range(len(variable.dims)) if place not in self.order]

    def take(self, index: int, start: int, stop: int) -> np.ndarray:
        """These frames of one trajectory, `(stop - start, *grid, fields)`."""
        chosen = {COUNT: (index, index + 1), TIME: (start, stop)}
        ranges = [chosen.get(role, (0, size)) for role, size in zip(self.roles, self.variable.shape, strict=True)]
        values = self.variable.read(ranges).transpose(self.order)
        grid = [len(axis.points) for axis in self.axes]
        own = [n if axis.dimension in self.variable.dims else 1 for axis, n in zip(self.axes, grid, strict=True)]
        values = values.reshape(1 if self.constant else stop - start, *own, len(self.fields))
        values = values[(slice(None), *(slice(None, None, -1 if axis.downwards else 1) for axis in self.axes))]
        return np.broadcast_to(values, (stop - start, *grid, len(self.fields)))


def _check_sizes(data: Labelled) -> None:
    """A dimension has one length, whichever variable has it."""
    sizes: dict[str, tuple[int, str]] = {}
    for name, variable in data.variables.items():
        if len(variable.dims) != len(variable.shape):
            raise ValueError(
                f"{name!r} in {data.path} has shape {variable.shape}; expected axes ({', '.join(variable.dims)})."
            )
        for dim, size in zip(variable.dims, variable.shape, strict=True):
            known, other = sizes.setdefault(dim, (size, name))
            if size != known and dim != CHANNEL:
                raise ValueError(
                    f"{name!r} in {data.path} has {size} entries along {dim}, but {other!r} has "
                    f"{known}; all must agree."
                )


def _roles(data: Labelled) -> dict[str, str]:
    """What each dimension means. One of a single entry may mean anything."""
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


def _spatial(variable: Variable, roles: Mapping[str, str]) -> set[str]:
    """The letters of its axes with more than one point."""
    return {
        roles[dim]
        for dim, size in zip(variable.dims, variable.shape, strict=True)
        if roles.get(dim) in SPACE and size > 1
    }


def _space(variable: Variable, roles: Mapping[str, str]) -> dict[str, str]:
    """The spatial dimensions of a variable by letter, in the order x, y, z."""
    letters = _spatial(variable, roles)
    return {
        letter: next(dim for dim in variable.dims if roles.get(dim) == letter) for letter in SPACE if letter in letters
    }


def _shares_axes(variable: Variable, first: Variable, roles: Mapping[str, str]) -> bool:
    """Whether it lies on the same points and times as the first; on a staggered grid it does not."""
    for dim, size in zip(variable.dims, variable.shape, strict=True):
        role = roles.get(dim)
        same = [other for other in first.dims if roles.get(other) == role]
        if role in (COUNT, TIME, *SPACE) and size > 1 and same and dim not in same:
            return False
    return True


def _with_labels(variable: Variable, roles: Mapping[str, str], data: Labelled) -> Variable:
    """With the names of its components, where their dimension has words for coordinates."""
    channels = [dim for dim in variable.dims if roles[dim] == CHANNEL]
    words = data.variables.get(channels[0]) if len(channels) == 1 and not variable.labels else None
    if words is None or words.dims != tuple(channels) or words.dtype.kind not in "SU":
        return variable
    return replace(variable, labels=plain_words(f"The components in {data.path}", words.whole()))


def _dropped(dim: str, space: Mapping[str, str], roles: Mapping[str, str]) -> bool:
    return roles[dim] == "single" or (roles[dim] in SPACE and dim not in space.values())


def _in_order(fields: dict[str, Variable], roles: Mapping[str, str], data: Labelled) -> dict[str, Variable]:
    """As this package wrote them or as the file lists them, and last those that do not change in time."""
    moving = {name: any(roles.get(dim) == TIME for dim in one.dims) for name, one in fields.items()}
    written = list(_made(data.attributes.get(MARK)).get("made", {}).get("fields", ()))
    place = {name: written.index(name) if name in written else len(written) for name in fields}
    return {name: fields[name] for name in sorted(fields, key=lambda name: (not moving[name], place[name]))}


def _wanted(path: Path | str, fields: dict[str, Variable], names: Sequence[str] | None) -> dict[str, Variable]:
    if names is None:
        return fields
    for name in names:
        if name not in fields:
            raise ValueError(f"{path} has no field {name!r}; {suggest(name, list(fields))}")
    return {name: fields[name] for name in names}


def _check(path: Path | str, name: str, variable: Variable, roles: Mapping[str, str]) -> None:
    unknown = [dim for dim in variable.dims if dim not in roles]
    if unknown:
        raise ValueError(
            f"{name!r} in {path} has dimensions ({', '.join(variable.dims)}), of which "
            f"{', '.join(unknown)} cannot be identified; rename to count, time, x, y, z or channel."
        )
    long = [roles[dim] for dim, size in zip(variable.dims, variable.shape, strict=True) if size > 1]
    twice = next((role for role in (COUNT, TIME, *SPACE) if long.count(role) > 1), None)
    if twice is not None:
        both = ", ".join(dim for dim in variable.dims if roles[dim] == twice)
        raise ValueError(f"{name!r} in {path} has several {twice} dimensions ({both}); rename one of them.")
    if variable.fault is not None:
        raise ValueError(f"{name!r} in {path} {variable.fault}.")
    channels = prod(size for dim, size in zip(variable.dims, variable.shape, strict=True) if roles[dim] == CHANNEL)
    if channels > MOST_CHANNELS:
        raise ValueError(f"{name!r} in {path} has {channels} components; the maximum is {MOST_CHANNELS}.")


def _size(fields: Mapping[str, Variable], roles: Mapping[str, str], role: str) -> int | None:
    """How long the dimension of this role is; None where no field has one."""
    sizes = [
        size for one in fields.values() for dim, size in zip(one.dims, one.shape, strict=True) if roles[dim] == role
    ]
    return max(sizes, default=None)


def _axis(data: Labelled, space: Mapping[str, str], letter: str, notes: list[str]) -> _Axis:
    dimension = space[letter]
    points = next(
        size
        for one in data.variables.values()
        for dim, size in zip(one.dims, one.shape, strict=True)
        if dim == dimension
    )
    coordinate = data.variables.get(dimension)
    if coordinate is not None and coordinate.dims == (dimension,) and coordinate.dtype.kind in "fiu":
        values, attributes = coordinate.whole().astype(np.float64), coordinate.attributes
    else:
        values, attributes = np.arange(points, dtype=np.float64), {}
        notes.append(f"No {dimension} coordinates: assumed 0, 1, 2, ….")
    downwards = len(values) > 1 and values[0] > values[-1]
    if downwards:
        values = values[::-1]
        notes.append(f"{dimension} is decreasing in the file and was reversed.")
    boundary = _boundary(data, space, letter, attributes, values, notes)
    return _Axis(dimension, values, downwards, boundary, attributes)


def _boundary(
    data: Labelled,
    space: Mapping[str, str],
    letter: str,
    attributes: Mapping[str, Any],
    values: np.ndarray,
    notes: list[str],
) -> str:
    """periodic, wall or open, from an attribute `boundary` of the coordinate or of the data set; "": nothing says."""
    dimension = space[letter]
    said = attributes.get("boundary")
    for name in (f"boundary_{dimension}", f"boundary_{letter}"):
        said = data.attributes.get(name) if said is None else said
    if said is None and "boundary" in data.attributes:
        whole = data.attributes["boundary"]
        words = re.split(r"[,;\s]+", whole.strip()) if isinstance(whole, str) else list(whole)
        if len(words) not in (1, len(space)):
            raise ValueError(f"{data.path} has boundary {whole!r}; expected one value for each of {', '.join(space)}.")
        said = words[0] if len(words) == 1 else words[list(space).index(letter)]
    if said is None and attributes.get("topology") == "circular":
        said = "periodic"
    if said is None and "east" in str(attributes.get("units", "")) and len(values) > 1:
        step = (values[-1] - values[0]) / (len(values) - 1)
        if abs(values[-1] - values[0] + step - 360) < 1e-3 * step:
            notes.append(f"{dimension} covers the full circle: taken as periodic.")
            said = "periodic"
    if said is None:
        return ""
    if str(said).strip().lower() not in BOUNDARIES:
        raise ValueError(f"{data.path} has boundary {said!r} for {dimension}; choose from {', '.join(BOUNDARIES)}.")
    return str(said).strip().lower()


def _times(
    data: Labelled, fields: Mapping[str, Variable], roles: Mapping[str, str], frames: int | None, notes: list[str]
) -> tuple[np.ndarray, Mapping[str, Any]]:
    if frames is None:
        return np.zeros(1), {}
    dimension = next(dim for one in fields.values() for dim in one.dims if roles[dim] == TIME)
    coordinate = data.variables.get(dimension)
    if coordinate is not None and coordinate.dims == (dimension,) and coordinate.dtype.kind in "fiu":
        return coordinate.whole().astype(np.float64), {"name": dimension, **coordinate.attributes}
    notes.append("No times: assumed 0, 1, 2, ….")
    return np.arange(frames, dtype=np.float64), {"name": dimension}


def _kept(
    data: Labelled, plans: Sequence[_Plan], axes: Sequence[_Axis], clock: Mapping[str, Any], timed: bool
) -> dict[str, Any]:
    """The attributes, for whoever reads the data or writes a forecast of them; and the fields that do not change, which
    are given to a model and not forecast."""
    said = dict(data.attributes)
    made = said.pop(MARK, None)
    kept = {
        "data set": said,
        "fields": {name: dict(plan.variable.attributes) for plan in plans for name in plan.fields},
        # The names x, y, z of a store are places, so that a plane x-z has the axes x and y there.
        "axes": {
            letter: {"name": axis.dimension, **axis.attributes} for letter, axis in zip(SPACE, axes, strict=False)
        },
    }
    if clock:
        kept["axes"]["t"] = dict(clock)
    constant = [name for plan in plans for name in plan.fields if plan.constant and timed]
    return {"attributes": kept} | ({"constant": constant} if constant else {}) | _made(made)


def _made(text: Any) -> dict[str, Any]:
    """Who made the values and with what, where this package wrote them."""
    try:
        made = json.loads(text)
    except (TypeError, ValueError):
        return {}
    keys = {"source": str, "parameters": dict, "fields": list}
    whole = isinstance(made, dict) and all(isinstance(made.get(key), kind) for key, kind in keys.items())
    return {"made": made} if whole else {}
