"""Metadata arrays of a user's file: names, units, boundaries, axes, coordinates and times, each a list."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from sigmasolver.data.formats.source import Array

__all__ = [
    "FORECAST",
    "METADATA_NAMES",
    "check_names",
    "check_strings",
    "is_forecast",
    "is_list",
    "read_list",
    "stored_names",
]

METADATA_NAMES = ("names", "units", "boundary", "axes", "x", "y", "z", "times", "t")
FORECAST = "forecast"
"""The source of values that a model has forecast, in a header or in an entry `source` of an .npz."""


def check_names(names: Sequence[str]) -> tuple[str, ...]:
    """Validate field names from the user: at least one, printable and unique."""
    if isinstance(names, str) or not names or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{names!r} is not a list of field names; give at least one name.")
    return check_strings("The fields", names, distinct=True)


def stored_names(path: Path, arrays: Mapping[str, Array], channels: int) -> tuple[str, ...] | None:
    """Return the channel names stored in a file, or None."""
    if not is_list(arrays.get("names")):
        return None
    return check_strings(f"The names in {path}", read_list(path, arrays, "names", channels, "words"), distinct=True)


def is_forecast(arrays: Mapping[str, Array]) -> bool:
    """Whether these arrays are a forecast that this package has written, by their entry `source`: a field may have that
    name too."""
    source = arrays.get("source")
    words = source is not None and is_list(source) and source.dtype.kind in "SU"
    return source is not None and words and FORECAST in check_strings("The sources", source.whole().ravel())


def is_list(array: Array | None) -> bool:
    """Whether an array is one-dimensional like coordinates or names: also a row, a column or a single string."""
    if array is None:
        return False
    sizes = [size for size in array.shape if size != 1]
    return len(sizes) <= 1 and (bool(array.shape) or array.dtype.kind in "SU")


def read_list(path: Path, arrays: Mapping[str, Array], name: str, size: int, kind: str) -> np.ndarray:
    """Read a list by name; raise ValueError unless it has `size` entries of the `kind` words or numbers."""
    array = arrays[name]
    values = array.whole().ravel() if not array.dtype.hasobject else np.empty(0)
    if values.size != size or array.dtype.kind not in {"words": "SU", "numbers": "fiu"}[kind]:
        raise ValueError(f"{path} has {name} of shape {array.shape}; expected {size} {kind}.")
    return values


def check_strings(where: str, words: Sequence[str] | np.ndarray, distinct: bool = False) -> tuple[str, ...]:
    """Return names or units as strings; raise ValueError if one is not printable, or if `distinct` ones repeat."""
    strings = tuple(str(word, "utf-8", "backslashreplace") if isinstance(word, bytes) else str(word) for word in words)
    seen = set[str]()
    for word in strings:
        if not word.isprintable() or (distinct and not word.strip()):
            raise ValueError(f"{where} include the name {word!r}, which is empty or not printable; rename it.")
        if distinct and word in seen:
            raise ValueError(f"{where} contain the name {word!r} twice; names must be unique.")
        seen.add(word)
    return strings
