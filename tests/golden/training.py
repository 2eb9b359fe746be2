"""Every task at a tiny size, from simulation through store, windows and training to evaluation."""

import hashlib
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sigmasolver.data.store import open_store
from sigmasolver.evaluate import evaluate_run
from sigmasolver.models import list_models
from sigmasolver.recipes import Recipe, changed, recipe_of
from sigmasolver.runs import Run, provenance, read_rows, read_tensors
from sigmasolver.settings import override
from sigmasolver.simulate import simulator_of
from sigmasolver.simulate.generate import generate
from sigmasolver.train.job import train_run

UPDATES, FAMILY_UPDATES = 20, 8
MODEL = ("model.width=16", "model.depth=2", "model.heads=2", "model.slices=4", "model.modes=3")
RATE = "train.lr=0.01"
"""Ten times the paper's, so that the slice gains, which start at zero, have an effect within 20 updates."""


@dataclass(frozen=True)
class Case:
    """A task with the paper's recipe at smaller sizes and budgets."""

    task: str
    grid: tuple[int, ...]
    train: int
    test: int
    simulator: tuple[str, ...]
    settings: tuple[str, ...] = ()

    def recipe(self, updates: int) -> Recipe:
        sizes = (f"task.grid={self.grid}", f"task.train={self.train}", f"task.test={self.test}")
        # A check after every update logs every loss; without validation data a check costs nothing.
        budget = (f"train.updates={updates}", f"train.checks={updates}")
        return changed(recipe_of(self.task), [*sizes, *budget, *MODEL, RATE, *self.settings])

    def generate(self, path: Path) -> None:
        generate(override(simulator_of(self.task), self.simulator), self.train + self.test, 0, path)


CASES = {
    case.task: case
    for case in (
        Case("darcy", (13, 13), 12, 4, ("grid=61",)),
        Case("ns2d", (16, 16), 6, 2, ("grid=32", "stored=16", "step=0.025", "interval=0.25")),
        Case(
            "kf2d",
            (16, 16),
            5,
            2,
            ("grid=32", "stored=32", "step=0.015625", "burn_in=0.25", "frames=56"),
            ("task.starts=3",),
        ),
        Case("it3d", (12, 12, 12), 4, 2, ("grid=12", "step=0.01", "steps_per_frame=5")),
        Case("smoke3d", (12, 12, 12), 4, 2, ("grid=12", "waves=4")),
    )
}


def measure_task(name: str, folder: Path) -> dict[str, Any]:
    """Measure data, losses, weights and errors of one short training."""
    case, data, run = CASES[name], folder / "data.h5", Run(folder / "run")
    case.generate(data)
    with open_store(data) as store:
        fields = torch.cat([torch.from_numpy(store[index]).flatten() for index in range(len(store))])
    measured = {"data": {"norm": float(fields.double().norm()), "digest": _digest([fields])}}
    measured |= _train(case.recipe(UPDATES), data, run)
    rows = [row for row in evaluate_run(run) if row["metric"] == "relative_l2_joint"]
    return {**measured, "errors": {row["model"]: row["value"] for row in rows}}


def measure_models(folder: Path, noise: float = 0.0) -> dict[str, Any]:
    """Measure the first losses and the weights of every model, on Darcy, with this noise on the normalised inputs."""
    case, data = CASES["darcy"], folder / "data.h5"
    case.generate(data)
    settings = (f"train.noise={noise}",)
    recipes = {name: changed(case.recipe(FAMILY_UPDATES), [f"model.name={name}", *settings]) for name in list_models()}
    return {name: _train(recipe, data, Run(folder / name)) for name, recipe in recipes.items()}


def largest_changes(measured: dict[str, Any], others: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Relative changes of all numbers, in the same structure; that of a loss includes those of earlier losses."""
    result: dict[str, Any] = {}
    for name, value in measured.items():
        compared = [other[name] for other in others]
        if isinstance(value, dict):
            result[name] = largest_changes(value, compared)
        elif isinstance(value, list):
            each = [max(abs(b / a - 1) for b in column) for a, *column in zip(value, *compared, strict=True)]
            result[name] = [float(f"{change:.1e}") for change in itertools.accumulate(each, max)]
        elif name != "digest":
            result[name] = float(f"{max(abs(other / value - 1) for other in compared):.1e}")
    return result


def machine() -> dict[str, str]:
    """Return the properties of the machine that affect round-off."""
    facts = provenance(torch.device("cpu"))
    return {"capability": torch.backends.cpu.get_cpu_capability()} | {
        name: facts[name] for name in ("machine", "torch")
    }


def _train(recipe: Recipe, data: Path, run: Run) -> dict[str, Any]:
    train_run(recipe, data, run)
    weights = dict(sorted(read_tensors(run.weights)[0].items()))
    groups: dict[str, list[torch.Tensor]] = {}
    for name, tensor in weights.items():
        groups.setdefault(name.partition(".")[0], []).append(tensor.double().flatten())
    norms: dict[str, float | str] = {group: float(torch.cat(tensors).norm()) for group, tensors in groups.items()}
    losses = [row["loss"] for row in read_rows(run.log)]
    return {"losses": losses, "weights": {**norms, "digest": _digest(weights.values())}}


def _digest(tensors: Iterable[torch.Tensor]) -> str:
    return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors)).hexdigest()[:16]
