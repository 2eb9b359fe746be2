"""The configuration of a training as a frozen dataclass: task, model and training settings.

A run writes its recipe to recipe.json; reading it rejects unknown keys. `--set train.epochs=2` changes a setting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

from sigmasolver.data.reader import Reader
from sigmasolver.data.split import Split, split
from sigmasolver.data.windows import Windows, WindowSpec
from sigmasolver.models import ModelSize, SolverConfig
from sigmasolver.settings import assignment_list, check_types, from_plain, override, to_plain
from sigmasolver.tasks import Task

__all__ = ["ModelRecipe", "Recipe", "TrainRecipe", "changed"]


@dataclass(frozen=True)
class ModelRecipe(ModelSize):
    """Name, size and options of the model."""

    name: str = "transolver-sigma"
    """A model of `sigmasolver models`, or your own."""

    def __post_init__(self) -> None:
        check_types(self)

    def config(self, task: Task) -> SolverConfig:
        size = {item.name: getattr(self, item.name) for item in fields(ModelSize)}
        return SolverConfig(
            task.grid,
            task.in_channels,
            task.out_channels,
            conditions=len(task.conditions),
            in_frames=task.history,
            out_frames=task.block,
            **size,
        )


@dataclass(frozen=True)
class TrainRecipe:
    """Training settings: optimiser, learning rate cycle, objective, loss and validation."""

    ALIASES: ClassVar = {"price": "loss", "peak": "lr"}
    """Names of settings in recipes of earlier versions."""

    epochs: int = 500
    """Passes over the training windows; ignored if updates is set."""
    updates: int | None = None
    """Total number of optimiser steps; none: as many as the epochs have."""
    batch: int = 4
    """Windows per step, summed over all processes."""
    one_start: bool = False
    """An epoch takes one window of each trajectory, at a random start, instead of every window."""
    shared_start: bool = False
    """All windows of a step begin at the same random frame; only with `one_start`."""
    starts: int | None = None
    """Training windows per trajectory; none: as in the task."""
    lr: float = 1e-3
    """Peak learning rate of the cycle."""
    optimiser: str = "adamw"
    """adamw, muon, or your own optimiser."""
    weight_decay: float = 1e-5
    """Decoupled weight decay of AdamW and Muon."""
    warmup: float = 0.3
    """Fraction of the steps in which the learning rate rises."""
    start_divisor: float = 25.0
    """The cycle starts at lr / start_divisor."""
    final_divisor: float = 1e4
    """The cycle ends at its starting rate / final_divisor."""
    clip: float | None = None
    """Maximum global gradient norm; none: no clipping."""
    objective: str = "direct"
    """Training objective: direct, teacher_forced or pushforward."""
    accumulate: bool = False
    """Teacher forcing as single-frame passes with accumulated gradients: the same update, less memory, more time."""
    calls: int = 1
    """Model calls of a pushforward; only the last one has gradients."""
    push_after: int = 0
    """The first step with a pushforward; those before it are direct."""
    push_every: int = 1
    """From push_after on, every n-th step is a pushforward step; the others are direct."""
    loss: str = "relative_l2"
    """relative_l2 in physical units, squared or absolute error of normalised fields, or a loss of your own; summed over
    groups of fields."""
    derivative: float = 0.0
    """Weight of the derivative term of the loss."""
    noise: float = 0.0
    """Standard deviation of the Gaussian noise on every history, in normalised units."""
    augment: bool = False
    """Transform every training window by a random symmetry of the task (`task.symmetries`)."""
    ema: float | None = None
    """Decay of the moving average of the weights, which the run then keeps; none: no average."""
    validation: float = 0.1
    """Fraction of the training trajectories held out for validation; the recipes of the paper's tasks use none."""
    checks: int = 10
    """Number of validation checks, evenly spaced with the last at the end; 0: none."""
    keep: str = "final"
    """Weights that the run keeps: final, or best by validation error."""
    check: str = "relative_l2"
    """The validation error: relative_l2 is the mean over windows and fields; rmse is that of all windows, fields and
    points together, over the root mean square of the truth."""
    precision: str = "float32"
    """float32, tf32 (on a GPU) or bf16."""
    recompute: bool = False
    """Recompute blocks in the backward pass instead of storing activations: less memory, more time."""
    seed: int = 42
    """Random seed of the initial weights, the order of the windows, noise and dropout."""

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
            raise ValueError(f"seed is {self.seed}; it must be an integer from 0 to 2^63 - 1.")
        if self.accumulate and self.objective != "teacher_forced":
            raise ValueError(
                f"accumulate needs the objective teacher_forced, not {self.objective}; set accumulate to false."
            )
        if self.shared_start and not self.one_start:
            raise ValueError("shared_start needs one_start; set one_start to true, or shared_start to false.")
        if self.clip is not None and self.clip <= 0:
            raise ValueError(f"clip is {self.clip}; it must be positive, or none for no clipping.")
        if not 0 <= self.validation < 1:
            raise ValueError(f"validation is {self.validation}; it must be at least 0 and below 1.")
        if self.ema is not None and not 0 <= self.ema < 1:
            raise ValueError(f"ema is {self.ema}; it must be at least 0 and below 1, or none for no average.")
        if self.keep == "best" and not self.checks:
            raise ValueError("keep is best, which needs validation checks; set checks to at least 1, or keep to final.")

    def calls_at(self, step: int) -> int:
        """Model calls of this step (counted from 0)."""
        pushes = self.objective == "pushforward" and step >= self.push_after
        return self.calls if pushes and (step - self.push_after) % self.push_every == 0 else 1


_CHOICES = {
    "objective": ("direct", "teacher_forced", "pushforward"),
    "keep": ("final", "best"),
    "check": ("relative_l2", "rmse"),
    "precision": ("float32", "tf32", "bf16"),
}


@dataclass(frozen=True)
class Recipe:
    """Everything that determines a training, except the data file itself.

    Example:
        >>> import sigmasolver
        >>> from sigmasolver.recipes import Recipe
        >>> recipe = sigmasolver.recipe_of("darcy", seed=1)
        >>> Recipe.from_plain(recipe.to_plain()) == recipe
        True
    """

    task: Task
    model: ModelRecipe = field(default_factory=ModelRecipe)
    train: TrainRecipe = field(default_factory=TrainRecipe)

    def __post_init__(self) -> None:
        if self.train.objective == "teacher_forced" and self.task.block > 1:
            raise ValueError(
                f"Teacher forcing trains on single frames, but {self.task.name} predicts {self.task.block} per call; "
                "use the objective direct."
            )
        if self.train.keep == "best" and not (self.train.validation or self.task.validation):
            raise ValueError("keep is best, which needs validation data; set validation above 0, or keep to final.")

    def split(self, count: int, digests: Sequence[bytes] | None = None) -> Split:
        """Split `count` trajectories into train, validation and test; `digests` of a store reveal duplicates."""
        task = self.task
        if not task.validation:
            return split(count, task.train, task.test, self.train.validation, digests)
        return split(count, task.train + task.validation, task.test, task.validation, digests)

    def split_of(self, data: Reader) -> Split:
        """Return the split of these data: the published one if there is one, otherwise the task's."""
        published = data.published_split
        if published is None:
            return self.split(len(data), data.digests)
        published.check(data.digests)
        return published

    def windows_of(self, data: Reader, part: str, spec: WindowSpec | None = None) -> Windows | None:
        """Return the windows of a part of these data, by default as long as training or evaluation needs them, or None
        if it is empty. Windows listed by the data set are used unless the task splits by trajectory."""
        if spec is None:
            spec = self.training_window_spec() if part == "train" else self.evaluation_window_spec()
        lists = data.published_windows if self.task.split == "published" else None
        if lists is None:
            trajectories = getattr(self.split_of(data), part)
            return Windows(data, trajectories, spec) if trajectories else None
        listed = lists.windows(part)
        return Windows(data, lists.trajectories(part), spec, listed) if listed else None

    def training_window_spec(self) -> WindowSpec:
        """Windows with futures as long as the objective requires."""
        ahead = {
            "direct": self.task.block,
            "teacher_forced": self.task.horizon,
            "pushforward": self.train.calls * self.task.block,
        }
        windows = self._windows(ahead[self.train.objective])
        return windows if self.train.starts is None else replace(windows, windows_per_trajectory=self.train.starts)

    def evaluation_window_spec(self, horizon: int | None = None) -> WindowSpec:
        """Windows with futures as long as the task's horizon; with another horizon, all windows that fit."""
        windows = replace(self._windows(horizon or self.task.horizon), skip=self.task.skip)
        return windows if horizon in (None, self.task.horizon) else replace(windows, windows_per_trajectory=None)

    def _windows(self, horizon: int) -> WindowSpec:
        task = self.task
        return WindowSpec(
            inputs=task.inputs,
            targets=task.targets,
            history=task.history,
            horizon=horizon,
            windows_per_trajectory=task.starts,
            stride=task.stride,
            time_stride=task.time_stride,
            space_stride=task.space_stride,
            steady=task.steady,
        )

    def to_plain(self) -> dict[str, Any]:
        plain: dict[str, Any] = to_plain(self)
        return plain

    @staticmethod
    def from_plain(plain: object) -> Recipe:
        return from_plain(Recipe, plain)


def changed(recipe: Recipe, settings: str | Sequence[str]) -> Recipe:
    """Return the recipe with `name=value` settings applied; setting `train.epochs` unsets `train.updates`."""
    assignments = assignment_list(settings)
    names = [assignment.partition("=")[0].strip() for assignment in assignments]
    implied = ["train.updates=none"] if "train.epochs" in names and "train.updates" not in names else []
    return override(recipe, [*assignments, *implied])
