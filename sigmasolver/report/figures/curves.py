"""Error curves: over leads, by protocol, symmetry and task, and over the size of data, grid or model."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

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
    LineStyle,
    add_model_legend,
    integer_ticks,
    line_styles,
    new_figure,
    set_panel_title,
    style,
)
from sigmasolver.report.published import OURS, TASK_LABELS, model_label, sweeps
from sigmasolver.report.rows import (
    Need,
    Rows,
    diagnosed,
    evaluated,
    mean_and_std,
    select,
    select_field,
    unique,
    value_of,
    with_unique_names,
)
from sigmasolver.report.study import TRIVIAL_BASELINES
from sigmasolver.report.sweeps import Point, points_of
from sigmasolver.report.tables import check_repeated

__all__ = [
    "FORCED",
    "FREE",
    "SYMMETRY",
    "TRAINED",
    "reductions",
    "rollout",
    "scaling",
    "symmetry",
    "teacher_forcing",
    "timed_rows",
    "training_cost",
]

FREE = evaluated("relative_l2_lead")
FORCED = evaluated("relative_l2_lead", protocol="teacher-forced")
TRAINED = evaluated("relative_l2")
SYMMETRY = diagnosed("symmetry", "single_lead", "error_lead", "spread_lead")
SYMMETRY_LINES: dict[str, tuple[Literal["-", "--", ":"], str]] = {
    "single_lead": ("-", "error of one forecast"),
    "error_lead": ("--", "error of the mean over symmetries"),
    "spread_lead": (":", "deviation from that mean, without truth"),
}
ERROR, LEAD = "relative L2 error (%)", "lead (frames)"
_LOG_RATIO = 1000
"""Errors that differ by more than this factor get a log axis."""


@dataclass(frozen=True, eq=False)
class Line:
    """Error in per cent over leads: mean and deviation over seeds (zero for one seed)."""

    leads: np.ndarray
    mean: np.ndarray
    deviation: np.ndarray


def teacher_forcing(rows: Rows, field: str | None = None) -> Figure:
    """Error over leads from true histories (dashed) and from the model's own forecasts (solid), one panel per task
    (fig:accuracy-stability-discrepancy a)."""
    free, forced = (_lines(rows, need, field) for need in (FREE, FORCED))
    tasks, models = list(free), unique(model for lines in free.values() for model in lines)
    styles = line_styles(models)
    with style():
        columns = min(3, len(tasks))
        figure = new_figure(ONE_COLUMN if columns == 1 else TWO_COLUMNS, 2.6 * math.ceil(len(tasks) / columns))
        for index, axes in enumerate(_panels(figure, len(tasks), columns)):
            task = tasks[index]
            for kind, lines in (("free", free[task]), ("forced", forced.get(task, {}))):
                for model, line in lines.items():
                    _draw_line(axes, line, styles[model], "--" if kind == "forced" else None)
            _format_lead_axes(axes, index if len(tasks) > 1 else None, TASK_LABELS.get(task, task))
        kinds = [
            Line2D([], [], color=BLACK, linestyle="-", label="free rollout"),
            Line2D([], [], color=BLACK, linestyle="--", label="teacher-forced"),
        ]
        add_model_legend(figure, {m: model_label(m) for m in models}, kinds, 2 if columns == 1 else 6)
    return figure


def symmetry(rows: Rows, field: str | None = None) -> Figure:
    """Error over leads of one forecast (solid) and of the mean over symmetries (dashed), and how much forecasts differ
    between symmetries (dotted), one panel per task."""
    lines = {metric: _lines(rows, diagnosed("symmetry", metric), field) for metric in SYMMETRY_LINES}
    by_task = lines["single_lead"]
    tasks, models = list(by_task), unique(model for task_lines in by_task.values() for model in task_lines)
    styles = line_styles(models)
    with style():
        columns = min(3, len(tasks))
        figure = new_figure(ONE_COLUMN if columns == 1 else TWO_COLUMNS, 2.9 * math.ceil(len(tasks) / columns))
        for index, axes in enumerate(_panels(figure, len(tasks), columns)):
            task = tasks[index]
            for metric, (dashes, _) in SYMMETRY_LINES.items():
                for model, line in lines[metric][task].items():
                    _draw_line(axes, line, styles[model], dashes)
            _format_lead_axes(axes, index if len(tasks) > 1 else None, TASK_LABELS.get(task, task))
        kinds = [
            Line2D([], [], color=BLACK, linestyle=dashes, label=label) for dashes, label in SYMMETRY_LINES.values()
        ]
        add_model_legend(figure, {m: model_label(m) for m in models}, kinds, 1 if columns == 1 else 4)
    return figure


def rollout(rows: Rows, field: str | None = None) -> Figure:
    """Error over leads, one panel per task, and the reduction of the lead-averaged error by Transolver-σ relative to
    the best other model (fig:rollout-comparison). Axis limits follow the models; trivial baselines (dashed) may exceed
    them."""
    lines, counts = _lines(rows, FREE, field, baselines=True), _window_counts(rows)
    tasks = list(lines)
    models, baselines = (
        unique(model for by_model in lines.values() for model in by_model if (model in TRIVIAL_BASELINES) == trivial)
        for trivial in (False, True)
    )
    styles, gains = line_styles(models), reductions(rows, field)
    with style():
        panel_rows = 1 if len(tasks) <= 2 else 2
        panel_columns = math.ceil(len(tasks) / panel_rows)
        figure = new_figure(TWO_COLUMNS, 2.3 * panel_rows + 0.25)
        ratios = [1.0] * panel_columns + ([0.75] if gains else [])
        grid = figure.add_gridspec(panel_rows, len(ratios), width_ratios=ratios)
        for index, task in enumerate(tasks):
            axes = figure.add_subplot(grid[index // panel_columns, index % panel_columns])
            for model in (model for model in models if model in lines[task]):
                _draw_line(axes, lines[task][model], styles[model])
            _format_lead_axes(axes, index, f"{TASK_LABELS.get(task, task)}  (n = {counts[task]})")
            bounds = axes.get_ylim()
            for line in (lines[task][model] for model in baselines if model in lines[task]):
                axes.plot(line.leads, line.mean, color=GREY, linestyle="--", zorder=1)
            axes.set_ylim(bounds)
        if gains:
            _draw_gains(figure.add_subplot(grid[:, -1]), gains, len(tasks))
        extra = [Line2D([], [], color=GREY, linestyle="--", label=f"{name} (may lie above)") for name in baselines]
        add_model_legend(figure, {m: model_label(m) for m in models}, extra)
    return figure


def reductions(rows: Rows, field: str | None = None) -> dict[str, float]:
    """Reduction in per cent of the lead-averaged error by Transolver-σ relative to the best other model or baseline,
    per task (app:rollout-comparison); tasks without either are omitted."""
    gains = {}
    for task, lines in _lines(rows, FREE, field, baselines=True).items():
        leads = lines[OURS].leads.tolist() if OURS in lines else []
        means = {model: float(line.mean.mean()) for model, line in lines.items() if line.leads.tolist() == leads}
        other_means = [mean for model, mean in means.items() if model != OURS and math.isfinite(mean)]
        if math.isfinite(means.get(OURS, math.nan)) and other_means:
            gains[task] = 100 * (1 - means[OURS] / min(other_means))
    return gains


def training_cost(rows: Rows, field: str | None = None) -> Figure:
    """Error over the full horizon against training time, one panel per task: one point per model and number of
    updates, the mean over seeds; points of a model are connected in order of time."""
    if rows and not timed_rows(rows):
        raise ValueError("These runs have no recorded training time; retrain them with this version.")
    runs = select_field(select(timed_rows(rows), TRAINED), field)
    tasks, models = unique(row["task"] for row in runs), unique(row["model"] for row in runs)
    styles = line_styles(models)
    with style():
        columns = min(3, len(tasks))
        figure = new_figure(ONE_COLUMN if columns == 1 else TWO_COLUMNS, 2.6 * math.ceil(len(tasks) / columns))
        for index, axes in enumerate(_panels(figure, len(tasks), columns)):
            for model in models:
                own = [row for row in runs if (row["task"], row["model"]) == (tasks[index], model)]
                groups = [[row for row in own if row["step"] == step] for step in {row["step"] for row in own}]
                points = sorted(
                    (_mean(row["seconds"] for row in group), 100 * _mean(map(value_of, group))) for group in groups
                )
                line_style = styles[model]
                if points:
                    axes.plot(
                        *zip(*points, strict=True),
                        color=line_style.colour,
                        marker=line_style.marker,
                        linestyle=line_style.dashes,
                    )
            axes.loglog()
            for axis in (axes.xaxis, axes.yaxis):  # with decade ticks alone, an axis may have fewer than two
                axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
                axis.set_major_formatter("{x:g}")
                axis.set_minor_formatter(NullFormatter())
            axes.set_xlabel("training time (s)")
            axes.set_ylabel(ERROR if index == 0 else "")
            title = TASK_LABELS.get(tasks[index], tasks[index])
            set_panel_title(axes, index, title) if len(tasks) > 1 else axes.set_title(title, loc="left")
        add_model_legend(figure, {m: model_label(m) for m in models}, columns=3 if columns == 1 else 6)
    return figure


def _mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))


def timed_rows(rows: Rows) -> Rows:
    """Rows of runs with a recorded training time."""
    return [row for row in rows if row.get("seconds")]


def scaling(rows: Rows) -> Figure:
    """Error over training cases, grid and width on Darcy flow, with bars of 1.96 s/√n over the n test cases
    (fig:darcy-scaling); the paper's points are grey."""
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
            _draw_points(axes, points, LineStyle(0).colour, "o", "measured")
            axes.set_xscale("linear" if name == "data" else "log")
            axes.set_xticks(sweep.values, [f"{value:,}" for value in sweep.values], fontsize=6.5)
            axes.xaxis.set_minor_locator(NullLocator())
            axes.set_xlabel(sweep.setting)
            axes.set_ylim(bottom=0)
            axes.set_ylabel(ERROR if index == 0 else "")
            set_panel_title(axes, index, f"{name} scaling")
        handles, labels = axes.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=2)
    return figure


def _lines(rows: Rows, need: Need, field: str | None, baselines: bool = False) -> dict[str, dict[str, Line]]:
    """Lines by task and model."""
    selected = _deduplicate_baselines(select_field(with_unique_names(select(rows, need, baselines)), field))
    spreads = mean_and_std(selected, "task", "model", "lead")
    lines: dict[str, dict[str, Line]] = {}
    for task, model in unique((row["task"], row["model"]) for row in selected):
        leads = sorted(lead for t, m, lead in spreads if (t, m) == (task, model))
        values = [spreads[task, model, lead] for lead in leads]
        means, deviations = np.array([(mean, deviation or 0.0) for mean, deviation in values]).T
        lines.setdefault(task, {})[model] = Line(np.array(leads), 100 * means, 100 * deviations)
    return lines


def _deduplicate_baselines(rows: Rows) -> Rows:
    """Keep the rows of trivial baselines, which every run contains, once; raise if they disagree."""
    seen: dict[tuple[str, str, int], float] = {}
    result = []
    for row in rows:
        key = row["task"], row["model"], row["lead"]
        if row["model"] in TRIVIAL_BASELINES and key in seen:
            check_repeated(row, seen[key], value_of(row))
            continue
        seen[key] = value_of(row)
        result.append(row)
    return result


def _window_counts(rows: Rows) -> dict[str, str]:
    """Number of windows per task."""
    counts: dict[str, list[int]] = {}
    for row in select(rows, FREE):
        counts.setdefault(row["task"], []).append(row["windows"])
    return {task: " or ".join(map(str, sorted(set(windows)))) for task, windows in counts.items()}


def _draw_line(axes: Axes, line: Line, line_style: LineStyle, dashes: str | None = None) -> None:
    marker = line_style.marker if len(line.leads) <= 20 else None
    axes.plot(line.leads, line.mean, color=line_style.colour, marker=marker, linestyle=dashes or line_style.dashes)
    if line.deviation.any():
        low, high = line.mean - line.deviation, line.mean + line.deviation
        axes.fill_between(line.leads, low, high, color=line_style.colour, alpha=0.2, linewidth=0)


def _format_lead_axes(axes: Axes, index: int | None, title: str) -> None:
    values = np.concatenate([np.asarray(line.get_ydata(), float) for line in axes.get_lines()])
    values = values[np.isfinite(values) & (values > 0)]
    if values.size and values.max() > _LOG_RATIO * values.min():
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.set_xlabel(LEAD)
    axes.set_ylabel(ERROR)
    axes.set_xlim(left=0.5)  # no tick at lead 0
    integer_ticks(axes)
    if index is None:
        axes.set_title(title, loc="left")
    else:
        set_panel_title(axes, index, title)


def _draw_gains(axes: Axes, gains: dict[str, float], index: int) -> None:
    names, values = [TASK_LABELS.get(task, task) for task in gains], list(gains.values())
    axes.barh(range(len(gains)), values, height=0.6, color=LineStyle(0).colour)
    for line, value in enumerate(values):  # label right of zero: a long negative bar leaves no room on its left
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
    set_panel_title(axes, index, "gain")


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
