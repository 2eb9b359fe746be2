"""Costs against plain sums, the rehearsal of a training, and a clock of our own."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch import nn

from sigmasolver.data.store import open_store
from sigmasolver.data.windows import Windows
from sigmasolver.diagnose import efficiency as module
from sigmasolver.diagnose.efficiency import efficiency, parameter_bytes, parameters_of, position_bytes, rounds_of
from sigmasolver.diagnose.subject import Subject
from sigmasolver.forecast.checkpoint import load, recipe_in
from sigmasolver.models import Options, build_model
from sigmasolver.models.layers import distances
from sigmasolver.runs import read_tensors
from sigmasolver.train.dry_run import cost_of
from sigmasolver.train.engine import Execution


class Odd(nn.Module):
    """A convolution, something frozen, and a buffer."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(2, 1, 3, padding=1)
        self.frozen = nn.Parameter(torch.zeros(10, 10), requires_grad=False)
        self.register_buffer("table", torch.zeros(250))

    def forward(self, x):
        return self.layer(x.movedim(-1, 1)).movedim(1, -1)


@pytest.fixture
def subject(runs, study):
    run = runs["first"]
    recipe = recipe_in(run)
    with open_store(study / "flow.h5") as store:
        windows = Windows(store, [6, 7], recipe.evaluation_windows())
        training = Windows(store, range(5), recipe.training_windows())
        yield Subject(run, recipe, load(run.path), windows, torch.arange(4), 3, 2, training)


def values(findings):
    return {row["metric"]: row["value"] for row in findings.rows}


def test_efficiency_rows_match_the_weights_file_and_dry_run(subject):
    found = values(efficiency(subject))
    tensors, _ = read_tensors(subject.run.weights)
    count = sum(tensor.numel() for tensor in tensors.values())
    assert found["parameters"] == count and found["parameter_megabytes"] == pytest.approx(4 * count / 1e6)
    # 16 x 16 points, distances to 8 x 8 reference points
    assert found["position_megabytes"] == pytest.approx(4 * 16**2 * 64 / 1e6) and found["buffer_megabytes"] == 0
    # 5 trajectories of 8 frames give 6 windows of 2 + 1 each, 4 in a batch
    assert found["updates_per_epoch"] == found["timed_updates"] == 30 // 4
    assert found["seconds_per_epoch"] * found["updates_per_second"] == pytest.approx(30 // 4)
    assert found["inference_milliseconds"] > 0
    rehearsed = cost_of(subject.recipe, Execution()).memory
    assert 1e6 * found["peak_megabytes"] == pytest.approx(rehearsed, rel=0.05)
    assert 1e6 * found["peak_megabytes"] > 4 * 4 * count, "weights, gradients and two moments"
    (row,) = [row for row in efficiency(subject).rows if row["metric"] == "seconds_per_epoch"]
    assert row["deviation"] >= 0


def test_efficiency_keeps_weights_and_eval_mode(subject):
    before = {name: tensor.clone() for name, tensor in subject.forecaster.state_dict().items()}
    efficiency(subject)
    assert not subject.forecaster.training and not subject.forecaster.model.training
    for name, tensor in subject.forecaster.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert all(one.grad is None for one in subject.forecaster.parameters())


def test_efficiency_of_a_custom_model(subject):
    mine = replace(subject, forecaster=subject.forecaster.around(Odd()))
    found = values(efficiency(mine))
    assert found["parameters"] == 2 * 9 + 1 + 100 and found["parameter_megabytes"] == pytest.approx(4 * 119 / 1e6)
    assert found["buffer_megabytes"] == 1e-3 and "position_megabytes" not in found
    assert found["seconds_per_epoch"] > 0 and found["peak_megabytes"] > 0
    unknown = values(efficiency(replace(mine, training=None)))
    still = values(efficiency(replace(mine, forecaster=mine.forecaster.around(Odd().requires_grad_(False)))))
    model = Odd()
    model.wave = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    waves = values(efficiency(replace(mine, forecaster=mine.forecaster.around(model))))
    assert (unknown["parameters"], still["parameters"], waves["parameters"]) == (119, 119, 125)
    assert not any("seconds_per_epoch" in one for one in (unknown, still, waves))


def test_parameter_count_includes_frozen_and_complex_parameters():
    model = nn.Module()
    model.wave = nn.Parameter(torch.zeros(3, 5, dtype=torch.complex64))
    model.frozen = nn.Parameter(torch.zeros(7), requires_grad=False)
    model.wide = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    model.register_buffer("beside", torch.zeros(1000))
    assert parameters_of(model) == 2 * 15 + 7 + 2
    assert parameter_bytes(model) == 8 * 15 + 4 * 7 + 8 * 2


@pytest.mark.parametrize("positions", ["distances", "coordinates"])
def test_position_bytes_match_the_position_tensor(positions):
    size = {"in_channels": 1, "out_channels": 1, "width": 16, "depth": 1, "heads": 2, "slices": 4, "modes": 3}
    model = build_model("transolver-sigma", grid=(12, 9), options=Options(positions=positions), **size)
    held = model.points(torch.zeros(1, 20, 14, 1))
    assert position_bytes(model, (20, 14)) == held.numel() * held.element_size()
    if positions == "distances":
        assert position_bytes(model, (128, 128)) == distances((128, 128), 8, torch.float32, torch.device("cpu")).nbytes


def test_time_rounds_times_full_epochs_within_the_limit(monkeypatch):
    """With a clock that ticks a second at every update, rounds of an epoch take what they must."""
    now, made = itertools.count(), []
    clock = [0.0]

    def update():
        made.append(next(now))
        clock[0] += 1.0

    monkeypatch.setattr(module.time, "perf_counter", lambda: clock[0])
    count, rounds = rounds_of(update, 7, torch.device("cpu"))
    assert (count, rounds) == (7, [1.0] * 3) and len(made) == 1 + 3 * 7
    made.clear()
    seen = []
    count, rounds = rounds_of(update, 1000, torch.device("cpu"), lambda done, total: seen.append((done, total)))
    assert (count, rounds) == (20, [1.0] * 3) and len(made) == 1 + 3 * 20
    assert seen == [(1, 3), (2, 3), (3, 3)]
