"""What stands beside the fields in a user's file: names, units, boundaries, coordinates and times, each a list."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from sigmasolver.data.formats.source import Array

__all__ = ["BESIDE", "check_names", "is_list", "own_names", "plain_words", "read_list"]

BESIDE = ("names", "units", "boundary", "x", "y", "z", "times", "t")


def check_names(names: Sequence[str]) -> tuple[str, ...]:
    """The user's names of fields, if they are names: at least one, none twice."""
    if isinstance(names, str) or not names or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{names!r} is not a list of field names; give at least one name.")
    return plain_words("The fields", names, distinct=True)


def own_names(path: Path, arrays: Mapping[str, Array], channels: int) -> tuple[str, ...] | None:
    """The names that a file itself gives to its channels, if it does."""
    if not is_list(arrays.get("names")):
        return None
    return plain_words(f"The names in {path}", read_list(path, arrays, "names", channels, "words"), distinct=True)


def is_list(array: Array | None) -> bool:
    """Whether an array is a list, as an axis or as names are: a row or a column too, and a single word."""
    if array is None:
        return False
    long = [size for size in array.shape if size != 1]
    return len(long) <= 1 and (bool(array.shape) or array.dtype.kind in "SU")


def read_list(path: Path, arrays: Mapping[str, Array], name: str, size: int, kind: str) -> np.ndarray:
    """The list of this name, which must have `size` entries that are words or numbers."""
    array = arrays[name]
    values = array.whole().ravel() if not array.dtype.hasobject else np.empty(0)
    if values.size != size or array.dtype.kind not in {"words": "SU", "numbers": "fiu"}[kind]:
        raise ValueError(f"{path} has {name} of shape {array.shape}; expected {size} {kind}.")
    return values


def plain_words(where: str, words: Sequence[str] | np.ndarray, distinct: bool = False) -> tuple[str, ...]:
    """Words that fit one line each, and differ if they must."""
    plain = tuple(str(one, "utf-8", "backslashreplace") if isinstance(one, bytes) else str(one) for one in words)
    seen = set[str]()
    for one in plain:
        if not one.isprintable() or (distinct and not one.strip()):
            raise ValueError(f"{where} include the name {one!r}, which is empty or not printable; rename it.")
        if distinct and one in seen:
            raise ValueError(f"{where} contain the name {one!r} twice; names must be unique.")
        seen.add(one)
    return plain
