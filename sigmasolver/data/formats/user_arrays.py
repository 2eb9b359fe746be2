"""A user's own arrays, all trajectories in one file; missing metadata are filled in with defaults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from sigmasolver.data.formats.arrays import open_npy, open_npz
from sigmasolver.data.formats.fields import UNNAMED, Choice, choose
from sigmasolver.data.formats.hdf5 import open_hdf5
from sigmasolver.data.formats.metadata import check_strings, is_list, read_list
from sigmasolver.data.formats.read_options import ReadOptions
from sigmasolver.data.formats.source import Array, ForeignData, cache_notes, sliceable_or_cached
from sigmasolver.data.formats.torch_file import open_tensors
from sigmasolver.data.layout import Layout

__all__ = ["SUFFIXES", "infer_layout", "open_arrays", "read_file"]

SUFFIXES = (".npy", ".npz", ".h5", ".hdf5", ".pt")


def open_arrays(path: Path) -> dict[str, Array]:
    """The arrays of a file by name; that of an .npy, or a single one that `np.savez` named arr_0, is unnamed."""
    if path.suffix.lower() == ".npy":
        values = open_npy(path)
        rows = (lambda start, stop: values[start:stop]) if values.ndim else (lambda start, stop: values)
        box = lambda ranges: values[tuple(slice(*bounds) for bounds in ranges)]  # noqa: E731
        return {UNNAMED: Array(str(path), values.shape, values.dtype, rows, box=box)}
    if path.suffix.lower() == ".npz":
        arrays = open_npz(path)
        return {UNNAMED: arrays["arr_0"]} if list(arrays) == ["arr_0"] else arrays
    if path.suffix.lower() == ".pt":
        return open_tensors(path)
    if path.suffix.lower() in SUFFIXES:
        return open_hdf5(path)
    raise ValueError(f"{path} is not an array file ({', '.join(SUFFIXES)}).")


def read_file(path: Path, options: ReadOptions) -> ForeignData:
    """Read a file with all trajectories; missing metadata are filled in and noted."""
    arrays = options.reorder_axes(path, open_arrays(path), 1)
    choice = choose(path, arrays, options, 1)
    layout, notes = infer_layout(path, arrays, choice, options)
    count = arrays[choice.arrays[0]].shape[0]
    windowed = {name: sliceable_or_cached(arrays[name]) for name in choice.arrays}
    return ForeignData(
        layout,
        count,
        lambda start, stop: choice.take(arrays, start, stop),
        notes,
        cache_notes(windowed.values()),
        frames=lambda index, start, stop: choice.frames(windowed, index, start, stop),
        fields=None if choice.channel_axis else lambda *args: choice.apart(windowed, *args),
    )


def infer_layout(
    path: Path, arrays: Mapping[str, Array], choice: Choice, options: ReadOptions
) -> tuple[Layout, tuple[str, ...]]:
    """The layout of the chosen arrays, with a note on each default that neither the file nor the user specifies."""
    notes = list(choice.notes)
    specified = {"units": options.units, "boundary": options.boundary, "times": options.dt}
    frames, *grid = choice.shape

    def metadata_for(name: str, size: int, kind: str, default: Sequence[str] | np.ndarray, meaning: str) -> np.ndarray:
        source = "t" if name == "times" and not is_list(arrays.get("times")) else name
        if source not in choice.arrays and is_list(arrays.get(source)):
            return read_list(path, arrays, source, size, kind)
        if specified.get(name) is None and (name != "times" or not choice.steady):
            notes.append(f"No {name}: assumed {meaning}.")
        return np.asarray(default)

    if choice.fields is None:
        notes.append("No names: assumed field_0, field_1, ….")
    units = check_strings(
        f"The units in {path}", metadata_for("units", choice.known, "words", ["1"] * choice.known, "dimensionless")
    )
    boundary = metadata_for("boundary", len(grid), "words", ["open"] * len(grid), "open on every axis")
    layout = Layout(
        fields=choice.fields or tuple(f"field_{channel}" for channel in choice.places),
        units=tuple(units[channel] for channel in choice.places),
        boundary=check_strings(f"The boundaries in {path}", boundary),
        coordinates=tuple(
            metadata_for(name, points, "numbers", np.arange(points, dtype=np.float64), "0, 1, 2, …")
            for name, points in zip("xyz", grid, strict=False)
        ),
        times=metadata_for("times", frames, "numbers", np.arange(frames, dtype=np.float64), "0, 1, 2, …"),
    )
    return options.applied(layout), tuple(notes)
