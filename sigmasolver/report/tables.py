"""From tidy rows to a table and to curves.

A row has task, model, seed, metric, field, lead, value. Metrics that are read: "relative_l2_lead" (one lead),
"relative_l2" (the whole horizon, lead null) and "parameters"; others pass by. A value that is null or NaN is not
finite. The field "all" stands for the mean over fields.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sigmasolver.report.digits import significant, spread
from sigmasolver.report.rows import ALL
from sigmasolver.report.sample import sample_of
from sigmasolver.report.study import TRIVIAL_BASELINES, Curve, Dimensions, Table

__all__ = ["check_repeated", "comparison", "curves", "to_latex", "to_markdown"]

LEAD, HORIZON, PARAMETERS = "relative_l2_lead", "relative_l2", "parameters"
OVER_FIELDS, TOGETHER = "mean over fields", "all fields together"
"""The two relative errors of several fields: the mean of the errors of each, or one norm of all of them."""
MISSING = "–"
_AGREE = 1e-5
"""Relative difference up to which two measurements of the same thing are one: rounding on different machines."""
_KEYS = ("task", "model", "seed", "metric", "field", "lead", "value")

Key = tuple[str, str | None, int | None]
"""Metric, field, lead."""
Values = dict[str, dict[Key, list[float]]]
"""Of each model and key, the values over seeds."""


def comparison(records: Sequence[Mapping[str, Any]], dimensions: Dimensions | None = None) -> Table:
    """One row for each model, persistence last: errors in per cent at the first, middle and last lead and overall.
    The `dimensions` tell when a lead is.

    Several seeds give mean ± sample standard deviation. The lowest error of each column is bold, with all that read
    the same; persistence competes like any other. Several fields without rows of the field "all" get a block of
    columns each.
    """
    values = _gather(records)
    counts = {model: _parameters(model, rows) for model, rows in values.items()}
    columns = _columns(values, dimensions or Dimensions())
    cells = [[_cell(rows.get(key, [])) for _, key in columns] for rows in values.values()]
    counted = any(counts.values())
    names = list(values)
    bold = {
        (row, 1 + counted + column)
        for column, (_, key) in enumerate(columns)
        for row in _best({index: values[name].get(key, []) for index, name in enumerate(names)})
    }
    several = any(len(seeds) > 1 for rows in values.values() for seeds in rows.values())
    return Table(
        columns=("model", *(["parameters"] if counted else []), *(heading for heading, _ in columns)),
        rows=tuple(
            (name, *([counts[name] or MISSING] if counted else []), *row)
            for name, row in zip(names, cells, strict=True)
        ),
        bold=frozenset(bold),
        caption=_caption(records, several, [TRIVIAL_BASELINES[name] for name in names if name in TRIVIAL_BASELINES]),
    )


def curves(records: Sequence[Mapping[str, Any]]) -> tuple[Curve, ...]:
    """The error per lead of each model, persistence last: the mean over seeds and, without "all" rows, over fields.

    The spread over seeds is their sample deviation; that over windows is the root mean square of the seeds' own. Of a
    mean over fields neither is known.
    """
    values = _gather(records)
    fields, deviations = _fields(values), _deviations(records)
    made = []
    for model, rows in values.items():
        leads = sorted({lead for metric, field, lead in rows if metric == LEAD and field in fields and lead})
        held = [[v for field in fields for v in rows.get((LEAD, field, lead), [])] for lead in leads]
        if not leads:
            continue
        seeds = max(len(rows[key]) for key in rows if key[0] == LEAD)
        curve = Curve(model, tuple(leads), tuple(map(statistics.fmean, held)), seeds=seeds)
        if len(fields) == 1:
            over_windows = tuple(_root_mean_square(deviations[model, fields[0], lead]) for lead in leads)
            curve = replace(curve, over_windows=over_windows, over_seeds=tuple(map(_sample_deviation, held)))
        made.append(curve)
    return tuple(made)


def _deviations(records: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str | None, int], list[float]]:
    """Of each model, field and lead, the deviations over windows, one for each seed; NaN where a row has none."""
    seeds: dict[tuple[str, str | None, int], dict[Any, float]] = defaultdict(dict)
    for record in records:
        if record["metric"] == LEAD:
            deviation = record.get("deviation")
            place = seeds[record["model"], record["field"], record["lead"]]
            place[record["seed"]] = math.nan if deviation is None else float(deviation)
    return defaultdict(list, {key: list(held.values()) for key, held in seeds.items()})


def _root_mean_square(values: Sequence[float]) -> float:
    return math.sqrt(statistics.fmean(value**2 for value in values)) if values else math.nan


def _sample_deviation(values: Sequence[float]) -> float:
    """NaN of one, and of what is not finite."""
    return statistics.stdev(values) if len(values) > 1 and all(map(math.isfinite, values)) else math.nan


def to_markdown(table: Table) -> str:
    """A pipe table, numbers to the right. Markdown has no underline of its own: `<ins>` is what renders as one."""
    lines = [[_markdown(heading) for heading in table.columns], [":---", *["---:"] * (len(table.columns) - 1)]]
    for i, row in enumerate(table.rows):
        cells = enumerate(map(_markdown, row))
        lines.append([_marked(table, i, j, cell, "**{}**", "<ins>{}</ins>") for j, cell in cells])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def to_latex(table: Table) -> str:
    """A tabular with the rules of the booktabs package; the caption is left to the text around it, as a comment."""
    lines = [f"\\begin{{tabular}}{{l{'r' * (len(table.columns) - 1)}}}", "\\toprule"]
    lines += [_latex_row(map(_latex, table.columns)), "\\midrule"]
    for i, row in enumerate(table.rows):
        lines += ["\\midrule"] if i in table.rules else []
        cells = enumerate(map(_latex, row))
        lines.append(_latex_row(_marked(table, i, j, c, "\\textbf{{{}}}", "\\underline{{{}}}") for j, c in cells))
    return "\n".join([*lines, "\\bottomrule", f"% {' '.join(table.caption.split())}", "\\end{tabular}", ""])


def _marked(table: Table, row: int, column: int, cell: str, bold: str, underline: str) -> str:
    """The cell as it is, or inside the mark of the best or of the second best."""
    mark = bold if (row, column) in table.bold else underline if (row, column) in table.underlined else "{}"
    return mark.format(cell)


_LATEX = {
    **{character: "\\" + character for character in "&%$#_{}"},
    "\\": "\\textbackslash{}",
    "~": "\\textasciitilde{}",
    "^": "\\textasciicircum{}",
    "±": "$\\pm$",
    "–": "--",
    "−": "$-$",
    "σ": "$\\sigma$",
    "ω": "$\\omega$",
    "→": "$\\rightarrow$",
}


def _markdown(text: str) -> str:
    return " ".join(text.split()).replace("\\", "\\\\").replace("|", "\\|")


def _latex(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in text)


def _latex_row(cells: Iterable[str]) -> str:
    return " & ".join(cells) + " \\\\"


def _gather(records: Sequence[Mapping[str, Any]]) -> Values:
    """Values over seeds in the order of the rows, yardsticks last."""
    if not records:
        raise ValueError("There are no records to compare; evaluate a run first.")
    seeds: dict[str, dict[Key, dict[Any, float]]] = defaultdict(lambda: defaultdict(dict))
    for record in records:
        for key in _KEYS:
            if key not in record:
                raise ValueError(f"A record has no {key}; required keys are {', '.join(_KEYS)}.")
        if record["task"] != records[0]["task"]:
            raise ValueError(
                f"The records are of {records[0]['task']} and of {record['task']}; compare one task at a time."
            )
        model, metric, field, lead = (record[key] for key in ("model", "metric", "field", "lead"))
        if metric not in (LEAD, HORIZON, PARAMETERS):
            continue
        held = seeds[model][metric, None if metric == PARAMETERS else field, lead]
        value = float("nan") if record["value"] is None else float(record["value"])
        if record["seed"] in held:
            check_repeated(record, held[record["seed"]], value)
        held[record["seed"]] = value
    ordered = sorted(seeds, key=lambda name: name in TRIVIAL_BASELINES)
    return {model: {key: list(held.values()) for key, held in seeds[model].items()} for model in ordered}


def check_repeated(record: Mapping[str, Any], before: float, value: float) -> None:
    """Every run brings the rows of its yardstick, which has no seed: they must agree. Other rows come once."""
    model, metric, seed = (record[key] for key in ("model", "metric", "seed"))
    what = f"{metric} of {model}" + ("" if record["lead"] is None else f" at lead {record['lead']}")
    if seed is not None:
        raise ValueError(f"The records have two values of {what} for seed {seed}; keep one of them.")
    lost = [not math.isfinite(one) for one in (before, value)]
    if not all(lost) and not math.isclose(before, value, rel_tol=_AGREE):
        trained = "trained on the same cases or not " if model == "training-mean" else ""
        raise ValueError(
            f"The records have two values of {what}, {significant(before)} and {significant(value)}: these runs were "
            f"not {trained}tested on the same samples and cannot be compared in one table."
        )


def _fields(values: Values) -> list[str | None]:
    """The fields to show: "all" alone where it exists."""
    keys = [(metric, field) for rows in values.values() for metric, field, _ in rows]
    fields = list(dict.fromkeys(field for metric, field in keys if metric in (LEAD, HORIZON)))
    return [ALL] if ALL in fields else fields


def _columns(values: Values, dimensions: Dimensions) -> list[tuple[str, Key]]:
    """Heading and key of each column of errors that any model has."""
    present = {key for rows in values.values() for key in rows}
    leads = [lead for metric, _, lead in present if metric == LEAD and lead is not None]
    shown = sorted({1, (max(leads) + 1) // 2, max(leads)}) if leads else []
    fields = _fields(values)
    columns: list[tuple[str, Key]] = []
    for field in fields:
        start = f"{field}: " if len(fields) > 1 else ""
        for lead in shown:
            words = ", ".join(filter(None, (f"lead {lead}", dimensions.time(lead))))
            columns.append((f"{start}{words} (%)", (LEAD, field, lead)))
        columns.append((f"{start}whole horizon (%)", (HORIZON, field, None)))
    columns = [(heading, key) for heading, key in columns if key in present]
    if not columns:
        raise ValueError(f'The records have no errors; rows with the metric "{LEAD}" or "{HORIZON}" are required.')
    return columns


def _parameters(model: str, rows: Mapping[Key, Sequence[float]]) -> str | None:
    counts = {value for (metric, _, _), values in rows.items() if metric == PARAMETERS for value in values}
    if len(counts) > 1:
        sizes = " and ".join(f"{count:,.0f}" for count in sorted(counts))
        raise ValueError(f"{model} has runs of {sizes} parameters; give each size its own name.")
    return f"{counts.pop():,.0f}" if counts else None


def _cell(values: Sequence[float]) -> str:
    per_cent = [100 * value for value in values]
    if len(per_cent) > 1:
        mean = statistics.fmean(per_cent)
        return spread(mean, statistics.stdev(per_cent) if math.isfinite(mean) else mean)
    return significant(per_cent[0]) if per_cent else MISSING


def _best(values: Mapping[int, Sequence[float]]) -> list[int]:
    """The rows whose mean reads like the lowest one."""
    means = {row: 100 * statistics.fmean(seeds) for row, seeds in values.items() if seeds}
    finite = {row: mean for row, mean in means.items() if math.isfinite(mean)}
    return [row for row, mean in finite.items() if significant(mean) == significant(min(finite.values()))]


def _caption(records: Sequence[Mapping[str, Any]], several: bool, yardsticks: Sequence[str]) -> str:
    sample = sample_of(row for row in records if row["metric"] in (LEAD, HORIZON))
    norm = f", {OVER_FIELDS}" if any(row.get("field") == ALL for row in records) else ""
    where = f" ({sample})" if sample else ""
    parts = [
        f"Relative L2 error on {records[0]['task']}{norm}, mean over windows{where}; the lowest of each column is bold."
    ]
    if several:
        parts.append("± is the sample standard deviation over seeds.")
    return " ".join([*parts, *yardsticks])
