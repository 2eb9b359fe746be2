"""The paper's cohorts on stores with the published numbers of test trajectories and frames, on small grids: selected
windows against explicit lists, and records of different cohorts that are kept apart."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest

from sigmasolver.data.header import Header
from sigmasolver.data.layout import Layout
from sigmasolver.data.store import Writer, open_store
from sigmasolver.data.windows import spread_evenly
from sigmasolver.diagnose.records import read_findings, rows_file
from sigmasolver.diagnose.run import diagnose_run
from sigmasolver.evaluate import Request, evaluate_run, windows_of
from sigmasolver.forecast.checkpoint import load_recipe
from sigmasolver.models import Options
from sigmasolver.recipes import ModelRecipe, Recipe, TrainRecipe
from sigmasolver.report.published import cohorts
from sigmasolver.runs import Run, read_rows, replace_rows
from sigmasolver.tasks import COHORTS, TASKS, cohort_of
from sigmasolver.train.job import train_run

FRAMES = {"darcy": 1, "ns2d": 20, "kf2d": 320, "it3d": 20, "smoke3d": 20}
TRAIN = 2
"""Trajectories before the test split; the quality of the model does not matter."""
FAST = Request(batch=100)
STARTS = [0, 7, 14, 21, 28, 35, 42, 49, 56, 63, 70, 77, 84, 91, 98, 105, 112, 119, 126, 133]
WINDOWS = {  # (trajectory of the test split, first frame of the strided history)
    ("rollout", "ns2d"): [(i, 0) for i in range(200)],
    ("rollout", "kf2d"): [(i, start) for i in range(20) for start in STARTS],
    ("rollout", "it3d"): [(i, 0) for i in range(20)],
    ("rollout", "smoke3d"): [(i, 0) for i in range(20)],
    ("decomposition", "ns2d"): [(i, 0) for i in range(200)],
    ("decomposition", "kf2d"): [(i, start) for i in range(20) for start in STARTS],
    ("decomposition", "it3d"): [(i, 0) for i in range(100)],
    ("decomposition", "smoke3d"): [(i, 0) for i in range(200)],
    ("corrections", "darcy"): [(0, 0), (100, 0), (199, 0)],
    ("corrections", "ns2d"): [(0, 0), (100, 0), (199, 0)],
    ("corrections", "kf2d"): [(0, 0), (10, 0), (19, 0)],
    ("corrections", "it3d"): [(0, 0), (50, 0), (99, 0)],
    ("corrections", "smoke3d"): [(0, 0), (100, 0), (199, 0)],
}


def trained(folder, name, test=None):
    """A run of the task on data with the published number of test trajectories and frames, four points per axis."""
    axes = len(TASKS[name].grid)
    task = replace(TASKS[name], grid=(4,) * axes, space_stride=1, train=TRAIN, test=test or TASKS[name].test)
    fields = tuple(dict.fromkeys((*task.inputs, *task.targets)))
    random = np.random.default_rng(0)
    shape = (TRAIN + task.test, FRAMES[name], *task.grid, len(fields))
    values = (1 + 0.1 * random.standard_normal(shape).cumsum(1)).astype(np.float32)
    axis, times = np.arange(4) / 4, np.arange(float(FRAMES[name]))
    layout = Layout(fields, ("1",) * len(fields), ("periodic",) * axes, (axis,) * axes, times)
    with Writer(folder / "data.h5", Header(layout, "test", {}), len(values)) as writer:
        writer.append(values)
    model = ModelRecipe(width=8, depth=1, heads=1, slices=2, modes=1, options=Options())
    run = Run(folder / f"{name}-run")
    train_run(Recipe(task, model, TrainRecipe(updates=1, batch=1, validation=0.0, checks=0)), folder / "data.h5", run)
    return run


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    cache = {}

    def run(name):
        if name not in cache:
            cache[name] = trained(tmp_path_factory.mktemp(name), name)
        return cache[name]

    return run


@pytest.fixture
def run(runs):
    """The NS2D run without records."""
    ns2d = runs("ns2d")
    ns2d.records.unlink(missing_ok=True)
    for path in (ns2d.path / "diagnose").glob("*"):
        path.unlink()
    return ns2d


def rows_by_hand(task, pairs):
    """As returned by `Windows.rows`, in stored frames."""
    step, history, horizon = task.time_stride, task.history, task.horizon
    if task.steady:
        return [(TRAIN + i, 0, 0, 0) for i, _ in pairs]
    return [
        (TRAIN + i, step * s, step * (s + history), step * (s + history + horizon - 1)) for i, s in pairs
    ]  # fmt: skip


def persistence(run, pairs):
    """relative_l2 of persistence for the first field, mean and deviation over these windows, from the raw file."""
    task, errors = load_recipe(run).task, []
    with open_store(run.path.parent / "data.h5") as store:
        for i, s in pairs:
            frames = np.asarray(store[TRAIN + i], np.float64)[:: task.time_stride, ..., 0]
            true = frames[s + task.history : s + task.history + task.horizon]
            still = frames[s + task.history - 1]
            errors.append(np.linalg.norm(still - true) / np.linalg.norm(true))
    return float(np.mean(errors)), float(np.std(errors, ddof=1))


def row_of(rows, metric, model, field):
    (match,) = [
        row for row in rows if (row["metric"], row["model"], row["field"], row["lead"]) == (metric, model, field, None)
    ]
    return match


def test_cohort_sizes_match_the_paper():
    """app:rollout-comparison and tab:decomposition-cohort; three cases for each task with a correction profile."""
    sizes = {name: {task: len(cohort) for task, cohort in tasks.items()} for name, tasks in COHORTS.items()}
    assert sizes["rollout"] == {"ns2d": 200, "kf2d": 400, "it3d": 20, "smoke3d": 20}
    assert sizes["decomposition"] == {task: printed.samples for task, printed in cohorts().items()}
    assert sizes["corrections"] == dict.fromkeys(("darcy", "ns2d", "kf2d", "it3d", "smoke3d"), 3)
    assert {(name, task) for name, tasks in COHORTS.items() for task in tasks} == set(WINDOWS)
    for name, tasks in COHORTS.items():
        for task in tasks:
            assert max(cohort_of(name, task).trajectories) < TASKS[task].test


def test_kf2d_cohort_starts_span_the_sequence():
    """The stride is the largest that fits twenty starts, and the last one is the last possible start."""
    assert TASKS["kf2d"].starts == 134 and list(range(0, 134, 7)) == STARTS and STARTS[-1] == 133


@pytest.mark.parametrize(("name", "task"), WINDOWS)
def test_cohort_windows_match_the_list(runs, name, task):
    run, pairs = runs(task), WINDOWS[name, task]
    recipe = load_recipe(run)
    with open_store(run.path.parent / "data.h5") as store:
        windows = windows_of(run, recipe, store, Request(cohort=name))
        assert [tuple(row) for row in windows.rows()] == rows_by_hand(recipe.task, pairs)
        selected = [0, len(pairs) // 2, len(pairs) - 1]
        history, _ = windows.batch(selected)
        for window, (i, s) in zip(history, (pairs[number] for number in selected), strict=True):
            frames = store[TRAIN + i][:: recipe.task.time_stride]
            np.testing.assert_array_equal(window, frames[s : s + recipe.task.history, ..., : window.shape[-1]])


@pytest.mark.parametrize("task", ["kf2d", "it3d"])
def test_cohort_rows_are_computed_on_its_windows(runs, task):
    rows = evaluate_run(runs(task), Request(cohort="rollout", batch=100))
    pairs = WINDOWS["rollout", task]
    row = row_of(rows, "relative_l2", "persistence", TASKS[task].targets[0])
    assert (row["value"], row["deviation"]) == pytest.approx(persistence(runs(task), pairs), rel=1e-6)
    assert {(entry["cohort"], entry["windows"]) for entry in rows} == {("rollout", len(pairs))}
    other = evaluate_run(runs(task), Request(windows=len(pairs), batch=100))
    assert row_of(other, "relative_l2", "persistence", TASKS[task].targets[0])["value"] != row["value"]
    assert {(entry["cohort"], entry["windows"]) for entry in other} == {(None, len(pairs))}


def test_cohort_of_all_windows_equals_no_cohort(run):
    """NS2D: 200 test trajectories with one start each."""
    full, cohort = evaluate_run(run, FAST), evaluate_run(run, replace(FAST, cohort="rollout"))
    assert [{**row, "cohort": None} for row in cohort] == full and {row["windows"] for row in full} == {200}
    assert evaluate_run(run, FAST) == full and evaluate_run(run, replace(FAST, cohort="rollout")) == cohort
    assert read_rows(run.records) == [*full, *cohort]
    without_cohort = diagnose_run(run, ["decomposition"], FAST)["decomposition"]
    with_cohort = diagnose_run(run, ["decomposition"], replace(FAST, cohort="decomposition"))["decomposition"]
    assert {row["cohort"] for row in with_cohort.rows} == {"decomposition"}
    ignored = ("cohort", "arrays")
    assert [{k: v for k, v in row.items() if k not in ignored} for row in with_cohort.rows] == [
        {k: v for k, v in row.items() if k not in ignored} for row in without_cohort.rows
    ]
    for key, values in without_cohort.arrays.items():
        np.testing.assert_array_equal(with_cohort.arrays[key], values)


def test_decomposition_of_a_cohort_uses_its_windows(runs):
    run, request = runs("kf2d"), Request(cohort="decomposition", batch=100)
    findings = diagnose_run(run, ["decomposition"], request)["decomposition"]
    true = []
    with open_store(run.path.parent / "data.h5") as store:
        fields = np.asarray(store[TRAIN:], np.float64)[:, ::2, ..., 0]
    for i, start in WINDOWS["decomposition", "kf2d"]:
        true.append((fields[i, start + 10 : start + 26] ** 2).sum((1, 2)))
    np.testing.assert_allclose(findings.arrays["truth"][..., -1], true, rtol=1e-5)
    assert {row["windows"] for row in findings.rows} == {400}


def test_corrections_cohort_equals_the_default_cases(run):
    fixed = diagnose_run(run, ["corrections"], Request(cohort="corrections"))["corrections"]
    default = diagnose_run(run, ["corrections"])["corrections"]
    assert spread_evenly(200, 3).tolist() == [0, 100, 199]
    ratios = [
        [row["value"] for row in findings.rows if row["metric"] == "correction_ratio"] for findings in (fixed, default)
    ]  # fmt: skip
    assert len(set(ratios[0])) >= 4 and ratios[0] == ratios[1]  # three different cases, and their mean


def test_records_without_a_cohort_key_are_reused(run):
    old = [{key: entry for key, entry in row.items() if key != "cohort"} for row in evaluate_run(run, FAST)]
    replace_rows(run.records, old)
    assert evaluate_run(run, FAST) == old == read_rows(run.records)
    diagnose_run(run, ["decomposition"], FAST)
    file = rows_file(run, "decomposition")
    replace_rows(file, [{k: v for k, v in row.items() if k != "cohort"} for row in read_rows(file)])
    before = file.read_bytes()
    diagnose_run(run, ["decomposition"], FAST)
    assert file.read_bytes() == before
    diagnose_run(run, ["decomposition"], replace(FAST, cohort="decomposition"))
    assert read_findings(run, "decomposition").rows[0]["cohort"] == "decomposition"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cohort": "roll"}, 'Unknown cohort "roll"; did you mean rollout'),
        ({"cohort": "rollout", "windows": 3}, "use either --windows or --cohort"),
        ({"cohort": "rollout", "split": "train"}, "on the test split, not on the train split"),
        ({"cohort": "rollout", "horizon": 11}, "A window needs 21 frames"),
    ],
)
def test_evaluate_run_rejects_invalid_cohorts(run, options, message):
    with pytest.raises(ValueError, match=message) as caught:
        evaluate_run(run, Request(**options))
    assert "\n" not in str(caught.value) and str(caught.value).endswith((".", "?")) and not run.records.exists()


def test_cohort_requires_enough_data_and_a_matching_task(tmp_path, runs):
    small = trained(tmp_path, "ns2d", test=5)
    with pytest.raises(ValueError, match="rollout of ns2d needs 200 test trajectories, but there are 5; use more"):
        evaluate_run(small, Request(cohort="rollout"))
    with pytest.raises(ValueError, match="decomposition of ns2d needs 200 test trajectories, but there are 5"):
        diagnose_run(small, ["decomposition"], Request(cohort="decomposition"))
    with pytest.raises(ValueError, match="rollout is defined for ns2d, kf2d, it3d, smoke3d, not for darcy"):
        evaluate_run(runs("darcy"), Request(cohort="rollout"))
    with pytest.raises(ValueError, match="starts is 20 windows per trajectory, but only 19 fit"):
        evaluate_run(runs("kf2d"), Request(cohort="rollout", horizon=18))


# --- the commands


def test_cohort_option_of_evaluate_and_diagnose(call, run, tmp_path):
    code, out, err = call("evaluate", run.path, "--cohort", "rollout", "--batch", 50, "--device", "cpu")
    assert code == 0 and "200 windows of the test split, horizon 10, cohort rollout" in out, err
    options = ("--only", "decomposition", "--cohort", "decomposition", "--batch", 50, "--device", "cpu")
    code, out, err = call("diagnose", run.path, *options)
    assert code == 0 and "(200 windows of the test split, horizon 10, cohort decomposition)" in out, err
    for figure in ("rollout", "decomposition"):
        code, _, err = call("figure", figure, run.path, "--out", tmp_path)
        assert code == 0 and (tmp_path / f"{figure}.pdf").exists(), err
    code, out, _ = call("table", "cohorts", run.path)
    assert code == 0 and "| NS2D | 200 | 200 | 1 | 1 | 10 | 10 | decomposition |" in out
    code, out, err = call("evaluate", run.path, "--cohort", "rollout", "--windows", 3)
    assert code == 2 and not out and "use either --windows or --cohort" in err and err.count("\n") == 1


def test_windows_command_lists_a_cohort(call, runs):
    data = runs("kf2d").path.parent / "data.h5"
    small = ("--set", "task.train=2", "--set", "task.space_stride=1", "--set", "train.validation=0")
    code, out, err = call("windows", "kf2d", "--data", data, "--split", "test", "--cohort", "rollout", *small)
    assert code == 0 and "400 windows, 20 in each of 20 trajectories" in err
    lines = [tuple(map(int, line.split("\t"))) for line in out.splitlines()[1:]]
    assert lines == rows_by_hand(TASKS["kf2d"], WINDOWS["rollout", "kf2d"])
    code, _, err = call("windows", "kf2d", "--data", data, "--cohort", "rollout", *small)
    assert code == 2 and "add --split test" in err


def test_reports_reject_runs_of_different_cohorts(call, run, tmp_path):
    shutil.copytree(run.path, tmp_path / "other")
    recipe = json.loads((run.path / "recipe.json").read_text())
    (tmp_path / "other" / "recipe.json").write_text(json.dumps({**recipe, "train": {**recipe["train"], "seed": 99}}))
    evaluate_run(run, Request(cohort="rollout", batch=50))
    evaluate_run(Run(tmp_path / "other"), Request(batch=50))
    both = (run.path, tmp_path / "other")
    for command in (("figure", "rollout"), ("table", "main")):
        code, _, err = call(*command, *both, *(("--out", tmp_path) if command[0] == "figure" else ()))
        assert code == 2 and err.count("\n") == 1
        assert "ns2d-run was measured with cohort rollout and other with cohort none, so they cannot" in err
    evaluate_run(run, Request(batch=50))
    code, _, err = call("figure", "rollout", *both, "--out", tmp_path)
    assert code == 2 and "measured with the cohorts rollout and none; select one with --where cohort=rollout" in err
    code, _, err = call("figure", "rollout", *both, "--out", tmp_path, "--where", "cohort=none")
    assert code == 0, err
    code, _, err = call("figure", "rollout", run.path, "--out", tmp_path, "--where", "cohort=rollout")
    assert code == 0, err
    forced = Run(tmp_path / "other")  # evaluated above with protocol free and without a cohort
    evaluate_run(forced, Request(protocol="teacher-forced", cohort="rollout", batch=50))
    code, _, err = call("figure", "teacher-forcing", forced.path, "--out", tmp_path)
    assert code == 2 and "other was measured with the cohorts none and rollout; select one" in err
