"""MATLAB files of the Fourier neural operator: Darcy flow and 2-D Navier-Stokes.

Version 5 (read by scipy) keeps the order of axes; version 7.3 is HDF5, with all axes reversed. Darcy: `coeff`, `sol`
(count, s, s) at the cell centres of the unit square, in two files: the first cases of `..._smooth1.mat` are the
training split, the first of `..._smooth2.mat` the test split. Navier-Stokes: `u` (count, s, s, frames), the vorticity
on the unit torus, and its times `t`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np

from sigmasolver.data.formats.hdf5 import chunks_of
from sigmasolver.data.formats.source import (
    Array,
    ForeignData,
    Ranges,
    cache_notes,
    check_numbers,
    listed,
    periodic,
    sliceable_or_cached,
)
from sigmasolver.data.isolated import UnreadableError, ask, check_file
from sigmasolver.data.layout import Layout
from sigmasolver.tasks import TASKS

__all__ = ["read_darcy", "read_darcy_pair", "read_navier_stokes", "variables"]

TRAIN, TEST = "smooth1", "smooth2"
"""Markers in the names of the public Darcy files."""


def variables(path: Path) -> tuple[str, ...]:
    """Return the names of the variables in a MATLAB file."""
    check_file(path)
    try:
        if h5py.is_hdf5(path):
            return tuple(name for name in ask(path, "names") if not name.startswith("#"))
        return tuple(ask(path, "matlab_names"))
    except UnreadableError as error:
        raise _read_error(path) from error


def _open_variable(path: Path, name: str, axes: tuple[str, ...], limit: int | None = None) -> Array:
    """Open a variable with these axes; version 5 loads at most `limit` leading entries."""
    present = variables(path)
    if name not in present:
        raise ValueError(f"{path} has no variable {name!r}; available variables: {listed(present) or 'none'}.")
    where = f"{name!r} in {path}"
    if h5py.is_hdf5(path):
        return _open_variable_73(path, name, where, axes)
    try:
        values = ask(path, "matlab_values", [name, limit], 1000 * path.stat().st_size)
    except UnreadableError as error:
        raise _read_error(path) from error
    if values is None:
        raise ValueError(f"{where} is not a numeric array; expected real numbers.")
    check_numbers(where, values, axes)
    return Array(
        where,
        values.shape,
        values.dtype,
        lambda start, stop: values[start:stop],
        load_reason="a .mat of version 5 can only be read whole",
    )


def _open_variable_73(path: Path, name: str, where: str, axes: tuple[str, ...]) -> Array:
    try:
        entry = next((item for item in ask(path, "entries") if item["name"] == name), None)
    except UnreadableError as error:
        raise _read_error(path) from error
    if entry is None:
        raise ValueError(f"{where} is not a numeric array; expected real numbers.")
    shape, dtype = tuple(entry["shape"][::-1]), np.dtype(entry["dtype"])

    def rows(start: int, stop: int) -> np.ndarray:
        size = dtype.itemsize * math.prod((stop - start, *shape[1:]))
        try:
            return ask(path, "rows", [name, start, stop, True], size).transpose()
        except UnreadableError as error:
            raise _read_error(path) from error

    def box(ranges: Ranges) -> np.ndarray:
        size = dtype.itemsize * math.prod(stop - start for start, stop in ranges)
        try:
            return ask(path, "box", [name, list(ranges[::-1])], size).transpose()
        except UnreadableError as error:
            raise _read_error(path) from error

    chunks = chunks_of(entry)
    array = Array(
        where, shape, dtype, rows, entry["fault"], "link" in entry, box, chunks and chunks[::-1]
    )  # fmt: skip
    check_numbers(where, array, axes)
    return array


def _read_error(path: Path) -> ValueError:
    return ValueError(f"{path} is truncated or is not a MATLAB file; copy or download it again.")


def read_darcy(path: Path) -> ForeignData:
    """Read all cases of one file: coefficient and pressure of steady Darcy flow, one frame each."""
    foreign = _open_darcy(path)
    note = f"Training and test splits come from this one file; the public split uses both {TRAIN} and {TEST}."
    return replace(foreign, notes=(*foreign.notes, note))


def read_darcy_pair(
    paths: Sequence[Path], train: int = TASKS["darcy"].train, test: int = TASKS["darcy"].test
) -> ForeignData:
    """Read the public split: the first `train` cases of the training file, then the first `test` of the test file."""
    train_file, test_file, how = _train_and_test_file(paths)
    test_set, train_set = _open_darcy(test_file, test), _open_darcy(train_file)
    for path, part, count, available in (
        (train_file, "training", train, train_set.count),
        (test_file, "test", test, test_set.count),
    ):
        if available < count:
            raise ValueError(
                f"{path} has {available} cases, but the {part} split needs the first {count}; give the complete file."
            )
    train_grid, test_grid = (
        " × ".join(str(len(axis)) for axis in foreign.layout.coordinates) for foreign in (train_set, test_set)
    )
    if train_grid != test_grid:
        raise ValueError(
            f"{train_file} has a {train_grid} grid, but {test_file} has {test_grid}; give two files with the same grid."
        )

    def read(start: int, stop: int) -> np.ndarray:
        parts = []
        if start < train:
            parts.append(train_set.read(start, min(stop, train)))
        if stop > train:
            parts.append(test_set.read(max(start - train, 0), stop - train))
        return np.concatenate(parts)

    note = (
        f"{how}: trajectories 0 to {train - 1} are the first {train} cases of {train_file.name} (training), "
        f"{train} to {train + test - 1} the first {test} of {test_file.name} (test)."
    )
    return ForeignData(train_set.layout, train + test, read, (*train_set.notes, note), files=(train_file, test_file))


def _train_and_test_file(paths: Sequence[Path]) -> tuple[Path, Path, str]:
    """Return the training file, the test file, and how they were identified."""
    if len(paths) != 2:
        raise ValueError(
            f"Got {len(paths)} Darcy files; expected one, or two: {TRAIN} for training and {TEST} for testing."
        )
    first, second = paths
    if first.samefile(second):
        raise ValueError(f"{first} was given twice; expected {TRAIN} for training and {TEST} for testing.")
    markers = [re.findall(rf"(?:{TRAIN}|{TEST})(?!\d)", path.name.lower()) for path in paths]
    if markers[0] and markers[0] == markers[1]:
        raise ValueError(f"{first} and {second} are both {markers[0][0]}; expected {TRAIN} and {TEST}.")
    if not any(markers):
        return first, second, "By the order of the files"
    if markers[0] == [TEST] or markers[1] == [TRAIN]:
        first, second = second, first
    return first, second, "By their names"


def _open_darcy(path: Path, limit: int | None = None) -> ForeignData:
    axes = ("count", "x", "y")
    coefficient, pressure = (_open_variable(path, name, axes, limit) for name in ("coeff", "sol"))
    if coefficient.shape != pressure.shape:
        raise ValueError(f"{path} has coeff of shape {coefficient.shape} but sol of shape {pressure.shape}.")
    count, *grid = coefficient.shape
    layout = Layout(
        fields=("coefficient", "pressure"),
        units=("1", "1"),
        boundary=("wall", "wall"),
        coordinates=tuple((np.arange(points) + 0.5) / points for points in grid),
        times=np.zeros(1),
    )

    def read(start: int, stop: int) -> np.ndarray:
        return np.stack([field.rows(start, stop) for field in (coefficient, pressure)], axis=-1)[:, None]

    # Read by windows where that is fast, otherwise cached in memory.
    sliceable = [sliceable_or_cached(field) for field in (coefficient, pressure)]

    def read_frames(index: int, start: int, stop: int) -> np.ndarray:
        ranges = [(index, index + 1), *((0, points) for points in grid)]
        return np.stack([field.part(ranges) for field in sliceable], axis=-1)[start:stop]

    notes = ("Assumed: cell centres of the unit square.",)
    return ForeignData(layout, count, read, notes, cache_notes(sliceable), frames=read_frames)


def read_navier_stokes(path: Path) -> ForeignData:
    """Read the vorticity on the unit torus. The initial state `a` at time zero is not a frame and is skipped."""
    vorticity = _open_variable(path, "u", ("count", "x", "y", "frames"))
    count, *grid, frames = vorticity.shape
    notes = ["Assumed: the periodic unit square."]
    if "t" in variables(path):
        t = _open_variable(path, "t", ("", ""))
        times = t.rows(0, t.shape[0]).ravel().astype(np.float64)
    else:
        times = np.arange(1.0, frames + 1)
        notes.append(f"No times: assumed 1, 2, …, {frames}.")
    if len(times) != frames:
        raise ValueError(f"{path} has {frames} frames of u but {len(times)} times in t.")
    layout = Layout(
        fields=("vorticity",),
        units=("1/time",),
        boundary=("periodic", "periodic"),
        coordinates=tuple(periodic(points, 1.0) for points in grid),
        times=times,
    )

    def read(start: int, stop: int) -> np.ndarray:
        return np.moveaxis(vorticity.rows(start, stop), -1, 1)[..., None]

    sliceable = sliceable_or_cached(vorticity)

    def read_frames(index: int, start: int, stop: int) -> np.ndarray:
        values = sliceable.part([(index, index + 1), *((0, points) for points in grid), (start, stop)])[0]
        return np.ascontiguousarray(np.moveaxis(values, -1, 0))[..., None]

    return ForeignData(layout, count, read, tuple(notes), cache_notes([sliceable]), frames=read_frames)
