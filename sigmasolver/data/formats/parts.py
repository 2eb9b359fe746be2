"""Several files as one data set: concatenated, and split into train, validation and test by their folders or names."""

from __future__ import annotations

import bisect
import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from sigmasolver.data.formats.source import ForeignData
from sigmasolver.data.layout import Layout
from sigmasolver.data.split import Split

__all__ = ["PARTS", "check_same_layout", "concatenate", "find_sources", "natural_key"]

PARTS = ("train", "validation", "test")
_PATTERNS = {"train": "train(ing)?", "validation": "val(id(ation)?)?", "test": "test(ing)?"}


def natural_key(path: Path) -> tuple[list[str | int], str]:
    """A sort key that puts run2 before run10."""
    pieces = re.split(r"(\d+)", path.name.lower())
    return [int(piece) if index % 2 else piece for index, piece in enumerate(pieces)], path.name


def find_sources(folder: Path, is_source: Callable[[Path], bool]) -> list[tuple[str | None, Path]]:
    """The sources in a folder and in its subfolders train, valid and test, each with its part: train first, test last.

    Outside those subfolders the part may be in the name of a file, as in NavierStokes2D_train_1.h5; None: unknown.
    """
    if not folder.is_dir():
        return []
    sources: list[tuple[str | None, Path]] = []
    for path in _visible(folder):
        if is_source(path):
            sources.append((_part_of(path.stem, exact=False), path))
        elif path.is_dir() and (part := _part_of(path.name, exact=True)) is not None:
            sources += [(part, inner) for inner in _visible(path) if is_source(inner)]
    return sorted(
        sources, key=lambda item: (PARTS.index(item[0]) if item[0] else -1, item[1].parent, natural_key(item[1]))
    )


def _visible(folder: Path) -> Iterable[Path]:
    return (path for path in folder.iterdir() if not path.name.startswith("."))


def _part_of(name: str, exact: bool) -> str | None:
    pieces = [name.lower()] if exact else re.split(r"[^a-z]+", name.lower())
    return next((part for part in PARTS if any(re.fullmatch(_PATTERNS[part], piece) for piece in pieces)), None)


def concatenate(files: Sequence[tuple[str | None, Path]], read: Callable[[Path], ForeignData]) -> ForeignData:
    """The trajectories of these files one after another, with the split given by their parts."""
    opened = [read(file) for _, file in files]
    first, name = opened[0], files[0][1].name
    for (_, file), source in zip(files[1:], opened[1:], strict=True):
        check_same_layout(file, name, source.layout, first.layout)
    ends = list(itertools.accumulate(source.count for source in opened))

    def locate(index: int) -> tuple[ForeignData, int]:
        position = bisect.bisect_right(ends, index)
        return opened[position], index - (ends[position] - opened[position].count)

    def frames(index: int, start: int, stop: int) -> np.ndarray:
        source, row = locate(index)
        if source.frames is not None:
            return source.frames(row, start, stop)
        return source.read(row, row + 1)[0, start:stop]

    def trajectories(start: int, stop: int) -> np.ndarray:
        return np.stack([frames(index, 0, len(first.layout.times)) for index in range(start, stop)])

    split, notes = _split([part for part, _ in files], ends)
    if len(files) > 1:
        notes = [f"{len(files)} sources are concatenated, from {name} to {files[-1][1].name}.", *notes]
    return ForeignData(
        first.layout, ends[-1], trajectories, (*notes, *first.notes), frames=frames, split=split,
        missing=frozenset.intersection(*(source.missing for source in opened)), parameters=first.parameters,
    )  # fmt: skip


def _split(parts: Sequence[str | None], ends: Sequence[int]) -> tuple[Split | None, list[str]]:
    members: dict[str | None, list[int]] = {}
    for part, start, end in zip(parts, [0, *ends], ends, strict=False):
        members.setdefault(part, []).extend(range(start, end))
    if set(members) == {None}:
        return None, []
    if None in members or "train" not in members:
        present = ", ".join(part or "no split" for part in members)
        return None, [f"The files are from {present}, so the split of the data set is not used."]
    split = Split(*(tuple(members.get(part, ())) for part in PARTS))
    sizes = ", ".join(f"{len(members[part])} {part}" for part in PARTS if part in members)
    return split, [f"The split of the data set is used: {sizes}."]


def check_same_layout(file: Path, first: str, layout: Layout, expected: Layout) -> None:
    """Raise ValueError unless the layouts agree in fields, units, boundaries, times and grid."""
    equal = {
        "fields": layout.fields == expected.fields,
        "units": layout.units == expected.units,
        "boundary": layout.boundary == expected.boundary,
        "times": _close(layout.times, expected.times),
        "axes": layout.axis_names == expected.axis_names,
    }
    for name, values, reference in zip(expected.axis_names, layout.coordinates, expected.coordinates, strict=False):
        equal[name] = _close(values, reference)
    for name, same in equal.items():
        if not same:
            raise ValueError(f"{file} and {first} differ in {name}; all must agree.")


def _close(values: np.ndarray, expected: np.ndarray) -> bool:
    return values.shape == expected.shape and np.allclose(values, expected, rtol=1e-6, atol=0, equal_nan=True)
