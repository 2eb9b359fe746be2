"""What a page shows, as plain values that check themselves: curves, a table, maps of cases, and where it came from.

Errors are relative L2 norms as fractions (0.01 is one per cent), a mean over test samples; lead 1 is the first
predicted frame.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

__all__ = [
    "TRIVIAL_BASELINES",
    "Animation",
    "Axis",
    "Card",
    "Curve",
    "Dimensions",
    "Maps",
    "Opening",
    "Study",
    "Table",
]

TRIVIAL_BASELINES = {
    "persistence": "Persistence repeats the last known frame.",
    "training-mean": "Training-mean predicts the mean of the training fields.",
}
"""Forecasts that have learned nothing, and what they are: a model that does not beat them is of no use."""


@dataclass(frozen=True)
class Axis:
    """One side of a map: its name, the distance between neighbouring points (None: not known), and its unit."""

    name: str
    spacing: float | None = None
    unit: str = ""


@dataclass(frozen=True)
class Dimensions:
    """What frames, points and values are in physical terms; whatever is not known is None or empty."""

    step: float | None = None
    """Time from one frame to the next."""
    time_unit: str = ""
    lengths: tuple[float | None, ...] = ()
    """Of each axis: the period of a periodic one, else the distance of its outermost points."""
    periodic: tuple[bool, ...] = ()
    length_unit: str = ""
    units: Mapping[str, str] = field(default_factory=dict)
    """By field."""

    def time(self, lead: int) -> str:
        """When a lead is: "2.5 s", or "t = 2.5" without a unit; empty where that tells no more than the lead."""
        if self.step is None or (self.step == 1 and not self.time_unit):
            return ""
        value = f"{self.step * lead:.4g}"
        return f"{value} {self.time_unit}" if self.time_unit else f"t = {value}"

    def lead(self, lead: int) -> str:
        """A lead with its time: "lead 5 (2.5 s)"."""
        time = self.time(lead)
        return f"lead {lead} ({time})" if time else f"lead {lead}"

    def unit(self, name: str) -> str:
        """The unit of a field; empty for pure numbers."""
        unit = self.units.get(name, "")
        return "" if unit == "1" else unit

    def axis(self, place: int, points: int) -> Axis:
        """The axis of a map with so many points."""
        name = "xyz"[place]
        length = self.lengths[place] if place < len(self.lengths) else None
        steps = points if place < len(self.periodic) and self.periodic[place] else points - 1
        return Axis(name) if length is None or steps < 1 else Axis(name, length / steps, self.length_unit)


@dataclass(frozen=True)
class Curve:
    """The error of one model at each lead; an error that is not finite is a gap.

    `over_windows` and `over_seeds` are standard deviations at each lead, NaN or empty where not known; the mean is over
    so many `seeds`.
    """

    model: str
    leads: tuple[int, ...]
    errors: tuple[float, ...]
    over_windows: tuple[float, ...] = ()
    over_seeds: tuple[float, ...] = ()
    seeds: int = 1

    def __post_init__(self) -> None:
        if len(self.leads) != len(self.errors) or not self.leads:
            raise ValueError(
                f"The curve of {self.model} has {len(self.leads)} leads and {len(self.errors)} errors; pass one "
                "error per lead."
            )
        _check_leads(f"the curve of {self.model}", self.leads)
        if any(error < 0 for error in self.errors):
            raise ValueError(f"The curve of {self.model} has a negative error; relative errors must be at least 0.")
        for spread in (self.over_windows, self.over_seeds):
            if spread and (len(spread) != len(self.leads) or any(one < 0 for one in spread)):
                raise ValueError(f"The spread of {self.model} is {spread}; pass one deviation of at least 0 per lead.")

    def spread(self, kind: str) -> tuple[float, ...]:
        """The deviations over "windows" or "seeds", NaN where not known."""
        held = self.over_windows if kind == "windows" else self.over_seeds
        return held or (math.nan,) * len(self.leads)


@dataclass(frozen=True)
class Table:
    """Formatted cells, the first column naming the row. `bold` holds (row, column) of the best, `underlined` of the
    second best, `rules` the rows that have a line above them; all count from 0."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    bold: frozenset[tuple[int, int]] = frozenset()
    caption: str = "Comparison of the models."
    underlined: frozenset[tuple[int, int]] = frozenset()
    rules: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        for cells in self.rows:
            if len(cells) != len(self.columns):
                raise ValueError(
                    f"A table row has {len(cells)} cells for {len(self.columns)} columns: {', '.join(cells)}."
                )
        for words, cells_set in (("set in bold", self.bold), ("underline", self.underlined)):
            for row, column in cells_set:
                if not (0 <= row < len(self.rows) and 0 <= column < len(self.columns)):
                    raise ValueError(f"The table has no cell ({row}, {column}) to {words}; indices start at 0.")


@dataclass(frozen=True, eq=False)
class Maps:
    """One case that no model was trained on: `truth` and each forecast are (leads, X, Y) in the field's own `unit`.

    `case` tells several cases apart, `plane` the cuts through a volume, `axes` are those of X and Y.
    """

    field: str
    leads: tuple[int, ...]
    truth: np.ndarray
    forecasts: Mapping[str, np.ndarray]
    case: str = "1"
    plane: str = ""
    unit: str = ""
    axes: tuple[Axis, Axis] = (Axis("x"), Axis("y"))

    def __post_init__(self) -> None:
        _check_leads("the maps", self.leads)
        if self.truth.ndim != 3 or len(self.truth) != len(self.leads):
            raise ValueError(
                f"The truth of the maps has shape {self.truth.shape}; for {len(self.leads)} leads it must be "
                f"({len(self.leads)}, X, Y)."
            )
        for model, forecast in self.forecasts.items():
            if forecast.shape != self.truth.shape:
                raise ValueError(
                    f"The forecast of {model} has shape {forecast.shape} and the truth {self.truth.shape}; "
                    "both must show the same leads on the same grid."
                )
        if not np.isfinite(self.truth).any():
            raise ValueError("The truth of the maps has no finite value; choose another case.")


@dataclass(frozen=True)
class Card:
    """A drawing: the name of its file, heading, what it shows in words, how to read it, its width, and what it was
    measured on."""

    name: str
    title: str
    words: str
    caption: str
    svg: bytes
    inches: float
    sample: str = ""

    @property
    def narrow(self) -> bool:
        """Is there room beside it?"""
        return self.inches < 5


@dataclass(frozen=True)
class Animation:
    """An animated PNG, its last frame for readers who want nothing to move, and what it shows in words."""

    moving: bytes
    still: bytes
    words: str
    size: tuple[int, int]
    """Width and height in pixels."""


@dataclass(frozen=True)
class Opening:
    """What stands above a study: one forecast at work."""

    title: str
    summary: str
    animation: Animation
    table: Table


@dataclass(frozen=True)
class Study:
    """A comparison of trained models on one task; `facts` are pairs such as ("commit", "acc511d"), `sample` says what
    the curves were measured on.

    `films` are played frame by frame: one for each case, field and plane, every one with the same models, of which
    those in `shown` (empty: all) stand side by side at first. `records` are the rows that the page was made from, to
    be taken along.
    """

    title: str
    summary: str
    curves: tuple[Curve, ...]
    table: Table
    facts: tuple[tuple[str, str], ...]
    films: tuple[Maps, ...] = ()
    cards: tuple[Card, ...] = ()
    sample: str = ""
    dimensions: Dimensions = Dimensions()
    shown: tuple[str, ...] = ()
    records: Sequence[Mapping[str, Any]] = ()
    opening: Opening | None = None

    def __post_init__(self) -> None:
        if not self.curves:
            raise ValueError("The study has no curves; pass the errors per lead of at least one model.")
        names = [curve.model for curve in self.curves]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"The study has {names.count(name)} curves named {name}; give each its own name.")
        labels = [(film.case, film.field, film.plane) for film in self.films]
        if len(set(labels)) < len(labels):
            raise ValueError("Two animations show the same case, field and plane; use a different case for each.")
        if any(tuple(film.forecasts) != tuple(self.films[0].forecasts) for film in self.films):
            raise ValueError("The animations show different models; use the same models in all of them.")


def _check_leads(owner: str, leads: tuple[int, ...]) -> None:
    if not leads or leads[0] < 1 or any(later <= lead for lead, later in pairwise(leads)):
        raise ValueError(f"The leads of {owner} are {leads}; they must start at 1 or later and increase.")
