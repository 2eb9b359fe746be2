"""Assemble the study of a page from the records of runs: their evaluation and any diagnostics.

Only the evaluation is required. A diagnostic present for some runs only is shown for those.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sigmasolver.report.digits import significant
from sigmasolver.report.figures import FIGURES, Material
from sigmasolver.report.figures.layers import run_titles
from sigmasolver.report.figures.style import style, themed_svg
from sigmasolver.report.published import TASK_LABELS, by_method, model_label
from sigmasolver.report.rows import (
    ALL,
    Arrays,
    Row,
    Rows,
    at_leads,
    evaluated,
    lowest_seeds,
    mean_and_std,
    runs_in,
    select,
    select_field,
    shared_leads,
    unique,
    with_unique_names,
)
from sigmasolver.report.sample import sample_of, timing_of
from sigmasolver.report.study import TRIVIAL_BASELINES, Card, Curve, Dimensions, Maps, Study
from sigmasolver.report.tables import HORIZON, LEAD, MEAN_OVER_FIELDS, PARAMETERS, comparison, curves
from sigmasolver.sampling import evenly_spaced

__all__ = ["headline", "study_of"]

EVALUATION = evaluated(
    "parameters", "relative_l2", "relative_l2_lead", "relative_l2_final", "relative_l2_joint", "relative_l2_joint_lead"
)
ZERO_PHYSICAL = "zero_physical"
"""Error with the slice operators disabled; only models with slices have this metric."""
MIN_LEADS = 5
"""Minimum number of leads of an animation, even if it exceeds the size budget."""
MAX_POINTS = 9_000_000
"""Size budget for all animations of a page in grid points; a point takes one byte before base64 encoding."""


@dataclass(frozen=True)
class _CardText:
    title: str
    alt_text: str
    caption: str
    over_leads: bool = True
    slices_only: bool = False
    """Whether the diagnostic is defined only for models with slices."""


CARDS = {
    "teacher-forcing": _CardText(
        "Single step and rollout",
        "Error over leads from the true history and from the model's own forecasts, for each model.",
        "Teacher-forced: every call starts from the truth. Free: every call starts from previous forecasts. A model "
        "with the better single step does not necessarily have the better rollout.",
    ),
    "decomposition": _CardText(
        "Where the error comes from",
        "Error energy over leads, split into injection, propagation and their cross term, for each model.",
        "Injection is the error of one call from the true history, propagation the effect of earlier errors, and "
        "the cross term their alignment (negative: they partly cancel). The three sum exactly to the total.",
    ),
    "symmetry": _CardText(
        "An error estimate without truth",
        "Error over leads of one forecast and of the mean over symmetries, and how much forecasts differ between them.",
        "The exact solution does not depend on how the input frames are turned, mirrored or shifted by a symmetry of "
        "the equation. What forecasts differ by is therefore error, on average at most that of one forecast.",
    ),
    "corrections": _CardText(
        "How strongly slices correct each other",
        "Learned scale and measured size of the slice correction in every layer, for each run.",
        "A layer with a small correction leaves its slice states nearly unchanged.",
        over_leads=False,
        slices_only=True,
    ),
    "routing": _CardText(
        "How points are routed",
        "Maps of the routing of points to slices, and attention matrices between slices.",
        "Bright points of a map contribute to that slice; a row of a matrix shows which slices correct it.",
        over_leads=False,
        slices_only=True,
    ),
    "spectra": _CardText(
        "Energy at each scale",
        "Energy over wavenumber for the truth and every model at several leads, and their ratio.",
        "Below the truth, a forecast has smoothed that scale; above it, the forecast has added spurious energy.",
    ),
    "components": _CardText(
        "How errors grow at each scale",
        "History error at large and small scales over leads with two bounds, and the gains behind them.",
        "The bound from measured amplifications holds for the evaluated windows. The other is built from norms "
        "found by iteration, which are lower estimates: it is no guarantee, and the true error may lie above it.",
    ),
    "efficiency": _CardText(
        "Cost",
        "Peak memory over epoch time; the area of a marker is the size of the parameters.",
        "Time of a training epoch and peak memory of one update; bars are one standard deviation over timings.",
        over_leads=False,
    ),
}
"""Optional figures of a page, in order."""


def study_of(
    rows: Rows, arrays: Mapping[str, Arrays], title: str | None = None, dimensions: Dimensions | None = None
) -> Study:
    """Assemble a study from the `rows` of all runs, `arrays` by diagnostic and run, and `dimensions` of the data."""
    tasks = unique(row["task"] for row in rows)
    if len(tasks) > 1:
        raise ValueError(f"The runs belong to several tasks ({', '.join(tasks)}); make one page per task.")
    rows = by_method(rows)
    dims, selected = dimensions or Dimensions(), select(rows, EVALUATION, baselines=True)
    labelled = _with_labels(with_unique_names(selected))
    error_curves, sample = curves(labelled), sample_of(labelled)
    animations, shown = _animations(rows, arrays.get("maps", {}), dims)
    cards = _cards(rows, arrays, sample, dims)
    name = TASK_LABELS.get(tasks[0], tasks[0])
    return Study(
        title=title or f"{name}: forecasts compared",
        summary=" ".join(
            (_describe_data(labelled, sample), *headline(error_curves, dims), *_describe_propagation(rows, dims))
        ),
        curves=error_curves,
        table=comparison(labelled, dims),
        facts=_facts(labelled),
        animations=animations,
        cards=tuple(card for card, _ in cards),
        sample=sample,
        dimensions=dims,
        shown=shown,
        records=_records(selected, [row for _, card_rows in cards for row in card_rows]),
    )


def _records(measured: Rows, card_rows: Rows) -> list[Row]:
    """Rows behind the curves, the table and the cards, with the names the models were trained under; those of a trivial
    baseline are taken from the first run that has them."""
    deduplicated: dict[Any, Row] = {}
    for row in measured:
        if row["metric"] in (LEAD, HORIZON, PARAMETERS):
            key = (row["model"], row["metric"], row["field"], row["lead"])
            deduplicated.setdefault(key if row["model"] in TRIVIAL_BASELINES else id(row), row)
    records = (deduplicated | {id(row): row for row in card_rows}).values()
    return [{**row, "model": row["form"]} if "form" in row else row for row in records]


def _with_labels(rows: Rows) -> Rows:
    """Replace model names by the labels used in figures."""
    return [{**row, "model": model_label(row["model"])} for row in rows]


def _describe_data(rows: Rows, sample: str) -> str:
    grids = unique(" × ".join(map(str, row["grid"])) for row in rows)
    norm = f" Errors are relative L2 norms, {MEAN_OVER_FIELDS}." if any(row["field"] == ALL for row in rows) else ""
    return f"Free forecasts on a grid of {' or '.join(grids)}, on data not used for training: {sample}.{norm}"


def headline(error_curves: Sequence[Curve], dimensions: Dimensions) -> list[str]:
    """Summarize which model or trivial baseline is best at the first and last lead, and who loses to a baseline."""
    models = [curve for curve in error_curves if curve.model not in TRIVIAL_BASELINES]
    leads = [lead for lead in models[0].leads if all(lead in curve.leads for curve in models)] or models[0].leads
    first, last = leads[0], leads[-1]
    (first_best, first_error), (last_best, last_error) = (_best_at(error_curves, lead) for lead in (first, last))
    verb = "is" if len(first_best) == 1 else "are"
    start, end = dimensions.lead(first), dimensions.lead(last)
    if first == last:
        sentences = [f"At {start}, {_join(first_best)} {verb} best with {first_error}."]
    elif first_best == last_best:
        sentences = [f"At {start} and at {end}, {_join(first_best)} {verb} best, with {first_error} and {last_error}."]
    else:
        sentences = [
            f"At {start}, {_join(first_best)} {verb} best with {first_error}; at {end}, {_join(last_best)} with "
            f"{last_error}."
        ]
    for lead, best in {first: first_best, last: last_best}.items():
        tied = [name for name in _within_spread(error_curves, best[0], lead) if name not in best]
        if tied:
            verb = "is" if len(tied) == 1 else "are"
            sentences.append(f"At lead {lead}, {_join(tied)} {verb} equally good within the spread over seeds.")
        if set(best) <= set(TRIVIAL_BASELINES):
            best_models, error = _best_at(models, lead)
            sentences.append(f"The best model at lead {lead} is {_join(best_models)} with {error}.")
    for baseline in (curve for curve in error_curves if curve.model in TRIVIAL_BASELINES):
        by_result: dict[str, list[str]] = {}
        for curve in models:
            by_result.setdefault(_compare_with(curve, baseline), []).append(curve.model)
        clauses = [
            f"; {_join(names)} {text.format('s' if len(names) == 1 else '')}"
            for text, names in by_result.items()
            if text
        ]
        sentences.append(
            f"{baseline.model.capitalize()} has {_percent(baseline.errors[-1])} at lead {baseline.leads[-1]}"
            f"{''.join(clauses)}."
        )
    return sentences


def _best_at(error_curves: Sequence[Curve], lead: int) -> tuple[list[str], str]:
    """Models with the lowest error at a lead, including those that read the same, and the formatted error."""
    errors = {
        curve.model: _nan_to_inf(curve.errors[curve.leads.index(lead)]) for curve in error_curves if lead in curve.leads
    }
    best = _percent(min(errors.values()))
    return [model for model, error in errors.items() if _percent(error) == best], best


def _within_spread(error_curves: Sequence[Curve], best: str, lead: int) -> list[str]:
    """Models whose distance from the best at a lead is within the combined spread over seeds."""
    errors = {}
    for curve in error_curves:
        if lead in curve.leads:
            index = curve.leads.index(lead)
            errors[curve.model] = curve.errors[index], curve.spread("seeds")[index]
    best_error, best_spread = errors[best]
    return [name for name, (error, spread) in errors.items() if error - best_error <= math.hypot(best_spread, spread)]


def _compare_with(curve: Curve, baseline: Curve) -> str:
    """Describe at which common leads a model beats a trivial baseline; empty if at all of them."""
    errors, baseline_errors = (dict(zip(series.leads, series.errors, strict=True)) for series in (curve, baseline))
    shared = [lead for lead in curve.leads if lead in baseline_errors]
    beaten = [lead for lead in shared if _nan_to_inf(errors[lead]) < _nan_to_inf(baseline_errors[lead])]
    if beaten == shared:
        return ""
    if not beaten:
        return "never beat{} it"
    if beaten == shared[: len(beaten)]:
        return f"no longer beat{{}} it after lead {beaten[-1]}"
    return f"beat{{}} it at {len(beaten)} of {len(shared)} leads"


def _join(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _percent(error: float) -> str:
    return f"{significant(100 * error)} %" if math.isfinite(error) else significant(error)


def _nan_to_inf(error: float) -> float:
    """Treat non-finite errors as infinite, so that they rank last."""
    return error if math.isfinite(error) else math.inf


def _describe_propagation(rows: Rows, dimensions: Dimensions) -> list[str]:
    """Summarize which share of the error at the last lead is propagated from earlier frames."""
    shares = [row for row in rows if row.get("diagnostic") == "decomposition" and row["metric"] == "propagation_share"]
    shares = [row for row in _with_labels(with_unique_names(shares)) if row["field"] is None] if shares else []
    if not shares:
        return []
    models = unique(row["model"] for row in shares)
    last = {model: max(row["lead"] for row in shares if row["model"] == model) for model in models}
    means = mean_and_std([row for row in shares if row["lead"] == last[row["model"]]], "model")
    leads = unique(last.values())
    clauses = [
        f"{significant(100 * mean)} % for {model}" + ("" if len(leads) == 1 else f" at {dimensions.lead(last[model])}")
        for (model,), (mean, _) in means.items()
    ]
    where = f"at {dimensions.lead(leads[0])}" if len(leads) == 1 else "at the last lead"
    return [
        f"The share of the error energy {where} that is propagated from earlier frames is {', '.join(clauses)} "
        f"({sample_of(shares)})."
    ]


def _facts(rows: Rows) -> tuple[tuple[str, str], ...]:
    def listed(key: str) -> str:
        return ", ".join(str(value) for value in unique(row.get(key) for row in rows) if value is not None)

    package = f"sigmasolver {listed('package')}, torch {listed('torch')}"
    pairs = (
        ("machine", listed("machine")),
        ("commit", listed("commit")),
        ("package", package),
        ("precision", f"trained in {listed('precision')}, forecast in {listed('forecast_precision') or 'float32'}"),
        ("seeds", listed("seed")),
        ("runs", listed("run")),
        ("steps", listed("step")),
        ("data", listed("data")),
        ("date", listed("date")),
    )
    return tuple(pair for pair in pairs if pair[1])


def _cards(rows: Rows, arrays: Mapping[str, Arrays], sample: str, dimensions: Dimensions) -> list[tuple[Card, Rows]]:
    """Draw the cards, each with its rows. The caption states the sample, and the page's sample if it differs."""
    cards: list[tuple[Card, Rows]] = []
    for name, texts in CARDS.items():
        drawing = FIGURES[name]
        runs_by_need = [{row["run"] for row in rows if need.matches(row)} for need in drawing.needs]
        runs = set.intersection(*runs_by_need)
        if drawing.arrays is not None:
            runs &= {
                run for run, names in arrays.get(drawing.arrays, {}).items() if drawing.required_array in (None, *names)
            }
        card_rows = [row for row in rows if row["run"] in runs]
        if not card_rows:
            continue
        card_arrays = {run: arrays[drawing.arrays][run] for run in runs_in(card_rows)} if drawing.arrays else {}
        with style():
            figure = drawing.draw(Material(card_rows, card_arrays))
        card_sample = drawing.sample(card_rows)
        note = (
            f" (the errors at the top: {sample})"
            if card_sample != sample and drawing.describe_sample is not timing_of
            else ""
        )
        leads = [row["lead"] for row in card_rows if row.get("lead") is not None]
        time = dimensions.time(max(leads)) if texts.over_leads and leads else ""
        when = f" Lead {max(leads)} is at {time}." if time else ""
        missing = _missing_models(rows, runs) if texts.slices_only else ""
        caption = f"{texts.caption}{when} Measured on {card_sample}{note}.{missing}"
        card = Card(name, texts.title, texts.alt_text, caption, themed_svg(figure), figure.get_figwidth(), card_sample)
        # For a figure of arrays, the rows only indicate that the diagnostic exists.
        shown = [
            row
            for row in card_rows
            if drawing.required_array is None and any(need.matches(row) for need in drawing.needs)
        ]
        cards.append((card, select_field(shown) if drawing.by_field else shown))
    return cards


def _missing_models(rows: Rows, shown_runs: Collection[str]) -> str:
    """List the models missing from a card of slices, and whether they have no slice operator of Transolver's form
    (Transolver++ and LinearNO have others): the interventions disable each kind of operator that a model has, and so
    reveal which it has."""
    names = {
        row["run"]: model_label(row["model"])
        for row in with_unique_names(rows)
        if row["model"] not in TRIVIAL_BASELINES
    }
    tested = {row["run"] for row in rows if row.get("diagnostic") == "interventions"}
    sliced = {row["run"] for row in rows if row.get("diagnostic") == "interventions" and row["metric"] == ZERO_PHYSICAL}
    shown_names = {names[run] for run in shown_runs}
    missing = {run: name for run, name in names.items() if name not in shown_names}
    without = unique(name for run, name in missing.items() if run in tested - sliced)
    unknown = unique(name for run, name in missing.items() if name not in without)
    has = "has" if len(without) == 1 else "have"
    parts = [f" {_join(without)} {has} no slice operator of Transolver's form: not shown here."] if without else []
    parts += [f" No such records for {_join(unknown)}: not shown here."] if unknown else []
    return "".join(parts)


def _animations(rows: Rows, arrays: Arrays, dimensions: Dimensions) -> tuple[tuple[Maps, ...], tuple[str, ...]]:
    """Build one animation per case, field and plane, with every model that has the same cases, at their common leads;
    also return the models selected initially, each with its lowest seed.

    If they exceed `MAX_POINTS`, leads are dropped first, then cases, then fields.
    """
    map_rows = [row for row in rows if row.get("diagnostic") == "maps" and row["run"] in arrays]
    if not map_rows:
        return (), ()
    names, fields = run_titles(map_rows), unique(row["field"] for row in map_rows)
    first = arrays[next(iter(names))]
    comparable = {title: arrays[run] for run, title in names.items() if _same_truth(arrays[run], first)}
    leads, cases = shared_leads(list(comparable.values())), first["cases"].tolist()
    planes = _planes(first["truth"].shape[2:-1])
    points = sum(plane.cut(first["truth"][0, :1, ..., 0]).size for plane in planes) * (1 + 2 * len(comparable))
    lead_count = _count_that_fits(len(leads), points * len(cases) * len(fields), MIN_LEADS)
    case_count = _count_that_fits(len(cases), points * lead_count * len(fields))
    field_count = _count_that_fits(len(fields), points * lead_count * case_count)
    leads = tuple(leads[index] for index in evenly_spaced(len(leads), lead_count))
    truth, forecasts = at_leads(first, "truth", leads), {}
    for title, run_arrays in comparable.items():
        forecasts[title] = at_leads(run_arrays, "forecast", leads)
    animations = tuple(
        Maps(
            field,
            leads,
            plane.cut(truth[index, ..., channel]),
            {title: plane.cut(frames[index, ..., channel]) for title, frames in forecasts.items()},
            str(case),
            plane.name,
            dimensions.unit(field),
            (dimensions.axis(*plane.across), dimensions.axis(*plane.up)),
        )
        for index, case in enumerate(cases[:case_count])
        for channel, field in enumerate(fields[:field_count])
        for plane in planes
    )
    initial = tuple(title for run in runs_in(lowest_seeds(map_rows)) if (title := names[run]) in comparable)
    return animations, initial


def _same_truth(arrays: Mapping[str, np.ndarray], reference: Mapping[str, np.ndarray]) -> bool:
    """Return whether both have the same cases and truth at their common leads (at least one)."""
    leads = shared_leads([reference, arrays])
    truth, expected = (at_leads(source, "truth", leads) for source in (arrays, reference))
    return bool(leads) and np.array_equal(arrays["cases"], reference["cases"]) and np.array_equal(truth, expected)


def _count_that_fits(count: int, points: int, minimum: int = 1) -> int:
    """How many of `count` items of the given number of points fit into the size budget, at least `minimum`."""
    return min(count, max(minimum, MAX_POINTS // max(1, points)))


@dataclass(frozen=True)
class _Plane:
    """A 2-D view of (leads, *grid): the axes (number, points) pointing right and up, and the axis that is cut."""

    name: str
    across: tuple[int, int]
    up: tuple[int, int]
    through: int | None = None

    def cut(self, frames: np.ndarray) -> np.ndarray:
        if self.through is None:
            return frames
        plane: np.ndarray = frames.take(frames.shape[1 + self.through] // 2, axis=1 + self.through)
        return plane


def _planes(grid: tuple[int, ...]) -> list[_Plane]:
    """Planes to show: the grid itself, or the three middle planes of a volume; a 1-D grid has none."""
    axes = list(enumerate(grid))
    if len(axes) == 2:
        return [_Plane("", axes[0], axes[1])]
    if len(axes) == 3:
        x, y, z = axes
        return [_Plane("middle x", y, z, 0), _Plane("middle y", x, z, 1), _Plane("middle z", x, y, 2)]
    return []
