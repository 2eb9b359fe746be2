"""Fields as small pictures inside the page: one pixel of a grey PNG for each grid point, as data URIs.

The grey of a pixel is its level. Truth and forecasts cut [low, high] of their scale into 255 levels; 255 is odd, so
that the middle of the interval has a level of its own, and what lies outside takes the ends. Errors have levels by
their square root, up to the largest error of their lead: small errors stay apart beside large ones, and a reader may
scale them by lead or all alike. Level 255 is not finite. The page colours the levels with the colours of its bars. The
first axis of a field runs to the right and the last one up.
"""

from __future__ import annotations

import base64
import json
import struct
import zlib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from sigmasolver.report.digits import significant
from sigmasolver.report.study import Dimensions, Maps

__all__ = ["Film", "Scale", "Strip", "blown_up", "error_levels", "error_limit", "error_scale", "field_scale", "film"]

LEVELS = 255
NOT_FINITE = (136, 136, 136)
PLAIN, UP = 0, 2
"""Filters of a PNG."""
GREY, INDEXED = 0, 3
"""Colour types of a PNG."""
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
class Strip:
    """Forecast and error of one model, all leads below each other, and the relative L2 error of each frame."""

    model: str
    forecast: str
    error: str
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Film:
    """One case, field and plane; `facts` tells the page in JSON how to read the levels and what to write beside them.

    `tops` holds for each lead what the highest level of an error stands for, `limits` where a scale of its own ends.
    """

    maps: Maps
    values: Scale
    errors: Scale
    tops: tuple[float, ...]
    limits: tuple[float, ...]
    truth: str
    strips: tuple[Strip, ...]

    def facts(self, dimensions: Dimensions) -> str:
        maps = self.maps
        return json.dumps(
            {
                "case": maps.case,
                "field": maps.field,
                "unit": maps.unit,
                "plane": maps.plane,
                "leads": maps.leads,
                "times": [dimensions.time(lead) for lead in maps.leads],
                "size": maps.truth.shape[1:],
                "axes": [{"name": axis.name, "spacing": axis.spacing, "unit": axis.unit} for axis in maps.axes],
                "values": [self.values.low, self.values.high],
                "limit": self.errors.high,
                "limits": self.limits,
                "tops": self.tops,
            }
        )


def film(maps: Maps) -> Film:
    """The frames of a case, with one scale for truth and forecasts; errors also have one scale for each lead."""
    values, truth = field_scale(maps.truth), maps.truth.astype(np.float64)
    errors = {model: np.abs(forecast.astype(np.float64) - truth) for model, forecast in maps.forecasts.items()}
    kept = {model: ~blown_up(forecast, maps.truth) for model, forecast in maps.forecasts.items()}
    calm = [[error[lead] for model, error in errors.items() if kept[model][lead]] for lead in range(len(truth))]
    limits = tuple(error_limit(held, maps.truth) for held in calm)
    tops = tuple(max(limit, _largest(held)) for limit, held in zip(limits, calm, strict=True))
    strips = []
    for model, error in errors.items():
        levels = np.stack([error_levels(one, top) for one, top in zip(error, tops, strict=True)])
        notes = tuple(_ratio(one, true) for one, true in zip(error, maps.truth, strict=True))
        strips.append(Strip(model, _strip(values.levels(maps.forecasts[model])), _strip(levels), notes))
    return Film(maps, values, error_scale(maps), tops, limits, _strip(values.levels(maps.truth)), tuple(strips))


def error_levels(error: np.ndarray, top: float) -> np.ndarray:
    """The level of each error as uint8, (LEVELS - 1) √(error / top), at most that of `top`."""
    finite = np.isfinite(error)
    shares = np.sqrt(np.where(finite, error, 0.0) / top).clip(0, 1)
    return np.where(finite, np.rint(shares * (LEVELS - 1)), LEVELS).astype(np.uint8)


def _largest(errors: Iterable[np.ndarray]) -> float:
    return max((float(error[np.isfinite(error)].max(initial=0.0)) for error in errors), default=0.0)


def _strip(levels: np.ndarray) -> str:
    """The data URI of (leads, X, Y), the first lead on top."""
    upright = levels.transpose(0, 2, 1)[:, ::-1]
    return _data_uri(_png(upright.reshape(-1, upright.shape[-1])))


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


def _ratio(difference: np.ndarray, truth: np.ndarray) -> str:
    """The relative L2 error of one picture in per cent."""
    with np.errstate(divide="ignore", invalid="ignore"):
        text = significant(100 * float(np.linalg.norm(difference) / np.linalg.norm(truth.astype(np.float64))))
    return text if text[-1].isalpha() else f"{text} %"


def _png(levels: np.ndarray, palette: np.ndarray | None = None) -> bytes:
    """An 8-bit PNG, grey or indexed: each level keeps its exact grey or colour."""
    height, width = levels.shape
    # Every line begins with its filter. Smooth fields are small as differences to the line above, rough ones as levels.
    above = np.concatenate([np.zeros((1, width), np.uint8), levels[:-1]])
    filtered = {PLAIN: levels, UP: levels - above}
    lines = [np.insert(one, 0, number, axis=1).tobytes() for number, one in filtered.items()]
    packed = min((zlib.compress(one, 9) for one in lines), key=len)
    header = struct.pack(">IIBBBBB", width, height, 8, GREY if palette is None else INDEXED, 0, 0, 0)
    chunks = [(b"IHDR", header), *([] if palette is None else [(b"PLTE", palette.tobytes())]), (b"IDAT", packed)]
    body = (_chunk(kind, data) for kind, data in (*chunks, (b"IEND", b"")))
    return b"\x89PNG\r\n\x1a\n" + b"".join(body)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _data_uri(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode("ascii")
