"""Pictures decode to the colours that the values ask for."""

import base64
import io

import numpy as np
import pytest
import torch
from matplotlib import colormaps
from matplotlib.image import imread

from sigmasolver.evaluate.metrics import blow_up
from sigmasolver.report.pictures import NOT_FINITE, Scale, blown_up, error_limit, error_scale, field_scale, gallery
from sigmasolver.report.study import Maps


def decode(uri):
    """Pixels (rows, columns, 3) as integers, read by another library than the one that wrote them."""
    start, _, data = uri.partition(",")
    assert start == "data:image/png;base64"
    pixels = imread(io.BytesIO(base64.b64decode(data, validate=True)), format="png")
    return np.rint(255 * pixels[..., :3]).astype(int)


def colour(name, share):
    return list(colormaps[name](float(share), bytes=True)[:3])


def test_known_values_take_known_colours():
    field = np.array([[-2.0, 0.0, 2.0], [5.0, np.nan, -np.inf]])
    pixels = decode(Scale("RdBu_r", -2.0, 2.0).picture(field))
    assert pixels.shape == (3, 2, 3)  # two points to the right, three up
    left, right = pixels[::-1, 0].tolist(), pixels[::-1, 1].tolist()
    assert left == [colour("RdBu_r", 0), colour("RdBu_r", 0.5), colour("RdBu_r", 1)]
    assert right == [colour("RdBu_r", 1), list(NOT_FINITE), list(NOT_FINITE)]


def test_every_colour_is_within_half_a_level_of_its_value():
    values = np.random.default_rng(0).uniform(-3, 5, (17, 9))
    scale = Scale("magma", -3.0, 5.0)
    read = decode(scale.picture(values))[::-1].transpose(1, 0, 2)
    palette = scale.palette().astype(int)
    nearest = np.rint((values + 3) / 8 * 254).astype(int)
    assert np.array_equal(read, palette[nearest])
    assert np.abs(nearest / 254 * 8 - 3 - values).max() <= 4 / 254 + 1e-12


def test_the_first_axis_runs_right_and_the_last_one_up():
    field = np.zeros((5, 4))
    field[4, 3] = 1.0
    pixels = decode(Scale("magma", 0.0, 1.0).picture(field))
    assert pixels[0, -1].tolist() == colour("magma", 1)
    assert (pixels.reshape(-1, 3) == colour("magma", 0)).all(1).sum() == 19


def test_the_colour_bar_runs_from_low_to_high():
    scale = Scale("RdBu_r", -0.5, 0.5)
    bar = decode(scale.bar())
    assert bar.shape == (1, 255, 3)
    assert [bar[0, i].tolist() for i in (0, 127, 254)] == [colour("RdBu_r", share) for share in (0, 0.5, 1)]
    assert scale.numbers() == ("−0.500", "0", "0.500")


def test_signed_fields_are_symmetric_about_zero_and_others_span_their_values():
    assert field_scale(np.array([-1.0, 3.0, np.nan])) == Scale("RdBu_r", -3.0, 3.0)
    assert field_scale(np.array([2.0, 5.0])) == Scale("viridis", 2.0, 5.0)
    constant = field_scale(np.zeros(3))
    assert constant.low < 0 < constant.high


def test_one_scale_for_all_errors_that_no_runaway_model_can_stretch():
    rng = np.random.default_rng(1)
    truth = 10 * rng.standard_normal((2, 16, 16))
    near, far = truth + rng.standard_normal(truth.shape), truth + 2 * rng.standard_normal(truth.shape)
    pooled = np.abs(np.stack([near, far]) - truth)
    scale = error_scale(Maps("u", (1, 2), truth, {"near": near, "far": far}))
    assert (scale.low, scale.high) == (0.0, np.percentile(pooled, 99.5))
    alone = error_scale(Maps("u", (1, 2), truth, {"near": near}))
    lost = np.full_like(truth, 1e9)
    lost[0] = np.nan
    assert error_scale(Maps("u", (1, 2), truth, {"near": near, "lost": lost})) == alone
    assert error_scale(Maps("u", (1, 2), truth, {"exact": truth})).high > 0


def test_the_scale_of_errors_ends_at_their_percentile():
    truth = np.linspace(-2, 2, 1000)
    calm = np.linspace(0, 5, 1000)  # larger than the truth, and counted
    assert error_limit([calm, calm], truth) == np.percentile(np.concatenate([calm, calm]), 99.5)
    assert error_limit([calm, np.array([np.inf, np.nan])], truth) == np.percentile(calm, 99.5)
    assert error_limit([], truth) == 2.0  # nothing is left: the largest truth
    assert error_limit([np.zeros(3)], np.zeros(3)) == 1.0


def test_a_frame_has_blown_up_as_the_metric_has_it():
    """Parity with `metrics.blow_up`, lead by lead."""
    rng = np.random.default_rng(0)
    truth = rng.standard_normal((6, 4, 4)) * np.array([1, 2, 1, 1, 1, 1])[:, None, None]
    size = 10 * np.linalg.norm(truth[1])
    forecast = truth / np.linalg.norm(truth, axis=(1, 2), keepdims=True) * size
    forecast *= np.array([0.1, 0.99, 1.01, 1, 1, 1])[:, None, None]
    forecast[3], forecast[4, 0, 0], forecast[5] = truth[3], np.nan, np.inf
    assert blown_up(forecast, truth).tolist() == [False, False, True, False, True, True]
    for lead in range(6):
        beside = truth.copy()  # the truth itself at all leads but one
        beside[lead] = forecast[lead]
        (bad,), (survived,) = blow_up(*(torch.from_numpy(one)[None, ..., None] for one in (beside, truth)))
        assert bool(bad) == blown_up(beside, truth).any() == blown_up(forecast, truth)[lead]
        assert int(survived) == (lead if bad else 6)
    assert blown_up(np.full((1, 2), 9.0), np.zeros((1, 2))).tolist() == [False]  # no size to compare with
    partly = np.array([[1.0, np.nan]])
    assert blown_up(np.array([[1.0, 2.0]]), partly).tolist() == [False]


def test_the_gallery_shows_truth_forecast_and_error_with_the_norm_of_the_error():
    truth = np.zeros((2, 4, 4))
    truth[:, 0, 0], truth[:, 1, 0] = 3.0, -4.0  # norm 5
    forecast = truth.copy()
    forecast[1, 2, 2] = 0.5  # an error of norm 0.5, a tenth
    shown = gallery(Maps("vorticity", (1, 9), truth, {"sigma": forecast}))
    assert [(row.model, row.kind) for row in shown.rows] == [("", "truth"), ("sigma", "forecast"), ("sigma", "error")]
    assert [cell.note for cell in shown.rows[2].cells] == ["0.00 %", "10.0 %"]
    assert shown.rows[2].cells[1].words == "vorticity, error of sigma, lead 9, relative L2 10.0 %"
    assert shown.rows[0].cells[0].picture == shown.rows[1].cells[0].picture
    middle = decode(shown.rows[0].cells[0].picture)[0, 3].tolist()
    assert middle == colour("RdBu_r", 0.5)  # zero
    error = decode(shown.rows[2].cells[1].picture)[::-1].transpose(1, 0, 2)
    assert error[2, 2].tolist() == colour("magma", 1)
    assert error[0, 0].tolist() == colour("magma", 0)


def test_a_forecast_that_is_not_finite_has_no_norm():
    truth = np.ones((1, 2, 2))
    forecast = truth.copy()
    forecast[0, 0, 0] = np.nan
    note = gallery(Maps("u", (1,), truth, {"a": forecast})).rows[2].cells[0].note
    assert note == "not finite"


def test_integer_and_half_precision_fields_are_drawn_in_full_precision():
    whole = Scale("magma", 0.0, 100.0)
    values = np.array([[0, 50, 100]], dtype=np.int8)
    assert whole.levels(values).tolist() == [[0, 127, 254]]
    assert whole.levels(values.astype(np.float16)).tolist() == [[0, 127, 254]]
    truth = np.array([[[60000.0, -60000.0]]], dtype=np.float16)
    assert gallery(Maps("u", (1,), truth, {"a": -truth})).rows[2].cells[0].note == "200 %"
    assert field_scale(truth).high == pytest.approx(60000)


@pytest.mark.parametrize("rough", [0.0, 1.0])
def test_smooth_and_rough_pictures_keep_every_level(rough):
    """They are stored in two ways, of which the smaller one is taken."""
    x = np.linspace(0, 6, 64)
    field = np.sin(x)[:, None] * np.cos(x) + rough * np.random.default_rng(0).uniform(-1, 1, (64, 64))
    scale = Scale("viridis", -2.0, 2.0)
    uri = scale.picture(field)
    assert np.array_equal(decode(uri)[::-1].transpose(1, 0, 2), scale.palette()[scale.levels(field)])
    assert (len(uri) < 3 * 64 * 64 / 4) == (rough == 0)  # far below a byte for each point, or not
