"""Decomposition of the error of a free forecast over leads: injected or propagated."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from sigmasolver.report.figures.style import BLACK, TWO_COLUMNS, integer_ticks, new_figure, style
from sigmasolver.report.published import TASK_LABELS, model_label
from sigmasolver.report.rows import Rows, diagnosed, mean_and_std, select, unique, with_unique_names

__all__ = ["DECOMPOSITION", "decomposition", "stack"]

PARTS = {"injection": "#0072B2", "propagation": "#E69F00", "cross": "#999999"}
LABELS = {"injection": "injection", "propagation": "propagation", "cross": "cross term (signed)"}
DECOMPOSITION = diagnosed(
    "decomposition",
    *(f"{part}_relative" for part in (*PARTS, "total")),
    *(f"{part}_share" for part in PARTS),
)


def decomposition(rows: Rows, field: str | None = None) -> Figure:
    """Two panels per task (rows) and model (columns): stacked error energies relative to the energy of the truth, with
    their sum as a line, and their shares of the sum. Negative parts extend below zero
    (fig:exact-error-decomposition)."""
    chosen = [row for row in with_unique_names(select(rows, DECOMPOSITION)) if row["field"] == field]
    if not chosen:
        raise ValueError(f'The decompositions have no field "{field}"; omit it for all fields together.')
    tasks, models = unique(row["task"] for row in chosen), unique(row["model"] for row in chosen)
    with style():
        width = TWO_COLUMNS * min(1.0, 0.22 + 0.26 * len(models))
        figure = new_figure(width, 2.9 * len(tasks) + 0.3)
        axes = figure.subplots(2 * len(tasks), len(models), height_ratios=(2, 1) * len(tasks), squeeze=False)
        for i, task in enumerate(tasks):
            for j, model in enumerate(models):
                panel_rows = [row for row in chosen if (row["task"], row["model"]) == (task, model)]
                pair = axes[2 * i, j], axes[2 * i + 1, j]
                if not panel_rows:
                    for panel in pair:
                        panel.set_axis_off()
                    continue
                _draw_energies(pair[0], panel_rows)
                _draw_shares(pair[1], panel_rows)
                title = model_label(model)
                pair[0].set_title(title if len(tasks) == 1 else f"{TASK_LABELS.get(task, task)} · {title}", loc="left")
                pair[1].set_xlabel("lead (frames)" if i == len(tasks) - 1 else "")
            axes[2 * i, 0].set_ylabel("error energy /\ntruth energy (%)")
            axes[2 * i + 1, 0].set_ylabel("share (%)")
        figure.align_ylabels(axes[:, 0])
        handles: list[Patch | Line2D] = [Patch(color=colour, label=LABELS[part]) for part, colour in PARTS.items()]
        handles.append(Line2D([], [], color=BLACK, marker="o", label="total"))
        figure.legend(handles=handles, loc="outside lower center", ncols=4 if len(models) > 1 else 2)
    return figure


def stack(parts: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Bottom of each stacked bar: positive parts stack up from zero, negative parts down from zero."""
    up, down = np.zeros_like(parts[0]), np.zeros_like(parts[0])
    bottoms = []
    for part in parts:
        bottoms.append(np.where(part >= 0, up, down))
        up, down = up + np.maximum(part, 0), down + np.minimum(part, 0)
    return bottoms


def _draw_energies(axes: Axes, rows: Rows) -> None:
    leads = _draw_stack(axes, rows, "relative")
    total = _over_leads(rows, "total_relative", leads)
    axes.plot(leads, total, color=BLACK, marker="o", markersize=2.5, linewidth=1)


def _draw_shares(axes: Axes, rows: Rows) -> None:
    _draw_stack(axes, rows, "share")
    axes.axhline(100, color=BLACK, linewidth=0.6, linestyle=":")


def _draw_stack(axes: Axes, rows: Rows, kind: str) -> list[int]:
    leads = sorted({row["lead"] for row in rows})
    parts = {part: _over_leads(rows, f"{part}_{kind}", leads) for part in PARTS}
    for (part, values), bottom in zip(parts.items(), stack(list(parts.values())), strict=True):
        axes.bar(leads, values, bottom=bottom, width=0.78, color=PARTS[part], label=part)
    axes.axhline(0, color=BLACK, linewidth=0.6)
    axes.grid(False, axis="x")
    axes.set_xlim(leads[0] - 0.6, leads[-1] + 0.6)
    integer_ticks(axes, 4)
    return leads


def _over_leads(rows: Rows, metric: str, leads: Sequence[int]) -> np.ndarray:
    """Mean over seeds per lead, in per cent."""
    means = mean_and_std([row for row in rows if row["metric"] == metric], "lead")
    return np.array([100 * means[lead,][0] for lead in leads])
