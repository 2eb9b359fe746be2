"""What every reader of a foreign file returns: its layout, and its trajectories on demand."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from sigmasolver.data.layout import Layout
from sigmasolver.data.split import Split

__all__ = [
    "WHOLE_TRAJECTORIES",
    "Array",
    "ForeignData",
    "Ranges",
    "cache_notes",
    "check_numbers",
    "in_memory",
    "listed",
    "periodic",
    "pickle_error",
    "sliceable_or_cached",
]

Ranges = Sequence[tuple[int, int]]
"""From `start` to before `stop` along each axis."""
WHOLE_TRAJECTORIES = (
    "In-place reading: trajectories are read whole and the last ones cached, as an .npz cannot be read partially."
)
_MAX_LISTED = 8
_MAX_PER_CHUNK = 4
"""The most trajectories in a chunk for which each is still read from the file on its own."""


@dataclass(frozen=True)
class ForeignData:
    """A foreign data set, opened but not yet read."""

    layout: Layout
    count: int
    read: Callable[[int, int], np.ndarray]
    """The trajectories from `start` to before `stop`, `(stop - start, frames, *grid, fields)`."""
    notes: tuple[str, ...] = ()
    """Assumptions about what the file does not specify, one sentence each."""
    cache_notes: tuple[str, ...] = ()
    """What is kept in memory when reading in place, one sentence each."""
    files: tuple[Path, ...] = ()
    """The files that make up the data set, in order; empty: its source is one file or folder."""
    frames: Callable[[int, int, int], np.ndarray] | None = None
    """The frames from `start` to before `stop` of one trajectory, `(stop - start, *grid, fields)`, read without the
    others; None: only whole trajectories can be read."""
    fields: Callable[[int, int, int, Sequence[int]], Sequence[np.ndarray]] | None = None
    """Like `frames`, but only these fields, each `(stop - start, *grid)` in the file's dtype, without a copy if the
    file is memory-mapped; None: the file does not store fields separately."""
    trajectory_files: tuple[Path, ...] = ()
    """The file of each trajectory, if each has its own."""
    split: Split | None = None
    """The trajectories for training, validation and testing, if the data set defines them."""
    missing: frozenset[str] = frozenset()
    """The parts of the layout that are not in the files but defaults or specified by the user: "units", "boundary",
    "times", "axes" (their names), and "x", "y", "z" (coordinates)."""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """Further entries of the header, as plain values: a version, lists of windows, statistics."""


@dataclass(frozen=True)
class Array:
    """An array in a file: its shape and dtype are known, its values are read on demand."""

    where: str
    """Its name and file, as the start of an error message."""
    shape: tuple[int, ...]
    dtype: np.dtype
    rows: Callable[[int, int], np.ndarray]
    """The entries from `start` to before `stop` along the first axis; the value itself if the array has no axes."""
    fault: str | None = None
    """Why its values cannot be read, as the end of a sentence."""
    link: bool = False
    """Whether it is a link to another file, so that nothing is known about it."""
    box: Callable[[Ranges], np.ndarray] | None = None
    """A range of every axis, read without the remaining entries; None: only `rows` is available."""
    chunk_shape: tuple[int, ...] | None = None
    """The shape of a chunk of the file; None: any entries can be read on their own."""
    load_reason: str | None = None
    """Why reading a part of it loads all of it into memory, as the end of a sentence."""

    @property
    def real(self) -> bool:
        """Whether it holds real numbers and is not empty."""
        return self.dtype.kind in "fiu" and 0 not in self.shape

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def whole(self) -> np.ndarray:
        """The full array."""
        return self.rows(0, self.shape[0] if self.shape else 1)

    def part(self, ranges: Ranges) -> np.ndarray:
        """The entries in these ranges of its axes."""
        if self.box is not None:
            return self.box(ranges)
        return self.rows(*ranges[0])[(slice(None), *(slice(*bounds) for bounds in ranges[1:]))]


def sliceable_or_cached(array: Array) -> Array:
    """Prepare an array `(trajectory, ...)` for reading by windows: from the file where that is fast, else from memory.

    A chunk that spans many trajectories would be decompressed again for each of them.
    """
    if array.chunk_shape is None or min(array.chunk_shape[0], array.shape[0]) <= _MAX_PER_CHUNK:
        return array
    return in_memory(array, "its chunks span many trajectories")


def in_memory(array: Array, reason: str) -> Array:
    """The array, loaded in full on first access and then cached."""

    @cache
    def values() -> np.ndarray:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if array.nbytes > memory / 2:
            raise ValueError(
                f"{array.where} has {array.nbytes / 1e9:.3g} GB that must be held in memory, as {reason}, but this "
                f"machine has {memory / 1e9:.3g} GB; convert it with import-data."
            )
        return array.whole()

    return replace(
        array,
        rows=lambda start, stop: values()[start:stop],
        box=lambda ranges: values()[tuple(slice(*bounds) for bounds in ranges)],
        chunk_shape=None,
        load_reason=reason,
    )


def cache_notes(arrays: Iterable[Array]) -> tuple[str, ...]:
    """A note on the arrays that are kept in memory in full when reading in place."""
    loaded = [array for array in arrays if array.load_reason is not None]
    if not loaded:
        return ()
    size, reasons = sum(array.nbytes for array in loaded), dict.fromkeys(array.load_reason for array in loaded)
    return (
        f"In-place reading holds {size / 1e6:.3g} MB in memory, as {' and '.join(map(str, reasons))}; a store "
        "(import-data) is read piecewise.",
    )


def check_numbers(where: str, values: np.ndarray | Array, axes: Sequence[str]) -> None:
    """Raise ValueError unless the values are real numbers with these axes."""
    if isinstance(values, Array) and values.link:
        raise ValueError(f"{where} {values.fault}.")
    if values.dtype.kind not in "fiu":
        content = {"U": "text", "S": "text"}.get(values.dtype.kind, f"{values.dtype} values")
        raise ValueError(f"{where} contains {content}; expected real numbers.")
    if 0 in values.shape:
        raise ValueError(f"{where} is empty (shape {values.shape}); save it again with its values.")
    if len(values.shape) != len(axes):
        raise ValueError(f"{where} has shape {values.shape}; expected axes ({', '.join(axes)}).")
    if isinstance(values, Array) and values.fault is not None:
        raise ValueError(f"{where} {values.fault}.")


def pickle_error(where: str) -> ValueError:
    """The error for data that could only be read by running untrusted code."""
    return ValueError(f"{where} contains pickled Python objects, which are never loaded; save plain numbers.")


def periodic(points: int, length: float) -> np.ndarray:
    """The coordinates of a periodic axis, without its end point, which coincides with the first."""
    return np.arange(points) * (length / points)


def listed(names: Sequence[str] | Mapping[str, object]) -> str:
    """Join names into one line: unprintable ones escaped, at most `_MAX_LISTED` of them."""
    printable = [name if name.isprintable() else repr(name) for name in names]
    return ", ".join(printable[:_MAX_LISTED] + ["…"] * (len(printable) > _MAX_LISTED))
