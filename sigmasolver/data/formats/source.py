"""What every reader of a foreign file gives: its trajectories, a few at a time, and what they mean."""

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
    "Foreign",
    "Ranges",
    "check_numbers",
    "held",
    "how_held",
    "in_parts_or_held",
    "listed",
    "periodic",
    "pickled",
]

Ranges = Sequence[tuple[int, int]]
"""From `start` to before `stop` along each axis."""
WHOLE_TRAJECTORIES = (
    "In-place reading: trajectories are read whole and the last ones cached, as an .npz cannot be read partially."
)
_SHOWN = 8
_MOST_TOGETHER = 4
"""Trajectories that share a chunk at the most, if each is to be read from the file by itself."""


@dataclass(frozen=True)
class Foreign:
    """A foreign data set, opened but not yet read."""

    layout: Layout
    count: int
    read: Callable[[int, int], np.ndarray]
    """The trajectories from `start` to before `stop`, `(stop - start, frames, *grid, fields)`."""
    notes: tuple[str, ...] = ()
    """What the file does not say and was taken as known, one sentence each."""
    held: tuple[str, ...] = ()
    """What is kept in memory where it is read in place, one sentence each."""
    files: tuple[Path, ...] = ()
    """The files it is put together from, in their order; empty: its source is one file or folder."""
    frames: Callable[[int, int, int], np.ndarray] | None = None
    """The frames from `start` to before `stop` of one trajectory, `(stop - start, *grid, fields)`, read without the
    others; None: only whole trajectories can be read."""
    fields: Callable[[int, int, int, Sequence[int]], Sequence[np.ndarray]] | None = None
    """Like `frames`, of these fields alone, each `(stop - start, *grid)` in the type of the file, and not copied where
    the file is mapped into memory; None: the file does not keep fields apart."""
    trajectory_files: tuple[Path, ...] = ()
    """The file of each trajectory, where each has its own."""
    split: Split | None = None
    """Which trajectories train, validate and test, where the data set says so."""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """What else a header should keep, as plain values: a version, windows named one by one, statistics."""


@dataclass(frozen=True)
class Array:
    """An array in a file: known by what the file says about it, read when asked for."""

    where: str
    """How a sentence about it begins."""
    shape: tuple[int, ...]
    dtype: np.dtype
    rows: Callable[[int, int], np.ndarray]
    """Its entries from `start` to before `stop` of the first axis; the value itself without axes."""
    fault: str | None = None
    """Why its values cannot be had, as the end of a sentence."""
    link: bool = False
    """Whether it lies in another file, so that nothing of it is known."""
    box: Callable[[Ranges], np.ndarray] | None = None
    """Some entries of every axis, read without the others; None: only `rows` can be read."""
    chunk_shape: tuple[int, ...] | None = None
    """How many entries of each axis lie in one chunk of the file; None: any can be read by themselves."""
    whole_only: str | None = None
    """Why all of it is in memory once some of it was read, as the end of a sentence."""

    @property
    def real(self) -> bool:
        """Whether it holds real numbers, at least one."""
        return self.dtype.kind in "fiu" and 0 not in self.shape

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def whole(self) -> np.ndarray:
        """All of it."""
        return self.rows(0, self.shape[0] if self.shape else 1)

    def part(self, ranges: Ranges) -> np.ndarray:
        """The entries in these ranges of its axes."""
        if self.box is not None:
            return self.box(ranges)
        return self.rows(*ranges[0])[(slice(None), *(slice(*one) for one in ranges[1:]))]


def in_parts_or_held(array: Array) -> Array:
    """An array whose first axis counts trajectories, to be read by windows: from the file where that is quick, else
    held in memory. A chunk that holds some of many trajectories would be unpacked again for each of them."""
    if array.chunk_shape is None or min(array.chunk_shape[0], array.shape[0]) <= _MOST_TOGETHER:
        return array
    return held(array, "its chunks span many trajectories")


def held(array: Array, why: str) -> Array:
    """The array, read whole when some of it is first asked for, and then kept."""

    @cache
    def values() -> np.ndarray:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if array.nbytes > memory / 2:
            raise ValueError(
                f"{array.where} has {array.nbytes / 1e9:.3g} GB that must be held in memory, as {why}, but this "
                f"machine has {memory / 1e9:.3g} GB; convert it with import-data."
            )
        return array.whole()

    return replace(
        array,
        rows=lambda start, stop: values()[start:stop],
        box=lambda ranges: values()[tuple(slice(*one) for one in ranges)],
        chunk_shape=None,
        whole_only=why,
    )


def how_held(arrays: Iterable[Array]) -> tuple[str, ...]:
    """A note on the arrays that are in memory as a whole while they are read in place."""
    kept = [array for array in arrays if array.whole_only is not None]
    if not kept:
        return ()
    size, reasons = sum(array.nbytes for array in kept), dict.fromkeys(array.whole_only for array in kept)
    return (
        f"In-place reading holds {size / 1e6:.3g} MB in memory, as {' and '.join(map(str, reasons))}; a store "
        "(import-data) is read piecewise.",
    )


def check_numbers(where: str, values: np.ndarray | Array, axes: Sequence[str]) -> None:
    """Refuse what is not an array of real numbers with these axes."""
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


def pickled(where: str) -> ValueError:
    """The answer to what only running a stranger's code could read."""
    return ValueError(f"{where} contains pickled Python objects, which are never loaded; save plain numbers.")


def periodic(points: int, length: float) -> np.ndarray:
    """The coordinates of a periodic axis: its end is its beginning, and is left out."""
    return np.arange(points) * (length / points)


def listed(names: Sequence[str] | Mapping[str, object]) -> str:
    """Names for one line, however many and whatever is in them."""
    shown = [name if name.isprintable() else repr(name) for name in names]
    return ", ".join(shown[:_SHOWN] + ["…"] * (len(shown) > _SHOWN))
