"""From a recipe to a forecaster and back from disk: the one place that knows what a trained run consists of."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from sigmasolver.data.normalise import Normaliser
from sigmasolver.forecast import Forecaster
from sigmasolver.models import build_solver
from sigmasolver.recipes import Recipe
from sigmasolver.runs import Run, read_tensors, write_tensors

__all__ = ["begin", "build", "data_of", "load", "read_normalisers", "recipe_in", "save", "write_normalisers"]


def build(recipe: Recipe, inputs: Normaliser, targets: Normaliser) -> Forecaster:
    """An untrained forecaster; the recipe's seed fixes its weights."""
    torch.manual_seed(recipe.train.seed)
    model = build_solver(recipe.model.name, recipe.model.config(recipe.task))
    return Forecaster(model, inputs, targets, recipe.task.block, recipe.task.boundary, history=recipe.task.history)


def recipe_in(run: Run) -> Recipe:
    """The recipe of a run folder."""
    try:
        return Recipe.from_plain(run.recipe())
    except ValueError as error:
        raise ValueError(f"The recipe of {run.path} cannot be used: {error}") from None


def begin(run: Run, recipe: Recipe) -> None:
    """Write the recipe, or make sure that the folder holds this one; a setting that its file lacks has its default."""
    if not (run.path / "recipe.json").exists() or recipe_in(run) != recipe:
        run.start(recipe.to_plain())


def data_of(run: Run) -> Path:
    """The file that a run learns from."""
    named = run.read_json("data.json").get("path")
    if not isinstance(named, str):
        raise ValueError(f"data.json of {run.path} does not name a file; name it with --data.")
    path = run.path / named  # data inside the folder move with it
    if not path.exists():
        raise ValueError(f"The data of {run.path} is no longer at {path}; name its new place with --data.")
    return path


def write_normalisers(run: Run, inputs: Normaliser, targets: Normaliser, fingerprint: str) -> None:
    """The maps of a run, with the fingerprint of the data they were fitted on."""
    facts = {"data": fingerprint, "inputs": inputs.to_dict(), "targets": targets.to_dict()}
    run.write_json("normaliser.json", facts)


def read_normalisers(run: Run) -> tuple[Normaliser, Normaliser]:
    """What `write_normalisers` wrote."""
    facts = run.read_json("normaliser.json")
    try:
        inputs, targets = (Normaliser.from_dict(facts[name]) for name in ("inputs", "targets"))
        return inputs, targets
    except (KeyError, TypeError, AttributeError):
        raise ValueError(f"normaliser.json of {run.path} is not whole; copy it again or start the run anew.") from None


def save(run: Run, weights: Mapping[str, torch.Tensor], step: int, steps: int, fingerprint: str) -> None:
    """The weights, with their step of so many, and the data they come from."""
    write_tensors(run.weights, weights, {"step": step, "steps": steps, "data": fingerprint})


def load(path: str | Path, device: torch.device | str = "cpu") -> Forecaster:
    """The forecaster of a run, ready to use: `load("runs/mine").rollout(history, 50)`; no training data is needed."""
    run = Run(path)
    recipe = recipe_in(run)
    if run.resume.exists() and not run.weights.exists():
        raise ValueError(f"{run.path} is not finished; go on with: sigmasolver train --resume {run.path}")
    tensors, _ = read_tensors(run.weights, device)
    inputs, targets = read_normalisers(run)
    forecaster = build(recipe, inputs, targets)
    held, wanted = {name: tuple(t.shape) for name, t in tensors.items()}, forecaster.model.state_dict()
    if held != {name: tuple(t.shape) for name, t in wanted.items()}:
        raise ValueError(f"The weights of {run.path} do not fit the model of its recipe; copy the whole folder again.")
    forecaster.model.load_state_dict(tensors)
    return forecaster.to(device).eval()
