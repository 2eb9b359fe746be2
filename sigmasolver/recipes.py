"""A training as one frozen value: the task, the model and how it learns (tab:training-settings as rows).

A run writes its recipe to recipe.json; reading refuses unknown keys. `--set train.epochs=2` changes anything.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any

from sigmasolver.data.windows import Split, WindowSpec, split
from sigmasolver.models import Options, SolverConfig, matched_width
from sigmasolver.settings import check_types, from_plain, override, row, to_plain
from sigmasolver.tasks import CANONICAL, REALM, REALPDEBENCH, TASKS, Task

__all__ = ["RECIPES", "SUITES", "ModelRecipe", "Recipe", "TrainRecipe", "changed", "recipe_of", "suite_of"]


@dataclass(frozen=True)
class ModelRecipe:
    """What is built; channels and grid follow from the task."""

    name: str = "transolver-sigma"
    width: int = 128
    depth: int = 8
    heads: int = 8
    slices: int = 32
    modes: int | tuple[int, ...] = 4
    options: Options = field(default_factory=Options)

    def __post_init__(self) -> None:
        check_types(self)

    def config(self, task: Task) -> SolverConfig:
        return SolverConfig(
            task.grid,
            task.in_channels,
            task.out_channels,
            self.width,
            self.depth,
            self.heads,
            self.slices,
            self.modes,
            self.options,
            len(task.conditions),
        )


@dataclass(frozen=True)
class TrainRecipe:
    """How it learns: AdamW over one cycle of the learning rate."""

    epochs: int = 500
    updates: int | None = None
    """Optimiser steps in all; None: as many as the epochs have."""
    batch: int = 4
    """Windows per step, over all processes together."""
    one_start: bool = False
    """An epoch takes one window of each trajectory, at a random start, instead of every window."""
    starts: int | None = None
    """Training windows per trajectory; None: as the task says."""
    peak: float = 1e-3
    weight_decay: float = 1e-5
    warmup: float = 0.3
    start_divisor: float = 25.0
    final_divisor: float = 1e4
    clip: float | None = None
    """Largest norm of all gradients together; None: no clipping."""
    objective: str = "direct"
    accumulate: bool = False
    """Teacher forcing as single-frame passes with accumulated gradients: the same update, less memory, more time."""
    calls: int = 1
    """Model calls of a pushforward; the last one learns."""
    push_after: int = 0
    push_every: int = 1
    """A pushforward happens at every `push_every`-th step from step `push_after` on; the other steps are direct."""
    price: str = "relative_l2"
    """"relative_l2" in physical units, or the "squared" error of normalised fields; summed over groups of fields."""
    derivative: float = 0.0
    """Weight of the derivative term of the price."""
    noise: float = 0.0
    """Standard deviation of the Gaussian noise on every history, in normalised units."""
    ema: float | None = None
    """Decay of the moving average of the weights, which then is what the run keeps; None: no average."""
    validation: float = 0.1
    """Share of the training trajectories that is kept for validation; the recipes of the paper's tasks keep none."""
    checks: int = 10
    """How often a run is validated, evenly spread and at its end; 0: never."""
    keep: str = "final"
    """Which weights the run keeps: the "final" ones or the "best" at a check."""
    precision: str = "float32"
    recompute: bool = False
    """Blocks run again in the backward pass instead of storing what they computed: less memory, more time."""
    seed: int = 42

    def __post_init__(self) -> None:
        check_types(self)
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f'{name} is "{getattr(self, name)}"; choose from {", ".join(choices)}.')
        for name in ("epochs", "updates", "batch", "starts", "calls", "push_every"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1.")
        for name in ("push_after", "derivative", "noise", "checks", "weight_decay"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 0.")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed is {self.seed}; it must be a whole number from 0 to 2^63 - 1.")
        if self.accumulate and self.objective != "teacher_forced":
            raise ValueError(
                f"accumulate is for the objective teacher_forced, and this one is {self.objective}; "
                "set accumulate to false."
            )
        if self.clip is not None and self.clip <= 0:
            raise ValueError(f"clip is {self.clip}; it must be positive, or none for no clipping.")
        if not 0 <= self.validation < 1:
            raise ValueError(f"validation is {self.validation}; it must be at least 0 and below 1.")
        if self.ema is not None and not 0 <= self.ema < 1:
            raise ValueError(f"ema is {self.ema}; it must be at least 0 and below 1, or none for no average.")
        if self.keep == "best" and not self.checks:
            raise ValueError("The best weights are found at checks; set checks to at least 1, or keep to final.")

    def calls_at(self, step: int) -> int:
        """Model calls of this step (counted from 0)."""
        pushes = self.objective == "pushforward" and step >= self.push_after
        return self.calls if pushes and (step - self.push_after) % self.push_every == 0 else 1


_CHOICES = {
    "objective": ("direct", "teacher_forced", "pushforward"),
    "price": ("relative_l2", "squared"),
    "keep": ("final", "best"),
    "precision": ("float32", "tf32", "bf16"),
}


@dataclass(frozen=True)
class Recipe:
    """Everything that decides a training, but for the data file itself."""

    task: Task
    model: ModelRecipe = field(default_factory=ModelRecipe)
    train: TrainRecipe = field(default_factory=TrainRecipe)

    def __post_init__(self) -> None:
        if self.train.objective == "teacher_forced" and self.task.block > 1:
            raise ValueError(
                f"Teacher forcing prices single frames, but {self.task.name} predicts {self.task.block} a call; "
                "use the objective direct."
            )
        if self.train.keep == "best" and not (self.train.validation or self.task.validation):
            raise ValueError("The best weights are found on validation data; set validation above 0, or keep to final.")

    def split(self, count: int, digests: Sequence[bytes] | None = None) -> Split:
        """Which of `count` trajectories train, validate and test; checked for twins with a store's `digests`."""
        task = self.task
        if not task.validation:
            return split(count, task.train, task.test, self.train.validation, digests)
        return split(count, task.train + task.validation, task.test, task.validation, digests)

    def training_windows(self) -> WindowSpec:
        """Futures as long as the objective looks ahead."""
        ahead = {
            "direct": self.task.block,
            "teacher_forced": self.task.horizon,
            "pushforward": self.train.calls * self.task.block,
        }
        windows = self._windows(ahead[self.train.objective])
        return windows if self.train.starts is None else replace(windows, starts=self.train.starts)

    def evaluation_windows(self, horizon: int | None = None) -> WindowSpec:
        """Futures as long as the task's horizon, or another one; then all windows that fit."""
        if horizon is None or horizon == self.task.horizon:
            return self._windows(self.task.horizon)
        return replace(self._windows(horizon), starts=None)

    def _windows(self, horizon: int) -> WindowSpec:
        task = self.task
        return WindowSpec(
            inputs=task.inputs,
            targets=task.targets,
            history=task.history,
            horizon=horizon,
            starts=task.starts,
            stride=task.stride,
            time_stride=task.time_stride,
            space_stride=task.space_stride,
            steady=task.steady,
        )

    def to_plain(self) -> dict[str, Any]:
        return to_plain(self)

    @staticmethod
    def from_plain(plain: object) -> Recipe:
        return from_plain(Recipe, plain)


_PAPER = TrainRecipe(validation=0.0)
"""The whole training part trains, and the final weights are evaluated."""
_MEASURED = replace(_PAPER, updates=20_000, price="squared")
_REACTING = replace(_PAPER, objective="pushforward", calls=2, price="squared", weight_decay=0.0)
_ROWS: tuple[Recipe, ...] = (
    Recipe(TASKS["darcy"], ModelRecipe(), replace(_PAPER, derivative=0.1)),
    Recipe(TASKS["ns2d"], ModelRecipe(width=256), replace(_PAPER, batch=2, objective="teacher_forced")),
    Recipe(TASKS["kf2d"], ModelRecipe(modes=8), replace(_PAPER, epochs=50, batch=8, weight_decay=1e-4)),
    Recipe(
        TASKS["it3d"],
        ModelRecipe(modes=6),
        replace(_PAPER, epochs=160, batch=2, one_start=True, starts=8, weight_decay=1e-4),
    ),
    Recipe(
        TASKS["smoke3d"],
        ModelRecipe(modes=6),
        replace(_PAPER, epochs=100, batch=1, one_start=True, starts=12, weight_decay=1e-4),
    ),
    *(Recipe(task, ModelRecipe(modes=8), _MEASURED) for task in REALPDEBENCH),
    Recipe(TASKS["ignit-hit"], ModelRecipe(depth=4, modes=32), replace(_REACTING, batch=26, updates=20_000)),
    # An iteration of that benchmark is a pass over the trajectories: two updates at batch 12 of 24.
    Recipe(
        TASKS["evolve-jet"], ModelRecipe(width=256, depth=6, modes=48), replace(_REACTING, batch=12, updates=40_000)
    ),
)


@dataclass(frozen=True)
class _Schedule:
    """What public code does where the paper is silent."""

    task: str
    warmup: float
    start_divisor: float
    final_divisor: float
    clip: float
    weight_decay: float

    def applied(self, recipe: Recipe) -> Recipe:
        settings = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "task"}
        return replace(recipe, train=replace(recipe.train, **settings))


_RELEASED = {
    "darcy-released": _Schedule("darcy", 0.3, 25.0, 1e4, 0.1, 1e-5),
    "darcy-factformer": _Schedule("darcy", 0.2, 1e4, 1e5, 2.0, 1e-4),
    "kf2d-released": _Schedule("kf2d", 0.2, 1e4, 1e5, 1.0, 1e-4),
    "it3d-released": _Schedule("it3d", 0.2, 1e4, 1e5, 2.0, 1e-4),
    "smoke3d-released": _Schedule("smoke3d", 0.3, 1e4, 1e5, 2.0, 1e-4),
}
"""Schedule, clipping and weight decay of the public code that the paper follows: Transolver's for `darcy-released`,
FactFormer's for the others. Transolver's NS2D agrees with the paper's row. The sources are in docs/decisions.md."""
_PAPER_ROWS = {recipe.task.name: recipe for recipe in _ROWS}
RECIPES: dict[str, Recipe] = _PAPER_ROWS | {
    name: schedule.applied(_PAPER_ROWS[schedule.task]) for name, schedule in _RELEASED.items()
}
"""By name: the paper's row of every task, and other readings of its schedule."""


def recipe_of(name: str, model: str = "transolver-sigma", seed: int = 42) -> Recipe:
    """The recipe of this name (a task's name: the paper's row), with this model and this seed."""
    recipe = row(RECIPES, name, "recipe")
    return replace(recipe, model=replace(recipe.model, name=model), train=replace(recipe.train, seed=seed))


def changed(recipe: Recipe, settings: Sequence[str]) -> Recipe:
    """The recipe with `name=value` settings applied; epochs that are asked for replace a number of updates."""
    names = [setting.partition("=")[0].strip() for setting in settings]
    more = ["train.updates=none"] if "train.epochs" in names and "train.updates" not in names else []
    return override(recipe, [*settings, *more])


SEEDS = (42, 43, 44)
ABLATIONS = (
    "transolver-sigma", "no-physical", "no-spectral", "physical-then-spectral", "spectral-then-physical", "no-context",
    "grouped-mixing", "slice-replace",
)  # fmt: skip
COUNTERPARTS = ("physolver", "specsolver")
DYNAMIC = ("ns2d", "kf2d", "it3d", "smoke3d")
SLICE_UPDATES = ("transolver", "transolver-keep", "linearno", "transolver-srpa")
EFFICIENCY = ("transolver-sigma", "transolver")
"""The models of tab:efficiency-settings that are built."""
SUITES: dict[str, Callable[[], dict[str, Recipe]]] = {
    "main": lambda: _each((task.name for task in (*CANONICAL, *REALPDEBENCH, *REALM)), ("transolver-sigma",)),
    "counterparts": lambda: _each(DYNAMIC, ("transolver-sigma", *COUNTERPARTS)),
    "counterparts-matched": lambda: (
        _each(DYNAMIC, ("transolver-sigma",)) | _each(DYNAMIC, COUNTERPARTS, "matched", _matched)
    ),
    "ablations": lambda: _each(("darcy", "ns2d", "smoke3d"), ABLATIONS),
    "slice-updates": lambda: _each(("darcy", "ns2d"), SLICE_UPDATES),
    "scaling": lambda: _scaling(),
    "efficiency": lambda: _efficiency(),
    "ledger": lambda: _ledger(),
    "factors": lambda: _factors(),
}
"""The paper's tables and figures as sets of trainings, by name of the run: tab:pde-main-results with
tab:realpdebench-results and tab:realm-results, fig:rollout-comparison (counterparts at full width, and at the width
nearest to the parameters of Transolver-σ), tab:ablation-components, tab:slice-attention-analysis, fig:darcy-scaling,
app:efficiency-measurements. The ledger holds trainings at the paper's budgets in the order in which they are run, and
factors changes one setting of KF2D at a time, at a quarter of its budget."""


def suite_of(name: str) -> dict[str, Recipe]:
    """The recipes of a suite, by the name of their runs, in the order in which they are trained."""
    return row(SUITES, name, "suite")()


def _each(
    tasks: Iterable[str],
    models: Iterable[str],
    label: str = "",
    change: Callable[[Recipe], Recipe] = lambda recipe: recipe,
    seeds: Sequence[int] = SEEDS,
) -> dict[str, Recipe]:
    """Every task with every model and seed; `label` tells the runs of a changed recipe from others."""
    return {
        "-".join(filter(None, (task, model, label, str(seed)))): change(recipe_of(task, model, seed))
        for task, model, seed in itertools.product(tasks, tuple(models), seeds)
    }


def _matched(recipe: Recipe) -> Recipe:
    """At the width that comes nearest to the parameters of Transolver-σ at the recipe's own width."""
    width = _matched_width(recipe.model.name, recipe.model.config(recipe.task))
    return replace(recipe, model=replace(recipe.model, width=width))


_matched_width = cache(matched_width)
"""Builds a dozen models; the rows of the suites that differ in their seed ask for the same width."""


def _bf16(recipe: Recipe) -> Recipe:
    return replace(recipe, train=replace(recipe.train, precision="bf16"))


def _ledger() -> dict[str, Recipe]:
    """The paper's budget unless the label says otherwise."""

    def each(task: str, models: Sequence[str], label: str = "", seeds: Sequence[int] = SEEDS[:1]) -> dict[str, Recipe]:
        label = "-".join(filter(None, ("bf16", label)))
        return _each([task], models, label, _bf16, seeds)

    def shorter(epochs: int, models: Sequence[str]) -> dict[str, Recipe]:
        rows = each("ns2d", models, f"{epochs}-epochs")
        return {name: replace(one, train=replace(one.train, epochs=epochs)) for name, one in rows.items()}

    matched = each("kf2d", COUNTERPARTS, "matched")
    return {
        **each("darcy", ["transolver-sigma"], seeds=SEEDS),
        **each("darcy", [*COUNTERPARTS, "transolver", "linearno", "ffno"]),
        **each("kf2d", ["transolver-sigma"], seeds=SEEDS),
        **each("kf2d", COUNTERPARTS),
        **{name: _matched(recipe) for name, recipe in matched.items()},
        **each("ns2d", ["transolver-sigma"]),
        **shorter(250, COUNTERPARTS),
        **shorter(25, [*SLICE_UPDATES, *ABLATIONS]),
    }


FACTORS: dict[str, tuple[str, ...]] = {
    "base": (),
    "tf32": ("train.precision=tf32",),
    "circular": ("model.options.padding=('circular', 'circular')",),
    "warmup-0.2": ("train.warmup=0.2",),
    "clip-1": ("train.clip=1.0",),
    "decay-1e-5": ("train.weight_decay=1e-5",),
    "peak-5e-4": ("train.peak=5e-4",),
    "ema": ("train.ema=0.999",),
    "float32": ("train.precision=float32",),
}
"""What may hold the error of KF2D up, by the settings that change it; "base" is the row of the ledger, and "released"
has the schedule and clipping of the public code."""


def _factors() -> dict[str, Recipe]:
    """A quarter of the paper's updates, with a schedule of that length."""
    base = _bf16(recipe_of("kf2d"))
    quarter = replace(base, train=replace(base.train, updates=20_938))
    rows = {name: changed(quarter, settings) for name, settings in FACTORS.items()}
    rows["released"] = _RELEASED["kf2d-released"].applied(quarter)
    return {f"kf2d-quarter-{name}-42": recipe for name, recipe in rows.items()}


def _scaling() -> dict[str, Recipe]:
    """Three sweeps on Darcy flow, each with its own fixed settings."""
    base = recipe_of("darcy")
    longer, shorter = replace(base.train, epochs=200), replace(base.train, epochs=100)
    wide = replace(base.task, space_stride=2, grid=(211, 211), train=3000)
    return {
        **{
            f"darcy-data-{cases}": replace(base, task=replace(base.task, train=cases), train=longer)
            for cases in (1000, 2000, 3000, 4000, 5000)
        },
        **{
            f"darcy-grid-{points}": replace(
                base, task=replace(base.task, space_stride=stride, grid=(points, points)), train=longer
            )
            for stride, points in ((5, 85), (4, 106), (3, 141), (2, 211), (1, 421))
        },
        **{
            f"darcy-width-{width}": replace(
                base, task=wide, model=replace(base.model, width=width, slices=128, modes=8), train=shorter
            )
            for width in (32, 64, 128, 192, 256)
        },
    }


def _efficiency() -> dict[str, Recipe]:
    """One epoch of the workloads whose training costs are measured; they are not those of the accuracy tables."""
    workloads = {
        "ns2d": replace(_PAPER, epochs=1, batch=2, objective="teacher_forced", accumulate=True),
        "kf2d": replace(_PAPER, epochs=1, batch=2, peak=5e-4, weight_decay=1e-4),
    }
    return {
        f"{task}-efficiency-{model}": replace(recipe_of(task, model), train=train)
        for task, train in workloads.items()
        for model in EFFICIENCY
    }
