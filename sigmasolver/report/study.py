"""Contents of a report page as validated dataclasses: curves, a table, maps of cases, and provenance.

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
    "AnimatedPng",
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
"""Forecasts without any training, with a description; a useful model must beat them."""


@dataclass(frozen=True)
class Axis:
    """Axis of a map: its name, grid spacing (None: unknown), and unit."""

    name: str
    spacing: float | None = None
    unit: str = ""


@dataclass(frozen=True)
class Dimensions:
    """Physical units of frames, grid points and values; None or empty if unknown."""

    step: float | None = None
    """Time between frames."""
    time_unit: str = ""
    lengths: tuple[float | None, ...] = ()
    """Length per axis: the period if periodic, else the distance between the outermost points."""
    periodic: tuple[bool, ...] = ()
    length_unit: str = ""
    units: Mapping[str, str] = field(default_factory=dict)
    """Unit per field."""

    def time(self, lead: int) -> str:
        """Time of a lead: "2.5 s", or "t = 2.5" without a unit; empty if it would only repeat the lead."""
        if self.step is None or (self.step == 1 and not self.time_unit):
            return ""
        value = f"{self.step * lead:.4g}"
        return f"{value} {self.time_unit}" if self.time_unit else f"t = {value}"

    def lead(self, lead: int) -> str:
        """Lead with its time: "lead 5 (2.5 s)"."""
        time = self.time(lead)
        return f"lead {lead} ({time})" if time else f"lead {lead}"

    def unit(self, name: str) -> str:
        """Unit of a field; empty if dimensionless."""
        unit = self.units.get(name, "")
        return "" if unit == "1" else unit

    def axis(self, index: int, points: int) -> Axis:
        """Axis of a map with the given number of points."""
        name = "xyz"[index]
        length = self.lengths[index] if index < len(self.lengths) else None
        steps = points if index < len(self.periodic) and self.periodic[index] else points - 1
        return Axis(name) if length is None or steps < 1 else Axis(name, length / steps, self.length_unit)


@dataclass(frozen=True)
class Curve:
    """Error of one model per lead; a non-finite error leaves a gap.

    `over_windows` and `over_seeds` are standard deviations per lead, NaN or empty if unknown; `seeds` is the number of
    seeds behind the mean.
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
            if spread and (len(spread) != len(self.leads) or any(deviation < 0 for deviation in spread)):
                raise ValueError(f"The spread of {self.model} is {spread}; pass one deviation of at least 0 per lead.")

    def spread(self, kind: str) -> tuple[float, ...]:
        """Standard deviations over "windows" or "seeds", NaN if unknown."""
        deviations = self.over_windows if kind == "windows" else self.over_seeds
        return deviations or (math.nan,) * len(self.leads)


@dataclass(frozen=True)
class Table:
    """Formatted cells; the first column names the row. `bold` holds (row, column) of the best cells, `underlined` of
    the second best, `rules` the rows with a rule above them; indices start at 0."""

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
        for action, marked in (("set in bold", self.bold), ("underline", self.underlined)):
            for row, column in marked:
                if not (0 <= row < len(self.rows) and 0 <= column < len(self.columns)):
                    raise ValueError(f"The table has no cell ({row}, {column}) to {action}; indices start at 0.")


@dataclass(frozen=True, eq=False)
class Maps:
    """One held-out case: `truth` and each forecast are (leads, X, Y) in the `unit` of the field.

    `case` identifies the case, `plane` the cut through a volume; `axes` belong to X and Y.
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
    """A figure: file name, heading, alt text (`words`), caption, SVG, width in inches, and the sample behind its
    numbers."""

    name: str
    title: str
    words: str
    caption: str
    svg: bytes
    inches: float
    sample: str = ""

    @property
    def narrow(self) -> bool:
        """Whether the caption fits next to the figure."""
        return self.inches < 5


@dataclass(frozen=True)
class AnimatedPng:
    """An animated PNG, its last frame for readers who prefer reduced motion, and its alt text (`words`)."""

    moving: bytes
    still: bytes
    words: str
    size: tuple[int, int]
    """Width and height in pixels."""


@dataclass(frozen=True)
class Opening:
    """Section above a study that demonstrates one forecast."""

    title: str
    summary: str
    animation: AnimatedPng
    table: Table


@dataclass(frozen=True)
class Study:
    """A comparison of trained models on one task; `facts` are pairs such as ("commit", "acc511d"), `sample`
    describes the sample behind the curves.

    `animations` has one entry for each case, field and plane, all with the same models; those in `shown` (empty: all)
    are selected initially. `records` are the rows behind the page, offered as a download.
    """

    title: str
    summary: str
    curves: tuple[Curve, ...]
    table: Table
    facts: tuple[tuple[str, str], ...]
    animations: tuple[Maps, ...] = ()
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
        labels = [(animation.case, animation.field, animation.plane) for animation in self.animations]
        if len(set(labels)) < len(labels):
            raise ValueError("Two animations show the same case, field and plane; use a different case for each.")
        if any(tuple(animation.forecasts) != tuple(self.animations[0].forecasts) for animation in self.animations):
            raise ValueError("The animations show different models; use the same models in all of them.")


def _check_leads(owner: str, leads: tuple[int, ...]) -> None:
    if not leads or leads[0] < 1 or any(later <= lead for lead, later in pairwise(leads)):
        raise ValueError(f"The leads of {owner} are {leads}; they must start at 1 or later and increase.")
