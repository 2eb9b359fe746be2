"""From a recipe to a forecaster and back from disk: the one place that knows what a trained run consists of."""

from __future__ import annotations

from pathlib import Path

import torch

from sigmasolver.data.normalise import Normaliser
from sigmasolver.forecast import Forecaster
from sigmasolver.models import build_solver
from sigmasolver.recipes import Recipe
from sigmasolver.runs import Run, read_tensors, write_tensors

__all__ = ["build", "load", "save"]


def build(recipe: Recipe, inputs: Normaliser, targets: Normaliser) -> Forecaster:
    """An untrained forecaster; the recipe's seed fixes its weights."""
    torch.manual_seed(recipe.train.seed)
    model = build_solver(recipe.model.name, recipe.model.config(recipe.task))
    return Forecaster(model, inputs, targets, recipe.task.block, recipe.task.boundary)


def save(run: Run, forecaster: Forecaster, step: int, fingerprint: str) -> None:
    """The weights, with the normalisers and where they come from."""
    facts = {
        "step": step,
        "data": fingerprint,
        "inputs": forecaster.inputs.to_dict(),
        "targets": forecaster.targets.to_dict(),
    }
    write_tensors(run.weights, forecaster.model.state_dict(), facts)


def load(path: str | Path, device: torch.device | str = "cpu") -> Forecaster:
    """The forecaster of a run, ready to use: `load("runs/mine")(history)`; no training data is needed."""
    run = Run(path)
    recipe = Recipe.from_plain(run.recipe())
    tensors, facts = read_tensors(run.weights, device)
    forecaster = build(recipe, Normaliser.from_dict(facts["inputs"]), Normaliser.from_dict(facts["targets"]))
    held, wanted = {name: tuple(t.shape) for name, t in tensors.items()}, forecaster.model.state_dict()
    if held != {name: tuple(t.shape) for name, t in wanted.items()}:
        raise ValueError(f"The weights of {run.path} do not fit the model of its recipe; copy the whole folder again.")
    forecaster.model.load_state_dict(tensors)
    return forecaster.to(device).eval()
