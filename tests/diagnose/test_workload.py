"""The paper's efficiency workloads, and small measurements on a CPU."""

import statistics
from dataclasses import replace

import pytest
import torch
from torch import nn

from sigmasolver.data.store import StoreReader, open_store
from sigmasolver.data.windows import Windows
from sigmasolver.diagnose import workload
from sigmasolver.diagnose.efficiency import WARM_UP
from sigmasolver.diagnose.records import read_findings
from sigmasolver.diagnose.workload import Protocol, measure, time_epoch
from sigmasolver.forecast.checkpoint import load_recipe
from sigmasolver.models import Options
from sigmasolver.recipes import ModelRecipe, changed, suite_of
from sigmasolver.runs import Run, read_rows, replace_rows
from sigmasolver.train import dry_run
from sigmasolver.train.dry_run import DryRun, Noise, estimate_cost, frames_of
from sigmasolver.train.engine import Execution
from sigmasolver.train.loop import StepPlan

CPU = torch.device("cpu")
SMALL = [
    "task.grid=(8,8)", "task.train=8", "task.test=2", "model.width=16", "model.depth=1", "model.heads=2",
    "model.slices=4", "model.modes=2",
]  # fmt: skip
MODELS = ("transolver-sigma", "transolver")
SHORT = ("task.history=2", "task.horizon=2")


def small(*names, settings=()):
    return {name: changed(suite_of("efficiency")[name], [*SMALL, *settings]) for name in names}


NS2D, KF2D = (f"{task}-efficiency-transolver-sigma" for task in ("ns2d", "kf2d"))


# --- the workloads (app:efficiency-measurements, tab:efficiency-settings)


def training(recipe):
    """Training windows of strided trajectories without values, and the step plan of an epoch."""
    task = replace(recipe.task, space_stride=1, time_stride=1)
    source = Noise(task, task.train + task.test, frames_of(recipe)[0])
    unstrided = replace(recipe, task=task)
    windows = Windows(source, unstrided.split(len(source)).train, unstrided.training_window_spec())
    return source, windows, StepPlan(unstrided, windows)


@pytest.mark.parametrize("model", MODELS)
def test_efficiency_suite_model_settings(model):
    suite = suite_of("efficiency")
    ns2d, kf2d = (suite[f"{task}-efficiency-{model}"].model for task in ("ns2d", "kf2d"))
    # (L, C, h) and M; MLP ratio two, reference size eight, unified positions.
    assert (ns2d.depth, ns2d.width, ns2d.heads, ns2d.slices) == (8, 256, 8, 32)
    assert (kf2d.depth, kf2d.width, kf2d.heads, kf2d.slices) == (8, 128, 8, 32)
    assert ns2d.options == kf2d.options == Options(expansion=2, positions="distances")
    assert (ns2d.modes, kf2d.modes) == (4, 8)
    for task in ("ns2d", "kf2d"):
        recipe = suite[f"{task}-efficiency-{model}"]
        assert recipe.model.config(recipe.task).lattice == 8


@pytest.mark.parametrize("model", MODELS)
def test_efficiency_workload_of_ns2d(model):
    recipe = suite_of("efficiency")[f"ns2d-efficiency-{model}"]
    source, windows, plan = training(recipe)
    task, train = recipe.task, recipe.train
    assert (task.train, task.grid, task.history, task.horizon, task.normaliser) == (1000, (64, 64), 10, 10, "none")
    assert (train.batch, plan.per_epoch, train.lr, train.weight_decay) == (2, 500, 1e-3, 1e-5)
    assert (train.objective, train.accumulate, train.loss) == ("teacher_forced", True, "relative_l2")
    assert train.precision == "float32" and source.header.shape == (20, 64, 64, 1)
    assert windows.spec.horizon == 10  # supervised frames


def test_ns2d_epoch_has_5000_forward_passes_of_two_samples():
    recipe = changed(suite_of("efficiency")[NS2D], SMALL)
    update, seen = DryRun(recipe, Execution()), []
    update.stepper.model.register_forward_hook(lambda module, inputs, output: seen.append(len(inputs[0])))
    update()
    assert seen == [2] * 10 and 500 * len(seen) == 5_000


@pytest.mark.parametrize("model", MODELS)
def test_efficiency_workload_of_kf2d(model):
    recipe = suite_of("efficiency")[f"kf2d-efficiency-{model}"]
    source, windows, plan = training(recipe)
    task, train = recipe.task, recipe.train
    assert (task.train, task.grid, task.space_stride, task.time_stride) == (100, (128, 128), 2, 2)
    assert source.header.shape == (160, 128, 128, 1) and task.normaliser == "temporal"
    assert (windows.windows_per_trajectory, len(windows), plan.per_epoch) == (134, 13_400, 6_700)
    assert (windows.spec.history, windows.spec.horizon) == (10, 4)  # four supervised frames, one call
    assert (train.objective, train.accumulate, task.block) == ("direct", False, 4)
    assert (train.batch, train.lr, train.weight_decay, train.loss) == (2, 5e-4, 1e-4, "relative_l2")
    assert max(row.future for row in windows.rows()) + 16 <= 160, "sixteen forecast frames for every window"


def test_workload_storage_matches_the_paper():
    storage = {}
    for name in (NS2D, KF2D):
        rows = workload._storage(suite_of("efficiency")[name]).rows
        storage[name] = {row["metric"]: f"{row['value']:.2f}" for row in rows}
    assert storage[NS2D]["parameter_megabytes"] == "19.44" and storage[KF2D]["position_megabytes"] == "4.19"


# --- one process


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """Stores of random trajectories and their recipes."""
    folder = tmp_path_factory.mktemp("stores")
    return {name: workload._store(recipe, None, folder) for name, recipe in small(NS2D, KF2D).items()}


def test_time_epoch_times_a_full_epoch_and_reads_batches_from_the_file(stores, monkeypatch):
    recipe, path = stores[NS2D]
    read, original = [], StoreReader.__getitem__
    monkeypatch.setattr(StoreReader, "__getitem__", lambda self, key: read.append(key) or original(self, key))
    timing = time_epoch(recipe, path, CPU)
    assert timing.timed == timing.per_epoch == 4 and timing.update_seconds > 0
    windows = [key for key in read if isinstance(key[1], slice) and key[1].stop - key[1].start == 20]
    # Two windows per update: two updates for peak memory, the warm-up, the epoch.
    assert len(windows) >= 2 * (2 + WARM_UP + timing.timed)


def test_time_epoch_stops_at_the_time_limit(stores):
    recipe, path = stores[KF2D]
    timing = time_epoch(recipe, path, CPU, seconds=0.01)
    assert timing.per_epoch == 8 * 134 // 2 and 1 <= timing.timed < timing.per_epoch


def test_time_epoch_peak_matches_the_dry_run(stores, monkeypatch):
    monkeypatch.setattr(dry_run, "TIMING_SECONDS", 0.0)  # only its memory is compared
    recipe, path = stores[NS2D]
    wide = replace(recipe, model=replace(recipe.model, width=64, slices=8))
    folded = changed(wide, ["train.accumulate=false"])
    peaks = [time_epoch(variant, path, CPU, seconds=0.01).peak for variant in (wide, folded)]
    for peak, variant in zip(peaks, (wide, folded), strict=True):
        assert peak == pytest.approx(estimate_cost(variant, Execution()).memory, rel=0.05)
    assert peaks[1] > 3 * peaks[0]


def test_time_epoch_trains_at_the_learning_rate_of_the_recipe(stores, monkeypatch):
    """The optimiser step is timed too, at the learning rate of the paper."""
    recipe, path = stores[KF2D]
    recorded = []
    original = workload.Updates

    class Watched(original):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            assert bool((self.stepper.rates == 5e-4).all())
            recorded.append(
                (self.stepper.model, nn.utils.parameters_to_vector(self.stepper.model.parameters()).clone())
            )

    monkeypatch.setattr(workload, "Updates", Watched)
    time_epoch(recipe, path, CPU, seconds=0.01)
    ((model, before),) = recorded
    assert not torch.equal(nn.utils.parameters_to_vector(model.parameters()), before)


# --- all processes


@pytest.fixture
def timed_in_process(monkeypatch):
    """Time in this process, since starting others takes seconds; yields the names in the order of the timings."""
    order = []

    def timed(name, recipe, path, device, seconds):
        order.append(name)
        return time_epoch(recipe, path, device, seconds)

    monkeypatch.setattr(workload, "_in_a_process", timed)
    return order


def test_measure_rotates_recipes_and_averages_over_processes(timed_in_process, tmp_path):
    names = [f"ns2d-efficiency-{model}" for model in MODELS]
    ticks = []
    measured = measure(
        small(*names, settings=SHORT), tmp_path, CPU, Protocol(3, 0.05), tick=lambda *progress: ticks.append(progress)
    )
    assert timed_in_process == [*names, *reversed(names), *names] and ticks[-1] == (6, 6)
    for name in names:
        timings = read_rows(tmp_path / name / "diagnose" / "efficiency_processes.jsonl")
        epochs = [row["update_seconds"] * row["per_epoch"] for row in timings]
        rows = {row["metric"]: row for row in measured[name].rows}
        assert len(epochs) == 3 and rows["seconds_per_epoch"]["value"] == pytest.approx(statistics.mean(epochs))
        assert rows["seconds_per_epoch"]["deviation"] == pytest.approx(statistics.stdev(epochs))
        assert rows["peak_megabytes"]["value"] == max(row["peak"] for row in timings) / 1e6
        # 8 trajectories of 20 frames give 17 windows of 2 + 2 each, 2 in a batch
        assert rows["updates_per_epoch"]["value"] == 8 * 17 // 2 >= rows["timed_updates"]["value"] >= 1
        assert {(row["rounds"], row["seconds"], row["data"]) for row in rows.values()} == {(3, 0.05, "noise")}
    timed_in_process.clear()
    assert measure(small(*names, settings=SHORT), tmp_path, CPU, Protocol(3, 0.05)) == measured and not timed_in_process


def test_measure_resumes(timed_in_process, tmp_path):
    measure(small(NS2D, settings=SHORT), tmp_path, CPU, Protocol(2, 0.05))
    folder = tmp_path / NS2D / "diagnose"
    first, _ = read_rows(folder / "efficiency_processes.jsonl")
    replace_rows(folder / "efficiency_processes.jsonl", [first])
    (folder / "efficiency.jsonl").unlink()
    timed_in_process.clear()
    measure(small(NS2D, settings=SHORT), tmp_path, CPU, Protocol(2, 0.05))
    assert timed_in_process == [NS2D] and read_rows(folder / "efficiency_processes.jsonl")[0] == first
    measure(small(NS2D, settings=SHORT), tmp_path, CPU, Protocol(3, 0.05))  # one more round
    assert timed_in_process == [NS2D] * 2
    measure(small(NS2D, settings=SHORT), tmp_path, CPU, Protocol(1, 0.06))  # a different time limit, so measured again
    assert timed_in_process == [NS2D] * 3
    assert {row["deviation"] for row in read_findings(Run(tmp_path / NS2D), "efficiency").rows} == {None}


def test_measure_reads_user_data(timed_in_process, stores, tmp_path):
    _, path = stores[NS2D]
    recipes = {NS2D: stores[NS2D][0]}
    measured = measure(recipes, tmp_path, CPU, Protocol(1, 0.05), path.parent)
    with open_store(path) as store:
        assert {row["data"] for row in measured[NS2D].rows} == {store.fingerprint}


def test_measure_command_runs_processes_and_feeds_tables_and_figures(call, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # oversubscribed threads would take minutes
    arguments = [argument for setting in (*SMALL, *SHORT) for argument in ("--set", setting)]
    arguments += ["--only", "ns2d-*-sigma", "--rounds", 2, "--seconds", 0.05, "--device", "cpu", "--out", tmp_path]
    code, out, err = call("measure", *arguments)
    assert code == 0 and not err, err
    run = Run(tmp_path / NS2D)
    assert "transolver-sigma" in out and "2 processes each, plain operations, float32, eager" in out
    assert load_recipe(run).model == ModelRecipe(width=16, depth=1, heads=2, slices=4, modes=2)
    assert len(read_rows(tmp_path / NS2D / "diagnose" / "efficiency_processes.jsonl")) == 2
    code, table, _ = call("table", "efficiency", run.path)
    assert code == 0 and "| NS2D | Transolver-σ | 19.44 |" in table and "±" in table
    code, _, _ = call("figure", "efficiency", run.path, "--out", tmp_path)
    assert code == 0 and (tmp_path / "efficiency.png").exists()
    code, _, err = call("measure", *arguments, "--set", "model.slices=2")
    assert code == 2 and "different recipe (model.slices); choose another folder" in err


def test_measure_command_takes_repeated_patterns(call, tmp_path, monkeypatch):
    selected = []

    def record(recipes, *_):
        selected.append(set(recipes))
        raise ValueError("enough")

    monkeypatch.setattr("sigmasolver.diagnose.workload.measure", record)
    out = ("--device", "cpu", "--out", tmp_path / "runs")
    call("measure", "--only", "ns2d-*-sigma", "--only", "kf2d-*-hpm*", *out)
    assert selected == [{"ns2d-efficiency-transolver-sigma", "kf2d-efficiency-hpm-frozen"}]
    code, _, err = call("measure", "--only", "ns2d-*-sigma,kf2d-*", *out)
    assert code == 2 and 'No recipe matches "ns2d-*-sigma,kf2d-*"' in err and len(selected) == 1
    for command in ("measure", "suite"):
        _, help_text, _ = call(command, "--help")
        line = next(line for line in help_text.splitlines() if "--only" in line)
        assert "PATTERN" in line and "NAME,..." not in line


def test_measure_command_reports_errors_in_one_line(call, tmp_path):
    out = ("--device", "cpu", "--out", tmp_path / "runs")
    for options, message in (
        (("--only", "x*"), "list them with: sigmasolver suite efficiency --list"),
        (("--rounds", 0), "must be at least 1, got 0"),
        (("--seconds", 0), "seconds must be positive, got 0.0"),
        (("--data", tmp_path), "not found"),
        (("--set", "model.heads=7"), "width 256 is not divisible by 2 x heads = 14"),
    ):
        code, _, err = call("measure", *options, *out)
        assert code == 2 and message in err and err.count("\n") == 1, err
    assert not (tmp_path / "runs").exists()


def test_failed_timing_process_reports_its_error(stores):
    recipe, path = stores[NS2D]
    other = replace(recipe, task=replace(recipe.task, grid=(16, 16)))
    with pytest.raises(ValueError, match=r"mine: The data have grid 8 × 8, but the recipe has 16 × 16; set"):
        workload._in_a_process("mine", other, path, CPU, 0.05)
