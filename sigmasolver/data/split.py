"""Which trajectories train, validate and test."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

__all__ = ["PARTS", "Split", "WindowLists", "split"]

PARTS = ("train", "validation", "test")


@dataclass(frozen=True)
class Split:
    """Which trajectories train, which choose the best epoch, which are the test. No trajectory is in two parts.

    Only `train` must hold any; a test set may lie in a file of its own.
    """

    train: tuple[int, ...]
    validation: tuple[int, ...]
    test: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.train:
            raise ValueError("The training split is empty; give it at least one trajectory.")
        place: dict[int, str] = {}
        for part, trajectory in self._members():
            if trajectory < 0:
                raise ValueError(f"Trajectory {trajectory} of the {part} split is negative; indices start at 0.")
            if trajectory in place:
                raise ValueError(
                    f"Trajectory {trajectory} appears twice, in the {place[trajectory]} and the {part} split; "
                    "list each trajectory once."
                )
            place[trajectory] = part

    @staticmethod
    def from_plain(plain: object) -> Split | None:
        """From lists of trajectories by part, as a header keeps them; None without."""
        if not isinstance(plain, dict):
            return None
        return Split(**{part: tuple(plain.get(part, ())) for part in PARTS})

    def check(self, digests: Sequence[bytes]) -> None:
        """Compare with a store's digests: every trajectory is there, and no two parts hold the same values."""
        seen: dict[bytes, tuple[str, int]] = {}
        for part, trajectory in self._members():
            if trajectory >= len(digests):
                raise ValueError(
                    f"The {part} split includes trajectory {trajectory}, but there are only "
                    f"{len(digests)} (indices start at 0)."
                )
            other, twin = seen.setdefault(digests[trajectory], (part, trajectory))
            if other != part:
                raise ValueError(
                    f"Trajectory {trajectory} of the {part} split is identical to {twin} of the {other} split; "
                    "remove one of them."
                )

    def _members(self) -> Iterator[tuple[str, int]]:
        return ((part.name, trajectory) for part in fields(self) for trajectory in getattr(self, part.name))


@dataclass(frozen=True)
class WindowLists:
    """Windows that a data set names one by one for each part: ranges (trajectory, start, stop, step) of first frames.

    Parts may share trajectories, which those of a `Split` never do: it is the publisher who says so.
    """

    train: tuple[tuple[int, int, int, int], ...]
    validation: tuple[tuple[int, int, int, int], ...]
    test: tuple[tuple[int, int, int, int], ...]

    @staticmethod
    def of(windows: Mapping[str, Iterable[tuple[int, int]]]) -> WindowLists:
        """From (trajectory, first frame) of every window by part; they come back in the order of these numbers."""
        return WindowLists(**{part: tuple(_ranges(sorted(set(windows.get(part, ()))))) for part in PARTS})

    @staticmethod
    def from_plain(plain: object) -> WindowLists | None:
        """From lists by part, as a header keeps them; None without."""
        if not isinstance(plain, dict):
            return None
        held: dict[str, Any] = {part: tuple(tuple(one) for one in plain.get(part, ())) for part in PARTS}
        return WindowLists(**held)

    def windows(self, part: str) -> list[tuple[int, int]]:
        """(trajectory, first frame) of every window of this part."""
        return [(trajectory, first) for trajectory, *place in getattr(self, part) for first in range(*place)]

    def trajectories(self, part: str) -> list[int]:
        return sorted({trajectory for trajectory, *_ in getattr(self, part)})

    def shared(self) -> list[int]:
        """The trajectories that training has in common with validation or test."""
        held = {*self.trajectories("validation"), *self.trajectories("test")}
        return [trajectory for trajectory in self.trajectories("train") if trajectory in held]


def _ranges(windows: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int, int]]:
    """Neighbours of one trajectory at equal distances together."""
    begin = 0
    while begin < len(windows):
        trajectory, first = windows[begin]
        end, step = begin + 1, 1
        if end < len(windows) and windows[end][0] == trajectory:
            step = windows[end][1] - first
            while end < len(windows) and windows[end] == (trajectory, first + (end - begin) * step):
                end += 1
        yield trajectory, first, windows[end - 1][1] + 1, step
        begin = end


def split(count: int, train: int, test: int, validation: float = 0.1, digests: Sequence[bytes] | None = None) -> Split:
    """The first `train` of `count` trajectories to train on, the last `test` to test on, as the benchmarks do; none
    test where these lie in a file of their own.

    The end of the training part validates: `validation` trajectories of it, or this fraction when below 1 (at least
    one trajectory, unless 0). With a store's `digests`, also checked for the same trajectory under two numbers.
    """
    if train < 1 or test < 0:
        raise ValueError(f"Got {train} training and {test} test trajectories; they must be at least 1 and 0.")
    if train + test > count:
        raise ValueError(
            f"{train} training and {test} test trajectories are {train + test}, but there are only {count}."
        )
    if validation < 0 or (validation >= 1 and validation != int(validation)):
        raise ValueError(f"validation is {validation}; it must be a fraction below 1 or a number of trajectories.")
    held = int(validation) if validation >= 1 else max(1, round(validation * train)) if validation else 0
    if held >= train:
        raise ValueError(f"Validating on {held} of {train} training trajectories leaves none for training; use fewer.")
    parts = Split(tuple(range(train - held)), tuple(range(train - held, train)), tuple(range(count - test, count)))
    if digests is not None:
        parts.check(digests)
    return parts
