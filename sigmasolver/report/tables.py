"""Build a table and curves from tidy rows.

A row has task, model, seed, metric, field, lead, value. The metrics used are "relative_l2_lead" (one lead),
"relative_l2" (the full horizon, lead null) and "parameters"; others are ignored. Null and NaN values are not finite.
The field "all" is the mean over fields.
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
MEAN_OVER_FIELDS, JOINT_NORM = "mean over fields", "all fields together"
"""The two relative errors of several fields: the mean of the errors per field, or one joint norm."""
MISSING = "–"
_TOLERANCE = 1e-5
"""Relative tolerance between two measurements of the same quantity: round-off on different machines."""
_REQUIRED_KEYS = ("task", "model", "seed", "metric", "field", "lead", "value")

Key = tuple[str, str | None, int | None]
"""Metric, field, lead."""
Values = dict[str, dict[Key, list[float]]]
"""Model -> key -> values over seeds."""


def comparison(records: Sequence[Mapping[str, Any]], dimensions: Dimensions | None = None) -> Table:
    """Compare models, one row each, trivial baselines last: errors in per cent at the first, middle and last lead and
    over the full horizon. The `dimensions` give the time of a lead.

    Several seeds give mean ± sample standard deviation. The lowest error of each column is bold, with all cells that
    read the same; baselines are ranked too. Several fields without rows of the field "all" get a block of columns
    each.
    """
    values = _values_over_seeds(records)
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
    """Error per lead of each model, trivial baselines last: the mean over seeds and, without "all" rows, over fields.

    The spread over seeds is their sample deviation; the spread over windows is the root mean square over seeds. For a
    mean over fields neither is known.
    """
    values = _values_over_seeds(records)
    fields, deviations = _fields(values), _deviations(records)
    result = []
    for model, rows in values.items():
        leads = sorted({lead for metric, field, lead in rows if metric == LEAD and field in fields and lead})
        samples = [[v for field in fields for v in rows.get((LEAD, field, lead), [])] for lead in leads]
        if not leads:
            continue
        seeds = max(len(rows[key]) for key in rows if key[0] == LEAD)
        curve = Curve(model, tuple(leads), tuple(map(statistics.fmean, samples)), seeds=seeds)
        if len(fields) == 1:
            over_windows = tuple(_root_mean_square(deviations[model, fields[0], lead]) for lead in leads)
            curve = replace(curve, over_windows=over_windows, over_seeds=tuple(map(_sample_deviation, samples)))
        result.append(curve)
    return tuple(result)


def _deviations(records: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str | None, int], list[float]]:
    """Deviations over windows per model, field and lead, one for each seed; NaN if a row has none."""
    seeds: dict[tuple[str, str | None, int], dict[Any, float]] = defaultdict(dict)
    for record in records:
        if record["metric"] == LEAD:
            deviation = record.get("deviation")
            by_seed = seeds[record["model"], record["field"], record["lead"]]
            by_seed[record["seed"]] = math.nan if deviation is None else float(deviation)
    return defaultdict(list, {key: list(deviations.values()) for key, deviations in seeds.items()})


def _root_mean_square(values: Sequence[float]) -> float:
    return math.sqrt(statistics.fmean(value**2 for value in values)) if values else math.nan


def _sample_deviation(values: Sequence[float]) -> float:
    """Sample standard deviation; NaN for a single value or non-finite ones."""
    return statistics.stdev(values) if len(values) > 1 and all(map(math.isfinite, values)) else math.nan


def to_markdown(table: Table) -> str:
    """Format as a pipe table with right-aligned numbers. Markdown has no underline, so `<ins>` is used."""
    lines = [[_markdown(heading) for heading in table.columns], [":---", *["---:"] * (len(table.columns) - 1)]]
    for i, row in enumerate(table.rows):
        cells = enumerate(map(_markdown, row))
        lines.append([_mark(table, i, j, cell, "**{}**", "<ins>{}</ins>") for j, cell in cells])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def to_latex(table: Table) -> str:
    """Format as a LaTeX tabular with booktabs rules; the caption becomes a comment."""
    lines = [f"\\begin{{tabular}}{{l{'r' * (len(table.columns) - 1)}}}", "\\toprule"]
    lines += [_latex_row(map(_latex, table.columns)), "\\midrule"]
    for i, row in enumerate(table.rows):
        lines += ["\\midrule"] if i in table.rules else []
        cells = enumerate(map(_latex, row))
        lines.append(_latex_row(_mark(table, i, j, c, "\\textbf{{{}}}", "\\underline{{{}}}") for j, c in cells))
    return "\n".join([*lines, "\\bottomrule", f"% {' '.join(table.caption.split())}", "\\end{tabular}", ""])


def _mark(table: Table, row: int, column: int, cell: str, bold: str, underline: str) -> str:
    """Mark a cell if it is the best or second best of its column."""
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


def _values_over_seeds(records: Sequence[Mapping[str, Any]]) -> Values:
    """Group values over seeds in the order of the rows, trivial baselines last."""
    if not records:
        raise ValueError("There are no records to compare; evaluate a run first.")
    seeds: dict[str, dict[Key, dict[Any, float]]] = defaultdict(lambda: defaultdict(dict))
    for record in records:
        for key in _REQUIRED_KEYS:
            if key not in record:
                raise ValueError(f"A record has no {key}; required keys are {', '.join(_REQUIRED_KEYS)}.")
        if record["task"] != records[0]["task"]:
            raise ValueError(
                f"The records are of {records[0]['task']} and of {record['task']}; compare one task at a time."
            )
        model, metric, field, lead = (record[key] for key in ("model", "metric", "field", "lead"))
        if metric not in (LEAD, HORIZON, PARAMETERS):
            continue
        by_seed = seeds[model][metric, None if metric == PARAMETERS else field, lead]
        value = float("nan") if record["value"] is None else float(record["value"])
        if record["seed"] in by_seed:
            check_repeated(record, by_seed[record["seed"]], value)
        by_seed[record["seed"]] = value
    ordered = sorted(seeds, key=lambda name: name in TRIVIAL_BASELINES)
    return {model: {key: list(by_seed.values()) for key, by_seed in seeds[model].items()} for model in ordered}


def check_repeated(record: Mapping[str, Any], previous: float, value: float) -> None:
    """Check a repeated row: only trivial baselines (no seed), which every run has, may repeat, with equal values."""
    model, metric, seed = (record[key] for key in ("model", "metric", "seed"))
    quantity = f"{metric} of {model}" + ("" if record["lead"] is None else f" at lead {record['lead']}")
    if seed is not None:
        raise ValueError(f"The records have two values of {quantity} for seed {seed}; keep one of them.")
    not_finite = [not math.isfinite(number) for number in (previous, value)]
    if not all(not_finite) and not math.isclose(previous, value, rel_tol=_TOLERANCE):
        trained = "trained on the same cases or not " if model == "training-mean" else ""
        raise ValueError(
            f"The records have two values of {quantity}, {significant(previous)} and {significant(value)}: these runs "
            f"were not {trained}tested on the same samples and cannot be compared in one table."
        )


def _fields(values: Values) -> list[str | None]:
    """Fields to show: only "all" if present."""
    keys = [(metric, field) for rows in values.values() for metric, field, _ in rows]
    fields = list(dict.fromkeys(field for metric, field in keys if metric in (LEAD, HORIZON)))
    return [ALL] if ALL in fields else fields


def _columns(values: Values, dimensions: Dimensions) -> list[tuple[str, Key]]:
    """Heading and key of each error column that any model has."""
    present = {key for rows in values.values() for key in rows}
    leads = [lead for metric, _, lead in present if metric == LEAD and lead is not None]
    shown_leads = sorted({1, (max(leads) + 1) // 2, max(leads)}) if leads else []
    fields = _fields(values)
    columns: list[tuple[str, Key]] = []
    for field in fields:
        prefix = f"{field}: " if len(fields) > 1 else ""
        for lead in shown_leads:
            label = ", ".join(filter(None, (f"lead {lead}", dimensions.time(lead))))
            columns.append((f"{prefix}{label} (%)", (LEAD, field, lead)))
        columns.append((f"{prefix}whole horizon (%)", (HORIZON, field, None)))
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
    """Rows whose mean reads the same as the lowest one."""
    means = {row: 100 * statistics.fmean(seeds) for row, seeds in values.items() if seeds}
    finite = {row: mean for row, mean in means.items() if math.isfinite(mean)}
    return [row for row, mean in finite.items() if significant(mean) == significant(min(finite.values()))]


def _caption(records: Sequence[Mapping[str, Any]], several: bool, baselines: Sequence[str]) -> str:
    sample = sample_of(row for row in records if row["metric"] in (LEAD, HORIZON))
    norm = f", {MEAN_OVER_FIELDS}" if any(row.get("field") == ALL for row in records) else ""
    where = f" ({sample})" if sample else ""
    parts = [
        f"Relative L2 error on {records[0]['task']}{norm}, mean over windows{where}; the lowest of each column is bold."
    ]
    if several:
        parts.append("± is the sample standard deviation over seeds.")
    return " ".join([*parts, *baselines])
