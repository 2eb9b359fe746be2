"""Small subjects to diagnose: drifting waves with two fields, and models with perturbed weights."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from sigmasolver.data.header import Header
from sigmasolver.data.layout import Layout
from sigmasolver.data.normalise import Normaliser
from sigmasolver.data.windows import Windows, spread_evenly
from sigmasolver.diagnose.subject import Subject
from sigmasolver.forecast.checkpoint import build
from sigmasolver.models import Options
from sigmasolver.recipes import ModelRecipe, Recipe, TrainRecipe
from sigmasolver.runs import Run
from sigmasolver.simulate.generate import Stream
from sigmasolver.tasks import Task
from tests.data.memory import Memory
from tests.data.waves import Waves

FIELDS = ("height", "slope")
WAVES = Waves(grid=8, frames=9)
TASK = Task("waves", FIELDS, FIELDS, (8, 8), 2, 1, 4, 4, 2, "channel")
MODEL = ModelRecipe(width=16, depth=2, heads=2, slices=5, modes=3, options=Options(padding=("circular", "circular")))
RECIPE = Recipe(TASK, MODEL, TrainRecipe(updates=200, batch=4, lr=5e-3, checks=0, validation=0.0))
STEADY = replace(TASK, inputs=("height",), targets=("slope",), history=1, horizon=1, steady=True)


def perturb(module: torch.nn.Module, scale: float) -> None:
    """Add noise to every parameter: gamma is no longer zero, attention no longer uniform."""
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(scale * torch.randn_like(parameter))


def subject_of(
    name: str = "transolver-sigma",
    task: Task = TASK,
    noise: float = 0.2,
    dtype: torch.dtype = torch.float32,
    windows: int | None = 5,
) -> Subject:
    """A perturbed model and windows of the last two trajectories."""
    recipe = replace(RECIPE, task=task, model=replace(MODEL, name=name))
    all_windows = Windows(Stream(WAVES, 0, count=6), (4, 5), recipe.evaluation_window_spec())
    return _subject(recipe, all_windows, noise, dtype, windows)


def subject_in_3d() -> Subject:
    """Noise on a grid with three axes of different lengths."""
    grid = (4, 5, 6)
    data = np.random.default_rng(0).normal(size=(2, 9, *grid, 2)).astype(np.float32)
    axes = tuple(np.arange(float(points)) for points in grid)
    layout = Layout(FIELDS, ("1", "1"), ("periodic",) * 3, axes, np.arange(9.0))
    model = replace(MODEL, modes=2, options=Options())
    recipe = Recipe(replace(TASK, grid=grid, horizon=2), model, RECIPE.train)
    all_windows = Windows(Memory(Header(layout, "test", {}), data), (0, 1), recipe.evaluation_window_spec())
    return _subject(recipe, all_windows, 0.2, torch.float32, 4)


def _subject(recipe: Recipe, all_windows: Windows, noise: float, dtype: torch.dtype, windows: int | None) -> Subject:
    inputs, targets = (_normaliser(names) for names in (recipe.task.inputs, recipe.task.targets))
    forecaster = build(recipe, inputs, targets).to(dtype).eval()
    perturb(forecaster, noise)
    selected = spread_evenly(len(all_windows), windows)
    return Subject(Run("nowhere"), recipe, forecaster, all_windows, selected, all_windows.spec.horizon, batch=2)


def _normaliser(names: tuple[str, ...]) -> Normaliser:
    mean = {"height": 0.1, "slope": -0.2}
    scale = {"height": 0.8, "slope": 1.5}
    return Normaliser(
        "channel", names, *(torch.tensor([values[name] for name in names]).double() for values in (mean, scale))
    )


def hooks_in(module: torch.nn.Module) -> int:
    """Number of forward hooks in all sub-modules."""
    return sum(len(submodule._forward_hooks) + len(submodule._forward_pre_hooks) for submodule in module.modules())


def rows_named(findings, metric, **where):
    """The rows of a metric at this field, lead, layer and case (default: None)."""
    required = {"field": None, "lead": None, "layer": None, "case": None, **where}
    return [row for row in findings.rows if row["metric"] == metric and required.items() <= row.items()]


def number(findings, metric, **where):
    """The value of the only matching row."""
    (row,) = rows_named(findings, metric, **where)
    return row["value"]
