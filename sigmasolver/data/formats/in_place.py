"""Foreign files read in place: windows are sliced directly from the files, without an import."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Sequence
from copy import copy
from pathlib import Path
from typing import Any

import numpy as np

from sigmasolver.data.formats.checks import ValueChecks
from sigmasolver.data.formats.source import ForeignData
from sigmasolver.data.header import DTYPES, Header, fingerprint
from sigmasolver.data.reader import Key, Reader, contiguous

__all__ = ["ForeignReader"]

_BLOCK = 256 * 2**20
"""Bytes of a long trajectory that are in memory while it is hashed."""
_hashed: dict[tuple[Path, str], list[bytes]] = {}
"""Digests of the values that this process has hashed, by path and header with the state of the files: several runs are
often evaluated on the same files."""


class ForeignReader(Reader):
    """A foreign data set as trajectories.

    Digests of public data sets hash the state of their files (name, size, modification time), because the values may be
    hundreds of gigabytes. Digests of other files hash the values, as in a store, so that a copied trajectory has the
    same digest; all values are read once for this, when the digests are first accessed.

    Reading the values also checks them. Files that describe themselves may have more fields than a recipe uses, so only
    their ranges are noted here; the training checks the values of the fields that it uses.
    """

    def __init__(
        self,
        path: Path,
        header: Header,
        foreign: ForeignData,
        reopen: Callable[[], ForeignData],
        identified_by_values: bool,
        checked: bool = True,
        by_state: Header | None = None,
    ) -> None:
        """`foreign`: the open data set; `reopen`: reopens it after `close` or in another process. `checked`: whether
        `examine` checks all values. `by_state`: the header with which files of this format were recorded when they were
        identified by their state."""
        self.path, self.header = path, header
        self.checked, self._by_state = checked, by_state
        self._foreign: ForeignData | None = foreign
        self._reopen = reopen
        self._count, self.notes = foreign.count, (*foreign.notes, *foreign.cache_notes)
        self.missing = foreign.missing
        self._files = [file.name for file in foreign.trajectory_files]
        self._digests: list[bytes] | None = None
        if not identified_by_values:
            self._digests = _digests_of_state(header, self._count)

    @property
    def digests(self) -> Sequence[bytes]:
        if self._digests is None and self._state is not None:
            self._digests = _hashed.get(self._state)
        if self._digests is None:
            self.examine()
        assert self._digests is not None
        return self._digests

    @property
    def _state(self) -> tuple[Path, str] | None:
        """Key of `_hashed`; None if the state of the files is unknown."""
        return None if self._by_state is None else (self.path.resolve(), self._by_state.digest)

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.header, self.digests)

    def as_recorded(self, fingerprints: Collection[str]) -> Reader:
        if self._by_state is not None:
            digests = _digests_of_state(self._by_state, self._count)
            if fingerprint(self._by_state, digests) in fingerprints:
                reader = copy(self)
                reader.header, reader._digests, reader._by_state = self._by_state, digests, None
                return reader
        return self

    @property
    def examined(self) -> bool:
        """Whether the digests have been computed."""
        return self._digests is not None

    def examine(self, progress: Callable[[int, int], None] | None = None) -> ValueChecks:
        """Read all values once to check them and compute their digests. `progress` is called with the number of
        trajectories done and their total."""
        checks, digests = ValueChecks(self.header, self._files), list[bytes]()
        for index in range(self._count):
            digest = hashlib.sha256()
            for block in self._stored_blocks(index, checks):
                digest.update(block.data)
            digests.append(digest.digest())
            if progress is not None:
                progress(index + 1, self._count)
        if self._digests is None:
            self._digests = digests
        if self._state is not None:
            _hashed[self._state] = digests
        return checks

    def _stored_blocks(self, index: int, checks: ValueChecks) -> Iterator[np.ndarray]:
        """The frames of a trajectory in order, contiguous and in the dtype of a store."""
        frames = self.header.shape[0]
        if self.checked:
            yield checks.convert(index, self.unconverted(index, slice(0, frames))[None])
            return
        step = frames if self._ensure_open().frames is None else max(1, _BLOCK * frames // self.header.nbytes)
        for start in range(0, frames, step):
            values = self.unconverted(index, slice(start, min(start + step, frames)))
            checks.ranges.add(values)
            with np.errstate(over="ignore", under="ignore"):
                stored = np.ascontiguousarray(values, dtype=DTYPES[self.header.dtype])
            yield stored

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, key: Key) -> np.ndarray:
        pieces = contiguous(key, self.shape)
        pieces += [(slice(0, size), slice(None)) for size in self.shape[len(pieces) :]]
        (trajectories, _), (frames, _) = pieces[:2]
        windows = [self.unconverted(index, frames) for index in range(trajectories.start, trajectories.stop)]
        values = windows[0][None] if len(windows) == 1 else np.stack(windows)  # a single window is not copied
        values = values[(slice(None), slice(None), *(block for block, _ in pieces[2:]))]
        with np.errstate(over="ignore", under="ignore"):  # reported by the checks of the values
            stored = values.astype(DTYPES[self.header.dtype], copy=False)
        return stored[tuple(selection for _, selection in pieces)]

    def fields(self, index: int, start: int, stop: int, channels: Sequence[int]) -> Sequence[np.ndarray] | None:
        read_fields = self._ensure_open().fields
        return None if read_fields is None else read_fields(index, start, stop, channels)

    def unconverted(self, index: int, frames: slice) -> np.ndarray:
        """Frames of one trajectory in the dtype of the file."""
        foreign = self._ensure_open()
        if foreign.frames is not None:
            return foreign.frames(index, frames.start, frames.stop)
        return foreign.read(index, index + 1)[0, frames]

    def _ensure_open(self) -> ForeignData:
        if self._foreign is None:
            self._foreign = self._reopen()
        return self._foreign

    def close(self) -> None:
        self._foreign = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_foreign": None}


def _digests_of_state(header: Header, count: int) -> list[bytes]:
    """Digests of trajectories whose header identifies their files by name, size and modification time."""
    state = repr(sorted(header.parameters.items())).encode()
    return [hashlib.sha256(state + b"/%d" % index).digest() for index in range(count)]
