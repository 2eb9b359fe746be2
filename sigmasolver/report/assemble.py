"""The study of a page from the records of runs: what was evaluated, and whatever was diagnosed.

Nothing but the evaluation is required. A diagnostic that only some runs have is shown for those.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sigmasolver.report.digits import significant
from sigmasolver.report.figures import FIGURES, Material
from sigmasolver.report.figures.layers import run_titles
from sigmasolver.report.figures.style import style
from sigmasolver.report.published import TASK_LABELS, model_label
from sigmasolver.report.rows import (
    Arrays,
    Rows,
    at_leads,
    evaluated,
    evenly,
    in_order,
    lowest_seeds,
    runs_in,
    select,
    shared_leads,
    spread_of,
)
from sigmasolver.report.study import YARDSTICKS, Card, Curve, Maps, Study
from sigmasolver.report.tables import comparison, curves, named_apart

__all__ = ["few_leads", "study_of"]

EVALUATION = evaluated(
    "parameters", "relative_l2", "relative_l2_lead", "relative_l2_final", "relative_l2_joint", "relative_l2_joint_lead"
)
ACROSS = 5
"""Leads that stand beside each other on a page, at most."""
ROOM = 9_000_000
"""Points that all films of a page have together; a point is a byte before the text encoding makes four of three."""


@dataclass(frozen=True)
class _Kind:
    title: str
    words: str
    caption: str


CARDS = {
    "teacher-forcing": _Kind(
        "One step, and many",
        "Error over leads from the true history and from own forecasts, for each model.",
        "Teacher-forced: every call starts from the truth. Free: every call starts from its own forecasts. A model "
        "with the better single step need not have the better rollout.",
    ),
    "decomposition": _Kind(
        "Where the error comes from",
        "Energy of the error over leads, split into injection, propagation and their cross term, for each model.",
        "Injection is what one call adds from the true history, propagation what it makes of the error it was given, "
        "the cross term how the two line up (below zero they cancel). The three sum to the total exactly.",
    ),
    "corrections": _Kind(
        "How strongly slices correct each other",
        "Learned scale and realised size of the slice correction in every layer, for each run.",
        "A layer whose correction is small leaves its physical states nearly as they were averaged.",
    ),
    "routing": _Kind(
        "Where points are sent",
        "Maps of the routing of points to slices and matrices of attention between slices.",
        "Bright points of a map are read into that slice; a row of a matrix says from which slices it is corrected.",
    ),
    "spectra": _Kind(
        "Energy at each scale",
        "Energy over the wavenumber of the truth and of every model at several leads, and the ratio of the two.",
        "Where a forecast lies below the truth it has smoothed that scale away; where it lies above, it has made "
        "energy up.",
    ),
    "components": _Kind(
        "How errors grow at each scale",
        "Error of the history at large and small scales over leads with two bounds, and the gains they are made of.",
        "The bound from measured amplifications holds for the windows that were looked at. The other is made of norms "
        "found by iteration, which are lower estimates: it is no guarantee, and the truth may lie above it.",
    ),
    "efficiency": _Kind(
        "What it costs",
        "Peak memory over the time of an epoch, with the storage of the parameters as the area of the mark.",
        "Measured as the paper does it, on the machine named below.",
    ),
}
"""The drawings that a page may have, in its order."""


def study_of(rows: Rows, arrays: Mapping[str, Arrays], title: str | None = None) -> Study:
    """`rows` of all runs, evaluated and diagnosed; `arrays` by diagnostic and run."""
    tasks = in_order(row["task"] for row in rows)
    if len(tasks) > 1:
        raise ValueError(f"The runs are of the tasks {', '.join(tasks)}; make one page for each task.")
    held = _labelled(named_apart(select(rows, EVALUATION, yardsticks=True)))
    drawn = curves(held)
    films = _films(rows, arrays.get("maps", {}))
    name = TASK_LABELS.get(tasks[0], tasks[0])
    return Study(
        title=title or f"{name}: forecasts compared",
        summary=" ".join((_what(held), *_who(drawn), *_why(rows))),
        curves=drawn,
        table=comparison(held),
        maps=few_leads(_one_seed(films[0], rows)) if films else None,
        facts=_facts(held),
        films=films,
        cards=tuple(_cards(rows, arrays)),
    )


def _labelled(rows: Rows) -> Rows:
    """The models by the names that the drawings give them."""
    return [{**row, "model": model_label(row["model"])} for row in rows]


def few_leads(maps: Maps) -> Maps:
    """The first, the last and some between, few enough to stand beside each other."""
    kept = evenly(len(maps.leads), ACROSS)
    return replace(
        maps,
        leads=tuple(maps.leads[place] for place in kept),
        truth=maps.truth[kept],
        forecasts={name: one[kept] for name, one in maps.forecasts.items()},
    )


def _one_seed(maps: Maps, rows: Rows) -> Maps:
    """Each model once, with its lowest seed."""
    shown = [row for row in rows if row.get("diagnostic") == "maps"]
    names = run_titles(shown)
    kept = {names[run] for run in runs_in(lowest_seeds(shown))}
    return replace(maps, forecasts={name: one for name, one in maps.forecasts.items() if name in kept})


def _what(rows: Rows) -> str:
    first = rows[0]
    grid = " × ".join(map(str, first["grid"]))
    return (
        f"Free forecasts of {first['horizon']} frames on a grid of {grid}, from {first['windows']} starts that no "
        "model was trained on."
    )


def _who(drawn: Sequence[Curve]) -> list[str]:
    """Who is ahead at the first and at the last lead, and whether the yardstick is beaten."""
    models = [curve for curve in drawn if curve.model not in YARDSTICKS]
    first, last = (min(models, key=lambda curve: _finite(curve.errors[place])) for place in (0, -1))
    one, two = (significant(100 * best.errors[place]) for best, place in ((first, 0), (last, -1)))
    leads = models[0].leads
    if len(leads) == 1:
        sentences = [f"At lead {leads[0]} {first.model} is ahead with {one} %."]
    elif first is last:
        sentences = [f"At lead {leads[0]} and at lead {leads[-1]} {first.model} is ahead, with {one} and {two} %."]
    else:
        ahead = f"at lead {leads[-1]} {last.model} with {two} %"
        sentences = [f"At lead {leads[0]} {first.model} is ahead with {one} %, {ahead}."]
    for yardstick in (curve for curve in drawn if curve.model in YARDSTICKS):
        behind = [curve.model for curve in models if _finite(curve.errors[-1]) >= yardstick.errors[-1]]
        what = f"{yardstick.model} has {significant(100 * yardstick.errors[-1])} % there"
        lost = f"; {', '.join(behind)} no longer beat{'s' if len(behind) == 1 else ''} it" if behind else ""
        sentences.append(f"{what[0].upper()}{what[1:]}{lost}.")
    return sentences


def _finite(error: float) -> float:
    """What is not finite is the largest error of all."""
    return error if math.isfinite(error) else math.inf


def _why(rows: Rows) -> list[str]:
    """How much of the last error is carried on."""
    shares = [row for row in rows if row.get("diagnostic") == "decomposition" and row["metric"] == "propagation_share"]
    shares = [row for row in _labelled(named_apart(shares)) if row["field"] is None] if shares else []
    if not shares:
        return []
    last = max(row["lead"] for row in shares)
    means = spread_of([row for row in shares if row["lead"] == last], "model")
    parts = [f"{significant(100 * mean)} % for {model}" for (model,), (mean, _) in means.items()]
    return [f"Of the error energy at lead {last}, errors carried on from earlier frames are {', '.join(parts)}."]


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


def _cards(rows: Rows, arrays: Mapping[str, Arrays]) -> list[Card]:
    made = []
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
        sheet = io.BytesIO()
        with style():
            figure = drawing.draw(Material(mine, held))
            figure.savefig(sheet, format="svg", metadata={"Date": None})
        made.append(Card(kind.title, kind.words, kind.caption, sheet.getvalue(), figure.get_figwidth()))
    return made


def _films(rows: Rows, arrays: Arrays) -> tuple[Maps, ...]:
    """One film for each case, field and plane, with every model that shows the same cases, at the leads that all have.

    Where they would not fit into `ROOM`, there are fewer leads, then fewer cases, then fewer fields.
    """
    shown = [row for row in rows if row.get("diagnostic") == "maps" and row["run"] in arrays]
    if not shown:
        return ()
    names, fields = run_titles(shown), in_order(row["field"] for row in shown)
    first = arrays[next(iter(names))]
    same = {title: arrays[run] for run, title in names.items() if _alike(arrays[run], first)}
    leads, cases = shared_leads(list(same.values())), first["cases"].tolist()
    planes = _planes(first["truth"].ndim - 3)
    points = sum(cut(first["truth"][0, :1, ..., 0]).size for _, cut in planes) * (1 + 2 * len(same))
    across = _fitting(len(leads), points * len(cases) * len(fields), ACROSS)
    down = _fitting(len(cases), points * across * len(fields))
    deep = _fitting(len(fields), points * across * down)
    leads = tuple(leads[place] for place in evenly(len(leads), across))
    truth, forecasts = at_leads(first, "truth", leads), {}
    for title, held in same.items():
        forecasts[title] = at_leads(held, "forecast", leads)
    return tuple(
        Maps(field, leads, cut(truth[place, ..., channel]),
             {title: cut(frames[place, ..., channel]) for title, frames in forecasts.items()}, str(case), plane)
        for place, case in enumerate(cases[:down])
        for channel, field in enumerate(fields[:deep])
        for plane, cut in planes
    )  # fmt: skip


def _alike(held: Mapping[str, np.ndarray], first: Mapping[str, np.ndarray]) -> bool:
    """Do both show the same truth, at least at one lead?"""
    leads = shared_leads([first, held])
    own, other = (at_leads(one, "truth", leads) for one in (held, first))
    return bool(leads) and np.array_equal(held["cases"], first["cases"]) and np.array_equal(own, other)


def _fitting(count: int, points: int, least: int = 1) -> int:
    """How many of `count` things of so many points there is room for, and no less than `least` of them."""
    return min(count, max(least, ROOM // max(1, points)))


def _planes(axes: int) -> list[tuple[str, Any]]:
    """How to cut (leads, *grid) down to pictures; a line has none."""
    if axes == 2:
        return [("", lambda frames: frames)]
    if axes == 3:
        return [
            (f"middle {letter}", lambda frames, axis=axis: frames.take(frames.shape[axis] // 2, axis=axis))
            for axis, letter in enumerate("xyz", start=1)
        ]
    return []
