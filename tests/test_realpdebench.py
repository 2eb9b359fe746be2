"""The tasks of RealPDEBench from files to table: a few training steps, all test windows, all metrics."""

import json

import pytest
import torch
from rich.console import Console

import sigmasolver
from sigmasolver.cli.terminal import print_scores
from sigmasolver.data.formats import open_data
from sigmasolver.evaluate import Request, evaluate_run
from sigmasolver.evaluate import metrics as m
from sigmasolver.forecast.checkpoint import load, load_recipe
from sigmasolver.models import count_parameters
from sigmasolver.recipes import RECIPES, changed, recipe_of
from sigmasolver.report.paper_tables import TABLES
from sigmasolver.report.tables import comparison
from sigmasolver.runs import Run
from sigmasolver.simulate.fixtures.realpdebench import write_realpdebench
from sigmasolver.tasks import REALPDEBENCH
from sigmasolver.train.engine import Execution
from sigmasolver.train.job import train_run
from sigmasolver.train.loop import validate

TASKS = ("controlled-cylinder", "fsi", "foil", "combustion", "cylinder")
TINY = (
    "model.width=16", "model.depth=1", "model.heads=2", "model.slices=4", "model.modes=3", "train.updates=3",
    "train.batch=2", "train.checks=1",
)  # fmt: skip


def small_recipe(name, *more):
    recipe = recipe_of(name)
    return changed(recipe, [f"task.grid={tuple(points // 4 for points in recipe.task.grid)}", *TINY, *more])


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("realpdebench")
    for task in TASKS:
        write_realpdebench(task, folder)
    return folder


@pytest.fixture(scope="module")
def rows(root, tmp_path_factory):
    """Train every task for three steps and evaluate it on its test windows."""
    folder, measured = tmp_path_factory.mktemp("runs"), {}
    for task in TASKS:
        train_run(small_recipe(task), root / task.replace("-", "_"), Run(folder / task))
        measured[task] = evaluate_run(Run(folder / task))
    return folder, measured


def value(rows, metric, field, model="persistence"):
    (number,) = [row["value"] for row in rows if (row["metric"], row["field"], row["model"]) == (metric, field, model)]
    return number


@pytest.mark.parametrize("task", TASKS)
def test_records_equal_metrics_of_all_test_windows(root, rows, task):
    with open_data(root / task.replace("-", "_")) as data:
        windows = small_recipe(task).windows_of(data, "test")
        history, true = windows.batch(range(len(windows)))
    persistence = history[:, -1:, ..., : true.shape[-1]].expand_as(true)
    all_fields = "all" if true.shape[-1] > 1 else "intensity"
    measured = rows[1][task]
    assert {row["windows"] for row in measured} == {len(true)}
    expected = {
        ("rmse", all_fields): m.rmse(persistence, true),
        ("mae", all_fields): m.mae(persistence, true),
        ("relative_l2_joint", None): m.relative_l2_joint(persistence, true).mean(),
        ("frmse", all_fields): m.frmse(persistence, true),
        ("r2", all_fields): m.r2(persistence, true),
        ("kinetic_energy", None): m.kinetic_energy(persistence, true).mean(),
        ("frequency_error", None): m.frequency_error(persistence, true).mean(),
    }
    expected |= {
        (f"frmse_{band}", all_fields): number
        for band, number in zip(("low", "mid", "high"), m.frmse_bands(persistence, true), strict=True)
    }
    for (metric, field), number in expected.items():
        assert value(measured, metric, field) == pytest.approx(float(number), rel=1e-6), metric
        assert value(measured, metric, field, "transolver-sigma") is not None


def test_realpdebench_table_from_runs(rows):
    measured = [row for task in TASKS for row in rows[1][task]]
    table = TABLES["realpdebench"].make(measured)
    (ours,) = [cells for cells in table.rows if cells[0] == "Transolver-σ" and cells[1] != "paper"]
    assert len(ours) == len(table.columns) and all(any(c.isdigit() for c in cell) for cell in ours[2:])


def test_run_records_data_notes_and_parts(rows):
    data = Run(rows[0] / "fsi").read_json("data.json")
    assert data["listed"] == rows[1]["fsi"][0]["windows"]
    assert any("as the publisher intends" in note for note in data["notes"])
    assert set(data["parts"]["train"]) & set(data["parts"]["test"])


def test_test_modes_are_evaluated_separately(rows):
    run = Run(rows[0] / "cylinder")
    counts = {mode: evaluate_run(run, Request(cohort=mode))[0]["windows"] for mode in ("seen", "in_dist", "out_dist")}
    assert sum(counts.values()) == rows[1]["cylinder"][0]["windows"] and min(counts.values()) > 0
    assert {row["cohort"] for row in evaluate_run(run, Request(cohort="unseen"))} == {"unseen"}
    with pytest.raises(ValueError, match="did you mean unseen"):
        Request(cohort="unsen")


def test_open_dataset_and_open_windows_in_place(root):
    with sigmasolver.open_dataset(root / "fsi") as data:
        assert data.shape == (6, 100, 32, 32, 5)
    windows = sigmasolver.open_windows(root / "fsi", small_recipe("fsi"), "test")
    assert windows[0][0].shape == (20, 16, 16, 2)


def test_train_on_numerical_and_evaluate_on_measured(root, tmp_path):
    recipe = small_recipe("fsi")
    train_run(recipe, root / "fsi" / "hf_dataset" / "numerical", Run(tmp_path / "run"))
    rows = evaluate_run(Run(tmp_path / "run"), path=root / "fsi")
    with open_data(root / "fsi") as data:
        assert rows[0]["windows"] == len(recipe.windows_of(data, "test"))


def test_train_on_whole_trajectories_and_with_conditions(root, tmp_path):
    for name in ("fsi-whole-trajectories", "controlled-cylinder-conditions"):
        recipe = small_recipe(name)
        folder = root / recipe.task.name.replace("-", "_")
        train_run(recipe, folder, Run(tmp_path / name))
        parts = Run(tmp_path / name).read_json("data.json")["parts"]
        shared = set(parts["train"]) & set(parts["test"])
        assert bool(shared) == (recipe.task.split == "published")
        assert value(evaluate_run(Run(tmp_path / name)), "rmse", "all", "transolver-sigma") > 0


def test_suite_runs_on_download_or_names_missing_files(call, root, tmp_path):
    settings = [argument for setting in (*TINY, "task.grid=(16, 16)") for argument in ("--set", setting)]
    arguments = ["suite", "main", "--only", "fsi*42", "--out", tmp_path / "runs", *settings]
    code, _, err = call(*arguments, "--data", root)
    assert code == 0, err
    assert "already finished" in call(*arguments, "--data", root)[1]
    code, _, err = call("table", "realpdebench", tmp_path / "runs" / "fsi-transolver-sigma-42")
    assert code == 0, err
    code, _, err = call(*arguments, "--data", tmp_path / "nothing", "--out", tmp_path / "others")
    err = " ".join(err.split())
    for part in ("hf_dataset/real/data-*.arrow", "_index_real.json", "real/*.h5", "sigmasolver make-fixture fsi --out"):
        assert part in err
    assert code == 2


def test_train_prints_notes_and_windows_lists_windows(call, root, tmp_path):
    settings = [argument for setting in (*TINY, "task.grid=(16, 32)") for argument in ("--set", setting)]
    code, out, err = call("train", "cylinder", "--data", root, "--out", tmp_path / "run", *settings)
    assert code == 0, err
    assert Run(tmp_path / "run").read_json("data.json")["path"] == str((root / "cylinder").resolve())
    assert "as the publisher intends" in out and "data of version 2.0.1" in out
    code, out, err = call("windows", "cylinder", "--data", root / "cylinder", "--split", "test", *settings)
    assert code == 0 and "listed one by one in" in err
    index = json.loads((root / "cylinder" / "hf_dataset" / "test_index_real.json").read_text())
    assert len(out.splitlines()) == 1 + len(index)


def test_print_scores_names_both_relative_errors(rows, capsys):
    """The mean over fields and the joint error of all fields, which differ where a component is small."""
    measured = rows[1]["fsi"]
    print_scores(Console(width=200), measured)
    out = capsys.readouterr().out
    mean, joint = (100 * value(measured, *key) for key in (("relative_l2", "all"), ("relative_l2_joint", None)))
    assert mean > 2 * joint
    assert out.startswith("fsi: relative L2 error, mean over fields, of free forecasts on 16 × 16, ")
    assert f"  persistence: relative L2 error of all fields together {joint:.3g} %, RMSE " in out
    print_scores(Console(width=200), rows[1]["combustion"])
    assert "over fields" not in (out := capsys.readouterr().out) and "together" not in out  # a single field
    assert "Relative L2 error on fsi, mean over fields, mean over windows (" in comparison(measured).caption
    assert "relative L2 error of all fields together" in TABLES["realpdebench"].make(measured).caption


# Batch size, learning rate and updates of the benchmark's own training runs.
BENCHMARK = {
    "unet": {"fsi": (16, 1e-3, 10_000), "other": (12, 1e-4, 10_000)},
    "fno": {"fsi": (32, 1e-2, 5_000), "combustion": (64, 1e-2, 2_000), "other": (32, 1e-4, 4_000)},
    "transolver": {"other": (16, 1e-3, 5_000)},
}


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("model", BENCHMARK)
def test_recipes_of_benchmark_training(task, model):
    recipe = RECIPES[f"{task}-benchmark-{model}"]
    train = recipe.train
    expected = BENCHMARK[model].get(task, BENCHMARK[model]["other"])
    assert (train.batch, train.lr, train.updates) == expected
    assert (train.weight_decay, train.clip, train.loss, train.keep, train.checks) == (0.0, None, "squared", "best", 50)
    assert recipe.task == RECIPES[task].task and recipe.model.name == model


@pytest.mark.parametrize("task", TASKS)
def test_recipes_of_benchmark_model_sizes(task):
    fno, transolver = (RECIPES[f"{task}-benchmark-{model}"].model for model in ("fno", "transolver"))
    assert (fno.width, fno.depth, fno.modes) == (128, 4, 16)  # of its 4, 16, 16 in time, height and width
    assert (transolver.width, transolver.depth, transolver.slices, transolver.heads) == (256, 1, 16, 8)
    assert transolver.options.expansion == 4
    assert all(points // 2 + 1 >= fno.modes for points in RECIPES[task].task.grid)


def test_benchmark_schedule_is_cosine():
    from sigmasolver.train.optimisers import OneCycle

    train = RECIPES["fsi-benchmark-unet"].train
    rates = OneCycle(train.lr, 1000, train.warmup, train.start_divisor, train.final_divisor).rate(torch.arange(1000))
    cosine = train.lr / 2 * (1 + torch.cos(torch.pi * torch.arange(1, 1001, dtype=torch.float64) / 1000))
    torch.testing.assert_close(rates, cosine, rtol=0, atol=1e-12)


def test_benchmark_checkpoint_criterion_is_rmse(rows, root):
    """Over all validation windows, relative to the RMS of the truth, which is the same at every check."""
    assert {RECIPES[f"{task}-benchmark-{model}"].train.check for task in TASKS for model in BENCHMARK} == {"rmse"}
    run = Run(rows[0] / "fsi")
    windows = sigmasolver.open_windows(root / "fsi", load_recipe(run), "validation")
    history, true = windows.batch(range(len(windows)))
    forecaster = load(run.path)
    expected = m.rmse(forecaster.rollout(history, 20).frames, true) / true.double().square().mean().sqrt()
    assert validate(forecaster, windows, Execution(), "rmse") == pytest.approx(float(expected), rel=1e-6)
    assert validate(forecaster, windows, Execution()) != pytest.approx(float(expected), rel=1e-3)


def test_transolver_sigma_sizes_and_task_variants():
    sizes = {
        task: count_parameters("transolver-sigma", RECIPES[task].model.config(RECIPES[task].task)) for task in TASKS
    }
    assert sizes == {
        "controlled-cylinder": 1_776_892, "fsi": 1_784_592, "foil": 1_784_592, "combustion": 1_776_892,
        "cylinder": 1_784_592,
    }  # fmt: skip
    assert [(task.history, task.block, task.horizon, task.stride) for task in REALPDEBENCH] == [
        (10, 10, 10, 20), (20, 20, 20, 10), (20, 20, 20, 20), (20, 20, 20, 1),
    ]  # fmt: skip
    # Numbers of measured trajectories; a split by trajectories tests on those with unseen parameters.
    assert {task: (RECIPES[task].task.train, RECIPES[task].task.test) for task in TASKS} == {
        "cylinder": (72, 20), "controlled-cylinder": (76, 20), "fsi": (39, 12), "foil": (78, 20), "combustion": (24, 6),
    }  # fmt: skip
    grids = {"controlled-cylinder": (128, 256), "fsi": (128, 128), "foil": (128, 256), "combustion": (128, 128)}
    assert {task: RECIPES[f"{task}-full-grid"].task.grid for task in grids} == grids
    twenty = RECIPES["controlled-cylinder-20"].task
    assert (twenty.history, twenty.block, twenty.horizon) == (20, 20, 20)
    for task in TASKS:
        variants = {name: RECIPES[f"{task}-{name}"].task for name in ("real-normaliser", "numerical-normaliser")}
        assert [variant.normaliser for variant in variants.values()] == ["channel", "numerical"]
