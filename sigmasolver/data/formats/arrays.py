"""NumPy files, opened without ever unpickling: .npy memory-mapped, .npz member by member.

A user's own data comes as an .npz with

    fields (count, frames, *grid, channels)   and optionally   names, units, boundary, x, y, z, times

or as an .npy with such `fields` alone.
"""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from sigmasolver.data.formats.foreign import Foreign, check_numbers
from sigmasolver.simulate.simulator import Layout

__all__ = ["members", "open_members", "open_npy", "read_arrays"]


def open_npy(path: Path) -> np.ndarray:
    """The array of an .npy file, read from disk only where it is sliced."""
    try:
        with open(path, "rb") as handle:
            magic = handle.read(6)
        if magic != b"\x93NUMPY":
            raise ValueError(f"{path} is not an .npy file; save it again with numpy.save.")
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:
        raise _plain(path, error) from error


def members(path: Path) -> tuple[str, ...]:
    """The names of the arrays in an .npz file."""
    try:
        with zipfile.ZipFile(path) as bundle:
            return tuple(name.removesuffix(".npy") for name in bundle.namelist())
    except Exception as error:
        raise _plain(path, error) from error


def open_members(path: Path, names: Sequence[str]) -> list[np.ndarray]:
    """These arrays of an .npz file, read."""
    present = members(path)
    for name in names:
        if name not in present:
            raise ValueError(f"{path} has no array {name!r}; it has {', '.join(present) or 'none'}.")
    try:
        with np.load(path, allow_pickle=False) as bundle:
            return [bundle[name] for name in names]
    except Exception as error:
        raise _plain(path, error) from error


def _plain(path: Path, error: Exception) -> ValueError:
    text = str(error)
    if text.startswith(str(path)):
        return ValueError(text)
    if isinstance(error, FileNotFoundError):
        return ValueError(f"There is no file {path}.")
    if isinstance(error, PermissionError):
        return ValueError(f"This user may not read {path}; ask its owner.")
    if "allow_pickle" in text or "Python objects" in text:
        return ValueError(f"{path} holds pickled Python objects, which are never loaded; save plain numbers.")
    return ValueError(f"{path} is truncated or damaged; copy or download it again.")


def read_arrays(path: Path) -> Foreign:
    """A user's own arrays; what they leave out is filled in and noted."""
    given: dict[str, np.ndarray] = {}
    if path.suffix == ".npy":
        fields = open_npy(path)
    else:
        names = [name for name in members(path) if name in ("names", "units", "boundary", "times", *"xyz")]
        fields, *rest = open_members(path, ["fields", *names])
        given = dict(zip(names, rest, strict=True))
    if not 4 <= fields.ndim <= 6:
        raise ValueError(
            f"{path} has fields of shape {fields.shape}; (count, frames, *grid, channels) is needed, "
            "with one to three spatial axes."
        )
    check_numbers(str(path), fields, ["count", "frames", *"xyz"[: fields.ndim - 3], "channels"])
    count, frames, *grid, channels = fields.shape
    notes = []

    def pick(name: str, default: np.ndarray, meaning: str) -> np.ndarray:
        if name not in given:
            notes.append(f"It has no {name}: taken as {meaning}.")
        values = given.get(name, default)
        if values.shape != default.shape or (values.dtype.kind in "SU") != (default.dtype.kind == "U"):
            kind = "words" if default.dtype.kind == "U" else "numbers"
            raise ValueError(f"{path} has {name} of shape {values.shape}; {default.size} {kind} are needed.")
        return values

    layout = Layout(
        fields=_words(pick("names", np.array([f"field_{q}" for q in range(channels)]), "field_0, field_1, …")),
        units=_words(pick("units", np.array(["1"] * channels), "pure numbers")),
        boundary=_words(pick("boundary", np.array(["open"] * len(grid)), "open on every axis")),
        coordinates=tuple(
            pick(name, np.arange(points, dtype=np.float64), "0, 1, 2, …")
            for name, points in zip("xyz", grid, strict=False)
        ),
        times=pick("times", np.arange(frames, dtype=np.float64), "0, 1, 2, …"),
    )
    return Foreign(layout, count, lambda start, stop: np.asarray(fields[start:stop]), tuple(notes))


def _words(values: np.ndarray) -> tuple[str, ...]:
    return tuple(str(one) for one in values)
