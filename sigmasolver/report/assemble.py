"""The study of a page from the records of runs: what was evaluated, and whatever was diagnosed.

Nothing but the evaluation is required. A diagnostic that only some runs have is shown for those.
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
from sigmasolver.report.figures.style import light_and_dark, style
from sigmasolver.report.published import TASK_LABELS, by_method, model_label
from sigmasolver.report.rows import (
    ALL,
    Arrays,
    Row,
    Rows,
    at_leads,
    evaluated,
    evenly,
    in_order,
    lowest_seeds,
    named_apart,
    of_field,
    runs_in,
    select,
    shared_leads,
    spread_of,
)
from sigmasolver.report.sample import sample_of, timing_of
from sigmasolver.report.study import TRIVIAL_BASELINES, Card, Curve, Dimensions, Maps, Study
from sigmasolver.report.tables import HORIZON, LEAD, OVER_FIELDS, PARAMETERS, comparison, curves

__all__ = ["headline", "study_of"]

EVALUATION = evaluated(
    "parameters", "relative_l2", "relative_l2_lead", "relative_l2_final", "relative_l2_joint", "relative_l2_joint_lead"
)
PHYSICAL = "zero_physical"
"""The error of a forecast without its slice operators, which only a model with such operators has."""
LEAST = 5
"""Leads that a film keeps however little room there is."""
ROOM = 9_000_000
"""Points that all films of a page have together; a point is a byte before the text encoding makes four of three."""


@dataclass(frozen=True)
class _Kind:
    title: str
    words: str
    caption: str
    over_leads: bool = True
    of_slices: bool = False
    """Is it defined only for models with slices?"""


CARDS = {
    "teacher-forcing": _Kind(
        "Single step and rollout",
        "Error over leads from the true history and from the model's own forecasts, for each model.",
        "Teacher-forced: every call starts from the truth. Free: every call starts from previous forecasts. A model "
        "with the better single step does not necessarily have the better rollout.",
    ),
    "decomposition": _Kind(
        "Where the error comes from",
        "Error energy over leads, split into injection, propagation and their cross term, for each model.",
        "Injection is the error of one call from the true history, propagation the effect of earlier errors, and "
        "the cross term their alignment (negative: they partly cancel). The three sum exactly to the total.",
    ),
    "corrections": _Kind(
        "How strongly slices correct each other",
        "Learned scale and measured size of the slice correction in every layer, for each run.",
        "A layer with a small correction leaves its slice states nearly unchanged.",
        over_leads=False,
        of_slices=True,
    ),
    "routing": _Kind(
        "How points are routed",
        "Maps of the routing of points to slices, and attention matrices between slices.",
        "Bright points of a map contribute to that slice; a row of a matrix shows which slices correct it.",
        over_leads=False,
        of_slices=True,
    ),
    "spectra": _Kind(
        "Energy at each scale",
        "Energy over wavenumber for the truth and every model at several leads, and their ratio.",
        "Below the truth, a forecast has smoothed that scale; above it, the forecast has added spurious energy.",
    ),
    "components": _Kind(
        "How errors grow at each scale",
        "History error at large and small scales over leads with two bounds, and the gains behind them.",
        "The bound from measured amplifications holds for the evaluated windows. The other is built from norms "
        "found by iteration, which are lower estimates: it is no guarantee, and the true error may lie above it.",
    ),
    "efficiency": _Kind(
        "Cost",
        "Peak memory over epoch time; the area of a marker is the size of the parameters.",
        "Time of a training epoch and peak memory of one update; bars are one standard deviation over timings.",
        over_leads=False,
    ),
}
"""The drawings that a page may have, in its order."""


def study_of(
    rows: Rows, arrays: Mapping[str, Arrays], title: str | None = None, dimensions: Dimensions | None = None
) -> Study:
    """`rows` of all runs, evaluated and diagnosed; `arrays` by diagnostic and run; `dimensions` of their data."""
    tasks = in_order(row["task"] for row in rows)
    if len(tasks) > 1:
        raise ValueError(f"The runs belong to several tasks ({', '.join(tasks)}); make one page per task.")
    rows = by_method(rows)
    known, taken = dimensions or Dimensions(), select(rows, EVALUATION, yardsticks=True)
    held = _labelled(named_apart(taken))
    drawn, sample = curves(held), sample_of(held)
    films, shown = _films(rows, arrays.get("maps", {}), known)
    cards = _cards(rows, arrays, sample, known)
    name = TASK_LABELS.get(tasks[0], tasks[0])
    return Study(
        title=title or f"{name}: forecasts compared",
        summary=" ".join((_what(held, sample), *headline(drawn, known), *_why(rows, known))),
        curves=drawn,
        table=comparison(held, known),
        facts=_facts(held),
        films=films,
        cards=tuple(card for card, _ in cards),
        sample=sample,
        dimensions=known,
        shown=shown,
        records=_each_once(taken, [row for _, mine in cards for row in mine]),
    )


def _each_once(measured: Rows, drawn: Rows) -> list[Row]:
    """The rows of the curves and the table, those of a yardstick from the first run that has them, and those drawn;
    models have the names that they were trained by."""
    kept: dict[Any, Row] = {}
    for row in measured:
        if row["metric"] in (LEAD, HORIZON, PARAMETERS):
            place = (row["model"], row["metric"], row["field"], row["lead"])
            kept.setdefault(place if row["model"] in TRIVIAL_BASELINES else id(row), row)
    held = (kept | {id(row): row for row in drawn}).values()
    return [{**row, "model": row["form"]} if "form" in row else row for row in held]


def _labelled(rows: Rows) -> Rows:
    """The models by the names that the drawings give them."""
    return [{**row, "model": model_label(row["model"])} for row in rows]


def _what(rows: Rows, sample: str) -> str:
    grids = in_order(" × ".join(map(str, row["grid"])) for row in rows)
    norm = f" Errors are relative L2 norms, {OVER_FIELDS}." if any(row["field"] == ALL for row in rows) else ""
    return f"Free forecasts on a grid of {' or '.join(grids)}, on data not used for training: {sample}.{norm}"


def headline(drawn: Sequence[Curve], known: Dimensions) -> list[str]:
    """Who is ahead at the first and at the last lead, models and yardsticks alike, and who does not beat these."""
    models = [curve for curve in drawn if curve.model not in TRIVIAL_BASELINES]
    leads = [lead for lead in models[0].leads if all(lead in curve.leads for curve in models)] or models[0].leads
    first, last = leads[0], leads[-1]
    (names, error), (later, other) = (_ahead(drawn, lead) for lead in (first, last))
    verb = "is" if len(names) == 1 else "are"
    start, end = known.lead(first), known.lead(last)
    if first == last:
        sentences = [f"At {start}, {_listed(names)} {verb} best with {error}."]
    elif names == later:
        sentences = [f"At {start} and at {end}, {_listed(names)} {verb} best, with {error} and {other}."]
    else:
        sentences = [f"At {start}, {_listed(names)} {verb} best with {error}; at {end}, {_listed(later)} with {other}."]
    for lead, who in {first: names, last: later}.items():
        level = [name for name in _level(drawn, who[0], lead) if name not in who]
        if level:
            verb = "is" if len(level) == 1 else "are"
            sentences.append(f"At lead {lead}, {_listed(level)} {verb} equally good within the spread over seeds.")
        if set(who) <= set(TRIVIAL_BASELINES):
            best, own = _ahead(models, lead)
            sentences.append(f"The best model at lead {lead} is {_listed(best)} with {own}.")
    for yardstick in (curve for curve in drawn if curve.model in TRIVIAL_BASELINES):
        told: dict[str, list[str]] = {}
        for curve in models:
            told.setdefault(_against(curve, yardstick), []).append(curve.model)
        lost = [
            f"; {_listed(who)} {words.format('s' if len(who) == 1 else '')}" for words, who in told.items() if words
        ]
        sentences.append(
            f"{yardstick.model.capitalize()} has {_per_cent(yardstick.errors[-1])} at lead {yardstick.leads[-1]}"
            f"{''.join(lost)}."
        )
    return sentences


def _ahead(drawn: Sequence[Curve], lead: int) -> tuple[list[str], str]:
    """Those with the lowest error at a lead, with all that read the same, and the error."""
    errors = {one.model: _finite(one.errors[one.leads.index(lead)]) for one in drawn if lead in one.leads}
    best = _per_cent(min(errors.values()))
    return [model for model, error in errors.items() if _per_cent(error) == best], best


def _level(drawn: Sequence[Curve], best: str, lead: int) -> list[str]:
    """Those whose distance from the best at a lead is no more than both spreads over seeds explain."""
    found = {}
    for curve in drawn:
        if lead in curve.leads:
            place = curve.leads.index(lead)
            found[curve.model] = curve.errors[place], curve.spread("seeds")[place]
    error, spread = found[best]
    return [name for name, (own, other) in found.items() if own - error <= math.hypot(spread, other)]


def _against(curve: Curve, yardstick: Curve) -> str:
    """Where a model beats a yardstick, of the leads that both have; empty where it does so at every one."""
    own, other = (dict(zip(one.leads, one.errors, strict=True)) for one in (curve, yardstick))
    shared = [lead for lead in curve.leads if lead in other]
    beaten = [lead for lead in shared if _finite(own[lead]) < _finite(other[lead])]
    if beaten == shared:
        return ""
    if not beaten:
        return "never beat{} it"
    if beaten == shared[: len(beaten)]:
        return f"no longer beat{{}} it after lead {beaten[-1]}"
    return f"beat{{}} it at {len(beaten)} of {len(shared)} leads"


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _per_cent(error: float) -> str:
    return f"{significant(100 * error)} %" if math.isfinite(error) else significant(error)


def _finite(error: float) -> float:
    """What is not finite is the largest error of all."""
    return error if math.isfinite(error) else math.inf


def _why(rows: Rows, known: Dimensions) -> list[str]:
    """How much of the last error is carried on."""
    shares = [row for row in rows if row.get("diagnostic") == "decomposition" and row["metric"] == "propagation_share"]
    shares = [row for row in _labelled(named_apart(shares)) if row["field"] is None] if shares else []
    if not shares:
        return []
    models = in_order(row["model"] for row in shares)
    last = {model: max(row["lead"] for row in shares if row["model"] == model) for model in models}
    means = spread_of([row for row in shares if row["lead"] == last[row["model"]]], "model")
    leads = in_order(last.values())
    parts = [
        f"{significant(100 * mean)} % for {model}" + ("" if len(leads) == 1 else f" at {known.lead(last[model])}")
        for (model,), (mean, _) in means.items()
    ]
    where = f"at {known.lead(leads[0])}" if len(leads) == 1 else "at the last lead"
    return [
        f"The share of the error energy {where} that is propagated from earlier frames is {', '.join(parts)} "
        f"({sample_of(shares)})."
    ]


def _facts(rows: Rows) -> tuple[tuple[str, str], ...]:
    def listed(key: str) -> str:
        return ", ".join(str(value) for value in in_order(row.get(key) for row in rows) if value is not None)

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


def _cards(rows: Rows, arrays: Mapping[str, Arrays], sample: str, known: Dimensions) -> list[tuple[Card, Rows]]:
    """Each with the rows that it shows. It says what it was measured on, and where that is not what the errors of the
    page were measured on."""
    made: list[tuple[Card, Rows]] = []
    for name, kind in CARDS.items():
        drawing = FIGURES[name]
        having = [{row["run"] for row in rows if need.takes(row)} for need in drawing.needs]
        runs = set.intersection(*having)
        if drawing.arrays is not None:
            runs &= {run for run, held in arrays.get(drawing.arrays, {}).items() if drawing.shows in (None, *held)}
        mine = [row for row in rows if row["run"] in runs]
        if not mine:
            continue
        held = {run: arrays[drawing.arrays][run] for run in runs_in(mine)} if drawing.arrays else {}
        with style():
            figure = drawing.draw(Material(mine, held))
        own = drawing.sample(mine)
        other = f" (the errors at the top: {sample})" if own != sample and drawing.words is not timing_of else ""
        leads = [row["lead"] for row in mine if row.get("lead") is not None]
        time = known.time(max(leads)) if kind.over_leads and leads else ""
        when = f" Lead {max(leads)} is at {time}." if time else ""
        absent = _left_out(rows, runs) if kind.of_slices else ""
        caption = f"{kind.caption}{when} Measured on {own}{other}.{absent}"
        card = Card(name, kind.title, kind.words, caption, light_and_dark(figure), figure.get_figwidth(), own)
        # Where a diagnostic draws its arrays, its rows only tell that it was made.
        told = [row for row in mine if drawing.shows is None and any(need.takes(row) for need in drawing.needs)]
        made.append((card, of_field(told) if drawing.by_field else told))
    return made


def _left_out(rows: Rows, shown: Collection[str]) -> str:
    """Who is missing where slices are shown, and whether for want of them: silencing the operators of every kind that a
    model has tells which it has."""
    names = {
        row["run"]: model_label(row["model"]) for row in named_apart(rows) if row["model"] not in TRIVIAL_BASELINES
    }
    tried = {row["run"] for row in rows if row.get("diagnostic") == "interventions"}
    sliced = {row["run"] for row in rows if row.get("diagnostic") == "interventions" and row["metric"] == PHYSICAL}
    there = {names[run] for run in shown}
    absent = {run: name for run, name in names.items() if name not in there}
    without = in_order(name for run, name in absent.items() if run in tried - sliced)
    unknown = in_order(name for run, name in absent.items() if name not in without)
    has = "has" if len(without) == 1 else "have"
    parts = [f" {_listed(without)} {has} no slices: not shown here."] if without else []
    parts += [f" No such records for {_listed(unknown)}: not shown here."] if unknown else []
    return "".join(parts)


def _films(rows: Rows, arrays: Arrays, known: Dimensions) -> tuple[tuple[Maps, ...], tuple[str, ...]]:
    """One film for each case, field and plane, with every model that shows the same cases, at the leads that all have;
    and the models that stand side by side at first, each once with its lowest seed.

    Where they would not fit into `ROOM`, there are fewer leads, then fewer cases, then fewer fields.
    """
    shown = [row for row in rows if row.get("diagnostic") == "maps" and row["run"] in arrays]
    if not shown:
        return (), ()
    names, fields = run_titles(shown), in_order(row["field"] for row in shown)
    first = arrays[next(iter(names))]
    same = {title: arrays[run] for run, title in names.items() if _alike(arrays[run], first)}
    leads, cases = shared_leads(list(same.values())), first["cases"].tolist()
    planes = _planes(first["truth"].shape[2:-1])
    points = sum(plane.cut(first["truth"][0, :1, ..., 0]).size for plane in planes) * (1 + 2 * len(same))
    across = _fitting(len(leads), points * len(cases) * len(fields), LEAST)
    down = _fitting(len(cases), points * across * len(fields))
    deep = _fitting(len(fields), points * across * down)
    leads = tuple(leads[place] for place in evenly(len(leads), across))
    truth, forecasts = at_leads(first, "truth", leads), {}
    for title, held in same.items():
        forecasts[title] = at_leads(held, "forecast", leads)
    films = tuple(
        Maps(
            field,
            leads,
            plane.cut(truth[place, ..., channel]),
            {title: plane.cut(frames[place, ..., channel]) for title, frames in forecasts.items()},
            str(case),
            plane.name,
            known.unit(field),
            (known.axis(*plane.across), known.axis(*plane.up)),
        )
        for place, case in enumerate(cases[:down])
        for channel, field in enumerate(fields[:deep])
        for plane in planes
    )
    once = tuple(title for run in runs_in(lowest_seeds(shown)) if (title := names[run]) in same)
    return films, once


def _alike(held: Mapping[str, np.ndarray], first: Mapping[str, np.ndarray]) -> bool:
    """Do both show the same truth, at least at one lead?"""
    leads = shared_leads([first, held])
    own, other = (at_leads(one, "truth", leads) for one in (held, first))
    return bool(leads) and np.array_equal(held["cases"], first["cases"]) and np.array_equal(own, other)


def _fitting(count: int, points: int, least: int = 1) -> int:
    """How many of `count` things of so many points there is room for, and no less than `least` of them."""
    return min(count, max(least, ROOM // max(1, points)))


@dataclass(frozen=True)
class _Plane:
    """A picture of (leads, *grid): the axes (number, points) that run right and up, and the one that is cut."""

    name: str
    across: tuple[int, int]
    up: tuple[int, int]
    through: int | None = None

    def cut(self, frames: np.ndarray) -> np.ndarray:
        if self.through is None:
            return frames
        return frames.take(frames.shape[1 + self.through] // 2, axis=1 + self.through)


def _planes(grid: tuple[int, ...]) -> list[_Plane]:
    """The grid itself, the middle planes of a volume; a line has none."""
    axes = list(enumerate(grid))
    if len(axes) == 2:
        return [_Plane("", axes[0], axes[1])]
    if len(axes) == 3:
        x, y, z = axes
        return [_Plane("middle x", y, z, 0), _Plane("middle y", x, z, 1), _Plane("middle z", x, y, 2)]
    return []
