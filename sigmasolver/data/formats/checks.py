"""What becomes of foreign values in a store: what is not finite, too large or too small for its type is told.

NaN and infinities are taken over and said, as are numbers that become zero; a number that would become infinite is
refused. Each is named by field, trajectory and frame.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sigmasolver.data.formats.finite import label
from sigmasolver.data.header import DTYPES, Header

__all__ = ["Values"]


@dataclass
class _Found:
    """Values of one field that are worth a word."""

    count: int
    where: str


class Values:
    """The values of an import as they go by; `files` has the file of each trajectory, or nothing."""

    def __init__(self, header: Header, files: Sequence[str] = ()) -> None:
        self.header, self.files = header, files
        self.bad: set[int] = set()
        """Trajectories with values that are not finite."""
        self.odd: dict[int, _Found] = {}
        self.vanished: dict[int, _Found] = {}

    def stored(self, start: int, block: np.ndarray) -> np.ndarray:
        """`(n, frames, *grid, fields)` in the type of the store, the first of them trajectory `start`."""
        with np.errstate(over="ignore", under="ignore"):
            stored = np.ascontiguousarray(block, dtype=DTYPES[self.header.dtype])
        self.take_in(start, block, stored)
        return stored

    def take_in(self, start: int, block: np.ndarray, stored: np.ndarray) -> None:
        """Note what is odd in these trajectories."""
        wrong = ~np.isfinite(stored)
        if wrong.any():
            fits = wrong <= ~np.isfinite(block)
            if not fits.all():
                field, where = self._first(start, ~fits)
                wider = "store them as float32, or " if self.header.dtype == "float16" else ""
                raise ValueError(
                    f"{field} has values up to {np.abs(block[~fits]).max():.3g}, which overflow {self.header.dtype}, "
                    f"the first in {where}; {wider}convert them to other units."
                )
            self._note(self.odd, start, wrong)
            self.bad |= {start + int(one) for one in np.flatnonzero(wrong.any(tuple(range(1, wrong.ndim))))}
        # NaN is none of zero, before and after.
        if block.dtype.itemsize > stored.dtype.itemsize and np.count_nonzero(block) != np.count_nonzero(stored):
            self._note(self.vanished, start, (block != 0) & (stored == 0))

    def bad_in_words(self) -> list[str]:
        """The trajectories with values that are not finite."""
        return [label(self.files, index) for index in sorted(self.bad)]

    def notes(self) -> tuple[str, ...]:
        """One sentence per field and fault."""
        fields, kind = self.header.layout.fields, self.header.dtype
        odd = [
            f"{fields[field]} has {_values(one.count)} not finite (NaN or infinity), the first in {one.where}; "
            "such trajectories cannot be used for training or evaluation; skip them with --skip-bad."
            for field, one in sorted(self.odd.items())
        ]
        vanished = [
            f"{fields[field]} has {_values(one.count)} too small for {kind} (stored as zero), the first in "
            f"{one.where}; if this matters, convert the data to other units."
            for field, one in sorted(self.vanished.items())
        ]
        return (*odd, *vanished)

    def _note(self, found: dict[int, _Found], start: int, marked: np.ndarray) -> None:
        for field in np.flatnonzero(marked.any(tuple(range(marked.ndim - 1)))).tolist():
            here = marked[..., field]
            where = self._first(start, here[..., None])[1]
            found.setdefault(field, _Found(0, where)).count += int(here.sum())

    def _first(self, start: int, marked: np.ndarray) -> tuple[str, str]:
        """The first marked value: its field, and its trajectory and frame."""
        trajectory, frame, *_, field = np.unravel_index(int(marked.argmax()), marked.shape)
        return self.header.layout.fields[field], f"{label(self.files, start + int(trajectory))}, frame {int(frame)}"


def _values(count: int) -> str:
    return f"{count:,} values that are" if count > 1 else "1 value that is"
