"""Energy spectra: at which scales a free forecast loses energy or adds spurious energy.

Below `FLOOR` times the largest energy, the truth is float32 round-off: no axis goes below it, and no ratio is computed
there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator

from sigmasolver.report.figures.maps import shown_field
from sigmasolver.report.figures.style import (
    BLACK,
    TWO_COLUMNS,
    LineStyle,
    add_model_legend,
    line_styles,
    new_figure,
    style,
)
from sigmasolver.report.published import TASK_LABELS, model_label
from sigmasolver.report.rows import Arrays, Row, Rows, diagnosed, select, unique, with_unique_names
from sigmasolver.sampling import evenly_spaced

__all__ = ["SPECTRA", "Spectra", "spectra", "spectra_of"]

SPECTRA = diagnosed("trust", "correlation_lead")
MAX_LEADS = 4
"""Maximum number of panels per row."""
FLOOR = 1e-12
MAX_RATIO = 1e3
"""Axes are clipped at this multiple of the largest energy of the truth, and at this ratio to the truth."""
RATIO_TICKS = {
    16.0: (0.125, 0.25, 0.5, 1, 2, 4, 8),
    300.0: (0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300),
    np.inf: (0.001, 0.01, 0.1, 1, 10, 100, 1000),
}
"""Ticks of the ratio axis by the largest span they are used for."""
_TOLERANCE = 1e-3
"""Relative tolerance between spectra of the same truth on two machines; `FLOOR` is the absolute one."""


@dataclass(frozen=True, eq=False)
class Spectra:
    """One field of one task: `truth` is (leads, bins) over the wavenumbers (bins,) from 1 up; forecasts hold mean and
    deviation over seeds of each model, (2, leads, bins)."""

    task: str
    field: str
    leads: tuple[int, ...]
    waves: np.ndarray
    truth: np.ndarray
    forecasts: Mapping[str, np.ndarray]


def spectra(rows: Rows, arrays: Arrays, field: str | None = None) -> Figure:
    """Two rows per task and one column per lead: the energy in wavenumber shells of the truth and every model, and
    below it the ratio of model to truth. Several seeds are shown as their mean with the deviation shaded."""
    results = spectra_of(rows, arrays, field)
    models = unique(model for result in results for model in result.forecasts)
    styles, columns = line_styles(models), max(len(result.leads) for result in results)
    with style():
        width = TWO_COLUMNS * min(1.0, 0.28 + 0.24 * columns)
        figure = new_figure(width, 3.1 * len(results) + 0.3)
        axes = figure.subplots(
            2 * len(results), columns, height_ratios=(1.7, 1) * len(results), squeeze=False, sharey="row", sharex=False
        )
        for row, result in enumerate(results):
            pairs = list(zip(axes[2 * row], axes[2 * row + 1], strict=True))
            for index, pair in enumerate(pairs):
                if index < len(result.leads):
                    _draw_pair(pair, result, index, styles)
                    title = f"lead {result.leads[index]}"
                    title = title if len(results) == 1 else f"{TASK_LABELS.get(result.task, result.task)} · {title}"
                    pair[0].set_title(title, loc="left")
                else:
                    for panel in pair:
                        panel.set_axis_off()
            _set_limits(pairs[0], result)
            pairs[0][0].set_ylabel(f"energy of {result.field}")
            pairs[0][1].set_ylabel("forecast / truth")
        figure.align_ylabels(axes[:, 0])
        truth = Line2D([], [], color=BLACK, linewidth=2.2, alpha=0.45, label="truth")
        add_model_legend(figure, {model: model_label(model) for model in models}, [truth], 3 if columns < 3 else 6)
    return figure


def spectra_of(rows: Rows, arrays: Arrays, field: str | None = None) -> list[Spectra]:
    """Spectra of each task at a few leads; raise if runs were measured on different windows."""
    chosen = with_unique_names(select(rows, SPECTRA))
    result = []
    for task in unique(row["task"] for row in chosen):
        task_rows = [row for row in chosen if row["task"] == task]
        names = [name for name in unique(row["field"] for row in task_rows) if name is not None]
        name = shown_field(task, names, field)
        result.append(_of_task(task, name, names.index(name), {row["run"]: row for row in task_rows}, arrays))
    return result


def _of_task(task: str, field: str, channel: int, first_rows: Mapping[str, Row], arrays: Arrays) -> Spectra:
    """Spectra of one task; `first_rows` has one row of every run."""
    waves, truth = (_array(next(iter(first_rows)), name, arrays) for name in ("wavenumber", "spectrum_true"))
    truth = truth[..., channel]
    indices = evenly_spaced(len(truth), MAX_LEADS)
    seeds: dict[str, list[np.ndarray]] = {}
    for run, row in first_rows.items():
        other = _array(run, "spectrum_true", arrays)[..., channel]
        near = other.shape == truth.shape and np.allclose(other, truth, rtol=_TOLERANCE, atol=FLOOR * truth.max())
        if not near:
            raise ValueError(
                f"{run} has spectra of different windows than {next(iter(first_rows))}; diagnose both on the same "
                "windows."
            )
        seeds.setdefault(row["model"], []).append(_array(run, "spectrum_forecast", arrays)[indices, 1:, channel])
    with np.errstate(invalid="ignore"):  # infinite energies of a diverged forecast
        forecasts = {
            model: np.stack([np.mean(runs, 0), np.std(runs, 0, ddof=1) if len(runs) > 1 else np.zeros_like(runs[0])])
            for model, runs in seeds.items()
        }
    return Spectra(task, field, tuple(index + 1 for index in indices), waves[1:], truth[indices, 1:], forecasts)


def _array(run: str, name: str, arrays: Arrays) -> np.ndarray:
    measured = arrays.get(run, {})
    if name not in measured:
        raise ValueError(
            f"{run} has no array {name} of trust; if its grid is periodic, create it with: "
            f"{SPECTRA.command.format(run=run)}"
        )
    return np.asarray(measured[name], float)


def _draw_pair(pair: tuple[Axes, Axes], spectra: Spectra, index: int, styles: Mapping[str, LineStyle]) -> None:
    above, below = pair
    truth = spectra.truth[index]
    reference = np.where(truth > FLOOR * spectra.truth.max(), truth, np.nan)
    above.plot(spectra.waves, truth, color=BLACK, linewidth=2.2, alpha=0.45, label="truth")
    below.axhline(1, color=BLACK, linewidth=2.2, alpha=0.45)
    for model, forecast in spectra.forecasts.items():
        mean, deviation = forecast[:, index]
        _draw_line(above, spectra.waves, mean, deviation, styles[model], model)
        _draw_line(below, spectra.waves, mean / reference, deviation / reference, styles[model], model)
    for axes in pair:
        axes.set_xscale("log")
        axes.set_yscale("log")
        powers = 2 ** np.arange(int(np.log2(spectra.waves[-1])) + 1)
        ticks = powers[:: 1 if len(powers) <= 6 else 2]
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_minor_locator(NullLocator())
    above.tick_params(labelbottom=False)
    below.set_xlabel("wavenumber")


def _draw_line(
    axes: Axes, x: np.ndarray, mean: np.ndarray, deviation: np.ndarray, line_style: LineStyle, label: str
) -> None:
    """Draw a line with a marker at every power of two, evenly spaced on the log axis."""
    indices = [int(index) for index in np.flatnonzero(np.log2(x) % 1 == 0)]
    axes.plot(
        x, mean, color=line_style.colour, marker=line_style.marker, linestyle=line_style.dashes, linewidth=1.1,
        markevery=indices, label=label,
    )  # fmt: skip
    if deviation.any():
        axes.fill_between(x, mean - deviation, mean + deviation, color=line_style.colour, alpha=0.2, linewidth=0)


def _set_limits(pair: tuple[Axes, Axes], spectra: Spectra) -> None:
    """Set axis limits to the finite values above round-off; all panels of a row share them."""
    top = spectra.truth.max() or 1.0
    means = np.stack([spectra.truth, *(forecast[0] for forecast in spectra.forecasts.values())])
    reference = np.where(spectra.truth > FLOOR * top, spectra.truth, np.nan)
    for axes, values, low_limit, high_limit in (
        (pair[0], means, FLOOR * top, MAX_RATIO * top),
        (pair[1], means[1:] / reference, 1 / MAX_RATIO, MAX_RATIO),
    ):
        visible = values[np.isfinite(values) & (values >= low_limit)].clip(max=high_limit)
        low, high = (visible.min(), visible.max()) if visible.size else (low_limit, high_limit)
        if axes is pair[1]:
            low, high = min(low, 0.5), max(high, 2.0)
            choices = next(choices for span, choices in RATIO_TICKS.items() if high / low <= span)
            ticks = [tick for tick in choices if low / 1.5 <= tick <= high * 1.5]
            axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.set_ylim(low / 1.5, high * 1.5)
