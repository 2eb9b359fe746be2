"""Encoded images decode to the levels and colours of the values."""

import base64
import io

import numpy as np
import pytest
from matplotlib import colormaps
from matplotlib.image import imread

from sigmasolver.report.pictures import (
    NOT_FINITE,
    Scale,
    encode_animation,
    error_levels,
    error_limit,
    error_scale,
    field_scale,
)
from sigmasolver.report.study import Maps


def decode(uri):
    """Pixels (rows, columns) in grey or (rows, columns, 3) in colour, decoded by an independent library."""
    start, _, data = uri.partition(",")
    assert start == "data:image/png;base64"
    pixels = imread(io.BytesIO(base64.b64decode(data, validate=True)), format="png")
    return np.rint(255 * (pixels if pixels.ndim == 2 else pixels[..., :3])).astype(int)


def frames(uri, leads):
    """Levels (leads, X, Y) of a strip."""
    levels = decode(uri)
    return levels.reshape(leads, -1, levels.shape[1])[:, ::-1].transpose(0, 2, 1)


def colour(name, share):
    return list(colormaps[name](float(share), bytes=True)[:3])


def test_scale_levels_and_palette_of_known_values():
    scale, field = Scale("RdBu_r", -2.0, 2.0), np.array([[-2.0, 0.0, 2.0], [5.0, np.nan, -np.inf]])
    left, right = scale.palette()[scale.levels(field)].tolist()
    assert left == [colour("RdBu_r", 0), colour("RdBu_r", 0.5), colour("RdBu_r", 1)]
    assert right == [colour("RdBu_r", 1), list(NOT_FINITE), list(NOT_FINITE)]


def test_scale_levels_quantization_error():
    values = np.random.default_rng(0).uniform(-3, 5, (17, 9))
    levels = Scale("magma", -3.0, 5.0).levels(values)
    assert np.abs(levels / 254 * 8 - 3 - values).max() <= 4 / 254 + 1e-12


def test_animation_orientation_first_axis_right_last_axis_up():
    field = np.zeros((1, 5, 4))
    field[0, 4, 3] = 1.0
    pixels = decode(encode_animation(Maps("u", (1,), field, {})).truth)
    assert pixels.shape == (4, 5) and pixels[0, -1] == 254 and (pixels == 0).sum() == 19


def test_scale_bar_runs_from_low_to_high():
    scale = Scale("RdBu_r", -0.5, 0.5)
    bar = decode(scale.bar())
    assert bar.shape == (1, 255, 3)
    assert [bar[0, i].tolist() for i in (0, 127, 254)] == [colour("RdBu_r", share) for share in (0, 0.5, 1)]
    assert scale.numbers() == ("−0.500", "0", "0.500")


def test_field_scale_is_symmetric_for_signed_fields():
    assert field_scale(np.array([-1.0, 3.0, np.nan])) == Scale("RdBu_r", -3.0, 3.0)
    assert field_scale(np.array([2.0, 5.0])) == Scale("viridis", 2.0, 5.0)
    constant = field_scale(np.zeros(3))
    assert constant.low < 0 < constant.high


def test_error_scale_ignores_diverged_models():
    rng = np.random.default_rng(1)
    truth = 10 * rng.standard_normal((2, 16, 16))
    near, far = truth + rng.standard_normal(truth.shape), truth + 2 * rng.standard_normal(truth.shape)
    pooled = np.abs(np.stack([near, far]) - truth)
    scale = error_scale(Maps("u", (1, 2), truth, {"near": near, "far": far}))
    assert (scale.low, scale.high) == (0.0, np.percentile(pooled, 99.5))
    alone = error_scale(Maps("u", (1, 2), truth, {"near": near}))
    diverged = np.full_like(truth, 1e9)
    diverged[0] = np.nan
    assert error_scale(Maps("u", (1, 2), truth, {"near": near, "lost": diverged})) == alone
    assert error_scale(Maps("u", (1, 2), truth, {"exact": truth})).high > 0


def test_error_limit_is_the_percentile():
    truth = np.linspace(-2, 2, 1000)
    errors = np.linspace(0, 5, 1000)  # larger than the truth, but included
    assert error_limit([errors, errors], truth) == np.percentile(np.concatenate([errors, errors]), 99.5)
    assert error_limit([errors, np.array([np.inf, np.nan])], truth) == np.percentile(errors, 99.5)
    assert error_limit([], truth) == 2.0  # no errors: falls back to the largest truth
    assert error_limit([np.zeros(3)], np.zeros(3)) == 1.0


def test_animation_encodes_truth_forecast_error_and_relative_error():
    truth = np.zeros((2, 4, 4))
    truth[:, 0, 0], truth[:, 1, 0] = 3.0, -4.0  # norm 5
    forecast = truth.copy()
    forecast[1, 2, 2] = 0.5  # an error of norm 0.5, a tenth
    shown = encode_animation(Maps("vorticity", (1, 9), truth, {"sigma": forecast}))
    (strip,) = shown.strips
    assert strip.model == "sigma" and strip.notes == ("0.00 %", "10.0 %")
    levels = frames(shown.truth, 2)
    assert np.array_equal(levels, shown.values.levels(truth)) and levels[0, 0, 0] == round((3 + 4) / 8 * 254)
    assert np.array_equal(frames(strip.forecast, 2), shown.values.levels(forecast))
    error = frames(strip.error, 2)
    assert error[1, 2, 2] == 254 and error.sum() == 254 and shown.tops[1] == 0.5


@pytest.mark.parametrize("size", [1e-6, 1.0, 3e4])
def test_animation_error_quantization_is_independent_of_other_leads(size):
    """The decoded error is within half a level of its square root: √e ± √top / 508."""
    rng = np.random.default_rng(0)
    truth = 50 * size * rng.standard_normal((3, 16, 16))
    growth = np.array([1e-3, 1e-1, 10.0])[:, None, None]
    maps = Maps("u", (1, 2, 3), truth, {name: truth + size * growth * rng.normal(size=truth.shape) for name in "ab"})
    shown = encode_animation(maps)
    errors = {name: np.abs(forecast - truth) for name, forecast in maps.forecasts.items()}
    pooled = np.stack(list(errors.values()))
    assert shown.tops == pytest.approx(pooled.max((0, 2, 3)))
    assert shown.limits == pytest.approx(np.percentile(pooled.transpose(1, 0, 2, 3).reshape(3, -1), 99.5, axis=1))
    assert shown.errors.high == pytest.approx(np.percentile(pooled, 99.5))
    for strip in shown.strips:
        top = np.array(shown.tops)[:, None, None]
        decoded = top * (frames(strip.error, 3) / 254) ** 2
        assert (np.abs(np.sqrt(decoded) - np.sqrt(errors[strip.model])) <= np.sqrt(top) / 508 + 1e-12).all()


def test_animation_levels_are_independent_of_a_blown_up_forecast():
    truth = np.random.default_rng(0).standard_normal((2, 8, 8))
    near, diverged = truth + 0.1, np.full_like(truth, 1e9)
    diverged[1, 0, 0] = np.nan
    alone, both = (
        encode_animation(Maps("u", (1, 2), truth, {"a": near})),
        encode_animation(Maps("u", (1, 2), truth, {"a": near, "b": diverged})),
    )
    assert (alone.tops, alone.limits, alone.strips[0]) == (both.tops, both.limits, both.strips[0])
    assert both.strips[1].notes[1] == "not finite"
    levels = frames(both.strips[1].error, 2)
    assert levels[1, 0, 0] == 255 and (levels[0] == 254).all()
    assert error_levels(np.array([4.0, 1.0, np.inf]), 4.0).tolist() == [254, 127, 255]


def test_animation_of_integer_and_half_precision_fields():
    scale = Scale("magma", 0.0, 100.0)
    values = np.array([[0, 50, 100]], dtype=np.int8)
    assert scale.levels(values).tolist() == [[0, 127, 254]]
    assert scale.levels(values.astype(np.float16)).tolist() == [[0, 127, 254]]
    truth = np.array([[[60000.0, -60000.0]]], dtype=np.float16)
    assert encode_animation(Maps("u", (1,), truth, {"a": -truth})).strips[0].notes == ("200 %",)
    assert field_scale(truth).high == pytest.approx(60000)


@pytest.mark.parametrize("rough", [0.0, 1.0])
def test_png_of_smooth_and_rough_fields_is_lossless(rough):
    """Both PNG filters are tried and the smaller result is kept."""
    x = np.linspace(0, 6, 64)
    field = np.sin(x)[:, None] * np.cos(x) + rough * np.random.default_rng(0).uniform(-1, 1, (64, 64))
    shown = encode_animation(Maps("u", (1,), field[None], {}))
    assert np.array_equal(frames(shown.truth, 1)[0], shown.values.levels(field))
    assert (len(shown.truth) < 3 * 64 * 64 / 4) == (rough == 0)  # well below one byte per point for smooth fields only
