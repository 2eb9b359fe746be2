"""Errors as curves: over leads, by protocol and by task, and over the size of data, grid or model."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, NullLocator

from sigmasolver.report.digits import significant
from sigmasolver.report.figures.style import (
    BLACK,
    GREY,
    ONE_COLUMN,
    TWO_COLUMNS,
    Look,
    letter,
    looks,
    models_below,
    new_figure,
    style,
    whole_numbers,
)
from sigmasolver.report.published import OURS, TASK_LABELS, model_label, sweeps
from sigmasolver.report.rows import Need, Rows, evaluated, in_order, named_apart, of_field, select, spread_of, value_of
from sigmasolver.report.study import TRIVIAL_BASELINES
from sigmasolver.report.sweeps import Point, points_of
from sigmasolver.report.tables import check_repeated

__all__ = ["FORCED", "FREE", "TRAINED", "reductions", "rollout", "scaling", "teacher_forcing", "timed", "training_cost"]

FREE = evaluated("relative_l2_lead")
FORCED = evaluated("relative_l2_lead", protocol="teacher-forced")
TRAINED = evaluated("relative_l2")
ERROR, LEAD = "relative L2 error (%)", "lead (frames)"
_WIDE = 1000
"""Errors that differ by more than this factor get a logarithmic axis."""


@dataclass(frozen=True, eq=False)
class Line:
    """The error in per cent over leads: mean over seeds, and their deviation (zero with one seed)."""

    leads: np.ndarray
    mean: np.ndarray
    deviation: np.ndarray


def teacher_forcing(rows: Rows, field: str | None = None) -> Figure:
    """Error over leads from true histories (dashed) and from the model's own forecasts (solid), a panel per task
    (fig:accuracy-stability-discrepancy a)."""
    free, forced = (_lines(rows, need, field) for need in (FREE, FORCED))
    tasks, models = list(free), in_order(model for lines in free.values() for model in lines)
    styles = looks(models)
    with style():
        columns = min(3, len(tasks))
        figure = new_figure(ONE_COLUMN if columns == 1 else TWO_COLUMNS, 2.6 * math.ceil(len(tasks) / columns))
        for index, axes in enumerate(_panels(figure, len(tasks), columns)):
            task = tasks[index]
            for kind, lines in (("free", free[task]), ("forced", forced.get(task, {}))):
                for model, line in lines.items():
                    _draw_line(axes, line, styles[model], "--" if kind == "forced" else None)
            _finish_leads(axes, index if len(tasks) > 1 else None, TASK_LABELS.get(task, task))
        kinds = [
            Line2D([], [], color=BLACK, linestyle="-", label="free rollout"),
            Line2D([], [], color=BLACK, linestyle="--", label="teacher-forced"),
        ]
        models_below(figure, {m: model_label(m) for m in models}, kinds, 2 if columns == 1 else 6)
    return figure


def rollout(rows: Rows, field: str | None = None) -> Figure:
    """Error over leads, a panel per task, and how far the mean of the curve of Transolver-σ lies below the lowest of
    the others (fig:rollout-comparison). The axes are those of the models; persistence (dashed) may leave them."""
    lines, counts = _lines(rows, FREE, field, yardsticks=True), _samples(rows)
    tasks = list(lines)
    models, still = (
        in_order(model for by_model in lines.values() for model in by_model if (model in TRIVIAL_BASELINES) == idle)
        for idle in (False, True)
    )
    styles, gains = looks(models), reductions(rows, field)
    with style():
        down = 1 if len(tasks) <= 2 else 2
        across = math.ceil(len(tasks) / down)
        figure = new_figure(TWO_COLUMNS, 2.3 * down + 0.25)
        ratios = [1.0] * across + ([0.75] if gains else [])
        grid = figure.add_gridspec(down, len(ratios), width_ratios=ratios)
        for index, task in enumerate(tasks):
            axes = figure.add_subplot(grid[index // across, index % across])
            for model in (model for model in models if model in lines[task]):
                _draw_line(axes, lines[task][model], styles[model])
            _finish_leads(axes, index, f"{TASK_LABELS.get(task, task)}  (n = {counts[task]})")
            bounds = axes.get_ylim()
            for line in (lines[task][model] for model in still if model in lines[task]):
                axes.plot(line.leads, line.mean, color=GREY, linestyle="--", zorder=1)
            axes.set_ylim(bounds)
        if gains:
            _draw_gains(figure.add_subplot(grid[:, -1]), gains, len(tasks))
        more = [Line2D([], [], color=GREY, linestyle="--", label=f"{name} (may lie above)") for name in still]
        models_below(figure, {m: model_label(m) for m in models}, more)
    return figure


def reductions(rows: Rows, field: str | None = None) -> dict[str, float]:
    """Of each task, by how many per cent the lead-averaged error of Transolver-σ lies below the lowest of the others,
    persistence among them (app:rollout-comparison); tasks without either are left out."""
    found = {}
    for task, lines in _lines(rows, FREE, field, yardsticks=True).items():
        leads = lines[OURS].leads.tolist() if OURS in lines else []
        means = {model: float(line.mean.mean()) for model, line in lines.items() if line.leads.tolist() == leads}
        others = [mean for model, mean in means.items() if model != OURS and math.isfinite(mean)]
        if math.isfinite(means.get(OURS, math.nan)) and others:
            found[task] = 100 * (1 - means[OURS] / min(others))
    return found


def training_cost(rows: Rows, field: str | None = None) -> Figure:
    """Error of the whole horizon over the time of the training, a panel per task: a point per model and number of
    updates, the mean over seeds; those of a model are joined in the order of their times."""
    if rows and not timed(rows):
        raise ValueError("These runs have no recorded training time; retrain them with this version.")
    runs = of_field(select(timed(rows), TRAINED), field)
    tasks, models = in_order(row["task"] for row in runs), in_order(row["model"] for row in runs)
    styles = looks(models)
    with style():
        columns = min(3, len(tasks))
        figure = new_figure(ONE_COLUMN if columns == 1 else TWO_COLUMNS, 2.6 * math.ceil(len(tasks) / columns))
        for index, axes in enumerate(_panels(figure, len(tasks), columns)):
            for model in models:
                own = [row for row in runs if (row["task"], row["model"]) == (tasks[index], model)]
                seeds = [[row for row in own if row["step"] == step] for step in {row["step"] for row in own}]
                points = sorted(
                    (_mean(row["seconds"] for row in one), 100 * _mean(map(value_of, one))) for one in seeds
                )
                look = styles[model]
                if points:
                    axes.plot(*zip(*points, strict=True), color=look.colour, marker=look.marker, linestyle=look.dashes)
            axes.loglog()
            for axis in (axes.xaxis, axes.yaxis):  # a decade alone may not have two marks
                axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
                axis.set_major_formatter("{x:g}")
                axis.set_minor_formatter(NullFormatter())
            axes.set_xlabel("training time (s)")
            axes.set_ylabel(ERROR if index == 0 else "")
            title = TASK_LABELS.get(tasks[index], tasks[index])
            letter(axes, index, title) if len(tasks) > 1 else axes.set_title(title, loc="left")
        models_below(figure, {m: model_label(m) for m in models}, columns=3 if columns == 1 else 6)
    return figure


def _mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))


def timed(rows: Rows) -> Rows:
    """The rows of runs that tell how long their training took."""
    return [row for row in rows if row.get("seconds")]


def scaling(rows: Rows) -> Figure:
    """Error over training cases, grid and width on Darcy flow, with bars of 1.96 s/√n over the n test cases
    (fig:darcy-scaling); the paper's points stand beside them in grey."""
    measured = points_of(rows)
    with style():
        figure = new_figure(TWO_COLUMNS if len(measured) > 1 else ONE_COLUMN, 2.6)
        for index, (name, points) in enumerate(measured.items()):
            axes = figure.add_subplot(1, len(measured), index + 1)
            sweep = sweeps()[name]
            paper = [
                Point(value, number.value / 1e3, (number.deviation or 0) / 1e3, 200)
                for value, number in zip(sweep.values, sweep.errors, strict=True)
            ]
            _draw_points(axes, paper, GREY, "D", "paper")
            _draw_points(axes, points, Look(0).colour, "o", "measured")
            axes.set_xscale("linear" if name == "data" else "log")
            axes.set_xticks(sweep.values, [f"{value:,}" for value in sweep.values], fontsize=6.5)
            axes.xaxis.set_minor_locator(NullLocator())
            axes.set_xlabel(sweep.setting)
            axes.set_ylim(bottom=0)
            axes.set_ylabel(ERROR if index == 0 else "")
            letter(axes, index, f"{name} scaling")
        handles, labels = axes.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=2)
    return figure


def _lines(rows: Rows, need: Need, field: str | None, yardsticks: bool = False) -> dict[str, dict[str, Line]]:
    """By task and model."""
    kept = _yardsticks_once(of_field(named_apart(select(rows, need, yardsticks)), field))
    spreads = spread_of(kept, "task", "model", "lead")
    found: dict[str, dict[str, Line]] = {}
    for task, model in in_order((row["task"], row["model"]) for row in kept):
        leads = sorted(lead for one, other, lead in spreads if (one, other) == (task, model))
        values = [spreads[task, model, lead] for lead in leads]
        means, deviations = np.array([(mean, deviation or 0.0) for mean, deviation in values]).T
        found.setdefault(task, {})[model] = Line(np.array(leads), 100 * means, 100 * deviations)
    return found


def _yardsticks_once(rows: Rows) -> Rows:
    """Every run brings the rows of its yardstick, which must agree."""
    seen: dict[tuple[str, str, int], float] = {}
    kept = []
    for row in rows:
        key = row["task"], row["model"], row["lead"]
        if row["model"] in TRIVIAL_BASELINES and key in seen:
            check_repeated(row, seen[key], value_of(row))
            continue
        seen[key] = value_of(row)
        kept.append(row)
    return kept


def _samples(rows: Rows) -> dict[str, str]:
    """How many windows each task was measured on."""
    counts: dict[str, list[int]] = {}
    for row in select(rows, FREE):
        counts.setdefault(row["task"], []).append(row["windows"])
    return {task: " or ".join(map(str, sorted(set(windows)))) for task, windows in counts.items()}


def _draw_line(axes: Axes, line: Line, look: Look, dashes: str | None = None) -> None:
    marker = look.marker if len(line.leads) <= 20 else None
    axes.plot(line.leads, line.mean, color=look.colour, marker=marker, linestyle=dashes or look.dashes)
    if line.deviation.any():
        low, high = line.mean - line.deviation, line.mean + line.deviation
        axes.fill_between(line.leads, low, high, color=look.colour, alpha=0.2, linewidth=0)


def _finish_leads(axes: Axes, index: int | None, title: str) -> None:
    values = np.concatenate([np.asarray(line.get_ydata(), float) for line in axes.get_lines()])
    values = values[np.isfinite(values) & (values > 0)]
    if values.size and values.max() > _WIDE * values.min():
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.set_xlabel(LEAD)
    axes.set_ylabel(ERROR)
    axes.set_xlim(left=0.5)  # there is no lead 0 to mark
    whole_numbers(axes)
    if index is None:
        axes.set_title(title, loc="left")
    else:
        letter(axes, index, title)


def _draw_gains(axes: Axes, gains: dict[str, float], index: int) -> None:
    names, values = [TASK_LABELS.get(task, task) for task in gains], list(gains.values())
    axes.barh(range(len(gains)), values, height=0.6, color=Look(0).colour)
    for line, value in enumerate(values):  # right of zero always: a long negative bar leaves no room before it
        text = f"{significant(value)} %".replace("-", "−")
        axes.annotate(text, (max(value, 0.0), line), (2, 0), textcoords="offset points", va="center", fontsize=7)
    axes.set_yticks(range(len(gains)), names)
    axes.set_ylim(max(len(gains), 4) - 0.5, -0.5)
    low, high = min(0.0, *values), max(0.0, *values)
    axes.set_xlim(1.08 * low, high + 0.7 * (high - low or 1.0))
    axes.grid(False, axis="y")
    axes.axvline(0, color=BLACK, linewidth=0.6)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=3))
    axes.set_xlabel(f"mean error of {model_label(OURS)}\nbelow the best other (%)")
    letter(axes, index, "gain")


def _draw_points(axes: Axes, points: list[Point], colour: str, marker: str, label: str) -> None:
    axes.errorbar(
        [point.setting for point in points],
        [100 * point.error for point in points],
        yerr=[100 * point.bar for point in points],
        color=colour,
        marker=marker,
        label=label,
        capsize=2,
        elinewidth=0.8,
    )


def _panels(figure: Figure, count: int, columns: int) -> list[Axes]:
    rows = math.ceil(count / columns)
    return [figure.add_subplot(rows, columns, index + 1) for index in range(count)]
