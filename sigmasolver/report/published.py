"""The numbers that the paper prints, as data: each with its digits as printed and the label it stands under.

`published.json` holds the tables row by row, in the order of the paper; "2.79±0.05" is mean and standard deviation.
Errors are scaled as printed (`Column.scale` times the value of a record).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

__all__ = [
    "MODEL_LABELS",
    "OURS",
    "TASK_LABELS",
    "Cohort",
    "Column",
    "Number",
    "PublishedTable",
    "Seeds",
    "Sweep",
    "by_method",
    "cohorts",
    "forms_in",
    "model_label",
    "numbers",
    "places",
    "seed_tables",
    "sweeps",
    "tables",
]

OURS = "transolver-sigma"
KNOWN = (OURS, "physolver", "specsolver")
"""These have the same colour in every drawing."""
TASK_LABELS = {
    "darcy": "Darcy",
    "ns2d": "NS2D",
    "kf2d": "KF2D",
    "it3d": "IT3D",
    "smoke3d": "Smoke3D",
    "controlled-cylinder": "Controlled Cylinder",
    "fsi": "FSI",
    "foil": "Foil",
    "combustion": "Combustion",
    "cylinder": "Cylinder",
    "ignit-hit": "IgnitHIT",
    "evolve-jet": "EvolveJet",
}
METHODS = {
    "unet-batchnorm": "unet",
    "rno-two-blocks": "rno",
    "hpm-frozen": "hpm",
    "factformer-darcy": "factformer",
    "factformer-it3d": "factformer",
    "factformer-smoke3d": "factformer",
}
"""Forms that the suites train in the place of a method of the paper."""
_FILE = Path(__file__).with_name("published.json")


@dataclass(frozen=True)
class Number:
    """A printed number: "2.79±0.05", "200.132"."""

    text: str
    source: str

    @property
    def value(self) -> float:
        return float(self.text.partition("±")[0])

    @property
    def deviation(self) -> float | None:
        _, _, after = self.text.partition("±")
        return float(after) if after else None

    def __str__(self) -> str:
        return self.text.replace("±", " ± ")


@dataclass(frozen=True)
class Column:
    """What a column shows of a record: `scale` times the value of this metric; no task: the mean over the tasks."""

    heading: str
    task: str | None
    metric: str
    field: str | None
    part: str = "test"
    scale: float = 1.0
    higher: bool = False
    """Whether more is better."""


@dataclass(frozen=True)
class PublishedTable:
    """A table of models; `rows` holds model, label and one number for each column. The printed table has a line above
    the models `rules`, and as a last row `promotion`: by how many per cent our model beats the best of the others."""

    source: str
    title: str
    suite: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[str, str, tuple[Number, ...]], ...]
    rules: tuple[str, ...] = ()
    promotion: tuple[Number, ...] = ()

    def strongest(self) -> tuple[Number, ...]:
        """The best baseline of each column."""
        return tuple(
            (max if column.higher else min)(
                (row[place] for model, _, row in self.rows if model != OURS), key=lambda number: number.value
            )
            for place, column in enumerate(self.columns)
        )


@dataclass(frozen=True)
class Seeds:
    """Means and deviations over seeds beside the strongest baseline; None where the table leaves a column out."""

    source: str
    of: str
    strongest: tuple[Number | None, ...]
    ours: tuple[Number | None, ...]


@dataclass(frozen=True)
class Sweep:
    """One axis of the scaling study on Darcy flow; errors in thousandths, the deviation over test cases."""

    source: str
    setting: str
    values: tuple[int, ...]
    parameters: tuple[int, ...]
    errors: tuple[Number, ...]


@dataclass(frozen=True)
class Cohort:
    """What a decomposition was measured on: samples, frames per call, frames in all."""

    source: str
    samples: int
    block: int
    horizon: int


def tables() -> dict[str, PublishedTable]:
    """The tables that compare models, by the name of the command."""
    return {
        name: PublishedTable(
            table["source"],
            table["title"],
            table["suite"],
            tuple(_column(column) for column in table["columns"]),
            tuple((model, label, _numbers(text, table["source"])) for model, label, text in table["rows"]),
            tuple(table["rules"]),
            _numbers(table.get("promotion", ""), table["source"]),
        )
        for name, table in _read()["tables"].items()
    }


def seed_tables() -> dict[str, Seeds]:
    """The tables of standard deviations; their columns are those of the table `of`."""
    return {
        name: Seeds(
            table["source"],
            table["of"],
            *(_maybe_numbers(table[key], table["source"]) for key in ("strongest", OURS)),
        )
        for name, table in _read()["seeds"].items()
    }


def sweeps() -> dict[str, Sweep]:
    """The three scaling sweeps: data, grid, width."""
    return {
        name: Sweep(
            sweep["source"],
            sweep["setting"],
            tuple(sweep["values"]),
            tuple(sweep["parameters"]),
            _numbers(sweep["errors"], sweep["source"]),
        )
        for name, sweep in _read()["scaling"].items()
    }


def cohorts() -> dict[str, Cohort]:
    """The settings of the error decomposition, by task."""
    held = _read()["cohorts"]
    return {task: Cohort(held["source"], *counts) for task, *counts in held["rows"]}


def numbers() -> dict[tuple[str, str, str], Number]:
    """Numbers that stand in the text, by task, model and metric."""
    return {(task, model, metric): Number(text, source) for source, task, model, metric, text in _read()["numbers"]}


def model_label(model: str) -> str:
    """The name that the paper gives a model; its own name where the paper has none, behind that of its method."""
    label = MODEL_LABELS.get(model, model)
    return f"{MODEL_LABELS[METHODS[model]]} ({model})" if model in METHODS else label


def by_method(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The rows for the paper's line-up: a form under the name of its method, with its own name as `form`.

    Where a task has several forms of a method, all keep their names, lest they pass for seeds of one model. So all rows
    of a table or figure are given at once.
    """
    found: dict[tuple[str, str], set[str]] = {}
    for row in rows:
        found.setdefault((row["task"], METHODS.get(row["model"], row["model"])), set()).add(row["model"])

    def filed(row: Mapping[str, Any]) -> Mapping[str, Any]:
        form = row["model"]
        method = METHODS.get(form, form)
        return row if method == form or len(found[row["task"], method]) > 1 else {**row, "model": method, "form": form}

    return [filed(row) for row in rows]


def forms_in(rows: Iterable[Mapping[str, Any]]) -> str:
    """ "HPM is hpm-frozen on NS2D, KF2D"; empty where no row was filed by `by_method`."""
    found: dict[tuple[str, str], dict[str, None]] = {}
    for row in rows:
        if "form" in row:
            place = found.setdefault((row["model"], row["form"]), {})
            place[TASK_LABELS.get(row["task"], row["task"])] = None
    return "; ".join(f"{model_label(model)} is {form} on {', '.join(tasks)}" for (model, form), tasks in found.items())


def places(models: Sequence[str]) -> dict[str, int]:
    """Which colour each model takes, by name or label: the paper's own models theirs, the others what follows."""
    known = {name: place for place, model in enumerate(KNOWN) for name in (model, model_label(model))}
    others = [model for model in dict.fromkeys(models) if model not in known]
    return {
        model: known[model] if model in known else len(KNOWN) + others.index(model) for model in dict.fromkeys(models)
    }


@cache
def _read() -> Mapping[str, Any]:
    return json.loads(_FILE.read_text(encoding="utf-8"))


def _column(plain: Mapping[str, Any]) -> Column:
    return Column(
        plain["heading"],
        plain["task"],
        plain["metric"],
        plain["field"],
        plain.get("part", "test"),
        float(plain.get("scale", 1)),
        plain.get("higher", False),
    )


def _numbers(text: str, source: str) -> tuple[Number, ...]:
    return tuple(Number(word, source) for word in text.split())


def _maybe_numbers(text: str, source: str) -> tuple[Number | None, ...]:
    return tuple(None if word == "-" else Number(word, source) for word in text.split())


MODEL_LABELS = {
    "physolver": "Physolver",
    "specsolver": "Specsolver",
    **{model: label for table in reversed(tables().values()) for model, label, _ in table.rows},
}
