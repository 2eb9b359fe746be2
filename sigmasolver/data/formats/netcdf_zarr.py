"""NetCDF files (3 and 4) and Zarr groups (2 and 3), read by xarray in a separate process.

A window is read from the chunks that contain it. Packed values are decoded by their attributes (scale_factor,
add_offset, _FillValue); times stay numbers with their unit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from sigmasolver.data.formats.labelled import Labelled, Variable, as_trajectories
from sigmasolver.data.formats.parts import concatenate, find_sources
from sigmasolver.data.formats.source import ForeignData, Ranges
from sigmasolver.data.isolated import UnreadableError, ask

__all__ = ["is_netcdf", "is_zarr", "netcdf_files", "open_labelled", "read_netcdf", "read_zarr", "zarr_groups"]

NETCDF = (".nc", ".nc4", ".nc3", ".cdf", ".netcdf")
ZARR = ("zarr.json", ".zgroup", ".zarray", ".zmetadata")


def is_netcdf(path: Path) -> bool:
    return path.is_file() and path.suffix.lower() in NETCDF


def is_zarr(path: Path) -> bool:
    return path.is_dir() and any((path / name).is_file() for name in ZARR)


def netcdf_files(path: Path) -> list[tuple[str | None, Path]]:
    """A file, or those in a folder, each with its part of the data set."""
    return [(None, path)] if is_netcdf(path) else find_sources(path, is_netcdf)


def zarr_groups(path: Path) -> list[tuple[str | None, Path]]:
    """A group, or those in a folder, each with its part of the data set."""
    return [(None, path)] if is_zarr(path) else find_sources(path, is_zarr)


def read_netcdf(path: Path, names: Sequence[str] | None = None, steady: bool | None = None) -> ForeignData:
    """Open a NetCDF file, or the files of a folder as one data set; `names`: fields to read, `steady`: no time axis."""
    return _read(netcdf_files(path), names, steady, f"{path} contains no NetCDF file ({', '.join(NETCDF)}).")


def read_zarr(path: Path, names: Sequence[str] | None = None, steady: bool | None = None) -> ForeignData:
    """Open a Zarr group, or the groups of a folder as one data set; `names`: fields to read, `steady`: no time axis."""
    return _read(zarr_groups(path), names, steady, f"{path} contains no Zarr group (zarr.json or .zgroup).")


def _read(
    files: Sequence[tuple[str | None, Path]], names: Sequence[str] | None, steady: bool | None, if_empty: str
) -> ForeignData:
    if not files:
        raise ValueError(if_empty)
    return concatenate(files, lambda file: as_trajectories(open_labelled(file), names, steady))


def open_labelled(path: Path) -> Labelled:
    """The variables of a NetCDF file or Zarr group."""
    try:
        content = ask(path, "labelled")
    except UnreadableError as error:
        raise _as_value_error(path, error) from error
    notes = [
        f"{missing} of {total} chunks of {name} are missing and are read as its fill value."
        for name, (missing, total) in content["missing"].items()
    ]
    entries = content["variables"]
    if path.is_dir():  # the arrays of a Zarr group come in the order of the file system
        entries.sort(key=lambda entry: entry["name"])
    variables = {entry["name"]: _variable(path, entry) for entry in entries}
    return Labelled(path, variables, content["attributes"], tuple(notes))


def _variable(path: Path, entry: dict[str, Any]) -> Variable:
    dtype = np.dtype(entry["dtype"])
    return Variable(
        tuple(entry["dims"]), tuple(entry["shape"]), dtype, partial(_box, path, entry["name"], dtype.itemsize),
        entry["attributes"], entry["coordinate"], entry["fault"],
    )  # fmt: skip


def _box(path: Path, name: str, itemsize: int, ranges: Ranges) -> np.ndarray:
    size = itemsize * math.prod(stop - start for start, stop in ranges)
    try:
        return ask(path, "labelled_box", [name, list(ranges)], size)
    except UnreadableError as error:
        raise _as_value_error(path, error) from error


def _as_value_error(path: Path, error: UnreadableError) -> ValueError:
    if str(error) == "kind":
        return ValueError(f"{path} is not a NetCDF file; save it again.")
    return ValueError(f"{path} is truncated or corrupt; copy or download it again.")
