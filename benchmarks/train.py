"""Darcy at 85², 1,000 cases: the time of a training step in every engine, and the error after a short schedule.

    python benchmarks/train.py --device cuda --work SCRATCH --out results/train.jsonl

Simulates the data into SCRATCH, times one step of batch 4 in each engine in one run (median of interleaved rounds),
then trains 20 epochs in TF32 and evaluates on the 200 test cases. Rows: one per engine, one per look of the loss
curve, and the records of the evaluation.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import torch
from measure import append_rows, compare

from sigmasolver.data.normalise import fit
from sigmasolver.data.store import open_store
from sigmasolver.data.windows import Windows
from sigmasolver.evaluate import Request, evaluate_run
from sigmasolver.forecast.checkpoint import build
from sigmasolver.recipes import Recipe, recipe_of
from sigmasolver.runs import Run, provenance, read_rows
from sigmasolver.runtime.parallel import World
from sigmasolver.simulate import simulator_of
from sigmasolver.simulate.generate import generate
from sigmasolver.train.engine import ENGINES, Execution, Stepper
from sigmasolver.train.job import train_run
from sigmasolver.train.loop import StepPlan

SEED, STEPS, ROUNDS = 42, 20, 7


def short(epochs: int) -> Recipe:
    recipe = recipe_of("darcy", seed=SEED)
    return replace(recipe, train=replace(recipe.train, epochs=epochs, validation=0.0, precision="tf32"))


def time_engines(data: Path, recipe: Recipe, device: torch.device) -> list[dict[str, object]]:
    engines = [name for name in ENGINES if device.type == "cuda" or "graph" not in name]
    rows: list[dict[str, object]] = []
    for precision in ("float32", "tf32", "bf16"):
        changed = replace(recipe, train=replace(recipe.train, precision=precision, updates=10_000))
        with open_store(data) as store:
            windows = Windows(store, range(recipe.task.train), recipe.training_windows()).resident(device)
            plan = StepPlan(changed, windows)
            candidates = {}
            for engine in engines:
                forecaster = build(changed, *fit(recipe.task.normaliser, windows)).to(device)
                execution = Execution(World(device=device), engine)
                stepper = Stepper(changed, forecaster, windows, plan.members, plan.rates(), execution)
                candidates[engine] = _Steps(stepper)
            seconds = compare(candidates, device, ROUNDS)
        rows += [
            {"measure": "step", "engine": name, "precision": precision, "milliseconds": 1000 * value / STEPS}
            for name, value in seconds.items()
        ]
    return rows


class _Steps:
    """The next STEPS steps at each call."""

    def __init__(self, stepper: Stepper) -> None:
        self.stepper, self.step = stepper, 0

    def __call__(self) -> None:
        for _ in range(STEPS):
            self.stepper.run(self.step)
            self.step += 1


def main() -> None:
    words = argparse.ArgumentParser()
    words.add_argument("--device", default="cpu")
    words.add_argument("--work", type=Path, required=True)
    words.add_argument("--out", type=Path, required=True)
    words.add_argument("--epochs", type=int, default=20)
    words.add_argument("--cases", type=int, default=1000)
    given = words.parse_args()
    device = torch.device(given.device)
    recipe = short(given.epochs)
    recipe = replace(recipe, task=replace(recipe.task, train=given.cases, test=given.cases // 5))
    source = {"case": "darcy 85², batch 4", "cases": given.cases, "seed": SEED, **provenance(device)}
    generate(simulator_of("darcy"), given.cases + given.cases // 5, 0, given.work / "darcy.h5", device)

    run = Run(given.work / "run")
    engine = "graph" if device.type == "cuda" else "eager"
    train_run(recipe, given.work / "darcy.h5", run, Execution(World(device=device), engine))
    loss = [{"measure": "loss", **row} for row in read_rows(run.log)]
    append_rows(given.out, [{**source, "engine": engine, "precision": "tf32", **row} for row in loss])
    scores = evaluate_run(run, Request(batch=50), world=World(device=device))
    kept = [row for row in scores if row["lead"] is None and row["field"] in (None, "pressure")]
    append_rows(given.out, [{**source, **row, "measure": "error"} for row in kept])
    print(json.dumps([{key: row[key] for key in ("model", "metric", "value")} for row in kept], indent=1))

    rows = time_engines(given.work / "darcy.h5", recipe, device)
    append_rows(given.out, [{**source, **row} for row in rows])
    print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
