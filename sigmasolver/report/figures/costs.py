"""What training costs: time of an epoch, memory, and the size of the model."""

from __future__ import annotations

import math
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from sigmasolver.report.digits import significant
from sigmasolver.report.figures.style import ONE_COLUMN, TWO_COLUMNS, letter, looks, new_figure, style
from sigmasolver.report.published import TASK_LABELS, model_label
from sigmasolver.report.rows import Rows, diagnosed, in_order, lowest_seeds, select, value_of
from sigmasolver.report.tables import named_apart

__all__ = ["EFFICIENCY", "efficiency"]

TIME, MEMORY, SIZE = "seconds_per_epoch", "peak_megabytes", "parameter_megabytes"
EFFICIENCY = diagnosed("efficiency", TIME, MEMORY, SIZE)
LARGEST = 900.0
"""Area of the largest bubble in square points."""


def efficiency(rows: Rows) -> Figure:
    """Peak memory over the time of an epoch, a panel per task; the area of a bubble is the storage of the parameters,
    bars are one standard deviation over repeated timings; of several seeds of a model the lowest is shown
    (fig:efficiency-representations a, b)."""
    chosen = lowest_seeds(named_apart(select(rows, EFFICIENCY)))
    tasks = in_order(row["task"] for row in chosen)
    styles = looks(in_order(row["model"] for row in chosen))
    largest = max(value_of(row) for row in chosen if row["metric"] == SIZE)
    with style():
        figure = new_figure(ONE_COLUMN if len(tasks) == 1 else TWO_COLUMNS, 3.1)
        for index, task in enumerate(tasks):
            axes = figure.add_subplot(1, len(tasks), index + 1)
            costs = _costs([row for row in chosen if row["task"] == task])
            unit, scale = ("GB", 1e3) if max(cost.memory for cost in costs) >= 1e3 else ("MB", 1.0)
            for cost in costs:
                _draw_bubble(axes, cost, styles[cost.model].colour, cost.memory / scale, LARGEST * cost.size / largest)
            axes.margins(0.3)
            axes.set_xlabel("time of an epoch (s)")
            axes.set_ylabel(f"peak memory ({unit})")
            title = TASK_LABELS.get(task, task)
            letter(axes, index, title) if len(tasks) > 1 else axes.set_title(title, loc="left")
        dots = [
            Line2D([], [], color=look.colour, marker="o", linestyle="", label=model_label(model))
            for model, look in styles.items()
        ]
        figure.legend(handles=dots, loc="outside lower center", ncols=min(len(dots), 3 if len(tasks) == 1 else 6))
    return figure


@dataclass(frozen=True)
class Cost:
    """Of one run: seconds of an epoch and their deviation, peak memory and storage in MB."""

    model: str
    seconds: float
    deviation: float
    memory: float
    size: float


def _costs(rows: Rows) -> list[Cost]:
    found = []
    for run in in_order(row["run"] for row in rows):
        mine = {row["metric"]: row for row in rows if row["run"] == run}
        for metric in (TIME, MEMORY, SIZE):
            if metric not in mine:
                raise ValueError(f"{run} has no {metric}; measure it with: {EFFICIENCY.command.format(run=run)}")
        seconds, memory, size = (value_of(mine[metric]) for metric in (TIME, MEMORY, SIZE))
        found.append(Cost(mine[TIME]["model"], seconds, mine[TIME].get("deviation") or 0.0, memory, size))
    return found


def _draw_bubble(axes: Axes, cost: Cost, colour: str, height: float, area: float) -> None:
    """The bubble with its bar, and its storage below it; the area is in square points."""
    axes.errorbar(cost.seconds, height, xerr=cost.deviation, color=colour, capsize=2, zorder=2)
    axes.scatter(cost.seconds, height, s=area, color=colour, alpha=0.5, linewidth=0, zorder=3)
    axes.annotate(
        f"{significant(cost.size)} MB", (cost.seconds, height), (0, -math.sqrt(area) / 2 - 1),
        textcoords="offset points", ha="center", va="top", fontsize=6, zorder=4,
    )  # fmt: skip
