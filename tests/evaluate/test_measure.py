"""Measures of an evaluation with known values: a flow with an exact solution, forecasts that fail."""

import json
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

from sigmasolver.data.header import Header
from sigmasolver.data.layout import Layout
from sigmasolver.data.normalise import Normaliser
from sigmasolver.data.store import open_store
from sigmasolver.data.windows import Windows, WindowSpec
from sigmasolver.evaluate import Request, measure, predict, rows_of
from sigmasolver.forecast import Forecaster
from sigmasolver.runtime.parallel import World
from sigmasolver.simulate.generate import generate
from tests.data.memory import Memory
from tests.data.waves import Waves
from tests.evaluate.test_evaluation import norm, value

# --- a flow with an exact solution: decaying, drifting waves are a Fourier multiplier

NAMES = ("height", "slope")
WAVES = Waves(frames=9)


class Advance(nn.Module):
    """Advance the last frame by one to `block` steps; multiply by `by` if the first value is in `poison`."""

    def __init__(self, block, poison=(), by=torch.nan):
        super().__init__()
        self.block, self.poison, self.by = block, poison, by

    def forward(self, channels):
        k = torch.fft.fftfreq(WAVES.grid, 1 / WAVES.grid, dtype=torch.float64)
        kx, ky = torch.meshgrid(k, k, indexing="ij")
        rate = -WAVES.viscosity * (kx**2 + ky**2) - 1j * (kx * WAVES.drift[0] + ky * WAVES.drift[1])
        spectrum = torch.fft.fft2(channels[..., -2:].double(), dim=(1, 2))
        frames = [
            torch.fft.ifft2(spectrum * torch.exp(rate * 0.25 * step)[..., None], dim=(1, 2)).real
            for step in range(1, self.block + 1)
        ]
        out = torch.cat(frames, dim=-1).to(channels.dtype)
        for number, sample in enumerate(channels):
            if float(sample[0, 0, 0]) in self.poison:
                out[number] *= self.by
        return out


def unscaled(names):
    return Normaliser("none", names, torch.zeros(len(names)).double(), torch.ones(len(names)).double())


def forecaster_of(model, block, names=NAMES):
    return Forecaster(model, unscaled(names), unscaled(names), block)


@pytest.fixture(scope="module")
def waves(tmp_path_factory):
    path = tmp_path_factory.mktemp("waves") / "waves.h5"
    generate(WAVES, 3, 0, path)
    with open_store(path) as store:
        yield Windows(store, (0, 1, 2), WindowSpec(NAMES, NAMES, 2, 5))


def all_rows(measures, names=NAMES):
    lead_times = 0.25 * torch.arange(1, measures["correlation_lead"].shape[1] + 1)
    return [{**row, "model": "any"} for row in rows_of(measures, names, lead_times)]


@pytest.mark.parametrize("protocol", ["free", "teacher-forced"])
@pytest.mark.parametrize("block", [1, 2, 5])
def test_measure_of_a_perfect_forecast_is_zero(waves, block, protocol):
    measures, persistence = measure(forecaster_of(Advance(block), block), waves, Request(protocol=protocol), World())
    rows, baseline_rows = all_rows(measures), all_rows(persistence)
    for row in rows:
        perfect = 1 if row["metric"].startswith("correlation") else 5 if row["metric"] == "survived" else 0
        if row["metric"] == "correlation_time":
            assert row["value"] is None  # it never drops
        else:
            assert row["value"] == pytest.approx(perfect, abs=2e-6), row
    assert value(baseline_rows, "relative_l2", "any", "height") > 0.05


@pytest.mark.parametrize("batch", [1, 3, 8])
def test_measure_is_independent_of_the_batch_size(waves, batch):
    (first, first_baseline), (second, second_baseline) = (
        measure(forecaster_of(Advance(2), 2), waves, Request(batch=size), World()) for size in (batch, 5)
    )
    for ours, expected in ((first, second), (first_baseline, second_baseline)):
        assert all(torch.equal(ours[name], expected[name]) for name in ours) and ours.keys() == expected.keys()


@dataclass(frozen=True)
class SingleRank(World):
    """One of several processes, whose results are merged by the test."""

    def gather(self, rows, count):
        return rows


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("count", [None, 7])
def test_measure_shards_of_several_processes_match_one_process(waves, size, count):
    request, forecaster = Request(windows=count, batch=2), forecaster_of(Advance(2), 2)
    single = measure(forecaster, waves, request, World())
    parts = [measure(forecaster, waves, request, SingleRank(rank, size)) for rank in range(size)]
    for kind in (0, 1):
        for name, expected in single[kind].items():
            merged = torch.empty_like(expected)
            for rank in range(size):
                merged[rank::size] = parts[rank][kind][name]
            assert torch.equal(merged, expected), name


def test_measure_rejects_more_processes_than_windows(waves):
    for rank in (0, 11):
        with pytest.raises(ValueError, match="2 windows are too few for 12 processes"):
            measure(forecaster_of(Advance(1), 1), waves, Request(windows=2), SingleRank(rank, 12))


# --- protocols


def test_predict_teacher_forced_starts_blocks_from_the_truth(waves):
    history, future = waves.batch(range(len(waves)))
    all_frames = torch.cat((history, future), 1)
    forecaster = forecaster_of(nn.Linear(4, 4).requires_grad_(False), 2)
    free, persistence = predict(forecaster, history, future, "free")
    forced, forced_persistence = predict(forecaster, history, future, "teacher-forced")
    assert torch.equal(free[:, :2], forced[:, :2]) and not torch.allclose(free[:, 2:], forced[:, 2:])
    for first in (0, 2, 4):
        assert torch.equal(forced[:, first : first + 2], forecaster(all_frames[:, first : first + 2])[:, : 5 - first])
    # The baseline uses what the model uses: the last frame before the block.
    assert torch.equal(persistence, history[:, -1:].expand_as(future))
    assert torch.equal(forced_persistence, all_frames[:, [1, 1, 3, 3, 5]])


# --- forecasts that fail


def test_rows_of_a_nan_forecast_are_null_and_blown_up(waves):
    poison = {float(window[0][0, 0, 0, 0]) for window in waves}
    measures, _ = measure(forecaster_of(Advance(1, poison), 1), waves, Request(), World())
    rows = all_rows(measures)
    text = json.dumps(rows, allow_nan=False)
    assert len(json.loads(text)) == len(rows)
    for row in rows:
        expected = {"blow_up": 1, "survived": 0, "correlation_time": 0.25}.get(row["metric"])
        assert row["value"] == expected and row.get("deviation") is None, row


def test_measure_isolates_bad_samples(waves):
    bad = 3  # the first of its trajectory, so that no other history starts with its frame
    clean, _ = measure(forecaster_of(Advance(1), 1), waves, Request(), World())
    for factor, last in ((torch.nan, torch.nan), (1e3, None), (torch.inf, torch.nan)):
        poison = {float(waves[bad][0][0, 0, 0, 0])}
        measures, _ = measure(forecaster_of(Advance(1, poison, factor), 1), waves, Request(), World())
        good = [number for number in range(len(waves)) if number != bad]
        assert all(torch.equal(measures[name][good], clean[name][good]) for name in clean)
        assert measures["blow_up"].tolist() == [float(number == bad) for number in range(len(waves))]
        assert measures["survived"].tolist() == [0.0 if number == bad else 5.0 for number in range(len(waves))]
        assert last is None or bool(measures["relative_l2"][bad].isnan().all())


# --- several fields


class Constant(nn.Module):
    """Returns the same output for any input."""

    def __init__(self, output):
        super().__init__()
        self.output = output

    def forward(self, channels):
        return self.output.expand(len(channels), *self.output.shape)


def small(names, data, sides=(1.0, 1.0), ends="periodic"):
    """Windows of one input and one target frame over trajectories in memory."""
    grid = data.shape[2:-1]
    coordinates = tuple(np.arange(n) * side / n for n, side in zip(grid, sides, strict=True))
    layout = Layout(names, ("1",) * len(names), (ends, ends), coordinates, np.arange(data.shape[1]) / 2)
    return Windows(Memory(Header(layout, "test", {}), data), range(len(data)), WindowSpec(names, names, 1, 1))


def test_rows_average_vector_components_that_are_not_adjacent():
    names = ("velocity_x", "pressure", "velocity_y")
    data = np.random.default_rng(0).normal(size=(3, 2, 6, 4, 3)).astype(np.float32) * [1, 10, 0.1]
    windows = small(names, data.astype(np.float32))
    output = torch.ones(6, 4, 3)
    model_measures, baseline_measures = measure(forecaster_of(Constant(output), 1, names), windows, Request(), World())
    true = data[:, 1].astype(np.float32).astype(np.float64)
    for measures, predicted in (
        (model_measures, np.ones_like(true)),
        (baseline_measures, data[:, 0].astype(np.float32).astype(np.float64)),
    ):
        rows = all_rows(measures, names)
        ratios = norm(predicted - true, 1, 2) / norm(true, 1, 2)
        squared = ((predicted - true) ** 2).mean((1, 2))
        for field, members in (("velocity_x", [0]), ("velocity", [0, 2]), ("pressure", [1]), ("all", [0, 1, 2])):
            assert value(rows, "relative_l2", "any", field) == pytest.approx(ratios[:, members].mean())
            assert value(rows, "rmse", "any", field) == pytest.approx(np.sqrt(squared[:, members].mean()))
        joint = norm(predicted - true, 1, 2, 3) / norm(true, 1, 2, 3)
        assert value(rows, "relative_l2_joint", "any", None) == pytest.approx(joint.mean())
        grouped = squared[:, [0, 2]].mean(1) + squared[:, 1]
        assert value(rows, "realm_error", "any", None) == pytest.approx(grouped.mean())


def test_spectrum_error_scales_wavenumbers_by_side_lengths():
    """Two waves along a side of 2 and one along a side of 1 have the same wavelength: no energy at a wrong scale."""
    x, y = np.arange(16)[:, None] / 8, np.arange(8)[None] / 8
    along_x, along_y = (np.broadcast_to(np.cos(2 * np.pi * position), (16, 8)) for position in (x, y))
    windows = small(("u",), np.broadcast_to(along_x, (1, 2, 16, 8))[..., None].astype(np.float32), (2.0, 1.0))
    output = torch.from_numpy(along_y.copy())[..., None]
    measures, _ = measure(forecaster_of(Constant(output), 1, ("u",)), windows, Request(), World())
    assert value(all_rows(measures, ("u",)), "spectrum_error_lead", "any", "u", 1) == pytest.approx(0, abs=1e-6)


def test_measure_without_spectrum_on_walls_or_correlation_of_a_constant():
    data = np.ones((2, 2, 6, 4, 1), np.float32)
    measures, _ = measure(
        forecaster_of(Constant(torch.rand(6, 4, 1)), 1, ("u",)), small(("u",), data, ends="wall"), Request(), World()
    )
    rows = all_rows(measures, ("u",))
    assert not any(row["metric"].startswith("spectrum") for row in rows)
    assert value(rows, "correlation", "any", "u") is None
