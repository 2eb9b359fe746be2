"""Select the rows of records that a table or figure needs, with a clear error if they are missing.

A row has task, model, seed, run, metric, field, lead and value; rows of `sigmasolver evaluate` also have part and
protocol, rows of `sigmasolver diagnose` have diagnostic, layer and case. A missing key counts as null.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from sigmasolver.report.study import TRIVIAL_BASELINES

__all__ = [
    "ALL",
    "Arrays",
    "Need",
    "Row",
    "Rows",
    "at_leads",
    "deduplicate",
    "diagnosed",
    "evaluated",
    "lowest_seeds",
    "mean_and_std",
    "precision_of",
    "refuse_mixed_cohorts",
    "reject_duplicates",
    "runs_in",
    "select",
    "select_field",
    "shared_leads",
    "unique",
    "value_of",
    "where",
    "with_unique_names",
]

Row = Mapping[str, Any]
Rows = Sequence[Row]
Arrays = Mapping[str, Mapping[str, np.ndarray]]
"""Run -> name -> array, for one diagnostic."""
ALL = "all"
"""Field name of the mean over fields."""
_KEY_FIELDS = ("model", "metric", "field", "lead", "layer", "case")
"""Keys that identify a row within one measurement of one run."""
_FACTS = (
    "horizon", "grid", "cohort", "windows", "part", "forecast_precision", "symmetries", "data", "step", "package",
    "weights",
)  # fmt: skip
"""Keys that distinguish two measurements of one run."""
_DEFAULTS = {"forecast_precision": "float32", "cohort": "none", "symmetries": "1"}
"""Values assumed for rows without these keys."""


@dataclass(frozen=True)
class Need:
    """Rows with one of these metrics and these facts, and the command that creates them."""

    metrics: tuple[str, ...]
    facts: Mapping[str, Any] = field(default_factory=dict)
    command: str = "sigmasolver evaluate {run}"
    hint: str = ""

    def matches(self, row: Row) -> bool:
        return row["metric"] in self.metrics and self.fits(row)

    def fits(self, row: Row) -> bool:
        """Return whether a row has the facts, regardless of its metric."""
        return all(row.get(name) == value for name, value in self.facts.items())

    def missing(self, run: str) -> str:
        """Error message for a run without such rows."""
        facts = " ".join(str(value) for value in self.facts.values() if value is not None)
        return f"{run} has no {self.metrics[0]} ({facts}); create it with: {self.command.format(run=run)}{self.hint}"


def evaluated(*metrics: str, protocol: str = "free", part: str = "test") -> Need:
    """Need rows of an evaluation."""
    options = "" if protocol == "free" else f" --protocol {protocol}"
    options += "" if part == "test" else f" --split {part}"
    facts = {"diagnostic": None, "protocol": protocol, "part": part}
    return Need(metrics, facts, "sigmasolver evaluate {run}" + options)


def diagnosed(diagnostic: str, *metrics: str, hint: str = "") -> Need:
    """Need rows of a diagnostic; `hint` says which runs cannot have it."""
    return Need(metrics, {"diagnostic": diagnostic}, f"sigmasolver diagnose {{run}} --only {diagnostic}", hint)


def select(rows: Rows, need: Need, baselines: bool = False) -> list[Row]:
    """Select the needed rows of every run; raise if a run has none, or two values of the same quantity."""
    if not rows:
        raise ValueError(f"No rows found; create them with: {need.command.format(run='RUN')}")
    selected = [row for row in rows if need.matches(row) and (baselines or row["model"] not in TRIVIAL_BASELINES)]
    present = {row["run"] for row in selected}
    for run in runs_in(rows):
        if run not in present:
            raise ValueError(need.missing(run))
    reject_duplicates(selected)
    return selected


def deduplicate(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Deduplicate repeated measurements of the same quantity, keeping the last: a run may have been measured again
    under another name, or in a copy of its folder."""
    names = ("run", "task", "seed", "diagnostic", "protocol", "precision", *_KEY_FIELDS, *_FACTS)
    return list({tuple(_fact(row, name) for name in names): row for row in rows}.values())


def reject_duplicates(rows: Rows) -> None:
    """Raise if a run has two values of the same quantity (the user must select one), or if cohorts are mixed."""
    seen: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        key = (row["run"], row["seed"], *(row.get(name) for name in _KEY_FIELDS))
        first = seen.setdefault(key, row)
        if first is not row:
            differing = [name for name in _FACTS if _fact(first, name) != _fact(row, name)]
            name = differing[0] if differing else "date"
            old, new = _fact(first, name), _fact(row, name)
            raise ValueError(
                f"{row['run']} has two values of {row['metric']}, with {name} {old} and {new}; select one with "
                f"--where {name}={old}"
            )
    refuse_mixed_cohorts(rows)


def refuse_mixed_cohorts(rows: Rows) -> None:
    """Raise unless all evaluations of a task, and all rows of a diagnostic, share one cohort of windows."""
    seen: dict[tuple[Any, Any], Row] = {}
    for row in rows:
        first = seen.setdefault((row["task"], row.get("diagnostic")), row)
        expected, cohort = (_fact(entry, "cohort") for entry in (first, row))
        if expected == cohort:
            continue
        if first["run"] == row["run"]:
            raise ValueError(
                f"{row['run']} was measured with the cohorts {expected} and {cohort}; select one with "
                f"--where cohort={expected}"
            )
        raise ValueError(
            f"{first['run']} was measured with cohort {expected} and {row['run']} with cohort {cohort}, so they cannot "
            f"be compared; measure both with the same cohort, or select one with --where cohort={expected}"
        )


def where(rows: Rows, conditions: Iterable[str]) -> list[Row]:
    """Filter rows by conditions `name=value`, where * and ? match any text; rows without the key are kept.

    Conditions on the same name are alternatives.
    """
    patterns: dict[str, list[str]] = {}
    for condition in conditions:
        name, equals, value = (part.strip() for part in condition.partition("="))
        if not equals or not name:
            raise ValueError(f'--where must be name=value, such as horizon=20, got "{condition}".')
        patterns.setdefault(name, []).append(value)
    remaining = list(rows)
    for name, alternatives in patterns.items():
        values = {_fact(row, name) for row in remaining if name in row or name in _DEFAULTS}
        if not values:
            known = ", ".join(sorted({key for row in remaining for key in row}))
            raise ValueError(f'No row has "{name}"; {f"choose from {known}" if known else "there are no rows"}.')
        selected = {"null"}
        for value in alternatives:
            pattern = value.replace("[", "[[]")  # a bracket in a name is no pattern
            matching = {own for own in values if fnmatchcase(own, pattern)}
            if not matching:
                raise ValueError(f"No row has {name} {value}; the rows have {', '.join(sorted(values))}.")
            selected |= matching
        remaining = [row for row in remaining if _fact(row, name) in selected]
    return remaining


def _fact(row: Row, name: str) -> str:
    value = row.get(name)
    if isinstance(value, list):
        return ",".join(map(str, value))
    return _DEFAULTS.get(name, "null") if value is None else str(value)


def select_field(rows: Rows, name: str | None = None) -> list[Row]:
    """Select the rows of one field: the named one, else the mean over all fields, else the only one of the task."""
    selected: list[Row] = []
    for task in unique(row["task"] for row in rows):
        task_rows = [row for row in rows if row["task"] == task]
        fields = unique(row["field"] for row in task_rows)
        field_name = name if name is not None else ALL if ALL in fields else None if None in fields else fields[0]
        if field_name not in fields:
            raise ValueError(f'{task} has no field "{field_name}"; choose from {", ".join(f for f in fields if f)}.')
        selected += [row for row in task_rows if row["field"] == field_name]
    return selected


def runs_in(rows: Rows) -> list[str]:
    """List the runs in order of first appearance."""
    return unique(row["run"] for row in rows)


def lowest_seeds(rows: Rows) -> list[Row]:
    """Keep the run with the lowest seed of each task and model, for plots that show a model once; runs distinguished by
    their folder are all kept."""
    keys = [(row["task"], row["model"]) for row in with_unique_names(rows)]
    lowest: dict[tuple[Any, Any], Any] = {}
    for key, row in zip(keys, rows, strict=True):
        lowest[key] = min(lowest.get(key, row["seed"]), row["seed"])
    return [row for key, row in zip(keys, rows, strict=True) if row["seed"] == lowest[key]]


def _settings_of(record: Row) -> str:
    """Settings of the recipe other than the paper's; rows without them are of recipes without any, or older."""
    return ", ".join(record.get("settings") or ())


def precision_of(record: Row) -> str:
    """Precision of the forecast of a row; older rows lack the key and are float32."""
    precision: str = record.get("forecast_precision", "float32")
    return precision


def with_unique_names(records: Rows) -> list[dict[str, Any]]:
    """Make model names unique: use the run name where two runs of a task share model, recorded settings and seed.

    If forecasts of several precisions are present, the precision is appended to each model name; if recipes with
    several settings are present, the settings of those that have any; to averages the number of symmetries.
    """
    runs: dict[tuple[str, str, str, Any], set[str]] = defaultdict(set)
    settings: dict[tuple[str, str], set[str]] = defaultdict(set)
    for record in records:
        runs[record["task"], record["model"], _settings_of(record), record["seed"]].add(record["run"])
        settings[record["task"], record["model"]].add(_settings_of(record))
    ambiguous = {
        (task, model) for (task, model, *_), names in runs.items() if len(names) > 1 and model not in TRIVIAL_BASELINES
    }
    mixed_precisions = len({precision_of(record) for record in records}) > 1
    mixed_symmetries = len({record.get("symmetries", 1) for record in records}) > 1

    def name(record: Row) -> str:
        key = record["task"], record["model"]
        if record["model"] in TRIVIAL_BASELINES:
            return str(record["model"])
        number = record.get("symmetries", 1)
        parts = (
            record["run"] if key in ambiguous else record["model"],
            _settings_of(record) if len(settings[key]) > 1 and key not in ambiguous else None,
            precision_of(record) if mixed_precisions else None,
            f"mean over {number} symmetries" if mixed_symmetries and number > 1 else None,
        )
        return ", ".join(filter(None, parts))

    return [{**record, "model": name(record)} for record in records]


def unique(values: Iterable[Any]) -> list[Any]:
    """Remove duplicates, keeping the order of first appearance."""
    return list(dict.fromkeys(values))


def shared_leads(runs: Sequence[Mapping[str, np.ndarray]]) -> tuple[int, ...]:
    """Leads at which the maps of all runs have frames; runs may have been diagnosed at different leads."""
    return tuple(int(lead) for lead in runs[0]["leads"] if all(lead in arrays["leads"] for arrays in runs))


def at_leads(arrays: Mapping[str, np.ndarray], name: str, leads: Sequence[int]) -> np.ndarray:
    """Select frames (cases, leads, ...) of one array of maps at the given leads."""
    return arrays[name][:, np.searchsorted(arrays["leads"], leads)]


def value_of(row: Row) -> float:
    """Value of a row as a float; null (not finite) becomes NaN."""
    return math.nan if row["value"] is None else float(row["value"])


def mean_and_std(rows: Rows, *names: str) -> dict[tuple[Any, ...], tuple[float, float | None]]:
    """Mean and sample standard deviation (None for a single row) of rows grouped by the keys `names`."""
    values: dict[tuple[Any, ...], list[float]] = defaultdict(list)
    for row in rows:
        values[tuple(row.get(name) for name in names)].append(value_of(row))
    return {
        key: (statistics.fmean(samples), float(np.std(samples, ddof=1)) if len(samples) > 1 else None)
        for key, samples in values.items()
    }
