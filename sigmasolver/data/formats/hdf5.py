"""Other people's HDF5 files: which arrays lie in them, at any depth, read by slices.

A dataset in groups goes by its path, `group/u`. Links to other places and files are not followed. The library runs in
a process of its own, since a damaged file can crash it.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from sigmasolver.data.formats.source import Array
from sigmasolver.data.isolated import UnreadableError, ask
from sigmasolver.data.store import is_store

__all__ = ["is_store", "open_hdf5"]


def open_hdf5(path: Path) -> dict[str, Array]:
    """The datasets of a foreign HDF5 file by path, in the order of their names."""
    if is_store(path):
        raise ValueError(f"{path} already is a sigmasolver store; use it as it is.")
    try:
        entries = ask(path, "entries")
    except UnreadableError as error:
        raise _plain(path, error) from error
    return {entry["name"]: _array(path, entry) for entry in sorted(entries, key=lambda entry: entry["name"])}


def _array(path: Path, entry: dict[str, Any]) -> Array:
    name, shape, dtype = entry["name"], tuple(entry["shape"]), np.dtype(entry["dtype"])

    def rows(start: int, stop: int) -> np.ndarray:
        try:
            if entry["text"]:
                texts = np.array(ask(path, "texts", [name]), dtype=str)
                return texts[start:stop] if shape else texts
            size = dtype.itemsize * math.prod((stop - start, *shape[1:]))
            return ask(path, "rows", [name, start, stop, False], size)
        except UnreadableError as error:
            raise _plain(path, error) from error

    return Array(f"{name!r} in {path}", shape, dtype, rows, entry["fault"], "link" in entry)


def _plain(path: Path, error: UnreadableError) -> ValueError:
    """Why this file cannot be read, in one sentence."""
    if str(error) == "kind":
        return ValueError(f"{path} is not an HDF5 file; save it again.")
    return ValueError(f"{path} is truncated or damaged; copy or download it again.")
