"""NumPy files, opened with `allow_pickle=False`: .npy memory-mapped, .npz one member at a time."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import IO

import numpy as np

from sigmasolver.data.formats.source import Array, listed, pickle_error
from sigmasolver.data.isolated import check_file

__all__ = ["members", "open_members", "open_npy", "open_npz"]


def open_npy(path: Path) -> np.ndarray:
    """Memory-map the array of an .npy file."""
    check_file(path)
    try:
        with open(path, "rb") as handle:
            magic = handle.read(6)
        if magic != b"\x93NUMPY":
            raise ValueError(f"{path} is not a valid .npy file; save it again with numpy.save.")
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:
        raise _read_error(path, error) from error


def members(path: Path) -> tuple[str, ...]:
    """Return the names of the arrays in an .npz file."""
    check_file(path)
    try:
        with zipfile.ZipFile(path) as bundle:
            return tuple(name.removesuffix(".npy") for name in bundle.namelist() if name.endswith(".npy"))
    except Exception as error:
        raise _read_error(path, error) from error


def open_members(path: Path, names: Sequence[str]) -> list[np.ndarray]:
    """Load the named arrays of an .npz file."""
    present = members(path)
    for name in names:
        if name not in present:
            raise ValueError(f"{path} has no array {name!r}; available arrays: {listed(present) or 'none'}.")
    try:
        with zipfile.ZipFile(path) as bundle:
            return [_read_member(bundle, name) for name in names]
    except Exception as error:
        raise _read_error(path, error) from error


def open_npz(path: Path) -> dict[str, Array]:
    """Return the arrays of an .npz file by name, in file order; each is loaded in full on first access."""
    check_file(path)
    try:
        with zipfile.ZipFile(path) as bundle:
            return {name: _lazy_member(path, bundle, name) for name in members(path)}
    except Exception as error:
        raise _read_error(path, error) from error


def _lazy_member(path: Path, bundle: zipfile.ZipFile, name: str) -> Array:
    with bundle.open(f"{name}.npy") as stream:
        shape, dtype = _read_npy_header(stream)
        # Check the size against the shape before anything is allocated for it.
        if not dtype.hasobject and _member_size(bundle, name) != stream.tell() + math.prod(shape) * dtype.itemsize:
            raise EOFError

    @cache
    def values() -> np.ndarray:
        return open_members(path, [name])[0]

    def rows(start: int, stop: int) -> np.ndarray:
        return values()[start:stop] if shape else values()

    return Array(f"{name!r} in {path}", shape, dtype, rows, load_reason="an .npz can only be read whole")


def _member_size(bundle: zipfile.ZipFile, name: str) -> int:
    return bundle.getinfo(f"{name}.npy").file_size


def _read_npy_header(stream: IO[bytes]) -> tuple[tuple[int, ...], np.dtype]:
    """Return the shape and dtype; versions 2 and 3 of the format differ only in the encoding of field names."""
    is_version_1 = np.lib.format.read_magic(stream) == (1, 0)
    read_header = np.lib.format.read_array_header_1_0 if is_version_1 else np.lib.format.read_array_header_2_0
    shape, _, dtype = read_header(stream)
    return shape, dtype


def _read_member(bundle: zipfile.ZipFile, name: str) -> np.ndarray:
    with bundle.open(f"{name}.npy") as stream:
        return np.lib.format.read_array(stream, allow_pickle=False)


def _read_error(path: Path, error: Exception) -> ValueError:
    """Map an exception of NumPy or zipfile to a ValueError that names the file and the remedy."""
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
        return pickle_error(str(path))
    return ValueError(f"{path} is truncated or corrupt; copy or download it again.")
