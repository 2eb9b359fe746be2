"""The trajectories of RealPDEBench in its two forms, read by windows: Arrow shards and HDF5 files.

A row of an Arrow shard is a full trajectory, and reading the row copies all of it. Here files are memory-mapped, and a
window is a slice of the mapped bytes: only its own pages are read.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from sigmasolver.data.formats.hdf5 import open_hdf5
from sigmasolver.data.formats.source import Array

__all__ = ["CHANNELS", "ArrowFiles", "Hdf5Files", "Trajectories", "shards"]

CHANNELS = (
    "absolute_pressure", "heat_release", "mole_fraction_CH4", "mole_fraction_CO", "mole_fraction_CO2",
    "mole_fraction_H2O", "mole_fraction_NH2", "mole_fraction_NH3", "mole_fraction_OH", "pressure", "temperature",
    "velocity_x", "velocity_y", "velocity_z", "velocity_magnitude",
)  # fmt: skip
"""Channels of the numerical combustion data, in order."""
_FLUID = {"velocity_x": "u", "velocity_y": "v", "pressure": "p"}
_SHARD = re.compile(r"data-(\d+)-of-(\d+)\.arrow")


class Trajectories(ABC):
    """The trajectories of one folder by sim_id, all of one shape."""

    sim_ids: tuple[str, ...]
    shape: tuple[int, int, int]
    """Frames and grid."""
    fields: tuple[str, ...]
    axes: Mapping[str, np.ndarray]
    """"t", "y" and "x" of the first trajectory, as far as stored."""

    @abstractmethod
    def read(self, sim_id: str, start: int, stop: int, fields: Sequence[str]) -> dict[str, np.ndarray]:
        """These fields of the frames from `start` to before `stop`, (frames, *grid); views where the file is mapped."""


def shards(folder: Path) -> list[Path]:
    """The Arrow files of a data set, in order; raises ValueError if one is missing."""
    matches = {path: _SHARD.fullmatch(path.name) for path in sorted(folder.glob("*.arrow"))}
    numbers = {int(match[1]): path for path, match in matches.items() if match}
    counts = {int(match[2]) for match in matches.values() if match}
    count = max(counts, default=0)
    missing = [number for number in range(count) if number not in numbers]
    if missing:
        raise ValueError(
            f"{folder} is incomplete: data-{missing[0]:05}-of-{count:05}.arrow is missing; download it again."
        )
    return list(numbers.values()) or list(matches)


class ArrowFiles(Trajectories):
    """Memory-mapped shards; a field of a trajectory is a view of their bytes."""

    def __init__(self, folder: Path) -> None:
        self._views: dict[str, dict[str, np.ndarray]] = {}
        first: tuple[Path, Any, int] | None = None
        for path in shards(folder):
            for batch in _batches(path):
                for row, sim_id in enumerate(batch.column("sim_id").to_pylist()):
                    if sim_id in self._views:
                        raise ValueError(f"{folder} contains trajectory {sim_id} twice; download it again.")
                    self._views[sim_id] = self._row_views(path, batch, row, sim_id)
                    first = first or (path, batch, row)
        if first is None:
            raise ValueError(f"{folder} contains no trajectories; download it again.")
        self.sim_ids = tuple(self._views)
        views = self._views[self.sim_ids[0]]
        self.fields = tuple(views)
        self.shape = next(iter(views.values())).shape[:3]
        for sim_id, views in self._views.items():
            _check_same(sim_id, tuple(views), next(iter(views.values())).shape[:3], self)
        self.axes = {name: values for name in "tyx" if (values := _axis(*first, name)) is not None}

    @staticmethod
    def _row_views(path: Path, batch: Any, row: int, sim_id: str) -> dict[str, np.ndarray]:
        names = batch.schema.names
        shape = tuple(batch.column(f"shape_{axis}")[row].as_py() for axis in "thw")
        if not all(isinstance(size, int) and size > 0 for size in shape):
            raise ValueError(f"Trajectory {sim_id} in {path} has no shape; download it again.")
        if "observed" in names:
            views = {"intensity": _view(path, batch, "observed", row, sim_id, shape)}
            if "numerical" in names:
                channels = _view(path, batch, "numerical", row, sim_id, (*shape, len(CHANNELS)))
                views |= {name: channels[..., channel] for channel, name in enumerate(CHANNELS)}
            return views
        columns = {name: column for name, column in _FLUID.items() if column in names}
        return {name: _view(path, batch, column, row, sim_id, shape) for name, column in columns.items()}

    def read(self, sim_id: str, start: int, stop: int, fields: Sequence[str]) -> dict[str, np.ndarray]:
        views = self._views[sim_id]
        return {name: views[name][start:stop] for name in fields}


def _batches(path: Path) -> list[Any]:
    try:
        import pyarrow
    except ImportError:
        raise ValueError(f'{path} is an Arrow file; install pyarrow with: pip install "sigmasolver[arrow]"') from None
    try:
        batches = pyarrow.ipc.open_stream(pyarrow.memory_map(str(path))).read_all().to_batches()
    except (pyarrow.ArrowInvalid, pyarrow.ArrowSerializationError, OSError) as error:
        raise ValueError(f"{path} is truncated or corrupt; download it again.") from error
    for batch in batches:
        names = set(batch.schema.names)
        needed = {"sim_id", "shape_t", "shape_h", "shape_w"}
        if "time_id" in names:
            raise ValueError(f"{path} contains precut windows (data version 1); download version 2.")
        if not needed <= names or not ({"u", "v"} <= names or "observed" in names):
            raise ValueError(
                f"{path} has columns {', '.join(sorted(names))}; expected sim_id, shape_t, shape_h, "
                "shape_w and u, v or "
                "observed."
            )
    return batches


def _view(
    path: Path, batch: Any, name: str, row: int, sim_id: str, shape: Sequence[int], dtype: str = "<f4"
) -> np.ndarray:
    """A binary value as an array, without a copy, sliced by the offsets of the column."""
    column = batch.column(name)
    wide = str(column.type) == "large_binary"
    if not wide and str(column.type) != "binary":
        raise ValueError(f"Column {name} of {path} has type {column.type}; expected raw bytes.")
    _, offsets, data = column.buffers()
    begin, end = np.frombuffer(offsets, np.int64 if wide else np.int32)[column.offset + row :][:2]
    values = np.frombuffer(b"" if data is None else data, np.uint8)[begin:end]
    if len(values) != np.dtype(dtype).itemsize * int(np.prod(shape, dtype=np.int64)):
        lengths = " × ".join(map(str, shape))
        raise ValueError(
            f"{name} of {sim_id} in {path} has {len(values)} bytes, which does not match {lengths} numbers; "
            "download it again."
        )
    return values.view(dtype).reshape(shape)


def _axis(path: Path, batch: Any, row: int, name: str) -> np.ndarray | None:
    """Coordinates (1-D, or on the grid) or times of a trajectory; None without."""
    lengths = [
        column for column in (f"{name}_shape", f"{name}_shape_h", f"{name}_shape_w") if column in batch.schema.names
    ]
    if name not in batch.schema.names or not lengths or not batch.column(name)[row].is_valid:
        return None
    shape = [batch.column(column)[row].as_py() for column in lengths]
    return None if None in shape else _view(path, batch, name, row, f"row {row}", shape, "<f8")


class Hdf5Files(Trajectories):
    """A folder with one HDF5 file per trajectory."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.sim_ids = tuple(sorted(path.name for path in folder.glob("*.h5")))
        if not self.sim_ids:
            raise ValueError(f"{folder} contains no trajectories (sim_id.h5); download it again.")
        self._opened: dict[str, dict[str, tuple[Array, int | None]]] = {}
        fields = self._open(self.sim_ids[0])
        self.fields, self.shape = tuple(fields), _shape(fields)
        for sim_id in self.sim_ids:  # fail on a corrupt file now rather than during training
            _check_same(sim_id, tuple(self._open(sim_id)), _shape(self._open(sim_id)), self)
        arrays = open_hdf5(folder / self.sim_ids[0])
        names = {"t": ("t", "time", "measured_data/t"), "y": ("y",), "x": ("x",)}
        axes = {axis: next((arrays[name] for name in known if name in arrays), None) for axis, known in names.items()}
        self.axes = {axis: array.whole() for axis, array in axes.items() if array is not None}

    def _open(self, sim_id: str) -> dict[str, tuple[Array, int | None]]:
        """The fields of a trajectory: arrays (frames, *grid), or an array with channels last and a channel."""
        if sim_id not in self._opened:
            arrays = _open_mapped(self._folder / sim_id)
            fields = _fluid_fields(arrays) or self._flame_fields(arrays, sim_id)
            if not fields or any(len(array.shape) < 3 for array, _ in fields.values()):
                raise ValueError(
                    f"{self._folder / sim_id} contains {', '.join(arrays) or 'nothing'}; expected measured_data/u and "
                    "measured_data/v, or trajectory, with axes (frames, height, width)."
                )
            self._opened[sim_id] = fields
        return self._opened[sim_id]

    def _flame_fields(self, arrays: Mapping[str, Array], sim_id: str) -> dict[str, tuple[Array, int | None]]:
        if "trajectory" in arrays:
            return {"intensity": (arrays["trajectory"], None)}
        numerical = arrays.get("measured_data")
        if numerical is None or numerical.shape[3:] != (len(CHANNELS),):
            return {}
        surrogate = self._folder.parent / "surrogate" / sim_id
        observed = _open_mapped(surrogate).get("measured_data") if surrogate.exists() else None
        intensity: dict[str, tuple[Array, int | None]] = {} if observed is None else {"intensity": (observed, None)}
        return intensity | {name: (numerical, channel) for channel, name in enumerate(CHANNELS)}

    def read(self, sim_id: str, start: int, stop: int, fields: Sequence[str]) -> dict[str, np.ndarray]:
        opened = self._open(sim_id)
        arrays = {opened[name][0].where: opened[name][0] for name in fields}  # fields may be channels of one array
        values = {where: array.rows(start, stop) for where, array in arrays.items()}
        result = {}
        for name in fields:
            array, channel = opened[name]
            result[name] = values[array.where] if channel is None else values[array.where][..., channel]
        return result


def _open_mapped(path: Path) -> dict[str, Array]:
    """The arrays of a file; those that are contiguous and uncompressed are memory-mapped."""
    arrays = open_hdf5(path)  # in a separate process: a corrupt file is rejected before it is opened here
    mapped = dict(arrays)
    with h5py.File(path) as file:
        for name, array in arrays.items():
            dataset = None if array.fault or not array.real else file[name]
            if (
                dataset is None
                or dataset.chunks is not None
                or dataset.external
                or dataset.is_virtual
                or file.userblock_size
            ):
                continue
            offset = dataset.id.get_offset()
            if offset is not None:
                values = np.memmap(path, dataset.dtype, "r", offset, dataset.shape)
                mapped[name] = replace(array, rows=partial(_slice_rows, values))
    return mapped


def _slice_rows(values: np.ndarray, start: int, stop: int) -> np.ndarray:
    return values[start:stop]


def _fluid_fields(arrays: Mapping[str, Array]) -> dict[str, tuple[Array, int | None]]:
    paths = {name: f"measured_data/{column}" for name, column in _FLUID.items() if f"measured_data/{column}" in arrays}
    return {name: (arrays[path], None) for name, path in paths.items()}


def _shape(fields: Mapping[str, tuple[Array, int | None]]) -> tuple[int, int, int]:
    frames, height, width = next(iter(fields.values()))[0].shape[:3]
    return frames, height, width


def _check_same(sim_id: str, fields: tuple[str, ...], shape: tuple[int, ...], reference: Trajectories) -> None:
    if (fields, shape) != (reference.fields, reference.shape):
        raise ValueError(
            f"Trajectory {sim_id} has {', '.join(fields)} of shape {shape}, but {reference.sim_ids[0]} has "
            f"{', '.join(reference.fields)} of shape {reference.shape}; remove one of them."
        )
