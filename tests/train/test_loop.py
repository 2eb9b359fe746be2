"""The training loop: it learns, is reproducible, and can be killed at any moment and resumed to the same weights."""

import signal
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from sigmasolver.data.normalise import fit
from sigmasolver.data.store import open_store
from sigmasolver.data.windows import Windows
from sigmasolver.forecast.checkpoint import build, load, write_normalisers
from sigmasolver.models import Options, build_solver
from sigmasolver.recipes import ModelRecipe, Recipe, TrainRecipe
from sigmasolver.runs import Run, read_rows, read_tensors, write_tensors
from sigmasolver.simulate.generate import generate
from sigmasolver.simulate.vorticity import DEMO
from sigmasolver.tasks import Task
from sigmasolver.train import loop
from sigmasolver.train.loop import Data, StepPlan, order, train
from tests.forked import Forked

FLOW = replace(DEMO, grid=32, stored=16, step=1 / 64, burn_in=1.0, frames=8)
TASK = Task("tiny", ("vorticity",), ("vorticity",), (16, 16), 2, 1, 3, 6, 2, "channel")
MODEL = ModelRecipe(width=16, depth=1, heads=2, slices=4, modes=3, options=Options(dropout=0.1))
RECIPE = Recipe(TASK, MODEL, TrainRecipe(epochs=4, batch=4, seed=3, clip=1.0, checks=2))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "flow.h5"
    generate(FLOW, 8, 0, path)
    return path


def start(path, folder, recipe=RECIPE, watch=None, look=5):
    with open_store(path) as store:
        parts = recipe.split(len(store), store.digests)
        windows = Windows(store, parts.train, recipe.training_window_spec())
        validation = Windows(store, parts.validation, recipe.evaluation_window_spec())
        inputs, targets = fit(recipe.task.normaliser, windows)
        forecaster = build(recipe, inputs, targets)
        write_normalisers(Run(folder), inputs, targets, store.fingerprint)
        data = Data(windows, validation, store.fingerprint)
        train(recipe, data, forecaster, Run(folder), watch=watch, look=look, keep_seconds=0)
    return forecaster


def weights(folder):
    return read_tensors(Run(folder).weights)[0]


def same(first, second):
    return all(torch.equal(first[name], second[name]) for name in first) and set(first) == set(second)


class Stop(Exception):
    pass


def test_train_reduces_the_loss_and_the_run_loads_without_data(data, tmp_path):
    recipe = replace(RECIPE, train=replace(RECIPE.train, epochs=30, objective="teacher_forced"))
    forecaster = start(data, tmp_path, recipe)
    losses = [row["loss"] for row in read_rows(Run(tmp_path).log)]
    assert losses[-1] < 0.6 * losses[0], losses
    history = torch.randn(1, 2, 16, 16, 1)
    assert torch.equal(load(tmp_path)(history), forecaster(history))
    with open_store(data) as store:
        assert read_tensors(Run(tmp_path).weights)[1]["data"] == store.fingerprint


@pytest.mark.parametrize("objective", ["direct", "teacher_forced", "pushforward"])
def test_resume_after_an_exception_gives_identical_weights(data, tmp_path, objective):
    plan = replace(RECIPE.train, objective=objective, calls=2, push_every=2, epochs=3, ema=0.9, noise=0.05, keep="best")
    recipe = replace(RECIPE, task=replace(TASK, symmetries="kolmogorov-4"), train=replace(plan, augment=True))
    start(data, tmp_path / "full", recipe)

    def stop_at(step):
        def watch(progress):
            if progress.step >= step:
                raise Stop

        return watch

    for step in (5, 15):
        with pytest.raises(Stop):
            start(data, tmp_path / "resumed", recipe, stop_at(step))
    start(data, tmp_path / "resumed", recipe)
    assert same(weights(tmp_path / "full"), weights(tmp_path / "resumed"))


@pytest.mark.parametrize("name", ["factformer", "hpm-frozen"])
def test_frozen_parameters_stay_unchanged_and_resume(data, tmp_path, name):
    plan = replace(RECIPE.train, epochs=2, ema=0.9)
    recipe = replace(RECIPE, model=replace(MODEL, name=name, options=Options()), train=plan)
    torch.manual_seed(plan.seed)
    initial = build_solver(name, recipe.model.config(recipe.task))
    start(data, tmp_path / "full", recipe)

    def stop(progress):
        if progress.step >= 5:
            raise Stop

    with pytest.raises(Stop):
        start(data, tmp_path / "resumed", recipe, stop)
    start(data, tmp_path / "resumed", recipe)
    final = weights(tmp_path / "resumed")
    assert same(weights(tmp_path / "full"), final)
    unchanged = {key for key, parameter in initial.named_parameters() if torch.equal(final[key], parameter)}
    assert unchanged == {key for key, parameter in initial.named_parameters() if not parameter.requires_grad} != set()


def test_resume_after_sigkill_gives_identical_weights(data, tmp_path):
    code = "import sys; from tests.train.test_loop import start; start(sys.argv[1], sys.argv[2], look=1)"
    process = Forked(code, data, tmp_path / "killed")
    log, deadline = Run(tmp_path / "killed").log, time.monotonic() + 60
    while len(read_rows(log)) < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    reached = len(read_rows(log))
    start(data, tmp_path / "killed", look=1)
    start(data, tmp_path / "full", look=1)
    assert 4 <= reached < 28, "the process must be killed midway"
    assert same(weights(tmp_path / "full"), weights(tmp_path / "killed"))


@pytest.mark.parametrize("function", ["append_row", "write_tensors", "save"])
def test_run_killed_before_its_last_write_is_not_finished(data, tmp_path, monkeypatch, function):
    """Weights of the last step mark a run as finished, so log and state must be written before them."""
    recipe = replace(RECIPE, train=replace(RECIPE.train, updates=3, checks=1))
    start(data, tmp_path / "full", recipe)

    def killed(*values):
        raise Stop

    with monkeypatch.context() as patch, pytest.raises(Stop):
        patch.setattr(loop, function, killed)
        start(data, tmp_path / "resumed", recipe)
    assert not Run(tmp_path / "resumed").finished
    start(data, tmp_path / "resumed", recipe)
    assert Run(tmp_path / "resumed").finished and Run(tmp_path / "resumed").resume.exists()
    assert same(weights(tmp_path / "full"), weights(tmp_path / "resumed"))
    assert [row["step"] for row in read_rows(Run(tmp_path / "resumed").log)] == [3]


def test_seed_changes_the_weights(data, tmp_path):
    start(data, tmp_path / "a")
    start(data, tmp_path / "b", replace(RECIPE, train=replace(RECIPE.train, seed=4)))
    assert not same(weights(tmp_path / "a"), weights(tmp_path / "b"))


def test_non_finite_loss_reports_step_and_windows(tmp_path, data):
    with open_store(data) as store:
        windows = Windows(store, range(6), RECIPE.training_window_spec())
        forecaster = build(RECIPE, *fit("channel", windows))
        broken = windows.resident("cpu")
        poisoned = order(3, 1, 6, broken.windows_per_trajectory)[4:8]
        original = broken.batch

        def batch(indices):
            history, future = original(indices)
            return (history * torch.nan if set(indices.tolist()) & {int(poisoned[0])} else history), future

        broken.batch = batch
        with pytest.raises(ValueError, match="is not finite") as caught:
            train(RECIPE, Data(broken, None, "none"), forecaster, Run(tmp_path), look=3, keep_seconds=0)
    assert str(int(poisoned[0])) in str(caught.value)
    tensors, facts = read_tensors(Run(tmp_path).resume)
    assert facts["step"] % 3 == 0
    assert all(torch.isfinite(t).all() for name, t in tensors.items() if name.startswith("model."))


def test_finished_run_is_not_trained_again(data, tmp_path):
    start(data, tmp_path)
    before, rows = weights(tmp_path), len(read_rows(Run(tmp_path).log))
    start(data, tmp_path)
    assert same(before, weights(tmp_path)) and len(read_rows(Run(tmp_path).log)) == rows


def test_different_recipe_in_the_run_folder_is_rejected(data, tmp_path):
    start(data, tmp_path)
    with pytest.raises(ValueError, match=r"different recipe \(train.epochs\)"):
        start(data, tmp_path, replace(RECIPE, train=replace(RECIPE.train, epochs=5)))


def test_order_shuffles_all_windows_in_every_epoch():
    orders = [order(seed, epoch, 5, 4).tolist() for seed in (0, 1) for epoch in (0, 1)]
    assert all(sorted(windows) == list(range(20)) for windows in orders)
    assert len({tuple(windows) for windows in orders}) == 4


def test_one_start_takes_every_trajectory_once_and_varies_the_start():
    orders = [order(0, epoch, 5, 4, True) for epoch in range(60)]
    assert all(sorted((windows // 4).tolist()) == list(range(5)) for windows in orders)
    assert set((torch.cat(orders) % 4).tolist()) == {0, 1, 2, 3}


def test_log_has_a_row_for_every_look_and_check(data, tmp_path):
    start(data, tmp_path)
    rows = read_rows(Run(tmp_path).log)
    assert [row["step"] for row in rows] == sorted({5, 10, 15, 20, 25, 14, 28})
    assert [row["step"] for row in rows if "error" in row] == [14, 28]
    assert np.isfinite([row["loss"] for row in rows]).all()


def test_checks_are_limited_to_one_per_step(data):
    with open_store(data) as store:
        windows = Windows(store, range(5), RECIPE.training_window_spec())
        for checks in (7, 10, 10**15):
            plan = StepPlan(replace(RECIPE, train=replace(RECIPE.train, updates=7, checks=checks)), windows)
            assert plan.checks == set(range(1, 8))


def test_validation_error_is_that_of_a_free_rollout(data, tmp_path):
    forecaster = start(data, tmp_path)
    with open_store(data) as store:
        frames = torch.from_numpy(store[5]).double()  # the last training trajectory is the validation split
    errors = []
    for first in range(len(frames) - 4):
        history = frames[None, first : first + 2].float()
        for _ in range(3):
            history = torch.cat((history, forecaster(history[:, -2:]).detach()), dim=1)
        truth = frames[first + 2 : first + 5]
        errors.append(float((history[0, 2:].double() - truth).norm() / truth.norm()))
    assert read_rows(Run(tmp_path).log)[-1]["error"] == pytest.approx(np.mean(errors), rel=1e-5)


DIVERGING = replace(RECIPE, train=replace(RECIPE.train, keep="best", checks=7, epochs=1, lr=0.3, clip=None))
"""The learning rate is far too high: the first steps, where it is still low, are better than all later ones."""


def test_keep_best_saves_the_weights_of_the_lowest_error(data, tmp_path):
    snapshots = {}

    def watch(progress):
        tensors, _ = read_tensors(Run(tmp_path).resume)
        snapshots[progress.step] = {name[6:]: t for name, t in tensors.items() if name.startswith("model.")}

    start(data, tmp_path, DIVERGING, watch, look=1)
    errors = {row["step"]: row["error"] for row in read_rows(Run(tmp_path).log) if "error" in row}
    best = min(errors, key=errors.get)
    assert best < 7 == len(errors) and errors[7] > 1.05 * errors[best], errors
    assert read_tensors(Run(tmp_path).weights)[1]["step"] == best
    assert same(weights(tmp_path), snapshots[best])


def test_keep_best_survives_a_resume(data, tmp_path):
    start(data, tmp_path / "full", DIVERGING, look=1)
    best = read_tensors(Run(tmp_path / "full").weights)[1]["step"]

    def stop(progress):
        if progress.step == best:
            raise Stop

    with pytest.raises(Stop):
        start(data, tmp_path / "resumed", DIVERGING, stop, look=1)
    start(data, tmp_path / "resumed", DIVERGING, look=1)
    assert read_tensors(Run(tmp_path / "resumed").weights)[1]["step"] == best
    assert same(weights(tmp_path / "full"), weights(tmp_path / "resumed"))


def test_validation_does_not_change_the_weights(data, tmp_path):
    """With dropout, because a model left in eval mode after a check would train without it."""
    for checks in (0, 7):
        start(data, tmp_path / str(checks), replace(RECIPE, train=replace(RECIPE.train, checks=checks, epochs=1)))
    assert same(weights(tmp_path / "0"), weights(tmp_path / "7"))


def test_ema_matches_a_reference(data, tmp_path):
    """With decay d the average after n steps is d^n w_0 + (1 - d) Σ d^(n-k) w_k; d and 1 - d must not be swapped."""
    snapshots, decay = [], 0.8
    recipe = replace(RECIPE, train=replace(RECIPE.train, ema=decay, epochs=1, checks=0))

    def watch(progress):
        tensors, _ = read_tensors(Run(tmp_path).resume)
        snapshots.append({name[6:]: t for name, t in tensors.items() if name.startswith("model.")})

    with open_store(data) as store:
        windows = Windows(store, recipe.split(8).train, recipe.training_window_spec())
        initial = build(recipe, *fit("channel", windows)).model.state_dict()
    start(data, tmp_path, recipe, watch, look=1)
    average = {name: tensor.clone() for name, tensor in initial.items()}
    for current in snapshots:
        average = {name: decay * tensor + (1 - decay) * current[name] for name, tensor in average.items()}
    saved = weights(tmp_path)
    assert len(snapshots) == 7
    for name, tensor in average.items():
        torch.testing.assert_close(saved[name], tensor, rtol=1e-5, atol=1e-7)
    assert not same(saved, snapshots[-1])


def test_ema_keeps_batch_norm_statistics(data, tmp_path):
    model = replace(MODEL, name="unet-batchnorm", width=4)
    start(data, tmp_path, replace(RECIPE, model=model, train=replace(RECIPE.train, ema=0.8, updates=3)))
    saved, resumed = weights(tmp_path), read_tensors(Run(tmp_path).resume)[0]
    statistics = {name for name in saved if name.endswith(("running_mean", "running_var"))}
    assert len(statistics) == 36 and all(torch.equal(saved[name], resumed[f"model.{name}"]) for name in statistics)
    assert not all(torch.equal(saved[name], resumed[f"model.{name}"]) for name in set(saved) - statistics)
    assert not any(torch.equal(saved[name], torch.full_like(saved[name], name.endswith("var"))) for name in statistics)


def test_noise_depends_only_on_seed_and_step(data, tmp_path):
    noisy = replace(RECIPE, train=replace(RECIPE.train, noise=0.1, epochs=1))
    start(data, tmp_path / "a", noisy)
    torch.rand(100)
    start(data, tmp_path / "b", noisy, look=1)
    start(data, tmp_path / "plain", replace(noisy, train=replace(noisy.train, noise=0.0)))
    assert same(weights(tmp_path / "a"), weights(tmp_path / "b"))
    assert not same(weights(tmp_path / "a"), weights(tmp_path / "plain"))


def test_model_noise_depends_only_on_seed_and_step(data, tmp_path):
    """Transolver++ has random routing; nothing else is random here."""
    recipe = replace(RECIPE, model=replace(MODEL, name="transolver-plus", options=Options()))
    start(data, tmp_path / "full", recipe)

    def stop(progress):
        raise Stop

    with pytest.raises(Stop):
        start(data, tmp_path / "resumed", recipe, stop)
    torch.rand(5)  # other draws in between must not matter
    start(data, tmp_path / "resumed", recipe)
    assert same(weights(tmp_path / "full"), weights(tmp_path / "resumed"))


def test_updates_override_epochs(data, tmp_path):
    recipe = replace(RECIPE, train=replace(RECIPE.train, updates=3, epochs=100))
    start(data, tmp_path, recipe)
    assert read_tensors(Run(tmp_path).weights)[1]["step"] == 3


def test_resume_with_another_number_of_steps_is_rejected(data, tmp_path):
    start(data, tmp_path)
    tensors, facts = read_tensors(Run(tmp_path).resume)
    write_tensors(Run(tmp_path).resume, tensors, {**facts, "steps": 99})
    with pytest.raises(ValueError, match="was started with 99 steps"):
        start(data, tmp_path)


def test_batch_larger_than_an_epoch_is_rejected(data, tmp_path):
    with pytest.raises(ValueError, match=r"train.batch is 1000, but an epoch has only 30"):
        start(data, tmp_path, replace(RECIPE, train=replace(RECIPE.train, batch=1000)))


def test_log_rows_beyond_the_saved_state_are_dropped_on_resume(data, tmp_path):
    start(data, tmp_path / "full")
    with pytest.raises(Stop):
        start(data, tmp_path / "cut", watch=lambda progress: (_ for _ in ()).throw(Stop))
    Run(tmp_path / "cut").resume.unlink()  # as if killed after the first row, before the first state
    start(data, tmp_path / "cut")
    rows = [[row["step"] for row in read_rows(Run(tmp_path / name).log)] for name in ("full", "cut")]
    assert rows[0] == rows[1]


def test_missing_weights_are_restored_from_the_state(data, tmp_path):
    start(data, tmp_path)
    before = weights(tmp_path)
    Run(tmp_path).weights.unlink()
    start(data, tmp_path)
    assert same(before, weights(tmp_path))


def test_run_folder_is_locked_during_training(tmp_path):
    with Run(tmp_path).locked("training"), pytest.raises(ValueError, match="Another process is using"):  # noqa: SIM117
        with Run(tmp_path).locked("training"):
            pass
    with Run(tmp_path).locked("training"):
        pass
