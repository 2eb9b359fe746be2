"""Trajectories written as NetCDF or Zarr: one variable per field, with coordinates, units, times and attributes."""

from __future__ import annotations

import io
import json
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sigmasolver.data.formats.labelled import MARK
from sigmasolver.data.header import Header
from sigmasolver.data.isolated import EXTRA
from sigmasolver.runs.files import making_folder, plain_errors, replacing

if TYPE_CHECKING:
    import xarray

__all__ = ["as_dataset", "require_xarray", "write_netcdf", "write_zarr"]


def require_xarray(out: Path) -> None:
    """Refuse a file that these packages would be needed for, before anything is computed."""
    try:
        import h5netcdf  # noqa: F401
        import xarray  # noqa: F401
        import zarr  # noqa: F401
    except ImportError:
        raise ValueError(f"{out} needs xarray, h5netcdf and zarr to be written; install them with {EXTRA}.") from None


def as_dataset(trajectories: np.ndarray, header: Header) -> xarray.Dataset:
    """Trajectories `(count, frames, *grid, fields)` with everything that their header says.

    Axes have the names and attributes of the files that the header came from, else x, y, z and time.
    """
    import xarray

    layout, kept = header.layout, _attributes(header)
    axes = {letter: kept["axes"].get(letter, {}) for letter in (*"xyz"[: len(layout.coordinates)], "t")}
    names = {letter: str(said.get("name", "time" if letter == "t" else letter)) for letter, said in axes.items()}
    inner = {letter: {key: value for key, value in said.items() if key != "name"} for letter, said in axes.items()}
    for letter, boundary in zip("xyz", layout.boundary, strict=False):
        inner[letter]["boundary"] = boundary
        inner[letter].setdefault("axis", letter.upper())
    inner["t"].setdefault("axis", "T")
    values = dict(zip("xyz", layout.coordinates, strict=False)) | {"t": layout.times}
    dims = ("trajectory", names["t"], *(names[letter] for letter in "xyz"[: len(layout.coordinates)]))
    fields = {
        name: (dims, trajectories[..., place], {**kept["fields"].get(name, {}), "units": layout.units[place]})
        for place, name in enumerate(layout.fields)
    }
    coordinates = {names[letter]: ((names[letter],), values[letter], inner[letter]) for letter in names}
    # A Zarr group has no order of its arrays.
    made = {
        "source": header.source,
        "parameters": _without(header.parameters),
        "seed": header.seed,
        "fields": layout.fields,
    }
    about = {"Conventions": "CF-1.11", **kept["data set"], MARK: json.dumps(made)}
    return xarray.Dataset(fields, coordinates, about)


def write_netcdf(out: Path, trajectories: np.ndarray, header: Header, compress: bool = False) -> None:
    """A NetCDF 4 file whose chunks are frames; it has its name only once it is complete."""
    require_xarray(out)
    dataset = as_dataset(trajectories, header)
    options: dict[str, Any] = {"chunksizes": (1, 1, *header.grid), "_FillValue": None}
    if compress:
        options |= {"zlib": True, "shuffle": True}
    encoding = {name: options for name in dataset.data_vars} | {name: {"_FillValue": None} for name in dataset.coords}
    with plain_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        with replacing(out) as file:
            assert isinstance(file, io.IOBase)
            dataset.to_netcdf(file, engine="h5netcdf", encoding=encoding)


def write_zarr(out: Path, trajectories: np.ndarray, header: Header, version: int = 3) -> None:
    """A Zarr group whose chunks are frames; it has its name only once it is complete."""
    require_xarray(out)
    dataset = as_dataset(trajectories, header)
    encoding = {name: {"chunks": (1, 1, *header.grid)} for name in dataset.data_vars}
    with plain_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        with making_folder(out) as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # consolidated metadata are what xarray writes by default
            dataset.to_zarr(folder, zarr_format=version, encoding=encoding, mode="w")


def _attributes(header: Header) -> dict[str, Any]:
    kept = dict(header.parameters.get("attributes", {}))
    return {part: dict(kept.get(part, {})) for part in ("data set", "fields", "axes")}


def _without(parameters: Any) -> dict[str, Any]:
    """The attributes stand where they belong."""
    return {name: value for name, value in parameters.items() if name != "attributes"}
