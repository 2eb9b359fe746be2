"""Fields as small pictures inside the page: one PNG pixel for each grid point, as data URIs.

A scale cuts [low, high] into 255 levels of a matplotlib colour map; 255 is odd, so that the middle of the interval has
a level of its own. What lies outside takes the end colours; what is not finite is grey. The first axis of a field runs
to the right and the last one up.
"""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from sigmasolver.report.digits import significant
from sigmasolver.report.study import Maps

__all__ = [
    "Cell",
    "Film",
    "Gallery",
    "Row",
    "Scale",
    "Strip",
    "blown_up",
    "error_limit",
    "error_scale",
    "field_scale",
    "film",
    "gallery",
]

LEVELS = 255
NOT_FINITE = (136, 136, 136)
PLAIN, UP = 0, 2
"""Filters of a PNG."""
PERCENTILE = 99.5
"""Of the errors, where their scale ends (app:rollout-case-studies)."""
BLOWN_UP = 10.0
"""Times the largest norm of the truth: a forecast beyond it has blown up, as `metrics.blow_up` has it."""


@dataclass(frozen=True)
class Scale:
    """A colour map over [low, high]."""

    colours: str
    low: float
    high: float

    def levels(self, values: np.ndarray) -> np.ndarray:
        """The level of each value as uint8; `LEVELS` itself where it is not finite."""
        values = np.asarray(values, dtype=np.float64)
        finite = np.isfinite(values)
        shares = (np.where(finite, values, self.low) - self.low) / (self.high - self.low)
        return np.where(finite, np.rint(shares.clip(0, 1) * (LEVELS - 1)), LEVELS).astype(np.uint8)

    def palette(self) -> np.ndarray:
        """(LEVELS + 1, 3) as uint8, the colour of values that are not finite last."""
        from matplotlib import colormaps

        colours = colormaps[self.colours](np.linspace(0, 1, LEVELS), bytes=True)[:, :3]
        return np.concatenate([colours, np.array([NOT_FINITE])]).astype(np.uint8)

    def picture(self, field: np.ndarray) -> str:
        """The data URI of a field (X, Y)."""
        return _data_uri(_png(self.levels(field).T[::-1], self.palette()))

    def strip(self, fields: np.ndarray) -> str:
        """The data URI of fields (leads, X, Y), the first on top."""
        levels = self.levels(fields).transpose(0, 2, 1)[:, ::-1]
        return _data_uri(_png(levels.reshape(-1, levels.shape[-1]), self.palette()))

    def bar(self) -> str:
        """The data URI of the colour bar: one row of pixels from low to high."""
        return _data_uri(_png(np.arange(LEVELS, dtype=np.uint8)[None], self.palette()))

    def numbers(self) -> tuple[str, str, str]:
        """What stands at the ends and in the middle of the bar."""
        low, middle, high = (
            "0" if value == 0 else significant(value).replace("-", "−")
            for value in (self.low, (self.low + self.high) / 2, self.high)
        )
        return low, middle, high


@dataclass(frozen=True)
class Cell:
    """One picture, what it shows in words, and a number to set below it."""

    picture: str
    words: str
    note: str


@dataclass(frozen=True)
class Row:
    """Pictures of one kind (truth, forecast, error), one for each lead."""

    model: str
    kind: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Gallery:
    """All pictures of one case: the truth, then the forecast and the error of every model."""

    field: str
    leads: tuple[int, ...]
    size: tuple[int, int]
    values: Scale
    errors: Scale
    rows: tuple[Row, ...]


def gallery(maps: Maps) -> Gallery:
    """The pictures of a case, with one scale for truth and forecasts and one for all errors."""
    values, errors = field_scale(maps.truth), error_scale(maps)
    rows = [Row("", "truth", tuple(_cells(values, maps.truth, maps, "truth")))]
    for model, forecast in maps.forecasts.items():
        rows.append(Row(model, "forecast", tuple(_cells(values, forecast, maps, f"forecast of {model}"))))
        difference = np.abs(forecast.astype(np.float64) - maps.truth)
        notes = [_ratio(d, t) for d, t in zip(difference, maps.truth, strict=True)]
        rows.append(Row(model, "error", tuple(_cells(errors, difference, maps, f"error of {model}", notes))))
    size = maps.truth.shape[1], maps.truth.shape[2]
    return Gallery(maps.field, maps.leads, size, values, errors, tuple(rows))


@dataclass(frozen=True)
class Strip:
    """All leads of one picture below each other, and what to read at each of them."""

    picture: str
    notes: str


@dataclass(frozen=True)
class Film:
    """One case, field and plane; `strips` holds for each model its forecast and its error."""

    case: str
    field: str
    plane: str
    leads: tuple[int, ...]
    size: tuple[int, int]
    values: Scale
    errors: Scale
    truth: Strip
    strips: tuple[tuple[str, Strip, Strip], ...]


def film(maps: Maps) -> Film:
    """The frames of a case for the player, with scales made as those of `gallery`."""
    values, errors = field_scale(maps.truth), error_scale(maps)
    strips = []
    for model, forecast in maps.forecasts.items():
        difference = np.abs(forecast.astype(np.float64) - maps.truth)
        notes = "|".join(_ratio(d, t) for d, t in zip(difference, maps.truth, strict=True))
        strips.append((model, Strip(values.strip(forecast), ""), Strip(errors.strip(difference), notes)))
    size = maps.truth.shape[1], maps.truth.shape[2]
    truth = Strip(values.strip(maps.truth), "")
    return Film(maps.case, maps.field, maps.plane, maps.leads, size, values, errors, truth, tuple(strips))


def field_scale(truth: np.ndarray) -> Scale:
    """The scale of the truth, for its forecasts too, so that a forecast that runs away cannot dim the others.

    Symmetric about zero where the field has both signs, else from its smallest to its largest value.
    """
    finite = truth[np.isfinite(truth)].astype(np.float64)
    low, high = float(finite.min()), float(finite.max())
    if low < 0 < high:
        bound = max(-low, high)
        return Scale("RdBu_r", -bound, bound)
    return Scale("viridis", low, high) if low < high else Scale("viridis", low - 0.5, high + 0.5)


def error_scale(maps: Maps) -> Scale:
    """One for all models and leads, from zero to `error_limit` of the frames that have not blown up."""
    kept = ((forecast, ~blown_up(forecast, maps.truth)) for forecast in maps.forecasts.values())
    errors = [np.abs(forecast[stays].astype(np.float64) - maps.truth[stays]) for forecast, stays in kept]
    return Scale("magma", 0.0, error_limit(errors, maps.truth))


def error_limit(errors: Iterable[np.ndarray], truth: np.ndarray) -> float:
    """The 99.5th percentile of all these errors; where there are none but zeros, the largest magnitude of the truth."""
    pooled = np.concatenate([np.zeros(0), *(np.ravel(error) for error in errors)])
    pooled = pooled[np.isfinite(pooled)]
    top = float(np.percentile(pooled, PERCENTILE)) if pooled.size else 0.0
    return top or float(np.abs(truth[np.isfinite(truth)]).max()) or 1.0


def blown_up(forecast: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Of each lead of (leads, ...), is the forecast not finite or out of all proportion to the truth?

    The errors of such a frame would hide those of all others, so they have no say in the scale.
    """
    known = np.isfinite(truth)
    held = (np.where(known, one, 0).reshape(len(one), -1).astype(np.float64) for one in (forecast, truth))
    sizes, true = (np.linalg.norm(one, axis=1) for one in held)
    largest = true.max()
    return ~(sizes <= (BLOWN_UP * largest if largest else np.finfo(np.float64).max))  # a NaN is not ≤ anything


def _cells(scale: Scale, fields: np.ndarray, maps: Maps, what: str, notes: list[str] | None = None) -> Iterator[Cell]:
    for index, (lead, field) in enumerate(zip(maps.leads, fields, strict=True)):
        note = notes[index] if notes else ""
        words = f"{maps.field}, {what}, lead {lead}" + (f", relative L2 {note}" if note else "")
        yield Cell(scale.picture(field), words, note)


def _ratio(difference: np.ndarray, truth: np.ndarray) -> str:
    """The relative L2 error of one picture in per cent."""
    with np.errstate(divide="ignore", invalid="ignore"):
        text = significant(100 * float(np.linalg.norm(difference) / np.linalg.norm(truth.astype(np.float64))))
    return text if text[-1].isalpha() else f"{text} %"


def _png(levels: np.ndarray, palette: np.ndarray) -> bytes:
    """An 8-bit indexed PNG: a third of the size of true colour, and each level keeps its exact colour."""
    height, width = levels.shape
    # Every line begins with its filter. Smooth fields are small as differences to the line above, rough ones as levels.
    above = np.concatenate([np.zeros((1, width), np.uint8), levels[:-1]])
    filtered = {PLAIN: levels, UP: levels - above}
    lines = [np.insert(one, 0, number, axis=1).tobytes() for number, one in filtered.items()]
    packed = min((zlib.compress(one, 9) for one in lines), key=len)
    header = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"PLTE", palette.tobytes()), (b"IDAT", packed))
    body = (_chunk(kind, data) for kind, data in (*chunks, (b"IEND", b"")))
    return b"\x89PNG\r\n\x1a\n" + b"".join(body)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _data_uri(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode("ascii")
