"""Fields that are constant in time: inputs of a model that are never forecast."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from sigmasolver.data.formats.realpdebench import SCENARIOS
from sigmasolver.data.header import Header
from sigmasolver.data.reader import Reader

__all__ = ["constant_fields", "stated_constant"]

_BLOCK = 16 * 2**20


def stated_constant(header: Header) -> tuple[str, ...]:
    """Fields that the data set declares constant: fields without a time axis, and parameters of a trajectory."""
    stated: Iterable[str] = header.parameters.get("constant", ())
    if header.source == "realpdebench":
        stated = {*stated, *(name for names in SCENARIOS.values() for name in names)}
    return tuple(name for name in header.layout.fields if name in stated)


def constant_fields(data: Reader, among: Sequence[str] | None = None) -> tuple[str, ...]:
    """Fields, optionally only `among` these names, that are constant in time in every trajectory, declared or measured.

    A few frames rule out most fields; all values are read only for the remaining candidates. Empty for data without
    time.
    """
    fields, frames = data.header.layout.fields, data.header.shape[0]
    stated = {name for name in stated_constant(data.header) if among is None or name in among}
    candidates = [
        channel for channel, name in enumerate(fields) if name not in stated and (among is None or name in among)
    ]
    if frames < 2 or not len(data):
        candidates = []
    samples = sorted({1, frames // 3, frames // 2, frames - 1})
    step = max(1, _BLOCK * frames // data.header.nbytes)
    for every_frame in (False, True):  # a few sample frames first, to read little
        for index in range(len(data)):
            if not candidates:
                break
            first = data[index, 0]
            blocks = range(1, frames, step) if every_frame else samples
            for start in blocks:
                block = data[index, start : min(start + step, frames) if every_frame else start + 1]
                candidates = [channel for channel in candidates if _same(block[..., channel], first[..., channel])]
    constant = {*stated, *(fields[channel] for channel in candidates)}
    return tuple(name for name in fields if name in constant)


def _same(block: np.ndarray, first: np.ndarray) -> bool:
    return bool((block == first).all())
