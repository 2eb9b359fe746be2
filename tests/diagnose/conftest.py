"""A small flow data set and briefly trained runs: two seeds of one model, and a baseline."""

import shutil
from dataclasses import replace

import pytest

from sigmasolver.models import Options
from sigmasolver.recipes import ModelRecipe, Recipe, TrainRecipe
from sigmasolver.runs import Run
from sigmasolver.simulate.generate import generate
from sigmasolver.simulate.vorticity import DEMO
from sigmasolver.tasks import Task
from sigmasolver.train.job import train_run

FLOW = replace(DEMO, grid=32, stored=16, step=1 / 64, burn_in=1.0, frames=8)
TASK = Task("tiny", ("vorticity",), ("vorticity",), (16, 16), 2, 1, 3, 6, 2, "channel")
MODEL = ModelRecipe(width=16, depth=2, heads=2, slices=4, modes=3, options=Options(dropout=0.1))
RECIPE = Recipe(TASK, MODEL, TrainRecipe(updates=12, batch=4, seed=3, checks=1))


@pytest.fixture(scope="session")
def study(tmp_path_factory):
    """flow.h5, and the runs `first` (seed 3), `second` (seed 4) and `ffno`."""
    folder = tmp_path_factory.mktemp("study")
    generate(FLOW, 8, 0, folder / "flow.h5")
    recipes = {
        "first": RECIPE,
        "second": replace(RECIPE, train=replace(RECIPE.train, seed=4)),
        "ffno": replace(RECIPE, model=replace(MODEL, name="ffno", options=Options())),
    }
    for name, recipe in recipes.items():
        train_run(recipe, folder / "flow.h5", Run(folder / name))
    return folder


@pytest.fixture
def runs(study, tmp_path):
    """Copies of the runs by name, without diagnoses."""
    for name in ("first", "second", "ffno"):
        shutil.copytree(study / name, tmp_path / name)
    return {name: Run(tmp_path / name) for name in ("first", "second", "ffno")}
