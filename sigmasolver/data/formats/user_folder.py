"""A folder of a user's own arrays: one file per trajectory, in natural order of the names, read one by one."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np

from sigmasolver.data.formats.fields import check_field, choose
from sigmasolver.data.formats.metadata import stored_names
from sigmasolver.data.formats.parts import check_same_layout, natural_key
from sigmasolver.data.formats.read_options import ReadOptions
from sigmasolver.data.formats.source import WHOLE_TRAJECTORIES, Array, ForeignData
from sigmasolver.data.formats.user_arrays import SUFFIXES, infer_layout, open_arrays

__all__ = ["read_folder", "trajectory_files"]

_MAX_OPEN = 64
_CACHE_BYTES = 512 * 2**20
"""Size of the cache of files that can only be read whole; it holds at least one."""


def trajectory_files(path: Path) -> list[Path]:
    """The array files in a folder, run2 before run10, without hidden files."""
    if not path.is_dir():
        return []
    files = [file for file in path.iterdir() if file.suffix.lower() in SUFFIXES and not file.name.startswith(".")]
    return sorted((file for file in files if file.is_file()), key=natural_key)


def read_folder(path: Path, options: ReadOptions) -> ForeignData:
    """Read one trajectory per file. The first file defines the fields; all others must match it."""
    files = trajectory_files(path)
    if not files:
        raise ValueError(f"{path} contains no array files ({', '.join(SUFFIXES)}).")
    kinds = sorted({file.suffix.lower().replace("hdf5", "h5") for file in files})
    if len(kinds) > 1:
        raise ValueError(f"{path} contains {' and '.join(kinds)} files; keep only the trajectories.")
    first = options.reorder_axes(files[0], open_arrays(files[0]), 0)
    choice = choose(files[0], first, options, 0)
    layout, notes, missing = infer_layout(files[0], first, choice, options)
    shape = first[choice.arrays[0]].shape

    @lru_cache(maxsize=min(_MAX_OPEN, max(1, _CACHE_BYTES // first[choice.arrays[0]].nbytes // len(choice.arrays))))
    def opened(file: Path) -> dict[str, Array]:
        arrays = options.reorder_axes(file, open_arrays(file), 0)
        for name in choice.arrays:
            if name not in arrays:
                raise ValueError(f"{file} has no array {name!r}, but {files[0].name} does; all must agree.")
            if arrays[name].shape != shape:
                raise ValueError(
                    f"{file} has shape {arrays[name].shape}, but the first file has {shape}; all must agree."
                )
            check_field(arrays[name], [""] * len(shape))
        return arrays

    for file in files[1:]:
        arrays = opened(file)
        check_same_layout(file, files[0].name, infer_layout(file, arrays, choice, options)[0], layout)
        if choice.arrays == ("fields",) and stored_names(file, arrays, choice.known) != stored_names(
            files[0], first, choice.known
        ):
            raise ValueError(f"{file} and {files[0].name} differ in names; all must agree.")

    def read(start: int, stop: int) -> np.ndarray:
        values = (choice.take(opened(file), 0, shape[0]) for file in files[start:stop])
        return np.stack([np.array(trajectory) for trajectory in values])

    order = f"Each file is one trajectory, in order from {files[0].name} to {files[-1].name}."
    return ForeignData(
        layout,
        len(files),
        read,
        (order, *notes),
        (WHOLE_TRAJECTORIES,) if any(first[name].load_reason for name in choice.arrays) else (),
        frames=lambda index, start, stop: choice.frames(opened(files[index]), 0, start, stop),
        fields=None if choice.channel_axis else lambda index, *args: choice.apart(opened(files[index]), 0, *args),
        trajectory_files=tuple(files),
        missing=missing,
    )
