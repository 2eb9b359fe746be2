"""Geometry of the error curves: map leads and errors to SVG coordinates, on a linear and a log axis.

x is affine in the lead. y is affine in the error in per cent on the linear axis, which starts at zero, and in its
logarithm on the log axis; y points down, as in SVG. A band is one standard deviation to either side, clipped to the
plotting area. The template only prints the values computed here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sigmasolver.report.digits import significant, spread
from sigmasolver.report.published import colour_indices
from sigmasolver.report.study import TRIVIAL_BASELINES, Curve, Dimensions

__all__ = ["Chart", "Panel", "Series", "chart", "gaps"]

WIDTH, HEIGHT = 720, 440
LEFT, RIGHT, TOP, BOTTOM = 44, 720, 44, 380
"""Bounds of the plotting area inside the SVG."""
COLOURS = 6
"""Number of curve colours in the style sheet; further models reuse them with dashes."""
_MARKER_LIMIT = 32
"""From this many leads on, markers are shown on hover only."""
BANDS = ("seeds", "windows")
"""Kinds of spread, in order of preference for the initial view."""
_MAX_HEADROOM = 1.3
"""Upper limit of the linear axis due to bands, relative to the largest error."""
_LOG_RATIO = 1000
"""Errors that differ by more than this factor open on the log axis."""


@dataclass(frozen=True)
class Series:
    """One model on one axis: its path, (lead index, x, y) of every point, and the outlines of its bands."""

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
    """Formatted error of one model at one lead, and its deviations in the order of the bands of the chart."""

    text: str
    spread: tuple[str, ...] = ()


@dataclass(frozen=True)
class Row:
    """One lead: number, time, x coordinate, and a cell per model."""

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
        """y coordinate; None if the value is not finite, or not positive on the log axis."""
        if not math.isfinite(per_cent) or (self.scale == "log" and per_cent <= 0):
            return None
        low, value, high = (math.log(v) if self.scale == "log" else v for v in (self.low, per_cent, self.high))
        return round(BOTTOM - (BOTTOM - TOP) * (value - low) / (high - low), 2)


def chart(curves: Sequence[Curve], dimensions: Dimensions | None = None) -> Chart:
    """Compute the chart of the curves; without a positive error there is no log axis."""
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
    axes = [_linear(max([top, *(min(value, _MAX_HEADROOM * top) for value in reach if math.isfinite(value))]))]
    if any(value > 0 for value in finite):
        axes.append(_log([value for value in finite if value > 0]))
    styles = _styles(curves)
    bands = tuple(
        band for band in BANDS if any(math.isfinite(deviation) for curve in curves for deviation in curve.spread(band))
    )
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
        start=axes[-1].scale if _needs_log_axis(finite) else "linear",
        crowded=len(leads) >= _MARKER_LIMIT,
        notes=tuple(f"{curve.model}: {text}" for curve in curves if (text := gaps(curve))),
        words=_alt_text(curves),
        height=HEIGHT + (20 if timed else 0),
    )


def _seeds(curves: Sequence[Curve]) -> str:
    """Number of seeds behind the means, "3 seeds of each model"; empty if every model has one."""
    counts = {curve.model: curve.seeds for curve in curves if curve.model not in TRIVIAL_BASELINES}
    distinct = set(counts.values())
    if distinct <= {1}:
        return ""
    if len(distinct) == 1:
        return f"{distinct.pop()} seeds of each model"
    return "seeds: " + ", ".join(f"{model} {count}" for model, count in counts.items())


def _cell(curve: Curve, lead: int, bands: Sequence[str]) -> Cell:
    if lead not in curve.leads:
        return Cell("–", ("",) * len(bands))
    index = curve.leads.index(lead)
    error, deviations = curve.errors[index], [curve.spread(band)[index] for band in bands]
    # Format the deviation with the decimals of its mean.
    texts = (
        spread(100 * error, 100 * deviation).rpartition(" ")[2] if math.isfinite(deviation) else ""
        for deviation in deviations
    )
    return Cell(significant(100 * error), tuple(texts))


def gaps(curve: Curve) -> str | None:
    """Describe the leads at which the errors of a curve are not finite."""
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
    segments: list[list[tuple[int, float, float]]] = [[]]
    for lead, error in zip(curve.leads, curve.errors, strict=True):
        y = axis.y(100 * error)
        if y is not None:
            segments[-1].append((position[lead], x[lead], y))
        elif segments[-1]:
            segments.append([])
    segments = [segment for segment in segments if segment]
    # A single point between two gaps becomes a zero-length line; round line caps render it as a dot.
    drawn = (segment if len(segment) > 1 else segment * 2 for segment in segments)
    path = " ".join("M" + " L".join(f"{px:.2f},{py:.2f}" for _, px, py in segment) for segment in drawn)
    points = tuple(point for segment in segments for point in segment)
    return Series(style, path, points, tuple((band, d) for band in bands if (d := _band(curve, band, axis, x))))


def _band(curve: Curve, kind: str, axis: _Axis, x: dict[int, float]) -> str:
    """Closed outline of mean ± deviation, split at gaps; empty if there is none."""
    segments: list[list[tuple[float, float, float]]] = [[]]
    for lead, error, deviation in zip(curve.leads, curve.errors, curve.spread(kind), strict=True):
        if not math.isfinite(error + deviation) or (axis.scale == "log" and error <= 0):
            segments.append([])
            continue
        ends = [axis.y(min(max(100 * end, axis.low), axis.high)) for end in (error - deviation, error + deviation)]
        low, high = (BOTTOM if end is None else end for end in ends)
        segments[-1].append((x[lead], low, high))
    outlines = []
    for segment in (segment for segment in segments if len(segment) > 1):
        upper = [f"{px:.2f},{high:.2f}" for px, _, high in segment]
        lower = [f"{px:.2f},{low:.2f}" for px, low, _ in reversed(segment)]
        outlines.append("M" + " L".join([*upper, *lower]) + " Z")
    return " ".join(outlines)


def _styles(curves: Sequence[Curve]) -> tuple[str, ...]:
    """CSS classes: the same colour as in figures, with dashes once all colours are used."""
    colours = colour_indices([curve.model for curve in curves if curve.model not in TRIVIAL_BASELINES])
    styles = {
        model: f"s{colour % COLOURS}" + (f" dash{min(colour // COLOURS, 2)}" if colour >= COLOURS else "")
        for model, colour in colours.items()
    }
    return tuple(styles.get(curve.model, "yardstick") for curve in curves)


def _linear(top: float) -> _Axis:
    """Axis from zero to a round number at or above the largest error, in four to seven round steps."""
    top = top or 1.0
    unit = 10.0 ** math.floor(math.log10(top / 4))
    step = next(factor * unit for factor in (1, 2, 2.5, 5, 10) if top / (factor * unit) <= 6)
    count = math.ceil(top / step - 1e-9)
    return _Axis("linear", 0.0, count * step, tuple(i * step for i in range(count + 1)))


def _log(values: Sequence[float]) -> _Axis:
    """Axis between the 1-2-5 numbers around the errors; over many decades only powers of ten have ticks."""
    exponents = range(math.floor(math.log10(min(values))) - 1, math.ceil(math.log10(max(values))) + 2)
    candidates = [factor * 10.0**exponent for exponent in exponents for factor in (1, 2, 5)]
    low = max(candidate for candidate in candidates if candidate <= min(values))
    high = min(candidate for candidate in candidates if candidate > low and candidate >= max(values))
    ticks = [candidate for candidate in candidates if low <= candidate <= high]
    if len(ticks) > 8:
        decades = [10.0**exponent for exponent in exponents if low <= 10.0**exponent <= high]
        ticks = decades[:: math.ceil(len(decades) / 8)]
    return _Axis("log", low, high, tuple(ticks))


def _needs_log_axis(values: Sequence[float]) -> bool:
    positive = [value for value in values if value > 0]
    return bool(positive) and max(positive) > _LOG_RATIO * min(positive)


def _label(tick: float) -> str:
    """Tick label short enough for the margin: 250, 0.5, 2e6."""
    if 1e-3 <= tick < 1e4 or tick == 0:
        return f"{tick:g}"
    mantissa, _, exponent = f"{tick:.2e}".partition("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def _lead_ticks(leads: Sequence[int]) -> list[int]:
    """All leads if there are few, else multiples of a round step, and the first lead if there is room."""
    if len(leads) <= 10:
        return list(leads)
    span = leads[-1] - leads[0]
    step = next(s * 10**e for e in range(10) for s in (1, 2, 5) if span / (s * 10**e) <= 10)
    ticks = [lead for lead in leads if lead % step == 0]
    return [leads[0], *ticks] if ticks and 2 * (ticks[0] - leads[0]) > step else ticks or [leads[0], leads[-1]]


def _alt_text(curves: Sequence[Curve]) -> str:
    """Alternative text of the chart for screen readers."""
    parts = []
    for curve in curves:
        ends = sorted({0, len(curve.leads) - 1})
        values = ", ".join(f"{significant(100 * curve.errors[i])} at lead {curve.leads[i]}" for i in ends)
        parts.append(f"{curve.model} {values}")
    return "Relative L2 error in per cent over lead. " + "; ".join(parts) + "."
