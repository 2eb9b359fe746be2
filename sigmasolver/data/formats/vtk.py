"""Series of VTK image files, read as trajectories.

    flow.pvd                          one trajectory: its files and their times
    a folder of flow_0.vti, ...       one trajectory per name, in the order of the numbers
    a folder of these, or of .pvd     one trajectory each; folders train, valid and test define a split

The time of a frame is that of the .pvd, else the file's TimeValue, else the number in its name.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np

from sigmasolver.data.formats.dimensions import CHANNEL, TIME
from sigmasolver.data.formats.labelled import Labelled, Variable, as_trajectories, coordinate
from sigmasolver.data.formats.parts import concatenate, find_sources, natural_key
from sigmasolver.data.formats.source import ForeignData, Ranges, listed
from sigmasolver.data.formats.vtk_image import SUFFIXES, Image, open_image
from sigmasolver.data.isolated import check_file

__all__ = ["is_vtk", "read_vtk"]

_TIME_KEYS = ("TimeValue", "TIME", "time")
_COMPONENTS = {2: ("x", "y"), 3: ("x", "y", "z"), 6: ("xx", "yy", "zz", "xy", "yz", "xz"), 9: (
    "xx", "xy", "xz", "yx", "yy", "yz", "zx", "zy", "zz")}  # fmt: skip


@dataclass(frozen=True)
class Series:
    """The frames of one trajectory."""

    files: tuple[Path, ...]
    times: tuple[float, ...] | None = None
    """None: the files may contain them."""


def is_vtk(path: Path) -> bool:
    return bool(_sources(path))


def read_vtk(path: Path, names: Sequence[str] | None = None, steady: bool | None = None) -> ForeignData:
    """Read all trajectories of a file or folder."""
    series: dict[Path, Series] = {}
    files: list[tuple[str | None, Path]] = []
    for part, source in _sources(path):
        for name, frames in _find_series(source).items():
            series[name] = frames
            files.append((part, name))
    if not files:
        raise ValueError(f"{path} contains no VTK image data (.vti, .vtk or .pvd).")
    return concatenate(files, lambda name: as_trajectories(_open_labelled(name, series[name]), names, steady))


def _sources(path: Path) -> list[tuple[str | None, Path]]:
    if _is_series(path):
        return [(None, path)]
    return find_sources(path, _is_series)


def _is_series(path: Path) -> bool:
    if path.is_file():
        return path.suffix.lower() in (*SUFFIXES, ".pvd")
    return path.is_dir() and any(
        file.is_file() and file.suffix.lower() in (*SUFFIXES, ".pvd") and not file.name.startswith(".")
        for file in path.iterdir()
    )


def _find_series(source: Path) -> dict[Path, Series]:
    """The series of a source by name: a .pvd, a single file, or files that differ only in the last number."""
    if source.is_file():
        return {source: _read_pvd(source) if source.suffix.lower() == ".pvd" else Series((source,))}
    content = sorted((file for file in source.iterdir() if not file.name.startswith(".")), key=natural_key)
    collections = [file for file in content if file.suffix.lower() == ".pvd"]
    if collections:
        return {file: _read_pvd(file) for file in collections}
    groups: dict[Path, list[Path]] = {}
    for file in content:
        if file.suffix.lower() in SUFFIXES:
            groups.setdefault(source / f"{re.sub(r'[0-9]+$', '', file.stem)}*{file.suffix}", []).append(file)
    if len(groups) == 1:  # the trajectory is named after the folder
        return {source: Series(tuple(next(iter(groups.values()))))}
    return {name: Series(tuple(files)) for name, files in groups.items()}


def _read_pvd(path: Path) -> Series:
    """The files and times of a .pvd."""
    check_file(path)
    data = path.read_bytes()
    try:
        if b"<!" in data.replace(b"<!--", b""):
            raise ValueError
        entries = [
            (float(element.get("timestep", "nan")), path.parent / element.get("file", ""))
            for element in ElementTree.fromstring(data).iterfind("Collection/DataSet")
        ]
    except (ElementTree.ParseError, ValueError):
        raise ValueError(f"{path} is truncated or corrupt; copy or write it again.") from None
    if not entries:
        raise ValueError(f"{path} lists no files; write it with its time steps.")
    missing = [file.name for _, file in entries if not file.is_file()]
    if missing:
        raise ValueError(f"{path} lists files that do not exist: {listed(missing)}; copy them too.")
    times = tuple(time for time, _ in entries)
    return Series(tuple(file for _, file in entries), None if np.isnan(times).any() else times)


def _open_labelled(name: Path, series: Series) -> Labelled:
    """Variables with dimensions time, z, y, x and components; the first file defines the fields."""
    first = open_image(series.files[0])
    times, notes = _times(series, first)
    if first.skipped:
        notes.append(f"Skipped cell data: {listed(first.skipped)}.")
    attributes = {key: value for key, value in first.field_data.items() if key not in _TIME_KEYS}
    variables = {letter: coordinate(letter, axis) for letter, axis in zip("xyz", first.axes, strict=True)}
    if times is not None:
        variables[TIME] = coordinate(TIME, times)
    for key, array in first.arrays.items():
        components = array.shape[3:]
        labels = _COMPONENTS.get(components[0], tuple(map(str, range(components[0])))) if components else ()
        variables[key] = Variable(
            (TIME, "z", "y", "x", *[CHANNEL] * len(components)),
            (len(series.files), *array.shape),
            array.dtype,
            partial(_read_frames, series, key, array.shape),
            {} if array.unit is None else {"units": array.unit},
            labels=labels,
        )
    return Labelled(name, variables, attributes, tuple(notes))


def _read_frames(series: Series, key: str, shape: tuple[int, ...], ranges: Ranges) -> np.ndarray:
    """Read a range of frames, each from its own file."""
    (start, stop), inner = ranges[0], tuple(slice(*bounds) for bounds in ranges[1:])
    frames = []
    for file in series.files[start:stop]:
        array = open_image(file).arrays.get(key)
        if array is None:
            raise ValueError(f"{file} has no array {key!r}, but {series.files[0].name} does; all must agree.")
        if array.shape != shape:
            raise ValueError(
                f"{file} has {key!r} of shape {array.shape}, but the first file has {shape}; all must agree."
            )
        frames.append(array.read()[inner])
    return np.stack(frames)


def _times(series: Series, first: Image) -> tuple[np.ndarray | None, list[str]]:
    if series.times is not None:
        return np.array(series.times, dtype=np.float64), []
    time_key = next((name for name in _TIME_KEYS if isinstance(first.field_data.get(name), int | float)), None)
    if time_key is not None:
        values: list[Any] = [open_image(file).field_data.get(time_key) for file in series.files]
        if None in values:
            file = series.files[values.index(None)]
            raise ValueError(f"{file} has no {time_key}, but {series.files[0].name} does; all must agree.")
        return np.array(values, dtype=np.float64), []
    matches = [re.search(r"(\d+)$", file.stem) for file in series.files]
    if len(series.files) == 1 or not all(matches):
        return None, []
    return np.array([float(match[1]) for match in matches if match]), [
        "No TimeValue: the numbers in the file names are used as times."
    ]
