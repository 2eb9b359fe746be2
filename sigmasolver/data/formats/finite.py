"""Foreign values that are not finite: zero where a mask marks a solid; elsewhere their trajectory can be left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from sigmasolver.data.formats.source import Foreign
from sigmasolver.data.split import Split

__all__ = ["fill_solid", "label", "without_bad"]


def label(files: Sequence[object], index: int) -> str:
    """A trajectory in words, with its file where `files` has one for each."""
    return f"trajectory {index} ({files[index]})" if files else f"trajectory {index}"


def fill_solid(foreign: Foreign, mask: str) -> Foreign:
    """Zeros for what is not finite where the field `mask` is 1, as many programs write NaN there."""
    channel = foreign.layout.fields.index(mask)

    def filled(values: np.ndarray) -> np.ndarray:
        empty = (values[..., channel, None] == 1) & ~np.isfinite(values)
        return np.where(empty, np.zeros((), values.dtype), values) if empty.any() else values

    frames = foreign.frames
    return replace(
        foreign,
        read=lambda start, stop: filled(foreign.read(start, stop)),
        frames=None if frames is None else lambda index, start, stop: filled(frames(index, start, stop)),
        fields=None,  # which values are in the solid is known by another field
        notes=(*foreign.notes, f"{mask} is 1 in the solid, where non-finite values are set to zero."),
    )


def without_bad(foreign: Foreign, step: int) -> tuple[Foreign, list[str]]:
    """The trajectories that are finite, and the others in words; reads all of them once, `step` at a time."""
    good = []
    for start in range(0, foreign.count, step):
        values = foreign.read(start, min(start + step, foreign.count))
        finite = np.isfinite(values).all(tuple(range(1, values.ndim)))
        good += [start + int(place) for place in np.flatnonzero(finite)]
    if len(good) == foreign.count:
        return foreign, []
    if not good:
        raise ValueError("Every trajectory contains non-finite values; nothing to import.")
    names = [file.name for file in foreign.trajectory_files]
    skipped = [label(names, index) for index in range(foreign.count) if index not in set(good)]
    frames, fields, parts = foreign.frames, foreign.fields, foreign.split
    if parts is not None:
        place = {old: new for new, old in enumerate(good)}
        kept = ([place[one] for one in part if one in place] for part in (parts.train, parts.validation, parts.test))
        parts = Split(*map(tuple, kept))
    kept_only = replace(
        foreign,
        count=len(good),
        read=lambda start, stop: np.concatenate([foreign.read(one, one + 1) for one in good[start:stop]]),
        frames=None if frames is None else lambda index, start, stop: frames(good[index], start, stop),
        fields=None if fields is None else lambda index, *which: fields(good[index], *which),
        trajectory_files=tuple(foreign.trajectory_files[one] for one in good) if names else (),
        split=parts,
        notes=(*foreign.notes, f"Skipped because of non-finite values: {', '.join(skipped)}."),
    )
    return kept_only, skipped
