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
    layout, notes, missing = infer_layout(path, arrays, choice, options)
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
        missing=missing,
    )


def infer_layout(
    path: Path, arrays: Mapping[str, Array], choice: Choice, options: ReadOptions
) -> tuple[Layout, tuple[str, ...], frozenset[str]]:
    """The layout of the chosen arrays, with a note on each default that neither the file nor the user specifies, and
    the parts that are not in the file (see `ForeignData.missing`)."""
    notes, missing = list(choice.notes), set[str]()
    specified = {"units": options.units, "boundary": options.boundary, "times": options.dt}
    frames, *grid = choice.shape

    def metadata_for(name: str, size: int, kind: str, default: Sequence[str] | np.ndarray, meaning: str) -> np.ndarray:
        source = "t" if name == "times" and not is_list(arrays.get("times")) else name
        if source not in choice.arrays and is_list(arrays.get(source)):
            return read_list(path, arrays, source, size, kind)
        missing.add(name)
        if specified.get(name) is None and (name != "times" or not choice.steady):
            notes.append(f"No {name}: assumed {meaning}.")
        return np.asarray(default)

    if choice.fields is None:
        notes.append("No names: assumed field_0, field_1, ….")
    units = check_strings(
        f"The units in {path}", metadata_for("units", choice.known, "words", ["1"] * choice.known, "dimensionless")
    )
    axes = _axis_names(path, arrays, choice, options)
    boundary = metadata_for("boundary", len(grid), "words", ["open"] * len(grid), "open on every axis")
    layout = Layout(
        fields=choice.fields or tuple(f"field_{channel}" for channel in choice.places),
        units=tuple(units[channel] for channel in choice.places),
        boundary=check_strings(f"The boundaries in {path}", boundary),
        coordinates=tuple(
            metadata_for(name, points, "numbers", np.arange(points, dtype=np.float64), "0, 1, 2, …")
            for name, points in zip(axes or "xyz", grid, strict=False)
        ),
        times=metadata_for("times", frames, "numbers", np.arange(frames, dtype=np.float64), "0, 1, 2, …"),
        axes=axes,
    )
    if not axes and missing.issuperset("xyz"[: len(grid)]):
        missing.add("axes")
    layout = options.applied(layout, missing)
    for name, values in zip(("times", *layout.axis_names), (layout.times, *layout.coordinates), strict=True):
        numbers = np.asarray(values, dtype=np.float64)
        if not np.isfinite(numbers).all() or bool((np.diff(numbers) <= 0).any()):
            raise ValueError(f"The {name} in {path} must be finite, increasing numbers.")
    return layout, tuple(notes), frozenset(missing)


def _axis_names(path: Path, arrays: Mapping[str, Array], choice: Choice, options: ReadOptions) -> tuple[str, ...]:
    """The names of the spatial axes if the file lists them in another order than x, y, z; `options.axes` overrides."""
    default = "xyz"[: len(choice.shape) - 1]
    transposed = options.axes is not None and [name for name in options.axes if name in default] != list(default)
    if transposed or "axes" in choice.arrays or not is_list(arrays.get("axes")):
        return ()
    names = check_strings(f"The axes in {path}", read_list(path, arrays, "axes", len(default), "words"))
    if sorted(names) != list(default):
        raise ValueError(f"The axes in {path} are {', '.join(names)}; expected {', '.join(default)} in any order.")
    return () if names == tuple(default) else names
