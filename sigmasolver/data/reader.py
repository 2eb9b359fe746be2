"""What reads trajectories, whatever they lie in: a store, or a foreign file that is read in place."""

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

    It can be handed to workers, by fork or by pickle.
    """

    path: Path
    header: Header
    notes: tuple[str, ...] = ()
    """What a user should know of these data, one sentence each."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, key: Key) -> np.ndarray:
        """Any integers and slices, in the stored type."""

    @property
    @abstractmethod
    def digests(self) -> Sequence[bytes]:
        """One per trajectory: equal digests are the same trajectory."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Of the header and the digests."""

    @property
    def shape(self) -> tuple[int, ...]:
        """`(trajectories, frames, *grid, fields)`."""
        return (len(self), *self.header.shape)

    @property
    def published_split(self) -> Split | None:
        """Which trajectories train, validate and test, where the data set itself says so."""
        return Split.from_plain(self.header.parameters.get("split"))

    @property
    def published_windows(self) -> WindowLists | None:
        """The windows of each part, where the data set itself names them one by one."""
        return WindowLists.from_plain(self.header.parameters.get("windows"))

    @property
    def published_statistics(self) -> Mapping[str, Any] | None:
        """Mean and scale of each field, by "inputs" and "targets", where the data set comes with them."""
        return self.header.parameters.get("statistics")

    @property
    def groups(self) -> Mapping[str, Sequence[int]]:
        """Trajectories by the name that the data set has for them, such as "in_dist"."""
        return self.header.parameters.get("groups", {})

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self[index] for index in range(len(self)))

    def check(self, index: int) -> None:  # noqa: B027 - nothing to compare with unless a reader keeps digests of values
        """Refuse a trajectory whose values are no longer those that were written."""

    def trajectory(self, index: int) -> np.ndarray:
        """A whole trajectory, checked like `check` does."""
        self.check(index)
        return self[index]

    def fields(self, index: int, start: int, stop: int, channels: Sequence[int]) -> Sequence[np.ndarray] | None:
        """These fields of the frames from `start` to before `stop`, each `(stop - start, *grid)`, where the file keeps
        them apart; None where it does not. In the type of the file, and often views of its bytes: to be copied."""
        return None

    def close(self) -> None:  # noqa: B027 - not every reader holds a file open
        """Let go of the file; it opens again when next sliced."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def contiguous(key: Key, shape: Sequence[int]) -> list[tuple[slice, int | slice]]:
    """Per axis, the contiguous range that holds what `key` selects, and the key within that range.

    Files gather strided elements one by one; reading the range and striding in memory is far faster.
    """
    keys = key if isinstance(key, tuple) else (key,)
    if len(keys) > len(shape):
        raise IndexError(f"{len(keys)} indices for {len(shape)} axes")
    return [_range(one, size) for one, size in zip(keys, shape, strict=False)]


def _range(key: int | slice, size: int) -> tuple[slice, int | slice]:
    if isinstance(key, slice):
        chosen = range(size)[key]
        if not chosen:
            return slice(0, 0), slice(None)
        low, high = min(chosen[0], chosen[-1]), max(chosen[0], chosen[-1])
        return slice(low, high + 1), slice(None, None, chosen.step)
    index = range(size)[key]
    return slice(index, index + 1), 0
