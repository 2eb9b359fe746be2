"""Rows of a suite, interrupted by a time limit or moved to another machine, match an uninterrupted training."""

import shutil
from dataclasses import replace

import pytest
import torch

from sigmasolver.data.store import open_store
from sigmasolver.experiments.queue import Deadline, OutOfTimeError, ensure_store, fraction_done, is_done, run_row
from sigmasolver.recipes import ModelRecipe, Recipe, TrainRecipe, recipe_of
from sigmasolver.runs import Run, read_rows, read_tensors
from sigmasolver.runtime.parallel import World
from sigmasolver.simulate import SIMULATORS, simulator_of
from sigmasolver.simulate.generate import generate
from sigmasolver.simulate.vorticity import DEMO
from sigmasolver.tasks import Task
from sigmasolver.train.engine import Execution
from sigmasolver.train.job import resume_run, train_run
from tests.data.waves import Waves

FIELD = ("vorticity",)
TASK = Task("demo", FIELD, FIELD, (16, 16), 2, 1, 4, 2, 1, "channel", space_stride=4)
MODEL = ModelRecipe(width=16, depth=1, heads=2, slices=4, modes=3)
RECIPE = Recipe(TASK, MODEL, TrainRecipe(updates=23, batch=2, validation=0.0, ema=0.9, noise=0.01))
EXECUTION = Execution(World())


class StopAfter:
    """A stop callback that returns True after n calls."""

    def __init__(self, calls):
        self.remaining = calls

    def __call__(self):
        self.remaining -= 1
        return self.remaining < 0


@pytest.fixture(scope="module", autouse=True)
def coarse_demo():
    """Simulate on the stored grid and without burn-in, for speed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SIMULATORS, "demo", replace(DEMO, grid=DEMO.stored, burn_in=0.0))
        yield


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    ensure_store(RECIPE, folder, [RECIPE], 7, EXECUTION)
    return folder


@pytest.fixture(scope="module")
def uninterrupted(data, tmp_path_factory):
    """The same training without interruption."""
    run = Run(tmp_path_factory.mktemp("runs") / "uninterrupted")
    run_row(RECIPE, data / "demo.h5", run, EXECUTION, Deadline())
    return run


def equal_weights(first, second):
    (tensors, _), (others, _) = read_tensors(first.weights), read_tensors(second.weights)
    return tensors.keys() == others.keys() and all(torch.equal(tensors[name], others[name]) for name in tensors)


def test_training_stopped_at_any_step_resumes_to_the_same_weights(data, uninterrupted, tmp_path):
    for calls in (0, 1, 7, 21):
        run = Run(tmp_path / str(calls))
        stop = StopAfter(calls)
        train_run(RECIPE, data / "demo.h5", run, EXECUTION, stop=stop)
        assert not run.finished and not run.weights.exists()
        assert fraction_done(run) == (calls + 1) / 23
        resume_run(run, execution=EXECUTION, stop=StopAfter(3))
        assert fraction_done(run) == min(calls + 1 + 4, 23) / 23
        resume_run(run, execution=EXECUTION)
        assert run.finished and equal_weights(run, uninterrupted)
        logged = [row["step"] for row in read_rows(run.log)]
        assert logged == sorted(set(logged)) and logged[-1] == 23


def test_training_stopped_at_the_last_step_is_finished(data, uninterrupted, tmp_path):
    run = Run(tmp_path / "run")
    train_run(RECIPE, data / "demo.h5", run, EXECUTION, stop=StopAfter(22))
    assert run.finished and equal_weights(run, uninterrupted)


def test_run_row_resumes_elsewhere_with_data_simulated_again(data, uninterrupted, tmp_path):
    run = Run(tmp_path / "here" / "run")
    train_run(RECIPE, data / "demo.h5", run, EXECUTION, stop=StopAfter(9))
    shutil.copytree(run.path, tmp_path / "there" / "run")
    run = Run(tmp_path / "there" / "run")
    store = ensure_store(RECIPE, tmp_path / "there" / "data", [RECIPE], 7, EXECUTION)
    assert store.read_bytes() == (data / "demo.h5").read_bytes()
    run_row(RECIPE, store, run, EXECUTION, Deadline())
    assert is_done(run, RECIPE) and equal_weights(run, uninterrupted)
    other = ensure_store(RECIPE, tmp_path / "other", [RECIPE], 8, EXECUTION)
    with pytest.raises(ValueError, match="was started with other data: their fingerprint is"):
        train_run(RECIPE, other, run, EXECUTION)


def test_ensure_store_is_large_enough_for_every_recipe(tmp_path):
    larger = replace(RECIPE, task=replace(TASK, train=3))
    path = ensure_store(RECIPE, tmp_path, [RECIPE, larger, recipe_of("ns2d")], 7, EXECUTION)
    assert ensure_store(larger, tmp_path, [RECIPE, larger], 7, EXECUTION) == path
    with open_store(path) as store:
        assert len(store) == 4
        # Both rows are tested on the same trajectory.
        assert RECIPE.split(len(store)).test == larger.split(len(store)).test == (3,)


def test_run_row_out_of_time_leaves_consistent_state(data, uninterrupted, tmp_path):
    expired = Deadline()
    expired.end = 0.0
    run = Run(tmp_path / "run")
    with pytest.raises(OutOfTimeError):
        run_row(RECIPE, data / "demo.h5", run, EXECUTION, expired)
    assert fraction_done(run) == 1 / 23
    train_run(RECIPE, data / "demo.h5", run, EXECUTION)
    with pytest.raises(OutOfTimeError):  # an aborted evaluation writes nothing
        run_row(RECIPE, data / "demo.h5", run, EXECUTION, expired)
    assert run.finished and not run.records.exists() and not is_done(run, RECIPE)
    run_row(RECIPE, data / "demo.h5", run, EXECUTION, Deadline(5))
    assert is_done(run, RECIPE)
    values = {row["value"] for row in read_rows(run.records) if row["metric"] == "rmse"}
    assert values == {row["value"] for row in read_rows(uninterrupted.records) if row["metric"] == "rmse"}


def test_run_row_evaluates_on_some_windows(data, uninterrupted, tmp_path):
    shutil.copytree(uninterrupted.path, tmp_path / "run")
    run = Run(tmp_path / "run")
    run.records.unlink()
    run_row(RECIPE, data / "demo.h5", run, EXECUTION, Deadline(), windows=2)
    assert {row["windows"] for row in read_rows(run.records)} == {2}
    assert is_done(run, RECIPE, 2) and not is_done(run, RECIPE, 3) and not is_done(run, RECIPE)
    assert is_done(uninterrupted, RECIPE, 10**6), "more windows than exist means all of them"


def test_finished_run_needs_no_resume_state(data, uninterrupted, tmp_path):
    shutil.copytree(uninterrupted.path, tmp_path / "run")
    run = Run(tmp_path / "run")
    run.resume.unlink()
    assert run.finished and is_done(run, RECIPE) and fraction_done(run) == 1
    before = run.digest
    train_run(RECIPE, data / "demo.h5", run, EXECUTION)
    assert run.digest == before and not run.resume.exists()


def test_queue_errors(uninterrupted, tmp_path):
    cases = [
        (lambda: Deadline(0), "must be positive"),
        (lambda: Deadline(float("nan")), "must be positive"),
        (
            lambda: ensure_store(RECIPE, tmp_path, [RECIPE], None, EXECUTION),
            "Store .*demo.h5 not found; put it there",
        ),
        (lambda: ensure_store(recipe_of("fsi"), tmp_path, [], 0, EXECUTION), "No RealPDEBench data at .*fsi"),
        (
            lambda: is_done(uninterrupted, replace(RECIPE, train=replace(RECIPE.train, seed=1))),
            "different recipe .train.seed",
        ),
        (lambda: is_done(uninterrupted, RECIPE, seed=8), "was trained with data seed 7, not 8"),
    ]
    for call, message in cases:
        with pytest.raises(ValueError, match=message):
            call()
    assert is_done(uninterrupted, RECIPE) and is_done(uninterrupted, RECIPE, seed=7)
    ensure_store(RECIPE, tmp_path, [RECIPE], 7, EXECUTION)
    with pytest.raises(ValueError, match="seed is 7, expected 8"):
        ensure_store(RECIPE, tmp_path, [RECIPE], 8, EXECUTION)
    smaller = replace(RECIPE, task=replace(TASK, train=1))
    with pytest.raises(ValueError, match=r"has 3 trajectories, but this suite uses 2, .* another folder"):
        ensure_store(smaller, tmp_path, [smaller], 7, EXECUTION)


def test_ensure_store_uses_imported_data_as_is(tmp_path):
    path = generate(Waves(), 2, 3, tmp_path / "demo.h5").path
    before = path.read_bytes()
    assert ensure_store(RECIPE, tmp_path, [RECIPE], 7, EXECUTION) == path and path.read_bytes() == before


def test_ensure_store_out_of_time_keeps_complete_trajectories(tmp_path):
    def stop(done, total, fraction):
        if done:
            raise OutOfTimeError("now")

    larger = replace(RECIPE, task=replace(TASK, train=simulator_of("demo").batch_size() + 1))
    with pytest.raises(OutOfTimeError, match="simulating demo"):
        ensure_store(larger, tmp_path, [larger], 7, EXECUTION, stop)
    with open_store(tmp_path / "demo.h5") as store:
        assert 0 < len(store) < store.count
