"""Frames per second of free rollouts at the paper's sizes: eager, and replayed as a CUDA graph.

    python benchmarks/rollout.py --device cuda --out results/rollout.jsonl
    python benchmarks/rollout.py --device cpu --out results/rollout.jsonl

Reference: eager, float32 with TF32 off, FFTs and plain operations. Compared with it: the same weights with thin matrix
products instead of FFTs (fused operations on a GPU), then the full forecaster as a graph in float32, TF32 and bf16; on
a CPU, which has no graphs, only bf16 in 2D. Batch sizes are one and that of the recipe; on a CPU one, for two tasks.
Times are medians of interleaved rollouts, ratios within one run; random data, untrained weights.
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
"""Model calls per rollout, by device and number of axes."""
REPEATS = {"cuda": 7, "cpu": 2}


def forms(recipe: Recipe, history: torch.Tensor, steps: int) -> dict[str, Callable[[], object]]:
    """A rollout in each form and precision."""
    device = history.device
    # Both have the same weights, which depend only on the seed.
    eager, reference = (forecaster_of(recipe, device).eval() for _ in range(2))
    for module in reference.modules():
        if isinstance(module, SpectralOperator):
            module.operator = axis_fourier_rfft

    def run_reference() -> object:
        with dispatch.plain(), matmul_precision("float32"):
            return reference.rollout(history, steps)

    def run_eager() -> object:
        with matmul_precision("float32"):
            return eager.rollout(history, steps)

    def replayed(precision: str) -> Callable[[], object]:
        replay = Replay(eager, precision)
        return lambda: replay.rollout(history, steps)

    candidates: dict[str, Callable[[], object]] = {"eager, FFT, float32": run_reference, "eager, float32": run_eager}
    if device.type == "cpu":
        # 3D convolutions in bf16 take minutes on a CPU without bf16 instructions.
        return candidates if len(recipe.task.grid) == 3 else {**candidates, "eager, bf16": replayed("bf16")}
    return {**candidates, **{f"graph, {precision}": replayed(precision) for precision in ("float32", "tf32", "bf16")}}


def measure_forms(
    recipe: Recipe, batch: int, calls: int, repeats: int, device: torch.device
) -> list[dict[str, object]]:
    """Measure all forms; one row per form."""
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*")
    parser.add_argument("--device", default="cuda", type=torch.device)
    parser.add_argument("--calls", type=int, help="calls of the model in one rollout")
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="change a recipe")
    parser.add_argument("--system", action="store_true", help="freed memory goes back to the system")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    kind, source = args.device.type, provenance(args.device)
    keeps_memory = not args.system and keep_freed_memory()  # as the command line does
    repeats = args.repeats or REPEATS[kind]
    print(f"{source['machine']}, torch {source['torch']}, median of {repeats}")
    for name in args.tasks or TASKS[kind]:
        recipe = changed(recipe_of(name, seed=SEED), args.set)
        calls = args.calls or CALLS[kind, len(recipe.task.grid)]
        for batch in dict.fromkeys((1, recipe.train.batch) if kind == "cuda" else (1,)):
            for row in measure_forms(recipe, batch, calls, repeats, args.device):
                label = f"{name:8} batch {batch:2}  {row['form']:10} {row['precision']:8}"
                per_call = f"{row['milliseconds_per_call']:9.2f} ms a call"
                print(f"{label} {row['frames_per_second']:9.2f} frames/s {per_call} {row['ratio']:6.2f}x", flush=True)
                if args.out:
                    append_rows(args.out, [{**row, "memory": "kept" if keeps_memory else "system", **source}])
            if kind == "cuda":
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
