"""Errors in space: one case over its leads, and the last lead of one case of several tasks (app:rollout-case-studies).

A panel shows |forecast - truth| of a scalar field, the norm over channels of a vector field. In the figure of a rollout
all models and leads share one scale, from zero to the 99.5th percentile of what is shown; a case study has one for each
task and field, and the paper does not say where it ends: there it is the same percentile. Frames that have blown up
have no say in a scale. A volume of errors is smoothed by a Gaussian of 0.75 cells and its largest values along each
axis, wherever they lie inside, are laid on the three faces that face the reader.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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
from sigmasolver.report.pictures import PERCENTILE, Scale, blown_up, error_limit, field_scale
from sigmasolver.report.published import OURS, TASK_LABELS
from sigmasolver.report.rows import (
    Arrays,
    Rows,
    at_leads,
    diagnosed,
    in_order,
    lowest_seeds,
    runs_in,
    select,
    shared_leads,
    value_of,
)
from sigmasolver.tasks import field_groups

__all__ = ["MAPS", "Case", "case_study", "cases_of", "faces", "maps", "shown_field"]

MAPS = diagnosed("maps", "relative_l2")
SHOWN = {"it3d": "velocity_x"}
"""The field of the paper's rollouts where it is not the first one."""
DOWN = {"physolver": 0, "specsolver": 1, OURS: 3}
"""The rows of the paper's rollouts from top to bottom; other models come between."""
SMOOTHING = 0.75
_NARROW = 0.5
"""Panels below this width in inches have no room for words."""
_COS, _SIN = math.cos(math.pi / 6), math.sin(math.pi / 6)


@dataclass(frozen=True, eq=False)
class Case:
    """One field of the first case of one task. `truth` and each of the `errors` are (leads, *grid), norms over channels
    where the field is a vector; `kept` tells of each run which leads have not blown up; `notes` has the relative L2
    error of each run and lead in per cent, of a vector the mean over components."""

    task: str
    field: str
    vector: bool
    leads: tuple[int, ...]
    truth: np.ndarray
    errors: Mapping[str, np.ndarray]
    kept: Mapping[str, np.ndarray]
    notes: Mapping[tuple[str, int], str]

    def size_of(self, words: str) -> str:
        """The absolute value or the norm of something, as a label."""
        return f"‖{words}‖" if self.vector else f"|{words}|"


def maps(rows: Rows, arrays: Arrays, field: str | None = None) -> Figure:
    """The errors of one case, leads across and models down, on one scale; a volume as cubes (fig:case-study-ns2d to
    fig:case-study-smoke3d)."""
    cases = cases_of(sorted(rows, key=lambda row: DOWN.get(row["model"], 2)), arrays, field)
    if len(cases) > 1:
        raise ValueError(
            f"These runs belong to different tasks ({', '.join(case.task for case in cases)}); draw one task at a time."
        )
    (case,) = cases
    with style():
        down, across, (nx, ny) = len(case.errors), len(case.leads), case.truth.shape[1:3]
        volume = case.truth.ndim == 4
        size = min(1.5, (TWO_COLUMNS - 1.7) / across)
        narrow, note_size = size < _NARROW, min(5.5, 15 * size)
        figure = new_figure(
            size * across + 1.7, max(1.7, (size * (1.14 if volume else 0.94 * ny / nx) + 0.13) * down + 0.25)
        )
        axes = figure.subplots(down, across, squeeze=False)
        shown, top = _shown(case)
        for line, (name, errors) in zip(axes, shown.items(), strict=True):
            for cell, parts, lead in zip(line, errors, case.leads, strict=True):
                drawn = _show_error(cell, parts, top)
                note = case.notes.get((name, lead), "")
                note = note.replace(" ", "\n") if note == NOT_FINITE and narrow else note
                cell.text(0.5, -0.03, note, transform=cell.transAxes, ha="center", va="top", fontsize=note_size)
            line[0].text(-0.1, 0.5, name, transform=line[0].transAxes, ha="right", va="center")
        for cell, lead in zip(axes[0], case.leads, strict=True):
            cell.set_title(f"{lead}" if narrow else f"lead {lead}")
        if narrow:
            axes[0, 0].text(-0.1, 1.08, "lead", transform=axes[0, 0].transAxes, ha="right", va="bottom")
        smooth = ", smoothed" if volume else ""
        label = f"{case.size_of(f'error of {case.field}')}{smooth}\nup to the {PERCENTILE}th percentile"
        label += "\n(%: relative L2, mean over components)" if case.vector else ""
        figure.colorbar(drawn, ax=axes, shrink=0.9, pad=0.02, extend="max", label=label)
    return figure


def case_study(rows: Rows, arrays: Arrays, field: str | None = None) -> Figure:
    """The last lead of one case of each task: of every field the truth, and the error of every run on one scale
    (fig:case-study-baselines)."""
    cases = cases_of(rows, arrays, field, last=True)
    with style():
        names = in_order(name for case in cases for name in case.errors)
        size = min(1.5, (TWO_COLUMNS - 1.6) / (1 + len(names)))
        figure = new_figure(size * (1 + len(names)) + 1.6, size * len(cases) + 0.4)
        axes = figure.subplots(len(cases), 1 + len(names), squeeze=False)
        for line, case in zip(axes, cases, strict=True):
            values = _show_truth(line[0], case)
            label = case.size_of(case.field) if case.vector else case.field
            figure.colorbar(values, ax=line[0], shrink=0.8, pad=0.02, label=label)
            shown, top = _shown(case)
            for cell, name in zip(line[1:], names, strict=True):
                cell.set_axis_off()
                if name in shown:
                    drawn = _show_error(cell, shown[name][0], top)
            figure.colorbar(drawn, ax=line[-1], shrink=0.8, pad=0.02, extend="max", label=case.size_of("error"))
            plane = ", middle plane" if case.truth.ndim == 4 else ""
            line[0].set_ylabel(f"{TASK_LABELS.get(case.task, case.task)}\nlead {case.leads[-1]}{plane}")
        axes[0, 0].set_title("truth")
        for cell, name in zip(axes[0, 1:], names, strict=True):
            cell.set_title(name)
    return figure


def cases_of(rows: Rows, arrays: Arrays, field: str | None = None, last: bool = False) -> list[Case]:
    """The first case of each task, with the runs that show it; of several seeds of a model the lowest.

    The field is the one that is asked for, else that of the paper's rollouts; with `last`, where the last lead stands
    alone, every field has a case.
    """
    chosen = lowest_seeds(select(rows, MAPS))
    titles = run_titles(chosen)
    cases = []
    for task in in_order(row["task"] for row in chosen):
        runs = runs_in([row for row in chosen if row["task"] == task])
        mine = [row for row in chosen if row["task"] == task]
        # Several tasks name their runs by task and model; beside its own task a run needs its model alone.
        label = run_titles(mine) if len(titles) > len(runs) else titles
        each = {run: _arrays_of(run, arrays) for run in runs}
        leads = shared_leads(list(each.values()))
        if not leads:
            raise ValueError(f"{' and '.join(runs)} have no lead in common; diagnose them on the same windows.")
        leads = leads[-1:] if last else leads
        names = in_order(row["field"] for row in mine)
        for shown, channels in _fields(task, names, field, last).items():
            members = [names[channel] for channel in channels]
            rows_of = [row for row in mine if row["field"] in members]
            cases.append(_case(task, shown, channels, leads, {run: label[run] for run in runs}, rows_of, each))
    return cases


def _fields(task: str, names: Sequence[str], asked: str | None, every: bool) -> dict[str, tuple[int, ...]]:
    """The channels of each field to show; the components of a velocity are one field, and may be asked for alone."""
    groups = field_groups(names)
    choices = {**{name: (channel,) for channel, name in enumerate(names)}, **groups}
    if asked is None and every:
        return {group if len(members) > 1 else names[members[0]]: members for group, members in groups.items()}
    shown = shown_field(task, list(choices), asked)
    return {shown: choices[shown]}


def shown_field(task: str, names: Sequence[str], asked: str | None) -> str:
    """The field that is asked for, else the one of the paper, else the first."""
    shown = asked or (SHOWN[task] if SHOWN.get(task) in names else names[0])
    if shown not in names:
        raise ValueError(f'{task} has no field "{shown}"; choose from {", ".join(names)}.')
    return shown


def _case(
    task: str,
    field: str,
    channels: tuple[int, ...],
    leads: tuple[int, ...],
    titles: Mapping[str, str],
    rows: Rows,
    each: Arrays,
) -> Case:
    first = each[next(iter(titles))]
    number, same = int(first["cases"][0]), at_leads(first, "truth", leads)[0]
    truth = np.asarray(same[..., channels], float)
    if truth.ndim not in (4, 5):
        raise ValueError(f"{task} has {truth.ndim - 2} spatial axis; error maps require two or three.")
    vector = len(channels) > 1
    errors, kept, notes = {}, {}, {}
    for run, title in titles.items():
        if not np.array_equal(at_leads(each[run], "truth", leads)[0], same):
            raise ValueError(
                f"{run} shows a different case than {next(iter(titles))}; diagnose both on the same windows."
            )
        forecast = np.asarray(at_leads(each[run], "forecast", leads)[0][..., channels], float)
        kept[title] = ~blown_up(forecast, truth)
        errors[title] = np.linalg.norm(forecast - truth, axis=-1)
        mine = [row for row in rows if (row["run"], row.get("case")) == (run, number)]
        for lead in leads:
            values = [value_of(row) for row in mine if row["lead"] == lead]
            text = significant(100 * float(np.mean(values))) if values else ""
            notes[title, lead] = f"{text} %" if text and text != NOT_FINITE else text
    shown = np.linalg.norm(truth, axis=-1) if vector else truth[..., 0]
    return Case(task, field, vector, leads, shown, errors, kept, notes)


def _arrays_of(run: str, arrays: Arrays) -> Mapping[str, np.ndarray]:
    found = arrays.get(run, {})
    for name in ("truth", "forecast", "leads", "cases"):
        if name not in found:
            raise ValueError(f"{run} has no array {name} of maps; create it with: {MAPS.command.format(run=run)}")
    return found


def _shown(case: Case) -> tuple[dict[str, list[list[np.ndarray]]], float]:
    """What is drawn of the errors of each run and lead, and where the scale of all of them ends."""
    shown = {name: [_displayed(one) for one in error] for name, error in case.errors.items()}
    calm = [part for name, errors in shown.items() for parts, kept in zip(errors, case.kept[name], strict=True) if kept
            for part in parts]  # fmt: skip
    return shown, error_limit(calm, case.truth)


def _displayed(error: np.ndarray) -> list[np.ndarray]:
    """A plane as it is, three faces of a volume."""
    return [error] if error.ndim == 2 else faces(error)


def faces(volume: np.ndarray) -> list[np.ndarray]:
    """The largest values of the smoothed errors (X, Y, Z) along z, x and y: (X, Y), (Y, Z), (X, Z)."""
    from scipy.ndimage import gaussian_filter

    smooth = gaussian_filter(volume, SMOOTHING, mode="nearest")
    return [smooth.max(axis=axis) for axis in (2, 0, 1)]


def _show_truth(axes: Axes, case: Case) -> AxesImage:
    """A plane, of a volume the middle one, on a scale of its own."""
    (field,) = case.truth
    plane = field if field.ndim == 2 else field[..., field.shape[-1] // 2]
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
    positions = (
        (x * _COS, -x * _SIN, -y * _COS, -y * _SIN, 0.0, z),
        (-y * _COS, -y * _SIN, 0.0, z, x * _COS, -x * _SIN),
        (x * _COS, -x * _SIN, 0.0, z, -y * _COS, -y * _SIN),
    )
    axes.set_axis_off()
    axes.set_aspect("equal")
    for face, position in zip(three, positions, strict=True):
        drawn = axes.imshow(
            _finite(face), origin="lower", extent=(0, 1, 0, 1), cmap=_colours("magma"), vmin=0, vmax=top,
            transform=Affine2D.from_values(*position) + axes.transData,
        )  # fmt: skip
        a, b, c, d, e, f = position
        outline = np.array([(0, 0), (1, 0), (1, 1), (0, 1), (0, 0)]) @ np.array([(a, b), (c, d)]) + (e, f)
        axes.plot(*outline.T, color=GREY, linewidth=0.4)
    axes.set_xlim(-y * _COS - 0.02, x * _COS + 0.02)
    axes.set_ylim(-(x + y) * _SIN - 0.02, z + 0.02)
    return drawn
