"""Exported files compute the same as the run, for any batch size and grid; a file that differs is discarded."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from sigmasolver.data.header import Header
from sigmasolver.data.layout import Layout
from sigmasolver.data.normalise import Normaliser, TimeScale
from sigmasolver.data.store import Writer
from sigmasolver.export import FORMATS, export_run
from sigmasolver.export import run as exporting
from sigmasolver.export.run import LIMIT
from sigmasolver.export.step import RolloutStep
from sigmasolver.forecast import Forecaster
from sigmasolver.forecast.checkpoint import load
from sigmasolver.models import Options
from sigmasolver.models.config import SolverConfig
from sigmasolver.models.variants import MODELS, build_solver
from sigmasolver.recipes import ModelRecipe, Recipe, TrainRecipe
from sigmasolver.runs import Run
from sigmasolver.simulate.generate import generate
from sigmasolver.simulate.vorticity import DEMO
from sigmasolver.tasks import Task
from sigmasolver.train.job import train_run

ROOT = Path(__file__).parents[2]
FLOW = replace(DEMO, grid=32, stored=16, step=1 / 64, burn_in=1.0, frames=8)
TASK = Task("tiny", ("vorticity",), ("vorticity",), (16, 16), 2, 1, 3, 6, 2, "channel")
MODEL = ModelRecipe(width=16, depth=1, heads=2, slices=4, modes=3, options=Options(padding="circular"))
RECIPE = Recipe(TASK, MODEL, TrainRecipe(updates=2, batch=4, checks=0))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "flow.h5"
    generate(FLOW, 8, 0, path)
    return path


@pytest.fixture(scope="module")
def run(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    train_run(RECIPE, data, Run(folder))
    return folder


@pytest.fixture
def restore_models():
    before = dict(MODELS)
    yield
    MODELS.clear()
    MODELS.update(before)


def blocks(kind):
    return re.findall(rf"^```{kind}\n(.*?)^```$", (ROOT / "docs" / "export.md").read_text(), re.M | re.S)


def relative_difference(actual, expected):
    return float((actual - expected).norm() / expected.norm())


# --- the step


def forecaster(**options):
    """A forecaster with two targets and one further input, a Box-Cox transform and walls."""
    torch.manual_seed(3)
    fields = ("species_O2", "velocity_x", "geometry")
    mean, scale = torch.tensor([[-3.0, 0.5, 1.0], [2.0, 3.0, 0.5]], dtype=torch.float64)
    inputs = Normaliser("box-cox", fields, mean, scale)
    timed = options.get("time_scale") is not None
    config = SolverConfig(
        (8, 10), 6, 2, width=16, depth=1, heads=2, slices=4, modes=3, options=Options(time_embedding=timed), in_frames=2
    )
    model = build_solver("transolver-sigma", config)
    return Forecaster(model, inputs, inputs.select(fields[:2]), 1, "lower-walls", history=2, **options).eval()


@pytest.mark.parametrize("timed", [False, True])
def test_rollout_step_repeated_equals_rollout(timed):
    model = forecaster(time_scale=TimeScale(0.5, 0.25)) if timed else forecaster()
    step, history, frames = RolloutStep(model), torch.rand(3, 2, 8, 10, 3), []
    expected = model.rollout(history, 4, time=1.0 if timed else None).frames
    with torch.no_grad():
        for call in range(4):
            time = (torch.full((3,), 1.0 + 0.25 * call, dtype=torch.float64),) if timed else ()
            block, history = step(history, *time)
            frames.append(block)
    assert torch.equal(torch.cat(frames, dim=1), expected)
    assert step.inputs == (("history", "time") if timed else ("history",))


def test_rollout_step_of_other_fields_has_no_next_history():
    steady = Forecaster(torch.nn.Linear(1, 1), *(Normaliser("none", (name,), *torch.tensor([[0.0], [1.0]]).double())
                                                 for name in ("coefficient", "pressure")), 1, history=1)  # fmt: skip
    step = RolloutStep(steady)
    assert step.outputs == ("frames",) and len(step(torch.ones(2, 1, 4, 4, 1))) == 1


# --- files


def test_torch_export_accepts_any_batch_and_grid_and_has_metadata(run, tmp_path):
    exported = export_run(run, "torch-export", tmp_path / "step.pt2")
    assert exported.fixed is None and exported.difference <= 1e-6 and exported.windows == 3
    extra = {"metadata.json": ""}
    step = torch.export.load(tmp_path / "step.pt2", extra_files=extra).module()
    facts = {name: json.loads(text) for name, text in json.loads(extra["metadata.json"]).items()}
    assert facts["input_fields"] == ["vorticity"] and facts["units"] == facts["output_units"] == list(FLOW.layout.units)
    assert facts["dt"] == pytest.approx(FLOW.interval) and (facts["history"], facts["block"]) == (2, 1)
    assert facts["grid"] == [16, 16] and facts["any_grid"] is True and facts["weights"] == Run(run).digest
    run_forecaster = load(run)
    for shape in ((5, 2, 16, 16, 1), (1, 2, 20, 13, 1)):
        history = torch.randn(shape)
        expected, frames = run_forecaster.rollout(history, 3).frames, []
        for _ in range(3):
            block, history = step(history)
            frames.append(block.detach())
        assert relative_difference(torch.cat(frames, 1), expected) < 1e-5


def test_onnx_runs_in_the_documented_program(run, tmp_path, monkeypatch, capsys):
    exported = export_run(run, "onnx", tmp_path / "step.onnx")
    assert exported.fixed is None and exported.difference <= LIMIT
    (program,) = blocks("python")
    assert len([line for line in program.splitlines() if line.strip()]) <= 14
    monkeypatch.chdir(tmp_path)
    for shape in ((2, 2, 16, 16, 1), (1, 2, 18, 15, 1)):
        history = torch.randn(shape)
        np.save(tmp_path / "history.npy", history.numpy())
        exec(compile(program, "export.md", "exec"), {"__name__": "__main__"})
        assert "['vorticity']" in capsys.readouterr().out
        forecast = torch.from_numpy(np.load(tmp_path / "forecast.npy"))
        assert relative_difference(forecast, load(run).rollout(history, 3).frames) < 1e-5


@pytest.fixture(scope="module")
def timed_data(tmp_path_factory):
    """Waves with `rate`, one number per trajectory, as a field constant in time and space."""
    random = np.random.default_rng(0)
    waves = random.normal(size=(6, 8, 16, 1))
    rate = np.broadcast_to(random.uniform(1, 2, size=(6, 1, 1, 1)), waves.shape)
    path = tmp_path_factory.mktemp("data") / "waves.h5"
    layout = Layout(("u", "rate"), ("1", "1"), ("periodic",), (np.arange(16.0),), 3 + 0.5 * np.arange(8))
    with Writer(path, Header(layout, "test", {}), 6) as writer:
        writer.append(np.concatenate((waves, rate), axis=-1).astype(np.float32))
    return path


@pytest.mark.parametrize(
    ("name", "conditions", "kind"),
    [
        ("transolver-sigma", (), "torch-export"),
        ("transolver-sigma", ("rate",), "onnx"),
        ("physolver", ("rate",), "torch-export"),
    ],
)
def test_export_of_a_time_embedding_accepts_any_batch(timed_data, tmp_path, name, conditions, kind):
    task = Task("waves", ("u", *conditions), ("u",), (16,), 2, 1, 3, 4, 2, "channel", conditions=conditions)
    model = replace(MODEL, name=name, options=Options(time_embedding=True))
    train_run(Recipe(task, model, RECIPE.train), timed_data, Run(tmp_path / "run"))
    path = tmp_path / f"step{FORMATS[kind].suffix}"
    exported = export_run(tmp_path / "run", kind, path)
    assert exported.fixed is None and exported.difference <= LIMIT
    assert json.loads(exported.metadata["inputs"]) == ["history", "time"]
    eager, step = load(tmp_path / "run"), FORMATS[kind].read(path)
    for samples, points in ((4, 16), (1, 20)):
        history, time = torch.randn(samples, 2, points, len(task.inputs)), 3 + torch.rand(samples, dtype=torch.float64)
        with torch.no_grad():
            expected, actual = eager(history, time=time), step(history, time)[0]
            assert relative_difference(eager(history, time=time + 1), expected) > 1e-4  # the time matters
        assert relative_difference(actual, expected) < 1e-5


@pytest.mark.slow
def test_aoti_runs_in_the_documented_cpp_program(run, tmp_path):
    exported = export_run(run, "aoti", tmp_path / "step.pt2")
    assert exported.difference <= LIMIT
    (program,), (build,) = blocks("cpp"), [block for block in blocks("bash") if "g++" in block]
    (tmp_path / "forecast.cpp").write_text(program)
    history = torch.randn(1, 2, 16, 16, 1)
    history.numpy().tofile(tmp_path / "history.bin")
    alias = f'python() {{ "{sys.executable}" "$@"; }}\n'
    result = subprocess.run(["bash", "-e", "-c", alias + build], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    fields, *norms = result.stdout.split("\n")
    assert "vorticity" in fields
    expected = load(run).rollout(history, 3).frames[0].flatten(1).norm(dim=1)
    np.testing.assert_allclose([float(norm) for norm in norms if norm], expected, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["onnx", "torch-export"])
def test_export_of_a_pretrained_model_by_name(call, kind, tmp_path):
    out = tmp_path / f"darcy{FORMATS[kind].suffix}"
    code, stdout, err = call("export", "darcy", "--to", kind, "--out", out)
    assert code == 0, err
    assert "accepts any batch size and any grid" in stdout and "3 real windows" in stdout and out.exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, "onnx") for name in ("fno", "unet", "transolver", "eddyformer-2d", "physolver", "factformer")),
        ("drift-net", "torch-export"),
    ],
)
def test_export_of_other_models(data, tmp_path, name, kind):
    """A model with a fixed grid is exported for that grid only, as its metadata states."""
    train_run(replace(RECIPE, model=replace(MODEL, name=name)), data, Run(tmp_path / name))
    exported = export_run(tmp_path / name, kind, tmp_path / f"step{FORMATS[kind].suffix}")
    assert exported.difference <= LIMIT and json.loads(exported.metadata["any_grid"]) == (exported.fixed is None)


def test_export_of_a_model_with_a_fixed_grid(data, tmp_path, call, restore_models):
    class Weighted(torch.nn.Module):
        def __init__(self, config):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.rand(*config.grid, config.out_channels))

        def forward(self, x):
            return x[..., -1:] * self.weight

    class Untraceable(Weighted):
        def forward(self, x):
            return super().forward(x) * float(x.detach().numpy().mean())

    MODELS["weighted"], MODELS["untraceable"] = Weighted, Untraceable
    for name in ("weighted", "untraceable"):
        train_run(replace(RECIPE, model=replace(MODEL, name=name)), data, Run(tmp_path / name))
    code, out, err = call("export", tmp_path / "weighted", "--to", "torch-export", "--out", tmp_path / "step.pt2")
    assert code == 0 and "only the grid of the run (torch-export does not support a dynamic grid" in out, err
    code, _, err = call("export", tmp_path / "untraceable", "--to", "torch-export", "--out", tmp_path / "no.pt2")
    assert code == 2 and "The model untraceable cannot be exported to torch-export: " in err
    assert not (tmp_path / "no.pt2").exists()


def test_onnx_keeps_a_small_epsilon_and_no_local_paths(data, tmp_path, restore_models):
    """An epsilon of 1e-8 matters where the variance is smaller."""

    class Normalised(torch.nn.Linear):
        def __init__(self, config):
            super().__init__(config.in_channels, config.out_channels)

        def forward(self, x):
            small = 1e-5 * super().forward(x)
            return small * (small.var(dim=(1, 2), keepdim=True) + 1e-8).rsqrt()

    MODELS["normalised"] = Normalised
    train_run(replace(RECIPE, model=replace(MODEL, name="normalised")), data, Run(tmp_path / "run"))
    exported = export_run(tmp_path / "run", "onnx", tmp_path / "step.onnx")
    assert exported.difference <= LIMIT and b".py" not in (tmp_path / "step.onnx").read_bytes()


@pytest.mark.parametrize("separate", [True, False])
def test_export_of_a_run_without_test_split(call, tmp_path, separate, restore_models):
    """It is checked on separate test data, otherwise on training windows."""
    MODELS["pointwise"] = lambda config: torch.nn.Linear(config.in_channels, config.out_channels)
    np.save(tmp_path / "flow.npy", np.random.default_rng(0).normal(size=(4, 6, 8, 8, 1)))
    np.save(tmp_path / "unseen.npy", np.random.default_rng(1).normal(size=(1, 5, 8, 8, 1)))
    test = ("--test-data", tmp_path / "unseen.npy") if separate else ("--test", 0)
    settings = ("--history", 2, "--block", 1, "--horizon", 3, "--model", "pointwise", "--set", "train.updates=2")
    train = ("train", "--data", tmp_path / "flow.npy", "--fields", "u", "--out", tmp_path / "run", *test, *settings)
    assert call(*train)[0] == 0
    code, out, err = call("export", tmp_path / "run", "--to", "torch-export", "--out", tmp_path / "step.pt2")
    assert code == 0 and f"on {1 if separate else 3} real windows" in out, err
    options = ("--data", tmp_path / "unseen.npy", "--out", tmp_path / "two.pt2")
    code, out, err = call("export", tmp_path / "run", "--to", "torch-export", *options)
    assert code == 0 and "on 1 real windows" in out, err


# --- discarded files and errors


def test_export_discards_a_file_that_differs_from_the_run(data, tmp_path, monkeypatch, restore_models):
    MODELS["pointwise"] = lambda config: torch.nn.Linear(config.in_channels, config.out_channels)
    run, out = tmp_path / "run", tmp_path / "out"
    train_run(replace(RECIPE, model=replace(MODEL, name="pointwise")), data, Run(run))
    out.mkdir()
    original = FORMATS["torch-export"]

    def read(path):
        compute = original.read(path)
        return lambda *inputs: [output * (1 + 3e-5) for output in compute(*inputs)]

    monkeypatch.setitem(FORMATS, "torch-export", replace(original, read=read))
    with pytest.raises(
        ValueError, match=r"differs from .* by 3e-05 in relative L2, more than 1e-05, and was discarded"
    ):
        export_run(run, "torch-export", out / "step.pt2")
    assert not list(out.iterdir())


def test_max_difference_is_over_windows_and_detects_nan():
    own = forecaster()
    step, history = RolloutStep(own), torch.rand(3, 2, 8, 10, 3)
    factors = torch.tensor([1.0, 1.5, 1.0]).view(3, 1, 1, 1, 1)
    with torch.no_grad():
        assert exporting._max_difference(step, step, [(history,)]) == 0
        difference = exporting._max_difference(step, lambda h: [output * factors for output in step(h)], [(history,)])
        assert difference == pytest.approx(0.5)
        assert (
            exporting._max_difference(step, lambda h: [output * torch.nan for output in step(h)], [(history,)])
            == np.inf
        )


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--to", "onyx", "--out", "x.onnx"), 'Unknown format "onyx"; did you mean onnx?'),
        (("--to", "aoti", "--out", "x.onnx"), "The file name for aoti must end in .pt2, got x.onnx."),
        (("--to", "onnx", "--out", "HERE"), "already exists; choose another name or remove it."),
        (("--to", "onnx", "--out", "x.onnx", "--data", "none.h5"), "none.h5"),
    ],
)
def test_export_errors_are_one_sentence(call, run, tmp_path, args, message):
    (tmp_path / "here.onnx").touch()
    code, _, err = call("export", run, *(tmp_path / "here.onnx" if arg == "HERE" else arg for arg in args))
    assert code == 2 and message in err and err.count("\n") == 1


def test_export_names_the_missing_package_and_extra(run, tmp_path, monkeypatch):
    monkeypatch.setattr(exporting, "load", None)  # the check comes before loading
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(
        ValueError, match=r"ONNX export requires the package onnxscript; install .*sigmasolver\[export\]"
    ):
        export_run(run, "onnx", tmp_path / "step.onnx")
    assert not list(tmp_path.iterdir())
