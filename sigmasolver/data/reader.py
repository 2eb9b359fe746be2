"""Interface of readers of trajectories: a store, or a foreign file read in place."""

from __future__ import annotations

import hashlib
import operator
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import EllipsisType, TracebackType
from typing import Any, Self, TypeAlias

import numpy as np

from sigmasolver.data.header import DTYPES, Header
from sigmasolver.data.split import Split, WindowLists

__all__ = ["Key", "Reader", "contiguous"]

Key: TypeAlias = int | slice | EllipsisType | tuple[int | slice | EllipsisType, ...]


class Reader(ABC):
    """Trajectories `(count, frames, *grid, fields)`, sliced like an array with integers, slices and an ellipsis, and
    read only when sliced.

    Readers can be passed to worker processes, by fork or by pickle.
    """

    path: Path
    header: Header
    notes: tuple[str, ...] = ()
    """Notes for the user, one sentence each."""
    missing: frozenset[str] = frozenset()
    """The parts of the layout that are not in the files, as in `ForeignData`."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, key: Key) -> np.ndarray:
        """Index with any integers, slices and one ellipsis; keeps the stored dtype."""

    @property
    @abstractmethod
    def digests(self) -> Sequence[bytes]:
        """One digest per trajectory; equal digests mean identical trajectories."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Hash of the header and the digests."""

    def as_recorded(self, fingerprints: Collection[str]) -> Reader:
        """This reader, or if only its former way of identifying the data gives one of these fingerprints, a copy with
        that identity: so an older run keeps its record of unchanged files."""
        return self

    @property
    def shape(self) -> tuple[int, ...]:
        """`(trajectories, frames, *grid, fields)`."""
        return (len(self), *self.header.shape)

    @property
    def published_split(self) -> Split | None:
        """The split defined by the data set, if any."""
        return Split.from_plain(self.header.parameters.get("split"))

    @property
    def published_windows(self) -> WindowLists | None:
        """The windows of each split, if the data set lists them."""
        return WindowLists.from_plain(self.header.parameters.get("windows"))

    @property
    def published_statistics(self) -> Mapping[str, Any] | None:
        """Mean and scale of each field, by "inputs" and "targets", if the data set includes them."""
        return self.header.parameters.get("statistics")

    @property
    def groups(self) -> Mapping[str, Sequence[int]]:
        """Named groups of trajectories of the data set, such as "in_dist"."""
        return self.header.parameters.get("groups", {})

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self[index] for index in range(len(self)))

    def check(self, index: int) -> None:  # noqa: B027 - optional: only some readers store digests
        """Verify the checksum of a trajectory; raises ValueError on a mismatch."""

    def trajectory(self, index: int) -> np.ndarray:
        """A full trajectory, verified as by `check`."""
        self.check(index)
        return self[index]

    def fields(self, index: int, start: int, stop: int, channels: Sequence[int]) -> Sequence[np.ndarray] | None:
        """These fields of frames `start:stop`, each `(stop - start, *grid)`, if the file stores fields separately;
        otherwise None. In the dtype of the file, and often views of its memory: copy before use."""
        return None

    def digest(self, index: int, fields: Sequence[str]) -> str:
        """The digest of these fields of a trajectory, in hexadecimal: that of the trajectory in data that have no
        others."""
        if tuple(fields) == self.header.layout.fields:
            return self.digests[index].hex()
        return hashlib.sha256(np.ascontiguousarray(self[index][..., self._channels(fields)]).data).hexdigest()

    def sample(self, index: int, fields: Sequence[str]) -> str:
        """Hash of these fields in the first and the last frame of a trajectory, which identify it where hashing all
        values would take too long."""
        frames = [self[index, frame][..., self._channels(fields)] for frame in (0, -1)]
        return hashlib.sha256(b"".join(frame.astype(DTYPES["float32"]).tobytes() for frame in frames)).hexdigest()

    def _channels(self, fields: Sequence[str]) -> list[int]:
        return [self.header.layout.fields.index(name) for name in fields]

    def close(self) -> None:  # noqa: B027 - optional: not every reader keeps a file open
        """Close the file; it is reopened on the next access."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def contiguous(key: Key, shape: Sequence[int]) -> list[tuple[slice, int | slice]]:
    """Per axis, the contiguous range that covers the selection of `key`, and the key within that range.

    HDF5 reads strided elements one by one; reading the range and striding in memory is far faster.
    """
    keys = _without_ellipsis(key if isinstance(key, tuple) else (key,), len(shape))
    return [_contiguous_range(axis_key, size) for axis_key, size in zip(keys, shape, strict=False)]


def _without_ellipsis(keys: tuple[int | slice | EllipsisType, ...], axes: int) -> list[int | slice]:
    """The keys with the axes that an ellipsis stands for; raise IndexError for anything but integers and slices."""
    given = [_checked_key(item) for item in keys if not isinstance(item, EllipsisType)]
    if len(given) > axes:
        raise IndexError(f"{len(given)} indices for {axes} axes")
    if len(keys) - len(given) > 1:
        raise IndexError("An index may contain only one ellipsis (...).")
    if len(keys) == len(given):
        return given
    position = next(place for place, item in enumerate(keys) if isinstance(item, EllipsisType))
    return [*given[:position], *[slice(None)] * (axes - len(given)), *given[position:]]


def _checked_key(key: int | slice) -> int | slice:
    if isinstance(key, slice):
        return key
    try:
        if not isinstance(key, bool):
            return operator.index(key)
    except TypeError:
        pass
    raise IndexError(
        f"Trajectories are indexed with integers, slices and an ellipsis, not with {type(key).__name__}; take a slice, "
        "and select from the array that it returns."
    )


def _contiguous_range(key: int | slice, size: int) -> tuple[slice, int | slice]:
    if isinstance(key, slice):
        selected = range(size)[key]
        if not selected:
            return slice(0, 0), slice(None)
        low, high = min(selected[0], selected[-1]), max(selected[0], selected[-1])
        return slice(low, high + 1), slice(None, None, selected.step)
    index = range(size)[key]
    return slice(index, index + 1), 0
