"""Whether narrow arithmetic learns as float32 does: loss curves of the same seeds, side by side.

    python benchmarks/curve.py --device cuda --work SCRATCH --out results/curve.jsonl

Darcy, simulated into SCRATCH; the first updates of a training for several seeds, once in float32 with plain operations
and once in bf16 with fused ones (same first weights, same batches). Losses are averaged over BIN updates. Rows: for
each bin the mean float32 loss, its spread over seeds, and the root mean square over seeds of what bf16 differs by; one
summary row with the largest ratio of difference to spread, which is below one where bf16 is lost among the seeds.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from measure import append_rows

from sigmasolver.data.normalise import fit
from sigmasolver.data.store import open_store
from sigmasolver.data.windows import Windows
from sigmasolver.forecast.checkpoint import build
from sigmasolver.ops import dispatch
from sigmasolver.recipes import Recipe, changed, recipe_of
from sigmasolver.runs import provenance
from sigmasolver.runtime.parallel import World
from sigmasolver.simulate import simulator_of
from sigmasolver.simulate.generate import generate
from sigmasolver.train.engine import Execution, Stepper
from sigmasolver.train.loop import StepPlan

BIN = 20


def losses(recipe: Recipe, path: Path, device: torch.device, steps: int) -> torch.Tensor:
    """(steps,) of one training, with plain operations in float32 and fused ones in bf16."""
    torch.manual_seed(recipe.train.seed)
    captured = device.type == "cuda"
    with open_store(path) as store, dispatch.plain() if recipe.train.precision == "float32" else nullcontext():
        windows = Windows(store, range(len(store)), recipe.training_windows()).resident(device)
        forecaster = build(recipe, *fit(recipe.task.normaliser, windows)).to(device)
        plan = StepPlan(recipe, windows)
        execution = Execution(World(device=device), "graph" if captured else "eager")
        stepper = Stepper(recipe, forecaster, windows, plan.members, plan.rates(), execution)
        found = []
        for step in range(steps):
            stepper.run(step)
            found.append(stepper.loss.clone())
    return torch.stack(found).double().cpu()


def compared(path: Path, device: torch.device, steps: int, seeds: int, settings: list[str]) -> list[dict[str, float]]:
    """One row for each bin."""
    curves = {}
    for precision in ("float32", "bf16"):
        recipes = [changed(recipe_of("darcy", seed=seed), settings) for seed in range(seeds)]
        recipes = [replace(one, train=replace(one.train, updates=steps, precision=precision)) for one in recipes]
        every = torch.stack([losses(recipe, path, device, steps) for recipe in recipes])
        curves[precision] = every.unflatten(1, (-1, BIN)).mean(-1)
    exact, narrow = curves["float32"], curves["bf16"]
    rows = zip(exact.mean(0), exact.std(0), (narrow - exact).square().mean(0).sqrt(), strict=True)
    names = ("loss", "spread", "difference")
    return [
        {"update": BIN * (place + 1), **dict(zip(names, map(float, row), strict=True))}
        for place, row in enumerate(rows)
    ]


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--device", default="cuda", type=torch.device)
    words.add_argument("--work", type=Path, default=Path("."))
    words.add_argument("--steps", type=int, default=200)
    words.add_argument("--seeds", type=int, default=5)
    words.add_argument("--cases", type=int, default=256)
    words.add_argument("--set", dest="settings", action="append", default=[])
    words.add_argument("--out", type=Path)
    given = words.parse_args()
    path = given.work / "darcy-curve.h5"
    generate(simulator_of("darcy"), given.cases, 0, path, given.device)
    rows = compared(path, given.device, given.steps, given.seeds, given.settings)
    worst = max(row["difference"] / row["spread"] for row in rows)
    for row in rows:
        print("  ".join(f"{name} {value:.4g}" for name, value in row.items()), flush=True)
    print(f"largest difference to spread over seeds: {worst:.2f}")
    if given.out:
        source = {"benchmark": "curve", "task": "darcy", "seeds": given.seeds, "cases": given.cases}
        facts = {**source, **provenance(given.device)}
        append_rows(given.out, [{**facts, **row} for row in rows] + [{**facts, "worst": worst}])


if __name__ == "__main__":
    main()
