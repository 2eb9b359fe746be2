"""Several files as one data set: one after another, and in the parts train, validation and test where their folders or
names say so."""

from __future__ import annotations

import bisect
import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from sigmasolver.data.formats.source import Foreign
from sigmasolver.data.layout import Layout
from sigmasolver.data.split import Split

__all__ = ["PARTS", "check_alike", "in_parts", "joined", "natural"]

PARTS = ("train", "validation", "test")
_WORDS = {"train": "train(ing)?", "validation": "val(id(ation)?)?", "test": "test(ing)?"}


def natural(path: Path) -> tuple[list[str | int], str]:
    """run2 before run10."""
    pieces = re.split(r"(\d+)", path.name.lower())
    return [int(piece) if place % 2 else piece for place, piece in enumerate(pieces)], path.name


def in_parts(folder: Path, fits: Callable[[Path], bool]) -> list[tuple[str | None, Path]]:
    """What fits in a folder and in its folders train, valid and test, each with its part: train first, test last.

    Outside those folders the name of a file may say its part, as in NavierStokes2D_train_1.h5; None: nothing says.
    """
    if not folder.is_dir():
        return []
    found: list[tuple[str | None, Path]] = []
    for one in _seen(folder):
        if fits(one):
            found.append((_part(one.stem, whole=False), one))
        elif one.is_dir() and (part := _part(one.name, whole=True)) is not None:
            found += [(part, inner) for inner in _seen(one) if fits(inner)]
    return sorted(found, key=lambda item: (PARTS.index(item[0]) if item[0] else -1, item[1].parent, natural(item[1])))


def _seen(folder: Path) -> Iterable[Path]:
    return (one for one in folder.iterdir() if not one.name.startswith("."))


def _part(name: str, whole: bool) -> str | None:
    pieces = [name.lower()] if whole else re.split(r"[^a-z]+", name.lower())
    return next((part for part in PARTS if any(re.fullmatch(_WORDS[part], piece) for piece in pieces)), None)


def joined(files: Sequence[tuple[str | None, Path]], read: Callable[[Path], Foreign]) -> Foreign:
    """The trajectories of these files one after another, with the split that their parts make."""
    opened = [read(file) for _, file in files]
    first, name = opened[0], files[0][1].name
    for (_, file), other in zip(files[1:], opened[1:], strict=True):
        check_alike(file, name, other.layout, first.layout)
    ends = list(itertools.accumulate(one.count for one in opened))

    def held_in(index: int) -> tuple[Foreign, int]:
        place = bisect.bisect_right(ends, index)
        return opened[place], index - (ends[place] - opened[place].count)

    def frames(index: int, start: int, stop: int) -> np.ndarray:
        source, row = held_in(index)
        if source.frames is not None:
            return source.frames(row, start, stop)
        return source.read(row, row + 1)[0, start:stop]

    def whole(start: int, stop: int) -> np.ndarray:
        return np.stack([frames(index, 0, len(first.layout.times)) for index in range(start, stop)])

    split, notes = _split([part for part, _ in files], ends)
    if len(files) > 1:
        notes = [f"{len(files)} sources are concatenated, from {name} to {files[-1][1].name}.", *notes]
    return Foreign(
        first.layout, ends[-1], whole, (*notes, *first.notes), frames=frames, split=split,
        parameters=first.parameters,
    )  # fmt: skip


def _split(parts: Sequence[str | None], ends: Sequence[int]) -> tuple[Split | None, list[str]]:
    members: dict[str | None, list[int]] = {}
    for part, start, end in zip(parts, [0, *ends], ends, strict=False):
        members.setdefault(part, []).extend(range(start, end))
    if set(members) == {None}:
        return None, []
    if None in members or "train" not in members:
        there = ", ".join(part or "no split" for part in members)
        return None, [f"The files are from {there}, so the split of the data set is not used."]
    split = Split(*(tuple(members.get(part, ())) for part in PARTS))
    sizes = ", ".join(f"{len(members[part])} {part}" for part in PARTS if part in members)
    return split, [f"The split of the data set is used: {sizes}."]


def check_alike(file: Path, first: str, layout: Layout, wanted: Layout) -> None:
    """One data set has one grid, one list of times, and one meaning of its fields."""
    pairs = {
        "fields": layout.fields == wanted.fields,
        "units": layout.units == wanted.units,
        "boundary": layout.boundary == wanted.boundary,
        "times": _close(layout.times, wanted.times),
        "axes": layout.axis_names == wanted.axis_names,
    }
    for name, values, others in zip(wanted.axis_names, layout.coordinates, wanted.coordinates, strict=False):
        pairs[name] = _close(values, others)
    for name, alike in pairs.items():
        if not alike:
            raise ValueError(f"{file} and {first} differ in {name}; all must agree.")


def _close(values: np.ndarray, wanted: np.ndarray) -> bool:
    return values.shape == wanted.shape and np.allclose(values, wanted, rtol=1e-6, atol=0, equal_nan=True)
