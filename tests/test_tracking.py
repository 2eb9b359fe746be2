"""TensorBoard event files contain the values of the training log, also after a resume."""

import sys

import numpy as np
import pytest

from sigmasolver import api
from sigmasolver.recipes import ModelRecipe, Recipe, TrainRecipe
from sigmasolver.runs import Run
from sigmasolver.simulate.generate import generate
from sigmasolver.tasks import Task
from sigmasolver.train.tracking import combine_watches, tensorboard
from tests.data.waves import Waves

BOTH = ("height", "slope")
TASK = Task("waves", BOTH, BOTH, (12, 12), 2, 1, 3, 3, 1, "channel")
MODEL = ModelRecipe(width=16, depth=1, heads=2, slices=4, modes=3)
RECIPE = Recipe(TASK, MODEL, TrainRecipe(updates=60, batch=4, checks=2, validation=0.34))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return generate(Waves(frames=7), 4, 0, tmp_path_factory.mktemp("tracking") / "waves.h5").path


def scalars(folder):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder))
    events.Reload()
    return {name: [(event.step, event.value) for event in events.Scalars(name)] for name in events.Tags()["scalars"]}


def test_tensorboard_event_files_match_the_log(data, tmp_path):
    watched = []
    run = Run(tmp_path / "run")
    with tensorboard(tmp_path / "events", run) as events:
        api.train_model(RECIPE, data, run.path, watch=combine_watches(watched.append, None, events))
    written, log = scalars(tmp_path / "events" / "run"), run.read_log()
    assert [progress.step for progress in watched] == [row["step"] for row in log] == [30, 50, 60]
    for name, key in (("loss", "loss"), ("learning rate", "rate"), ("steps per second", "steps_per_second")):
        assert [step for step, _ in written[name]] == [30, 50, 60]
        np.testing.assert_allclose([value for _, value in written[name]], [row[key] for row in log], rtol=1e-6)
    checks = [(row["step"], row["error"]) for row in log if "error" in row]
    assert [step for step, _ in checks] == [30, 60]
    np.testing.assert_allclose(written["validation error"], checks, rtol=1e-6)


def test_tensorboard_has_no_duplicate_steps_after_resume(data, tmp_path):
    run = Run(tmp_path / "run")

    class Killed(Exception):
        pass

    def kill(progress):
        if progress.step == 50:
            raise Killed

    with pytest.raises(Killed), tensorboard(tmp_path, run) as events:
        api.train_model(RECIPE, data, run.path, watch=combine_watches(events, kill))
    with tensorboard(tmp_path, run) as events:
        api.train_model(RECIPE, data, run.path, watch=events)
    uninterrupted = api.train_model(RECIPE, data, tmp_path / "uninterrupted")
    written = scalars(tmp_path / "run")["loss"]
    np.testing.assert_allclose(written, [(row["step"], row["loss"]) for row in uninterrupted.read_log()], rtol=1e-6)


def test_train_tensorboard_option_writes_event_files(call, data, tmp_path):
    settings = [word for name in ("width=16", "depth=1", "heads=2", "slices=4") for word in ("--set", f"model.{name}")]
    args = ("train", "--data", data, "--history", 2, "--horizon", 3, *settings, "--set", "train.updates=3")
    code, out, err = call(*args, "--out", tmp_path / "mine", "--tensorboard", tmp_path / "events")
    assert code == 0, err
    assert out.startswith("computing with 1 thread on ")
    written = scalars(tmp_path / "events" / "mine")
    assert written["loss"] == [(row["step"], pytest.approx(row["loss"])) for row in Run(tmp_path / "mine").read_log()]


def test_combine_watches_without_callbacks():
    assert combine_watches(None, None) is None
    with tensorboard(None, Run("nowhere")) as events:
        assert events is None


def test_tensorboard_option_without_the_package_is_an_error(monkeypatch, call, data, tmp_path):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard.writer", None)
    args = ("train", "--data", data, "--out", tmp_path / "run", "--tensorboard", tmp_path / "events")
    code, _, err = call(*args, "--history", 2, "--horizon", 3)
    assert code == 2 and "install it with pip install 'sigmasolver[tracking]'." in err
    assert not (tmp_path / "run" / "weights.safetensors").exists()
