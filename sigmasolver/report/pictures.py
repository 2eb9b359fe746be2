"""Encode fields as small greyscale PNGs with one pixel per grid point, embedded in the page as data URIs.

The grey value of a pixel is its level. Truth and forecasts quantize [low, high] of their scale into 255 levels, an odd
number, so that the midpoint has a level of its own; values outside are clipped. Errors are quantized by their square
root, up to the largest error of their lead: this resolves small errors next to large ones, and the page can scale them
per lead or globally. Level 255 means not finite. The page applies the colour maps of its colour bars to the levels. The
first axis of a field points right and the last one up.
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
from sigmasolver.report.errors import blown_up, percent_text, relative_l2
from sigmasolver.report.study import Dimensions, Maps

__all__ = [
    "Animation",
    "FrameStrip",
    "Scale",
    "encode_animation",
    "error_levels",
    "error_limit",
    "error_scale",
    "field_scale",
]

LEVELS = 255
NOT_FINITE = (136, 136, 136)
NO_FILTER, UP_FILTER = 0, 2
"""PNG filter types."""
GREY, INDEXED = 0, 3
"""PNG colour types."""
PERCENTILE = 99.5
"""Percentile of the errors at which their scale ends (app:rollout-case-studies)."""


@dataclass(frozen=True)
class Scale:
    """A colour map on [low, high]."""

    colours: str
    low: float
    high: float

    def levels(self, values: np.ndarray) -> np.ndarray:
        """Quantize values to uint8 levels; non-finite values become `LEVELS`."""
        values = np.asarray(values, dtype=np.float64)
        finite = np.isfinite(values)
        fractions = (np.where(finite, values, self.low) - self.low) / (self.high - self.low)
        return np.where(finite, np.rint(fractions.clip(0, 1) * (LEVELS - 1)), LEVELS).astype(np.uint8)

    def palette(self) -> np.ndarray:
        """RGB palette (LEVELS + 1, 3) as uint8; the last entry is for non-finite values."""
        from matplotlib import colormaps

        colours = colormaps[self.colours](np.linspace(0, 1, LEVELS), bytes=True)[:, :3]
        return np.concatenate([colours, np.array([NOT_FINITE])]).astype(np.uint8)

    def bar(self) -> str:
        """Data URI of the colour bar: one row of pixels from low to high."""
        return _data_uri(_png(np.arange(LEVELS, dtype=np.uint8)[None], self.palette()))

    def numbers(self) -> tuple[str, str, str]:
        """Labels at the start, middle and end of the colour bar."""
        low, middle, high = (
            "0" if value == 0 else significant(value).replace("-", "−")
            for value in (self.low, (self.low + self.high) / 2, self.high)
        )
        return low, middle, high


@dataclass(frozen=True)
class FrameStrip:
    """Forecast and error images of one model, leads stacked vertically, and the relative L2 error of each frame."""

    model: str
    forecast: str
    error: str
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Animation:
    """One case, field and plane; `facts` is the JSON metadata with which the page decodes and labels the levels.

    `tops` holds for each lead the error value of the highest level, `limits` the end of the error scale of that lead.
    """

    maps: Maps
    values: Scale
    errors: Scale
    tops: tuple[float, ...]
    limits: tuple[float, ...]
    truth: str
    strips: tuple[FrameStrip, ...]

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


def encode_animation(maps: Maps) -> Animation:
    """Encode the frames of a case, with one scale for truth and forecasts; errors also have one scale per lead."""
    values, truth = field_scale(maps.truth), maps.truth.astype(np.float64)
    errors = {model: np.abs(forecast.astype(np.float64) - truth) for model, forecast in maps.forecasts.items()}
    valid = {model: ~blown_up(forecast, maps.truth) for model, forecast in maps.forecasts.items()}
    valid_errors = [
        [error[lead] for model, error in errors.items() if valid[model][lead]] for lead in range(len(truth))
    ]
    limits = tuple(error_limit(errors_at_lead, maps.truth) for errors_at_lead in valid_errors)
    tops = tuple(
        max(limit, _largest(errors_at_lead)) for limit, errors_at_lead in zip(limits, valid_errors, strict=True)
    )
    strips = []
    for model, error in errors.items():
        levels = np.stack([error_levels(frame, top) for frame, top in zip(error, tops, strict=True)])
        notes = tuple(percent_text(relative_l2(frame, true)) for frame, true in zip(error, maps.truth, strict=True))
        forecast = _encode_strip(values.levels(maps.forecasts[model]))
        strips.append(FrameStrip(model, forecast, _encode_strip(levels), notes))
    truth_strip = _encode_strip(values.levels(maps.truth))
    return Animation(maps, values, error_scale(maps), tops, limits, truth_strip, tuple(strips))


def error_levels(error: np.ndarray, top: float) -> np.ndarray:
    """Quantize errors to uint8 levels (LEVELS - 1) √(error / top), clipped at `top`."""
    finite = np.isfinite(error)
    fractions = np.sqrt(np.where(finite, error, 0.0) / top).clip(0, 1)
    return np.where(finite, np.rint(fractions * (LEVELS - 1)), LEVELS).astype(np.uint8)


def _largest(errors: Iterable[np.ndarray]) -> float:
    return max((float(error[np.isfinite(error)].max(initial=0.0)) for error in errors), default=0.0)


def _encode_strip(levels: np.ndarray) -> str:
    """Data URI of levels (leads, X, Y), the first lead on top."""
    images = levels.transpose(0, 2, 1)[:, ::-1]
    return _data_uri(_png(images.reshape(-1, images.shape[-1])))


def field_scale(truth: np.ndarray) -> Scale:
    """Scale of the truth, also used for forecasts, so that a diverging forecast cannot wash out the others.

    Symmetric about zero if the field has both signs, else from its minimum to its maximum.
    """
    finite = truth[np.isfinite(truth)].astype(np.float64)
    low, high = float(finite.min()), float(finite.max())
    if low < 0 < high:
        bound = max(-low, high)
        return Scale("RdBu_r", -bound, bound)
    return Scale("viridis", low, high) if low < high else Scale("viridis", low - 0.5, high + 0.5)


def error_scale(maps: Maps) -> Scale:
    """One error scale for all models and leads, from zero to `error_limit` of the frames that have not blown up."""
    forecasts = ((forecast, ~blown_up(forecast, maps.truth)) for forecast in maps.forecasts.values())
    errors = [np.abs(forecast[valid].astype(np.float64) - maps.truth[valid]) for forecast, valid in forecasts]
    return Scale("magma", 0.0, error_limit(errors, maps.truth))


def error_limit(errors: Iterable[np.ndarray], truth: np.ndarray) -> float:
    """99.5th percentile of the pooled errors; if that is zero, the largest magnitude of the truth."""
    pooled = np.concatenate([np.zeros(0), *(np.ravel(error) for error in errors)])
    pooled = pooled[np.isfinite(pooled)]
    top = float(np.percentile(pooled, PERCENTILE)) if pooled.size else 0.0
    return top or float(np.abs(truth[np.isfinite(truth)]).max()) or 1.0


def _png(levels: np.ndarray, palette: np.ndarray | None = None) -> bytes:
    """Encode an 8-bit PNG, greyscale or indexed, without loss."""
    height, width = levels.shape
    # Every scanline starts with its filter type. Smooth fields compress better with the Up filter, rough ones without.
    above = np.concatenate([np.zeros((1, width), np.uint8), levels[:-1]])
    filtered = {NO_FILTER: levels, UP_FILTER: levels - above}
    scanlines = [np.insert(rows, 0, filter_type, axis=1).tobytes() for filter_type, rows in filtered.items()]
    packed = min((zlib.compress(data, 9) for data in scanlines), key=len)
    header = struct.pack(">IIBBBBB", width, height, 8, GREY if palette is None else INDEXED, 0, 0, 0)
    chunks = [(b"IHDR", header), *([] if palette is None else [(b"PLTE", palette.tobytes())]), (b"IDAT", packed)]
    body = (_chunk(kind, data) for kind, data in (*chunks, (b"IEND", b"")))
    return b"\x89PNG\r\n\x1a\n" + b"".join(body)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _data_uri(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode("ascii")
