"""Error maps: one case over its leads, and the last lead of one case of several tasks (app:rollout-case-studies).

A panel shows |forecast - truth| of a scalar field, or the norm over channels of a vector field. In a rollout figure all
models and leads share one scale, from zero to the 99.5th percentile of the values shown; a case study has one scale per
task and field, with the same percentile, since the paper does not specify it. Frames that have blown up are excluded
from the scales. A volume of errors is smoothed by a Gaussian of 0.75 cells, and its maximum projections along the three
axes are drawn on the visible faces of a cube.
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
from sigmasolver.report.errors import blown_up
from sigmasolver.report.figures.layers import run_titles
from sigmasolver.report.figures.style import GREY, TWO_COLUMNS, new_figure, style
from sigmasolver.report.pictures import PERCENTILE, Scale, error_limit, field_scale
from sigmasolver.report.published import OURS, TASK_LABELS
from sigmasolver.report.rows import (
    Arrays,
    Rows,
    at_leads,
    diagnosed,
    lowest_seeds,
    runs_in,
    select,
    shared_leads,
    unique,
    value_of,
)
from sigmasolver.tasks import field_groups

__all__ = ["MAPS", "Case", "case_study", "cases_of", "faces", "maps", "shown_field"]

MAPS = diagnosed("maps", "relative_l2")
PAPER_FIELDS = {"it3d": "velocity_x"}
"""Field of the paper's rollouts if it is not the first one."""
ROW_ORDER = {"physolver": 0, "specsolver": 1, OURS: 3}
"""Row order of the paper's rollouts from top to bottom; other models come in between."""
SMOOTHING = 0.75
_NARROW_PANEL = 0.5
"""Panels narrower than this, in inches, have no room for text."""
_COS, _SIN = math.cos(math.pi / 6), math.sin(math.pi / 6)


@dataclass(frozen=True, eq=False)
class Case:
    """One field of the first case of one task. `truth` and each of the `errors` are (leads, *grid), norms over channels
    for a vector field; `kept` marks the leads of each run that have not blown up; `notes` has the relative L2 error of
    each run and lead in per cent, for a vector the mean over components."""

    task: str
    field: str
    vector: bool
    leads: tuple[int, ...]
    truth: np.ndarray
    errors: Mapping[str, np.ndarray]
    kept: Mapping[str, np.ndarray]
    notes: Mapping[tuple[str, int], str]

    def norm_label(self, text: str) -> str:
        """Label of the absolute value, or of the norm for a vector."""
        return f"‖{text}‖" if self.vector else f"|{text}|"


def maps(rows: Rows, arrays: Arrays, field: str | None = None) -> Figure:
    """Errors of one case on a common scale, with leads as columns and models as rows; volumes are drawn as cubes
    (fig:case-study-ns2d to fig:case-study-smoke3d)."""
    cases = cases_of(sorted(rows, key=lambda row: ROW_ORDER.get(row["model"], 2)), arrays, field)
    if len(cases) > 1:
        raise ValueError(
            f"These runs belong to different tasks ({', '.join(case.task for case in cases)}); draw one task at a time."
        )
    (case,) = cases
    with style():
        row_count, columns, (nx, ny) = len(case.errors), len(case.leads), case.truth.shape[1:3]
        volume = case.truth.ndim == 4
        size = min(1.5, (TWO_COLUMNS - 1.7) / columns)
        narrow, note_size = size < _NARROW_PANEL, min(5.5, 15 * size)
        figure = new_figure(
            size * columns + 1.7, max(1.7, (size * (1.14 if volume else 0.94 * ny / nx) + 0.13) * row_count + 0.25)
        )
        axes = figure.subplots(row_count, columns, squeeze=False)
        displayed, top = _displayed_errors(case)
        for axes_row, (name, errors) in zip(axes, displayed.items(), strict=True):
            for cell, views, lead in zip(axes_row, errors, case.leads, strict=True):
                image = _draw_error(cell, views, top)
                note = case.notes.get((name, lead), "")
                note = note.replace(" ", "\n") if note == NOT_FINITE and narrow else note
                cell.text(0.5, -0.03, note, transform=cell.transAxes, ha="center", va="top", fontsize=note_size)
            axes_row[0].text(-0.1, 0.5, name, transform=axes_row[0].transAxes, ha="right", va="center")
        for cell, lead in zip(axes[0], case.leads, strict=True):
            cell.set_title(f"{lead}" if narrow else f"lead {lead}")
        if narrow:
            axes[0, 0].text(-0.1, 1.08, "lead", transform=axes[0, 0].transAxes, ha="right", va="bottom")
        smooth = ", smoothed" if volume else ""
        label = f"{case.norm_label(f'error of {case.field}')}{smooth}\nup to the {PERCENTILE}th percentile"
        label += "\n(%: relative L2, mean over components)" if case.vector else ""
        figure.colorbar(image, ax=axes, shrink=0.9, pad=0.02, extend="max", label=label)
    return figure


def case_study(rows: Rows, arrays: Arrays, field: str | None = None) -> Figure:
    """The last lead of one case of each task: for every field the truth, and the errors of all runs on one scale
    (fig:case-study-baselines)."""
    cases = cases_of(rows, arrays, field, last=True)
    with style():
        names = unique(name for case in cases for name in case.errors)
        size = min(1.5, (TWO_COLUMNS - 1.6) / (1 + len(names)))
        figure = new_figure(size * (1 + len(names)) + 1.6, size * len(cases) + 0.4)
        axes = figure.subplots(len(cases), 1 + len(names), squeeze=False)
        for axes_row, case in zip(axes, cases, strict=True):
            values = _draw_truth(axes_row[0], case)
            label = case.norm_label(case.field) if case.vector else case.field
            figure.colorbar(values, ax=axes_row[0], shrink=0.8, pad=0.02, label=label)
            displayed, top = _displayed_errors(case)
            for cell, name in zip(axes_row[1:], names, strict=True):
                cell.set_axis_off()
                if name in displayed:
                    image = _draw_error(cell, displayed[name][0], top)
            figure.colorbar(image, ax=axes_row[-1], shrink=0.8, pad=0.02, extend="max", label=case.norm_label("error"))
            plane = ", middle plane" if case.truth.ndim == 4 else ""
            axes_row[0].set_ylabel(f"{TASK_LABELS.get(case.task, case.task)}\nlead {case.leads[-1]}{plane}")
        axes[0, 0].set_title("truth")
        for cell, name in zip(axes[0, 1:], names, strict=True):
            cell.set_title(name)
    return figure


def cases_of(rows: Rows, arrays: Arrays, field: str | None = None, last: bool = False) -> list[Case]:
    """First case of each task with its runs, the lowest seed of each model.

    The field is the requested one, else that of the paper's rollouts; with `last` (last lead only), every field has a
    case.
    """
    chosen = lowest_seeds(select(rows, MAPS))
    titles = run_titles(chosen)
    cases = []
    for task in unique(row["task"] for row in chosen):
        runs = runs_in([row for row in chosen if row["task"] == task])
        task_rows = [row for row in chosen if row["task"] == task]
        # With several tasks, titles contain task and model; within one task the model is enough.
        labels = run_titles(task_rows) if len(titles) > len(runs) else titles
        run_maps = {run: _maps_of(run, arrays) for run in runs}
        leads = shared_leads(list(run_maps.values()))
        if not leads:
            raise ValueError(f"{' and '.join(runs)} have no lead in common; diagnose them on the same windows.")
        leads = leads[-1:] if last else leads
        names = unique(row["field"] for row in task_rows)
        for field_name, channels in _fields(task, names, field, last).items():
            members = [names[channel] for channel in channels]
            field_rows = [row for row in task_rows if row["field"] in members]
            cases.append(
                _case(task, field_name, channels, leads, {run: labels[run] for run in runs}, field_rows, run_maps)
            )
    return cases


def _fields(task: str, names: Sequence[str], requested: str | None, all_fields: bool) -> dict[str, tuple[int, ...]]:
    """Channels of each field to show; the velocity components form one field, and may also be requested alone."""
    groups = field_groups(names)
    choices = {**{name: (channel,) for channel, name in enumerate(names)}, **groups}
    if requested is None and all_fields:
        return {group if len(members) > 1 else names[members[0]]: members for group, members in groups.items()}
    name = shown_field(task, list(choices), requested)
    return {name: choices[name]}


def shown_field(task: str, names: Sequence[str], requested: str | None) -> str:
    """Return the requested field, else the one of the paper, else the first."""
    name = requested or (PAPER_FIELDS[task] if PAPER_FIELDS.get(task) in names else names[0])
    if name not in names:
        raise ValueError(f'{task} has no field "{name}"; choose from {", ".join(names)}.')
    return name


def _case(
    task: str,
    field: str,
    channels: tuple[int, ...],
    leads: tuple[int, ...],
    titles: Mapping[str, str],
    rows: Rows,
    run_maps: Arrays,
) -> Case:
    first = run_maps[next(iter(titles))]
    case_number, reference = int(first["cases"][0]), at_leads(first, "truth", leads)[0]
    truth = np.asarray(reference[..., channels], float)
    if truth.ndim not in (4, 5):
        raise ValueError(f"{task} has {truth.ndim - 2} spatial axis; error maps require two or three.")
    vector = len(channels) > 1
    errors, kept, notes = {}, {}, {}
    for run, title in titles.items():
        if not np.array_equal(at_leads(run_maps[run], "truth", leads)[0], reference):
            raise ValueError(
                f"{run} shows a different case than {next(iter(titles))}; diagnose both on the same windows."
            )
        forecast = np.asarray(at_leads(run_maps[run], "forecast", leads)[0][..., channels], float)
        kept[title] = ~blown_up(forecast, truth)
        errors[title] = np.linalg.norm(forecast - truth, axis=-1)
        case_rows = [row for row in rows if (row["run"], row.get("case")) == (run, case_number)]
        for lead in leads:
            values = [value_of(row) for row in case_rows if row["lead"] == lead]
            text = significant(100 * float(np.mean(values))) if values else ""
            notes[title, lead] = f"{text} %" if text and text != NOT_FINITE else text
    displayed = np.linalg.norm(truth, axis=-1) if vector else truth[..., 0]
    return Case(task, field, vector, leads, displayed, errors, kept, notes)


def _maps_of(run: str, arrays: Arrays) -> Mapping[str, np.ndarray]:
    run_maps = arrays.get(run, {})
    for name in ("truth", "forecast", "leads", "cases"):
        if name not in run_maps:
            raise ValueError(f"{run} has no array {name} of maps; create it with: {MAPS.command.format(run=run)}")
    return run_maps


def _displayed_errors(case: Case) -> tuple[dict[str, list[list[np.ndarray]]], float]:
    """Error images of each run and lead, and the common upper limit of their scale."""
    displayed = {name: [_views(frame) for frame in error] for name, error in case.errors.items()}
    valid = [view for name, errors in displayed.items()
             for views, kept in zip(errors, case.kept[name], strict=True) if kept for view in views]  # fmt: skip
    return displayed, error_limit(valid, case.truth)


def _views(error: np.ndarray) -> list[np.ndarray]:
    """Images of an error field: the plane itself, or three faces of a volume."""
    return [error] if error.ndim == 2 else faces(error)


def faces(volume: np.ndarray) -> list[np.ndarray]:
    """Maximum projections of the smoothed errors (X, Y, Z) along z, x and y: (X, Y), (Y, Z), (X, Z)."""
    from scipy.ndimage import gaussian_filter

    smooth = gaussian_filter(volume, SMOOTHING, mode="nearest")
    return [smooth.max(axis=axis) for axis in (2, 0, 1)]


def _draw_truth(axes: Axes, case: Case) -> AxesImage:
    """Draw the truth, for a volume its middle plane, on its own scale."""
    (field,) = case.truth
    plane = field if field.ndim == 2 else field[..., field.shape[-1] // 2]
    return _draw_plane(axes, plane, field_scale(plane))


def _draw_plane(axes: Axes, field: np.ndarray, scale: Scale) -> AxesImage:
    """Draw a field (X, Y) with x to the right and y up."""
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.grid(False)
    return axes.imshow(
        _to_image(field), origin="lower", cmap=_colour_map(scale.colours), vmin=scale.low, vmax=scale.high
    )


def _to_image(field: np.ndarray) -> np.ndarray:
    """Transpose (X, Y) to an image with rows along y; non-finite values become NaN."""
    return np.where(np.isfinite(field), field, math.nan).T


def _colour_map(name: str) -> Colormap:
    """Colour map with grey for non-finite values, as on the page."""
    return colormaps[name].with_extremes(bad=GREY)


def _draw_error(axes: Axes, views: Sequence[np.ndarray], top: float) -> AxesImage:
    if len(views) == 1:
        return _draw_plane(axes, views[0], Scale("magma", 0.0, top))
    return _draw_cube(axes, views, top)


def _draw_cube(axes: Axes, views: Sequence[np.ndarray], top: float) -> AxesImage:
    """Draw the three images of `faces` on the sides of a cube seen from (1, 1, 1), in isometric projection."""
    nx, ny = views[0].shape
    nz = views[1].shape[1]
    x, y, z = (length / max(nx, ny, nz) for length in (nx, ny, nz))
    positions = (
        (x * _COS, -x * _SIN, -y * _COS, -y * _SIN, 0.0, z),
        (-y * _COS, -y * _SIN, 0.0, z, x * _COS, -x * _SIN),
        (x * _COS, -x * _SIN, 0.0, z, -y * _COS, -y * _SIN),
    )
    axes.set_axis_off()
    axes.set_aspect("equal")
    for face, position in zip(views, positions, strict=True):
        image = axes.imshow(
            _to_image(face), origin="lower", extent=(0, 1, 0, 1), cmap=_colour_map("magma"), vmin=0, vmax=top,
            transform=Affine2D.from_values(*position) + axes.transData,
        )  # fmt: skip
        a, b, c, d, e, f = position
        outline = np.array([(0, 0), (1, 0), (1, 1), (0, 1), (0, 0)]) @ np.array([(a, b), (c, d)]) + (e, f)
        axes.plot(*outline.T, color=GREY, linewidth=0.4)
    axes.set_xlim(-y * _COS - 0.02, x * _COS + 0.02)
    axes.set_ylim(-(x + y) * _SIN - 0.02, z + 0.02)
    return image
