"""Which arrays of a user's file are the fields, and what their axes mean.

    fields (count, frames, *grid, channels)        one array with all fields, its last axis the channels
    u, v, … (count, frames, *grid)                 one array per field
    an array without a name                        (count, frames, *grid) or (count, frames, *grid, channels)

In a file that is one trajectory of a folder the same arrays come without the axis `count`, and steady ones everywhere
without `frames`. Two axes of space look like one of time and one of space: where nothing but the user can tell them
apart, the user is asked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sigmasolver.data.formats.metadata import BESIDE, is_list, own_names, plain_words
from sigmasolver.data.formats.reading import Reading
from sigmasolver.data.formats.source import Array, check_numbers, listed, pickled
from sigmasolver.settings import suggest

__all__ = ["UNNAMED", "Choice", "check_field", "choose", "pick"]

UNNAMED = ""
"""What the array of an .npy goes by."""
MOST = 16
"""So many fields are believed without being named; a longer axis is one of space, more arrays something else."""


@dataclass(frozen=True)
class Outer:
    """The axes before those of space."""

    leading: int
    """1 where the first axis counts trajectories, else 0."""
    steady: bool
    """Whether there is none of time."""

    @property
    def names(self) -> list[str]:
        return ["count"] * self.leading + ["frames"] * (not self.steady)

    @property
    def words(self) -> str:
        """For a sentence about what is needed."""
        return ", ".join([*self.names, "*grid"])

    def axes(self, spatial: int, channels: bool) -> list[str]:
        return [*self.names, *"xyz"[:spatial]] + ["channels"] * channels

    def spatial(self, shape: tuple[int, ...]) -> int:
        """How many axes of an array without channels are of space."""
        return len(shape) - len(self.names)

    def trajectory(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """`(frames, *grid)` of an array without channels."""
        return (1,) * self.steady + shape[self.leading :]


@dataclass(frozen=True)
class Choice:
    """Which arrays of a file hold the fields, and as what."""

    arrays: tuple[str, ...]
    """One per field, or a single one with a channel axis."""
    channel_axis: bool
    places: tuple[int, ...]
    """Where each field stands among all those of the file, which are `known` in number."""
    known: int
    fields: tuple[str, ...] | None
    """The fields' names; None where neither file nor user names them."""
    shape: tuple[int, ...]
    """`(frames, *grid)`."""
    notes: tuple[str, ...]
    outer: Outer

    @property
    def steady(self) -> bool:
        """Whether the arrays have no axis of time; their one frame is put in."""
        return self.outer.steady

    def take(self, arrays: Mapping[str, Array], start: int, stop: int) -> np.ndarray:
        """The fields of these rows of the first axis, channels last."""
        if not self.channel_axis:
            values = np.stack([arrays[name].rows(start, stop) for name in self.arrays], axis=-1)
        else:
            values = arrays[self.arrays[0]].rows(start, stop)
            values = values if self.places == tuple(range(self.known)) else values[..., list(self.places)]
        return np.expand_dims(values, self.outer.leading) if self.steady else values

    def frames(self, arrays: Mapping[str, Array], index: int, start: int, stop: int) -> np.ndarray:
        """Some frames of one trajectory, `(stop - start, *grid, fields)`; `index` counts where the arrays do."""
        values = [self._part(arrays[name], index, start, stop) for name in self.arrays]
        if not self.channel_axis:
            return np.stack(values, axis=-1)
        whole = self.places == tuple(range(self.known))
        return np.array(values[0]) if whole else values[0][..., list(self.places)]

    def apart(
        self, arrays: Mapping[str, Array], index: int, start: int, stop: int, channels: Sequence[int]
    ) -> list[np.ndarray]:
        """Like `frames`, each of these fields by itself, `(stop - start, *grid)`, where each is an array."""
        return [self._part(arrays[self.arrays[channel]], index, start, stop) for channel in channels]

    def _part(self, array: Array, index: int, start: int, stop: int) -> np.ndarray:
        outer = [(index, index + 1)] * self.outer.leading + [(start, stop)] * (not self.steady)
        values = array.part([*outer, *((0, size) for size in array.shape[len(outer) :])])
        values = values[0] if self.outer.leading else values
        return values[None][start:stop] if self.steady else values


def choose(path: Path, arrays: Mapping[str, Array], reading: Reading, leading: int) -> Choice:
    """Decide what in a file is a field; `leading` is 1 where the first axis counts trajectories, else 0.

    Where the user does not say whether there is an axis of time, the file must make it plain.
    """
    choice = _choose(path, arrays, reading, Outer(leading, bool(reading.steady)))
    timed = any(is_list(arrays.get(name)) and name not in choice.arrays for name in ("times", "t"))
    lines = choice.steady and leading and len(choice.shape) == 2
    if lines and reading.axes is None and _spatial_axes(arrays, reading, choice) != 1:
        raise _other_question(path, arrays[choice.arrays[0]].shape, choice)
    if reading.steady is not None or timed:
        return choice
    guessed = UNNAMED in arrays and choice.channel_axis and reading.fields is None
    spatial = None if guessed else _spatial_axes(arrays, reading, choice)
    if spatial == len(choice.shape):
        return _choose(path, arrays, reading, Outer(leading, True))
    if spatial is None and len(choice.shape) == 2 and choice.shape[0] > 1:
        raise _question(path, arrays[choice.arrays[0]].shape, choice)
    return choice


def _choose(path: Path, arrays: Mapping[str, Array], reading: Reading, outer: Outer) -> Choice:
    if UNNAMED in arrays:
        return _unnamed(arrays[UNNAMED], reading.fields, outer, reading.channels)
    if "fields" in arrays:
        return _together(path, arrays, reading.fields, outer)
    return _apart(path, arrays, reading.fields, outer)


def _spatial_axes(arrays: Mapping[str, Array], reading: Reading, choice: Choice) -> int | None:
    """How many axes of space there are by what the user or the file says of their ends or coordinates."""
    if reading.spatial is not None:
        return reading.spatial
    beside = {name: array for name, array in arrays.items() if is_list(array) and name not in choice.arrays}
    if "boundary" in beside:
        return max(1, *beside["boundary"].shape, 0)
    named = [name for name in "xyz" if name in beside]
    return len(named) if named and named == list("xyz"[: len(named)]) else None


def _question(path: Path, shape: tuple[int, ...], choice: Choice) -> ValueError:
    """Two axes can be time and space, or both of space."""
    channels = choice.channel_axis
    still, moving = (
        ", ".join(Outer(choice.outer.leading, steady).axes(1 + steady, channels)) for steady in (True, False)
    )
    named = "" if choice.fields or not channels else "; set --fields if the last axis is not channels"
    return ValueError(
        f"{path} has shape {shape} and no times, which is ambiguous: use --steady if its axes are "
        f"({still}), --unsteady if they are ({moving}){named}."
    )


def _other_question(path: Path, shape: tuple[int, ...], choice: Choice) -> ValueError:
    """Two axes of steady arrays can be cases and space, or both of space."""
    end = ",field" * choice.channel_axis
    return ValueError(
        f"{path} has shape {shape}, which is ambiguous: use --axes count,x{end} if it holds {shape[0]} "
        f"one-dimensional cases, --axes x,y{end} if it is one two-dimensional case."
    )


def _unnamed(array: Array, names: Sequence[str] | None, outer: Outer, told: bool | None) -> Choice:
    """An array that nobody named: unless it is told, only its shape says whether the last axis is one of space."""
    shape, free = array.shape, outer.spatial(array.shape)
    possible = [channels for channels in (False, True) if 1 <= free - channels <= 3 and told in (None, channels)]
    if not possible:
        most = outer.axes(3, True)
        raise ValueError(
            f"{array.where} has shape {shape}; expected axes ({', '.join(most)}), where y, z and channels are optional."
        )
    guess = shape[-1] == len(names) if names else shape[-1] <= MOST
    channels = guess if guess in possible else possible[0]
    axes = outer.axes(free - channels, channels)
    check_field(array, axes)
    known, note = shape[-1] if channels else 1, f"Axes of shape {shape} are read as ({', '.join(axes)})"
    if names and len(names) != known:
        raise ValueError(f"{array.where} has shape {shape}; its last axis must hold the {len(names)} named fields.")
    if not names and len(possible) == 2:
        size = f"at most {MOST}" if channels else f"more than {MOST}"
        note += f", as the last has {size} entries; name the fields if this is wrong"
    fields = tuple(names) if names else None
    end = -1 if channels else len(shape)
    notes = (f"{note}.",) if told is None else ()
    return Choice(
        (UNNAMED,), channels, tuple(range(known)), known, fields, outer.trajectory(shape[:end]), notes, outer,
    )  # fmt: skip


def _together(path: Path, arrays: Mapping[str, Array], names: Sequence[str] | None, outer: Outer) -> Choice:
    """One array `fields` with a channel axis."""
    array = arrays["fields"]
    shape, spatial = array.shape, outer.spatial(array.shape) - 1
    if array.dtype.kind in "fiu" and not 1 <= spatial <= 3:
        raise ValueError(
            f"{path} has fields of shape {shape}; expected ({outer.words}, channels) with one to three spatial axes."
        )
    check_field(array, outer.axes(max(1, spatial), True))
    known = shape[-1]
    fields, places = own_names(path, arrays, known), tuple(range(known))
    if names and fields:
        places = tuple(pick(path, fields, name) for name in names)
    elif names and len(names) != known:
        raise ValueError(f"{path} has {known} unnamed channels, but {len(names)} names were given.")
    fields = tuple(names) if names else fields
    left_out = _left_out(arrays, ("fields",), spatial)
    return Choice(
        ("fields",), True, places, known, fields, outer.trajectory(shape[:-1]), left_out, outer,
    )  # fmt: skip


def _apart(path: Path, arrays: Mapping[str, Array], names: Sequence[str] | None, outer: Outer) -> Choice:
    """One array per field."""
    able = {
        name: array.shape
        for name, array in arrays.items()
        if array.real and 1 <= outer.spatial(array.shape) <= 3 and not (name in BESIDE and is_list(array))
    }
    picked = tuple(names) if names else _only_shape(path, arrays, able, outer)
    shape = arrays[_known(path, picked[0], list(arrays), list(able))].shape
    axes = outer.axes(min(3, max(1, outer.spatial(shape))), False)
    for name in picked:
        array = arrays[_known(path, name, list(arrays), list(able))]
        check_field(array, axes)
        if array.shape != shape:
            raise ValueError(f"{array.where} has shape {array.shape}, but {picked[0]!r} has {shape}; all must agree.")
    same = [name for name in arrays if able.get(name) == shape or name in picked]
    places = tuple(same.index(name) for name in picked)
    note = f"{listed(picked)}: each read as a field with axes ({', '.join(axes)})."
    fields = plain_words(f"The arrays in {path}", picked, distinct=True)
    notes = (note, *_left_out(arrays, picked, outer.spatial(shape)))
    return Choice(picked, False, places, len(same), fields, outer.trajectory(shape), notes, outer)


def _only_shape(
    path: Path, arrays: Mapping[str, Array], able: Mapping[str, tuple[int, ...]], outer: Outer
) -> tuple[str, ...]:
    """All arrays that can be fields, if it is plain that they are."""
    for array in arrays.values():
        if array.link:  # it may be a field or not
            raise ValueError(f"{array.where} {array.fault}, or select arrays with --fields.")
    if not able:
        there = listed([f"{name} {array.shape}" for name, array in arrays.items()]) if arrays else "none"
        wanted = f"({outer.words})"
        if not outer.steady:
            wanted += f", or with --steady ({Outer(outer.leading, True).words})"
        raise ValueError(f"{path} has no real-valued array with axes {wanted}; available arrays: {there}.")
    shapes = dict.fromkeys(able.values())
    if len(shapes) > 1:
        groups = [f"{listed([name for name in able if able[name] == shape])} {shape}" for shape in shapes]
        raise ValueError(f"{path} has arrays of several shapes: {'; '.join(groups[:MOST])}; select some with --fields.")
    if len(able) > MOST:
        raise ValueError(
            f"{path} has {len(able)} arrays that could be fields ({listed(able)}); select some with --fields."
        )
    return tuple(able)


def check_field(array: Array, axes: Sequence[str]) -> None:
    """Refuse what cannot be a field."""
    if array.dtype.hasobject:
        raise pickled(array.where)
    check_numbers(array.where, array, axes)


def pick(path: Path, present: Sequence[str], name: str) -> int:
    """The place of the field of this name among those present."""
    return present.index(_known(path, name, present, present))


def _known(path: Path, name: str, present: Sequence[str], likely: Sequence[str]) -> str:
    if name not in present:
        near = suggest(name, [one for one in likely or present if one.isprintable()]) if present else "it has none."
        raise ValueError(f"{path} has no field {name!r}; {near}")
    return name


def _left_out(arrays: Mapping[str, Array], taken: Sequence[str], spatial: int) -> tuple[str, ...]:
    """A note on the arrays that say nothing of use here."""
    used = [name for name in BESIDE if is_list(arrays.get(name)) and name not in "xyz"[spatial:]]
    if "times" in used and "t" in used:
        used.remove("t")
    if "fields" not in taken and "names" in used:
        used.remove("names")
    rest = [f"{name} {array.shape}" for name, array in arrays.items() if name not in (*taken, *used)]
    return (f"Skipped: {listed(rest)}.",) if rest else ()
