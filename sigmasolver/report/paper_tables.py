"""Every table of the paper from records, with the published numbers beside them, by the name of the command
`sigmasolver table NAME`.

Rows of the paper keep their printed digits; those that were measured here have three, mean ± sample standard deviation
where there are several seeds, and say how many; persistence was measured with them and is one of them. Best and second
best of each column are marked among the published and among the measured: bold and underlined, as the paper does. The
caption says what was measured on: windows, horizon, cohort.
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
    in_order,
    lowest_seeds,
    named_apart,
    refuse_doubles,
    select,
    value_of,
)
from sigmasolver.report.sample import sample_of, timed_of, timing_of
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
ON_MACHINE = ("seconds_per_epoch", "peak_megabytes")
"""Costs that differ from machine to machine."""
EFFICIENCY = diagnosed("efficiency", *COSTS)


@dataclass(frozen=True)
class PaperTable:
    """How a table is made, and the rows it needs first."""

    make: Callable[[Rows], Table]
    needs: tuple[Need, ...]


def model_table(name: str, rows: Rows) -> Table:
    """One row for each model of the paper and one below it where it was measured; other models come last, before the
    relative promotion where the paper prints it."""
    published = tables()[name]
    measured = [_measured(rows, column, published.columns) for column in published.columns]
    models = sorted(
        in_order(model for held in measured for model in held), key=lambda model: model in TRIVIAL_BASELINES
    )
    if not models:
        tasks = in_order(column.task for column in published.columns if column.task)
        raise ValueError(
            f"None of these runs has a number for the table {name} ({published.columns[-1].metric} of "
            f"{', '.join(tasks)}); create them with: sigmasolver suite {published.suite} and sigmasolver evaluate RUN"
        )
    lines: list[tuple[str, str, list[str]]] = []
    scores: dict[int, tuple[str, list[float]]] = {}  # by line: origin and values
    rules: list[int] = []
    known = {model: (label, row) for model, label, row in published.rows}
    for model in [*known, *(model for model in models if model not in known)]:
        rules += [len(lines)] if model in published.rules else []
        if model in known:
            label, row = known[model]
            scores[len(lines)] = PAPER, [number.value for number in row]
            lines.append((label, PAPER, [str(number) for number in row]))
        if model in models:
            values = [held.get(model, []) for held in measured]
            counts = [len(one) for one, column in zip(values, published.columns, strict=True) if one and column.task]
            counts = [] if model in TRIVIAL_BASELINES else counts  # nothing is drawn at random
            scores[len(lines)] = MEASURED, [statistics.fmean(one) if one else math.nan for one in values]
            lines.append((model_label(model), _origin(counts), [_cell(one) for one in values]))
    if published.promotion:
        rules.append(len(lines))
        lines.append((PROMOTION, PAPER, [f"{number} %" for number in published.promotion]))
        if OURS in models:
            gains = _promotions(published, [_mean(held, OURS) for held in measured])
            lines.append((PROMOTION, MEASURED, gains))
    bold: set[tuple[int, int]] = set()
    underlined: set[tuple[int, int]] = set()
    for index, column in enumerate(published.columns):
        for origin in (PAPER, MEASURED) if column.metric != "parameters" else ():
            held = {i: (v[index], lines[i][2][index]) for i, (one, v) in scores.items() if one == origin}
            best, second = _best_two(held, column.higher)
            bold |= {(line, 2 + index) for line in best}
            underlined |= {(line, 2 + index) for line in second}
    return Table(
        columns=("model", "from", *(column.heading for column in published.columns)),
        rows=tuple((label, origin, *cells) for label, origin, cells in lines),
        bold=frozenset(bold),
        underlined=frozenset(underlined),
        rules=frozenset(rules),
        caption=(
            f"{published.title} ({published.source}). {_SPREAD}; the best of each column is bold, the second best "
            "underlined, separately for paper and "
            f"ours.{_GAIN if published.promotion else ''}{_sample(rows, published)}"
        ),
    )


def _sample(rows: Rows, published: PublishedTable) -> str:
    """What the measured numbers of a table rest on."""
    taken = [row for column in published.columns if column.task for row in _taken(rows, column, [column])]
    return _ours_on(taken) + _forms(taken)


def _ours_on(rows: Rows) -> str:
    sample = sample_of(rows)
    return f" Ours: {sample}." if sample else ""


def _forms(rows: Rows) -> str:
    """Which form of a method was trained, where it has another name."""
    forms = forms_in(rows)
    return f" {forms}." if forms else ""


_SPREAD = "± is the sample standard deviation over seeds"
_GAIN = (
    f" {PROMOTION}: relative reduction of the error of the best published baseline of the column by Transolver-σ, in "
    "both rows."
)


def _promotions(published: PublishedTable, ours: Sequence[float]) -> list[str]:
    """By how much these values of our model are better than the best baseline that the paper prints, in per cent."""
    signs = (-1 if column.higher else 1 for column in published.columns)
    best = (number.value for number in published.strongest())
    gains = [100 * sign * (1 - value / rival) for sign, value, rival in zip(signs, ours, best, strict=True)]
    rounded = [round(gain, 1) or 0.0 for gain in gains]  # no minus before a zero
    return [f"{gain:.1f} %".replace("-", "−") if math.isfinite(gain) else MISSING for gain in rounded]


def _origin(counts: Iterable[int]) -> str:
    """Where a measured row comes from: "ours, 3 seeds"; fewest to most where its columns differ."""
    found = sorted(set(counts))
    if not found:
        return MEASURED
    few = "" if len(found) == 1 else f"{found[0]} to "
    return f"{MEASURED}, {few}{_seeds(found[-1])}"


def _seeds(count: int) -> str:
    return f"{count} seed{'' if count == 1 else 's'}"


def _taken(rows: Rows, column: Column, columns: Sequence[Column]) -> Rows:
    """The rows of a column; one without a task has those of all tasks of the table."""
    need = evaluated(column.metric, part=column.part)
    tasks = [column.task] if column.task else in_order(one.task for one in columns if one.task)
    return [row for row in rows if need.takes(row) and row["task"] in tasks and row["field"] == column.field]


def _name(model: str, seeds: int) -> str:
    return model if model in TRIVIAL_BASELINES else f"{model_label(model)}, {_seeds(seeds)}"


def _measured(rows: Rows, column: Column, columns: Sequence[Column]) -> dict[str, list[float]]:
    """Of each model, the scaled values over seeds; a column without a task takes the mean over those of the table.

    Every run brings the numbers of its yardstick, which must agree and count once.
    """
    taken = _taken(rows, column, columns)
    refuse_doubles(taken)
    found: dict[str, list[float]] = {}
    for row in named_apart(taken):
        held, value = found.setdefault(row["model"], []), value_of(row)
        if row["model"] in TRIVIAL_BASELINES and held:
            check_repeated(row, held[0] / column.scale, value)
        else:
            held.append(column.scale * value)
    return found if column.task else {model: [statistics.fmean(held)] for model, held in found.items()}


def seed_table(name: str, rows: Rows) -> Table:
    """One row for each quantity: the strongest baseline and Transolver-σ, published and measured."""
    seeds = seed_tables()[name]
    published = tables()[seeds.of]
    baselines = [*(model for model, _, _ in published.rows if model != OURS), *TRIVIAL_BASELINES]
    lines: list[tuple[str, ...]] = []
    bold: set[tuple[int, int]] = set()
    found = False
    for column, strongest, ours in zip(published.columns, seeds.strongest, seeds.ours, strict=True):
        if strongest is None or ours is None:
            continue
        held = _measured(rows, column, published.columns)
        found = found or bool(held)
        sign = -1 if column.higher else 1
        rivals = {model: sign * statistics.fmean(held[model]) for model in baselines if model in held}
        rival = min(rivals, key=lambda model: rivals[model]) if rivals else None
        rival_cell = f"{_cell(held[rival])} ({_name(rival, len(held[rival]))})" if rival else MISSING
        our_cell = f"{_cell(held[OURS])} ({_seeds(len(held[OURS]))})" if OURS in held else MISSING
        pairs = ((1, strongest.value, 3, ours.value), (2, _mean(held, rival), 4, _mean(held, OURS)))
        bold |= {
            (len(lines), index)
            for first, one, second, two in pairs
            for index in _best({first: (one, str(one)), second: (two, str(two))}, column.higher)
        }
        lines.append((column.heading, str(strongest), rival_cell, str(ours), our_cell))
    if not found:
        raise ValueError(
            f"None of these runs has a number for the table {name}; create them with: sigmasolver suite "
            f"{published.suite} and sigmasolver evaluate RUN"
        )
    names = ("strongest baseline", model_label(OURS))
    return Table(
        columns=("quantity", *(f"{name}, {origin}" for name in names for origin in (PAPER, MEASURED))),
        rows=tuple(lines),
        bold=frozenset(bold),
        caption=f"{published.title}: means and standard deviations over seeds ({seeds.source}). {_SPREAD}; the better "
        f"of each pair is bold.{_sample(rows, published)}",
    )


def scaling_table(rows: Rows) -> Table:
    """Three sweeps on Darcy flow; here ± is the deviation over test cases."""
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
            shown = (held.get(len(lines), (0.0, MISSING))[1] for held in (theirs, ours))
            lines.append((sweep.setting, f"{setting:,}", f"{count:,}" if count else MISSING, *shown))
        bold |= {(line, 3 + index) for index, held in enumerate((theirs, ours)) for line in _best(held, False)}
    return Table(
        ("sweep", "setting", "parameters", f"error, {PAPER}", f"error, {MEASURED}"),
        tuple(lines),
        frozenset(bold),
        "Relative L2 errors on Darcy flow in thousandths, ± the standard deviation over test cases "
        f"({', '.join(sweep.source for sweep in sweeps().values())}); the best of each sweep is "
        f"bold.{_ours_on([row for row in rows if SWEEPS.takes(row)])}",
    )


def cohort_table(rows: Rows) -> Table:
    """Samples, frames per call and frames in all of the error decompositions; the first call propagates nothing."""
    held = [row for row in select(rows, COHORTS) if row["field"] is None]
    lines = []
    for task in in_order([*cohorts(), *(row["task"] for row in held)]):
        printed, mine = cohorts().get(task), [row for row in held if row["task"] == task]
        still = [row["lead"] for row in mine if value_of(row) == 0]
        block = next((lead for lead in range(1, len(mine) + 2) if lead not in still), 1) - 1
        counts = (in_order(row.get(name) for row in mine) for name in ("windows", "horizon", "cohort"))
        samples, horizon, cohort = (" or ".join(str(one or "none") for one in held) for held in counts)
        ours = (samples, block, horizon) if mine else ()
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
    """Storage, time and memory of every task and model (its lowest seed); the paper prints only some of them."""
    chosen = named_apart(lowest_seeds(select(rows, EFFICIENCY)))
    runs = {(row["task"], row["model"]): row["run"] for row in chosen}
    measured = [row for row in rows if row.get("diagnostic") == "efficiency" and row["run"] in runs.values()]
    machines = {task: {row["machine"] for row in chosen if row["task"] == task} for task, _ in runs}
    held = {(row["task"], row["model"], row["metric"]): row for row in chosen}
    printed = numbers()
    tasks = in_order(task for task, _, _ in [*printed, *held])
    pairs = in_order((task, model) for task in tasks for one, model, _ in [*printed, *held] if one == task)
    lines, scores = [], []
    for task, model in pairs:
        found = [held.get((task, model, metric)) for metric in COSTS]
        texts = [
            significant(value_of(row)) if row and not row["deviation"]
            else spread(value_of(row), row["deviation"]) if row
            else MISSING
            for row in found
        ]  # fmt: skip
        theirs = [_text(printed.get((task, model, metric))) for metric in COSTS]
        cells = [cell for pair in zip(theirs, texts, strict=True) for cell in pair]
        timed = timed_of(row for row in measured if row["run"] == runs.get((task, model)))
        cells.append(f"{timed[0]:,} of {timed[1]:,}" if timed else MISSING)
        lines.append((TASK_LABELS.get(task, task), model_label(model), *cells))
        scores.append([value_of(row) if row else math.nan for row in found])
    bold = {
        (line, 3 + 2 * index)
        for index, metric in enumerate(COSTS)
        for task in tasks
        if metric not in ON_MACHINE or len(machines.get(task, ())) == 1
        for line in _best(
            {i: (scores[i][index], lines[i][3 + 2 * index]) for i, (one, _) in enumerate(pairs) if one == task}, False
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
        f"machine. Ours: {timing_of(measured)}.{_forms(measured)}",
    )


def _of_methods(make: Callable[[Rows], Table], rows: Rows) -> Table:
    """The table of the rows, each under its method of the paper."""
    return make(by_method(rows))


def _cell(values: Sequence[float]) -> str:
    if len(values) > 1:
        mean = statistics.fmean(values)
        return spread(mean, statistics.stdev(values) if math.isfinite(mean) else mean)
    return significant(values[0]) if values else MISSING


def _mean(held: Mapping[str, Sequence[float]], model: str | None) -> float:
    return statistics.fmean(held[model]) if model is not None and model in held else math.nan


def _text(number: Number | None) -> str:
    return MISSING if number is None else str(number)


def _best_two(scores: Mapping[int, tuple[float, str]], higher: bool) -> tuple[Collection[int], Collection[int]]:
    """The best places and, without them, the second best; of each all that read the same."""
    best = _best(scores, higher)
    return best, _best({index: score for index, score in scores.items() if index not in best}, higher)


def _best(scores: Mapping[int, tuple[float, str]], higher: bool) -> Collection[int]:
    """The places whose number reads like the best one, whatever their deviations."""
    finite = {index: score for index, score in scores.items() if math.isfinite(score[0])}
    if not finite:
        return []
    best = (max if higher else min)(finite.values())[0]
    reads = {_read(text) for value, text in finite.values() if value == best}
    return [index for index, (_, text) in finite.items() if _read(text) in reads]


def _read(text: str) -> str:
    """The mean as it is written."""
    return text.partition(" ± ")[0]


TABLES: Mapping[str, PaperTable] = {
    "comparison": PaperTable(lambda rows: comparison(named_apart(select(rows, ERRORS, yardsticks=True))), (ERRORS,)),
    **{name: PaperTable(partial(_of_methods, partial(model_table, name)), (ERRORS,)) for name in tables()},
    **{name: PaperTable(partial(_of_methods, partial(seed_table, name)), (ERRORS,)) for name in seed_tables()},
    "scaling": PaperTable(scaling_table, (SWEEPS,)),
    "cohorts": PaperTable(cohort_table, (COHORTS,)),
    "efficiency": PaperTable(partial(_of_methods, efficiency_table), (EFFICIENCY,)),
}
