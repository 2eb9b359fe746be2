"""The loop: it learns, it repeats itself, and it can be killed at any moment without a trace in the weights."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import sigmasolver
from sigmasolver.data.generate import generate
from sigmasolver.data.normalise import fit
from sigmasolver.data.store import open_store
from sigmasolver.data.windows import Windows
from sigmasolver.models import Options
from sigmasolver.recipes import ModelRecipe, Recipe, TrainRecipe
from sigmasolver.runs import Run, read_rows, read_tensors
from sigmasolver.simulate.vorticity import DEMO
from sigmasolver.tasks import Task
from sigmasolver.train.loop import order, train
from sigmasolver.trained import build, load

ROOT = Path(sigmasolver.__file__).parents[1]
FLOW = replace(DEMO, grid=32, stored=16, step=1 / 64, burn_in=1.0, frames=8)
TASK = Task("tiny", ("vorticity",), ("vorticity",), (16, 16), 2, 1, 3, 6, 2, "channel")
MODEL = ModelRecipe(width=16, depth=1, heads=2, slices=4, modes=3, options=Options(dropout=0.1))
RECIPE = Recipe(TASK, MODEL, TrainRecipe(epochs=4, batch=4, seed=3, clip=1.0))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "flow.h5"
    generate(FLOW, 8, 0, path)
    return path


def start(path, folder, recipe=RECIPE, watch=None, look=5):
    with open_store(path) as store:
        windows = Windows(store, range(recipe.task.train), recipe.training_windows())
        forecaster = build(recipe, *fit(recipe.task.normaliser, windows))
        train(recipe, windows, forecaster, Run(folder), store.fingerprint, look, watch)
    return forecaster


def weights(folder):
    return read_tensors(Run(folder).weights)[0]


def same(first, second):
    return all(torch.equal(first[name], second[name]) for name in first) and set(first) == set(second)


class Stop(Exception):
    pass


def test_it_learns_and_the_run_forecasts_without_its_data(data, tmp_path):
    recipe = replace(RECIPE, train=replace(RECIPE.train, epochs=30, objective="teacher_forced"))
    forecaster = start(data, tmp_path, recipe)
    losses = [row["loss"] for row in read_rows(Run(tmp_path).log)]
    assert losses[-1] < 0.6 * losses[0], losses
    history = torch.randn(1, 2, 16, 16, 1)
    assert torch.equal(load(tmp_path)(history), forecaster(history))
    with open_store(data) as store:
        assert read_tensors(Run(tmp_path).weights)[1]["data"] == store.fingerprint


@pytest.mark.parametrize("objective", ["direct", "teacher_forced", "pushforward"])
def test_interrupted_and_continued_equals_uninterrupted(data, tmp_path, objective):
    recipe = replace(RECIPE, train=replace(RECIPE.train, objective=objective, calls=2, epochs=3))
    start(data, tmp_path / "whole", recipe)

    def stop_at(step):
        def watch(progress):
            if progress.step >= step:
                raise Stop

        return watch

    for step in (5, 15):
        with pytest.raises(Stop):
            start(data, tmp_path / "parts", recipe, stop_at(step))
    start(data, tmp_path / "parts", recipe)
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "parts"))


def test_killed_and_continued_equals_uninterrupted(data, tmp_path):
    code = "from tests.train.test_loop import *; start(sys.argv[1], sys.argv[2], look=1)"
    words = [sys.executable, "-c", code, str(data), str(tmp_path / "killed")]
    process = subprocess.Popen(words, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})
    log, deadline = Run(tmp_path / "killed").log, time.monotonic() + 60
    while len(read_rows(log)) < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    reached = len(read_rows(log))
    start(data, tmp_path / "killed", look=1)
    start(data, tmp_path / "whole", look=1)
    assert 4 <= reached < 36, "the kill came in the middle"
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "killed"))


def test_another_seed_gives_other_weights(data, tmp_path):
    start(data, tmp_path / "a")
    start(data, tmp_path / "b", replace(RECIPE, train=replace(RECIPE.train, seed=4)))
    assert not same(weights(tmp_path / "a"), weights(tmp_path / "b"))


def test_a_loss_that_is_not_finite_stops_with_step_and_windows(tmp_path, data):
    with open_store(data) as store:
        windows = Windows(store, range(6), RECIPE.training_windows())
        forecaster = build(RECIPE, *fit("channel", windows))
        broken = windows.resident("cpu")
        poisoned = order(3, 1, len(broken))[4:8]
        original = broken.batch

        def batch(indices):
            history, future = original(indices)
            return (history * torch.nan if set(indices.tolist()) & {int(poisoned[0])} else history), future

        broken.batch = batch
        with pytest.raises(ValueError, match="is not finite") as caught:
            train(RECIPE, broken, forecaster, Run(tmp_path), "none", look=3)
    assert str(int(poisoned[0])) in str(caught.value)
    tensors, facts = read_tensors(Run(tmp_path).resume)
    assert facts["step"] % 3 == 0
    assert all(torch.isfinite(t).all() for name, t in tensors.items() if name.startswith("model."))


def test_a_finished_run_is_not_trained_again(data, tmp_path):
    start(data, tmp_path)
    before, rows = weights(tmp_path), len(read_rows(Run(tmp_path).log))
    start(data, tmp_path)
    assert same(before, weights(tmp_path)) and len(read_rows(Run(tmp_path).log)) == rows


def test_another_recipe_in_the_folder_is_refused(data, tmp_path):
    start(data, tmp_path)
    with pytest.raises(ValueError, match=r"another recipe \(train\)"):
        start(data, tmp_path, replace(RECIPE, train=replace(RECIPE.train, epochs=5)))


def test_every_epoch_sees_every_window_once_in_another_order():
    orders = [order(seed, epoch, 20).tolist() for seed in (0, 1) for epoch in (0, 1)]
    assert all(sorted(one) == list(range(20)) for one in orders)
    assert len({tuple(one) for one in orders}) == 4


def test_the_log_has_a_row_for_every_look(data, tmp_path):
    start(data, tmp_path)
    steps = [row["step"] for row in read_rows(Run(tmp_path).log)]
    assert steps == [*range(5, 37, 5), 36]
    assert np.isfinite([row["loss"] for row in read_rows(Run(tmp_path).log)]).all()
