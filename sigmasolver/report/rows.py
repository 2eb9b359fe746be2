"""Which rows of the records a table or a figure is made from, and what to say where they are missing.

A row has task, model, seed, run, metric, field, lead and value; rows of `sigmasolver evaluate` also have part and
protocol, rows of `sigmasolver diagnose` have diagnostic, layer and case. A key that is not there is null.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
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
    "diagnosed",
    "evaluated",
    "evenly",
    "in_order",
    "lowest_seeds",
    "named_apart",
    "of_field",
    "once",
    "precision_of",
    "refuse_doubles",
    "refuse_mixed_cohorts",
    "runs_in",
    "select",
    "shared_leads",
    "spread_of",
    "value_of",
    "where",
]

Row = Mapping[str, Any]
Rows = Sequence[Row]
Arrays = Mapping[str, Mapping[str, np.ndarray]]
"""Of each run, the arrays of one diagnostic by name."""
ALL = "all"
"""The field that stands for the mean over fields."""
_PLACE = ("model", "metric", "field", "lead", "layer", "case")
"""What tells the rows of one measurement of one run apart."""
_FACTS = ("horizon", "grid", "cohort", "windows", "part", "forecast_precision", "data", "step", "package", "weights")
"""What tells two measurements of one run apart, in the words of a record."""
_UNSAID = {"forecast_precision": "float32", "cohort": "none"}
"""What rows have that do not say it."""


@dataclass(frozen=True)
class Need:
    """Rows of these metrics with these facts, and the command that makes them."""

    metrics: tuple[str, ...]
    facts: Mapping[str, Any] = field(default_factory=dict)
    command: str = "sigmasolver evaluate {run}"
    hint: str = ""

    def takes(self, row: Row) -> bool:
        return row["metric"] in self.metrics and self.fits(row)

    def fits(self, row: Row) -> bool:
        """Whether a row has the facts, whatever its metric."""
        return all(row.get(name) == value for name, value in self.facts.items())

    def missing(self, run: str) -> str:
        """What to say where a run has no such row."""
        facts = " ".join(str(value) for value in self.facts.values() if value is not None)
        return f"{run} has no {self.metrics[0]} ({facts}); create it with: {self.command.format(run=run)}{self.hint}"


def evaluated(*metrics: str, protocol: str = "free", part: str = "test") -> Need:
    """Rows of an evaluation."""
    words = "" if protocol == "free" else f" --protocol {protocol}"
    words += "" if part == "test" else f" --split {part}"
    facts = {"diagnostic": None, "protocol": protocol, "part": part}
    return Need(metrics, facts, "sigmasolver evaluate {run}" + words)


def diagnosed(diagnostic: str, *metrics: str, hint: str = "") -> Need:
    """Rows of a diagnosis; `hint` says which runs cannot have it."""
    return Need(metrics, {"diagnostic": diagnostic}, f"sigmasolver diagnose {{run}} --only {diagnostic}", hint)


def select(rows: Rows, need: Need, yardsticks: bool = False) -> list[Row]:
    """The rows that are needed, of every run; a run without them, or with two values of one thing, is refused."""
    if not rows:
        raise ValueError(f"No rows found; create them with: {need.command.format(run='RUN')}")
    taken = [row for row in rows if need.takes(row) and (yardsticks or row["model"] not in TRIVIAL_BASELINES)]
    have = {row["run"] for row in taken}
    for run in runs_in(rows):
        if run not in have:
            raise ValueError(need.missing(run))
    refuse_doubles(taken)
    return taken


def once(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of rows that tell the same measurement of the same thing, the last: a run may have been measured again under
    another name, or in a copy of its folder."""
    names = ("run", "task", "seed", "diagnostic", "protocol", "precision", *_PLACE, *_FACTS)
    return list({tuple(_fact(row, name) for name in names): row for row in rows}.values())


def refuse_doubles(rows: Rows) -> None:
    """One run gives one number for one thing, of two the reader must choose; all are of one cohort."""
    seen: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        key = (row["run"], row["seed"], *(row.get(name) for name in _PLACE))
        first = seen.setdefault(key, row)
        if first is not row:
            facts = [name for name in _FACTS if _fact(first, name) != _fact(row, name)]
            name = facts[0] if facts else "date"
            one, two = _fact(first, name), _fact(row, name)
            raise ValueError(
                f"{row['run']} has two values of {row['metric']}, with {name} {one} and {two}; select one with "
                f"--where {name}={one}"
            )
    refuse_mixed_cohorts(rows)


def refuse_mixed_cohorts(rows: Rows) -> None:
    """All evaluations of a task, and all diagnoses of one name, that are shown together are of the same windows."""
    seen: dict[tuple[Any, Any], Row] = {}
    for row in rows:
        first = seen.setdefault((row["task"], row.get("diagnostic")), row)
        one, two = (_fact(held, "cohort") for held in (first, row))
        if one == two:
            continue
        if first["run"] == row["run"]:
            raise ValueError(
                f"{row['run']} was measured with the cohorts {one} and {two}; select one with --where cohort={one}"
            )
        raise ValueError(
            f"{first['run']} was measured with cohort {one} and {row['run']} with cohort {two}, so they cannot be "
            f"compared; measure both with the same cohort, or select one with --where cohort={one}"
        )


def where(rows: Rows, conditions: Iterable[str]) -> list[Row]:
    """The rows with these facts, given as `name=value`; rows that do not have the fact at all are kept."""
    kept = list(rows)
    for condition in conditions:
        name, equals, value = (part.strip() for part in condition.partition("="))
        if not equals or not name:
            raise ValueError(f'--where must be name=value, such as horizon=20, got "{condition}".')
        held = {_fact(row, name) for row in kept if name in row or name in _UNSAID}
        if value not in held:
            listed = ", ".join(sorted(held)) or "nothing"
            raise ValueError(f"No row has {name} {value}; the rows have {listed}.")
        kept = [row for row in kept if _fact(row, name) in (value, "null")]
    return kept


def _fact(row: Row, name: str) -> str:
    value = row.get(name)
    if isinstance(value, list):
        return ",".join(map(str, value))
    return _UNSAID.get(name, "null") if value is None else str(value)


def of_field(rows: Rows, name: str | None = None) -> list[Row]:
    """The rows of one field: the named one, else the mean over all fields, else the only one of its task."""
    kept: list[Row] = []
    for task in in_order(row["task"] for row in rows):
        mine = [row for row in rows if row["task"] == task]
        fields = in_order(row["field"] for row in mine)
        wanted = name if name is not None else ALL if ALL in fields else None if None in fields else fields[0]
        if wanted not in fields:
            raise ValueError(f'{task} has no field "{wanted}"; choose from {", ".join(f for f in fields if f)}.')
        kept += [row for row in mine if row["field"] == wanted]
    return kept


def runs_in(rows: Rows) -> list[str]:
    """The runs in the order of their rows."""
    return in_order(row["run"] for row in rows)


def lowest_seeds(rows: Rows) -> list[Row]:
    """One run of each task and model, that with the lowest seed, for what is shown once a model; runs that are told
    apart by their folder all stay."""
    keys = [(row["task"], row["model"]) for row in named_apart(rows)]
    least: dict[tuple[Any, Any], Any] = {}
    for key, row in zip(keys, rows, strict=True):
        least[key] = min(least.get(key, row["seed"]), row["seed"])
    return [row for key, row in zip(keys, rows, strict=True) if row["seed"] == least[key]]


def precision_of(record: Row) -> str:
    """What the forecast of a row was computed in; older rows do not say it and are float32."""
    return record.get("forecast_precision", "float32")


def named_apart(records: Rows) -> list[dict[str, Any]]:
    """The rows with the name of the run in place of the model where two runs of a task share model and seed.

    Where forecasts of several precisions stand side by side, a model's name says its own.
    """
    runs: dict[tuple[str, str, Any], set[str]] = defaultdict(set)
    for record in records:
        runs[record["task"], record["model"], record["seed"]].add(record["run"])
    doubled = {
        (task, model) for (task, model, _), names in runs.items() if len(names) > 1 and model not in TRIVIAL_BASELINES
    }
    several = len({precision_of(record) for record in records}) > 1

    def name(record: Row) -> str:
        model = record["run"] if (record["task"], record["model"]) in doubled else record["model"]
        return f"{model}, {precision_of(record)}" if several and model not in TRIVIAL_BASELINES else model

    return [{**record, "model": name(record)} for record in records]


def in_order(values: Iterable[Any]) -> list[Any]:
    """Each value once, in the order of their first appearance."""
    return list(dict.fromkeys(values))


def evenly(count: int, most: int) -> list[int]:
    """At most so many of the numbers below `count`, the first and the last among them."""
    # `data.windows.spread_evenly` rounds some halves the other way (26, 23); figures and windows both stay as they are.
    return [int(place) for place in np.linspace(0, count - 1, min(most, count)).round()]


def shared_leads(each: Sequence[Mapping[str, np.ndarray]]) -> tuple[int, ...]:
    """The leads at which every one of these maps has frames; runs may have been diagnosed with fewer of them."""
    return tuple(int(lead) for lead in each[0]["leads"] if all(lead in held["leads"] for held in each))


def at_leads(held: Mapping[str, np.ndarray], name: str, leads: Sequence[int]) -> np.ndarray:
    """The frames (cases, leads, ...) of maps at these of their leads."""
    return held[name][:, np.searchsorted(held["leads"], leads)]


def value_of(row: Row) -> float:
    """NaN for what was not finite."""
    return math.nan if row["value"] is None else float(row["value"])


def spread_of(rows: Rows, *names: str) -> dict[tuple[Any, ...], tuple[float, float | None]]:
    """Mean and sample deviation (None of one) over all rows that agree in `names`."""
    values: dict[tuple[Any, ...], list[float]] = defaultdict(list)
    for row in rows:
        values[tuple(row.get(name) for name in names)].append(value_of(row))
    return {
        key: (statistics.fmean(held), float(np.std(held, ddof=1)) if len(held) > 1 else None)
        for key, held in values.items()
    }
