"""Foreign files read in place: a window is cut from the file itself, and nothing is copied beforehand."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from sigmasolver.data.formats.source import Foreign
from sigmasolver.data.header import DTYPES, Header, fingerprint
from sigmasolver.data.reader import Key, Reader, contiguous

__all__ = ["ForeignReader"]


class ForeignReader(Reader):
    """A foreign data set as trajectories.

    Its digests stand for the state of the files (name, size, last change) rather than for their values, which may be
    hundreds of gigabytes.
    """

    def __init__(self, path: Path, header: Header, foreign: Foreign, open_again: Callable[[], Foreign]) -> None:
        """`foreign`: the data set as it is open now; `open_again`: what opens it in another process."""
        self.path, self.header = path, header
        self._foreign: Foreign | None = foreign
        self._open_again = open_again
        self._count, self.notes = foreign.count, foreign.notes
        state = repr(sorted(header.parameters.items())).encode()
        self.digests = [hashlib.sha256(state + b"/%d" % index).digest() for index in range(self._count)]
        self.fingerprint = fingerprint(header, self.digests)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, key: Key) -> np.ndarray:
        pieces = contiguous(key, self.shape)
        pieces += [(slice(0, size), slice(None)) for size in self.shape[len(pieces) :]]
        (trajectories, _), (frames, _) = pieces[:2]
        each = [self._frames(index, frames) for index in range(trajectories.start, trajectories.stop)]
        read = each[0][None] if len(each) == 1 else np.stack(each)  # a single window is not copied
        read = read[(slice(None), slice(None), *(within for within, _ in pieces[2:]))]
        return read.astype(DTYPES[self.header.dtype], copy=False)[tuple(pick for _, pick in pieces)]

    def _frames(self, index: int, frames: slice) -> np.ndarray:
        if self._foreign is None:
            self._foreign = self._open_again()
        if self._foreign.frames is not None:
            return self._foreign.frames(index, frames.start, frames.stop)
        return self._foreign.read(index, index + 1)[0, frames]

    def close(self) -> None:
        self._foreign = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_foreign": None}
