"""Energy over the wavenumber: at which scales a free forecast has lost energy, and at which it has made some up.

Where the truth has less than `FLOOR` of its largest energy there is nothing but the round-off of float32: no axis goes
below it, and no ratio is made there.
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
from sigmasolver.report.figures.style import BLACK, TWO_COLUMNS, Look, looks, models_below, new_figure, style
from sigmasolver.report.published import TASK_LABELS, model_label
from sigmasolver.report.rows import Arrays, Row, Rows, diagnosed, evenly, in_order, named_apart, select

__all__ = ["SPECTRA", "Spectra", "spectra", "spectra_of"]

SPECTRA = diagnosed("trust", "correlation_lead")
LEADS = 4
"""Panels across, at most."""
FLOOR = 1e-12
WIDEST = 1e3
"""A forecast may leave the axes where it has this many times the largest energy of the truth, or this ratio to it."""
MARKS = {
    16.0: (0.125, 0.25, 0.5, 1, 2, 4, 8),
    300.0: (0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300),
    np.inf: (0.001, 0.01, 0.1, 1, 10, 100, 1000),
}
"""Ticks of ratios, by the largest span that they are for."""
_AGREE = 1e-3
"""Spectra of the same truth on two machines differ by less than this, or than `FLOOR`."""


@dataclass(frozen=True, eq=False)
class Spectra:
    """One field of one task: `truth` is (leads, bins) over the wavenumbers (bins,) from 1 up; of each model the mean
    over seeds and their deviation, (2, leads, bins)."""

    task: str
    field: str
    leads: tuple[int, ...]
    waves: np.ndarray
    truth: np.ndarray
    forecasts: Mapping[str, np.ndarray]


def spectra(rows: Rows, arrays: Arrays, field: str | None = None) -> Figure:
    """A pair of rows per task and a column per lead: the energy in shells of the wavenumber of the truth and of every
    model, and below it that of the model over that of the truth. Several seeds are a mean with its deviation shaded."""
    found = spectra_of(rows, arrays, field)
    models = in_order(model for one in found for model in one.forecasts)
    styles, across = looks(models), max(len(one.leads) for one in found)
    with style():
        width = TWO_COLUMNS * min(1.0, 0.28 + 0.24 * across)
        figure = new_figure(width, 3.1 * len(found) + 0.3)
        axes = figure.subplots(
            2 * len(found), across, height_ratios=(1.7, 1) * len(found), squeeze=False, sharey="row", sharex=False
        )
        for down, one in enumerate(found):
            pairs = list(zip(axes[2 * down], axes[2 * down + 1], strict=True))
            for index, pair in enumerate(pairs):
                if index < len(one.leads):
                    _draw_pair(pair, one, index, styles)
                    title = f"lead {one.leads[index]}"
                    title = title if len(found) == 1 else f"{TASK_LABELS.get(one.task, one.task)} · {title}"
                    pair[0].set_title(title, loc="left")
                else:
                    for panel in pair:
                        panel.set_axis_off()
            _limit(pairs[0], one)
            pairs[0][0].set_ylabel(f"energy of {one.field}")
            pairs[0][1].set_ylabel("forecast / truth")
        figure.align_ylabels(axes[:, 0])
        truth = Line2D([], [], color=BLACK, linewidth=2.2, alpha=0.45, label="truth")
        models_below(figure, {model: model_label(model) for model in models}, [truth], 3 if across < 3 else 6)
    return figure


def spectra_of(rows: Rows, arrays: Arrays, field: str | None = None) -> list[Spectra]:
    """The spectra of each task at a few leads; runs that do not share their windows are refused."""
    chosen = named_apart(select(rows, SPECTRA))
    found = []
    for task in in_order(row["task"] for row in chosen):
        mine = [row for row in chosen if row["task"] == task]
        names = [name for name in in_order(row["field"] for row in mine) if name is not None]
        shown = shown_field(task, names, field)
        found.append(_of_task(task, shown, names.index(shown), {row["run"]: row for row in mine}, arrays))
    return found


def _of_task(task: str, field: str, channel: int, firsts: Mapping[str, Row], arrays: Arrays) -> Spectra:
    """`firsts` has a row of every run."""
    waves, truth = (_array(next(iter(firsts)), name, arrays) for name in ("wavenumber", "spectrum_true"))
    truth = truth[..., channel]
    kept = evenly(len(truth), LEADS)
    seeds: dict[str, list[np.ndarray]] = {}
    for run, row in firsts.items():
        own = _array(run, "spectrum_true", arrays)[..., channel]
        near = own.shape == truth.shape and np.allclose(own, truth, rtol=_AGREE, atol=FLOOR * truth.max())
        if not near:
            raise ValueError(
                f"{run} has spectra of different windows than {next(iter(firsts))}; diagnose both on the same windows."
            )
        seeds.setdefault(row["model"], []).append(_array(run, "spectrum_forecast", arrays)[kept, 1:, channel])
    with np.errstate(invalid="ignore"):  # of a forecast that ran away
        forecasts = {
            model: np.stack([np.mean(each, 0), np.std(each, 0, ddof=1) if len(each) > 1 else np.zeros_like(each[0])])
            for model, each in seeds.items()
        }
    return Spectra(task, field, tuple(index + 1 for index in kept), waves[1:], truth[kept, 1:], forecasts)


def _array(run: str, name: str, arrays: Arrays) -> np.ndarray:
    measured = arrays.get(run, {})
    if name not in measured:
        raise ValueError(
            f"{run} has no array {name} of trust; if its grid is periodic, create it with: "
            f"{SPECTRA.command.format(run=run)}"
        )
    return np.asarray(measured[name], float)


def _draw_pair(pair: tuple[Axes, Axes], spectra: Spectra, index: int, styles: Mapping[str, Look]) -> None:
    above, below = pair
    truth = spectra.truth[index]
    told = np.where(truth > FLOOR * spectra.truth.max(), truth, np.nan)
    above.plot(spectra.waves, truth, color=BLACK, linewidth=2.2, alpha=0.45, label="truth")
    below.axhline(1, color=BLACK, linewidth=2.2, alpha=0.45)
    for model, forecast in spectra.forecasts.items():
        mean, deviation = forecast[:, index]
        _draw_line(above, spectra.waves, mean, deviation, styles[model], model)
        _draw_line(below, spectra.waves, mean / told, deviation / told, styles[model], model)
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


def _draw_line(axes: Axes, x: np.ndarray, mean: np.ndarray, deviation: np.ndarray, look: Look, label: str) -> None:
    """With a marker at every power of two, evenly spaced on the axis and too few to hide the line."""
    indices = [int(index) for index in np.flatnonzero(np.log2(x) % 1 == 0)]
    axes.plot(
        x, mean, color=look.colour, marker=look.marker, linestyle=look.dashes, linewidth=1.1, markevery=indices,
        label=label,
    )  # fmt: skip
    if deviation.any():
        axes.fill_between(x, mean - deviation, mean + deviation, color=look.colour, alpha=0.2, linewidth=0)


def _limit(pair: tuple[Axes, Axes], spectra: Spectra) -> None:
    """Axes that hold what is finite and worth it; all panels of a row share them."""
    top = spectra.truth.max() or 1.0
    means = np.stack([spectra.truth, *(forecast[0] for forecast in spectra.forecasts.values())])
    told = np.where(spectra.truth > FLOOR * top, spectra.truth, np.nan)
    for axes, values, least, most in (
        (pair[0], means, FLOOR * top, WIDEST * top),
        (pair[1], means[1:] / told, 1 / WIDEST, WIDEST),
    ):
        worth = values[np.isfinite(values) & (values >= least)].clip(max=most)
        low, high = (worth.min(), worth.max()) if worth.size else (least, most)
        if axes is pair[1]:
            low, high = min(low, 0.5), max(high, 2.0)
            marks = next(marks for span, marks in MARKS.items() if high / low <= span)
            ticks = [mark for mark in marks if low / 1.5 <= mark <= high * 1.5]
            axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.set_ylim(low / 1.5, high * 1.5)
