"""Fields that do not change in time: they are given to a model, never forecast."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from sigmasolver.data.formats.realpdebench import SCENARIOS
from sigmasolver.data.header import Header
from sigmasolver.data.reader import Reader

__all__ = ["constant_fields", "stated_constant"]

_BLOCK = 16 * 2**20


def stated_constant(header: Header) -> tuple[str, ...]:
    """The fields that a data set itself says are constant: those it has no times of, or parameters of a trajectory."""
    stated: Iterable[str] = header.parameters.get("constant", ())
    if header.source == "realpdebench":
        stated = {*stated, *(name for names in SCENARIOS.values() for name in names)}
    return tuple(name for name in header.layout.fields if name in stated)


def constant_fields(data: Reader, among: Sequence[str] | None = None) -> tuple[str, ...]:
    """The fields, all or of these names, that change in time in no trajectory, stated or by their values.

    A few frames tell a field that moves; only of a field that may be constant every value is read. Empty for data
    without time.
    """
    fields, frames = data.header.layout.fields, data.header.shape[0]
    stated = {name for name in stated_constant(data.header) if among is None or name in among}
    left = [place for place, name in enumerate(fields) if name not in stated and (among is None or name in among)]
    if frames < 2 or not len(data):
        left = []
    some = sorted({1, frames // 3, frames // 2, frames - 1})
    step = max(1, _BLOCK * frames // data.header.nbytes)
    for each in (False, True):  # first what takes little reading
        for index in range(len(data)):
            if not left:
                break
            first = data[index, 0]
            blocks = range(1, frames, step) if each else some
            for start in blocks:
                block = data[index, start : min(start + step, frames) if each else start + 1]
                left = [place for place in left if _same(block[..., place], first[..., place])]
    kept = {*stated, *(fields[place] for place in left)}
    return tuple(name for name in fields if name in kept)


def _same(block: np.ndarray, first: np.ndarray) -> bool:
    return bool((block == first).all())
