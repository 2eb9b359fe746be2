"""Errors in space: one case over its leads, planes as pictures and volumes as cubes (app:rollout-case-studies).

All models and leads of a task share one error scale, from zero to the 99.5th percentile of what is shown; errors beyond
the largest magnitude of the truth do not count, so that a forecast that runs away cannot darken the others. A volume of
errors is smoothed by a Gaussian of 0.75 cells and its largest values along each axis are laid on the three faces that
face the reader.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import Colormap
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.transforms import Affine2D

from sigmasolver.report.digits import NOT_FINITE, significant
from sigmasolver.report.figures.layers import run_titles
from sigmasolver.report.figures.style import GREY, TWO_COLUMNS, new_figure, style
from sigmasolver.report.pictures import Scale, field_scale
from sigmasolver.report.published import TASK_LABELS
from sigmasolver.report.rows import (
    Arrays,
    Rows,
    at_leads,
    diagnosed,
    evenly,
    in_order,
    lowest_seeds,
    runs_in,
    select,
    shared_leads,
    value_of,
)

__all__ = ["MAPS", "Case", "case_study", "cases_of", "error_limit", "faces", "maps", "shown_field"]

MAPS = diagnosed("maps", "relative_l2")
SHOWN = {"it3d": "velocity_x"}
"""The field that the paper shows where it is not the first one."""
ACROSS = 5
"""Leads that stand beside each other, at most."""
PERCENTILE, SMOOTHING = 99.5, 0.75
_NARROW = 0.5
"""Panels below this width in inches have no room for the word "lead"."""
_COS, _SIN = math.cos(math.pi / 6), math.sin(math.pi / 6)


@dataclass(frozen=True, eq=False)
class Case:
    """The first case of one task: `truth` and each forecast are (leads, *grid); `notes` has the relative L2 error of
    each run and lead in per cent."""

    task: str
    field: str
    leads: tuple[int, ...]
    truth: np.ndarray
    forecasts: Mapping[str, np.ndarray]
    errors: Mapping[str, np.ndarray]
    notes: Mapping[tuple[str, int], str]


def maps(rows: Rows, arrays: Arrays, field: str | None = None) -> Figure:
    """One case over its leads: truth, forecast and error of each run in a plane; of a volume the errors as cubes
    (fig:case-study-ns2d to fig:case-study-smoke3d)."""
    cases = cases_of(rows, arrays, field)
    if len(cases) > 1:
        raise ValueError(f"These runs are of {' and of '.join(case.task for case in cases)}; draw one task at a time.")
    with style():
        return _cubes(cases[0]) if cases[0].truth.ndim == 4 else _planes(cases[0])


def case_study(rows: Rows, arrays: Arrays, field: str | None = None) -> Figure:
    """The last lead of one case of each task: the truth, and the error of every run on the scale of its task
    (fig:case-study-baselines)."""
    cases = cases_of(rows, arrays, field)
    with style():
        names = in_order(name for case in cases for name in case.errors)
        size = min(1.5, (TWO_COLUMNS - 1.6) / (1 + len(names)))
        figure = new_figure(size * (1 + len(names)) + 1.6, size * len(cases) + 0.4)
        axes = figure.subplots(len(cases), 1 + len(names), squeeze=False)
        for line, case in zip(axes, cases, strict=True):
            values = _show_truth(line[0], case, -1)
            figure.colorbar(values, ax=line[0], shrink=0.8, pad=0.02, label=case.field)
            shown = {name: _displayed(error[-1]) for name, error in case.errors.items()}
            top = error_limit((part for held in shown.values() for part in held), case.truth)
            for cell, name in zip(line[1:], names, strict=True):
                cell.set_axis_off()
                if name in shown:
                    drawn = _show_error(cell, shown[name], top)
            figure.colorbar(drawn, ax=line[-1], shrink=0.8, pad=0.02, extend="max", label="|error|")
            plane = ", middle plane" if case.truth.ndim == 4 else ""
            line[0].set_ylabel(f"{TASK_LABELS.get(case.task, case.task)}\nlead {case.leads[-1]}{plane}")
        axes[0, 0].set_title("truth")
        for cell, name in zip(axes[0, 1:], names, strict=True):
            cell.set_title(name)
    return figure


def cases_of(rows: Rows, arrays: Arrays, field: str | None = None) -> list[Case]:
    """The first case of each task, with the runs that show it; of several seeds of a model the lowest."""
    held = lowest_seeds(select(rows, MAPS))
    titles = run_titles(held)
    cases = []
    for task in in_order(row["task"] for row in held):
        runs = runs_in([row for row in held if row["task"] == task])
        mine = [row for row in held if row["task"] == task]
        names = in_order(row["field"] for row in mine)
        shown = shown_field(task, names, field)
        # Several tasks name their runs by task and model; beside its own task a run needs its model alone.
        label = run_titles(mine) if len(titles) > len(runs) else titles
        cases.append(_case(task, shown, names.index(shown), {run: label[run] for run in runs}, mine, arrays))
    return cases


def shown_field(task: str, names: Sequence[str], asked: str | None) -> str:
    """The field that is asked for, else the one of the paper, else the first."""
    shown = asked or (SHOWN[task] if SHOWN.get(task) in names else names[0])
    if shown not in names:
        raise ValueError(f'{task} has no field "{shown}"; choose from {", ".join(names)}.')
    return shown


def _case(task: str, field: str, channel: int, titles: Mapping[str, str], rows: Rows, arrays: Arrays) -> Case:
    each = {run: _arrays_of(run, arrays) for run in titles}
    leads = shared_leads(list(each.values()))
    if not leads:
        raise ValueError(f"{' and '.join(titles)} have no lead in common; diagnose them on the same windows.")
    leads = tuple(leads[place] for place in evenly(len(leads), ACROSS))
    first = next(iter(each.values()))
    number, same = int(first["cases"][0]), at_leads(first, "truth", leads)[0]
    truth = np.asarray(same[..., channel], float)
    if truth.ndim not in (3, 4):
        raise ValueError(f"{task} has {truth.ndim - 1} spatial axis; error maps are drawn of planes and volumes.")
    forecasts, notes = {}, {}
    for run, title in titles.items():
        if not np.array_equal(at_leads(each[run], "truth", leads)[0], same):
            raise ValueError(f"{run} shows another case than {next(iter(titles))}; diagnose both on the same windows.")
        forecasts[title] = np.asarray(at_leads(each[run], "forecast", leads)[0, ..., channel], float)
        for row in rows:
            if (row["run"], row["field"], row.get("case")) == (run, field, number):
                text = significant(100 * value_of(row))
                notes[title, row["lead"]] = text if text == NOT_FINITE else f"{text} %"
    errors = {title: np.abs(forecast - truth) for title, forecast in forecasts.items()}
    return Case(task, field, leads, truth, forecasts, errors, notes)


def _arrays_of(run: str, arrays: Arrays) -> Mapping[str, np.ndarray]:
    held = arrays.get(run, {})
    for name in ("truth", "forecast", "leads", "cases"):
        if name not in held:
            raise ValueError(f"{run} has no array {name} of maps; make it with: {MAPS.command.format(run=run)}")
    return held


def error_limit(errors: Iterable[np.ndarray], truth: np.ndarray) -> float:
    """The upper end of the scale for all these errors."""
    largest = float(np.abs(truth[np.isfinite(truth)]).max())
    pooled = np.concatenate([np.ravel(error) for error in errors])
    pooled = pooled[pooled <= largest]  # false for NaN
    return (float(np.percentile(pooled, PERCENTILE)) if pooled.size else 0.0) or largest or 1.0


def faces(volume: np.ndarray) -> list[np.ndarray]:
    """The largest values of the smoothed errors (X, Y, Z) along z, x and y: (X, Y), (Y, Z), (X, Z)."""
    from scipy.ndimage import gaussian_filter

    smooth = gaussian_filter(volume, SMOOTHING, mode="nearest")
    return [smooth.max(axis=axis) for axis in (2, 0, 1)]


def _displayed(error: np.ndarray) -> list[np.ndarray]:
    """What is drawn of the errors of one lead: a plane as it is, three faces of a volume."""
    return [error] if error.ndim == 2 else faces(error)


def _planes(case: Case) -> Figure:
    """Truth, then forecast and error of each run, down; leads across; the two colour bars to the right."""
    down, across = 1 + 2 * len(case.forecasts), len(case.leads)
    nx, ny = case.truth.shape[1:]
    size = min(1.15, (TWO_COLUMNS - 1.9) / across)
    figure = new_figure(size * across + 1.9, (size * ny / nx + 0.14) * down + 0.2)
    grid = figure.add_gridspec(down, across + 1, width_ratios=[1.0] * across + [0.06])
    top = error_limit(case.errors.values(), case.truth)
    for column, lead in enumerate(case.leads):
        cells = [figure.add_subplot(grid[row, column]) for row in range(down)]
        values = _show_truth(cells[0], case, column)
        cells[0].set_title(f"lead {lead}" if size > _NARROW or column == 0 else f"{lead}")
        labels = ["truth"]
        for place, (name, forecast) in enumerate(case.forecasts.items()):
            above, below = cells[1 + 2 * place : 3 + 2 * place]
            _show(above, forecast[column], field_scale(case.truth))
            errors = _show_error(below, [case.errors[name][column]], top)
            below.set_xlabel(case.notes.get((name, lead), ""), fontsize=6, labelpad=1)
            labels += [f"{name}\nforecast", f"{name}\n|error|"]
        for cell, label in zip(cells, labels, strict=True):
            cell.set_ylabel(label if column == 0 else "", rotation=0, ha="right", va="center")
    half = (down + 1) // 2
    figure.colorbar(values, cax=figure.add_subplot(grid[: half - 1, across]), label=case.field, extend="both")
    figure.colorbar(errors, cax=figure.add_subplot(grid[half:, across]), label=f"|error of {case.field}|", extend="max")
    return figure


def _cubes(case: Case) -> Figure:
    """The errors of each run, down; leads across."""
    down, across = len(case.errors), len(case.leads)
    size = min(1.5, (TWO_COLUMNS - 1.0) / across)
    figure = new_figure(size * across + 1.0, (1.17 * size + 0.14) * down + 0.3)
    axes = figure.subplots(down, across, squeeze=False)
    shown = {name: [faces(volume) for volume in error] for name, error in case.errors.items()}
    top = error_limit((face for held in shown.values() for three in held for face in three), case.truth)
    for number, (name, held) in enumerate(shown.items()):
        for cell, three, lead in zip(axes[number], held, case.leads, strict=True):
            drawn = _show_error(cell, three, top)
            title = f"lead {lead}" if size > _NARROW or lead == case.leads[0] else f"{lead}"
            cell.set_title(title if number == 0 else "")
            note = case.notes.get((name, lead), "")
            cell.text(0.5, -0.02, note, transform=cell.transAxes, ha="center", va="top", fontsize=6)
        first = axes[number, 0]
        first.text(-0.06, 0.5, name, transform=first.transAxes, rotation=90, ha="right", va="center")
    label = f"|error of {case.field}|, smoothed"
    figure.colorbar(drawn, ax=axes, shrink=0.7, pad=0.02, extend="max", label=label)
    return figure


def _show_truth(axes: Axes, case: Case, lead: int) -> AxesImage:
    """A plane on the scale of all leads; of a volume the middle plane, which has a scale of its own."""
    field = case.truth[lead]
    if field.ndim == 2:
        return _show(axes, field, field_scale(case.truth))
    plane = field[..., field.shape[-1] // 2]
    return _show(axes, plane, field_scale(plane))


def _show(axes: Axes, field: np.ndarray, scale: Scale) -> AxesImage:
    """(X, Y) with x to the right and y up."""
    axes.set_xticks([])
    axes.set_yticks([])
    for side in axes.spines.values():
        side.set_visible(False)
    axes.grid(False)
    return axes.imshow(_finite(field), origin="lower", cmap=_colours(scale.colours), vmin=scale.low, vmax=scale.high)


def _finite(field: np.ndarray) -> np.ndarray:
    """The picture of (X, Y), rows upwards; what is not finite is masked."""
    return np.where(np.isfinite(field), field, math.nan).T


def _colours(name: str) -> Colormap:
    """What is not finite is grey, as on the page."""
    return colormaps[name].with_extremes(bad=GREY)


def _show_error(axes: Axes, parts: Sequence[np.ndarray], top: float) -> AxesImage:
    if len(parts) == 1:
        return _show(axes, parts[0], Scale("magma", 0.0, top))
    return _show_cube(axes, parts, top)


def _show_cube(axes: Axes, three: Sequence[np.ndarray], top: float) -> AxesImage:
    """The faces z, x and y of `faces` on the three sides that a reader at (1, 1, 1) sees, in parallel projection."""
    nx, ny = three[0].shape
    nz = three[1].shape[1]
    x, y, z = (length / max(nx, ny, nz) for length in (nx, ny, nz))
    places = (
        (x * _COS, -x * _SIN, -y * _COS, -y * _SIN, 0.0, z),
        (-y * _COS, -y * _SIN, 0.0, z, x * _COS, -x * _SIN),
        (x * _COS, -x * _SIN, 0.0, z, -y * _COS, -y * _SIN),
    )
    axes.set_axis_off()
    axes.set_aspect("equal")
    for face, place in zip(three, places, strict=True):
        drawn = axes.imshow(
            _finite(face), origin="lower", extent=(0, 1, 0, 1), cmap=_colours("magma"), vmin=0, vmax=top,
            transform=Affine2D.from_values(*place) + axes.transData,
        )  # fmt: skip
        a, b, c, d, e, f = place
        outline = np.array([(0, 0), (1, 0), (1, 1), (0, 1), (0, 0)]) @ np.array([(a, b), (c, d)]) + (e, f)
        axes.plot(*outline.T, color=GREY, linewidth=0.4)
    axes.set_xlim(-y * _COS - 0.02, x * _COS + 0.02)
    axes.set_ylim(-(x + y) * _SIN - 0.02, z + 0.02)
    return drawn
