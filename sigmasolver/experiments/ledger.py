"""The ledger: results of finished runs as tidy rows, each with what is needed to reproduce and judge it.

A row is a record of `evaluate` (free rollouts on the test split with the final weights) or of `diagnose` (error
decomposition and slice corrections) with, in addition,

    budget           number of updates relative to the paper's recipe for that task
    data_seed        seed of the simulator; null for imported data
    split_windows    number of windows of the full test split; null if the run does not record it
    settings         those that differ from the paper's recipe for that task and model, other than seed and precision
    seconds          training time, if its log contains it
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sigmasolver.diagnose.records import read_findings
from sigmasolver.evaluate import Request, count_test_windows, records_of_test_part
from sigmasolver.forecast.checkpoint import load_recipe
from sigmasolver.recipes import RECIPES, Recipe, changed_settings, recipe_of
from sigmasolver.runs import Run, read_records, replace_rows
from sigmasolver.runs.files import os_errors_as_value_errors
from sigmasolver.tasks import COHORTS
from sigmasolver.train.dry_run import updates_of

__all__ = ["DIAGNOSTICS", "METRICS", "budget_of", "collect", "paper_sample", "recorded_runs", "write"]

REQUIRED_KEYS = ("budget", "data_seed", "data", "precision", "windows", "step", "commit", "machine", "date")
"""Keys that every row must have for the page."""
METRICS = ("parameters", "relative_l2", "relative_l2_final", "relative_l2_lead")
_ENERGIES = ("injection", "propagation", "cross")
DIAGNOSTICS = {
    "decomposition": (
        *(f"{part}_relative" for part in (*_ENERGIES, "total")),
        *(f"{part}_share" for part in _ENERGIES),
    ),
    "corrections": ("gamma", "correction_ratio"),
}
"""Metrics of the diagnostics that the ledger contains, over all fields together. The paper states the sample of test
windows of these diagnostics; their names are those of the cohorts."""


def budget_of(updates: int, task: str) -> float:
    """Number of updates relative to the paper's recipe for the task."""
    return updates / updates_of(recipe_of(task))


def collect(run: Run, windows: int | None = None) -> list[dict[str, Any]]:
    """The rows of one run, on the full test split or on `windows` of its windows. Raises ValueError if the run is not
    finished, not evaluated, or not of one of the paper's tasks.

    A folder without weights, which may be too large to copy from another machine, counts as finished if its records are
    from the last update.
    """
    recipe = load_recipe(run)
    task = recipe.task
    if task.name not in RECIPES:
        raise ValueError(f"{run.path} is a run on {task.name}; the ledger contains only the paper's tasks.")
    rows = [row for row in records_of_test_part(run, recipe, windows) if row["metric"] in METRICS]
    final = {row["step"] for row in rows} == {updates_of(recipe)} and len({row["weights"] for row in rows}) == 1
    if not (run.finished or (final and not run.weights.exists())):
        raise ValueError(f"{run.path} is not finished; resume with: sigmasolver train --resume {run.path}")
    data = run.read_json("data.json")
    if "windows" in (data.get("test") or {}):
        raise ValueError(
            f"{run.path} is a pretrained model, evaluated on the few windows that it comes with; add the run that it "
            "was made of."
        )
    if not rows:
        windows_option = "" if windows is None else f" --windows {windows}"
        raise ValueError(
            f"{run.path} has no records of its final weights on "
            f"{'the whole test split' if windows is None else windows}{'' if windows is None else ' windows'}; "
            f"create them with: sigmasolver evaluate {run.path}{windows_option}"
        )
    rows += _diagnoses(run, recipe, rows[0])
    seconds = run.training_seconds()
    facts = {
        "budget": budget_of(rows[0]["step"], task.name),
        "data_seed": data.get("seed"),
        "split_windows": count_test_windows(run, recipe),
        "settings": changed_settings(recipe),
    }
    facts |= {} if seconds is None else {"seconds": seconds}
    return [{**row, **facts} for row in rows]


def paper_sample(diagnostic: str, recipe: Recipe) -> Request | None:
    """The paper's sample of test windows for a diagnostic; None if it has none for the task.

    A smaller test split than the paper's is sampled evenly, with as many windows as the paper, or all.
    """
    cohort = COHORTS[diagnostic].get(recipe.task.name)
    if cohort is None:
        return None
    if max(cohort.trajectories) < recipe.task.test:
        return Request(cohort=diagnostic)
    return Request(windows=len(cohort.trajectories) * (cohort.windows_per_trajectory or 1))


def _diagnoses(run: Run, recipe: Recipe, evaluated: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows of the diagnoses of the same weights on the paper's sample of the same test data, over the full horizon."""
    rows = []
    for name, metrics in DIAGNOSTICS.items():
        sample, findings = paper_sample(name, recipe), read_findings(run, name)
        if sample is None or findings is None:
            continue
        rows += [
            row
            for row in findings.rows
            if all(row[key] == evaluated[key] for key in ("weights", "data", "part", "horizon"))
            and row["cohort"] == sample.cohort
            and (sample.windows is None or row["windows"] == min(sample.windows, evaluated["windows"]))
            and row["metric"] in metrics
            and row["field"] is None
        ]
    return rows


def recorded_runs(
    file: Path, recipes: Mapping[str, Recipe], data_seed: int | None = None, windows: int | None = None
) -> set[str]:
    """The runs of `recipes` in a ledger; none if there is no file. Raises ValueError if one was trained or evaluated
    with other settings."""
    recorded = [row for row in read_records(file, REQUIRED_KEYS) if row["run"] in recipes and "diagnostic" not in row]
    for row in recorded:
        recipe = recipes[row["run"]]
        settings = {
            "data_seed": ("data seed", data_seed),
            "step": ("number of updates", updates_of(recipe)),
            "precision": ("training precision", recipe.train.precision),
            "windows": ("number of test windows", _fewest(windows, row.get("split_windows"))),
            "settings": ("settings", changed_settings(recipe)),
        }
        for key, (name, value) in settings.items():
            if None not in (row.get(key), value) and row[key] != value:
                raise ValueError(
                    f"{file} has {row['run']} with {name} {_text(row[key])}, not {_text(value)}; its rows would be "
                    "replaced. Pass another file, or the same settings."
                )
    return {row["run"] for row in recorded}


def _fewest(*counts: int | None) -> int | None:
    return min((count for count in counts if count is not None), default=None)


def _text(value: object) -> str:
    return f"({', '.join(value)})" if isinstance(value, list) else str(value)


def write(file: Path, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add rows to the ledger, replacing earlier rows of the same runs; return the full ledger.

    Safe for concurrent processes: a lock on the folder serialises them.
    """
    updated_runs = {row["run"] for row in rows}
    with os_errors_as_value_errors(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        folder = os.open(file.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        kept = [row for row in read_records(file, REQUIRED_KEYS) if row["run"] not in updated_runs]
        replace_rows(file, ledger := [*kept, *rows])
    finally:
        os.close(folder)
    return ledger
