"""Inside the trained blocks: slice corrections, routing of points to slices, and slice attention."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import ScalarFormatter

from sigmasolver.report.digits import significant
from sigmasolver.report.figures.style import BLACK, TWO_COLUMNS, LineStyle, integer_ticks, new_figure, style
from sigmasolver.report.published import TASK_LABELS, model_label
from sigmasolver.report.rows import (
    Arrays,
    Rows,
    diagnosed,
    lowest_seeds,
    runs_in,
    select,
    unique,
    value_of,
    with_unique_names,
)

__all__ = ["CORRECTIONS", "ROUTING", "attention_scale", "corrections", "montage", "routing", "run_titles"]

SLICES_HINT = "; models without slices have none: omit the run"
CORRECTIONS = diagnosed("corrections", "gamma", "correction_ratio", hint=SLICES_HINT)
ROUTING = diagnosed("routing", "effective_slices", "key_concentration", hint=SLICES_HINT)


def run_titles(rows: Rows) -> dict[str, str]:
    """Title of each run: task and model as far as they differ, else the seed or the folder."""
    first_rows = {row["run"]: row for row in reversed(with_unique_names(rows))}
    first_rows = {run: first_rows[run] for run in runs_in(rows)}
    parts = {
        run: [TASK_LABELS.get(row["task"], row["task"]), model_label(row["model"])] for run, row in first_rows.items()
    }
    if len({task for task, _ in parts.values()}) == 1:
        parts = {run: [model] for run, (_, model) in parts.items()}
    elif len({model for _, model in parts.values()}) == 1:
        parts = {run: [task] for run, (task, _) in parts.items()}
    names = [" · ".join(part) for part in parts.values()]
    return {
        run: name if names.count(name) == 1 else f"{name}, seed {first_rows[run]['seed']}"
        for run, name in zip(parts, names, strict=True)
    }


def corrections(rows: Rows) -> Figure:
    """One column per run. Top: the learned scale γ of each layer (solid) and |γ| (dashed). Bottom: the norm of the
    correction relative to the slice states, with cases as thin lines, their mean thick, their range shaded, and the
    mean over cases and layers dashed (fig:srpa-layerwise-corrections)."""
    chosen = select(rows, CORRECTIONS)
    titles = run_titles(chosen)
    with style():
        width = TWO_COLUMNS * min(1.0, 0.25 + 0.25 * len(titles))
        figure = new_figure(width, 3.2)
        axes = figure.subplots(2, len(titles), sharex="col", squeeze=False)
        for index, (run, title) in enumerate(titles.items()):
            run_rows = [row for row in chosen if row["run"] == run]
            _draw_gamma(axes[0, index], run_rows)
            _draw_ratios(axes[1, index], run_rows)
            axes[0, index].set_title(title, loc="left")
            axes[1, index].set_xlabel("layer")
            integer_ticks(axes[1, index], 9)
        axes[0, 0].set_ylabel("scale γ")
        axes[1, 0].set_ylabel("correction / state (%)")
        figure.align_ylabels(axes[:, 0])
        lines = [*axes[0, 0].get_lines(), *axes[1, 0].get_lines()]
        named = {str(line.get_label()): line for line in lines if not str(line.get_label()).startswith("_")}
        figure.legend(list(named.values()), list(named), loc="outside lower center", ncols=2 * len(titles))
    return figure


def _draw_gamma(axes: Axes, rows: Rows) -> None:
    gamma = {row["layer"]: value_of(row) for row in rows if row["metric"] == "gamma"}
    layers = sorted(gamma)
    values = np.array([gamma[layer] for layer in layers])
    colour = LineStyle(1).colour
    axes.axhline(0, color=BLACK, linewidth=0.6)
    axes.fill_between(layers, 0, values, color=colour, alpha=0.15, linewidth=0)
    axes.plot(layers, np.abs(values), color=colour, alpha=0.45, linestyle="--", linewidth=1, label="|γ|")
    axes.plot(layers, values, color=colour, marker="o", label="γ")


def _draw_ratios(axes: Axes, rows: Rows) -> None:
    ratios = [row for row in rows if row["metric"] == "correction_ratio" and row["layer"] is not None]
    layers = sorted({row["layer"] for row in ratios})
    colour = LineStyle(0).colour
    by_case = {}
    for case in unique(row["case"] for row in ratios if row["case"] is not None):
        by_layer = {row["layer"]: 100 * value_of(row) for row in ratios if row["case"] == case}
        by_case[case] = np.array([by_layer.get(layer, math.nan) for layer in layers])
    mean = {row["layer"]: 100 * value_of(row) for row in ratios if row["case"] is None}
    if by_case:
        stacked = np.stack(list(by_case.values()))
        axes.fill_between(layers, stacked.min(0), stacked.max(0), color=colour, alpha=0.18, linewidth=0)
    for index, values in enumerate(by_case.values()):
        label = "one case" if index == 0 else "_another"
        axes.plot(layers, values, color=colour, alpha=0.55, linewidth=0.6, label=label)
    means = np.array([mean[layer] for layer in layers])
    axes.plot(layers, means, color=colour, marker="o", linewidth=1.6, label="mean over cases")
    axes.axhline(float(means.mean()), color=BLACK, linestyle="--", linewidth=0.8, label="mean over layers")
    axes.set_ylim(bottom=0)


def routing(rows: Rows, arrays: Arrays) -> Figure:
    """The last layer of each model (lowest seed) for the first case: the routing weights of points to slices, and the
    attention of slices (rows) to slices (columns), averaged over heads, each with its own scale
    (fig:efficiency-representations c, d)."""
    chosen = lowest_seeds(select(rows, ROUTING))
    titles = run_titles(chosen)
    with style():
        figure = new_figure(TWO_COLUMNS, 2.45 * len(titles))
        parts = figure.subfigures(len(titles), 1, squeeze=False)
        for part, (run, title) in zip(parts[:, 0], titles.items(), strict=True):
            layer, shares, attention = _last_layer(run, arrays.get(run, {}))
            note = _effective_slices([row for row in chosen if row["run"] == run], layer)
            part.suptitle(f"{title}, layer {layer}{note}", fontsize=8, x=0.01, ha="left")
            left, right = part.subplots(1, 2, width_ratios=(1.75, 1))
            _draw_routing(part, left, shares)
            if attention is None:
                right.set_axis_off()
                right.text(0.5, 0.5, "no slice attention", transform=right.transAxes, ha="center")
            else:
                _draw_attention(part, right, attention)
    return figure


def _last_layer(run: str, arrays: Mapping[str, np.ndarray]) -> tuple[int, np.ndarray, np.ndarray | None]:
    """The last recorded layer, its routing (slices, *grid) and its attention (slices, slices), if any."""
    layers = [int(match[1]) for name in arrays if (match := re.fullmatch(r"routing_L(\d+)", name))]
    if not layers:
        raise ValueError(f"{run} has no routing maps; create them with: {ROUTING.command.format(run=run)}")
    last = max(layers)
    attention = arrays.get(f"attention_L{last}")
    shares = np.asarray(arrays[f"routing_L{last}"][0], float)
    return last, shares, None if attention is None else np.asarray(attention[0], float)


def _effective_slices(rows: Rows, layer: int) -> str:
    values = [
        value_of(row)
        for row in rows
        if row["metric"] == "effective_slices" and row.get("layer") == layer and row.get("case") is None
    ]
    return f": {significant(values[0])} effective slices" if values else ""


def montage(shares: np.ndarray) -> tuple[np.ndarray, int]:
    """Tile maps (slices, X, Y) into one image (y up), separated by NaN; also return the number of maps per row.

    A volume shows the middle plane of its last axis; a 1-D grid is widened to a band.
    """
    if shares.ndim == 4:
        shares = shares[..., shares.shape[-1] // 2]
    if shares.ndim == 2:
        shares = np.repeat(shares[:, :, None], max(2, shares.shape[1] // 8), axis=2)
    slices, nx, ny = shares.shape
    rows = math.ceil(slices / math.ceil(math.sqrt(2 * slices * ny / nx)))
    columns = math.ceil(slices / rows)  # keeps the last row nearly full
    gap = max(1, round(0.04 * max(nx, ny)))
    picture = np.full((rows * (ny + gap) - gap, columns * (nx + gap) - gap), math.nan)
    for index, tile in enumerate(shares):
        row, column = divmod(index, columns)
        top, left = row * (ny + gap), column * (nx + gap)
        picture[top : top + ny, left : left + nx] = tile.T[::-1]
    return picture, columns


def _draw_routing(part: SubFigure, axes: Axes, shares: np.ndarray) -> None:
    picture, columns = montage(shares)
    image = axes.imshow(picture, cmap="magma", vmin=0)
    rows = math.ceil(len(shares) / columns)
    height, width = (picture.shape[0] + 1) / rows, (picture.shape[1] + 1) / columns
    for index in range(len(shares)):
        row, column = divmod(index, columns)
        axes.text(
            (column + 0.05) * width, (row + 0.05) * height, f"S{index}", color="white", fontsize=4.5, va="top",
            path_effects=[withStroke(linewidth=1, foreground="black")],
        )  # fmt: skip
    axes.set_axis_off()
    axes.set_title("routing of points to slices", loc="left", fontsize=7.5)
    part.colorbar(image, ax=axes, label="share of a point", shrink=0.75, pad=0.015)


def _draw_attention(part: SubFigure, axes: Axes, attention: np.ndarray) -> None:
    low, high = attention_scale(attention)
    image = axes.imshow(attention, cmap="viridis", vmin=low, vmax=high)
    axes.set_title("slice attention", loc="left", fontsize=7.5)
    axes.set_xlabel("key slice")
    axes.set_ylabel("query slice")
    integer_ticks(axes)
    integer_ticks(axes, axis="y")
    axes.grid(False)
    bar = part.colorbar(image, ax=axes, label="weight", shrink=0.75, pad=0.03)
    assert isinstance(bar.formatter, ScalarFormatter)
    bar.formatter.set_useOffset(False)


def attention_scale(attention: np.ndarray) -> tuple[float, float]:
    """Range of the weights, but no narrower than 2 % of a uniform weight, so that round-off does not look like
    structure."""
    low, high = float(attention.min()), float(attention.max())
    margin = max(0.0, 0.02 / len(attention) - (high - low)) / 2
    return low - margin, high + margin
