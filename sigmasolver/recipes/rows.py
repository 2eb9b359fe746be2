"""Recipes by name: the paper's row for every task (tab:training-settings), other readings of its schedule, and
baselines with the settings of their authors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from sigmasolver.plugins import Registry
from sigmasolver.recipes.recipe import ModelRecipe, Recipe, TrainRecipe, changed
from sigmasolver.settings import override
from sigmasolver.tasks import CYLINDER, REALM, REALPDEBENCH, TASKS, Task

__all__ = ["PAPER", "REALM_READINGS", "RECIPES", "RELEASED", "changed_settings", "recipe_of", "register_task"]

PAPER = TrainRecipe(validation=0.0)
"""All training trajectories are used for training, and the final weights are evaluated."""
_REAL_TASKS = (*REALPDEBENCH, CYLINDER)
_REAL_TRAINING = replace(PAPER, updates=20_000, loss="squared")
# An epoch of REALM takes one window of each trajectory, at a random start.
_REALM_TRAINING = replace(PAPER, one_start=True, objective="pushforward", calls=2, loss="squared", weight_decay=0.0)
_ROWS: tuple[Recipe, ...] = (
    Recipe(TASKS["darcy"], ModelRecipe(), replace(PAPER, derivative=0.1)),
    Recipe(TASKS["ns2d"], ModelRecipe(width=256), replace(PAPER, batch=2, objective="teacher_forced")),
    Recipe(TASKS["kf2d"], ModelRecipe(modes=8), replace(PAPER, epochs=50, batch=8, weight_decay=1e-4)),
    Recipe(
        TASKS["it3d"],
        ModelRecipe(modes=6),
        replace(PAPER, epochs=160, batch=2, one_start=True, starts=8, weight_decay=1e-4),
    ),
    Recipe(
        TASKS["smoke3d"],
        ModelRecipe(modes=6),
        replace(PAPER, epochs=100, batch=1, one_start=True, starts=12, weight_decay=1e-4),
    ),
    *(Recipe(task, ModelRecipe(modes=8), _REAL_TRAINING) for task in _REAL_TASKS),
    Recipe(TASKS["ignit-hit"], ModelRecipe(depth=4, modes=32), replace(_REALM_TRAINING, batch=26, updates=20_000)),
    # An iteration of that benchmark is an epoch over 24 trajectories: two updates at batch size 12.
    Recipe(
        TASKS["evolve-jet"],
        ModelRecipe(width=256, depth=6, modes=48),
        replace(_REALM_TRAINING, batch=12, updates=40_000),
    ),
)


@dataclass(frozen=True)
class _Schedule:
    """Settings of the public code that the paper does not state."""

    task: str
    warmup: float
    start_divisor: float
    final_divisor: float
    clip: float
    weight_decay: float

    def applied(self, recipe: Recipe) -> Recipe:
        settings = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "task"}
        return replace(recipe, train=replace(recipe.train, **settings))


RELEASED = {
    "darcy-released": _Schedule("darcy", 0.3, 25.0, 1e4, 0.1, 1e-5),
    "darcy-factformer": _Schedule("darcy", 0.2, 1e4, 1e5, 2.0, 1e-4),
    "kf2d-released": _Schedule("kf2d", 0.2, 1e4, 1e5, 1.0, 1e-4),
    "it3d-released": _Schedule("it3d", 0.2, 1e4, 1e5, 2.0, 1e-4),
    "smoke3d-released": _Schedule("smoke3d", 0.3, 1e4, 1e5, 2.0, 1e-4),
}
"""Schedule, clipping and weight decay of the public code that the paper follows: Transolver's for `darcy-released`,
FactFormer's for the others. Transolver's NS2D agrees with the paper's row. The sources are in docs/decisions.md."""
_PAPER_ROWS = {recipe.task.name: recipe for recipe in _ROWS}


def _check_entry(name: str, entry: Any) -> Recipe:
    if isinstance(entry, Recipe | Task):
        return entry if isinstance(entry, Recipe) else Recipe(entry)
    raise ValueError(f'"{name}" must be a Task or a Recipe, not {type(entry).__name__}.')


RECIPES: Registry[Recipe] = Registry(
    "recipe",
    _PAPER_ROWS | {name: schedule.applied(_PAPER_ROWS[schedule.task]) for name, schedule in RELEASED.items()},
    "sigmasolver.tasks",
    _check_entry,
    "sigmasolver.recipes.register_task",
)
"""Recipes by name: the paper's row for every task, other readings of its schedule, baselines with their authors'
settings."""
_DRIFT_NET = ("model.width=128", "model.depth=8")
_UNET: dict[int, tuple[str, ...]] = {2: ("model.width=64",), 3: ("model.width=32",)}
COMPARISON: dict[str, dict[int, tuple[str, ...]]] = {
    "unet": _UNET,
    "unet-batchnorm": _UNET,
    "fno": {
        2: ("model.width=64", "model.depth=4", "model.modes=12"),
        3: ("model.width=32", "model.depth=4", "model.modes=8"),
    },
    "ffno": {2: ("model.modes=16",), 3: ("model.modes=12",)},
    "drift-net": {2: _DRIFT_NET, 3: _DRIFT_NET},
    "drift-net-released": {2: _DRIFT_NET, 3: _DRIFT_NET},
    "eddyformer": {2: ("model.width=32",), 3: ("model.width=32", "model.depth=4", "model.heads=4")},
}
"""Sizes of baselines that do not take width, depth, heads and modes of Transolver-σ, by the number of axes. DRIFT-Net
has its official size on every task (tab:efficiency-settings); the paper does not state the others. F-FNO has its
authors' 16 modes: the few modes of Transolver-σ, which relies on its physical operator for the remainder, would be too
few for it."""
FORMS = {
    ("darcy", "unet"): "unet-batchnorm",
    ("ns2d", "rno"): "rno-two-blocks",
    ("darcy", "factformer"): "factformer-darcy",
    ("it3d", "factformer"): "factformer-it3d",
    ("smoke3d", "factformer"): "factformer-smoke3d",
}
"""The variant of a model that its authors use for a task, by task and model: batch norm on steady tasks, two Radon
blocks, and FactFormer as released for each data set. `model.name` in the settings overrides it."""
PERIODIC = ("ns2d", "kf2d", "it3d")


def register_task(name: str, task: Task | Recipe) -> None:
    """Register a task of your own by name, for use in `recipe_of` and `sigmasolver train NAME`.

    Args:
        name: letters, digits, dots, hyphens and underscores; it must not be taken.
        task: a `sigmasolver.tasks.Task` (fields, grid, frames, split), trained with the default settings, or a full
            `Recipe`. A run stores all of it, so it can be loaded without the registration.

    Example:
        >>> import sigmasolver
        >>> from dataclasses import replace
        >>> from sigmasolver.recipes import register_task
        >>> longer = replace(sigmasolver.recipe_of("ns2d").task, name="ns2d-longer", horizon=15)
        >>> register_task("ns2d-longer", longer)
        >>> sigmasolver.recipe_of("ns2d-longer").task.horizon
        15
    """
    RECIPES.register(name, task)


def recipe_of(name: str, model: str | None = None, seed: int = 42) -> Recipe:
    """Return the recipe of this name (for a task, the paper's row) with this seed, optionally for another model."""
    recipe = RECIPES.find(name)
    recipe = replace(recipe, train=replace(recipe.train, seed=seed))
    return recipe if model in (None, recipe.model.name) else _with_model(recipe, model)


def changed_settings(recipe: Recipe) -> list[str]:
    """Settings other than seed and precision that differ from `sigmasolver train TASK --model MODEL`, as `--set` takes
    them."""
    usual = recipe_of(recipe.task.name, recipe.model.name, recipe.train.seed)
    usual = replace(usual, train=replace(usual.train, precision=recipe.train.precision))
    return _changes(usual.to_plain(), recipe.to_plain())


def _changes(usual: Mapping[str, Any], actual: Mapping[str, Any], group: str = "") -> list[str]:
    changes = []
    for name, value in actual.items():
        if isinstance(value, dict):
            changes += _changes(usual[name], value, f"{group}{name}.")
        elif value != usual[name]:
            changes.append(f"{group}{name}={value}")
    return changes


def _with_model(recipe: Recipe, model: str) -> Recipe:
    """Replace the model of a recipe by the task's variant of another one, at the size used in comparisons."""
    axes = len(recipe.task.grid)
    settings = COMPARISON.get(model, {}).get(axes, ())
    if model == "ffno" and recipe.task.name in {task.name for task in REALM}:
        settings = ()  # REALM's own F-FNO has as many modes as these rows
    if model == "eddyformer" and recipe.task.name not in PERIODIC:
        # EddyFormer assumes periodic axes by default.
        settings = (*settings, f"model.options.padding={('zeros',) * axes}")
    if model == "fno" and recipe.task.name == "it3d":
        # The 60 points would be zero-padded to 64, but its authors pad only non-periodic axes.
        settings = (*settings, f"model.options.padding={('circular',) * axes}")
    variant = FORMS.get((recipe.task.name, model), model)
    return override(replace(recipe, model=replace(recipe.model, name=variant)), settings)


_CONSTANT_RATE = (
    "train.batch=16", "train.weight_decay=0", "train.warmup=0", "train.start_divisor=1", "train.final_divisor=1",
)  # fmt: skip
"""Adam at a constant learning rate, with EddyFormer's batch size."""
_COSINE_DECAY = ("train.warmup=0", "train.start_divisor=1", "train.final_divisor=1e12")
"""Cosine decay of the learning rate from its peak at the first step to almost zero."""


def _pushforward(calls: int, after: int, every: int) -> tuple[str, ...]:
    """Settings of FactFormer's pushforward: from step `after` on, in every `every`-th step."""
    return (
        "train.objective=pushforward", f"train.calls={calls}", f"train.push_after={after}", f"train.push_every={every}",
    )  # fmt: skip


_OFFICIAL: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "darcy-transolver-official": (
        "darcy", "transolver", ("model.slices=64", "model.options.expansion=1", "train.clip=0.1"),
    ),
    "ns2d-transolver-official": ("ns2d", "transolver", ("model.options.expansion=1",)),
    "darcy-linearno-official": (
        "darcy", "linearno",
        ("model.slices=64", "model.options.expansion=1", "model.options.positions=coordinates",
         "train.weight_decay=1e-6", "train.clip=1.0"),
    ),
    "ns2d-linearno-official": ("ns2d", "linearno-plain", ("model.options.lattice=10", "train.weight_decay=1e-6")),
    "darcy-hpm-official": ("darcy", "hpm", ("model.options.expansion=1", "train.clip=0.1")),
    "ns2d-hpm-official": ("ns2d", "hpm", ("model.options.expansion=1", "train.batch=4")),
    "darcy-rno-official": ("darcy", "rno", ("model.slices=64", "model.options.expansion=1")),
    "ns2d-rno-official": ("ns2d", "rno-two-blocks", ("model.options.expansion=1",)),
    "darcy-factformer-official": (
        "darcy-factformer", "factformer-darcy",
        ("model.depth=3", "train.batch=8", "train.lr=8e-4", "train.derivative=0"),
    ),
    "kf2d-factformer-official": (
        "kf2d-released", "factformer", ("model.depth=4", "train.lr=5e-4", *_pushforward(calls=3, after=8000, every=3)),
    ),
    "it3d-factformer-official": (
        "it3d-released", "factformer-it3d",
        ("model.depth=4", "train.lr=3e-4", *_pushforward(calls=2, after=8000, every=2), "train.starts=6"),
    ),
    "smoke3d-factformer-official": (
        "smoke3d-released", "factformer-smoke3d",
        ("model.depth=3", "train.lr=3e-4", "train.batch=2", *_pushforward(calls=2, after=10_000, every=3),
         "train.starts=8"),
    ),
    "darcy-fno-official": (
        "darcy", "fno-original",
        ("model.width=32", "model.depth=4", "model.modes=12", "train.batch=20", "train.weight_decay=1e-4",
         "train.derivative=0"),
    ),
    "ns2d-fno-official": (
        "ns2d", "fno-original",
        ("model.width=20", "model.depth=4", "model.modes=12", "model.heads=2",
         "model.options.padding=('circular', 'circular')", "train.batch=20", "train.weight_decay=1e-4"),
    ),
    "ns2d-ffno-official": (
        "ns2d", "ffno-markov",
        ("model.width=64", "model.depth=24", "model.modes=16", "model.options.positions=coordinates",
         "task.history=1", "task.skip=9", "task.normaliser=channel", "train.objective=direct", "train.noise=0.01",
         "train.batch=19", "train.updates=100000", "train.lr=2.5e-3", "train.weight_decay=1e-4",
         "train.warmup=0.005"),
    ),
    "darcy-unet-official": ("darcy", "unet-batchnorm", ("model.width=128",)),
    "ns2d-unet-official": ("ns2d", "unet", ("model.width=256",)),
    "kf2d-drift-net-official": (
        "kf2d", "drift-net-released",
        ("train.batch=40", "train.lr=5e-5", "train.weight_decay=1e-6", "train.clip=5", *_COSINE_DECAY),
    ),
    "kf2d-eddyformer-official": ("kf2d", "eddyformer-2d", ("model.width=32", "model.depth=10", *_CONSTANT_RATE)),
    "it3d-eddyformer-official": (
        "it3d", "eddyformer-3d", ("model.width=32", "model.depth=4", "model.heads=4", *_CONSTANT_RATE),
    ),
}  # fmt: skip
"""Baselines with the sizes and training settings of their authors, as far as a recipe can express them: by name the row
to start from, the model, and the settings that differ. The schedule is one cycle, except for EddyFormer, whose learning
rate is constant, and DRIFT-Net, whose rate decays from the first step. FactFormer's windows end where the futures of
its pushforward do, as in its data loaders. F-FNO takes one frame and trains on all pairs of frames; it is evaluated on
the frames that the others predict. FNO does not use heads, but they must divide its width."""
RECIPES |= {name: changed(recipe_of(start, model), settings) for name, (start, model, settings) in _OFFICIAL.items()}
_REALM_RELEASED = (
    "task.normaliser=box-cox-released", "train.objective=direct", "train.calls=1", "train.loss=absolute",
    "train.shared_start=true", "train.checks=400", "train.keep=best",
)  # fmt: skip
REALM_READINGS: dict[str, tuple[str, tuple[str, ...]]] = {
    # One call per step; starts 0 to T - 3, as if there were two calls.
    "ignit-hit-released": ("ignit-hit", (*_REALM_RELEASED, "train.starts=28")),
    "evolve-jet-released": ("evolve-jet", (*_REALM_RELEASED, "train.starts=38")),
    "evolve-jet-20k-updates": ("evolve-jet", ("train.updates=20000",)),
    "ignit-hit-coordinates": ("ignit-hit", ("model.options.positions=distances-proportional",)),
    "evolve-jet-coordinates": ("evolve-jet", ("model.options.positions=distances-proportional",)),
}
"""Other readings of REALM's protocol: by name the row to start from, and the settings that differ. "released" trains as
the public code does, "20k-updates" counts an iteration as one update, "coordinates" gives the model x and y in addition
to the fields, as the benchmark does. See docs/realm.md."""
RECIPES |= {name: changed(recipe_of(start), settings) for name, (start, settings) in REALM_READINGS.items()}
_REALPDEBENCH_TRAINING = (
    "train.weight_decay=0", *_COSINE_DECAY, "train.keep=best", "train.check=rmse", "train.checks=50",
    "train.validation=0.1",
)  # fmt: skip
_FNO = ("model.width=128", "model.depth=4", "model.modes=16")  # 4, 16, 16 modes in time, height and width
_TRANSOLVER = ("model.width=256", "model.depth=1", "model.slices=16", "model.options.expansion=4")
BENCHMARK: dict[str, tuple[tuple[str, ...], dict[str, tuple[int, float, int]]]] = {
    "unet": ((), {"": (12, 1e-4, 10_000), "fsi": (16, 1e-3, 10_000)}),
    "fno": (_FNO, {"": (32, 1e-4, 4_000), "fsi": (32, 1e-2, 5_000), "combustion": (64, 1e-2, 2_000)}),
    "transolver": (_TRANSOLVER, {"": (16, 1e-3, 5_000)}),
}
"""RealPDEBench's own training settings, as `TASK-benchmark-MODEL`: for each model its size, and batch size, learning
rate and updates of the tasks named, or else of all (""). Adam, squared error, cosine decay from the first step, weights
with the lowest RMSE in 50 checks. FNO and Transolver have its widths, depths, modes and slices, the U-Net our own size.
Its networks take time as a third axis, these take frames as channels, so FNO's four modes in time have no
counterpart."""
RECIPES |= {
    f"{task.name}-benchmark-{model}": changed(
        recipe_of(task.name, model),
        (*size, *_REALPDEBENCH_TRAINING, f"train.batch={batch}", f"train.lr={lr}", f"train.updates={updates}"),
    )
    for task in _REAL_TASKS
    for model, (size, rows) in BENCHMARK.items()
    for batch, lr, updates in [rows.get(task.name, rows[""])]
}
READINGS: dict[str, tuple[str, ...]] = {
    "whole-trajectories": ("task.split=trajectories",),
    "real-normaliser": ("task.normaliser=channel",),
    "numerical-normaliser": ("task.normaliser=numerical",),
}
"""Choices that the paper leaves open for every task of RealPDEBench, as `TASK-READING`; see docs/decisions.md."""
RECIPES |= {
    f"{task.name}-{reading}": changed(RECIPES[task.name], settings)
    for task in _REAL_TASKS
    for reading, settings in READINGS.items()
}
RECIPES |= {
    f"{task.name}-full-grid": changed(
        RECIPES[task.name], (f"task.grid={tuple(2 * points for points in task.grid)}", "task.space_stride=1")
    )
    for task in _REAL_TASKS
}
RECIPES |= {
    "controlled-cylinder-20": changed(
        RECIPES["controlled-cylinder"], ("task.history=20", "task.block=20", "task.horizon=20")
    ),
    "controlled-cylinder-conditions": changed(
        RECIPES["controlled-cylinder"], (f"task.inputs={('velocity_x', 'velocity_y', 'reynolds', 'frequency')}",)
    ),
}
