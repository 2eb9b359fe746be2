"""NumPy files, opened without ever unpickling: .npy memory-mapped, .npz member by member."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import IO

import numpy as np

from sigmasolver.data.formats.source import Array, listed, pickled
from sigmasolver.data.isolated import check_file

__all__ = ["members", "open_members", "open_npy", "open_npz"]


def open_npy(path: Path) -> np.ndarray:
    """The array of an .npy file, read from disk only where it is sliced."""
    check_file(path)
    try:
        with open(path, "rb") as handle:
            magic = handle.read(6)
        if magic != b"\x93NUMPY":
            raise ValueError(f"{path} is not a valid .npy file; save it again with numpy.save.")
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:
        raise _plain(path, error) from error


def members(path: Path) -> tuple[str, ...]:
    """The names of the arrays in an .npz file."""
    check_file(path)
    try:
        with zipfile.ZipFile(path) as bundle:
            return tuple(name.removesuffix(".npy") for name in bundle.namelist() if name.endswith(".npy"))
    except Exception as error:
        raise _plain(path, error) from error


def open_members(path: Path, names: Sequence[str]) -> list[np.ndarray]:
    """These arrays of an .npz file, read."""
    present = members(path)
    for name in names:
        if name not in present:
            raise ValueError(f"{path} has no array {name!r}; available arrays: {listed(present) or 'none'}.")
    try:
        with zipfile.ZipFile(path) as bundle:
            return [_read_member(bundle, name) for name in names]
    except Exception as error:
        raise _plain(path, error) from error


def open_npz(path: Path) -> dict[str, Array]:
    """The arrays of an .npz file by name, in its order; each is read as a whole, when first asked for."""
    check_file(path)
    try:
        with zipfile.ZipFile(path) as bundle:
            return {name: _member(path, bundle, name) for name in members(path)}
    except Exception as error:
        raise _plain(path, error) from error


def _member(path: Path, bundle: zipfile.ZipFile, name: str) -> Array:
    with bundle.open(f"{name}.npy") as stream:
        shape, dtype = _header(stream)
        # A size that contradicts the shape is told here, before anything is allocated for it.
        if not dtype.hasobject and _size(bundle, name) != stream.tell() + math.prod(shape) * dtype.itemsize:
            raise EOFError

    @cache
    def values() -> np.ndarray:
        return open_members(path, [name])[0]

    def rows(start: int, stop: int) -> np.ndarray:
        return values()[start:stop] if shape else values()

    return Array(f"{name!r} in {path}", shape, dtype, rows, whole_only="an .npz can only be read whole")


def _size(bundle: zipfile.ZipFile, name: str) -> int:
    return bundle.getinfo(f"{name}.npy").file_size


def _header(stream: IO[bytes]) -> tuple[tuple[int, ...], np.dtype]:
    """The shape and type of an .npy; its second and third version differ in the spelling of names only."""
    first = np.lib.format.read_magic(stream) == (1, 0)
    read = np.lib.format.read_array_header_1_0 if first else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(stream)
    return shape, dtype


def _read_member(bundle: zipfile.ZipFile, name: str) -> np.ndarray:
    with bundle.open(f"{name}.npy") as stream:
        return np.lib.format.read_array(stream, allow_pickle=False)


def _plain(path: Path, error: Exception) -> ValueError:
    text = str(error)
    if text.startswith(str(path)):
        return ValueError(text)
    if isinstance(error, PermissionError):
        return ValueError(f"Permission denied: {path}.")
    if isinstance(error, MemoryError):
        return ValueError(
            f"{path} does not fit in memory; split it into several files, or save it as .npy, which is memory-mapped."
        )
    if "allow_pickle" in text or "Python objects" in text:
        return pickled(str(path))
    return ValueError(f"{path} is truncated or corrupt; copy or download it again.")
