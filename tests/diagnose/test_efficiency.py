"""Costs against plain sums, the dry run of a training, and a fake clock."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch import nn

from sigmasolver.data.store import open_store
from sigmasolver.data.windows import Windows
from sigmasolver.diagnose import efficiency as module
from sigmasolver.diagnose.efficiency import efficiency, parameter_bytes, parameter_count, position_bytes, time_rounds
from sigmasolver.diagnose.subject import Subject
from sigmasolver.forecast.checkpoint import load, load_recipe
from sigmasolver.models import Options, build_model
from sigmasolver.models.layers import distances
from sigmasolver.runs import read_tensors
from sigmasolver.train.dry_run import estimate_cost
from sigmasolver.train.engine import Execution


class Custom(nn.Module):
    """A convolution, a frozen parameter and a buffer."""

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
    recipe = load_recipe(run)
    with open_store(study / "flow.h5") as store:
        windows = Windows(store, [6, 7], recipe.evaluation_window_spec())
        training = Windows(store, range(5), recipe.training_window_spec())
        yield Subject(run, recipe, load(run.path), windows, torch.arange(4), 3, 2, training)


def values(findings):
    return {row["metric"]: row["value"] for row in findings.rows}


def test_efficiency_rows_match_the_weights_file_and_dry_run(subject):
    costs = values(efficiency(subject))
    tensors, _ = read_tensors(subject.run.weights)
    count = sum(tensor.numel() for tensor in tensors.values())
    assert costs["parameters"] == count and costs["parameter_megabytes"] == pytest.approx(4 * count / 1e6)
    # 16 x 16 points, distances to 8 x 8 reference points
    assert costs["position_megabytes"] == pytest.approx(4 * 16**2 * 64 / 1e6) and costs["buffer_megabytes"] == 0
    # 5 trajectories of 8 frames give 6 windows of 2 + 1 each, 4 in a batch
    assert costs["updates_per_epoch"] == costs["timed_updates"] == 30 // 4
    assert costs["seconds_per_epoch"] * costs["updates_per_second"] == pytest.approx(30 // 4)
    assert costs["inference_milliseconds"] > 0
    dry_run = estimate_cost(subject.recipe, Execution()).memory
    assert 1e6 * costs["peak_megabytes"] == pytest.approx(dry_run, rel=0.05)
    assert 1e6 * costs["peak_megabytes"] > 4 * 4 * count, "weights, gradients and two moments"
    (row,) = [row for row in efficiency(subject).rows if row["metric"] == "seconds_per_epoch"]
    assert row["deviation"] >= 0


def test_efficiency_keeps_weights_and_eval_mode(subject):
    before = {name: tensor.clone() for name, tensor in subject.forecaster.state_dict().items()}
    efficiency(subject)
    assert not subject.forecaster.training and not subject.forecaster.model.training
    for name, tensor in subject.forecaster.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert all(p.grad is None for p in subject.forecaster.parameters())


def test_efficiency_of_a_custom_model(subject):
    custom = replace(subject, forecaster=subject.forecaster.around(Custom()))
    costs = values(efficiency(custom))
    assert costs["parameters"] == 2 * 9 + 1 + 100 and costs["parameter_megabytes"] == pytest.approx(4 * 119 / 1e6)
    assert costs["buffer_megabytes"] == 1e-3 and "position_megabytes" not in costs
    assert costs["seconds_per_epoch"] > 0 and costs["peak_megabytes"] > 0
    unknown = values(efficiency(replace(custom, training=None)))
    frozen = values(efficiency(replace(custom, forecaster=custom.forecaster.around(Custom().requires_grad_(False)))))
    model = Custom()
    model.wave = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    complex_valued = values(efficiency(replace(custom, forecaster=custom.forecaster.around(model))))
    assert (unknown["parameters"], frozen["parameters"], complex_valued["parameters"]) == (119, 119, 125)
    assert not any("seconds_per_epoch" in metrics for metrics in (unknown, frozen, complex_valued))


def test_parameter_count_includes_frozen_and_complex_parameters():
    model = nn.Module()
    model.wave = nn.Parameter(torch.zeros(3, 5, dtype=torch.complex64))
    model.frozen = nn.Parameter(torch.zeros(7), requires_grad=False)
    model.wide = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    model.register_buffer("beside", torch.zeros(1000))
    assert parameter_count(model) == 2 * 15 + 7 + 2
    assert parameter_bytes(model) == 8 * 15 + 4 * 7 + 8 * 2


@pytest.mark.parametrize("positions", ["distances", "coordinates"])
def test_position_bytes_match_the_position_tensor(positions):
    size = {"in_channels": 1, "out_channels": 1, "width": 16, "depth": 1, "heads": 2, "slices": 4, "modes": 3}
    model = build_model("transolver-sigma", grid=(12, 9), options=Options(positions=positions), **size)
    positions_tensor = model.points(torch.zeros(1, 20, 14, 1))
    assert position_bytes(model, (20, 14)) == positions_tensor.numel() * positions_tensor.element_size()
    if positions == "distances":
        assert position_bytes(model, (128, 128)) == distances((128, 128), 8, torch.float32, torch.device("cpu")).nbytes


def test_time_rounds_times_full_epochs_within_the_limit(monkeypatch):
    """With a fake clock that advances one second per update."""
    counter, updates = itertools.count(), []
    clock = [0.0]

    def update():
        updates.append(next(counter))
        clock[0] += 1.0

    monkeypatch.setattr(module.time, "perf_counter", lambda: clock[0])
    count, rounds = time_rounds(update, 7, torch.device("cpu"))
    assert (count, rounds) == (7, [1.0] * 3) and len(updates) == 1 + 3 * 7
    updates.clear()
    ticks = []
    count, rounds = time_rounds(update, 1000, torch.device("cpu"), lambda done, total: ticks.append((done, total)))
    assert (count, rounds) == (20, [1.0] * 3) and len(updates) == 1 + 3 * 20
    assert ticks == [(1, 3), (2, 3), (3, 3)]
