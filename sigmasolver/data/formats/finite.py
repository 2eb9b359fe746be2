"""Non-finite values of foreign data: set to zero inside a solid; elsewhere, their trajectories can be skipped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from sigmasolver.data.formats.source import ForeignData
from sigmasolver.data.split import Split

__all__ = ["fill_solid", "label", "without_bad"]


def label(files: Sequence[object], index: int) -> str:
    """Return the label of a trajectory in messages, with its file unless `files` is empty."""
    return f"trajectory {index} ({files[index]})" if files else f"trajectory {index}"


def fill_solid(foreign: ForeignData, mask: str) -> ForeignData:
    """Replace non-finite values by zero where the field `mask` is 1: many programs write NaN inside a solid."""
    channel = foreign.layout.fields.index(mask)

    def filled(values: np.ndarray) -> np.ndarray:
        nonfinite = (values[..., channel, None] == 1) & ~np.isfinite(values)
        return np.where(nonfinite, np.zeros((), values.dtype), values) if nonfinite.any() else values

    frames = foreign.frames
    return replace(
        foreign,
        read=lambda start, stop: filled(foreign.read(start, stop)),
        frames=None if frames is None else lambda index, start, stop: filled(frames(index, start, stop)),
        fields=None,  # a single field cannot be filled without the mask
        notes=(*foreign.notes, f"{mask} is 1 in the solid, where non-finite values are set to zero."),
    )


def without_bad(foreign: ForeignData, step: int) -> tuple[ForeignData, list[str]]:
    """Drop trajectories with non-finite values and return the rest with labels of the dropped ones.

    All values are read once, `step` trajectories at a time.
    """
    good = []
    for start in range(0, foreign.count, step):
        values = foreign.read(start, min(start + step, foreign.count))
        finite = np.isfinite(values).all(tuple(range(1, values.ndim)))
        good += [start + int(i) for i in np.flatnonzero(finite)]
    if len(good) == foreign.count:
        return foreign, []
    if not good:
        raise ValueError("Every trajectory contains non-finite values; nothing to import.")
    names = [file.name for file in foreign.trajectory_files]
    skipped = [label(names, index) for index in range(foreign.count) if index not in set(good)]
    frames, fields, split = foreign.frames, foreign.fields, foreign.split
    if split is not None:
        new_index = {old: new for new, old in enumerate(good)}
        parts = ([new_index[i] for i in part if i in new_index] for part in (split.train, split.validation, split.test))
        split = Split(*map(tuple, parts))
    finite_only = replace(
        foreign,
        count=len(good),
        read=lambda start, stop: np.concatenate([foreign.read(index, index + 1) for index in good[start:stop]]),
        frames=None if frames is None else lambda index, start, stop: frames(good[index], start, stop),
        fields=None if fields is None else lambda index, *selection: fields(good[index], *selection),
        trajectory_files=tuple(foreign.trajectory_files[index] for index in good) if names else (),
        split=split,
        notes=(*foreign.notes, f"Skipped because of non-finite values: {', '.join(skipped)}."),
    )
    return finite_only, skipped
