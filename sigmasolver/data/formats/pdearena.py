"""PDEArena: HDF5 files with the part in their name, such as *train*.h5, and one group of that name.

    Navier-Stokes          u, vx, vy (count, frames, x, y), t (count, frames), x (count, x), y (count, y), buo_y (count)
    Kuramoto-Sivashinsky   pde_... (count, frames, x), dt, dx, v (count)
    Maxwell                d_field, h_field (count, frames, x, y, z, 3)

Its shallow-water data are Zarr or NetCDF and are read as such.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from sigmasolver.data.formats.dimensions import CHANNEL, COUNT, SPACE, TIME
from sigmasolver.data.formats.hdf5 import SUFFIXES, open_variables, paths_in
from sigmasolver.data.formats.labelled import Labelled, Variable, as_trajectories, coordinate
from sigmasolver.data.formats.parts import concatenate, find_sources
from sigmasolver.data.formats.source import ForeignData

__all__ = ["is_pdearena", "read_pdearena"]

_FIELD = re.compile(r"(train|valid|test)/(u|vx|vy|d_field|h_field|pde_.*)")
_PARAMETERS = ("buo_y", "v")
_PARTS = {"train": "train", "valid": "validation", "test": "test"}


def is_pdearena(path: Path) -> bool:
    files = _files(path)
    return bool(files) and any(_FIELD.fullmatch(name) for name in paths_in(files[0]))


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path] if path.suffix.lower() in SUFFIXES else []
    return [file for _, file in find_sources(path, lambda file: file.is_file() and file.suffix.lower() in SUFFIXES)]


def read_pdearena(path: Path, names: Sequence[str] | None = None, steady: bool | None = None) -> ForeignData:
    """Read a file, or all files of a folder with the split given by their groups."""
    files = [(_PARTS[_group(file)], file) for file in _files(path)]
    if not files:
        raise ValueError(f"{path} contains no PDEArena files (*train*.h5, *valid*.h5, *test*.h5).")
    files.sort(key=lambda item: list(_PARTS.values()).index(item[0]))
    sources: list[tuple[str | None, Path]] = [(part if len(files) > 1 else None, file) for part, file in files]
    return concatenate(sources, lambda file: as_trajectories(_open_labelled(file), names, steady))


def _group(file: Path) -> str:
    first = next((match for name in paths_in(file) if (match := _FIELD.fullmatch(name)) is not None), None)
    if first is None:
        raise ValueError(f"{file} has no group train, valid or test with u, vx, vy, pde_..., d_field or h_field.")
    return first[1]


def _open_labelled(file: Path) -> Labelled:
    group = _group(file)
    entries = {
        name.removeprefix(f"{group}/"): entry for name, entry in open_variables(file).items() if name.startswith(group)
    }
    fields = {name: entry for name, entry in entries.items() if _FIELD.fullmatch(f"{group}/{name}")}
    variables, notes = dict[str, Variable](), list[str]()
    for name, entry in fields.items():
        vector = name.endswith("_field") and entry.shape[-1] == 3
        spatial = len(entry.shape) - 2 - vector
        if not 1 <= spatial <= 3:
            raise ValueError(f"{name!r} in {file} has shape {entry.shape}; expected axes (count, frames, *grid).")
        dims = (COUNT, TIME, *SPACE[:spatial], *[CHANNEL] * vector)
        variables[re.sub(r"^pde_.*", "u", name)] = replace(entry, dims=dims, labels=SPACE if vector else ())
    first = next(iter(variables.values()))
    sizes = dict(zip((TIME, *SPACE), first.shape[1:], strict=False))
    for dimension in first.dims[1:]:
        if dimension != CHANNEL:
            values = _axis(entries, dimension, sizes[dimension], notes)
            if values is not None:
                variables[dimension] = coordinate(dimension, values)
    for name in _PARAMETERS:
        if name in entries and len(entries[name].shape) == 1:
            variables[name] = replace(entries[name], dims=(COUNT,), repeat=True)
    return Labelled(file, variables, {}, tuple(notes))


def _axis(entries: Mapping[str, Variable], dimension: str, size: int, notes: list[str]) -> np.ndarray | None:
    """The values of an axis in the first trajectory, listed or computed from the spacing; None without either."""
    letter = "t" if dimension == TIME else dimension
    for name, axis_of in ((letter, lambda row: row), (f"d{letter}", lambda row: row[0] * np.arange(size))):
        if name in entries:
            rows = entries[name].whole().astype(np.float64)
            rows = rows.reshape(len(rows), -1) if rows.ndim else rows.reshape(1, 1)
            if not np.allclose(rows, rows[0], rtol=1e-4, atol=0):
                notes.append(f"{name} differs between trajectories; the values of the first are used for all.")
            values = axis_of(rows[0])
            return values if len(values) == size else None
    return None
