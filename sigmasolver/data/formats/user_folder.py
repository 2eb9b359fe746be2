"""A folder of a user's own arrays: one file per trajectory, in the natural order of their names, read one by one."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np

from sigmasolver.data.formats.fields import check_field, choose
from sigmasolver.data.formats.metadata import own_names
from sigmasolver.data.formats.parts import check_alike, natural
from sigmasolver.data.formats.reading import Reading
from sigmasolver.data.formats.source import WHOLE_TRAJECTORIES, Array, Foreign
from sigmasolver.data.formats.user_arrays import SUFFIXES, describe, open_arrays

__all__ = ["read_folder", "trajectory_files"]

_MOST_OPEN = 64
_KEPT = 512 * 2**20
"""Bytes of files that stay in memory after they were read, where they can only be read whole; at least one does."""


def trajectory_files(path: Path) -> list[Path]:
    """The files with arrays in a folder, run2 before run10; what other programs hide there is left alone."""
    if not path.is_dir():
        return []
    files = [one for one in path.iterdir() if one.suffix.lower() in SUFFIXES and not one.name.startswith(".")]
    return sorted((one for one in files if one.is_file()), key=natural)


def read_folder(path: Path, reading: Reading) -> Foreign:
    """One trajectory per file. The first file says what the fields are; all others must be like it."""
    files = trajectory_files(path)
    if not files:
        raise ValueError(f"{path} contains no array files ({', '.join(SUFFIXES)}).")
    kinds = sorted({file.suffix.lower().replace("hdf5", "h5") for file in files})
    if len(kinds) > 1:
        raise ValueError(f"{path} contains {' and '.join(kinds)} files; keep only the trajectories.")
    first = reading.arranged(files[0], open_arrays(files[0]), 0)
    choice = choose(files[0], first, reading, 0)
    layout, notes = describe(files[0], first, choice, reading)
    shape = first[choice.arrays[0]].shape

    @lru_cache(maxsize=min(_MOST_OPEN, max(1, _KEPT // first[choice.arrays[0]].nbytes // len(choice.arrays))))
    def opened(file: Path) -> dict[str, Array]:
        arrays = reading.arranged(file, open_arrays(file), 0)
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
        check_alike(file, files[0].name, describe(file, arrays, choice, reading)[0], layout)
        if choice.arrays == ("fields",) and own_names(file, arrays, choice.known) != own_names(
            files[0], first, choice.known
        ):
            raise ValueError(f"{file} and {files[0].name} differ in names; all must agree.")

    def read(start: int, stop: int) -> np.ndarray:
        values = (choice.take(opened(file), 0, shape[0]) for file in files[start:stop])
        return np.stack([np.array(one) for one in values])

    order = f"Each file is one trajectory, in order from {files[0].name} to {files[-1].name}."
    return Foreign(
        layout,
        len(files),
        read,
        (order, *notes),
        (WHOLE_TRAJECTORIES,) if any(first[name].whole_only for name in choice.arrays) else (),
        frames=lambda index, start, stop: choice.frames(opened(files[index]), 0, start, stop),
        fields=None if choice.channel_axis else lambda index, *which: choice.apart(opened(files[index]), 0, *which),
        trajectory_files=tuple(files),
    )
