"""The numbers printed in the paper as data, each with its printed digits and the label of its source.

`published.json` holds the tables row by row, in the order of the paper; "2.79±0.05" is mean and standard deviation.
Errors are in the printed units (`Column.scale` times the value of a record).
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
    "colour_indices",
    "forms_in",
    "model_label",
    "numbers",
    "seed_tables",
    "sweeps",
    "tables",
]

OURS = "transolver-sigma"
FIXED_COLOURS = (OURS, "physolver", "specsolver")
"""Models with the same colour in every figure."""
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
"""Variants that the suites train in place of a method of the paper."""
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
    """A table column: `scale` times the value of a metric; without a task, the mean over tasks."""

    heading: str
    task: str | None
    metric: str
    field: str | None
    part: str = "test"
    scale: float = 1.0
    higher: bool = False
    """Whether higher is better."""


@dataclass(frozen=True)
class PublishedTable:
    """A table of models; `rows` holds model, label and one number per column. The printed table has a rule above each
    model of `rules`, and a last row `promotion`: the gain of our model over the best other one in per cent."""

    source: str
    title: str
    suite: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[str, str, tuple[Number, ...]], ...]
    rules: tuple[str, ...] = ()
    promotion: tuple[Number, ...] = ()

    def strongest(self) -> tuple[Number, ...]:
        """Best baseline of each column."""
        return tuple(
            (max if column.higher else min)(
                (row[index] for model, _, row in self.rows if model != OURS), key=lambda number: number.value
            )
            for index, column in enumerate(self.columns)
        )


@dataclass(frozen=True)
class Seeds:
    """Mean and deviation over seeds next to the strongest baseline; None for columns that the table omits."""

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
    """Samples of an error decomposition: their number, frames per call, and total frames."""

    source: str
    samples: int
    block: int
    horizon: int


def tables() -> dict[str, PublishedTable]:
    """Tables that compare models, by command name."""
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
    """Tables of standard deviations; their columns are those of the table `of`."""
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
    """Settings of the error decomposition by task."""
    table = _read()["cohorts"]
    return {task: Cohort(table["source"], *counts) for task, *counts in table["rows"]}


def numbers(section: str) -> dict[tuple[str, str, str], Number]:
    """Numbers quoted in the text of a section, given by its label, by task, model and metric.

    Energies of a decomposition are those of the last lead; metrics of a layer end in its number, and |γ| is quoted.
    """
    return {
        (task, model, metric): Number(text, source)
        for source, task, model, metric, text in _read()["numbers"]
        if source == section
    }


def model_label(model: str) -> str:
    """Label of a model in the paper, or its own name; a variant is labelled "METHOD (variant)"."""
    label = MODEL_LABELS.get(model, model)
    return f"{MODEL_LABELS[METHODS[model]]} ({model})" if model in METHODS else label


def by_method(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Rename each variant to its method of the paper, keeping its own name under `form`.

    If a task has several variants of a method, all keep their names; otherwise they would count as seeds of one model.
    Therefore pass all rows of a table or figure at once.
    """
    forms: dict[tuple[str, str], set[str]] = {}
    for row in rows:
        forms.setdefault((row["task"], METHODS.get(row["model"], row["model"])), set()).add(row["model"])

    def under_method(row: Mapping[str, Any]) -> Mapping[str, Any]:
        form = row["model"]
        method = METHODS.get(form, form)
        return row if method == form or len(forms[row["task"], method]) > 1 else {**row, "model": method, "form": form}

    return [under_method(row) for row in rows]


def forms_in(rows: Iterable[Mapping[str, Any]]) -> str:
    """Describe renamed variants, "HPM is hpm-frozen on NS2D, KF2D"; empty if `by_method` renamed no row."""
    forms: dict[tuple[str, str], dict[str, None]] = {}
    for row in rows:
        if "form" in row:
            labels = forms.setdefault((row["model"], row["form"]), {})
            labels[TASK_LABELS.get(row["task"], row["task"])] = None
    return "; ".join(f"{model_label(model)} is {form} on {', '.join(tasks)}" for (model, form), tasks in forms.items())


def colour_indices(models: Sequence[str]) -> dict[str, int]:
    """Colour index of each model, by name or label: fixed for the paper's own models, the next free one for others."""
    known = {name: index for index, model in enumerate(FIXED_COLOURS) for name in (model, model_label(model))}
    others = [model for model in dict.fromkeys(models) if model not in known]
    return {
        model: known[model] if model in known else len(FIXED_COLOURS) + others.index(model)
        for model in dict.fromkeys(models)
    }


@cache
def _read() -> Mapping[str, Any]:
    facts: Mapping[str, Any] = json.loads(_FILE.read_text(encoding="utf-8"))
    return facts


def _column(entry: Mapping[str, Any]) -> Column:
    return Column(
        entry["heading"],
        entry["task"],
        entry["metric"],
        entry["field"],
        entry.get("part", "test"),
        float(entry.get("scale", 1)),
        entry.get("higher", False),
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
