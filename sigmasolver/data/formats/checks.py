"""Check foreign values that are converted to the dtype of a store.

Non-finite values and underflow to zero are stored and reported; overflow raises ValueError. Reports name the field,
trajectory and frame. A field that varies little around a large value is reported too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sigmasolver.data.formats.finite import label
from sigmasolver.data.header import DTYPES, Header

__all__ = ["FieldRanges", "ValueChecks"]

MIN_RELATIVE_RANGE = 1e-4
"""A range below this fraction of the largest magnitude is poorly resolved in float32, which has some 1000 values in it.
"""


class FieldRanges:
    """Smallest and largest finite value of each field, before any conversion."""

    def __init__(self, header: Header) -> None:
        self.header = header
        fields = len(header.layout.fields)
        self.low, self.high = [math.inf] * fields, [-math.inf] * fields

    def add(self, block: np.ndarray) -> None:
        """Add a block `(..., fields)`."""
        for field in range(block.shape[-1]):
            values = block[..., field]
            low, high = values.min(), values.max()
            if not (np.isfinite(low) and np.isfinite(high)):
                finite = values[np.isfinite(values)]
                if not finite.size:
                    continue
                low, high = finite.min(), finite.max()
            self.low[field] = min(self.low[field], float(low))
            self.high[field] = max(self.high[field], float(high))

    def problem(self, field: int) -> str | None:
        """One sentence if the store does not resolve the variation of this field; None for a constant field."""
        low, high = self.low[field], self.high[field]
        if not low < high:
            return None
        name, dtype = self.header.layout.fields[field], self.header.dtype
        with np.errstate(over="ignore", under="ignore"):
            smallest, largest = np.array((low, high)).astype(DTYPES[dtype])
        if smallest == largest != 0:  # values that become zero are reported as such
            return (
                f"{name} varies from {low:.12g} to {high:.12g}, which {dtype} stores as a constant; subtract an offset "
                "from it, or rescale it."
            )
        relative = (high - low) / max(abs(low), abs(high))
        if relative < MIN_RELATIVE_RANGE:
            return (
                f"{name} varies by only {relative:.1g} of its magnitude, which {dtype} resolves poorly; subtract a "
                "constant from it."
            )
        return None


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
        self.ranges = FieldRanges(header)

    def convert(self, start: int, block: np.ndarray) -> np.ndarray:
        """Convert `(n, frames, *grid, fields)`, which begins at trajectory `start`, to the dtype of the store."""
        with np.errstate(over="ignore", under="ignore"):
            stored = np.ascontiguousarray(block, dtype=DTYPES[self.header.dtype])
        self.check(start, block, stored)
        return stored

    def check(self, start: int, block: np.ndarray, stored: np.ndarray) -> None:
        """Record ranges, non-finite and underflowed values; raise ValueError on overflow."""
        self.ranges.add(block)
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
        unresolved = [problem for field in range(len(fields)) if (problem := self.ranges.problem(field)) is not None]
        return (*nonfinite, *underflowed, *unresolved)

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
