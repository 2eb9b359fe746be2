"""PDEBench: four layouts of HDF5.

    scalar           tensor (count, frames, x[, y]), for Darcy also nu (count, x, y)
    CFD              density, pressure, Vx[, Vy, Vz] (count, frames, x[, y[, z]])
    grouped          one group per trajectory, 0000, 0001, ..., with data (frames, x[, y], channels) and grid/x, y, t
    incompressible   velocity (count, frames, x, y, 2), particles (..., 1), force (count, x, y, 2), t (count, frames)

The loader of the benchmark tests on the first tenth of the trajectories, for grouped files on the last tenth.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from sigmasolver.data.formats.dimensions import CHANNEL, COUNT, SPACE, TIME
from sigmasolver.data.formats.hdf5 import open_variables, paths_in
from sigmasolver.data.formats.labelled import Labelled, Variable, as_trajectories, coordinate
from sigmasolver.data.formats.source import ForeignData, Ranges
from sigmasolver.data.split import Split

__all__ = ["is_pdebench", "read_pdebench"]

CFD = ("density", "pressure", "Vx", "Vy", "Vz")
INCOMPRESSIBLE = ("velocity", "particles", "force")
_GROUP = re.compile(r"(\d{4,})/data")


def is_pdebench(path: Path) -> bool:
    return _layout_of(paths_in(path)) is not None


def _layout_of(names: Sequence[str]) -> str | None:
    if {"tensor", "x-coordinate"} <= set(names):
        return "scalar"
    if {"density", "pressure", "Vx", "x-coordinate"} <= set(names):
        return "CFD"
    if {"velocity", "particles", "t"} <= set(names):
        return "incompressible"
    grids = {name for name in names if name.endswith("/grid/x")}
    return "grouped" if grids and any(_GROUP.fullmatch(name) for name in names) else None


def read_pdebench(path: Path, names: Sequence[str] | None = None, steady: bool | None = None) -> ForeignData:
    """Read a file."""
    entries = open_variables(path)
    layout = _layout_of(list(entries))
    if layout is None:
        raise ValueError(f"{path} matches none of PDEBench's layouts (tensor, density and Vx, 0000/data, velocity).")
    reader = {"grouped": _read_grouped, "incompressible": _read_incompressible}.get(layout, _read_separate)
    variables, notes = reader(path, entries)
    attributes = _boundary_of(path, notes)
    foreign = as_trajectories(Labelled(path, variables, attributes, tuple(notes)), names, steady)
    split, split_notes = _split(foreign.count, first=layout != "grouped")
    return replace(foreign, split=split, notes=(f"PDEBench, {layout} layout.", *foreign.notes, *split_notes))


def _read_separate(path: Path, entries: Mapping[str, Variable]) -> tuple[dict[str, Variable], list[str]]:
    """One dataset per field, and one per coordinate."""
    notes: list[str] = []
    fields = ["tensor"] if "tensor" in entries else [name for name in CFD if name in entries]
    spatial = len(entries[fields[0]].shape) - 2
    _check_axes(path, fields[0], entries[fields[0]], spatial)
    variables = {name: replace(entries[name], dims=(COUNT, TIME, *SPACE[:spatial])) for name in fields}
    if "tensor" in entries and "nu" in entries and len(entries["nu"].shape) == spatial + 1:
        variables["nu"] = replace(entries["nu"], dims=(COUNT, *SPACE[:spatial]))
    coordinates = {letter: entries.get(f"{letter}-coordinate") for letter in ("t", *SPACE[:spatial])}
    sizes = dict(zip(("t", *SPACE), entries[fields[0]].shape[1:], strict=False))
    for letter, entry in coordinates.items():
        if entry is not None:
            values = _fit_coordinate(path, letter, entry.whole().ravel(), sizes[letter], notes)
            dimension = TIME if letter == "t" else letter
            variables[dimension] = coordinate(dimension, values)
    return variables, notes


def _fit_coordinate(path: Path, letter: str, values: np.ndarray, size: int, notes: list[str]) -> np.ndarray:
    """The coordinates of `size` frames or points; the files may have one more: a final time, or cell edges."""
    if len(values) == size + 1 and letter == "t":
        notes.append("One more time than frames: the last is dropped.")
        return values[:-1]
    if len(values) == size + 1:
        notes.append(f"One more {letter} than points: taken as cell edges.")
        return (values[1:] + values[:-1]) / 2
    if len(values) != size:
        raise ValueError(
            f"{path} has {len(values)} entries of {letter}-coordinate, expected {size}; download it again."
        )
    return values


def _read_grouped(path: Path, entries: Mapping[str, Variable]) -> tuple[dict[str, Variable], list[str]]:
    groups = sorted(match[1] for name in entries if (match := _GROUP.fullmatch(name)) is not None)
    members = [entries[f"{group}/data"] for group in groups]
    shape = members[0].shape
    for group, member in zip(groups, members, strict=True):
        if member.shape != shape:
            raise ValueError(
                f"{group}/data in {path} has shape {member.shape}, but the first has {shape}; all must agree."
            )
        if member.fault is not None:
            raise ValueError(f"{group}/data in {path} {member.fault}.")
    spatial = len(shape) - 2
    _check_axes(path, f"{groups[0]}/data", members[0], spatial)

    def read(ranges: Ranges) -> np.ndarray:
        return np.stack([member.read(ranges[1:]) for member in members[slice(*ranges[0])]])

    data = Variable((COUNT, TIME, *SPACE[:spatial], CHANNEL), (len(groups), *shape), members[0].dtype, read)
    variables = {"data": data}
    for letter in ("t", *SPACE[:spatial]):
        entry = entries.get(f"{groups[0]}/grid/{letter}")
        if entry is not None:
            size = shape[0] if letter == "t" else shape[1 + SPACE.index(letter)]
            values = _fit_coordinate(path, letter, entry.whole().ravel(), size, [])
            dimension = TIME if letter == "t" else letter
            variables[dimension] = coordinate(dimension, values)
    return variables, []


def _read_incompressible(path: Path, entries: Mapping[str, Variable]) -> tuple[dict[str, Variable], list[str]]:
    notes: list[str] = []
    spatial = len(entries["velocity"].shape) - 3
    _check_axes(path, "velocity", entries["velocity"], spatial)
    variables: dict[str, Variable] = {}
    for name in INCOMPRESSIBLE:
        if name in entries:
            dims = (COUNT, *[TIME] * (name != "force"), *SPACE[:spatial], CHANNEL)
            variables[name] = replace(entries[name], dims=dims, labels=SPACE[: entries[name].shape[-1]])
    times = entries["t"].whole().reshape(-1, entries["t"].shape[-1])
    if not np.allclose(times, times[0], rtol=1e-6, atol=0):
        notes.append("The times differ between trajectories; those of the first are used for all.")
    variables[TIME] = coordinate(TIME, times[0])
    return variables, notes


def _check_axes(path: Path, name: str, entry: Variable, spatial: int) -> None:
    if not 1 <= spatial <= 3:
        raise ValueError(f"{name!r} in {path} has shape {entry.shape}; expected one to three spatial axes.")


def _boundary_of(path: Path, notes: list[str]) -> dict[str, str]:
    """The boundary as an attribute, if the file name contains it."""
    words = re.split(r"[^a-z]+", path.stem.lower())
    for word, kind in (("periodic", "periodic"), ("trans", "open")):
        if word in words:
            notes.append(f"The file name contains {word}: every axis is taken as {kind}.")
            return {"boundary": kind}
    return {}


def _split(count: int, first: bool) -> tuple[Split | None, list[str]]:
    """The benchmark's test tenth, and the last tenth of the remainder for validation (it validates on the test set)."""
    test = count // 10
    remaining = count - test
    validation = remaining // 10
    if not test or not validation:
        return None, []
    remaining_indices = range(test, count) if first else range(remaining)
    test_indices = range(test) if first else range(remaining, count)
    split = Split(tuple(remaining_indices[:-validation]), tuple(remaining_indices[-validation:]), tuple(test_indices))
    where = "first" if first else "last"
    return split, [
        f"As in the benchmark, the {where} tenth ({test}) is for testing and {validation} of the others for validation."
    ]
