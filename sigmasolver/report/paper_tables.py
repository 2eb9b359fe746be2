"""All tables of the paper from records, next to the published numbers, by the name in `sigmasolver table NAME`.

Published rows keep their printed digits. Measured rows have three significant digits, with mean ± sample standard
deviation and the seed count for several seeds; trivial baselines count as measured. The best and second best of each
column are bold and underlined as in the paper, separately for published and measured rows. The caption states the
sample: windows, horizon, cohort.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from sigmasolver.report.digits import significant, spread
from sigmasolver.report.published import (
    OURS,
    TASK_LABELS,
    Column,
    Number,
    PublishedTable,
    by_method,
    cohorts,
    forms_in,
    model_label,
    numbers,
    seed_tables,
    sweeps,
    tables,
)
from sigmasolver.report.rows import (
    Need,
    Rows,
    diagnosed,
    evaluated,
    lowest_seeds,
    reject_duplicates,
    select,
    unique,
    value_of,
    with_unique_names,
)
from sigmasolver.report.sample import sample_of, timed_updates, timing_of
from sigmasolver.report.study import TRIVIAL_BASELINES, Table
from sigmasolver.report.sweeps import NEED as SWEEPS
from sigmasolver.report.sweeps import points_of
from sigmasolver.report.tables import MISSING, check_repeated, comparison

__all__ = ["TABLES", "PaperTable"]

PAPER, MEASURED = "paper", "ours"
PROMOTION = "Relative promotion"
ERRORS = evaluated("relative_l2", "relative_l2_lead", "parameters")
COHORTS = diagnosed("decomposition", "propagation")
COSTS = {
    "parameter_megabytes": "parameters (MB)",
    "position_megabytes": "positions (MB)",
    "seconds_per_epoch": "epoch (s)",
    "peak_megabytes": "peak (MB)",
}
MACHINE_DEPENDENT = ("seconds_per_epoch", "peak_megabytes")
"""Costs that depend on the machine."""
EFFICIENCY = diagnosed("efficiency", *COSTS)


@dataclass(frozen=True)
class PaperTable:
    """The function that builds a table, and the rows it needs."""

    make: Callable[[Rows], Table]
    needs: tuple[Need, ...]


def model_table(name: str, rows: Rows) -> Table:
    """One row per model of the paper, followed by its measured row if any; other models come last, before the relative
    promotion if the paper prints it."""
    published = tables()[name]
    measured = [_measured(rows, column, published.columns) for column in published.columns]
    models = sorted(
        unique(model for samples in measured for model in samples), key=lambda model: model in TRIVIAL_BASELINES
    )
    if not models:
        tasks = unique(column.task for column in published.columns if column.task)
        raise ValueError(
            f"None of these runs has a number for the table {name} ({published.columns[-1].metric} of "
            f"{', '.join(tasks)}); create them with: sigmasolver suite {published.suite} and sigmasolver evaluate RUN"
        )
    lines: list[tuple[str, str, list[str]]] = []
    scores: dict[int, tuple[str, list[float]]] = {}  # line -> origin and values
    rules: list[int] = []
    known = {model: (label, row) for model, label, row in published.rows}
    for model in [*known, *(model for model in models if model not in known)]:
        rules += [len(lines)] if model in published.rules else []
        if model in known:
            label, row = known[model]
            scores[len(lines)] = PAPER, [number.value for number in row]
            lines.append((label, PAPER, [str(number) for number in row]))
        if model in models:
            values = [samples.get(model, []) for samples in measured]
            counts = [
                len(seeds) for seeds, column in zip(values, published.columns, strict=True) if seeds and column.task
            ]
            counts = [] if model in TRIVIAL_BASELINES else counts  # baselines have no seed
            scores[len(lines)] = MEASURED, [statistics.fmean(seeds) if seeds else math.nan for seeds in values]
            lines.append((model_label(model), _origin(counts), [_cell(seeds) for seeds in values]))
    if published.promotion:
        rules.append(len(lines))
        lines.append((PROMOTION, PAPER, [f"{number} %" for number in published.promotion]))
        if OURS in models:
            gains = _promotions(published, [_mean(samples, OURS) for samples in measured])
            lines.append((PROMOTION, MEASURED, gains))
    bold: set[tuple[int, int]] = set()
    underlined: set[tuple[int, int]] = set()
    for index, column in enumerate(published.columns):
        for origin in (PAPER, MEASURED) if column.metric != "parameters" else ():
            column_scores = {i: (v[index], lines[i][2][index]) for i, (source, v) in scores.items() if source == origin}
            best, second = _best_two(column_scores, column.higher)
            bold |= {(line, 2 + index) for line in best}
            underlined |= {(line, 2 + index) for line in second}
    return Table(
        columns=("model", "from", *(column.heading for column in published.columns)),
        rows=tuple((label, origin, *cells) for label, origin, cells in lines),
        bold=frozenset(bold),
        underlined=frozenset(underlined),
        rules=frozenset(rules),
        caption=(
            f"{published.title} ({published.source}). {_SPREAD_NOTE}; the best of each column is bold, the second best "
            "underlined, separately for paper and "
            f"ours.{_PROMOTION_NOTE if published.promotion else ''}{_sample_note(rows, published)}"
        ),
    )


def _sample_note(rows: Rows, published: PublishedTable) -> str:
    """Describe the sample behind the measured numbers of a table."""
    selected = [row for column in published.columns if column.task for row in _column_rows(rows, column, [column])]
    return _measured_on(selected) + _forms_note(selected)


def _measured_on(rows: Rows) -> str:
    sample = sample_of(rows)
    return f" Ours: {sample}." if sample else ""


def _forms_note(rows: Rows) -> str:
    """Name the trained variant of a method if it differs."""
    forms = forms_in(rows)
    return f" {forms}." if forms else ""


_SPREAD_NOTE = "± is the sample standard deviation over seeds"
_PROMOTION_NOTE = (
    f" {PROMOTION}: relative reduction of the error of the best published baseline of the column by Transolver-σ, in "
    "both rows."
)


def _promotions(published: PublishedTable, ours: Sequence[float]) -> list[str]:
    """Improvement of our values over the best published baseline of each column, in per cent."""
    signs = (-1 if column.higher else 1 for column in published.columns)
    best = (number.value for number in published.strongest())
    gains = [100 * sign * (1 - value / rival) for sign, value, rival in zip(signs, ours, best, strict=True)]
    rounded = [round(gain, 1) or 0.0 for gain in gains]  # turn -0.0 into 0.0
    return [f"{gain:.1f} %".replace("-", "−") if math.isfinite(gain) else MISSING for gain in rounded]


def _origin(counts: Iterable[int]) -> str:
    """Origin of a measured row: "ours, 3 seeds", or "ours, 1 to 3 seeds" if columns differ."""
    distinct = sorted(set(counts))
    if not distinct:
        return MEASURED
    fewest = "" if len(distinct) == 1 else f"{distinct[0]} to "
    return f"{MEASURED}, {fewest}{_seed_count(distinct[-1])}"


def _seed_count(count: int) -> str:
    return f"{count} seed{'' if count == 1 else 's'}"


def _column_rows(rows: Rows, column: Column, columns: Sequence[Column]) -> Rows:
    """Rows of a column; a column without a task covers all tasks of the table."""
    need = evaluated(column.metric, part=column.part)
    tasks = [column.task] if column.task else unique(other.task for other in columns if other.task)
    return [row for row in rows if need.matches(row) and row["task"] in tasks and row["field"] == column.field]


def _rival_label(model: str, seeds: int) -> str:
    return model if model in TRIVIAL_BASELINES else f"{model_label(model)}, {_seed_count(seeds)}"


def _measured(rows: Rows, column: Column, columns: Sequence[Column]) -> dict[str, list[float]]:
    """Scaled values over seeds per model; for a column without a task, the mean over the tasks of the table.

    Every run contains the rows of the trivial baselines; these must agree and count once.
    """
    selected = _column_rows(rows, column, columns)
    reject_duplicates(selected)
    by_model: dict[str, list[float]] = {}
    for row in with_unique_names(selected):
        samples, value = by_model.setdefault(row["model"], []), value_of(row)
        if row["model"] in TRIVIAL_BASELINES and samples:
            check_repeated(row, samples[0] / column.scale, value)
        else:
            samples.append(column.scale * value)
    return by_model if column.task else {model: [statistics.fmean(samples)] for model, samples in by_model.items()}


def seed_table(name: str, rows: Rows) -> Table:
    """One row per quantity: the strongest baseline and Transolver-σ, published and measured."""
    seeds = seed_tables()[name]
    published = tables()[seeds.of]
    baselines = [*(model for model, _, _ in published.rows if model != OURS), *TRIVIAL_BASELINES]
    lines: list[tuple[str, ...]] = []
    bold: set[tuple[int, int]] = set()
    any_measured = False
    for column, strongest, ours in zip(published.columns, seeds.strongest, seeds.ours, strict=True):
        if strongest is None or ours is None:
            continue
        measured = _measured(rows, column, published.columns)
        any_measured = any_measured or bool(measured)
        sign = -1 if column.higher else 1
        rivals = {model: sign * statistics.fmean(measured[model]) for model in baselines if model in measured}
        rival = min(rivals, key=lambda model: rivals[model]) if rivals else None
        rival_cell = f"{_cell(measured[rival])} ({_rival_label(rival, len(measured[rival]))})" if rival else MISSING
        our_cell = f"{_cell(measured[OURS])} ({_seed_count(len(measured[OURS]))})" if OURS in measured else MISSING
        pairs = ((1, strongest.value, 3, ours.value), (2, _mean(measured, rival), 4, _mean(measured, OURS)))
        bold |= {
            (len(lines), index)
            for first, a, second, b in pairs
            for index in _best({first: (a, str(a)), second: (b, str(b))}, column.higher)
        }
        lines.append((column.heading, str(strongest), rival_cell, str(ours), our_cell))
    if not any_measured:
        raise ValueError(
            f"None of these runs has a number for the table {name}; create them with: sigmasolver suite "
            f"{published.suite} and sigmasolver evaluate RUN"
        )
    names = ("strongest baseline", model_label(OURS))
    return Table(
        columns=("quantity", *(f"{name}, {origin}" for name in names for origin in (PAPER, MEASURED))),
        rows=tuple(lines),
        bold=frozenset(bold),
        caption=f"{published.title}: means and standard deviations over seeds ({seeds.source}). {_SPREAD_NOTE}; the "
        f"better of each pair is bold.{_sample_note(rows, published)}",
    )


def scaling_table(rows: Rows) -> Table:
    """The three scaling sweeps on Darcy flow; here ± is the deviation over test cases."""
    measured = points_of(rows)
    lines: list[tuple[str, ...]] = []
    bold: set[tuple[int, int]] = set()
    for name, sweep in sweeps().items():
        printed = dict(zip(sweep.values, zip(sweep.parameters, sweep.errors, strict=True), strict=True))
        points = {point.setting: point for point in measured.get(name, [])}
        theirs: dict[int, tuple[float, str]] = {}
        ours: dict[int, tuple[float, str]] = {}
        for setting in sorted({*printed, *points}):
            size, number = printed.get(setting, (None, None))
            point = points.get(setting)
            count = point.parameters if point and point.parameters else size
            if number is not None:
                theirs[len(lines)] = (number.value, str(number))
            if point is not None:
                ours[len(lines)] = (point.error, spread(1e3 * point.error, 1e3 * point.deviation))
            errors = (column.get(len(lines), (0.0, MISSING))[1] for column in (theirs, ours))
            lines.append((sweep.setting, f"{setting:,}", f"{count:,}" if count else MISSING, *errors))
        bold |= {(line, 3 + index) for index, column in enumerate((theirs, ours)) for line in _best(column, False)}
    return Table(
        ("sweep", "setting", "parameters", f"error, {PAPER}", f"error, {MEASURED}"),
        tuple(lines),
        frozenset(bold),
        "Relative L2 errors on Darcy flow in thousandths, ± the standard deviation over test cases "
        f"({', '.join(sweep.source for sweep in sweeps().values())}); the best of each sweep is "
        f"bold.{_measured_on([row for row in rows if SWEEPS.matches(row)])}",
    )


def cohort_table(rows: Rows) -> Table:
    """Samples, frames per call and horizon of the error decompositions. The frames per call are the leads without
    propagated error, since the first call propagates none."""
    selected = [row for row in select(rows, COHORTS) if row["field"] is None]
    lines = []
    for task in unique([*cohorts(), *(row["task"] for row in selected)]):
        printed, task_rows = cohorts().get(task), [row for row in selected if row["task"] == task]
        no_propagation = [row["lead"] for row in task_rows if value_of(row) == 0]
        block = next((lead for lead in range(1, len(task_rows) + 2) if lead not in no_propagation), 1) - 1
        counts = (unique(row.get(name) for row in task_rows) for name in ("windows", "horizon", "cohort"))
        samples, horizon, cohort = (" or ".join(str(value or "none") for value in values) for values in counts)
        ours = (samples, block, horizon) if task_rows else ()
        theirs = (printed.samples, printed.block, printed.horizon) if printed else ()
        cells = [str(side[i]) if side else MISSING for i in range(3) for side in (theirs, ours)]
        lines.append((TASK_LABELS.get(task, task), *cells, cohort or MISSING))
    names = ("samples", "frames per call", "horizon")
    return Table(
        ("task", *(f"{name}, {origin}" for name in names for origin in (PAPER, MEASURED)), f"cohort, {MEASURED}"),
        tuple(lines),
        caption="Samples of the error decompositions (tab:decomposition-cohort); --cohort decomposition uses the "
        "paper's sample counts.",
    )


def efficiency_table(rows: Rows) -> Table:
    """Storage, time and memory of every task and model (lowest seed); the paper prints only some of them."""
    chosen = with_unique_names(lowest_seeds(select(rows, EFFICIENCY)))
    runs = {(row["task"], row["model"]): row["run"] for row in chosen}
    measured = [row for row in rows if row.get("diagnostic") == "efficiency" and row["run"] in runs.values()]
    machines = {task: {row["machine"] for row in chosen if row["task"] == task} for task, _ in runs}
    by_metric = {(row["task"], row["model"], row["metric"]): row for row in chosen}
    printed = numbers("app:efficiency-measurements")
    tasks = unique(task for task, _, _ in [*printed, *by_metric])
    pairs = unique((task, model) for task in tasks for other, model, _ in [*printed, *by_metric] if other == task)
    lines, scores = [], []
    for task, model in pairs:
        measured_costs = [by_metric.get((task, model, metric)) for metric in COSTS]
        texts = [
            significant(value_of(row)) if row and not row["deviation"]
            else spread(value_of(row), row["deviation"]) if row
            else MISSING
            for row in measured_costs
        ]  # fmt: skip
        theirs = [_text(printed.get((task, model, metric))) for metric in COSTS]
        cells = [cell for pair in zip(theirs, texts, strict=True) for cell in pair]
        timed = timed_updates(row for row in measured if row["run"] == runs.get((task, model)))
        cells.append(f"{timed[0]:,} of {timed[1]:,}" if timed else MISSING)
        lines.append((TASK_LABELS.get(task, task), model_label(model), *cells))
        scores.append([value_of(row) if row else math.nan for row in measured_costs])
    bold = {
        (line, 3 + 2 * index)
        for index, metric in enumerate(COSTS)
        for task in tasks
        if metric not in MACHINE_DEPENDENT or len(machines.get(task, ())) == 1
        for line in _best(
            {i: (scores[i][index], lines[i][3 + 2 * index]) for i, (of, _) in enumerate(pairs) if of == task}, False
        )
    }
    return Table(
        (
            "task",
            "model",
            *(f"{name}, {origin}" for name in COSTS.values() for origin in (PAPER, MEASURED)),
            f"updates timed, {MEASURED}",
        ),
        tuple(lines),
        frozenset(bold),
        "Training cost (app:efficiency-measurements), ± over repeated timings; partly timed epochs are "
        "extrapolated; the lowest measured value of each task is bold, for times and peaks only if all are from one "
        f"machine. Ours: {timing_of(measured)}.{_forms_note(measured)}",
    )


def _with_method_names(make: Callable[[Rows], Table], rows: Rows) -> Table:
    """Build a table with every row under its method of the paper."""
    return make(by_method(rows))


def _cell(values: Sequence[float]) -> str:
    if len(values) > 1:
        mean = statistics.fmean(values)
        return spread(mean, statistics.stdev(values) if math.isfinite(mean) else mean)
    return significant(values[0]) if values else MISSING


def _mean(samples: Mapping[str, Sequence[float]], model: str | None) -> float:
    return statistics.fmean(samples[model]) if model is not None and model in samples else math.nan


def _text(number: Number | None) -> str:
    return MISSING if number is None else str(number)


def _best_two(scores: Mapping[int, tuple[float, str]], higher: bool) -> tuple[Collection[int], Collection[int]]:
    """Indices of the best and second best scores, each with all that read the same."""
    best = _best(scores, higher)
    return best, _best({index: score for index, score in scores.items() if index not in best}, higher)


def _best(scores: Mapping[int, tuple[float, str]], higher: bool) -> Collection[int]:
    """Indices whose mean reads the same as the best one, regardless of the deviation."""
    finite = {index: score for index, score in scores.items() if math.isfinite(score[0])}
    if not finite:
        return []
    best = (max if higher else min)(finite.values())[0]
    reads = {_printed_mean(text) for value, text in finite.values() if value == best}
    return [index for index, (_, text) in finite.items() if _printed_mean(text) in reads]


def _printed_mean(text: str) -> str:
    """Formatted mean without its deviation."""
    return text.partition(" ± ")[0]


TABLES: Mapping[str, PaperTable] = {
    "comparison": PaperTable(
        lambda rows: comparison(with_unique_names(select(rows, ERRORS, baselines=True))), (ERRORS,)
    ),
    **{name: PaperTable(partial(_with_method_names, partial(model_table, name)), (ERRORS,)) for name in tables()},
    **{name: PaperTable(partial(_with_method_names, partial(seed_table, name)), (ERRORS,)) for name in seed_tables()},
    "scaling": PaperTable(scaling_table, (SWEEPS,)),
    "cohorts": PaperTable(cohort_table, (COHORTS,)),
    "efficiency": PaperTable(partial(_with_method_names, efficiency_table), (EFFICIENCY,)),
}
