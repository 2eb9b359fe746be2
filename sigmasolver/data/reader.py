"""Interface of readers of trajectories: a store, or a foreign file read in place."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeAlias

import numpy as np

from sigmasolver.data.header import Header
from sigmasolver.data.split import Split, WindowLists

__all__ = ["Key", "Reader", "contiguous"]

Key: TypeAlias = int | slice | tuple[int | slice, ...]


class Reader(ABC):
    """Trajectories `(count, frames, *grid, fields)`, sliced like an array and read only when sliced.

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
        """Index with any integers and slices; keeps the stored dtype."""

    @property
    @abstractmethod
    def digests(self) -> Sequence[bytes]:
        """One digest per trajectory; equal digests mean identical trajectories."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Hash of the header and the digests."""

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
    keys = key if isinstance(key, tuple) else (key,)
    if len(keys) > len(shape):
        raise IndexError(f"{len(keys)} indices for {len(shape)} axes")
    return [_contiguous_range(axis_key, size) for axis_key, size in zip(keys, shape, strict=False)]


def _contiguous_range(key: int | slice, size: int) -> tuple[slice, int | slice]:
    if isinstance(key, slice):
        selected = range(size)[key]
        if not selected:
            return slice(0, 0), slice(None)
        low, high = min(selected[0], selected[-1]), max(selected[0], selected[-1])
        return slice(low, high + 1), slice(None, None, selected.step)
    index = range(size)[key]
    return slice(index, index + 1), 0
