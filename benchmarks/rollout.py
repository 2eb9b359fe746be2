"""Frames per second of free rollouts at the paper's sizes: operation by operation, and replayed as a CUDA graph.

    python benchmarks/rollout.py --device cuda --out results/rollout.jsonl
    python benchmarks/rollout.py --device cpu --out results/rollout.jsonl

Reference: eager, float32 with TF32 off, FFTs and plain operations. Against it the same weights with thin matrix
products in place of FFTs (fused operations on a GPU), then the whole forecaster as a graph in float32, TF32 and bf16;
on a CPU bf16 alone, on two axes, because there are no graphs. One trajectory and the recipe's batch; a CPU takes one
trajectory of two tasks. Times are medians of interleaved rollouts, ratios within one run; random data, fresh weights.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from measure import append_rows, compare

from sigmasolver.forecast.replay import Replay
from sigmasolver.models.spectral import SpectralOperator
from sigmasolver.ops import dispatch
from sigmasolver.ops.fourier import axis_fourier_rfft
from sigmasolver.ops.memory import keep_freed_memory
from sigmasolver.ops.precision import matmul_precision
from sigmasolver.recipes import Recipe, changed, recipe_of
from sigmasolver.runs import provenance
from sigmasolver.train.dry_run import forecaster_of

SEED = 0
TASKS = {"cuda": ("ns2d", "kf2d", "it3d", "smoke3d"), "cpu": ("ns2d", "smoke3d")}
CALLS = {("cuda", 2): 20, ("cuda", 3): 6, ("cpu", 2): 1, ("cpu", 3): 1}
"""Calls of the model in one rollout, by device and axes."""
REPEATS = {"cuda": 7, "cpu": 2}


def forms(recipe: Recipe, history: torch.Tensor, steps: int) -> dict[str, Callable[[], object]]:
    """One rollout, by form and precision."""
    device = history.device
    # The seed alone decides the weights, so both have the same.
    eager, reference = (forecaster_of(recipe, device).eval() for _ in range(2))
    for module in reference.modules():
        if isinstance(module, SpectralOperator):
            module.operator = axis_fourier_rfft

    def plainly() -> object:
        with dispatch.plain(), matmul_precision("float32"):
            return reference.rollout(history, steps)

    def eagerly() -> object:
        with matmul_precision("float32"):
            return eager.rollout(history, steps)

    def fast(precision: str) -> Callable[[], object]:
        replay = Replay(eager, precision)
        return lambda: replay.rollout(history, steps)

    made: dict[str, Callable[[], object]] = {"eager, FFT, float32": plainly, "eager, float32": eagerly}
    if device.type == "cpu":
        # Convolutions over three axes in bf16 take minutes on a CPU without units for it.
        return made if len(recipe.task.grid) == 3 else {**made, "eager, bf16": fast("bf16")}
    return {**made, **{f"graph, {precision}": fast(precision) for precision in ("float32", "tf32", "bf16")}}


def measured(recipe: Recipe, batch: int, calls: int, repeats: int, device: torch.device) -> list[dict[str, object]]:
    """A row for each form."""
    task = recipe.task
    steps = calls * task.block
    torch.manual_seed(SEED)
    history = torch.randn(batch, task.history, *task.grid, len(task.inputs), device=device)
    times = compare(forms(recipe, history, steps), device, repeats)
    base = next(iter(times.values()))
    rows: list[dict[str, object]] = []
    for name, seconds in times.items():
        form, _, precision = name.rpartition(", ")
        row: dict[str, object] = {"benchmark": "rollout", "task": task.name, "batch": batch, "form": form}
        row |= {"precision": precision, "grid": list(task.grid), "width": recipe.model.width, "calls": calls}
        row |= {"frames": steps, "frames_per_second": batch * steps / seconds, "ratio": base / seconds}
        rows.append({**row, "milliseconds_per_call": 1e3 * seconds / calls, "seed": SEED, "repeats": repeats})
    return rows


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("tasks", nargs="*")
    words.add_argument("--device", default="cuda", type=torch.device)
    words.add_argument("--calls", type=int, help="calls of the model in one rollout")
    words.add_argument("--repeats", type=int)
    words.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="change a recipe")
    words.add_argument("--system", action="store_true", help="freed memory goes back to the system")
    words.add_argument("--out", type=Path)
    given = words.parse_args()
    kind, source = given.device.type, provenance(given.device)
    kept = not given.system and keep_freed_memory()  # as the command line does
    repeats = given.repeats or REPEATS[kind]
    print(f"{source['machine']}, torch {source['torch']}, median of {repeats}")
    for name in given.tasks or TASKS[kind]:
        recipe = changed(recipe_of(name, seed=SEED), given.set)
        calls = given.calls or CALLS[kind, len(recipe.task.grid)]
        for batch in dict.fromkeys((1, recipe.train.batch) if kind == "cuda" else (1,)):
            for row in measured(recipe, batch, calls, repeats, given.device):
                what = f"{name:8} batch {batch:2}  {row['form']:10} {row['precision']:8}"
                each = f"{row['milliseconds_per_call']:9.2f} ms a call"
                print(f"{what} {row['frames_per_second']:9.2f} frames/s {each} {row['ratio']:6.2f}x", flush=True)
                if given.out:
                    append_rows(given.out, [{**row, "memory": "kept" if kept else "system", **source}])
            if kind == "cuda":
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
