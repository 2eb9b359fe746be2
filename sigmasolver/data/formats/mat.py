"""The MATLAB files of the Fourier neural operator: Darcy flow and 2-D Navier-Stokes.

Version 5 (read by scipy) holds arrays in the written order of axes, version 7.3 is HDF5 and holds them with
all axes reversed. Darcy: `coeff`, `sol` (count, s, s) at the cell centres of the unit square, in two files: the first
cases of `..._smooth1.mat` train, the first of `..._smooth2.mat` are the test. Navier-Stokes: `u` (count, s, s, frames),
the vorticity on the unit torus, and its times `t`.
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
    Foreign,
    Ranges,
    check_numbers,
    how_held,
    in_parts_or_held,
    listed,
    periodic,
)
from sigmasolver.data.isolated import UnreadableError, ask, check_file
from sigmasolver.data.layout import Layout
from sigmasolver.tasks import TASKS

__all__ = ["read_darcy", "read_darcy_pair", "read_navier_stokes", "variables"]

TRAIN, TEST = "smooth1", "smooth2"
"""What the names of the public Darcy files say."""


def variables(path: Path) -> tuple[str, ...]:
    """The names of what a MATLAB file holds."""
    check_file(path)
    try:
        if h5py.is_hdf5(path):
            return tuple(name for name in ask(path, "names") if not name.startswith("#"))
        return tuple(ask(path, "matlab_names"))
    except UnreadableError as error:
        raise _plain(path) from error


def _variable(path: Path, name: str, axes: tuple[str, ...], most: int | None = None) -> Array:
    """`most`: no more than so many of the first entries are needed."""
    present = variables(path)
    if name not in present:
        raise ValueError(f"{path} has no variable {name!r}; available variables: {listed(present) or 'none'}.")
    where = f"{name!r} in {path}"
    if h5py.is_hdf5(path):
        return _variable_73(path, name, where, axes)
    try:
        values = ask(path, "matlab_values", [name, most], 1000 * path.stat().st_size)
    except UnreadableError as error:
        raise _plain(path) from error
    if values is None:
        raise ValueError(f"{where} is not a numeric array; expected real numbers.")
    check_numbers(where, values, axes)
    return Array(
        where,
        values.shape,
        values.dtype,
        lambda start, stop: values[start:stop],
        whole_only="a .mat of version 5 can only be read whole",
    )


def _variable_73(path: Path, name: str, where: str, axes: tuple[str, ...]) -> Array:
    try:
        entry = next((one for one in ask(path, "entries") if one["name"] == name), None)
    except UnreadableError as error:
        raise _plain(path) from error
    if entry is None:
        raise ValueError(f"{where} is not a numeric array; expected real numbers.")
    shape, dtype = tuple(entry["shape"][::-1]), np.dtype(entry["dtype"])

    def rows(start: int, stop: int) -> np.ndarray:
        size = dtype.itemsize * math.prod((stop - start, *shape[1:]))
        try:
            return ask(path, "rows", [name, start, stop, True], size).transpose()
        except UnreadableError as error:
            raise _plain(path) from error

    def box(ranges: Ranges) -> np.ndarray:
        size = dtype.itemsize * math.prod(stop - start for start, stop in ranges)
        try:
            return ask(path, "box", [name, list(ranges[::-1])], size).transpose()
        except UnreadableError as error:
            raise _plain(path) from error

    chunks = chunks_of(entry)
    array = Array(
        where, shape, dtype, rows, entry["fault"], "link" in entry, box, chunks and chunks[::-1]
    )  # fmt: skip
    check_numbers(where, array, axes)
    return array


def _plain(path: Path) -> ValueError:
    return ValueError(f"{path} is truncated or is not a MATLAB file; copy or download it again.")


def read_darcy(path: Path) -> Foreign:
    """Coefficient and pressure of steady Darcy flow, one frame; all cases of one file."""
    foreign = _darcy(path)
    note = f"Training and test splits come from this one file; the public split uses both {TRAIN} and {TEST}."
    return replace(foreign, notes=(*foreign.notes, note))


def read_darcy_pair(
    paths: Sequence[Path], train: int = TASKS["darcy"].train, test: int = TASKS["darcy"].test
) -> Foreign:
    """The public split: the first `train` cases of the training file, then the first `test` of the test file."""
    first, second, how = _in_order(paths)
    tests, trains = _darcy(second, test), _darcy(first)
    for path, part, count, there in ((first, "training", train, trains.count), (second, "test", test, tests.count)):
        if there < count:
            raise ValueError(
                f"{path} has {there} cases, but the {part} split needs the first {count}; give the complete file."
            )
    one, two = (" × ".join(str(len(axis)) for axis in held.layout.coordinates) for held in (trains, tests))
    if one != two:
        raise ValueError(f"{first} has a {one} grid, but {second} has {two}; give two files with the same grid.")

    def read(start: int, stop: int) -> np.ndarray:
        parts = []
        if start < train:
            parts.append(trains.read(start, min(stop, train)))
        if stop > train:
            parts.append(tests.read(max(start - train, 0), stop - train))
        return np.concatenate(parts)

    split = (
        f"{how}: trajectories 0 to {train - 1} are the first {train} cases of {first.name} (training), "
        f"{train} to {train + test - 1} the first {test} of {second.name} (test)."
    )
    return Foreign(trains.layout, train + test, read, (*trains.notes, split), files=(first, second))


def _in_order(paths: Sequence[Path]) -> tuple[Path, Path, str]:
    """The training file, the test file, and how they were told apart."""
    if len(paths) != 2:
        raise ValueError(
            f"Got {len(paths)} Darcy files; expected one, or two: {TRAIN} for training and {TEST} for testing."
        )
    first, second = paths
    if first.samefile(second):
        raise ValueError(f"{first} was given twice; expected {TRAIN} for training and {TEST} for testing.")
    said = [re.findall(rf"(?:{TRAIN}|{TEST})(?!\d)", path.name.lower()) for path in paths]
    if said[0] and said[0] == said[1]:
        raise ValueError(f"{first} and {second} are both {said[0][0]}; expected {TRAIN} and {TEST}.")
    if not any(said):
        return first, second, "By the order of the files"
    if said[0] == [TEST] or said[1] == [TRAIN]:
        first, second = second, first
    return first, second, "By their names"


def _darcy(path: Path, most: int | None = None) -> Foreign:
    axes = ("count", "x", "y")
    coefficient, pressure = (_variable(path, name, axes, most) for name in ("coeff", "sol"))
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
        return np.stack([one.rows(start, stop) for one in (coefficient, pressure)], axis=-1)[:, None]

    ready = [in_parts_or_held(one) for one in (coefficient, pressure)]

    def frames(index: int, start: int, stop: int) -> np.ndarray:
        ranges = [(index, index + 1), *((0, points) for points in grid)]
        return np.stack([one.part(ranges) for one in ready], axis=-1)[start:stop]

    notes = ("Assumed: cell centres of the unit square.",)
    return Foreign(layout, count, read, notes, how_held(ready), frames=frames)


def read_navier_stokes(path: Path) -> Foreign:
    """Vorticity on the unit torus. The state `a` at time zero is not among the frames and is left out."""
    vorticity = _variable(path, "u", ("count", "x", "y", "frames"))
    count, *grid, frames = vorticity.shape
    notes = ["Assumed: the periodic unit square."]
    if "t" in variables(path):
        t = _variable(path, "t", ("", ""))
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

    ready = in_parts_or_held(vorticity)

    def some(index: int, start: int, stop: int) -> np.ndarray:
        values = ready.part([(index, index + 1), *((0, points) for points in grid), (start, stop)])[0]
        return np.ascontiguousarray(np.moveaxis(values, -1, 0))[..., None]

    return Foreign(layout, count, read, tuple(notes), how_held([ready]), frames=some)
