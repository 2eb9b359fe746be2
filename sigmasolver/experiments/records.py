"""Join the records of several runs: rows of evaluations and diagnostics under one label per run."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sigmasolver.data.domain import Domain
from sigmasolver.data.layout import transpose_axes, upright
from sigmasolver.diagnose.records import read_findings
from sigmasolver.forecast.checkpoint import domain_of, load_recipe
from sigmasolver.report.rows import Arrays, Need, Rows, deduplicate, where
from sigmasolver.report.study import Dimensions
from sigmasolver.runs import Run, read_records

__all__ = ["dimensions_in", "dimensions_of", "folder_labels", "join_records", "label_runs", "read_results"]


ON_GRID = ("truth", "forecast")
"""Arrays of the diagnostic maps (cases, leads, *grid, fields); routing has (cases, slices, *grid)."""


def folder_labels(paths: Sequence[Path]) -> list[str]:
    """A label for each folder: its name, with as many parents as needed to be unique."""
    parts = [path.resolve().parts for path in paths]
    return ["/".join(own[-_depth(own, parts) :]) for own in parts]


def _depth(own: tuple[str, ...], parts: Sequence[tuple[str, ...]]) -> int:
    return next(n for n in range(1, len(own) + 1) if all(other == own or other[-n:] != own[-n:] for other in parts))


def label_runs(paths: Sequence[Path]) -> dict[str, list[Run]]:
    """Each run with its copies, by the label of its first folder. Folders with the same weights and the same recipe are
    copies of one run."""
    groups: dict[Any, list[Run]] = {}
    unique_paths: dict[Path, Path] = {}
    for path in paths:
        unique_paths.setdefault(path.resolve(), path)
    for resolved, path in unique_paths.items():
        run = Run(path)
        recipe = run.recipe()  # raises if this is not a run
        key = (run.digest, json.dumps(recipe, sort_keys=True)) if run.weights.exists() else resolved
        groups.setdefault(key, []).append(run)
    return dict(zip(folder_labels([group[0].path for group in groups.values()]), groups.values(), strict=True))


def join_records(
    runs: Mapping[str, Sequence[Run]],
    diagnostics: Sequence[str],
    needs: Sequence[Need] = (),
    conditions: Sequence[str] = (),
    sweep: bool = False,
) -> tuple[Rows, dict[str, Arrays]]:
    """The rows of the runs from `label_runs`, and the arrays of each diagnostic by run. Raises ValueError for a missing
    need.

    Runs of one model with different recipes are not seeds of each other: outside a `sweep` they get different names.
    """
    rows: list[dict[str, Any]] = []
    arrays: dict[str, dict[str, dict[str, np.ndarray]]] = {}
    for label, copies in runs.items():
        run_rows = [row for run in copies for row in read_records(run.records)]
        for name in diagnostics:
            findings = next((findings for run in copies if (findings := read_findings(run, name)) is not None), None)
            if findings is not None:
                arrays.setdefault(name, {})[label] = _upright(copies[0], findings.arrays)
                run_rows += findings.rows
        for need in needs:
            if not any(need.matches(row) for row in run_rows):
                raise ValueError(need.missing(str(copies[0].path)))
        seconds = copies[0].training_seconds()
        if seconds is not None:
            run_rows = [{**row, "seconds": seconds} for row in run_rows]
        folders = [run.path.resolve().name for run in copies]
        rows += deduplicate(
            [{**row, "run": label, "folders": folders, "measured_as": row.get("run")} for row in run_rows]
        )
    if not sweep:
        names = _names_by_recipe(rows, {label: copies[0] for label, copies in runs.items()})
        rows = [{**row, "model": names.get((row["run"], row["model"]), row["model"])} for row in rows]
    return where(rows, conditions), dict(arrays)


def _upright(run: Run, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Transpose maps to the axis order x, y, z, in which they are drawn."""
    domain = domain_of(run)
    if domain is None:
        return arrays
    order = upright(domain.axis_names)
    on_grid = {name: array for name, array in arrays.items() if name in ON_GRID or name.startswith("routing_L")}
    return arrays | {
        name: transpose_axes(array, 2, order) for name, array in on_grid.items() if array.ndim >= 2 + len(order)
    }


def read_results(file: Path, needs: Sequence[Need] = (), conditions: Sequence[str] = ()) -> Rows:
    """The rows of a results file such as the ledger, in which every run has a unique name; only the runs that have all
    needed rows."""
    rows = where(read_records(file), conditions)
    complete = {row["run"] for row in rows}
    for need in needs:
        complete &= {row["run"] for row in rows if need.matches(row)}
        if not complete:
            raise ValueError(f"{file} has no {need.metrics[0]}; pass the folders of the runs instead.")
    return [{**row, "folders": [row["run"]], "measured_as": row["run"]} for row in rows if row["run"] in complete]


def dimensions_of(paths: Sequence[Path], rows: Rows, units: Sequence[str] = ()) -> Dimensions:
    """Time step, lengths and units of these runs, if all of them agree; `units` are given as NAME=UNIT.

    If the data differ from the training data, only the given units are known.
    """
    given: dict[str, str] = {}
    fields = {row["field"] for row in rows if row.get("field")}
    for text in units:
        name, equals, unit = (part.strip() for part in text.partition("="))
        if not equals or name not in {"time", "length", *fields}:
            names = ", ".join(["time", "length", *sorted(fields)])
            raise ValueError(f'Invalid unit "{text}"; pass NAME=UNIT, where NAME is one of {names}.')
        given[name] = unit
    time, length = given.pop("time", ""), given.pop("length", "")
    domains = [] if any(row.get("anyway") for row in rows) else [domain_of(Run(path)) for path in paths]
    first = domains[0] if domains else None
    if first is None or any(_differ(first, domain) for domain in domains):
        return Dimensions(time_unit=time, length_unit=length, units=given)
    return dimensions_in(first, time, length, given)


def dimensions_in(
    domain: Domain, time_unit: str = "", length_unit: str = "", units: Mapping[str, str] | None = None
) -> Dimensions:
    """Time step, lengths and units of data with this domain; `units` override those of the domain."""
    known = {name: unit for name, unit in zip(domain.fields, domain.units, strict=True) if unit != "1"}
    base = {"time": time_unit or "time", "length": length_unit or "length"}
    known = {name: re.sub(r"\b(time|length)\b", lambda match: base[match[0]], unit) for name, unit in known.items()}
    order = upright(domain.axis_names)
    return Dimensions(
        step=sum(domain.time_steps) / 2 if domain.time_steps else None,
        time_unit=time_unit,
        lengths=tuple(domain.side(axis) for axis in order),
        periodic=tuple(domain.boundary[axis] == "periodic" for axis in order),
        length_unit=length_unit,
        units=known | dict(units or {}),
    )


def _differ(first: Domain, other: Domain | None) -> bool:
    return other is None or len(other.points) != len(first.points) or bool(first.differences(other))


def _names_by_recipe(rows: Sequence[dict[str, Any]], runs: dict[str, Run]) -> dict[tuple[str, str], str]:
    """Replacement names by run and model, for tasks with runs of a model with several recipes: the folder name without
    its seed, so that the seeds of one recipe keep a common name."""
    groups: dict[tuple[str, str], dict[str, dict[str, str]]] = {}
    seeded = dict.fromkeys(row["run"] for row in rows if row.get("seed") is not None)
    recipe_by_run = {run: _recipe_without_seed(runs[run]) for run in seeded}  # once per run: a run may have 40,000 rows
    for row in rows:
        if row.get("seed") is not None:
            recipe = recipe_by_run[row["run"]]
            short = row["run"].removesuffix(f"-{row['seed']}")
            groups.setdefault((row["task"], row["model"]), {}).setdefault(recipe, {})[row["run"]] = short
    names: dict[tuple[str, str], str] = {}
    for (_, model), recipes in groups.items():
        if len(recipes) > 1:
            shorts = [set(group.values()) for group in recipes.values()]
            unique = all(len(group) == 1 for group in shorts) and len(set.union(*shorts)) == len(shorts)
            names |= {
                (run, model): short if unique else run for group in recipes.values() for run, short in group.items()
            }
    return names


def _recipe_without_seed(run: Run) -> str:
    """The recipe as JSON without its seed; settings missing from an older recipe get their defaults."""
    try:
        recipe = load_recipe(run).to_plain()
    except ValueError:
        recipe = run.recipe()
    train = recipe.get("train")
    if isinstance(train, dict):
        recipe = {**recipe, "train": {key: value for key, value in train.items() if key != "seed"}}
    return json.dumps(recipe, sort_keys=True)
