"""The benchmark tasks: inputs, targets and numbers of frames (tab:benchmark-overview, tab:forecast-protocols), and the
conventions of the public data sets that the paper uses.

A steady task is a forecast with history, block and horizon of one frame, whose future is the same frame; it needs no
separate code path. Inputs that are not targets are fixed fields (a geometry, a Reynolds number as a constant field),
which a rollout passes on unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sigmasolver.settings import check_types, lookup

__all__ = [
    "CANONICAL",
    "COHORTS",
    "CYLINDER",
    "REALM",
    "REALPDEBENCH",
    "TASKS",
    "TEST_MODES",
    "Cohort",
    "Task",
    "cohort_of",
    "field_groups",
    "velocity_in",
]

VELOCITY = ("velocity_x", "velocity_y", "velocity_z")
GROUPED = ("velocity", "species")
COMPONENTS = (("u", "v", "w"), ("ux", "uy", "uz"), ("vx", "vy", "vz"), ("u_x", "u_y", "u_z"), ("v_x", "v_y", "v_z"))
"""Common names of velocity components."""
SPLITS = ("published", "trajectories")


def field_groups(fields: Sequence[str], vectors: Sequence[Sequence[str]] = ()) -> dict[str, tuple[int, ...]]:
    """Channels by group: `velocity_x`, ... are one group, as are `species_O2`, ..., and the components of each of the
    `vectors`; every other field is a group of its own."""
    group_names = {name: _vector_name(vector) for vector in vectors for name in vector}
    groups: dict[str, tuple[int, ...]] = {}
    for channel, name in enumerate(fields):
        family = name.partition("_")[0]
        group = group_names.get(name, family if family in GROUPED else name)
        groups[group] = (*groups.get(group, ()), channel)
    return groups


def velocity_in(fields: Sequence[str]) -> tuple[str, ...]:
    """Velocity components among these fields, recognised by their usual names; empty if fewer than two."""
    for names in COMPONENTS:
        components = tuple(name for name in fields if name.lower() in names)
        if {name.lower() for name in components} == set(names[: len(components)]) and len(components) > 1:
            return components
    return ()


def _vector_name(vector: Sequence[str]) -> str:
    return "velocity" if velocity_in(vector) else f"({', '.join(vector)})"


@dataclass(frozen=True)
class Task:
    """A benchmark task."""

    name: str
    """Name in tables and on pages."""
    inputs: tuple[str, ...]
    """Input fields: the targets first, then those that are not predicted."""
    targets: tuple[str, ...]
    """Fields that the model predicts."""
    grid: tuple[int, ...]
    """Points per axis, after subsampling by space_stride."""
    history: int
    """Frames of the history (T_in)."""
    block: int
    """Frames predicted per call (T_out)."""
    horizon: int
    """Frames that are evaluated (H)."""
    train: int
    """Trajectories of the training split, the first ones of the file."""
    test: int
    """Trajectories of the test split, the last ones of the file."""
    normaliser: str
    """none, channel, scalar, pixel, temporal, trajectory, box-cox, box-cox-released, published, numerical or the-well;
    see data/normalise.py."""
    validation: int = 0
    """Validation trajectories after the training split; 0: a fraction of the training split (`train.validation`)."""
    boundary: str | None = None
    """An operator applied to every forecast in physical units, such as lower-walls."""
    time_stride: int = 1
    """Use every n-th stored frame."""
    space_stride: int = 1
    """Use every n-th stored point of each axis."""
    stride: int = 1
    """Frames from the start of one window to the next."""
    starts: int | None = None
    """Windows per trajectory; none: all that fit."""
    steady: bool = False
    """The targets are in the same frame as the inputs; there is no time."""
    conditions: tuple[str, ...] = ()
    """Input fields whose spatial mean is embedded with the time: a Reynolds number, a frequency."""
    skip: int = 0
    """Frames before the first evaluated window: with a shorter history, the same frames are then predicted."""
    vectors: tuple[tuple[str, ...], ...] = ()
    """Targets that are components of one vector: one group in loss and metrics, as velocity_x, ... always are."""
    mask: str | None = None
    """An input field that is 1 in a solid and 0 in the fluid: only the fluid counts in statistics, loss and metrics."""
    split: str = "published"
    """"published": the split that the data set defines, if any; "trajectories": always split by whole trajectories,
    even where the data set splits windows of one trajectory."""
    symmetries: str | None = None
    """Maps of the box to itself that turn solutions into solutions, by name; none: those of the benchmark task of this
    name, if it is one. Used by `train.augment` and `--symmetries`."""

    def __post_init__(self) -> None:
        check_types(self)
        fixed_inputs = [name for name in self.inputs if name not in self.targets]
        for name in self.conditions:
            if name not in fixed_inputs or self.conditions.count(name) > 1:
                raise ValueError(
                    f"The condition {name} of {self.name} must be an input that is not predicted, listed once; "
                    f"choose from {', '.join(fixed_inputs) or 'none'}."
                )
        for name in ("history", "block", "horizon", "train", "stride", "time_stride", "space_stride"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} of {self.name} is {getattr(self, name)}; it must be at least 1.")
        if self.split not in SPLITS:
            raise ValueError(f'split of {self.name} is "{self.split}"; choose from {", ".join(SPLITS)}.')
        for name in ("test", "skip"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} of {self.name} is {getattr(self, name)}; it must be at least 0.")
        if self.mask is not None and self.mask not in fixed_inputs:
            raise ValueError(
                f"The mask {self.mask} of {self.name} must be an input that is not predicted; choose from "
                f"{', '.join(fixed_inputs) or 'none'}."
            )
        if self.mask is not None and self.normaliser == "pixel":
            raise ValueError(
                f'The normaliser "pixel" of {self.name} needs statistics at every point, which a '
                "solid does not have; choose "
                '"channel".'
            )
        components = [name for vector in self.vectors for name in vector]
        for name in components:
            if name not in self.targets or components.count(name) > 1:
                raise ValueError(
                    f"The vector component {name} must be a target, listed once; the targets of {self.name} are "
                    f"{', '.join(self.targets)}."
                )
        if any(len(vector) < 2 for vector in self.vectors):
            raise ValueError(f"A vector of {self.name} has one component; give at least two, or omit it.")
        if self.block > self.horizon:
            raise ValueError(f"block of {self.name} is {self.block}; it must not exceed the horizon of {self.horizon}.")
        if not self.steady and self.inputs[: len(self.targets)] != self.targets:
            raise ValueError(
                f"{self.name} is autoregressive, so its inputs must begin with its targets "
                f"({', '.join(self.targets)}); the inputs after them stay fixed."
            )

    @property
    def groups(self) -> dict[str, tuple[int, ...]]:
        """Channels of the targets by group, see `field_groups`."""
        return field_groups(self.targets, self.vectors)

    @property
    def mask_channel(self) -> int | None:
        """Index of the mask among the inputs."""
        return None if self.mask is None else self.inputs.index(self.mask)

    @property
    def in_channels(self) -> int:
        return self.history * len(self.inputs)

    @property
    def out_channels(self) -> int:
        return self.block * len(self.targets)


PLANE = VELOCITY[:2]
INTENSITY = ("intensity",)


def _reacting(*species: str) -> tuple[str, ...]:
    """Fields in the order of REALM."""
    return (*(f"species_{name}" for name in species), "temperature", "density", *PLANE)


HYDROGEN = _reacting("H", "H2", "H2O", "H2O2", "HO2", "O", "O2", "OH")
METHANE = _reacting(
    "AR", "C", "C2H", "C2H2", "C2H3", "C2H4", "C2H5", "C2H6", "C3H7", "C3H8", "CH", "CH2", "CH2CHO", "CH2CO", "CH2O",
    "CH2OH", "CH2S", "CH3", "CH3CHO", "CH3O", "CH3OH", "CH4", "CO", "CO2", "H", "H2", "H2O", "H2O2", "HCCO", "HCCOH",
    "HCO", "HO2", "O", "O2", "OH",
)  # fmt: skip
TURBULENCE, SMOKE = ("pressure", *VELOCITY), ("density", *VELOCITY)

CANONICAL = (
    Task("darcy", ("coefficient",), ("pressure",), (85, 85), 1, 1, 1, 1000, 200, "scalar", space_stride=5, steady=True),
    Task("ns2d", ("vorticity",), ("vorticity",), (64, 64), 10, 1, 10, 1000, 200, "none"),
    Task(
        "kf2d", ("vorticity",), ("vorticity",), (128, 128), 10, 4, 16, 100, 20, "temporal",
        time_stride=2, space_stride=2, starts=134,
    ),
    Task("it3d", TURBULENCE, TURBULENCE, (60,) * 3, 10, 2, 10, 1000, 100, "trajectory"),
    Task("smoke3d", SMOKE, SMOKE, (64,) * 3, 4, 4, 16, 2000, 200, "trajectory", boundary="lower-walls"),
)  # fmt: skip
# Measurements, on the grids of the public loader. Windows are those of the published lists; the numbers of trajectories
# apply where there are no lists, and to splits by whole trajectories.
REALPDEBENCH = (
    Task("controlled-cylinder", PLANE, PLANE, (64, 128), 10, 10, 10, 76, 20, "published", stride=20),
    Task("fsi", PLANE, PLANE, (64, 64), 20, 20, 20, 39, 12, "published", stride=10, space_stride=2),
    Task("foil", PLANE, PLANE, (64, 128), 20, 20, 20, 78, 20, "published", stride=20, space_stride=2),
    Task("combustion", INTENSITY, INTENSITY, (64, 64), 20, 20, 20, 24, 6, "published", space_stride=2),
)
CYLINDER = Task("cylinder", PLANE, PLANE, (64, 128), 20, 20, 20, 72, 20, "published", stride=20)
"""The fifth data set of RealPDEBench, which the paper does not use."""
REALM = (
    Task("ignit-hit", HYDROGEN, HYDROGEN, (128, 128), 1, 1, 29, 26, 5, "box-cox", validation=5),
    Task("evolve-jet", METHANE, METHANE, (256, 256), 1, 1, 39, 24, 3, "box-cox", validation=3),
)
TASKS: dict[str, Task] = {task.name: task for task in (*CANONICAL, *REALPDEBENCH, CYLINDER, *REALM)}


@dataclass(frozen=True)
class Cohort:
    """A fixed set of windows of the test split."""

    trajectories: Sequence[int]
    """Indices of trajectories within the test split."""
    windows_per_trajectory: int = 1
    """The first starts at the first frame."""
    stride: int = 1
    """Frames from one start to the next."""

    def __len__(self) -> int:
        return len(self.trajectories) * self.windows_per_trajectory


_KOLMOGOROV = Cohort(range(20), windows_per_trajectory=20, stride=7)
COHORTS: dict[str, dict[str, Cohort]] = {
    "rollout": {
        "ns2d": Cohort(range(200)),
        "kf2d": _KOLMOGOROV,
        "it3d": Cohort(range(20)),
        "smoke3d": Cohort(range(20)),
    },
    "decomposition": {
        "ns2d": Cohort(range(200)),
        "kf2d": _KOLMOGOROV,
        "it3d": Cohort(range(100)),
        "smoke3d": Cohort(range(200)),
    },
    "corrections": {task.name: Cohort((0, task.test // 2, task.test - 1)) for task in CANONICAL},
}
"""The paper's test windows by name and task: fig:rollout-comparison (app:rollout-comparison),
fig:exact-error-decomposition (tab:decomposition-cohort), fig:srpa-layerwise-corrections (three cases). The paper gives
the number of windows; the selection is ours."""


TEST_MODES: dict[str, tuple[str, ...]] = {
    "seen": ("seen",),
    "in_dist": ("in_dist",),
    "out_dist": ("out_dist",),
    "unseen": ("in_dist", "out_dist"),
}
"""RealPDEBench's test modes, which are cohorts too: groups of trajectories whose test windows are used, by mode. Seen
trajectories also have windows in the training split; the parameters of the others lie between or beyond those of the
training trajectories."""


def cohort_of(name: str, task: str) -> Cohort:
    """Look up a cohort by name and task."""
    tasks = lookup(COHORTS, name, "cohort")
    if task not in tasks:
        raise ValueError(f"The cohort {name} is defined for {', '.join(tasks)}, not for {task}; use --windows instead.")
    return tasks[task]
