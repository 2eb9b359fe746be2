"""Which arrays of a user's file are the fields, and what their axes mean.

    fields (count, frames, *grid, channels)        one array with all fields, channels last
    u, v, … (count, frames, *grid)                 one array per field
    an unnamed array                               (count, frames, *grid) or (count, frames, *grid, channels)

Files of a folder, which hold one trajectory each, lack the axis `count`; steady arrays lack `frames`. Two spatial axes
look like one time axis and one spatial axis: if neither the file nor the user resolves this, an error asks for the
missing option.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sigmasolver.data.formats.metadata import METADATA_NAMES, check_strings, is_forecast, is_list, stored_names
from sigmasolver.data.formats.read_options import ReadOptions
from sigmasolver.data.formats.source import Array, check_numbers, listed, pickle_error
from sigmasolver.settings import suggest

__all__ = ["UNNAMED", "Choice", "check_field", "choose", "field_index"]

UNNAMED = ""
"""Key of the array of an .npy file."""
MAX_UNNAMED_FIELDS = 16
"""Maximum number of fields without names: a longer last axis is spatial, and more arrays need an explicit selection."""


@dataclass(frozen=True)
class LeadingAxes:
    """The axes before the spatial ones."""

    count_axes: int
    """1 if the first axis is `count`, else 0."""
    steady: bool
    """Whether there is no time axis."""

    @property
    def names(self) -> list[str]:
        return ["count"] * self.count_axes + ["frames"] * (not self.steady)

    @property
    def description(self) -> str:
        """The expected axes, for an error message."""
        return ", ".join([*self.names, "*grid"])

    def axes(self, spatial: int, channels: bool) -> list[str]:
        return [*self.names, *"xyz"[:spatial]] + ["channels"] * channels

    def spatial(self, shape: tuple[int, ...]) -> int:
        """Return the number of spatial axes of an array without channels."""
        return len(shape) - len(self.names)

    def trajectory(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return `(frames, *grid)` for the shape of an array without channels."""
        return (1,) * self.steady + shape[self.count_axes :]


@dataclass(frozen=True)
class Choice:
    """The arrays of a file that hold the fields, and how to read them."""

    arrays: tuple[str, ...]
    """One per field, or a single one with a channel axis."""
    channel_axis: bool
    places: tuple[int, ...]
    """Index of each field among the `known` fields of the file."""
    known: int
    fields: tuple[str, ...] | None
    """Names of the fields; None if neither the file nor the user names them."""
    shape: tuple[int, ...]
    """`(frames, *grid)`."""
    notes: tuple[str, ...]
    leading_axes: LeadingAxes

    @property
    def steady(self) -> bool:
        """Whether the arrays have no time axis; one of length 1 is inserted."""
        return self.leading_axes.steady

    def take(self, arrays: Mapping[str, Array], start: int, stop: int) -> np.ndarray:
        """Read rows `start` to `stop` of the first axis, channels last."""
        if not self.channel_axis:
            values = np.stack([arrays[name].rows(start, stop) for name in self.arrays], axis=-1)
        else:
            values = arrays[self.arrays[0]].rows(start, stop)
            values = values if self.places == tuple(range(self.known)) else values[..., list(self.places)]
        return np.expand_dims(values, self.leading_axes.count_axes) if self.steady else values

    def frames(self, arrays: Mapping[str, Array], index: int, start: int, stop: int) -> np.ndarray:
        """Read frames of one trajectory, `(stop - start, *grid, fields)`; `index` is unused without a count axis."""
        values = [self._read_frames(arrays[name], index, start, stop) for name in self.arrays]
        if not self.channel_axis:
            return np.stack(values, axis=-1)
        all_channels = self.places == tuple(range(self.known))
        return np.array(values[0]) if all_channels else values[0][..., list(self.places)]

    def apart(
        self, arrays: Mapping[str, Array], index: int, start: int, stop: int, channels: Sequence[int]
    ) -> list[np.ndarray]:
        """Like `frames`, but each of these fields as an array `(stop - start, *grid)`; requires one array per field."""
        return [self._read_frames(arrays[self.arrays[channel]], index, start, stop) for channel in channels]

    def _read_frames(self, array: Array, index: int, start: int, stop: int) -> np.ndarray:
        leading = [(index, index + 1)] * self.leading_axes.count_axes + [(start, stop)] * (not self.steady)
        values = array.part([*leading, *((0, size) for size in array.shape[len(leading) :])])
        values = values[0] if self.leading_axes.count_axes else values
        return values[None][start:stop] if self.steady else values


def choose(path: Path, arrays: Mapping[str, Array], options: ReadOptions, leading: int) -> Choice:
    """Choose the arrays of a file that are fields; `leading` is 1 if the first axis is `count`, else 0.

    Unless `options` say whether there is a time axis, the file must make it unambiguous.
    """
    choice = _choose_fields(path, arrays, options, LeadingAxes(leading, bool(options.steady)))
    has_times = any(is_list(arrays.get(name)) and name not in choice.arrays for name in ("times", "t"))
    one_dimensional = choice.steady and leading and len(choice.shape) == 2
    if one_dimensional and options.axes is None and _spatial_axes(arrays, options, choice) != 1:
        raise _count_or_space_error(path, arrays[choice.arrays[0]].shape, choice)
    if options.steady is not None or has_times:
        return choice
    channels_guessed = UNNAMED in arrays and choice.channel_axis and options.fields is None
    spatial = None if channels_guessed else _spatial_axes(arrays, options, choice)
    if spatial == len(choice.shape):
        return _choose_fields(path, arrays, options, LeadingAxes(leading, True))
    if spatial is None and len(choice.shape) == 2 and choice.shape[0] > 1:
        raise _time_or_space_error(path, arrays[choice.arrays[0]].shape, choice)
    return choice


def _choose_fields(path: Path, arrays: Mapping[str, Array], options: ReadOptions, leading_axes: LeadingAxes) -> Choice:
    if UNNAMED in arrays:
        return _choose_unnamed(arrays[UNNAMED], options.fields, leading_axes, options.channels)
    if "fields" in arrays:
        return _choose_combined(path, arrays, options.fields, leading_axes)
    return _choose_separate(path, arrays, options.fields, leading_axes)


def _spatial_axes(arrays: Mapping[str, Array], options: ReadOptions, choice: Choice) -> int | None:
    """Return the number of spatial axes according to the axes, boundaries or coordinates; None if unspecified."""
    if options.spatial is not None:
        return options.spatial
    metadata = {name: array for name, array in arrays.items() if is_list(array) and name not in choice.arrays}
    if "boundary" in metadata:
        return max(1, *metadata["boundary"].shape, 0)
    coordinates = [name for name in "xyz" if name in metadata]
    return len(coordinates) if coordinates and coordinates == list("xyz"[: len(coordinates)]) else None


def _time_or_space_error(path: Path, shape: tuple[int, ...], choice: Choice) -> ValueError:
    """Two axes are ambiguous: time and space, or both spatial."""
    channels = choice.channel_axis
    steady_axes, unsteady_axes = (
        ", ".join(LeadingAxes(choice.leading_axes.count_axes, steady).axes(1 + steady, channels))
        for steady in (True, False)
    )
    hint = "" if choice.fields or not channels else "; set --fields if the last axis is not channels"
    return ValueError(
        f"{path} has shape {shape} and no times, which is ambiguous: use --steady if its axes are "
        f"({steady_axes}), --unsteady if they are ({unsteady_axes}){hint}."
    )


def _count_or_space_error(path: Path, shape: tuple[int, ...], choice: Choice) -> ValueError:
    """Two axes of steady arrays are ambiguous: cases and space, or both spatial."""
    end = ",field" * choice.channel_axis
    return ValueError(
        f"{path} has shape {shape}, which is ambiguous: use --axes count,x{end} if it holds {shape[0]} "
        f"one-dimensional cases, --axes x,y{end} if it is one two-dimensional case."
    )


def _choose_unnamed(
    array: Array, names: Sequence[str] | None, leading_axes: LeadingAxes, has_channels: bool | None
) -> Choice:
    """Read an unnamed array; unless `has_channels` is set, guess from the shape whether the last axis is channels."""
    shape, inner = array.shape, leading_axes.spatial(array.shape)
    possible = [
        channels for channels in (False, True) if 1 <= inner - channels <= 3 and has_channels in (None, channels)
    ]
    if not possible:
        expected = leading_axes.axes(3, True)
        raise ValueError(
            f"{array.where} has shape {shape}; expected axes ({', '.join(expected)}), where y, z and channels are "
            "optional."
        )
    guess = shape[-1] == len(names) if names else shape[-1] <= MAX_UNNAMED_FIELDS
    channels = guess if guess in possible else possible[0]
    axes = leading_axes.axes(inner - channels, channels)
    check_field(array, axes)
    field_count, note = shape[-1] if channels else 1, f"Axes of shape {shape} are read as ({', '.join(axes)})"
    if names and len(names) != field_count:
        raise ValueError(f"{array.where} has shape {shape}; its last axis must hold the {len(names)} named fields.")
    if not names and len(possible) == 2:
        size = f"at most {MAX_UNNAMED_FIELDS}" if channels else f"more than {MAX_UNNAMED_FIELDS}"
        note += f", as the last has {size} entries; name the fields if this is wrong"
    fields = tuple(names) if names else None
    end = -1 if channels else len(shape)
    notes = (f"{note}.",) if has_channels is None else ()
    return Choice(
        (UNNAMED,), channels, tuple(range(field_count)), field_count, fields, leading_axes.trajectory(shape[:end]),
        notes, leading_axes,
    )  # fmt: skip


def _choose_combined(
    path: Path, arrays: Mapping[str, Array], names: Sequence[str] | None, leading_axes: LeadingAxes
) -> Choice:
    """Read all fields from the array `fields`, which has a channel axis."""
    array = arrays["fields"]
    shape, spatial = array.shape, leading_axes.spatial(array.shape) - 1
    if array.dtype.kind in "fiu" and not 1 <= spatial <= 3:
        raise ValueError(
            f"{path} has fields of shape {shape}; expected ({leading_axes.description}, channels) with one to three "
            "spatial axes."
        )
    check_field(array, leading_axes.axes(max(1, spatial), True))
    field_count = shape[-1]
    fields, indices = stored_names(path, arrays, field_count), tuple(range(field_count))
    if names and fields:
        indices = tuple(field_index(path, fields, name) for name in names)
    elif names and len(names) != field_count:
        raise ValueError(f"{path} has {field_count} unnamed channels, but {len(names)} names were given.")
    fields = tuple(names) if names else fields
    notes = _skipped_note(arrays, ("fields",), spatial)
    return Choice(
        ("fields",), True, indices, field_count, fields, leading_axes.trajectory(shape[:-1]), notes, leading_axes,
    )  # fmt: skip


def _choose_separate(
    path: Path, arrays: Mapping[str, Array], names: Sequence[str] | None, leading_axes: LeadingAxes
) -> Choice:
    """Read each field from an array of its own."""
    candidates = {
        name: array.shape
        for name, array in arrays.items()
        if array.real
        and 1 <= leading_axes.spatial(array.shape) <= 3
        and not (name in METADATA_NAMES and is_list(array))
    }
    selected = tuple(names) if names else _all_candidates(path, arrays, candidates, leading_axes)
    shape = arrays[_require_field(path, selected[0], list(arrays), list(candidates))].shape
    axes = leading_axes.axes(min(3, max(1, leading_axes.spatial(shape))), False)
    for name in selected:
        array = arrays[_require_field(path, name, list(arrays), list(candidates))]
        check_field(array, axes)
        if array.shape != shape:
            raise ValueError(f"{array.where} has shape {array.shape}, but {selected[0]!r} has {shape}; all must agree.")
    same_shape = [name for name in arrays if candidates.get(name) == shape or name in selected]
    indices = tuple(same_shape.index(name) for name in selected)
    note = f"{listed(selected)}: each read as a field with axes ({', '.join(axes)})."
    fields = check_strings(f"The arrays in {path}", selected, distinct=True)
    notes = (note, *_skipped_note(arrays, selected, leading_axes.spatial(shape)))
    return Choice(
        selected, False, indices, len(same_shape), fields, leading_axes.trajectory(shape), notes, leading_axes,
    )  # fmt: skip


def _all_candidates(
    path: Path, arrays: Mapping[str, Array], candidates: Mapping[str, tuple[int, ...]], leading_axes: LeadingAxes
) -> tuple[str, ...]:
    """Return all arrays that can be fields; raise ValueError if the choice is ambiguous."""
    for array in arrays.values():
        if array.link:  # its shape is unknown, so it may be a field
            raise ValueError(f"{array.where} {array.fault}, or select arrays with --fields.")
    if not candidates:
        available = listed([f"{name} {array.shape}" for name, array in arrays.items()]) if arrays else "none"
        expected = f"({leading_axes.description})"
        if not leading_axes.steady:
            expected += f", or with --steady ({LeadingAxes(leading_axes.count_axes, True).description})"
        raise ValueError(f"{path} has no real-valued array with axes {expected}; available arrays: {available}.")
    shapes = dict.fromkeys(candidates.values())
    if len(shapes) > 1:
        groups = [f"{listed([name for name in candidates if candidates[name] == shape])} {shape}" for shape in shapes]
        raise ValueError(
            f"{path} has arrays of several shapes: {'; '.join(groups[:MAX_UNNAMED_FIELDS])}; select some with --fields."
        )
    if len(candidates) > MAX_UNNAMED_FIELDS:
        raise ValueError(
            f"{path} has {len(candidates)} arrays that could be fields ({listed(candidates)}); select some with "
            "--fields."
        )
    return tuple(candidates)


def check_field(array: Array, axes: Sequence[str]) -> None:
    """Raise ValueError if the array cannot be a field with these axes."""
    if array.dtype.hasobject:
        raise pickle_error(array.where)
    check_numbers(array.where, array, axes)


def field_index(path: Path, present: Sequence[str], name: str) -> int:
    """Return the index of the named field; raise ValueError if it is missing."""
    return present.index(_require_field(path, name, present, present))


def _require_field(path: Path, name: str, present: Sequence[str], likely: Sequence[str]) -> str:
    """Return `name` if it is present; otherwise suggest one of the `likely` names."""
    if name not in present:
        hint = suggest(name, [item for item in likely or present if item.isprintable()]) if present else "it has none."
        raise ValueError(f"{path} has no field {name!r}; {hint}")
    return name


def _skipped_note(arrays: Mapping[str, Array], selected: Sequence[str], spatial: int) -> tuple[str, ...]:
    """Return a note on the arrays that are neither fields nor metadata; empty if there are none."""
    used = [name for name in METADATA_NAMES if is_list(arrays.get(name)) and name not in "xyz"[spatial:]]
    if "times" in used and "t" in used:
        used.remove("t")
    if "fields" not in selected and "names" in used:
        used.remove("names")
    used += ["source"] * is_forecast(arrays)
    skipped = [f"{name} {array.shape}" for name, array in arrays.items() if name not in (*selected, *used)]
    return (f"Skipped: {listed(skipped)}.",) if skipped else ()
