"""What every reader of a foreign file gives: its trajectories, a few at a time, and what they mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from sigmasolver.data.layout import Layout
from sigmasolver.data.split import Split

__all__ = ["Array", "Foreign", "check_numbers", "listed", "periodic", "pickled"]

_SHOWN = 8


@dataclass(frozen=True)
class Foreign:
    """A foreign data set, opened but not yet read."""

    layout: Layout
    count: int
    read: Callable[[int, int], np.ndarray]
    """The trajectories from `start` to before `stop`, `(stop - start, frames, *grid, fields)`."""
    notes: tuple[str, ...] = ()
    """What the file does not say and was taken as known, one sentence each."""
    files: tuple[Path, ...] = ()
    """The files it is put together from, in their order; empty: its source is one file or folder."""
    frames: Callable[[int, int, int], np.ndarray] | None = None
    """The frames from `start` to before `stop` of one trajectory, `(stop - start, *grid, fields)`, read without the
    others; None: only whole trajectories can be read."""
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

    @property
    def real(self) -> bool:
        """Whether it holds real numbers, at least one."""
        return self.dtype.kind in "fiu" and 0 not in self.shape

    def whole(self) -> np.ndarray:
        """All of it."""
        return self.rows(0, self.shape[0] if self.shape else 1)


def check_numbers(where: str, values: np.ndarray | Array, axes: Sequence[str]) -> None:
    """Refuse what is not an array of real numbers with these axes."""
    if isinstance(values, Array) and values.link:
        raise ValueError(f"{where} {values.fault}.")
    if values.dtype.kind not in "fiu":
        content = {"U": "text", "S": "text"}.get(values.dtype.kind, f"{values.dtype} values")
        raise ValueError(f"{where} holds {content}; real numbers are needed.")
    if 0 in values.shape:
        raise ValueError(f"{where} is empty: its shape is {values.shape}; save it again, with its values.")
    if len(values.shape) != len(axes):
        raise ValueError(f"{where} has the shape {values.shape}; the axes ({', '.join(axes)}) are needed.")
    if isinstance(values, Array) and values.fault is not None:
        raise ValueError(f"{where} {values.fault}.")


def pickled(where: str) -> ValueError:
    """The answer to what only running a stranger's code could read."""
    return ValueError(f"{where} holds pickled Python objects, which are never loaded; save plain numbers.")


def periodic(points: int, length: float) -> np.ndarray:
    """The coordinates of a periodic axis: its end is its beginning, and is left out."""
    return np.arange(points) * (length / points)


def listed(names: Sequence[str] | Mapping[str, object]) -> str:
    """Names for one line, however many and whatever is in them."""
    shown = [name if name.isprintable() else repr(name) for name in names]
    return ", ".join(shown[:_SHOWN] + ["…"] * (len(shown) > _SHOWN))
