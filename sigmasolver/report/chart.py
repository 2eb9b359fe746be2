"""The geometry of the error curves: from leads and errors to coordinates of one SVG, on a linear and a log axis.

x is affine in the lead. y is affine in the error in per cent on the linear axis, which starts at zero, and affine in
its logarithm on the other; y grows downwards, as SVG counts. A band is one standard deviation to either side, cut off
at the frame. The template only writes out what is computed here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sigmasolver.report.digits import significant, spread
from sigmasolver.report.published import places
from sigmasolver.report.study import TRIVIAL_BASELINES, Curve, Dimensions

__all__ = ["Chart", "Panel", "Series", "chart", "gaps"]

WIDTH, HEIGHT = 720, 440
LEFT, RIGHT, TOP, BOTTOM = 44, 720, 44, 380
"""The sides of the plotting area inside the SVG."""
COLOURS = 6
"""How many curve colours the style sheet has; further models repeat them dashed."""
_CROWDED = 32
"""From this many leads on, single points are marked only where the reader points."""
BANDS = ("seeds", "windows")
"""What a spread may be over; the first that there is one of is shown first."""
_ROOM = 1.3
"""Times the largest error: no band makes the linear axis longer than that."""
_WIDE = 1000
"""Errors that differ by more than this factor are first shown on the log axis."""


@dataclass(frozen=True)
class Series:
    """One model on one axis: the path, (index of the lead, x, y) of every point on it, and the outlines of bands."""

    style: str
    path: str
    points: tuple[tuple[int, float, float], ...]
    bands: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Panel:
    """All models on one axis; ticks are (y, label)."""

    scale: str
    ticks: tuple[tuple[float, str], ...]
    series: tuple[Series, ...]


@dataclass(frozen=True)
class Cell:
    """What the error of one model reads at one lead, and the deviations in the order of the chart's bands."""

    text: str
    spread: tuple[str, ...] = ()


@dataclass(frozen=True)
class Row:
    """One lead: its number, its time, its x, and a cell for each model."""

    lead: int
    time: str
    x: float
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Chart:
    """Both axes over the same leads; `ticks` are (x, lead, time)."""

    models: tuple[str, ...]
    styles: tuple[str, ...]
    rows: tuple[Row, ...]
    ticks: tuple[tuple[float, str, str], ...]
    panels: tuple[Panel, ...]
    bands: tuple[str, ...]
    seeds: str
    time_label: str
    start: str
    crowded: bool
    notes: tuple[str, ...]
    words: str
    width: int = WIDTH
    height: int = HEIGHT
    left: int = LEFT
    right: int = RIGHT
    top: int = TOP
    bottom: int = BOTTOM


@dataclass(frozen=True)
class _Axis:
    scale: str
    low: float
    high: float
    ticks: tuple[float, ...]

    def y(self, per_cent: float) -> float | None:
        """None where there is nothing to draw: not finite, or not positive on the log axis."""
        if not math.isfinite(per_cent) or (self.scale == "log" and per_cent <= 0):
            return None
        low, value, high = (math.log(v) if self.scale == "log" else v for v in (self.low, per_cent, self.high))
        return round(BOTTOM - (BOTTOM - TOP) * (value - low) / (high - low), 2)


def chart(curves: Sequence[Curve], dimensions: Dimensions | None = None) -> Chart:
    """The drawing of these curves; the log axis is left out where no error is positive."""
    known = dimensions or Dimensions()
    leads = sorted({lead for curve in curves for lead in curve.leads})
    x = {lead: _x(lead, leads[0], leads[-1]) for lead in leads}
    finite = [100 * error for curve in curves for error in curve.errors if math.isfinite(error)]
    top = max(finite, default=0.0)
    reach = [
        100 * (error + deviation)
        for curve in curves
        for band in BANDS
        for error, deviation in zip(curve.errors, curve.spread(band), strict=True)
    ]
    axes = [_linear(max([top, *(min(value, _ROOM * top) for value in reach if math.isfinite(value))]))]
    if any(value > 0 for value in finite):
        axes.append(_log([value for value in finite if value > 0]))
    styles = _styles(curves)
    bands = tuple(band for band in BANDS if any(math.isfinite(one) for curve in curves for one in curve.spread(band)))
    timed = any(known.time(lead) for lead in leads)
    return Chart(
        models=tuple(curve.model for curve in curves),
        styles=styles,
        rows=tuple(
            Row(lead, known.time(lead), x[lead], tuple(_cell(curve, lead, bands) for curve in curves)) for lead in leads
        ),
        ticks=tuple(
            (x[lead], str(lead), f"{known.step * lead:.4g}" if timed and known.step is not None else "")
            for lead in _lead_ticks(leads)
        ),
        panels=tuple(
            Panel(
                axis.scale,
                tuple((y, _label(tick)) for tick in axis.ticks if (y := axis.y(tick)) is not None),
                tuple(_series(curve, style, axis, x, bands) for curve, style in zip(curves, styles, strict=True)),
            )
            for axis in axes
        ),
        bands=bands,
        seeds=_seeds(curves),
        time_label=(f"time ({known.time_unit})" if known.time_unit else "time") if timed else "",
        start=axes[-1].scale if _wide(finite) else "linear",
        crowded=len(leads) >= _CROWDED,
        notes=tuple(f"{curve.model}: {words}" for curve in curves if (words := gaps(curve))),
        words=_words(curves),
        height=HEIGHT + (20 if timed else 0),
    )


def _seeds(curves: Sequence[Curve]) -> str:
    """How many seeds the means are over: "3 seeds of each model"; empty where none has several."""
    counts = {curve.model: curve.seeds for curve in curves if curve.model not in TRIVIAL_BASELINES}
    several = set(counts.values())
    if several <= {1}:
        return ""
    if len(several) == 1:
        return f"{several.pop()} seeds of each model"
    return "seeds: " + ", ".join(f"{model} {count}" for model, count in counts.items())


def _cell(curve: Curve, lead: int, bands: Sequence[str]) -> Cell:
    if lead not in curve.leads:
        return Cell("–", ("",) * len(bands))
    place = curve.leads.index(lead)
    error, deviations = curve.errors[place], [curve.spread(band)[place] for band in bands]
    # The deviation has the decimals of its mean.
    told = (spread(100 * error, 100 * one).rpartition(" ")[2] if math.isfinite(one) else "" for one in deviations)
    return Cell(significant(100 * error), tuple(told))


def gaps(curve: Curve) -> str | None:
    """Where the errors of a curve are not finite, in words."""
    missing = [lead for lead, error in zip(curve.leads, curve.errors, strict=True) if not math.isfinite(error)]
    if not missing:
        return None
    if len(missing) == len(curve.leads):
        return "not finite at any lead"
    if tuple(missing) == curve.leads[-len(missing) :]:
        return f"not finite from lead {missing[0]}"
    listed = ", ".join(map(str, missing[:-1])) + " and " if len(missing) > 1 else ""
    return f"not finite at lead{'s' if len(missing) > 1 else ''} {listed}{missing[-1]}"


def _x(lead: int, first: int, last: int) -> float:
    share = (lead - first) / (last - first) if last > first else 0.5
    inset = 12  # keeps the first and last points off the frame
    return round(LEFT + inset + (RIGHT - LEFT - 2 * inset) * share, 2)


def _series(curve: Curve, style: str, axis: _Axis, x: dict[int, float], bands: Sequence[str]) -> Series:
    position = {lead: index for index, lead in enumerate(x)}
    runs: list[list[tuple[int, float, float]]] = [[]]
    for lead, error in zip(curve.leads, curve.errors, strict=True):
        y = axis.y(100 * error)
        if y is not None:
            runs[-1].append((position[lead], x[lead], y))
        elif runs[-1]:
            runs.append([])
    runs = [run for run in runs if run]
    # A point between two gaps is drawn to itself: with round ends it shows as a dot.
    drawn = (run if len(run) > 1 else run * 2 for run in runs)
    path = " ".join("M" + " L".join(f"{px:.2f},{py:.2f}" for _, px, py in run) for run in drawn)
    points = tuple(point for run in runs for point in run)
    return Series(style, path, points, tuple((band, d) for band in bands if (d := _band(curve, band, axis, x))))


def _band(curve: Curve, kind: str, axis: _Axis, x: dict[int, float]) -> str:
    """The outline of mean ± deviation, there and back, broken where either is not known; empty without any."""
    runs: list[list[tuple[float, float, float]]] = [[]]
    for lead, error, deviation in zip(curve.leads, curve.errors, curve.spread(kind), strict=True):
        if not math.isfinite(error + deviation) or (axis.scale == "log" and error <= 0):
            runs.append([])
            continue
        ends = [axis.y(min(max(100 * end, axis.low), axis.high)) for end in (error - deviation, error + deviation)]
        low, high = (BOTTOM if end is None else end for end in ends)
        runs[-1].append((x[lead], low, high))
    outlines = []
    for run in (run for run in runs if len(run) > 1):
        there = [f"{px:.2f},{high:.2f}" for px, _, high in run]
        back = [f"{px:.2f},{low:.2f}" for px, low, _ in reversed(run)]
        outlines.append("M" + " L".join([*there, *back]) + " Z")
    return " ".join(outlines)


def _styles(curves: Sequence[Curve]) -> tuple[str, ...]:
    """Class names of the style sheet: the colour that the model has in figures too, and dashes once all are taken."""
    taken = places([curve.model for curve in curves if curve.model not in TRIVIAL_BASELINES])
    styles = {
        model: f"s{place % COLOURS}" + (f" dash{min(place // COLOURS, 2)}" if place >= COLOURS else "")
        for model, place in taken.items()
    }
    return tuple(styles.get(curve.model, "yardstick") for curve in curves)


def _linear(top: float) -> _Axis:
    """From zero to a round number at or above the largest error, in four to seven round steps."""
    top = top or 1.0
    unit = 10.0 ** math.floor(math.log10(top / 4))
    step = next(factor * unit for factor in (1, 2, 2.5, 5, 10) if top / (factor * unit) <= 6)
    count = math.ceil(top / step - 1e-9)
    return _Axis("linear", 0.0, count * step, tuple(i * step for i in range(count + 1)))


def _log(values: Sequence[float]) -> _Axis:
    """Between the 1-2-5 numbers around the errors; over many decades only powers of ten carry a tick."""
    exponents = range(math.floor(math.log10(min(values))) - 1, math.ceil(math.log10(max(values))) + 2)
    marks = [factor * 10.0**exponent for exponent in exponents for factor in (1, 2, 5)]
    low = max(mark for mark in marks if mark <= min(values))
    high = min(mark for mark in marks if mark > low and mark >= max(values))
    ticks = [mark for mark in marks if low <= mark <= high]
    if len(ticks) > 8:
        decades = [10.0**exponent for exponent in exponents if low <= 10.0**exponent <= high]
        ticks = decades[:: math.ceil(len(decades) / 8)]
    return _Axis("log", low, high, tuple(ticks))


def _wide(values: Sequence[float]) -> bool:
    positive = [value for value in values if value > 0]
    return bool(positive) and max(positive) > _WIDE * min(positive)


def _label(tick: float) -> str:
    """Short enough for the margin: 250, 0.5, 2e6."""
    if 1e-3 <= tick < 1e4 or tick == 0:
        return f"{tick:g}"
    mantissa, _, exponent = f"{tick:.2e}".partition("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def _lead_ticks(leads: Sequence[int]) -> list[int]:
    """All leads while they are few, else multiples of a round step, and the first where there is room."""
    if len(leads) <= 10:
        return list(leads)
    span = leads[-1] - leads[0]
    step = next(s * 10**e for e in range(10) for s in (1, 2, 5) if span / (s * 10**e) <= 10)
    ticks = [lead for lead in leads if lead % step == 0]
    return [leads[0], *ticks] if ticks and 2 * (ticks[0] - leads[0]) > step else ticks or [leads[0], leads[-1]]


def _words(curves: Sequence[Curve]) -> str:
    """The drawing for those who cannot see it."""
    parts = []
    for curve in curves:
        ends = sorted({0, len(curve.leads) - 1})
        said = ", ".join(f"{significant(100 * curve.errors[i])} at lead {curve.leads[i]}" for i in ends)
        parts.append(f"{curve.model} {said}")
    return "Relative L2 error in per cent over lead. " + "; ".join(parts) + "."
