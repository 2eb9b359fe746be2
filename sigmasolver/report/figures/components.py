"""Growth of errors at large and small scales over calls, with their bounds and the gains behind the bounds."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from sigmasolver.report.digits import significant
from sigmasolver.report.figures.style import BLACK, GREY, TWO_COLUMNS, LineStyle, integer_ticks, new_figure, style
from sigmasolver.report.published import TASK_LABELS, model_label
from sigmasolver.report.rows import Rows, diagnosed, mean_and_std, select, unique, with_unique_names

__all__ = ["COMPONENTS", "components"]

SCALES = {"low": "large scales", "high": "small scales"}
CROSSINGS = [(source, target) for source in SCALES for target in SCALES]
LINES: dict[str, tuple[str, str, Literal["-", "--", ":"]]] = {
    "error": ("true error", BLACK, "-"),
    "bound_measured": ("bound, measured amplification", LineStyle(1).colour, "-"),
    "bound_lower_estimate": ("bound, lower estimates (no guarantee)", LineStyle(0).colour, "--"),
    "defect": ("defect of one call", GREY, ":"),
}
BARS = {
    "uniform_amplification_{}_{}": ("measured amplification", LineStyle(1).colour),
    "uniform_gain_{}_{}_lower_estimate": ("gain, lower estimate", LineStyle(0).colour),
}
RADII = ("spectral_radius_measured", "spectral_radius_lower_estimate")
COMPONENTS = diagnosed(
    "components",
    *(f"{metric}_{scale}" for metric in LINES for scale in SCALES),
    *(metric.format(*crossing) for metric in BARS for crossing in CROSSINGS),
    *RADII,
    hint="; steady tasks and data with a solid have none: omit the run",
)


def components(rows: Rows) -> Figure:
    """One column per task and model. Top, for each component: the norm of the history error after every call, its
    bounds from measured amplifications and from lower estimates, and the defect of the call. Bottom: the largest
    amplifications and lower estimates of the gains between components (eq:complement-component-bound). Means over
    windows and seeds."""
    chosen = with_unique_names(select(rows, COMPONENTS))
    columns = unique((row["task"], row["model"]) for row in chosen)
    tasks = {task for task, _ in columns}
    with style():
        figure = new_figure(TWO_COLUMNS * min(1.0, 0.25 + 0.25 * len(columns)), 5.6)
        axes = figure.subplots(3, len(columns), squeeze=False, sharey="row")
        for index, (task, model) in enumerate(columns):
            panel_rows = [row for row in chosen if (row["task"], row["model"]) == (task, model)]
            for row_index, scale in enumerate(SCALES):
                _draw_errors(axes[row_index, index], panel_rows, scale)
            _draw_gains(axes[2, index], panel_rows)
            title = model_label(model)
            title = title if len(tasks) == 1 else f"{TASK_LABELS.get(task, task)} · {title}"
            axes[0, index].set_title(title, loc="left")
        for row_index, label in enumerate(SCALES.values()):
            axes[row_index, 0].set_ylabel(f"error norm,\n{label}")
        axes[2, 0].set_ylabel("largest over calls")
        figure.align_ylabels(axes[:, 0])
        handles: list[Line2D | Patch] = [
            Line2D([], [], color=colour, linestyle=dashes, label=name) for name, colour, dashes in LINES.values()
        ]
        handles += [Patch(color=colour, label=name) for name, colour in BARS.values()]
        figure.legend(handles=handles, loc="outside lower center", ncols=min(len(columns), 3))
    return figure


def _draw_errors(axes: Axes, rows: Rows, scale: str) -> None:
    for metric, (_, colour, dashes) in LINES.items():
        means = mean_and_std([row for row in rows if row["metric"] == f"{metric}_{scale}"], "lead")
        leads = sorted(lead for (lead,) in means)
        marker = "o" if metric == "error" and len(leads) <= 20 else None
        values = [means[lead,][0] for lead in leads]
        axes.plot(leads, values, color=colour, linestyle=dashes, marker=marker, markersize=2.5)
    axes.set_yscale("log")
    axes.set_xlabel("lead (frames)")
    integer_ticks(axes)


def _draw_gains(axes: Axes, rows: Rows) -> None:
    """Draw paired bars: measured and lower estimate."""
    means = mean_and_std(rows, "metric")
    for offset, (metric, (_, colour)) in zip((-0.2, 0.2), BARS.items(), strict=True):
        values = [means.get((metric.format(*crossing),), (math.nan, None))[0] for crossing in CROSSINGS]
        bars = axes.bar(np.arange(4) + offset, values, width=0.38, color=colour)
        axes.bar_label(bars, [significant(value) for value in values], padding=2, fontsize=5.5, rotation=90)
    axes.axhline(1, color=BLACK, linewidth=0.6, linestyle=":")
    axes.set_xticks(range(4), [f"{source} →\n{target}" for source, target in CROSSINGS])
    axes.set_xlabel("from → to")
    axes.grid(False, axis="x")
    axes.margins(y=0.25)
    measured, estimated = (significant(means.get((name,), (math.nan, None))[0]) for name in RADII)
    axes.set_title(f"radius {measured} measured, {estimated} lower estimate", loc="left", fontsize=6.5)
