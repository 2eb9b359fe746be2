"""The benchmark tasks as rows: what goes in, what comes out, over how many frames (tab:benchmark-overview,
tab:forecast-protocols), and the conventions of the public sets that the paper builds on.

A steady task is a forecast with history, block and horizon of one frame whose future is the same frame: no second path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sigmasolver.settings import row

__all__ = ["TASKS", "Task", "field_groups", "task_of"]

VELOCITY = ("velocity_x", "velocity_y", "velocity_z")


def field_groups(fields: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Channels that belong together: the components of velocity in one group, any other field alone."""
    groups: dict[str, list[int]] = {}
    for channel, name in enumerate(fields):
        groups.setdefault("velocity_" if name.startswith("velocity_") else name, []).append(channel)
    return tuple(map(tuple, groups.values()))


@dataclass(frozen=True)
class Task:
    """One row."""

    name: str
    inputs: tuple[str, ...]
    targets: tuple[str, ...]
    grid: tuple[int, ...]
    history: int
    """Frames a model sees (T_in)."""
    block: int
    """Frames it predicts in one call (T_out)."""
    horizon: int
    """Frames that are evaluated (H)."""
    train: int
    test: int
    """Trajectories of each part: the first ones train, the last ones test."""
    normaliser: str
    boundary: str | None = None
    """An operator on every forecast in physical units, by name; see `forecast.BOUNDARIES`."""
    time_stride: int = 1
    space_stride: int = 1
    starts: int | None = None
    """Windows per trajectory; None: all that fit."""
    steady: bool = False

    def __post_init__(self) -> None:
        for name in ("history", "block", "horizon", "train", "test", "time_stride", "space_stride"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} of {self.name} is {getattr(self, name)}; it must be at least 1.")
        if self.block > self.horizon:
            raise ValueError(f"{self.name} predicts {self.block} frames a call but is evaluated over {self.horizon}.")
        if not self.steady and self.horizon > self.block and self.inputs != self.targets:
            raise ValueError(f"{self.name} feeds its forecasts back, so its inputs must be its targets.")

    @property
    def in_channels(self) -> int:
        return self.history * len(self.inputs)

    @property
    def out_channels(self) -> int:
        return self.block * len(self.targets)


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task(
            "darcy", ("coefficient",), ("pressure",), (85, 85), 1, 1, 1, 1000, 200, "scalar",
            space_stride=5, steady=True,
        ),
        Task("ns2d", ("vorticity",), ("vorticity",), (64, 64), 10, 1, 10, 1000, 200, "none"),
        Task(
            "kf2d", ("vorticity",), ("vorticity",), (128, 128), 10, 4, 16, 100, 20, "temporal",
            time_stride=2, space_stride=2, starts=134,
        ),
        Task("it3d", ("pressure", *VELOCITY), ("pressure", *VELOCITY), (60,) * 3, 10, 2, 10, 1000, 100, "trajectory"),
        Task(
            "smoke3d", ("density", *VELOCITY), ("density", *VELOCITY), (64,) * 3, 4, 4, 16, 2000, 200, "trajectory",
            boundary="lower-walls",
        ),
    )
}  # fmt: skip


def task_of(name: str) -> Task:
    """The row of this name."""
    return row(TASKS, name, "task")
