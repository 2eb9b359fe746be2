"""One training update at the paper's sizes: the eager float32 rFFT form (its protocol) against what trains here.

    python benchmarks/step.py --device cuda --out results/step.jsonl

Reference: torch as it is, TF32 off, FFTs, plain operations; NS2D as ten single-frame passes and one update. Against it
the same model with thin matrix products in place of FFTs, NS2D's ten frames folded into one batch, the whole update as
one CUDA graph: with plain operations and with fused ones, in TF32 and bf16. Ratios are within one run; random data.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from measure import append_rows

from sigmasolver.data.header import Header
from sigmasolver.data.normalise import Normaliser
from sigmasolver.data.windows import Windows
from sigmasolver.models.spectral import SpectralOperator
from sigmasolver.ops import fused
from sigmasolver.ops.fourier import axis_fourier_rfft
from sigmasolver.parallel import World
from sigmasolver.recipes import Recipe, recipe_of
from sigmasolver.runs import provenance
from sigmasolver.simulate.simulator import Layout
from sigmasolver.tasks import field_groups
from sigmasolver.train.engine import Place, Stepper
from sigmasolver.train.loop import Plan
from sigmasolver.train.objectives import Price
from sigmasolver.trained import build

SEED, WARM, STEPS = 0, 8, 20


class Noise:
    """Random trajectories, so that nothing has to be simulated."""

    def __init__(self, recipe: Recipe, count: int) -> None:
        task = recipe.task
        fields = tuple(dict.fromkeys((*task.inputs, *task.targets)))
        frames = 1 if task.steady else task.history + max(task.horizon, task.block)
        axes = tuple(np.arange(float(points)) for points in task.grid)
        layout = Layout(fields, ("1",) * len(fields), ("open",) * len(axes), axes, np.arange(float(frames)))
        self.header = Header(layout, "noise", {})
        self.values = torch.randn(count, frames, *task.grid, len(fields))

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.values[index]


def prepared(task: str, device: torch.device, precision: str) -> tuple[Recipe, Windows]:
    recipe = recipe_of(task, seed=SEED)
    # Thinning and counts belong to stored data; here the trajectories are made to measure.
    bare = replace(recipe.task, space_stride=1, time_stride=1, starts=None, normaliser="none")
    plan = replace(recipe.train, updates=10_000, precision=precision, one_start=False, starts=None)
    recipe = replace(recipe, task=bare, train=plan)
    source = Noise(recipe, recipe.train.batch)
    return recipe, Windows(source, range(len(source)), recipe.training_windows()).resident(device)


def identity(fields: tuple[str, ...]) -> Normaliser:
    q = len(fields)
    return Normaliser("none", fields, torch.zeros(q, dtype=torch.float64), torch.ones(q, dtype=torch.float64))


def reference(task: str, device: torch.device) -> Callable[[], None]:
    """The paper's protocol."""
    recipe, windows = prepared(task, device, "float32")
    forecaster = build(recipe, identity(recipe.task.inputs), identity(recipe.task.targets)).to(device)
    for module in forecaster.modules():
        if isinstance(module, SpectralOperator):
            module.operator = axis_fourier_rfft
    optimiser = torch.optim.AdamW(forecaster.parameters(), lr=1e-4, weight_decay=1e-5)
    price = Price(tuple(field_groups(recipe.task.targets).values()), recipe.train.derivative)
    history, future = windows.batch(list(range(recipe.train.batch)))
    ahead = recipe.task.horizon if recipe.train.objective == "teacher_forced" else 1

    def step() -> None:
        optimiser.zero_grad(set_to_none=True)
        frames = torch.cat((history, future), dim=1) if ahead > 1 else history
        for lead in range(ahead):
            given = frames[:, lead : lead + recipe.task.history]
            truth = future[:, lead : lead + 1] if ahead > 1 else future[:, : recipe.task.block]
            price(forecaster(given), truth).mean().backward()
        optimiser.step()

    def plainly() -> None:
        with fused.plain():
            step()

    return plainly


def captured(task: str, device: torch.device, precision: str, engine: str, plain: bool) -> Callable[[], None]:
    recipe, windows = prepared(task, device, precision)
    forecaster = build(recipe, identity(recipe.task.inputs), identity(recipe.task.targets)).to(device)
    plan = Plan(recipe, windows)
    stepper = Stepper(recipe, forecaster, windows, plan.members, plan.rates(), Place(World(device=device), engine))
    done = [0]

    def step() -> None:
        with fused.plain() if plain else nullcontext():
            stepper.run(done[0])
        done[0] += 1

    return step


def seconds(step: Callable[[], None], count: int) -> tuple[float, float]:
    """Of one step, and the most memory in GB, after warming up."""
    torch.cuda.reset_peak_memory_stats()
    for _ in range(WARM if count > 5 else 3):
        step()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / count, torch.cuda.max_memory_allocated() / 1e9


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("tasks", nargs="*", default=["darcy", "ns2d", "kf2d", "smoke3d"])
    words.add_argument("--device", default="cuda", type=torch.device)
    words.add_argument("--engine", default="graph")
    words.add_argument("--out", type=Path)
    given = words.parse_args()
    source = provenance(given.device)
    for task in given.tasks:
        count = 4 if task in ("smoke3d", "it3d") else STEPS
        torch.manual_seed(SEED)
        base, memory = seconds(reference(task, given.device), count)
        rows = [("reference", "float32", base, memory)]
        forms = [("plain", "bf16"), ("fused", "float32"), ("fused", "tf32"), ("fused", "bf16")]
        for form, precision in forms[1:] if count < 5 else forms:
            torch.cuda.empty_cache()
            step = captured(task, given.device, precision, given.engine, form == "plain")
            rows.append((f"{given.engine}, {form}", precision, *seconds(step, count)))
            del step
        for form, precision, value, memory in rows:
            print(
                f"{task:8} {form:16} {precision:8} {1e3 * value:8.2f} ms  {base / value:6.2f}x  {memory:6.2f} GB",
                flush=True,
            )
            if given.out:
                row = {"benchmark": "step", "task": task, "form": form, "precision": precision, "seed": SEED}
                numbers = {"milliseconds": 1e3 * value, "ratio": base / value, "gigabytes": memory}
                append_rows(given.out, [{**row, **numbers, **source}])
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
