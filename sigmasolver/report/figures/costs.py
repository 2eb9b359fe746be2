"""Training cost: epoch time, peak memory and model size."""

from __future__ import annotations

from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from sigmasolver.report.digits import significant
from sigmasolver.report.figures.style import ONE_COLUMN, TWO_COLUMNS, line_styles, new_figure, set_panel_title, style
from sigmasolver.report.published import TASK_LABELS, model_label
from sigmasolver.report.rows import Rows, diagnosed, lowest_seeds, select, unique, value_of, with_unique_names

__all__ = ["EFFICIENCY", "efficiency"]

TIME, MEMORY, SIZE = "seconds_per_epoch", "peak_megabytes", "parameter_megabytes"
EFFICIENCY = diagnosed("efficiency", TIME, MEMORY, SIZE)
MAX_AREA = 900.0
"""Area of the largest bubble in square points."""
AXIS_MARGIN = 1.2
"""Upper axis limit relative to the largest value."""
MAX_TWO_COLUMN_LABEL = 28
"""Maximum label length for a two-column legend below a panel."""


def efficiency(rows: Rows) -> Figure:
    """Peak memory over epoch time, both axes from zero, one panel per task. The bubble area is proportional to the
    parameter storage given in the legend; bars are one standard deviation over repeated timings; only the lowest seed
    of a model is shown (fig:efficiency-representations a, b)."""
    chosen = lowest_seeds(with_unique_names(select(rows, EFFICIENCY)))
    tasks = unique(row["task"] for row in chosen)
    styles = line_styles(unique(row["model"] for row in chosen))
    largest = max(value_of(row) for row in chosen if row["metric"] == SIZE)
    with style():
        figure = new_figure(ONE_COLUMN if len(tasks) == 1 else TWO_COLUMNS, 3.3)
        for index, task in enumerate(tasks):
            axes = figure.add_subplot(1, len(tasks), index + 1)
            costs = _costs([row for row in chosen if row["task"] == task])
            unit, scale = ("GB", 1e3) if max(cost.memory for cost in costs) >= 1e3 else ("MB", 1.0)
            for cost in costs:
                _draw_bubble(axes, cost, styles[cost.model].colour, cost.memory / scale, MAX_AREA * cost.size / largest)
            # Both axes start at zero, so that distances show ratios; the margin leaves room for the outermost bubbles.
            axes.set_xlim(0, AXIS_MARGIN * max(cost.seconds + cost.deviation for cost in costs))
            axes.set_ylim(0, AXIS_MARGIN * max(cost.memory for cost in costs) / scale)
            axes.set_xlabel("epoch time (s)")
            axes.set_ylabel(f"peak memory ({unit})")
            title = TASK_LABELS.get(task, task)
            set_panel_title(axes, index, title) if len(tasks) > 1 else axes.set_title(title, loc="left")
            _add_legend(axes, {cost: styles[cost.model].colour for cost in costs})
    return figure


@dataclass(frozen=True)
class Cost:
    """Cost of one run: seconds per epoch and their deviation, peak memory and parameter storage in MB."""

    model: str
    seconds: float
    deviation: float
    memory: float
    size: float


def _costs(rows: Rows) -> list[Cost]:
    costs = []
    for run in unique(row["run"] for row in rows):
        by_metric = {row["metric"]: row for row in rows if row["run"] == run}
        for metric in (TIME, MEMORY, SIZE):
            if metric not in by_metric:
                raise ValueError(f"{run} has no {metric}; measure it with: {EFFICIENCY.command.format(run=run)}")
        seconds, memory, size = (value_of(by_metric[metric]) for metric in (TIME, MEMORY, SIZE))
        costs.append(Cost(by_metric[TIME]["model"], seconds, by_metric[TIME].get("deviation") or 0.0, memory, size))
    return costs


def _draw_bubble(axes: Axes, cost: Cost, colour: str, height: float, area: float) -> None:
    """Draw the bubble, not clipped at the axes, with its error bar; the area is in square points."""
    axes.errorbar(cost.seconds, height, xerr=cost.deviation, color=colour, capsize=2, zorder=2)
    axes.scatter(cost.seconds, height, s=area, color=colour, alpha=0.5, linewidth=0, zorder=3, clip_on=False)


def _add_legend(axes: Axes, colours: dict[Cost, str]) -> None:
    """Add a legend of models and their storage below a panel; labels next to close bubbles would overlap."""
    handles = [
        Line2D([], [], color=colour, marker="o", linestyle="", label=_label(cost)) for cost, colour in colours.items()
    ]
    longest = max(len(_label(cost)) for cost in colours)
    columns = 2 if longest <= MAX_TWO_COLUMN_LABEL else 1
    axes.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.17), ncols=columns, borderaxespad=0)


def _label(cost: Cost) -> str:
    return f"{model_label(cost.model)}, {significant(cost.size)} MB"
