"""A forecast as a moving picture: truth, forecast and error beside each other, lead after lead, as an animated PNG.

It has one palette of 256 colours: `SHARE` of them for the field, as many for its error, the others for the labels. The
same picture as a GIF is twice as large.
"""

from __future__ import annotations

import io

import numpy as np

from sigmasolver.report.digits import significant
from sigmasolver.report.pictures import NOT_FINITE, Scale, error_scale, field_scale
from sigmasolver.report.study import Animation, Dimensions, Maps

__all__ = ["animate"]

SHARE = 120
"""Colours of each scale."""
BACKGROUND, INK, SOFT = (255, 255, 255), (27, 27, 27), (106, 106, 106)
GAP, HEAD, TEXT = 5, 11, 7
"""Between the panels, above them, and of the letters; in grid points, so that a larger picture has larger letters."""
PAUSE, LAST = 220, 1400
"""Milliseconds of a frame, and of the last one."""


def animate(maps: Maps, model: str, known: Dimensions, truth: str = "truth", enlarged: int = 2) -> Animation:
    """Play the forecast of one model; `truth` names where the truth comes from, `enlarged` is pixels per grid point."""
    from PIL import Image, ImageDraw, ImageFont  # Pillow comes with matplotlib

    values, errors = field_scale(maps.truth), error_scale(maps)
    gap, head, text = (enlarged * points for points in (GAP, HEAD, TEXT))
    font = ImageFont.load_default(text)
    wide, high = (enlarged * points for points in maps.truth.shape[1:])
    size = (3 * wide + 2 * gap, head + high)
    palette = np.concatenate(
        [_colours(values), _colours(errors), np.array([NOT_FINITE, BACKGROUND, INK, SOFT])]
    ).astype(np.uint8)
    grey, background, ink, soft = range(2 * SHARE, 2 * SHARE + 4)
    frames = []
    for lead, true, forecast in zip(maps.leads, maps.truth, maps.forecasts[model], strict=True):
        error = np.abs(forecast.astype(np.float64) - true)
        image = Image.new("P", size, background)
        image.putpalette(palette.tobytes())
        draw = ImageDraw.Draw(image)
        when, off = known.time(lead), significant(100 * float(np.linalg.norm(error) / np.linalg.norm(true)))
        heads = (
            (truth, f"lead {lead}{', ' if when else ''}{when}"),
            (model, ""),
            (f"error, 0 to {significant(errors.high)}", f"{off} %"),
        )
        for place, (panel, scale, first) in enumerate(
            ((true, values, 0), (forecast, values, 0), (error, errors, SHARE))
        ):
            left = place * (wide + gap)
            levels = np.where(np.isfinite(panel), first + _levels(panel, scale), grey).astype(np.uint8)
            upright = levels.T[::-1].repeat(enlarged, axis=0).repeat(enlarged, axis=1)
            image.paste(Image.fromarray(upright), (left, head))
            name, note = heads[place]
            draw.text((left, head - text // 2), name, fill=ink, font=font, anchor="ls")
            draw.text((left + wide - 1, head - text // 2), note, fill=soft, font=font, anchor="rs")
        frames.append(image)
    pauses = [PAUSE] * (len(frames) - 1) + [LAST]
    moving, still = io.BytesIO(), io.BytesIO()
    frames[0].save(moving, "PNG", save_all=True, append_images=frames[1:], duration=pauses, loop=0, optimize=True)
    frames[-1].save(still, "PNG", optimize=True)
    words = f"{maps.field}: {truth}, forecast of {model} and error, leads {maps.leads[0]} to {maps.leads[-1]}"
    return Animation(moving.getvalue(), still.getvalue(), words, size)


def _colours(scale: Scale) -> np.ndarray:
    from matplotlib import colormaps

    return colormaps[scale.colours](np.linspace(0, 1, SHARE), bytes=True)[:, :3]


def _levels(panel: np.ndarray, scale: Scale) -> np.ndarray:
    shares = (np.nan_to_num(panel.astype(np.float64)) - scale.low) / (scale.high - scale.low)
    return np.rint(shares.clip(0, 1) * (SHARE - 1))
