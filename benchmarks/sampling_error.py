"""Sampling error of the test error of a pretrained model: how much it depends on the trajectories of the test split.

    sigmasolver simulate kf2d --count 24 --seed 1 --out unseen.h5
    python benchmarks/sampling_error.py kf2d unseen.h5 --windows 12 --out results/sampling_error.jsonl

The windows of a trajectory are correlated, so a mean over a test split is only as certain as its number of trajectories
allows. Every trajectory of a store that was simulated with another seed is scored by itself. A row holds the mean over
trajectories, the standard deviation between them, and the standard errors of this mean and of a mean over as many
trajectories as the test split of the task has.
"""

from __future__ import annotations

import argparse
import math
import statistics
from pathlib import Path

import torch
from measure import append_rows

from sigmasolver import pretrained
from sigmasolver.data.store import open_store
from sigmasolver.data.windows import Windows
from sigmasolver.evaluate import Request, measure, rows_of
from sigmasolver.forecast.checkpoint import load, load_recipe
from sigmasolver.model_cards.score import card_columns, value_of
from sigmasolver.ops.precision import matmul_precision
from sigmasolver.runs import Run, provenance
from sigmasolver.runtime.parallel import World


def rows_for(name: str, data: Path, windows: int | None, device: torch.device) -> list[dict[str, object]]:
    """One row for each column that the paper prints for the task."""
    run = Run(pretrained.folder(name))
    recipe, card, forecaster = load_recipe(run), pretrained.card(name), load(run.path, device)
    columns = card_columns(recipe)
    errors: list[list[float]] = []
    with open_store(data) as store, matmul_precision("float32"):
        if store.header.seed in (None, card["training"]["data_seed"]):
            raise SystemExit(f"{data} is not a simulation with another seed than that of the training data.")
        for index in range(len(store)):
            trajectory = Windows(store, [index], recipe.evaluation_window_spec())
            measured = measure(forecaster, trajectory, Request(windows=windows), World(device=device))[0]
            rows = rows_of(measured, recipe.task.targets, None)
            errors.append([value_of(rows, column)[0] for column in columns])
            print(index, *(f"{100 * error:.3f} %" for error in errors[-1]), flush=True)
        source = {"data": store.fingerprint, "data_seed": store.header.seed, "trajectories": len(store)}
    source |= {"benchmark": "sampling_error", "model": name, "weights": run.digest, "windows": windows}
    on_test_split = {(row["metric"], row["field"]): row["value"] for row in card["test"]["scores"]}
    results: list[dict[str, object]] = []
    for column, values in zip(columns, zip(*errors, strict=True), strict=True):
        deviation = statistics.stdev(values)
        results.append(
            {
                **source,
                "metric": column.metric,
                "field": column.field,
                "value": statistics.fmean(values),
                "deviation": deviation,
                "standard_error": deviation / math.sqrt(len(values)),
                "test_split": on_test_split[column.metric, column.field],
                "test_trajectories": recipe.task.test,
                "standard_error_of_test_split": deviation / math.sqrt(recipe.task.test),
                **provenance(device),
            }
        )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="a pretrained model")
    parser.add_argument("data", type=Path, help="a store simulated with a seed that was not used for training")
    parser.add_argument("--windows", type=int, help="evenly spaced windows of each trajectory; default: all")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = rows_for(args.name, args.data, args.windows, torch.device(args.device))
    for row in rows:
        mean, error, split, split_error = (
            f"{100 * float(str(row[key])):.3f}"
            for key in ("value", "standard_error", "test_split", "standard_error_of_test_split")
        )
        print(f"{row['metric']}: {mean} ± {error} % on these data, {split} ± {split_error} % on the test split")
    if args.out:
        append_rows(args.out, rows)


if __name__ == "__main__":
    main()
