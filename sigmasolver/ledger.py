"""The ledger: results of finished runs as tidy rows, each with what is needed to repeat and to judge it.

A row is a record of `evaluate` (free forecasts of the whole test part by the final weights) with, in addition,

    budget       updates made over those of the paper's recipe for that task
    data_seed    of the simulator that made the data; null where they were imported
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sigmasolver.recipes import RECIPES, recipe_of
from sigmasolver.runs import Run, read_rows, replace_rows
from sigmasolver.train.loop import Plan
from sigmasolver.train.rehearsal import planned_windows
from sigmasolver.trained import recipe_in

__all__ = ["METRICS", "collect", "paper_updates", "write"]

METRICS = ("parameters", "relative_l2", "relative_l2_final", "relative_l2_lead")


def paper_updates(task: str) -> int:
    """Optimiser updates of the paper's recipe for this task."""
    recipe = recipe_of(task)
    return Plan(recipe, planned_windows(recipe)[0]).steps


def collect(run: Run) -> list[dict[str, Any]]:
    """The rows of one run; an error where it is not finished, not evaluated, or not of one of the paper's tasks."""
    recipe = recipe_in(run)
    if recipe.task.name not in RECIPES:
        raise ValueError(f"{run.path} is a run on {recipe.task.name}; the ledger holds the paper's tasks.")
    if not run.finished:
        raise ValueError(f"{run.path} is not finished; go on with: sigmasolver train --resume {run.path}")
    digest = run.digest
    wanted = {"weights": digest, "part": "test", "protocol": "free", "horizon": recipe.task.horizon}
    rows = [
        row
        for row in read_rows(run.records)
        if row.get("metric") in METRICS
        and wanted.items() <= row.items()
        and row.get("cohort") is None
        and row.get("forecast_precision", "float32") == "float32"
    ]
    if not rows:
        raise ValueError(f"{run.path} has no records of its final weights; make them with: sigmasolver evaluate RUN")
    facts = {
        "budget": rows[0]["step"] / paper_updates(recipe.task.name),
        "data_seed": run.read_json("data.json").get("seed"),
    }
    return [{**row, **facts} for row in rows]


def write(file: Path, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Put these rows into the ledger, in place of earlier ones of the same runs; the whole ledger is returned."""
    new = {row["run"] for row in rows}
    kept = [row for row in read_rows(file) if row["run"] not in new]
    replace_rows(file, together := [*kept, *rows])
    return together
