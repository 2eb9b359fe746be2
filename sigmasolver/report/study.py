"""What a page shows, as plain values that check themselves: curves, a table, maps of one case, and where it came from.

Errors are relative L2 norms as fractions (0.01 is one per cent), a mean over test samples; lead 1 is the first
predicted frame.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

__all__ = ["YARDSTICKS", "Card", "Curve", "Maps", "Study", "Table"]

YARDSTICKS = {
    "persistence": "Persistence repeats the last known frame.",
    "training-mean": "Training-mean gives the mean of the training fields.",
}
"""Forecasts that have learned nothing, and what they are: a model that does not beat them is of no use."""


@dataclass(frozen=True)
class Curve:
    """The error of one model at each lead; an error that is not finite is a gap."""

    model: str
    leads: tuple[int, ...]
    errors: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.leads) != len(self.errors) or not self.leads:
            raise ValueError(
                f"The curve of {self.model} has {len(self.leads)} leads and {len(self.errors)} errors; "
                "give one error for each lead."
            )
        _check_leads(f"the curve of {self.model}", self.leads)
        if any(error < 0 for error in self.errors):
            raise ValueError(f"The curve of {self.model} has a negative error; a relative error is a norm.")


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
                    f"A row of the table has {len(cells)} cells for {len(self.columns)} columns: {', '.join(cells)}."
                )
        for words, cells_set in (("set in bold", self.bold), ("underline", self.underlined)):
            for row, column in cells_set:
                if not (0 <= row < len(self.rows) and 0 <= column < len(self.columns)):
                    raise ValueError(f"The table has no cell ({row}, {column}) to {words}; both count from 0.")


@dataclass(frozen=True, eq=False)
class Maps:
    """One case that no model was trained on: `truth` and each forecast are (leads, X, Y) in the field's own unit.

    `case` tells several cases apart, `plane` the cuts through a volume.
    """

    field: str
    leads: tuple[int, ...]
    truth: np.ndarray
    forecasts: Mapping[str, np.ndarray]
    case: str = "1"
    plane: str = ""

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
    """A drawing with its heading, what it shows in words, how to read it, and how wide it is."""

    title: str
    words: str
    caption: str
    svg: bytes
    inches: float

    @property
    def narrow(self) -> bool:
        """Is there room beside it?"""
        return self.inches < 5


@dataclass(frozen=True)
class Study:
    """A comparison of trained models on one task; `facts` are pairs such as ("commit", "acc511d"), `sample` says what
    the curves were measured on.

    `films` are played frame by frame: one for each case, field and plane, every one with the same models.
    """

    title: str
    summary: str
    curves: tuple[Curve, ...]
    table: Table
    maps: Maps | None
    facts: tuple[tuple[str, str], ...]
    films: tuple[Maps, ...] = ()
    cards: tuple[Card, ...] = ()
    sample: str = ""

    def __post_init__(self) -> None:
        if not self.curves:
            raise ValueError("The study has no curves; give the errors per lead of at least one model.")
        names = [curve.model for curve in self.curves]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"The study has {names.count(name)} curves named {name}; give each its own name.")
        labels = [(film.case, film.field, film.plane) for film in self.films]
        if len(set(labels)) < len(labels):
            raise ValueError("Two films show the same case, field and plane; give each its own case.")
        if any(tuple(film.forecasts) != tuple(self.films[0].forecasts) for film in self.films):
            raise ValueError("The films show different models; give every film the forecasts of the same models.")


def _check_leads(owner: str, leads: tuple[int, ...]) -> None:
    if not leads or leads[0] < 1 or any(later <= lead for lead, later in pairwise(leads)):
        raise ValueError(f"The leads of {owner} are {leads}; they must start at 1 or later and increase.")
