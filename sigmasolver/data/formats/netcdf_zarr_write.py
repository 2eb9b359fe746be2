"""Write trajectories as NetCDF or Zarr: one variable per field, with coordinates, units, times and attributes."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from sigmasolver.data.formats.xarray_dataset import as_dataset
from sigmasolver.data.header import Header
from sigmasolver.data.isolated import EXTRA
from sigmasolver.runs.files import os_errors_as_value_errors, replacing, replacing_folder

__all__ = ["require_xarray", "write_netcdf", "write_zarr"]


def require_xarray(out: Path) -> None:
    """Raise ValueError if a package for writing this file is missing, before anything is computed."""
    try:
        import h5netcdf  # noqa: F401
        import xarray  # noqa: F401
        import zarr  # noqa: F401
    except ImportError:
        raise ValueError(f"Writing {out} requires xarray, h5netcdf and zarr; install them with {EXTRA}.") from None


def write_netcdf(out: Path, trajectories: np.ndarray, header: Header, compress: bool = False) -> None:
    """Write a NetCDF 4 file with one chunk per frame; it is renamed to `out` once complete."""
    require_xarray(out)
    dataset = as_dataset(trajectories, header)
    options: dict[str, Any] = {"chunksizes": (1, 1, *header.grid), "_FillValue": None}
    if compress:
        options |= {"zlib": True, "shuffle": True}
    encoding = {name: options for name in dataset.data_vars} | {name: {"_FillValue": None} for name in dataset.coords}
    with os_errors_as_value_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        with replacing(out) as file:
            assert isinstance(file, io.IOBase)
            dataset.to_netcdf(file, engine="h5netcdf", encoding=encoding)


def write_zarr(out: Path, trajectories: np.ndarray, header: Header, version: int = 3) -> None:
    """Write a Zarr group with one chunk per frame; it is renamed to `out` once complete."""
    require_xarray(out)
    dataset = as_dataset(trajectories, header)
    encoding = {name: {"chunks": (1, 1, *header.grid)} for name in dataset.data_vars}
    with os_errors_as_value_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        with replacing_folder(out) as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # xarray writes consolidated metadata by default, and zarr warns about it
            dataset.to_zarr(folder, zarr_format=version, encoding=encoding, mode="w")
