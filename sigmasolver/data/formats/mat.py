"""The MATLAB files of the Fourier neural operator: Darcy flow and 2-D Navier-Stokes.

Version 5 (read by scipy) holds arrays in the written order of axes, version 7.3 is HDF5 and holds them with
all axes reversed. Darcy: `coeff`, `sol` (count, s, s) at the cell centres of the unit square. Navier-Stokes:
`u` (count, s, s, frames), the vorticity on the unit torus, and its times `t`.
"""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np

from sigmasolver.data.formats.foreign import Array, Foreign, check_numbers, listed, periodic
from sigmasolver.data.formats.hdf5 import fault
from sigmasolver.simulate.simulator import Layout

__all__ = ["read_darcy", "read_navier_stokes", "variables"]


def variables(path: Path) -> tuple[str, ...]:
    """The names of what a MATLAB file holds."""
    import scipy.io

    try:
        if h5py.is_hdf5(path):
            with _open_73(path) as file:
                return tuple(name for name in file if not name.startswith("#"))
        return tuple(name for name, _, _ in scipy.io.whosmat(path))
    except Exception as error:
        raise _plain(path) from error


def _variable(path: Path, name: str, axes: tuple[str, ...]) -> Array:
    import scipy.io

    present = variables(path)
    if name not in present:
        raise ValueError(f"{path} has no variable {name!r}; it has {listed(present) or 'none'}.")
    where = f"{name!r} in {path}"
    if h5py.is_hdf5(path):
        return _variable_73(path, name, where, axes)
    try:
        values = scipy.io.loadmat(path, variable_names=[name])[name]
    except Exception as error:
        raise _plain(path) from error
    if not isinstance(values, np.ndarray):
        raise ValueError(f"{where} is not an array of numbers.")
    check_numbers(where, values, axes)
    return Array(where, values.shape, values.dtype, lambda start, stop: values[start:stop])


def _variable_73(path: Path, name: str, where: str, axes: tuple[str, ...]) -> Array:
    def rows(start: int, stop: int) -> np.ndarray:
        try:
            with _open_73(path) as file:
                return file[name][..., start:stop].transpose()
        except Exception as error:  # h5py answers damage with whatever exception comes first
            raise _plain(path) from error

    try:
        with _open_73(path) as file:
            dataset = file[name]
            if not isinstance(dataset, h5py.Dataset):
                raise TypeError("a group")
            array = Array(where, tuple(dataset.shape[::-1]), dataset.dtype, rows, fault(dataset))
    except TypeError as error:
        raise ValueError(f"{where} is not an array of numbers.") from error
    except Exception as error:
        raise _plain(path) from error
    check_numbers(where, array, axes)
    return array


def _open_73(path: Path) -> h5py.File:
    return h5py.File(path, "r", locking=False)


def _plain(path: Path) -> ValueError:
    if not path.exists():
        return ValueError(f"There is no file {path}.")
    return ValueError(f"{path} is not a whole MATLAB file; copy or download it again.")


def read_darcy(path: Path) -> Foreign:
    """Coefficient and pressure of steady Darcy flow, one frame."""
    axes = ("count", "x", "y")
    coefficient, pressure = _variable(path, "coeff", axes), _variable(path, "sol", axes)
    if coefficient.shape != pressure.shape:
        raise ValueError(f"{path} has coeff of shape {coefficient.shape} but sol of {pressure.shape}.")
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

    return Foreign(layout, count, read, ("Points are taken as cell centres of the unit square.",))


def read_navier_stokes(path: Path) -> Foreign:
    """Vorticity on the unit torus. The state `a` at time zero is not among the frames and is left out."""
    vorticity = _variable(path, "u", ("count", "x", "y", "frames"))
    count, *grid, frames = vorticity.shape
    notes = ["Points are taken as those of the periodic unit square."]
    if "t" in variables(path):
        t = _variable(path, "t", ("", ""))
        times = t.rows(0, t.shape[0]).ravel().astype(np.float64)
    else:
        times = np.arange(1.0, frames + 1)
        notes.append(f"It has no times: taken as 1, 2, …, {frames}.")
    if len(times) != frames:
        raise ValueError(f"{path} has {frames} frames of u but {len(times)} times t.")
    layout = Layout(
        fields=("vorticity",),
        units=("1/time",),
        boundary=("periodic", "periodic"),
        coordinates=tuple(periodic(points, 1.0) for points in grid),
        times=times,
    )

    def read(start: int, stop: int) -> np.ndarray:
        return np.moveaxis(vorticity.rows(start, stop), -1, 1)[..., None]

    return Foreign(layout, count, read, tuple(notes))
