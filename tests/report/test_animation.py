"""Animations: one frame per lead with truth, forecast and error, each grid point in the colour of its value."""

import io

import numpy as np
import pytest
from matplotlib import colormaps
from PIL import Image

from sigmasolver.report.animation import GAP, HEADER, animate
from sigmasolver.report.study import Dimensions, Maps


@pytest.fixture(scope="module")
def maps():
    generator = np.random.default_rng(0)
    truth = generator.normal(size=(3, 8, 5))
    forecast = truth + 0.1 * generator.normal(size=truth.shape)
    forecast[2, 1, 1] = np.nan
    return Maps("vorticity", (1, 2, 3), truth, {"sigma": forecast})


def frames_of(data: bytes) -> list[np.ndarray]:
    image, frames = Image.open(io.BytesIO(data)), []
    for index in range(getattr(image, "n_frames", 1)):
        image.seek(index)
        frames.append(np.asarray(image.convert("RGB")))
    return frames


def test_animate_has_one_frame_per_lead_with_the_colours_of_the_values(maps):
    animation = animate(maps, "sigma", Dimensions(step=0.5), enlarged=2)
    frames = frames_of(animation.moving)
    assert len(frames) == 3 and frames[0].shape[:2] == animation.size[::-1]
    assert np.array_equal(frames_of(animation.still)[0], frames[-1])
    bound = np.abs(maps.truth).max()
    for lead_index, frame in enumerate(frames):
        # the first axis points right and the last one up
        for panel_index, panel in ((0, maps.truth[lead_index]), (1, maps.forecasts["sigma"][lead_index])):
            left = panel_index * 2 * (8 + GAP)
            actual = frame[2 * HEADER :: 2, left : left + 16 : 2][::-1].transpose(1, 0, 2)
            expected = 255 * colormaps["RdBu_r"]((panel / bound + 1) / 2)[..., :3]
            finite = np.isfinite(panel)
            assert np.abs(actual - expected)[finite].max() < 8, "to the nearest of 120 colours"
            assert (actual[~finite] == 136).all()
    assert "leads 1 to 3" in animation.words


def test_animate_error_panel_is_dark_for_an_exact_forecast(maps):
    exact_first = Maps("vorticity", (1, 2), maps.truth[:2], {"sigma": np.stack([maps.truth[0], maps.truth[0]])})
    first, second = frames_of(animate(exact_first, "sigma", Dimensions(), enlarged=1).moving)
    panel = (slice(HEADER, None), slice(2 * (8 + GAP), None))
    assert first[panel].max() < 20 and second[panel].max() > 100
