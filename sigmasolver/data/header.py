"""The header of a store, and the fingerprint of header and values.

    digest_i    = SHA-256(bytes of trajectory i)                       little-endian, C order, as stored
    fingerprint = SHA-256(header text · coordinates · times · digest_0 · … · digest_{n−1})

The header text is JSON with sorted keys and no spaces; coordinates and times enter as little-endian float64.
The fingerprint is updated trajectory by trajectory and is independent of the batches in which they were written.
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
    """A store cannot be written or read; the message is one sentence."""


class OtherStoreError(StoreError):
    """A store contains other data than those to be written."""


@dataclass(frozen=True)
class Header:
    """Metadata of a set of trajectories: everything except their values and their number."""

    layout: Layout
    source: str
    """Name of the simulator, or the format of the imported files."""
    parameters: Mapping[str, Any]
    """Parameters of the source, JSON-compatible."""
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
        """Shape of a trajectory: `(frames, *grid, fields)`."""
        return (len(self.layout.times), *self.grid, len(self.layout.fields))

    @property
    def nbytes(self) -> int:
        """Stored size of a trajectory in bytes."""
        return int(np.prod(self.shape, dtype=np.int64)) * DTYPES[self.dtype].itemsize

    @property
    def digest(self) -> str:
        """Hash of everything except the values: a simulation repeated on another machine has the same."""
        return fingerprint(self, ())

    def shares_seed(self, source: object, seed: object) -> bool:
        """Whether these are trajectories of this simulator and seed: whatever its parameters, trajectory i is then made
        of the same random numbers."""
        return self.seed is not None and (self.source, self.seed) == (source, seed)

    def axes(self) -> dict[str, np.ndarray]:
        """Coordinates by axis name, and the times under t, as float64."""
        names = (*self.layout.axis_names, "t")
        return {
            name: np.asarray(values, dtype="<f8")
            for name, values in zip(names, (*self.layout.coordinates, self.layout.times), strict=True)
        }

    def facts(self) -> dict[str, Any]:
        """The header as plain JSON values, without the coordinates and times.

        Axis names are not included, so that fingerprints stay the same as before axes had names.
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
        """Describe the first difference between the stored header and the expected `other`, or None."""
        stored, expected = self.facts(), other.facts()
        pairs = [(f"parameter {key}", stored["parameters"].get(key), expected["parameters"].get(key))
                 for key in sorted(stored["parameters"].keys() | expected["parameters"].keys())]  # fmt: skip
        pairs = [("source", stored["source"], expected["source"]), *pairs]
        pairs += [(key, stored[key], expected[key]) for key in stored if key != "parameters"]
        for name, old, new in pairs:
            if old != new:
                return f"its {name} is {old!r}, expected {new!r}"
        if self.layout.axis_names != other.layout.axis_names:
            names = [", ".join(header.layout.axis_names) for header in (self, other)]
            return f"its axes are {names[0]}, expected {names[1]}"
        for (name, old), new in zip(self.axes().items(), other.axes().values(), strict=True):
            if not np.array_equal(old, new):
                return f"its {name} values differ"
        return None


def canonical(value: Any) -> str:
    """Canonical JSON: sorted keys, no spaces, shortest floats that round-trip."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def fingerprint(header: Header, digests: Iterable[bytes]) -> str:
    """SHA-256, in hexadecimal, of a header and the digests of its trajectories in order."""
    hasher = hashlib.sha256(canonical(header.facts()).encode())
    for values in header.axes().values():
        hasher.update(values.tobytes())
    for digest in digests:
        hasher.update(digest)
    return hasher.hexdigest()
