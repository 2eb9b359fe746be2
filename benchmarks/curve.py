"""Compare training in bf16 with float32: loss curves of the same seeds.

    python benchmarks/curve.py --device cuda --work SCRATCH --out results/curve.jsonl

Darcy, simulated into SCRATCH; the first updates of a training for several seeds, once in float32 with plain operations
and once in bf16 with fused ones (same initial weights, same batches). Losses are averaged over BIN updates. Rows: for
each bin the mean float32 loss, its standard deviation over seeds (spread), and the RMS difference of bf16 over seeds;
one summary row with the largest ratio of difference to spread, which is below one if bf16 matters less than the seed.
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
    """The losses (steps,) of one training, with plain operations in float32 and fused ones in bf16."""
    torch.manual_seed(recipe.train.seed)
    captured = device.type == "cuda"
    with open_store(path) as store, dispatch.plain() if recipe.train.precision == "float32" else nullcontext():
        windows = Windows(store, range(len(store)), recipe.training_window_spec()).resident(device)
        forecaster = build(recipe, *fit(recipe.task.normaliser, windows)).to(device)
        plan = StepPlan(recipe, windows)
        execution = Execution(World(device=device), "graph" if captured else "eager")
        stepper = Stepper(recipe, forecaster, windows, plan.members, plan.rates(), execution)
        values = []
        for step in range(steps):
            stepper.run(step)
            values.append(stepper.loss.clone())
    return torch.stack(values).double().cpu()


def compare_curves(
    path: Path, device: torch.device, steps: int, seeds: int, settings: list[str]
) -> list[dict[str, float]]:
    """Compare the loss curves; one row per bin."""
    curves = {}
    for precision in ("float32", "bf16"):
        recipes = [changed(recipe_of("darcy", seed=seed), settings) for seed in range(seeds)]
        recipes = [replace(r, train=replace(r.train, updates=steps, precision=precision)) for r in recipes]
        per_seed = torch.stack([losses(recipe, path, device, steps) for recipe in recipes])
        curves[precision] = per_seed.unflatten(1, (-1, BIN)).mean(-1)
    float32, bf16 = curves["float32"], curves["bf16"]
    rows = zip(float32.mean(0), float32.std(0), (bf16 - float32).square().mean(0).sqrt(), strict=True)
    names = ("loss", "spread", "difference")
    return [
        {"update": BIN * (index + 1), **dict(zip(names, map(float, row), strict=True))}
        for index, row in enumerate(rows)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", type=torch.device)
    parser.add_argument("--work", type=Path, default=Path("."))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--cases", type=int, default=256)
    parser.add_argument("--set", dest="settings", action="append", default=[])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    path = args.work / "darcy-curve.h5"
    generate(simulator_of("darcy"), args.cases, 0, path, args.device)
    rows = compare_curves(path, args.device, args.steps, args.seeds, args.settings)
    worst = max(row["difference"] / row["spread"] for row in rows)
    for row in rows:
        print("  ".join(f"{name} {value:.4g}" for name, value in row.items()), flush=True)
    print(f"largest difference to spread over seeds: {worst:.2f}")
    if args.out:
        source = {"benchmark": "curve", "task": "darcy", "seeds": args.seeds, "cases": args.cases}
        facts = {**source, **provenance(args.device)}
        append_rows(args.out, [{**facts, **row} for row in rows] + [{**facts, "worst": worst}])


if __name__ == "__main__":
    main()
