"""Series of VTK image files as trajectories.

    flow.pvd                          one trajectory: its files and their times
    a folder of flow_0.vti, ...       one trajectory per name, in the order of the numbers
    a folder of such, or of .pvd      one trajectory each; folders train, valid and test make a split

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
from sigmasolver.data.formats.parts import in_parts, joined, natural
from sigmasolver.data.formats.source import Foreign, Ranges, listed
from sigmasolver.data.formats.vtk_image import SUFFIXES, Image, open_image
from sigmasolver.data.isolated import check_file

__all__ = ["is_vtk", "read_vtk"]

_CLOCK = ("TimeValue", "TIME", "time")
_COMPONENTS = {2: ("x", "y"), 3: ("x", "y", "z"), 6: ("xx", "yy", "zz", "xy", "yz", "xz"), 9: (
    "xx", "xy", "xz", "yx", "yy", "yz", "zx", "zy", "zz")}  # fmt: skip


@dataclass(frozen=True)
class Series:
    """The frames of one trajectory."""

    files: tuple[Path, ...]
    times: tuple[float, ...] | None = None
    """None: the files themselves may say."""


def is_vtk(path: Path) -> bool:
    return bool(_sources(path))


def read_vtk(path: Path, names: Sequence[str] | None = None, steady: bool | None = None) -> Foreign:
    """All trajectories of a file or folder."""
    series: dict[Path, Series] = {}
    files: list[tuple[str | None, Path]] = []
    for part, source in _sources(path):
        for name, one in _series(source).items():
            series[name] = one
            files.append((part, name))
    if not files:
        raise ValueError(f"{path} contains no VTK image data (.vti, .vtk or .pvd).")
    return joined(files, lambda name: as_trajectories(_labelled(name, series[name]), names, steady))


def _sources(path: Path) -> list[tuple[str | None, Path]]:
    if _is_series(path):
        return [(None, path)]
    return in_parts(path, _is_series)


def _is_series(path: Path) -> bool:
    if path.is_file():
        return path.suffix.lower() in (*SUFFIXES, ".pvd")
    return path.is_dir() and any(
        one.is_file() and one.suffix.lower() in (*SUFFIXES, ".pvd") and not one.name.startswith(".")
        for one in path.iterdir()
    )


def _series(source: Path) -> dict[Path, Series]:
    """By a name for each: of a .pvd, of a single file, or of a folder whose files differ in their last number only."""
    if source.is_file():
        return {source: _collection(source) if source.suffix.lower() == ".pvd" else Series((source,))}
    inside = sorted((one for one in source.iterdir() if not one.name.startswith(".")), key=natural)
    collections = [one for one in inside if one.suffix.lower() == ".pvd"]
    if collections:
        return {one: _collection(one) for one in collections}
    groups: dict[Path, list[Path]] = {}
    for one in inside:
        if one.suffix.lower() in SUFFIXES:
            groups.setdefault(source / f"{re.sub(r'[0-9]+$', '', one.stem)}*{one.suffix}", []).append(one)
    if len(groups) == 1:  # the folder is the trajectory
        return {source: Series(tuple(next(iter(groups.values()))))}
    return {name: Series(tuple(files)) for name, files in groups.items()}


def _collection(path: Path) -> Series:
    """The files and times of a .pvd."""
    check_file(path)
    data = path.read_bytes()
    try:
        if b"<!" in data.replace(b"<!--", b""):
            raise ValueError
        entries = [
            (float(one.get("timestep", "nan")), path.parent / one.get("file", ""))
            for one in ElementTree.fromstring(data).iterfind("Collection/DataSet")
        ]
    except (ElementTree.ParseError, ValueError):
        raise ValueError(f"{path} is truncated or corrupt; copy or write it again.") from None
    if not entries:
        raise ValueError(f"{path} lists no files; write it with its time steps.")
    gone = [file.name for _, file in entries if not file.is_file()]
    if gone:
        raise ValueError(f"{path} lists files that do not exist: {listed(gone)}; copy them too.")
    times = tuple(time for time, _ in entries)
    return Series(tuple(file for _, file in entries), None if np.isnan(times).any() else times)


def _labelled(name: Path, series: Series) -> Labelled:
    """Dimensions time, z, y, x and components; the first file says what the fields are."""
    first = open_image(series.files[0])
    times, notes = _times(series, first)
    if first.others:
        notes.append(f"Skipped cell data: {listed(first.others)}.")
    said = {key: value for key, value in first.values.items() if key not in _CLOCK}
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
            partial(_frames, series, key, array.shape),
            {} if array.unit is None else {"units": array.unit},
            labels=labels,
        )
    return Labelled(name, variables, said, tuple(notes))


def _frames(series: Series, key: str, shape: tuple[int, ...], ranges: Ranges) -> np.ndarray:
    """Whole frames: each is one file."""
    (start, stop), inner = ranges[0], tuple(slice(*one) for one in ranges[1:])
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
    clock = next((name for name in _CLOCK if isinstance(first.values.get(name), int | float)), None)
    if clock is not None:
        values: list[Any] = [open_image(file).values.get(clock) for file in series.files]
        if None in values:
            file = series.files[values.index(None)]
            raise ValueError(f"{file} has no {clock}, but {series.files[0].name} does; all must agree.")
        return np.array(values, dtype=np.float64), []
    numbers = [re.search(r"(\d+)$", file.stem) for file in series.files]
    if len(series.files) == 1 or not all(numbers):
        return None, []
    return np.array([float(one[1]) for one in numbers if one]), [
        "No TimeValue: the numbers in the file names are used as times."
    ]
