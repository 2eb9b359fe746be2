"""The benchmarks run at small sizes, and their counts of operations, bytes and kernels are correct."""

import importlib
import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from sigmasolver.data.formats import open_data
from sigmasolver.data.store import open_store
from sigmasolver.forecast.checkpoint import load_recipe
from sigmasolver.models import SolverConfig, build_solver
from sigmasolver.ops.convolution import depthwise_convolution
from sigmasolver.recipes import recipe_of
from sigmasolver.runs import Run
from sigmasolver.simulate import simulator_of
from sigmasolver.simulate.generate import generate
from tests.registered import forgotten

FOLDER = Path(__file__).parents[1] / "benchmarks"
SMALL = ("task.grid=(8,8)", "model.width=16", "model.depth=1", "model.heads=2", "model.slices=4", "model.modes=2")


@pytest.fixture
def script(monkeypatch):
    """Import a benchmark by name, with its folder on the path; its modules are removed afterwards."""
    monkeypatch.syspath_prepend(str(FOLDER))
    for path in FOLDER.glob("*.py"):
        monkeypatch.delitem(sys.modules, path.stem, raising=False)
    yield importlib.import_module
    for path in FOLDER.glob("*.py"):
        sys.modules.pop(path.stem, None)


@pytest.fixture
def rows_of(script, monkeypatch, tmp_path):
    """Run a benchmark with these arguments and return its rows."""

    def call(name, *args):
        out = tmp_path / f"{name}.jsonl"
        settings = [word for setting in SMALL for word in ("--set", setting)] if name != "cpu" else []
        monkeypatch.setattr(sys, "argv", [name, *args, *settings, "--out", str(out)])
        script(name).main()
        return [json.loads(line) for line in out.read_text().splitlines()]

    return call


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.py") if "def main" in path.read_text()))
def test_benchmark_help(script, monkeypatch, capsys, name):
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as caught:
        script(name).main()
    assert caught.value.code == 0 and "--out" in capsys.readouterr().out


# --- the lower bound of an update


def test_floor_of_kf2d(script):
    """About 12 passes forward and 28 backward of 256 bytes for 131,072 points and 8 blocks; 0.58 TFLOP."""
    floor = script("floor")
    recipe = recipe_of("kf2d")
    forward, backward = (
        sum(passes) for passes in zip(*floor.block_passes(recipe.model.config(recipe.task)).values(), strict=True)
    )
    assert forward == pytest.approx(12, abs=0.3) and backward == pytest.approx(28, abs=0.3)
    bound = floor.floor(recipe)
    assert bound.bytes == (forward + backward) * 256 * 131_072 * 8
    assert bound.bytes / 1e9 == pytest.approx(10.7, abs=0.1)
    assert bound.flops / 1e12 == pytest.approx(0.58, rel=0.03)
    assert bound.milliseconds(floor.Rates(4.3e12, 7e14)) == pytest.approx(2.5, abs=0.01)
    assert bound.milliseconds(floor.Rates(1e15, 7e14)) == pytest.approx(0.8, abs=0.06)


@pytest.mark.parametrize("grid", [(24,), (12, 10), (8, 7, 6)])
def test_block_flops_match_torch_counter(script, grid):
    """The FLOPs of one additional block, counted by torch, equal those of `block_flops` exactly."""
    sizes = SolverConfig(grid, 2, 1, width=32, depth=1, heads=4, slices=6, modes=3)

    def operations(depth):
        model = build_solver("transolver-sigma", replace(sizes, depth=depth))
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(torch.zeros(3, *grid, 2))
        return counter.get_total_flops()

    per_point, per_sample = script("floor").block_flops(sizes)
    counted = 3 * (math.prod(grid) * per_point + per_sample)
    assert operations(3) - operations(2) == pytest.approx(counted, rel=1e-12)


def test_floor_scales_with_objective_and_precision(script):
    floor, recipe = script("floor").floor, recipe_of("ns2d")
    frames = replace(recipe, train=replace(recipe.train, objective="direct"))
    # Ten frames of teacher forcing are ten samples; float32 moves twice what bf16 does and computes the same.
    assert floor(recipe).bytes == 10 * floor(frames).bytes and floor(recipe).flops == 10 * floor(frames).flops
    assert floor(recipe, 4).bytes == 2 * floor(recipe).bytes and floor(recipe, 4).flops == floor(recipe).flops
    pushed = replace(frames, train=replace(frames.train, objective="pushforward", calls=2))
    assert floor(pushed).flops == pytest.approx(4 / 3 * floor(frames).flops)
    assert floor(frames).bytes < floor(pushed).bytes < 4 / 3 * floor(frames).bytes
    with pytest.raises(ValueError, match="counted for transolver-sigma; ffno has other blocks"):
        floor(recipe_of("ns2d", "ffno"))


# --- the scripts


def test_step_benchmark(rows_of, capsys):
    rows = rows_of(
        "step", "ns2d", "--device", "cpu", "--forms", "eager,reference", "--steps", "1",
        "--models", "transolver-sigma,transolver,ffno",
    )  # fmt: skip
    assert [(row["model"], row["form"]) for row in rows] == [
        ("transolver-sigma", "reference"), ("transolver-sigma", "eager, plain"),
        ("transolver", "reference"), ("ffno", "reference"),
    ]  # fmt: skip
    assert not any("error" in row for row in rows)
    base, eager = rows[:2]
    assert eager["ratio"] == base["milliseconds"] / eager["milliseconds"]
    assert eager["forward_ratio"] == base["forward_milliseconds"] / eager["forward_milliseconds"]
    assert eager["share"] == eager["floor_milliseconds"] / eager["milliseconds"]
    assert rows[3]["over_sigma"] == rows[3]["milliseconds"] / base["milliseconds"] and "share" not in rows[3]
    assert "floor of one update" in capsys.readouterr().out


def test_step_benchmark_continues_after_a_failing_form(rows_of):
    """A graph needs a GPU: the row has the error, and the next form is measured."""
    rows = rows_of("step", "darcy", "--device", "cpu", "--forms", "plain,reference", "--steps", "1")
    assert "error" not in rows[0] and 'The engine "graph" needs a GPU' in rows[1]["error"]


def test_step_reference_gradient_matches_the_engine(script):
    """Ten single-frame passes with FFTs give the same update as one folded batch."""
    step, cpu = script("step"), torch.device("cpu")
    recipe = script("noise").Subject("ns2d", settings=SMALL).recipe()
    gradients = []
    for update, model in (step.reference(recipe, cpu), step.engine_step(step.FORMS["eager"], recipe, cpu)):
        update()
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    first, second = gradients
    assert (first - second).norm() < 1e-4 * first.norm() and first.norm() > 1e-3


def test_kernels_benchmark(rows_of):
    rows = rows_of("kernels", "darcy", "--device", "cpu", "--form", "eager", "--precision", "float32", "--updates", "2")
    total, kinds = rows[0], {row["kernel"]: row for row in rows[1:]}
    assert total["kernel"] == "all" and total["share"] == 1
    assert sum(row["share"] for row in rows[1:]) == pytest.approx(1)
    assert sum(row["milliseconds"] for row in rows[1:]) == pytest.approx(total["milliseconds"])
    # One block: context, routing and feature path.
    assert kinds["aten::convolution_backward"]["launches"] == 3


@pytest.mark.slow
def test_cold_start_benchmark(rows_of):
    """On a CPU nothing is compiled, and both forms give the same losses."""
    rows = rows_of("cold_start", "kf2d", "--device", "cpu", "--precision", "float32", "--set", "train.batch=2")
    assert [(row["cache"], row["form"]) for row in rows] == [
        (cache, form) for cache in ("empty", "full") for form in ("parallel", "serial")
    ]
    for row in rows:
        assert row["same_losses"] and row["kernels"] == 0
        assert 0 < row["first"] < row["all"] < row["since_start"]


def test_cpu_benchmark(rows_of):
    rows = rows_of("cpu", "--repeats", "1", "--threads", "1", "--grids", "16,6x5,4x4x4", "--cases", "demo")
    assert {row["form"] for row in rows} == {"ours", "rfft", "naive", "copies", "shifted", "planes"}
    assert len(rows) == 3 * 2 * 2 * 4 + 2 * 5
    assert all(row["over_ours"] == 1 for row in rows if row["form"] == "ours")


@pytest.mark.parametrize("padding", [("circular",), ("zeros",), ("zeros", "circular"), ("circular", "zeros", "zeros")])
@pytest.mark.parametrize("layout", ["copies", "shifted", "planes"])
def test_cpu_convolution_layouts_agree(script, padding, layout):
    axes = len(padding)
    for kernel in (3, 5):
        x = torch.randn(2, *(7, 6, 8)[:axes], 3, dtype=torch.float64)
        weight, bias = torch.randn(3, 1, *(kernel,) * axes, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
        expected = depthwise_convolution(x, weight, bias, padding)
        actual = script("cpu").LAYOUTS[layout](x, weight, bias, padding)
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


def test_cpu_model_forms_agree(script):
    cpu = script("cpu")
    _, config = cpu.cases()["demo"]
    model = build_solver("transolver-sigma", config).double()
    x = torch.randn(1, *config.grid, config.in_channels, dtype=torch.float64)
    outputs = [cpu.in_form(model, form, x) for form in cpu.FORMS]
    for output in outputs[1:]:
        torch.testing.assert_close(output, outputs[0], rtol=0, atol=1e-12)


@pytest.mark.gpu
def test_fused_bf16_loss_curve_is_within_seed_spread_of_float32(script, tmp_path):
    """Loss curves of 200 updates on Darcy: bf16 changes them less than another seed."""
    generate(simulator_of("darcy"), 64, 0, tmp_path / "darcy.h5", "cuda")
    rows = script("curve").compare_curves(tmp_path / "darcy.h5", torch.device("cuda"), steps=200, seeds=3, settings=[])
    assert len(rows) == 10 and rows[-1]["loss"] < rows[0]["loss"] / 2
    assert all(row["difference"] < row["spread"] for row in rows), rows


# --- windows


def test_windows_benchmark(script, monkeypatch, tmp_path):
    out = tmp_path / "windows.jsonl"
    args = ["windows", "--frames", "60", "--rows", "2", "--windows", "20", "--workers", "1", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", args)
    script("windows").main()
    (row,) = map(json.loads, out.read_text().splitlines())
    assert row["ratio"] == pytest.approx(row["row_ms"] / row["mapped_ms"]) and len(row["worker_megabytes"]) == 9
    assert min(row["again_ms"], row["copy_ms"]) > 0


def test_windows_plain_copy_matches_the_reader(script, tmp_path):
    benchmark = script("windows")
    with open_data(benchmark.write(tmp_path, rows=2, frames=60)) as data:
        fields = benchmark.copied(data)(1, 7)
        assert len(fields) == len(benchmark.FIELDS)
        for channel, field in enumerate(fields):
            np.testing.assert_array_equal(field, data[1, 7 : 7 + benchmark.SPAN][..., channel])


# --- errors of trained models


def test_sampling_error_benchmark(script, tmp_path, capsys):
    """One window per trajectory, so the deviation over windows and that over trajectories are the same."""
    from sigmasolver import load
    from sigmasolver.model_cards.score import score, unseen_windows

    benchmark, cpu = script("sampling_error"), torch.device("cpu")
    generate(replace(simulator_of("darcy"), grid=85), 3, 7, tmp_path / "unseen.h5")  # with stride 5: 17 × 17
    (row,) = benchmark.rows_for("darcy", tmp_path / "unseen.h5", None, cpu)
    with open_store(tmp_path / "unseen.h5") as store:
        (expected,) = score(load("darcy"), unseen_windows(store, recipe_of("darcy")), recipe_of("darcy"))
    assert row["value"] == pytest.approx(expected["value"], rel=1e-5)
    assert row["deviation"] == pytest.approx(expected["deviation"], rel=1e-3)
    assert row["standard_error"] == row["deviation"] / math.sqrt(3)
    assert row["standard_error_of_test_split"] == row["deviation"] / math.sqrt(200)
    generate(replace(simulator_of("darcy"), grid=85), 1, 0, tmp_path / "seen.h5")
    with pytest.raises(SystemExit, match="another seed than that of the training data"):
        benchmark.rows_for("darcy", tmp_path / "seen.h5", None, cpu)


def test_screening_benchmark(script, tmp_path):
    screening = script("screening")
    flows = replace(
        screening.FLOWS,
        task=replace(screening.FLOWS.task, grid=(16, 16), train=2, test=1),
        flow=replace(screening.FLOWS.flow, grid=32, stored=32, frames=30, step=1 / 96),
        trajectories=3,
    )
    names = ("base", "clip-1", "half-spacing", "pushforward", "augment")
    rows = [row for name in names for row in screening.train(flows, name, 42, 2, tmp_path)]
    base, clipped, other_flow = ([row for row in rows[i : i + 6] if row["model"] != "persistence"] for i in (0, 6, 12))
    assert [row["lead"] for row in base] == [None, 1, 16] and {row["step"] for row in rows} == {2}
    assert base[0]["data"] == clipped[0]["data"] != other_flow[0]["data"]
    assert load_recipe(Run(tmp_path / "kolmogorov-pushforward-2-42")).train.push_after == 1
    assert rows[-4]["factor"] == "augment" and rows[-6]["value"] != base[0]["value"]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    change = 100 * (clipped[0]["value"] / base[0]["value"] - 1)
    lines = screening.table(flows, path).splitlines()
    assert lines[2].startswith("| 2 | base | 1 |") and lines[2].endswith("| – |")
    assert lines[3].startswith(f"| 2 | clip-1 | 1 | {100 * clipped[1]['value']:.3g} |")
    assert lines[3].endswith(f"| {change:+.1f} % |")


def test_screening_of_darcy_measures_both_splits(script, tmp_path):
    screening = script("screening")
    darcy = replace(
        screening.DARCY,
        task=replace(screening.DARCY.task, grid=(11, 11), train=6, test=3, space_stride=2),
        flow=replace(screening.DARCY.flow, grid=21),
        trajectories=9,
    )
    rows = [row for name in ("base", "augment") for row in screening.train(darcy, name, 42, 3, tmp_path)]
    models = [row for row in rows if row["model"] != "training-mean"]
    assert [(row["part"], row["windows"]) for row in models] == [("train", 6), ("test", 3)] * 2
    assert len({row["value"] for row in models}) == 4
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    change = 100 * (models[3]["value"] / models[1]["value"] - 1)
    errors = " | ".join(f"{100 * row['value']:.3g}" for row in models[2:])
    assert screening.table(darcy, path).splitlines()[3] == f"| 3 | augment | 1 | {errors} | {change:+.1f} % |"


@pytest.mark.parametrize("system", ["kolmogorov", "darcy"])
def test_table_of_the_screening_is_up_to_date(script, system):
    screening = script("screening")
    name = {"kolmogorov": "screening", "darcy": "screening_darcy"}[system]
    table = screening.table(screening.SYSTEMS[system], FOLDER.parent / "results" / f"{name}.jsonl")
    assert table in (FOLDER.parent / "docs" / "study.md").read_text()


@pytest.mark.parametrize("name", ["linear-xavier", "spectral-0.1"])
def test_screening_initial_weights(script, name):
    """Only the weights in question are drawn again, with the stated deviation."""
    screening, parameters = script("screening"), []
    with forgotten():
        for index, factor in enumerate((screening.Factor(), screening.FLOWS.factors[name])):
            usual = screening.FLOWS.model
            model = screening.with_initial_weights(f"{name}-{index}", factor, usual)
            assert screening.with_initial_weights(f"{name}-{index}", factor, usual) == model, "for the next seed"
            torch.manual_seed(0)
            parameters.append(dict(build_solver(model.name, model.config(screening.FLOWS.task)).named_parameters()))
    changed_names = {key for key in parameters[0] if not torch.equal(parameters[0][key], parameters[1][key])}
    matrices = {key for key, weight in parameters[0].items() if key.endswith("weight") and weight.ndim == 2}
    spectral = {key for key, weight in parameters[0].items() if weight.shape[-1] == 2 and weight.ndim == 4}
    assert spectral and changed_names == (matrices if name == "linear-xavier" else spectral)
    key = max(changed_names, key=lambda key: parameters[1][key].numel())
    weight = parameters[1][key]
    expected = 0.1 if name == "spectral-0.1" else weight.shape[1] ** -0.5
    assert weight.std().item() == pytest.approx(expected, rel=0.05)
