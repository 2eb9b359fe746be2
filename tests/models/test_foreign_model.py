"""A registered plain nn.Module works throughout the package; diagnostics that do not apply to it say so."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from sigmasolver.diagnose.run import DIAGNOSTICS, diagnose_run
from sigmasolver.evaluate import Request, evaluate_run
from sigmasolver.forecast.checkpoint import load
from sigmasolver.models import variants
from sigmasolver.recipes import ModelRecipe, Recipe, TrainRecipe
from sigmasolver.runs import Run, read_tensors
from sigmasolver.simulate.generate import generate
from sigmasolver.simulate.vorticity import DEMO
from sigmasolver.tasks import Task
from sigmasolver.train import dry_run
from sigmasolver.train.engine import ENGINES, Execution
from sigmasolver.train.job import train_run
from sigmasolver.train.plan import advise, predict

NAME = "two-convolutions"
FLOW = replace(DEMO, grid=32, stored=16, step=1 / 64, burn_in=1.0, frames=8)
TASK = Task("tiny", ("vorticity",), ("vorticity",), (16, 16), 2, 1, 3, 6, 2, "channel", symmetries="kolmogorov-4")
RECIPE = Recipe(TASK, ModelRecipe(name=NAME, width=8, heads=2), TrainRecipe(updates=8, batch=4, seed=3, checks=2))
NEED_SLICES = {"corrections", "routing", "geometry"}


class TwoConvolutions(nn.Module):
    """No lift, no blocks, no config; with running statistics and a frozen parameter."""

    def __init__(self, config):
        super().__init__()
        width, circular = config.width, {"padding": 1, "padding_mode": "circular"}
        self.first = nn.Conv2d(config.in_channels, width, 3, **circular)
        self.norm = nn.BatchNorm2d(width)
        self.scale = nn.Parameter(torch.full((width, 1, 1), 0.5), requires_grad=False)
        self.second = nn.Conv2d(width, config.out_channels, 3, **circular)

    def forward(self, x):
        hidden = torch.tanh(self.norm(self.first(x.movedim(-1, 1)))) * self.scale
        return self.second(hidden).movedim(1, -1)


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setitem(variants.MODELS, NAME, TwoConvolutions)
    monkeypatch.setitem(variants.BASELINES, NAME, TwoConvolutions)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "flow.h5"
    generate(FLOW, 8, 0, path)
    return path


def trained(data, folder, **settings):
    run = Run(folder)
    train_run(replace(RECIPE, train=replace(RECIPE.train, **settings)), data, run)
    return run


def test_foreign_model_is_trained_evaluated_diagnosed_and_reported(call, data, tmp_path):
    run = trained(data, tmp_path / "foreign")
    weights, _ = read_tensors(run.weights)
    assert weights["norm.num_batches_tracked"] == 8 and (weights["scale"] == 0.5).all()
    rows = evaluate_run(run)
    assert {row["model"] for row in rows} >= {NAME}
    assert all(row["value"] > 0 for row in rows if row["model"] == NAME and row["metric"] == "relative_l2")
    diagnostics = diagnose_run(run, request=Request(windows=2, horizon=2))
    assert diagnostics.keys() == DIAGNOSTICS.keys()
    for name, findings in diagnostics.items():
        if name in NEED_SLICES:
            assert findings.skipped.startswith(f"{NAME} has no slice operator") and "not defined" in findings.skipped
        else:
            assert findings.skipped is None and findings.rows, name
    efficiency = {row["metric"]: row["value"] for row in diagnostics["efficiency"].rows}
    assert efficiency["parameters"] == sum(p.numel() for p in load(run.path).model.parameters())
    assert efficiency["seconds_per_epoch"] > 0 and "position_megabytes" not in efficiency
    code, _, err = call("report", run.path, "--out", tmp_path / "page.html")
    assert code == 0, err
    assert NAME in (tmp_path / "page.html").read_text()
    code, out, err = call("table", "comparison", run.path)
    assert code == 0 and NAME in out, err
    code, _, err = call("diagnose", run.path, "--only", "routing", "--device", "cpu")
    assert code == 2 and f"{NAME} has no slice operator" in err and err.count("\n") == 1
    code, _, err = call("diagnose", run.path, "--only", "interventions", "--windows", 2, "--device", "cpu")
    assert (
        code == 2 and f"{NAME} has none of the components that interventions measures" in err and err.count("\n") == 1
    )
    code, out, err = call("diagnose", run.path, "--only", "maps", "--windows", 2, "--device", "cpu")
    assert code == 0 and "maps: " in out, err


def test_foreign_model_resumes_bitwise_identically(data, tmp_path):
    """Running statistics are part of the state, for the weights and for their EMA."""
    uninterrupted = trained(data, tmp_path / "whole", ema=0.5)
    run, recipe = Run(tmp_path / "stopped"), replace(RECIPE, train=replace(RECIPE.train, ema=0.5))
    stops = iter((False, False, True))
    train_run(recipe, data, run, stop=lambda: next(stops, True))
    assert not run.weights.exists()
    train_run(recipe, data, run)
    (expected, _), (resumed, _) = read_tensors(uninterrupted.weights), read_tensors(run.weights)
    assert expected.keys() == resumed.keys() and all(torch.equal(expected[key], resumed[key]) for key in resumed)


def test_ema_weights_are_stored_with_the_running_statistics(data, tmp_path):
    """With the initial statistics, mean 0 and variance 1, the averaged weights would be another function."""
    plain, averaged = (read_tensors(trained(data, tmp_path / f"{ema}", ema=ema).weights)[0] for ema in (None, 0.5))
    for key in ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked"):
        assert torch.equal(averaged[key], plain[key]), key
    assert not torch.equal(averaged["first.weight"], plain["first.weight"])
    assert not torch.equal(plain["norm.running_mean"], torch.zeros(8))


def test_plan_of_a_foreign_model_does_not_advise_recompute(data, monkeypatch):
    monkeypatch.setattr(dry_run, "TIMING_SECONDS", 0.0)
    prediction = predict(RECIPE, Execution(), 1e12)
    assert prediction.parameters == (2 * 9 + 1) * 8 + 16 + 8 + 8 * 9 + 1
    assert prediction.update.memory > 4 * prediction.parameters * 4
    advised = [settings for settings, _ in advise(prediction, Execution(), 1e3)]
    assert advised and not any("recompute" in setting for settings in advised for setting in settings)


def test_recompute_of_a_foreign_model_fails_before_writing_files(data, tmp_path):
    with pytest.raises(ValueError, match=r"no blocks to recompute; set train\.recompute=false\."):
        trained(data, tmp_path / "again", recompute=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("engine", ENGINES)
def test_foreign_model_trains_with_every_engine(data, tmp_path, engine):
    recipe, execution = replace(RECIPE, train=replace(RECIPE.train, ema=0.5)), Execution(engine=engine)
    execution = replace(execution, world=replace(execution.world, device=torch.device("cuda")))
    run = Run(tmp_path / engine)
    train_run(recipe, data, run, execution)
    weights, _ = read_tensors(run.weights)
    assert all(torch.isfinite(tensor).all() for tensor in weights.values()) and weights["norm.num_batches_tracked"] == 8
