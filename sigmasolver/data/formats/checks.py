"""Check foreign values that are converted to the dtype of a store.

Non-finite values and underflow to zero are stored and reported; overflow raises ValueError. Reports name the field,
trajectory and frame.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sigmasolver.data.formats.finite import label
from sigmasolver.data.header import DTYPES, Header

__all__ = ["ValueChecks"]


@dataclass
class _Occurrences:
    """Number and first location of problematic values in one field."""

    count: int
    first: str


class ValueChecks:
    """Collects problems of values block by block; `files` holds the file of each trajectory, or is empty."""

    def __init__(self, header: Header, files: Sequence[str] = ()) -> None:
        self.header, self.files = header, files
        self.bad: set[int] = set()
        """Indices of trajectories with non-finite values."""
        self.nonfinite: dict[int, _Occurrences] = {}
        self.underflowed: dict[int, _Occurrences] = {}

    def convert(self, start: int, block: np.ndarray) -> np.ndarray:
        """Convert `(n, frames, *grid, fields)`, which begins at trajectory `start`, to the dtype of the store."""
        with np.errstate(over="ignore", under="ignore"):
            stored = np.ascontiguousarray(block, dtype=DTYPES[self.header.dtype])
        self.check(start, block, stored)
        return stored

    def check(self, start: int, block: np.ndarray, stored: np.ndarray) -> None:
        """Record non-finite and underflowed values; raise ValueError on overflow."""
        nonfinite = ~np.isfinite(stored)
        if nonfinite.any():
            in_range = nonfinite <= ~np.isfinite(block)
            if not in_range.all():
                field, where = self._locate_first(start, ~in_range)
                wider = "store them as float32, or " if self.header.dtype == "float16" else ""
                raise ValueError(
                    f"{field} has values up to {np.abs(block[~in_range]).max():.3g}, which overflow "
                    f"{self.header.dtype}, the first in {where}; {wider}convert them to other units."
                )
            self._record(self.nonfinite, start, nonfinite)
            self.bad |= {start + int(i) for i in np.flatnonzero(nonfinite.any(tuple(range(1, nonfinite.ndim))))}
        # NaN counts as nonzero both before and after the conversion.
        if block.dtype.itemsize > stored.dtype.itemsize and np.count_nonzero(block) != np.count_nonzero(stored):
            self._record(self.underflowed, start, (block != 0) & (stored == 0))

    def bad_labels(self) -> list[str]:
        """Return labels of the trajectories with non-finite values."""
        return [label(self.files, index) for index in sorted(self.bad)]

    def notes(self) -> tuple[str, ...]:
        """Return one sentence per field and problem."""
        fields, dtype = self.header.layout.fields, self.header.dtype
        nonfinite = [
            f"{fields[field]} has {_count_phrase(values.count)} not finite (NaN or infinity), the first in "
            f"{values.first}; such trajectories cannot be used for training or evaluation; skip them with --skip-bad."
            for field, values in sorted(self.nonfinite.items())
        ]
        underflowed = [
            f"{fields[field]} has {_count_phrase(values.count)} too small for {dtype} (stored as zero), the first in "
            f"{values.first}; if this matters, convert the data to other units."
            for field, values in sorted(self.underflowed.items())
        ]
        return (*nonfinite, *underflowed)

    def _record(self, by_field: dict[int, _Occurrences], start: int, mask: np.ndarray) -> None:
        for field in np.flatnonzero(mask.any(tuple(range(mask.ndim - 1)))).tolist():
            field_mask = mask[..., field]
            first = self._locate_first(start, field_mask[..., None])[1]
            by_field.setdefault(field, _Occurrences(0, first)).count += int(field_mask.sum())

    def _locate_first(self, start: int, mask: np.ndarray) -> tuple[str, str]:
        """Return the field of the first value in the mask, and its trajectory and frame as text."""
        trajectory, frame, *_, field = np.unravel_index(int(mask.argmax()), mask.shape)
        return self.header.layout.fields[field], f"{label(self.files, start + int(trajectory))}, frame {int(frame)}"


def _count_phrase(count: int) -> str:
    return f"{count:,} values that are" if count > 1 else "1 value that is"
