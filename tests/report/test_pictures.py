"""Pictures decode to the colours that the values ask for."""

import base64
import io

import numpy as np
import pytest
import torch
from matplotlib import colormaps
from matplotlib.image import imread

from sigmasolver.evaluate.metrics import blow_up
from sigmasolver.report.pictures import (
    NOT_FINITE,
    Scale,
    blown_up,
    error_levels,
    error_limit,
    error_scale,
    field_scale,
    film,
)
from sigmasolver.report.study import Maps


def decode(uri):
    """Pixels (rows, columns) of greys or (rows, columns, 3) of colours, read by another library than wrote them."""
    start, _, data = uri.partition(",")
    assert start == "data:image/png;base64"
    pixels = imread(io.BytesIO(base64.b64decode(data, validate=True)), format="png")
    return np.rint(255 * (pixels if pixels.ndim == 2 else pixels[..., :3])).astype(int)


def frames(uri, leads):
    """The levels (leads, X, Y) of a strip."""
    levels = decode(uri)
    return levels.reshape(leads, -1, levels.shape[1])[:, ::-1].transpose(0, 2, 1)


def colour(name, share):
    return list(colormaps[name](float(share), bytes=True)[:3])


def test_known_values_take_known_colours():
    scale, field = Scale("RdBu_r", -2.0, 2.0), np.array([[-2.0, 0.0, 2.0], [5.0, np.nan, -np.inf]])
    left, right = scale.palette()[scale.levels(field)].tolist()
    assert left == [colour("RdBu_r", 0), colour("RdBu_r", 0.5), colour("RdBu_r", 1)]
    assert right == [colour("RdBu_r", 1), list(NOT_FINITE), list(NOT_FINITE)]


def test_every_level_is_within_half_a_level_of_its_value():
    values = np.random.default_rng(0).uniform(-3, 5, (17, 9))
    levels = Scale("magma", -3.0, 5.0).levels(values)
    assert np.abs(levels / 254 * 8 - 3 - values).max() <= 4 / 254 + 1e-12


def test_the_first_axis_runs_right_and_the_last_one_up():
    field = np.zeros((1, 5, 4))
    field[0, 4, 3] = 1.0
    pixels = decode(film(Maps("u", (1,), field, {})).truth)
    assert pixels.shape == (4, 5) and pixels[0, -1] == 254 and (pixels == 0).sum() == 19


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


def test_a_film_holds_truth_forecast_and_error_with_the_norm_of_the_error():
    truth = np.zeros((2, 4, 4))
    truth[:, 0, 0], truth[:, 1, 0] = 3.0, -4.0  # norm 5
    forecast = truth.copy()
    forecast[1, 2, 2] = 0.5  # an error of norm 0.5, a tenth
    shown = film(Maps("vorticity", (1, 9), truth, {"sigma": forecast}))
    (strip,) = shown.strips
    assert strip.model == "sigma" and strip.notes == ("0.00 %", "10.0 %")
    levels = frames(shown.truth, 2)
    assert np.array_equal(levels, shown.values.levels(truth)) and levels[0, 0, 0] == round((3 + 4) / 8 * 254)
    assert np.array_equal(frames(strip.forecast, 2), shown.values.levels(forecast))
    error = frames(strip.error, 2)
    assert error[1, 2, 2] == 254 and error.sum() == 254 and shown.tops[1] == 0.5


@pytest.mark.parametrize("size", [1e-6, 1.0, 3e4])
def test_errors_of_every_lead_keep_their_digits_whatever_the_other_leads_are(size):
    """Read back, an error is off by at most half a level of its root: √e ± √top / 508."""
    rng = np.random.default_rng(0)
    truth = 50 * size * rng.standard_normal((3, 16, 16))
    growth = np.array([1e-3, 1e-1, 10.0])[:, None, None]
    maps = Maps("u", (1, 2, 3), truth, {name: truth + size * growth * rng.normal(size=truth.shape) for name in "ab"})
    shown = film(maps)
    errors = {name: np.abs(one - truth) for name, one in maps.forecasts.items()}
    pooled = np.stack(list(errors.values()))
    assert shown.tops == pytest.approx(pooled.max((0, 2, 3)))
    assert shown.limits == pytest.approx(np.percentile(pooled.transpose(1, 0, 2, 3).reshape(3, -1), 99.5, axis=1))
    assert shown.errors.high == pytest.approx(np.percentile(pooled, 99.5))
    for strip in shown.strips:
        top = np.array(shown.tops)[:, None, None]
        read = top * (frames(strip.error, 3) / 254) ** 2
        assert (np.abs(np.sqrt(read) - np.sqrt(errors[strip.model])) <= np.sqrt(top) / 508 + 1e-12).all()


def test_a_forecast_that_has_blown_up_has_no_say_in_the_levels_of_others():
    truth = np.random.default_rng(0).standard_normal((2, 8, 8))
    near, lost = truth + 0.1, np.full_like(truth, 1e9)
    lost[1, 0, 0] = np.nan
    alone, beside = film(Maps("u", (1, 2), truth, {"a": near})), film(Maps("u", (1, 2), truth, {"a": near, "b": lost}))
    assert (alone.tops, alone.limits, alone.strips[0]) == (beside.tops, beside.limits, beside.strips[0])
    assert beside.strips[1].notes[1] == "not finite"
    levels = frames(beside.strips[1].error, 2)
    assert levels[1, 0, 0] == 255 and (levels[0] == 254).all()
    assert error_levels(np.array([4.0, 1.0, np.inf]), 4.0).tolist() == [254, 127, 255]


def test_integer_and_half_precision_fields_are_drawn_in_full_precision():
    whole = Scale("magma", 0.0, 100.0)
    values = np.array([[0, 50, 100]], dtype=np.int8)
    assert whole.levels(values).tolist() == [[0, 127, 254]]
    assert whole.levels(values.astype(np.float16)).tolist() == [[0, 127, 254]]
    truth = np.array([[[60000.0, -60000.0]]], dtype=np.float16)
    assert film(Maps("u", (1,), truth, {"a": -truth})).strips[0].notes == ("200 %",)
    assert field_scale(truth).high == pytest.approx(60000)


@pytest.mark.parametrize("rough", [0.0, 1.0])
def test_smooth_and_rough_pictures_keep_every_level(rough):
    """They are stored in two ways, of which the smaller one is taken."""
    x = np.linspace(0, 6, 64)
    field = np.sin(x)[:, None] * np.cos(x) + rough * np.random.default_rng(0).uniform(-1, 1, (64, 64))
    shown = film(Maps("u", (1,), field[None], {}))
    assert np.array_equal(frames(shown.truth, 1)[0], shown.values.levels(field))
    assert (len(shown.truth) < 3 * 64 * 64 / 4) == (rough == 0)  # far below a byte for each point, or not
