"""Training, validation and test splits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

__all__ = ["PARTS", "Split", "WindowLists", "split"]

PARTS = ("train", "validation", "test")


@dataclass(frozen=True)
class Split:
    """Trajectories of the training, validation and test splits, which are disjoint.

    Only `train` must not be empty; the test set may be in a separate file.
    """

    train: tuple[int, ...]
    validation: tuple[int, ...]
    test: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.train:
            raise ValueError("The training split is empty; give it at least one trajectory.")
        part_of: dict[int, str] = {}
        for part, trajectory in self._members():
            if trajectory < 0:
                raise ValueError(f"Trajectory {trajectory} of the {part} split is negative; indices start at 0.")
            if trajectory in part_of:
                raise ValueError(
                    f"Trajectory {trajectory} appears twice, in the {part_of[trajectory]} and the {part} split; "
                    "list each trajectory once."
                )
            part_of[trajectory] = part

    @staticmethod
    def from_plain(plain: object) -> Split | None:
        """From lists of trajectories by split, as stored in a header; None if there are none."""
        if not isinstance(plain, dict):
            return None
        return Split(**{part: tuple(plain.get(part, ())) for part in PARTS})

    def check(self, digests: Sequence[bytes]) -> None:
        """Check against the digests of a store: every trajectory exists, and no two splits share values."""
        seen: dict[bytes, tuple[str, int]] = {}
        for part, trajectory in self._members():
            if trajectory >= len(digests):
                raise ValueError(
                    f"The {part} split includes trajectory {trajectory}, but there are only "
                    f"{len(digests)} (indices start at 0)."
                )
            first_part, twin = seen.setdefault(digests[trajectory], (part, trajectory))
            if first_part != part:
                raise ValueError(
                    f"Trajectory {trajectory} of the {part} split is identical to {twin} of the {first_part} split; "
                    "remove one of them."
                )

    def _members(self) -> Iterator[tuple[str, int]]:
        return ((part.name, trajectory) for part in fields(self) for trajectory in getattr(self, part.name))


@dataclass(frozen=True)
class WindowLists:
    """Windows that a data set lists for each split: ranges (trajectory, start, stop, step) of first frames.

    Unlike in a `Split`, splits may share trajectories, as published.
    """

    train: tuple[tuple[int, int, int, int], ...]
    validation: tuple[tuple[int, int, int, int], ...]
    test: tuple[tuple[int, int, int, int], ...]

    @staticmethod
    def of(windows: Mapping[str, Iterable[tuple[int, int]]]) -> WindowLists:
        """From (trajectory, first frame) of every window by split; the result is sorted by these pairs."""
        return WindowLists(**{part: tuple(_ranges(sorted(set(windows.get(part, ()))))) for part in PARTS})

    @staticmethod
    def from_plain(plain: object) -> WindowLists | None:
        """From lists by split, as stored in a header; None if there are none."""
        if not isinstance(plain, dict):
            return None
        ranges: dict[str, Any] = {part: tuple(tuple(entry) for entry in plain.get(part, ())) for part in PARTS}
        return WindowLists(**ranges)

    def windows(self, part: str) -> list[tuple[int, int]]:
        """(trajectory, first frame) of every window of a split."""
        return [(trajectory, first) for trajectory, *bounds in getattr(self, part) for first in range(*bounds)]

    def trajectories(self, part: str) -> list[int]:
        return sorted({trajectory for trajectory, *_ in getattr(self, part)})

    def shared(self) -> list[int]:
        """Trajectories that the training split shares with validation or test."""
        evaluated = {*self.trajectories("validation"), *self.trajectories("test")}
        return [trajectory for trajectory in self.trajectories("train") if trajectory in evaluated]


def _ranges(windows: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int, int]]:
    """Group equally spaced windows of a trajectory into ranges (trajectory, start, stop, step)."""
    start = 0
    while start < len(windows):
        trajectory, first = windows[start]
        end, step = start + 1, 1
        if end < len(windows) and windows[end][0] == trajectory:
            step = windows[end][1] - first
            while end < len(windows) and windows[end] == (trajectory, first + (end - start) * step):
                end += 1
        yield trajectory, first, windows[end - 1][1] + 1, step
        start = end


def split(count: int, train: int, test: int, validation: float = 0.1, digests: Sequence[bytes] | None = None) -> Split:
    """Split `count` trajectories as the benchmarks do: the first `train` for training, the last `test` for testing;
    `test` is 0 if the test data are in a separate file.

    The end of the training split is used for validation: `validation` trajectories, or this fraction if below 1 (at
    least one trajectory, unless 0). The `digests` of a store are checked for duplicates across splits.
    """
    if train < 1 or test < 0:
        raise ValueError(f"Got {train} training and {test} test trajectories; they must be at least 1 and 0.")
    if train + test > count:
        raise ValueError(
            f"{train} training and {test} test trajectories are {train + test}, but there are only {count}."
        )
    if validation < 0 or (validation >= 1 and validation != int(validation)):
        raise ValueError(f"validation is {validation}; it must be a fraction below 1 or a number of trajectories.")
    validation_count = int(validation) if validation >= 1 else max(1, round(validation * train)) if validation else 0
    if validation_count >= train:
        raise ValueError(
            f"Validating on {validation_count} of {train} training trajectories leaves none for training; use fewer."
        )
    parts = Split(
        tuple(range(train - validation_count)),
        tuple(range(train - validation_count, train)),
        tuple(range(count - test, count)),
    )
    if digests is not None:
        parts.check(digests)
    return parts
