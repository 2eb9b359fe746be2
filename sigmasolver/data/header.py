"""What a store says about its trajectories, and the fingerprint that ties this to their values.

    digest_i    = SHA-256(bytes of trajectory i)                       little-endian, C order, as stored
    fingerprint = SHA-256(header text · coordinates · times · digest_0 · … · digest_{n−1})

The header text is JSON with sorted keys and no spaces; coordinates and times enter as little-endian float64.
The fingerprint grows trajectory by trajectory, and does not know in how many batches or runs they came.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from sigmasolver.data.layout import Layout

__all__ = [
    "BOUNDARIES",
    "DTYPES",
    "FORMAT",
    "VERSION",
    "Header",
    "OtherStoreError",
    "StoreError",
    "fingerprint",
]

FORMAT = "sigmasolver-store"
VERSION = 1
DTYPES: dict[str, np.dtype] = {"float32": np.dtype("<f4"), "float16": np.dtype("<f2")}
BOUNDARIES = ("periodic", "wall", "open")


class StoreError(ValueError):
    """A store that cannot be written or read, in one plain sentence."""


class OtherStoreError(StoreError):
    """A store that holds other data than those to be written to it."""


@dataclass(frozen=True)
class Header:
    """Everything about a set of trajectories except their values and their number."""

    layout: Layout
    source: str
    """Who made the values: a simulator's name, or the kind of an imported file."""
    parameters: Mapping[str, Any]
    """What they were made with; anything that JSON holds."""
    seed: int | None = None
    """None for imported data."""
    dtype: str = "float32"

    def __post_init__(self) -> None:
        layout = self.layout
        if self.dtype not in DTYPES:
            raise StoreError(f"dtype must be float32 or float16, not {self.dtype!r}.")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise StoreError(f"seed is {self.seed}; it must be an integer from 0 to 2^63 - 1.")
        if not layout.fields or len(layout.fields) != len(layout.units):
            raise StoreError(
                f"Got {len(layout.fields)} fields and {len(layout.units)} units; "
                "give at least one field, and one unit per field."
            )
        if not 1 <= len(layout.coordinates) <= 3 or len(layout.coordinates) != len(layout.boundary):
            raise StoreError(
                f"Got {len(layout.coordinates)} spatial axes and {len(layout.boundary)} boundaries; "
                "give one to three axes, and one boundary per axis."
            )
        if sorted(layout.axis_names) != list("xyz"[: len(layout.coordinates)]):
            names = ", ".join("xyz"[: len(layout.coordinates)])
            raise StoreError(f"The axis names are {', '.join(layout.axis_names)}; expected {names} in any order.")
        for kind in layout.boundary:
            if kind not in BOUNDARIES:
                raise StoreError(f"Unknown boundary {kind!r}; choose from {', '.join(BOUNDARIES)}.")
        for name, values in self.axes().items():
            if values.ndim != 1 or not values.size or not np.all(np.isfinite(values)) or np.any(np.diff(values) <= 0):
                raise StoreError(f"The values of {name} must be a list of finite, increasing numbers.")

    @property
    def grid(self) -> tuple[int, ...]:
        return tuple(len(values) for values in self.layout.coordinates)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one trajectory: `(frames, *grid, fields)`."""
        return (len(self.layout.times), *self.grid, len(self.layout.fields))

    @property
    def nbytes(self) -> int:
        """The stored size of one trajectory."""
        return int(np.prod(self.shape, dtype=np.int64)) * DTYPES[self.dtype].itemsize

    def axes(self) -> dict[str, np.ndarray]:
        """The coordinates by the names of their axes, and the times t, as float64."""
        names = (*self.layout.axis_names, "t")
        return {
            name: np.asarray(values, dtype="<f8")
            for name, values in zip(names, (*self.layout.coordinates, self.layout.times), strict=True)
        }

    def facts(self) -> dict[str, Any]:
        """The header as plain JSON values, without the coordinates and times.

        The names of the axes are not among them: a fingerprint is of the values, and is the same as before axes had
        names.
        """
        layout = self.layout
        facts = {
            "boundary": layout.boundary,
            "dtype": self.dtype,
            "fields": layout.fields,
            "parameters": dict(self.parameters),
            "seed": self.seed,
            "shape": self.shape,
            "source": self.source,
            "units": layout.units,
            "version": VERSION,
        }
        return json.loads(canonical(facts))

    def difference(self, other: Header) -> str | None:
        """The first thing in which the stored `self` and the wanted `other` differ, in words, or None."""
        stored, wanted = self.facts(), other.facts()
        pairs = [(f"parameter {key}", stored["parameters"].get(key), wanted["parameters"].get(key))
                 for key in sorted(stored["parameters"].keys() | wanted["parameters"].keys())]  # fmt: skip
        pairs = [("source", stored["source"], wanted["source"]), *pairs]
        pairs += [(key, stored[key], wanted[key]) for key in stored if key != "parameters"]
        for name, old, new in pairs:
            if old != new:
                return f"its {name} is {old!r}, expected {new!r}"
        if self.layout.axis_names != other.layout.axis_names:
            names = [", ".join(one.layout.axis_names) for one in (self, other)]
            return f"its axes are {names[0]}, expected {names[1]}"
        for (name, old), new in zip(self.axes().items(), other.axes().values(), strict=True):
            if not np.array_equal(old, new):
                return f"its {name} values differ"
        return None


def canonical(value: Any) -> str:
    """JSON with one spelling only: sorted keys, no spaces, the shortest floats that read back exactly."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def fingerprint(header: Header, digests: Iterable[bytes]) -> str:
    """SHA-256, in hexadecimal, of a header and of its trajectories' digests in order."""
    total = hashlib.sha256(canonical(header.facts()).encode())
    for values in header.axes().values():
        total.update(values.tobytes())
    for digest in digests:
        total.update(digest)
    return total.hexdigest()
