"""A training as one frozen value: the task, the model and how it learns (tab:training-settings as rows).

A run writes its recipe to recipe.json; reading refuses unknown keys. `--set train.epochs=2` changes anything.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from sigmasolver.data.windows import WindowSpec
from sigmasolver.models import Options, SolverConfig
from sigmasolver.settings import from_plain, row, to_plain
from sigmasolver.tasks import TASKS, Task

__all__ = ["RECIPES", "ModelRecipe", "Recipe", "TrainRecipe", "recipe_of"]

OBJECTIVES = ("direct", "teacher_forced", "pushforward")
PRECISIONS = ("float32", "tf32", "bf16")


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
        )


@dataclass(frozen=True)
class TrainRecipe:
    """How it learns: AdamW over one cycle of the learning rate."""

    epochs: int = 500
    batch: int = 4
    peak: float = 1e-3
    weight_decay: float = 1e-5
    warmup: float = 0.3
    start_divisor: float = 25.0
    final_divisor: float = 1e4
    clip: float | None = None
    """Largest norm of all gradients together; None: no clipping."""
    objective: str = "direct"
    calls: int = 1
    """Model calls of a pushforward; the last one learns."""
    derivative: float = 0.0
    """Weight of the derivative term of the price."""
    validation: float = 0.1
    """Share of the training trajectories that is kept for validation."""
    precision: str = "float32"
    seed: int = 42

    def __post_init__(self) -> None:
        for name, choices in (("objective", OBJECTIVES), ("precision", PRECISIONS)):
            if getattr(self, name) not in choices:
                raise ValueError(f'{name} is "{getattr(self, name)}"; choose from {", ".join(choices)}.')
        for name in ("epochs", "batch", "calls"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1.")
        if not 0 <= self.validation < 1:
            raise ValueError(f"validation is {self.validation}; it must be at least 0 and below 1.")


@dataclass(frozen=True)
class Recipe:
    """Everything that decides a training, but for the data file itself."""

    task: Task
    model: ModelRecipe = field(default_factory=ModelRecipe)
    train: TrainRecipe = field(default_factory=TrainRecipe)

    def training_windows(self) -> WindowSpec:
        """Futures as long as the objective looks ahead."""
        ahead = {
            "direct": self.task.block,
            "teacher_forced": self.task.horizon,
            "pushforward": self.train.calls * self.task.block,
        }
        return self._windows(ahead[self.train.objective])

    def evaluation_windows(self) -> WindowSpec:
        """Futures as long as the task's horizon."""
        return self._windows(self.task.horizon)

    def _windows(self, horizon: int) -> WindowSpec:
        task = self.task
        return WindowSpec(
            inputs=task.inputs,
            targets=task.targets,
            history=task.history,
            horizon=horizon,
            starts=task.starts,
            time_stride=task.time_stride,
            space_stride=task.space_stride,
            steady=task.steady,
        )

    def to_plain(self) -> dict[str, Any]:
        return to_plain(self)

    @staticmethod
    def from_plain(plain: object) -> Recipe:
        return from_plain(Recipe, plain)


RECIPES: dict[str, Recipe] = {
    "darcy": Recipe(TASKS["darcy"], ModelRecipe(), TrainRecipe(derivative=0.1)),
    "ns2d": Recipe(TASKS["ns2d"], ModelRecipe(width=256), TrainRecipe(batch=2, objective="teacher_forced")),
    "kf2d": Recipe(TASKS["kf2d"], ModelRecipe(modes=8), TrainRecipe(epochs=50, batch=8, weight_decay=1e-4)),
    "it3d": Recipe(TASKS["it3d"], ModelRecipe(modes=6), TrainRecipe(epochs=160, batch=2, weight_decay=1e-4)),
    "smoke3d": Recipe(TASKS["smoke3d"], ModelRecipe(modes=6), TrainRecipe(epochs=100, batch=1, weight_decay=1e-4)),
}


def recipe_of(task: str, model: str = "transolver-sigma", seed: int = 42) -> Recipe:
    """The paper's recipe for this task, with this row of the family and this seed."""
    recipe = row(RECIPES, task, "recipe")
    return replace(recipe, model=replace(recipe.model, name=model), train=replace(recipe.train, seed=seed))
