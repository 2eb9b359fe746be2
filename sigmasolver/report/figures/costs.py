"""What training costs: time of an epoch, memory, and the size of the model."""

from __future__ import annotations

from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from sigmasolver.report.digits import significant
from sigmasolver.report.figures.style import ONE_COLUMN, TWO_COLUMNS, letter, looks, new_figure, style
from sigmasolver.report.published import TASK_LABELS, model_label
from sigmasolver.report.rows import Rows, diagnosed, in_order, lowest_seeds, named_apart, select, value_of

__all__ = ["EFFICIENCY", "efficiency"]

TIME, MEMORY, SIZE = "seconds_per_epoch", "peak_megabytes", "parameter_megabytes"
EFFICIENCY = diagnosed("efficiency", TIME, MEMORY, SIZE)
LARGEST = 900.0
"""Area of the largest bubble in square points."""
ROOM = 1.2
"""How far an axis goes, over its largest value."""
TWO_ABREAST = 28
"""Letters of a name up to which two of them fit below a panel."""


def efficiency(rows: Rows) -> Figure:
    """Peak memory over the time of an epoch, both from zero, a panel per task; the area of a bubble is the storage of
    the parameters, which the legend says, bars are one standard deviation over repeated timings; of several seeds of a
    model the lowest is shown (fig:efficiency-representations a, b)."""
    chosen = lowest_seeds(named_apart(select(rows, EFFICIENCY)))
    tasks = in_order(row["task"] for row in chosen)
    styles = looks(in_order(row["model"] for row in chosen))
    largest = max(value_of(row) for row in chosen if row["metric"] == SIZE)
    with style():
        figure = new_figure(ONE_COLUMN if len(tasks) == 1 else TWO_COLUMNS, 3.3)
        for index, task in enumerate(tasks):
            axes = figure.add_subplot(1, len(tasks), index + 1)
            costs = _costs([row for row in chosen if row["task"] == task])
            unit, scale = ("GB", 1e3) if max(cost.memory for cost in costs) >= 1e3 else ("MB", 1.0)
            for cost in costs:
                _draw_bubble(axes, cost, styles[cost.model].colour, cost.memory / scale, LARGEST * cost.size / largest)
            # Both from zero, so that distances are ratios; room for the bubbles at the far ends.
            axes.set_xlim(0, ROOM * max(cost.seconds + cost.deviation for cost in costs))
            axes.set_ylim(0, ROOM * max(cost.memory for cost in costs) / scale)
            axes.set_xlabel("epoch time (s)")
            axes.set_ylabel(f"peak memory ({unit})")
            title = TASK_LABELS.get(task, task)
            letter(axes, index, title) if len(tasks) > 1 else axes.set_title(title, loc="left")
            _name_below(axes, {cost: styles[cost.model].colour for cost in costs})
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
    """The bubble, whole also where it crosses an axis, with its bar; the area is in square points."""
    axes.errorbar(cost.seconds, height, xerr=cost.deviation, color=colour, capsize=2, zorder=2)
    axes.scatter(cost.seconds, height, s=area, color=colour, alpha=0.5, linewidth=0, zorder=3, clip_on=False)


def _name_below(axes: Axes, colours: dict[Cost, str]) -> None:
    """Models and their storage below a panel: beside bubbles that lie close together labels would overlap."""
    dots = [
        Line2D([], [], color=colour, marker="o", linestyle="", label=_label(cost)) for cost, colour in colours.items()
    ]
    longest = max(len(_label(cost)) for cost in colours)
    columns = 2 if longest <= TWO_ABREAST else 1
    axes.legend(handles=dots, loc="upper center", bbox_to_anchor=(0.5, -0.17), ncols=columns, borderaxespad=0)


def _label(cost: Cost) -> str:
    return f"{model_label(cost.model)}, {significant(cost.size)} MB"
