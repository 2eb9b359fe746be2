"""Darcy at 85², 1,000 cases: the time of a training step in every engine, and the error after a short schedule.

    python benchmarks/train.py --device cuda --work SCRATCH --out results/train.jsonl

Simulates the data into SCRATCH, times one step of batch 4 in each engine in one run (median of interleaved rounds),
then trains 20 epochs in TF32 and evaluates on the 200 test cases. Rows: one per engine, one per logged loss, and the
records of the evaluation.
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


def short_recipe(epochs: int, device: torch.device) -> Recipe:
    recipe, precision = recipe_of("darcy", seed=SEED), "tf32" if device.type == "cuda" else "float32"
    return replace(recipe, train=replace(recipe.train, epochs=epochs, validation=0.0, precision=precision))


def time_engines(data: Path, recipe: Recipe, device: torch.device) -> list[dict[str, object]]:
    engines = [name for name in ENGINES if device.type == "cuda" or "graph" not in name]
    rows: list[dict[str, object]] = []
    for precision in ("float32", "tf32", "bf16"):
        timed_recipe = replace(recipe, train=replace(recipe.train, precision=precision, updates=10_000))
        with open_store(data) as store:
            windows = Windows(store, range(recipe.task.train), recipe.training_window_spec()).resident(device)
            plan = StepPlan(timed_recipe, windows)
            candidates = {}
            for engine in engines:
                forecaster = build(timed_recipe, *fit(recipe.task.normaliser, windows)).to(device)
                execution = Execution(World(device=device), engine)
                stepper = Stepper(timed_recipe, forecaster, windows, plan.members, plan.rates(), execution)
                candidates[engine] = _RunSteps(stepper)
            seconds = compare(candidates, device, ROUNDS)
        rows += [
            {"measure": "step", "engine": name, "precision": precision, "milliseconds": 1000 * value / STEPS}
            for name, value in seconds.items()
        ]
    return rows


class _RunSteps:
    """Runs the next STEPS steps on each call."""

    def __init__(self, stepper: Stepper) -> None:
        self.stepper, self.step = stepper, 0

    def __call__(self) -> None:
        for _ in range(STEPS):
            self.stepper.run(self.step)
            self.step += 1


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--cases", type=int, default=1000)
    args = parser.parse_args()
    device = torch.device(args.device)
    recipe = short_recipe(args.epochs, device)
    recipe = replace(recipe, task=replace(recipe.task, train=args.cases, test=args.cases // 5))
    source = {"case": "darcy 85², batch 4", "cases": args.cases, "seed": SEED, **provenance(device)}
    generate(simulator_of("darcy"), args.cases + args.cases // 5, 0, args.work / "darcy.h5", device)

    run = Run(args.work / "run")
    engine = "graph" if device.type == "cuda" else "eager"
    train_run(recipe, args.work / "darcy.h5", run, Execution(World(device=device), engine))
    loss = [{"measure": "loss", **row} for row in read_rows(run.log)]
    append_rows(args.out, [{**source, "engine": engine, "precision": recipe.train.precision, **row} for row in loss])
    scores = evaluate_run(run, Request(batch=50), world=World(device=device))
    totals = [row for row in scores if row["lead"] is None and row["field"] in (None, "pressure")]
    append_rows(args.out, [{**source, **row, "measure": "error"} for row in totals])
    print(json.dumps([{key: row[key] for key in ("model", "metric", "value")} for row in totals], indent=1))

    rows = time_engines(args.work / "darcy.h5", recipe, device)
    append_rows(args.out, [{**source, **row} for row in rows])
    print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
