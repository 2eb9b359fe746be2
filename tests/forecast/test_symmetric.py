"""Averages over symmetries: an equivariant map gains nothing, the spread is exactly the part of the error that depends
on the symmetry, and files and commands contain both."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from sigmasolver.data.normalise import Normaliser
from sigmasolver.data.store import open_store
from sigmasolver.forecast import Forecaster
from sigmasolver.forecast.files import forecast_file, spread_message
from sigmasolver.forecast.symmetric import symmetric_forecasts, symmetric_rollout
from sigmasolver.recipes import ModelRecipe, Recipe, TrainRecipe
from sigmasolver.runs import Run
from sigmasolver.simulate.generate import generate
from sigmasolver.simulate.vorticity import DEMO
from sigmasolver.symmetries import SYMMETRIES
from sigmasolver.tasks import Task
from sigmasolver.train.job import train_run

F64 = torch.float64
GROUP = SYMMETRIES["kolmogorov-4"]


class Biased(nn.Module):
    """Twice the last frame, plus a fixed field."""

    def __init__(self, bias):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0, dtype=F64))
        self.bias = bias

    def forward(self, x):
        return self.weight * x[..., -1:] + self.bias


def forecaster_of(bias, field="vorticity"):
    identity = Normaliser("none", (field,), torch.zeros(1, dtype=F64), torch.ones(1, dtype=F64))
    return Forecaster(Biased(bias), identity, identity, 1, history=2)


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def test_equivariant_forecaster_has_no_spread():
    history = random(2, 2, 8, 8, 1)
    forecaster = forecaster_of(torch.zeros(8, 8, 1, dtype=F64))
    average = symmetric_rollout(forecaster, history, 3, GROUP, 7)
    assert torch.equal(average.mean.frames, forecaster.rollout(history, 3).frames)
    assert float(average.spread.abs().amax()) == 0 and average.mean.stopped is None


@pytest.mark.parametrize("copies", [2, 4, 9])
def test_mean_and_spread_match_definition(copies):
    history, bias = random(2, 2, 8, 8, 1), random(8, 8, 1, seed=1)
    average = symmetric_rollout(forecaster_of(bias), history, 1, GROUP, copies)
    symmetries = GROUP.on((8, 8))
    biases = torch.stack(
        [symmetries.undo(bias[None, None], ("vorticity",), row[None])[0, 0] for row in symmetries.first(copies)]
    )
    expected = 2 * history[:, -1:] + biases.mean(0)
    torch.testing.assert_close(average.mean.frames, expected, rtol=0, atol=1e-14)
    torch.testing.assert_close(
        average.spread, biases.std(0, correction=0).expand_as(average.spread), rtol=0, atol=1e-13
    )
    forecasts = torch.stack([f.frames for f in symmetric_forecasts(forecaster_of(bias), history, 1, GROUP, copies)])
    size = forecasts.flatten(3, -2).norm(dim=3).square().mean(0).sqrt()  # (B, H, q)
    torch.testing.assert_close(average.relative_spread(), average.spread.flatten(2, -2).norm(dim=2) / size)


def test_mean_square_error_is_that_of_the_mean_plus_the_spread():
    """So the spread is at most the root mean square error, whatever the truth."""
    history, truth = random(1, 2, 8, 8, 1), random(1, 4, 8, 8, 1, seed=2)
    forecaster = forecaster_of(random(8, 8, 1, seed=1))
    forecasts = torch.stack([result.frames for result in symmetric_forecasts(forecaster, history, 4, GROUP, 6)])
    average = symmetric_rollout(forecaster, history, 4, GROUP, 6)
    single = (forecasts - truth).square().mean(0)
    torch.testing.assert_close(single, (average.mean.frames - truth).square() + average.spread.square())


def test_first_forecast_is_the_usual_one():
    history, forecaster = random(1, 2, 8, 8, 1), forecaster_of(random(8, 8, 1, seed=1))
    first = next(symmetric_forecasts(forecaster, history, 2, GROUP, 2))
    assert torch.equal(first.frames, forecaster.rollout(history, 2).frames)


def test_vectors_and_steady_maps():
    """A linear map that commutes with the square: minus the gradient of a scalar."""

    class Gradient(nn.Module):
        def forward(self, x):
            return torch.cat([x.roll(-1, axis) - x.roll(1, axis) for axis in (1, 2)], dim=-1)

    one = Normaliser("none", ("pressure",), torch.zeros(1, dtype=F64), torch.ones(1, dtype=F64))
    plane = ("velocity_x", "velocity_y")
    two = Normaliser("none", plane, torch.zeros(2, dtype=F64), torch.ones(2, dtype=F64))
    torus = replace(GROUP, isometries=tuple(replace(g, shift=()) for g in SYMMETRIES["square"].isometries))
    forecaster = Forecaster(Gradient(), one, two, 1, history=1)
    average = symmetric_rollout(forecaster, random(1, 1, 8, 8, 1).float(), 1, torus, 8)
    assert float(average.spread.amax()) == 0 and float(average.mean.frames.abs().amax()) > 1


def test_non_finite_forecast_is_reported():
    bias = torch.zeros(8, 8, 1, dtype=F64)
    bias[0, 0] = math.inf
    average = symmetric_rollout(forecaster_of(bias), random(1, 2, 8, 8, 1), 3, GROUP, 3)
    assert average.mean.stopped == 1 and not bool(torch.isfinite(average.mean.frames[:, 1:]).any())


def test_one_symmetry_has_no_spread():
    with pytest.raises(ValueError, match="at least 2 symmetries, got 1"):
        symmetric_rollout(forecaster_of(torch.zeros(8, 8, 1)), random(1, 2, 8, 8, 1), 1, GROUP, 1)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    generate(replace(DEMO, grid=32, stored=16, step=1 / 64, burn_in=1.0, frames=8), 8, 0, folder / "flow.h5")
    task = Task("tiny", ("vorticity",), ("vorticity",), (16, 16), 2, 1, 3, 6, 2, "channel", symmetries="kolmogorov-4")
    recipe = Recipe(task, ModelRecipe(width=16, depth=1, heads=2, slices=4, modes=3), TrainRecipe(updates=8, batch=4))
    train_run(recipe, folder / "flow.h5", Run(folder / "run"))
    return folder


def test_forecast_file_writes_mean_and_spread(run, tmp_path):
    from sigmasolver.forecast.checkpoint import load

    out, spread = tmp_path / "mean.h5", tmp_path / "spread.h5"
    messages = forecast_file(run / "run", run / "flow.h5", 3, out, torch.device("cpu"), symmetries=4, spread=spread)
    with open_store(run / "flow.h5") as store:
        history = torch.from_numpy(store[:][:, -2:]).float()
    average = symmetric_rollout(load(run / "run"), history, 3, GROUP, 4)
    for path, frames in ((out, average.mean.frames), (spread, average.spread)):
        with open_store(path) as store:
            np.testing.assert_allclose(store[:], frames.numpy(), rtol=1e-5, atol=1e-5)
            assert store.header.parameters["symmetries"] == 4
    first, last = (100 * float(average.relative_spread()[:, lead].mean()) for lead in (0, -1))
    text = f"deviate from it by {first:.3g} % at lead 1, {last:.3g} % at the last lead of their norm"
    assert any(text in message for message in messages)


def test_arrays_of_any_byte_order_and_strides_are_accepted():
    history, forecaster = random(1, 2, 8, 8, 1), forecaster_of(random(8, 8, 1, seed=1))
    expected = symmetric_rollout(forecaster, history, 2, GROUP, 3).mean.frames
    for array in (history.numpy().astype(">f8"), history.numpy()[:, :, ::-1][:, :, ::-1]):
        assert torch.equal(symmetric_rollout(forecaster, array, 2, GROUP, 3).mean.frames, expected)


def test_non_finite_spread_is_said_in_words():
    assert "some of the forecasts are not finite" in spread_message(torch.tensor([[[math.nan]]]), 2)


def test_unsuitable_options_are_refused_before_forecasting(run, tmp_path):
    def forecast(**options):
        out = tmp_path / "out.h5"
        with pytest.raises(ValueError) as caught:
            forecast_file(run / "run", run / "flow.h5", 2, out, torch.device("cpu"), **options)
        assert not out.exists()
        return str(caught.value)

    assert forecast(symmetries=0) == "The number of symmetries must be at least 1, got 0."
    assert forecast(spread=tmp_path / "spread.h5") == "A spread needs --symmetries with at least 2."
    assert "cannot be both outputs" in forecast(symmetries=2, spread=tmp_path / "out.h5")
    assert "must end in" in forecast(symmetries=2, spread=tmp_path / "spread.txt")
    assert "This grid has 256 symmetries" in forecast(symmetries=257)
