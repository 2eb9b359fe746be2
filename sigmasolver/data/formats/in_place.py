"""Foreign files read in place: a window is cut from the file itself, and nothing is copied beforehand."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sigmasolver.data.formats.checks import Values
from sigmasolver.data.formats.source import Foreign
from sigmasolver.data.header import DTYPES, Header, fingerprint
from sigmasolver.data.reader import Key, Reader, contiguous

__all__ = ["ForeignReader"]


class ForeignReader(Reader):
    """A foreign data set as trajectories.

    The digests of public data sets stand for the state of their files (name, size, last change), because the values
    may be hundreds of gigabytes. Those of other files are of the values, as in a store, so that a trajectory is known
    again wherever it lies; all are read for this once, when the digests are first asked for.
    """

    def __init__(
        self, path: Path, header: Header, foreign: Foreign, open_again: Callable[[], Foreign], by_values: bool
    ) -> None:
        """`foreign`: the data set as it is open now; `open_again`: what opens it in another process."""
        self.path, self.header = path, header
        self._foreign: Foreign | None = foreign
        self._open_again = open_again
        self._count, self.notes = foreign.count, (*foreign.notes, *foreign.held)
        self._files = [file.name for file in foreign.trajectory_files]
        self._digests: list[bytes] | None = None
        if not by_values:
            state = repr(sorted(header.parameters.items())).encode()
            self._digests = [hashlib.sha256(state + b"/%d" % index).digest() for index in range(self._count)]

    @property
    def digests(self) -> Sequence[bytes]:
        if self._digests is None:
            self.examine()
        assert self._digests is not None
        return self._digests

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.header, self.digests)

    @property
    def examined(self) -> bool:
        """Whether the digests are known."""
        return self._digests is not None

    def examine(self, progress: Callable[[int, int], None] | None = None) -> Values:
        """Read all values once: what is odd among them, and their digests. `progress` gets the trajectories done and
        their number."""
        found, digests, frames = Values(self.header, self._files), list[bytes](), slice(0, self.header.shape[0])
        for index in range(self._count):
            digests.append(hashlib.sha256(found.stored(index, self._frames(index, frames)[None]).data).digest())
            if progress is not None:
                progress(index + 1, self._count)
        if self._digests is None:
            self._digests = digests
        return found

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

    def fields(self, index: int, start: int, stop: int, channels: Sequence[int]) -> Sequence[np.ndarray] | None:
        apart = self._opened().fields
        return None if apart is None else apart(index, start, stop, channels)

    def _frames(self, index: int, frames: slice) -> np.ndarray:
        foreign = self._opened()
        if foreign.frames is not None:
            return foreign.frames(index, frames.start, frames.stop)
        return foreign.read(index, index + 1)[0, frames]

    def _opened(self) -> Foreign:
        if self._foreign is None:
            self._foreign = self._open_again()
        return self._foreign

    def close(self) -> None:
        self._foreign = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_foreign": None}
