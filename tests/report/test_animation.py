"""A moving picture shows each lead of truth, forecast and error, each point in the colour of its value."""

import io

import numpy as np
import pytest
from matplotlib import colormaps
from PIL import Image

from sigmasolver.report.animation import GAP, HEAD, animate
from sigmasolver.report.study import Dimensions, Maps


@pytest.fixture(scope="module")
def maps():
    generator = np.random.default_rng(0)
    truth = generator.normal(size=(3, 8, 5))
    forecast = truth + 0.1 * generator.normal(size=truth.shape)
    forecast[2, 1, 1] = np.nan
    return Maps("vorticity", (1, 2, 3), truth, {"sigma": forecast})


def frames_of(data: bytes) -> list[np.ndarray]:
    image, found = Image.open(io.BytesIO(data)), []
    for number in range(getattr(image, "n_frames", 1)):
        image.seek(number)
        found.append(np.asarray(image.convert("RGB")))
    return found


def test_every_lead_is_a_frame_with_the_values_in_colour(maps):
    made = animate(maps, "sigma", Dimensions(step=0.5), enlarged=2)
    frames = frames_of(made.moving)
    assert len(frames) == 3 and frames[0].shape[:2] == made.size[::-1]
    assert np.array_equal(frames_of(made.still)[0], frames[-1])
    bound = np.abs(maps.truth).max()
    for number, frame in enumerate(frames):
        # the first axis runs to the right and the last one up
        for place, panel in ((0, maps.truth[number]), (1, maps.forecasts["sigma"][number])):
            left = place * 2 * (8 + GAP)
            shown = frame[2 * HEAD :: 2, left : left + 16 : 2][::-1].transpose(1, 0, 2)
            wanted = 255 * colormaps["RdBu_r"]((panel / bound + 1) / 2)[..., :3]
            known = np.isfinite(panel)
            assert np.abs(shown - wanted)[known].max() < 8, "to the nearest of 120 colours"
            assert (shown[~known] == 136).all()
    assert "leads 1 to 3" in made.words


def test_the_error_is_dark_where_the_forecast_is_right(maps):
    right = Maps("vorticity", (1, 2), maps.truth[:2], {"sigma": np.stack([maps.truth[0], maps.truth[0]])})
    first, second = frames_of(animate(right, "sigma", Dimensions(), enlarged=1).moving)
    panel = (slice(HEAD, None), slice(2 * (8 + GAP), None))
    assert first[panel].max() < 20 and second[panel].max() > 100
