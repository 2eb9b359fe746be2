"""The records of several runs, joined: rows of evaluations and diagnoses under one label for each run."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sigmasolver.data.domain import Domain
from sigmasolver.data.layout import turn, upright
from sigmasolver.diagnose.records import read_findings
from sigmasolver.forecast.checkpoint import domain_of, recipe_in
from sigmasolver.report.rows import Arrays, Need, Rows, once, where
from sigmasolver.report.study import Dimensions
from sigmasolver.runs import Run, read_records

__all__ = ["dimensions_in", "dimensions_of", "folder_labels", "join_records", "label_runs", "read_results"]


ON_GRID = ("truth", "forecast")
"""Arrays of the diagnostic maps (cases, leads, *grid, fields); routing has (cases, slices, *grid)."""


def folder_labels(paths: Sequence[Path]) -> list[str]:
    """What to call each folder: its name, after as many of its parents as tell it from the others."""
    parts = [path.resolve().parts for path in paths]
    return ["/".join(own[-_depth(own, parts) :]) for own in parts]


def _depth(own: tuple[str, ...], parts: Sequence[tuple[str, ...]]) -> int:
    return next(n for n in range(1, len(own) + 1) if all(one == own or one[-n:] != own[-n:] for one in parts))


def label_runs(paths: Sequence[Path]) -> dict[str, list[Run]]:
    """Each run with its copies, by the label of its first folder. Folders with the same weights and the same recipe
    hold the same run."""
    found: dict[Any, list[Run]] = {}
    given: dict[Path, Path] = {}
    for path in paths:
        given.setdefault(path.resolve(), path)
    for place, path in given.items():
        run = Run(path)
        recipe = run.recipe()  # says so where this is no run
        same = (run.digest, json.dumps(recipe, sort_keys=True)) if run.weights.exists() else place
        found.setdefault(same, []).append(run)
    return dict(zip(folder_labels([group[0].path for group in found.values()]), found.values(), strict=True))


def join_records(
    runs: Mapping[str, Sequence[Run]],
    diagnostics: Sequence[str],
    needs: Sequence[Need] = (),
    conditions: Sequence[str] = (),
    sweep: bool = False,
) -> tuple[Rows, dict[str, Arrays]]:
    """The rows of `label_runs`, and of each diagnostic the arrays by run; what is needed and not there is said.

    Runs of one model by different recipes are not seeds of each other: outside of a `sweep` their names say so.
    """
    rows: list[dict[str, Any]] = []
    arrays: dict[str, dict[str, dict[str, np.ndarray]]] = {}
    for own, copies in runs.items():
        mine = [row for run in copies for row in read_records(run.records)]
        for name in diagnostics:
            made = next((made for run in copies if (made := read_findings(run, name)) is not None), None)
            if made is not None:
                arrays.setdefault(name, {})[own] = _upright(copies[0], made.arrays)
                mine += made.rows
        for need in needs:
            if not any(need.takes(row) for row in mine):
                raise ValueError(need.missing(str(copies[0].path)))
        seconds = copies[0].training_seconds()
        if seconds is not None:
            mine = [{**row, "seconds": seconds} for row in mine]
        folders = [run.path.resolve().name for run in copies]
        rows += once([{**row, "run": own, "folders": folders, "measured_as": row.get("run")} for row in mine])
    if not sweep:
        names = _names_by_recipe(rows, {own: copies[0] for own, copies in runs.items()})
        rows = [{**row, "model": names.get((row["run"], row["model"]), row["model"])} for row in rows]
    return where(rows, conditions), dict(arrays)


def _upright(run: Run, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """With maps in the order x, y, z of their axes, in which all of them are drawn."""
    domain = domain_of(run)
    if domain is None:
        return arrays
    order = upright(domain.axis_names)
    on_grid = {name: held for name, held in arrays.items() if name in ON_GRID or name.startswith("routing_L")}
    return arrays | {name: turn(held, 2, order) for name, held in on_grid.items() if held.ndim >= 2 + len(order)}


def read_results(file: Path, needs: Sequence[Need] = (), conditions: Sequence[str] = ()) -> Rows:
    """The rows of a file of results, such as the ledger, in which every run has its own name."""
    rows = where(read_records(file), conditions)
    for need in needs:
        if not any(need.takes(row) for row in rows):
            raise ValueError(f"{file} has no {need.metrics[0]}; pass the folders of the runs instead.")
    return [{**row, "folders": [row["run"]], "measured_as": row["run"]} for row in rows]


def dimensions_of(paths: Sequence[Path], rows: Rows, units: Sequence[str] = ()) -> Dimensions:
    """What frames, points and values of these runs are, as far as all of them agree; `units` are given as NAME=UNIT.

    Of data that differ from those of the training only the given units are known.
    """
    given: dict[str, str] = {}
    fields = {row["field"] for row in rows if row.get("field")}
    for one in units:
        name, equals, unit = (part.strip() for part in one.partition("="))
        if not equals or name not in {"time", "length", *fields}:
            names = ", ".join(["time", "length", *sorted(fields)])
            raise ValueError(f'Invalid unit "{one}"; pass NAME=UNIT, where NAME is one of {names}.')
        given[name] = unit
    time, length = given.pop("time", ""), given.pop("length", "")
    domains = [] if any(row.get("anyway") for row in rows) else [domain_of(Run(path)) for path in paths]
    first = domains[0] if domains else None
    if first is None or any(_differ(first, one) for one in domains):
        return Dimensions(time_unit=time, length_unit=length, units=given)
    return dimensions_in(first, time, length, given)


def dimensions_in(
    domain: Domain, time_unit: str = "", length_unit: str = "", units: Mapping[str, str] | None = None
) -> Dimensions:
    """What frames, points and values of data with this domain are; `units` go before those that it has."""
    known = {name: unit for name, unit in zip(domain.fields, domain.units, strict=True) if unit != "1"}
    own = {"time": time_unit or "time", "length": length_unit or "length"}
    known = {name: re.sub(r"\b(time|length)\b", lambda found: own[found[0]], unit) for name, unit in known.items()}
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
    """By run and model, a name in place of the model where a task has runs of it by several recipes: that of the folder
    without its seed, so that the seeds of one recipe still count as such."""
    groups: dict[tuple[str, str], dict[str, dict[str, str]]] = {}
    seeded = dict.fromkeys(row["run"] for row in rows if row.get("seed") is not None)
    recipes_of = {run: _recipe_without_seed(runs[run]) for run in seeded}  # once per run: a run may have 40,000 rows
    for row in rows:
        if row.get("seed") is not None:
            recipe = recipes_of[row["run"]]
            short = row["run"].removesuffix(f"-{row['seed']}")
            groups.setdefault((row["task"], row["model"]), {}).setdefault(recipe, {})[row["run"]] = short
    named: dict[tuple[str, str], str] = {}
    for (_, model), recipes in groups.items():
        if len(recipes) > 1:
            shorts = [set(held.values()) for held in recipes.values()]
            clear = all(len(one) == 1 for one in shorts) and len(set.union(*shorts)) == len(shorts)
            named |= {(run, model): short if clear else run for held in recipes.values() for run, short in held.items()}
    return named


def _recipe_without_seed(run: Run) -> str:
    """Settings that an older recipe does not name have their defaults."""
    try:
        recipe = recipe_in(run).to_plain()
    except ValueError:
        recipe = run.recipe()
    train = recipe.get("train")
    if isinstance(train, dict):
        recipe = {**recipe, "train": {key: value for key, value in train.items() if key != "seed"}}
    return json.dumps(recipe, sort_keys=True)
