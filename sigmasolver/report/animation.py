"""Animate a forecast as an animated PNG: truth, forecast and error side by side, one frame per lead.

All frames share one palette of 256 colours: `COLOURS` of them for the field, as many for its error, the remaining ones
for the labels. The same animation as a GIF is twice as large.
"""

from __future__ import annotations

import io

import numpy as np

from sigmasolver.report.digits import significant
from sigmasolver.report.errors import percent_text, relative_l2
from sigmasolver.report.pictures import NOT_FINITE, Scale, error_scale, field_scale
from sigmasolver.report.study import AnimatedPng, Dimensions, Maps

__all__ = ["animate"]

COLOURS = 120
"""Palette entries per colour scale."""
BACKGROUND, INK, SOFT = (255, 255, 255), (27, 27, 27), (106, 106, 106)
GAP, HEADER, FONT_SIZE = 5, 11, 7
"""Gap between panels, height of the header and font size, in grid points, so that text scales with the image."""
FRAME_MS, LAST_FRAME_MS = 220, 1400
"""Duration in milliseconds of a frame, and of the last frame."""


def animate(maps: Maps, model: str, dimensions: Dimensions, truth: str = "truth", enlarged: int = 2) -> AnimatedPng:
    """Animate the forecast of one model; `truth` is the label of the truth, `enlarged` the pixels per grid point."""
    from PIL import Image, ImageDraw, ImageFont  # Pillow comes with matplotlib

    values, errors = field_scale(maps.truth), error_scale(maps)
    gap, header, font_size = (enlarged * points for points in (GAP, HEADER, FONT_SIZE))
    font = ImageFont.load_default(font_size)
    width, height = (enlarged * points for points in maps.truth.shape[1:])
    size = (3 * width + 2 * gap, header + height)
    palette = np.concatenate(
        [_colours(values), _colours(errors), np.array([NOT_FINITE, BACKGROUND, INK, SOFT])]
    ).astype(np.uint8)
    grey, background, ink, soft = range(2 * COLOURS, 2 * COLOURS + 4)
    frames = []
    for lead, true, forecast in zip(maps.leads, maps.truth, maps.forecasts[model], strict=True):
        error = np.abs(forecast.astype(np.float64) - true)
        image = Image.new("P", size, background)
        image.putpalette(palette.tobytes())
        draw = ImageDraw.Draw(image)
        time, relative = dimensions.time(lead), percent_text(relative_l2(error, true))
        headers = (
            (truth, f"lead {lead}{', ' if time else ''}{time}"),
            (model, ""),
            (f"error, 0 to {significant(errors.high)}", relative),
        )
        for index, (panel, scale, first) in enumerate(
            ((true, values, 0), (forecast, values, 0), (error, errors, COLOURS))
        ):
            left = index * (width + gap)
            indices = np.where(np.isfinite(panel), first + _levels(panel, scale), grey).astype(np.uint8)
            pixels = indices.T[::-1].repeat(enlarged, axis=0).repeat(enlarged, axis=1)
            image.paste(Image.fromarray(pixels), (left, header))
            name, note = headers[index]
            draw.text((left, header - font_size // 2), name, fill=ink, font=font, anchor="ls")
            draw.text((left + width - 1, header - font_size // 2), note, fill=soft, font=font, anchor="rs")
        frames.append(image)
    durations = [FRAME_MS] * (len(frames) - 1) + [LAST_FRAME_MS]
    animated, still = io.BytesIO(), io.BytesIO()
    frames[0].save(animated, "PNG", save_all=True, append_images=frames[1:], duration=durations, loop=0, optimize=True)
    frames[-1].save(still, "PNG", optimize=True)
    alt_text = f"{maps.field}: {truth}, forecast of {model} and error, leads {maps.leads[0]} to {maps.leads[-1]}"
    return AnimatedPng(animated.getvalue(), still.getvalue(), alt_text, size)


def _colours(scale: Scale) -> np.ndarray:
    from matplotlib import colormaps

    return colormaps[scale.colours](np.linspace(0, 1, COLOURS), bytes=True)[:, :3]


def _levels(panel: np.ndarray, scale: Scale) -> np.ndarray:
    fractions = (np.nan_to_num(panel.astype(np.float64)) - scale.low) / (scale.high - scale.low)
    levels: np.ndarray = np.rint(fractions.clip(0, 1) * (COLOURS - 1))
    return levels
