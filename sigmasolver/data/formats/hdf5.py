"""Foreign HDF5 files: datasets at any depth, read by slices.

A dataset in a group is named by its path, `group/u`. Soft and external links are not followed. The HDF5 library runs
in a separate process, because a damaged file can crash it.
"""

from __future__ import annotations

import math
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from sigmasolver.data.formats.labelled import Variable
from sigmasolver.data.formats.source import Array, Ranges
from sigmasolver.data.isolated import UnreadableError, ask
from sigmasolver.data.store import is_store

__all__ = ["SUFFIXES", "attributes_of", "chunks_of", "is_store", "open_hdf5", "open_variables", "paths_in"]

SUFFIXES = (".h5", ".hdf5")


def open_hdf5(path: Path) -> dict[str, Array]:
    """Return the datasets of a foreign HDF5 file by path, sorted by name."""
    if is_store(path):
        raise ValueError(f"{path} is already a sigmasolver store; use it directly.")
    try:
        entries = ask(path, "entries")
    except UnreadableError as error:
        raise _read_error(path, error) from error
    return {entry["name"]: _array(path, entry) for entry in sorted(entries, key=lambda entry: entry["name"])}


def paths_in(path: Path) -> tuple[str, ...]:
    """Return the paths of the datasets in an HDF5 file; empty for a store and for any file that cannot be read."""
    if not path.is_file() or path.suffix.lower() not in SUFFIXES or is_store(path):
        return ()
    try:
        return tuple(entry["name"] for entry in _cached_entries(path))
    except UnreadableError:
        return ()


def open_variables(path: Path) -> dict[str, Variable]:
    """Return the datasets of a foreign HDF5 file by path; their dimensions are not named yet."""
    try:
        entries = _cached_entries(path)
    except UnreadableError as error:
        raise _read_error(path, error) from error
    return {entry["name"]: _variable(path, entry) for entry in entries}


def attributes_of(path: Path) -> dict[str, dict[str, Any]]:
    """Return the attributes of every group and dataset by path; those of the root group under ""."""
    try:
        return ask(path, "attributes")
    except UnreadableError as error:
        raise _read_error(path, error) from error


def _cached_entries(path: Path) -> list[dict[str, Any]]:
    state = path.stat()
    return _list_entries(path, state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=4)
def _list_entries(path: Path, mtime_ns: int, size: int) -> list[dict[str, Any]]:
    """Cached, as several kinds are tried on one file, which may have thousands of groups."""
    return ask(path, "entries")


def _variable(path: Path, entry: dict[str, Any]) -> Variable:
    shape, dtype = tuple(entry["shape"]), np.dtype(entry["dtype"])

    def read(ranges: Ranges) -> np.ndarray:
        size = dtype.itemsize * math.prod(stop - start for start, stop in ranges)
        try:
            return ask(path, "box", [entry["name"], list(ranges)], size)
        except UnreadableError as error:
            raise _read_error(path, error) from error

    return Variable(("",) * len(shape), shape, dtype, read, fault=entry["fault"])


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
            raise _read_error(path, error) from error

    def box(ranges: Ranges) -> np.ndarray:
        size = dtype.itemsize * math.prod(stop - start for start, stop in ranges)
        try:
            return ask(path, "box", [name, list(ranges)], size)
        except UnreadableError as error:
            raise _read_error(path, error) from error

    return Array(
        f"{name!r} in {path}", shape, dtype, rows, entry["fault"], "link" in entry, box, chunks_of(entry)
    )  # fmt: skip


def chunks_of(entry: dict[str, Any]) -> tuple[int, ...] | None:
    """Return the chunk shape of a dataset; one that is not chunked is treated as lines along the last axis."""
    shape = tuple(entry["shape"])
    chunks = entry.get("chunks")
    return tuple(chunks) if chunks else (1,) * (len(shape) - 1) + shape[-1:] or None


def _read_error(path: Path, error: UnreadableError) -> ValueError:
    """Explain in one sentence why the file cannot be read."""
    if str(error) == "kind":
        return ValueError(f"{path} is not an HDF5 file; save it again.")
    return ValueError(f"{path} is truncated or corrupt; copy or download it again.")
