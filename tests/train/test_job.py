"""From a data file to a run: invalid input is rejected before anything is written; data are recorded in the run."""

from dataclasses import replace

import h5py
import numpy as np
import pytest
import torch

from sigmasolver.data.store import Writer, open_store
from sigmasolver.evaluate import evaluate_run
from sigmasolver.forecast.checkpoint import data_of, domain_of, skeleton
from sigmasolver.forecast.files import forecast_file
from sigmasolver.recipes import RECIPES, ModelRecipe, Recipe, TrainRecipe, changed, recipe_of
from sigmasolver.recipes.suites import SUITES
from sigmasolver.runs import Run, read_tensors
from sigmasolver.simulate.generate import generate
from sigmasolver.tasks import Task
from sigmasolver.train import job
from sigmasolver.train.engine import Execution
from sigmasolver.train.job import resume_run, train_run
from tests.data.waves import Waves

BOTH = ("height", "slope")
TASK = Task("waves", BOTH, BOTH, (12, 12), 2, 1, 2, 4, 2, "channel")
MODEL = ModelRecipe(width=8, depth=1, heads=1, slices=3, modes=2)
RECIPE = Recipe(TASK, MODEL, TrainRecipe(updates=4, batch=2, checks=1))


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "waves.h5"
    generate(Waves(frames=7), 6, 0, path)
    return path


def changed_store(store, path, change):
    with open_store(store) as old, Writer(path, old.header, len(old)) as new:
        values = old[:]
        change(values)
        new.append(values)
    return path


def test_uneven_frame_times_require_a_time_embedding(store, tmp_path):
    """With a stride of two the times 0, 1, 4, 5, 8, 9, 12 are evenly spaced."""
    uneven = np.array([0.0, 1, 4, 5, 8, 9, 12])
    with open_store(store) as old:
        header = replace(old.header, layout=replace(old.header.layout, times=uneven))
        with Writer(tmp_path / "uneven.h5", header, len(old)) as new:
            new.append(old[:])
    with pytest.raises(ValueError, match=r"unevenly spaced in time, 1 to 3 apart, .* resample them") as caught:
        train_run(RECIPE, tmp_path / "uneven.h5", Run(tmp_path / "run"))
    assert "\n" not in str(caught.value) and not (tmp_path / "run").exists()
    train_run(changed(RECIPE, ["task.time_stride=2"]), tmp_path / "uneven.h5", Run(tmp_path / "strided"))
    timed = changed(RECIPE, ["model.options.time_embedding=true"])
    train_run(timed, tmp_path / "uneven.h5", Run(tmp_path / "timed"))
    domains = [domain_of(Run(tmp_path / name)) for name in ("strided", "timed")]
    assert [domain.time_steps for domain in domains] == [(4.0, 4.0), (1.0, 3.0)]
    # A model with a time input accepts data at other times, but not in other units.
    evaluate_run(Run(tmp_path / "timed"), path=write_other(store, tmp_path / "times.h5", 1, times=0.5 * np.arange(7)))
    with pytest.raises(ValueError, match="the unit of height is km, not m"):
        evaluate_run(Run(tmp_path / "timed"), path=write_other(store, tmp_path / "km.h5", 2, units=("km", "1")))


def write_other(store, path, seed, **change):
    """Unseen waves with another layout."""
    with open_store(store) as old:
        header = replace(old.header, seed=seed, layout=replace(old.header.layout, **change))
    with Writer(path, header, 1) as new:
        new.append(Waves(frames=7).simulate(seed, [0]).numpy())
    return path


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("depth=1000000000", r"model.depth is 1e\+09; the maximum is 1,000"),
        (f"width={10**18}", r"model.width is 1e\+18; the maximum is"),
        (f"slices={10**15}", r"model.slices is 1e\+15"),
        (f"width={10**30}", r"model.width must be an integer below 2\^63"),
        ("width=1000000", r"takes .* GB for its weights, .* lower model.width, model.depth or model.slices"),
    ],
)
def test_too_large_model_is_rejected_before_it_is_built(store, tmp_path, setting, message):
    with pytest.raises(ValueError, match=message) as caught:
        train_run(changed(RECIPE, [f"model.{setting}"]), store, Run(tmp_path / "run"))
    assert "\n" not in str(caught.value) and not (tmp_path / "run").exists()


@pytest.mark.parametrize("setting", ["depth=3", "depth=1", "depth=6 name=drift-net"])
def test_refuse_too_large_counts_every_parameter(store, tmp_path, monkeypatch, setting):
    """The exact limit is 16 bytes per parameter, at any depth, extrapolated from depths 2 and 4."""
    recipe = changed(RECIPE, [f"model.{assignment}" for assignment in setting.split()])
    needed = 16 * sum(parameter.numel() for parameter in skeleton(recipe).parameters())
    for spare, fits in ((0, True), (-1, False)):
        monkeypatch.setattr(job, "available_memory", lambda device, available=needed + spare: available)
        if fits:
            job.refuse_too_large(recipe, Execution())
        else:
            with pytest.raises(ValueError, match=r"lower model\.width"):
                job.refuse_too_large(recipe, Execution())


def test_separate_test_data_have_another_seed(store, tmp_path):
    generate(Waves(frames=9), 6, 0, tmp_path / "longer.h5")  # the trajectories of the training, and two frames more
    recipe = replace(RECIPE, task=replace(TASK, test=0))
    with pytest.raises(ValueError, match="are simulated with seed 0, like the training data") as caught:
        train_run(recipe, store, Run(tmp_path / "run"), test=tmp_path / "longer.h5")
    assert "\n" not in str(caught.value) and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["calls=2"], "calls is 2, which only the objective pushforward uses, not direct; set train.calls=1, or"),
        (["push_after=3"], "push_after is 3, which only the objective pushforward uses, not direct"),
        (["push_every=2", "objective=teacher_forced"], "only the objective pushforward uses, not teacher_forced"),
        (["objective=pushforward"], "pushforward with calls=1 is the objective direct; set train.calls to at least 2"),
        (["precision=tf32"], "TF32 requires a GPU; choose float32 or bf16 on a CPU"),
    ],
)
def test_training_refuses_settings_without_effect(store, tmp_path, settings, message):
    recipe = changed(RECIPE, [f"train.{setting}" for setting in settings])
    with pytest.raises(ValueError, match=message) as caught:
        train_run(recipe, store, Run(tmp_path / "run"))
    assert "\n" not in str(caught.value) and not (tmp_path / "run").exists()


def test_training_refuses_walls_without_velocity(store, tmp_path):
    with pytest.raises(ValueError, match=r"lower-walls acts on velocity_x, .* not among the targets height, slope"):
        train_run(changed(RECIPE, ["task.boundary=lower-walls"]), store, Run(tmp_path / "run"))
    job.refuse_without_effect(recipe_of("smoke3d"))


def test_recipes_and_suites_have_no_settings_without_effect():
    for recipe in (*RECIPES.values(), *(row for rows in SUITES.values() for row in rows().values())):
        job.refuse_without_effect(recipe)


def test_runs_with_settings_without_effect_are_read_and_resumed(store, tmp_path, monkeypatch):
    """Earlier versions accepted them."""
    recipe = changed(RECIPE, ["train.calls=2", "task.boundary=lower-walls"])
    with monkeypatch.context() as earlier:
        earlier.setattr(job, "refuse_without_effect", lambda recipe: None)
        train_run(recipe, store, Run(tmp_path / "run"), stop=lambda: True)
    assert not Run(tmp_path / "run").finished
    resume_run(Run(tmp_path / "run"))
    assert Run(tmp_path / "run").finished and evaluate_run(Run(tmp_path / "run"))
    train_run(RECIPE, store, Run(tmp_path / "plain"))
    first, second = (read_tensors(Run(tmp_path / name).weights)[0] for name in ("run", "plain"))
    assert all(torch.equal(first[name], second[name]) for name in second)


def test_run_in_tf32_is_not_resumed_on_a_cpu(store, tmp_path, monkeypatch):
    recipe, run = changed(RECIPE, ["train.precision=tf32"]), Run(tmp_path / "run")
    with monkeypatch.context() as on_gpu:
        on_gpu.setattr(job, "refuse_tf32_without_gpu", lambda *arguments: None)
        train_run(recipe, store, run, stop=lambda: True)
    before = {path: path.read_bytes() for path in run.path.iterdir()}
    for again in (lambda: resume_run(run), lambda: train_run(recipe, store, run)):
        with pytest.raises(ValueError) as caught:
            again()
        assert str(caught.value) == (
            f"{run.path} cannot be resumed on a CPU with train.precision=tf32; resume it on a GPU, or train a new run "
            "with train.precision=float32."
        )
    assert {path: path.read_bytes() for path in run.path.iterdir()} == before


def test_resumed_run_records_a_missing_domain(store, tmp_path):
    run = Run(tmp_path / "run")
    train_run(RECIPE, store, run)
    facts = run.read_json("data.json")
    recorded = domain_of(run)
    run.write_json("data.json", {key: value for key, value in facts.items() if key != "domain"})
    assert domain_of(run) is None
    resume_run(run)
    assert domain_of(run) == recorded and recorded.lengths == pytest.approx((2 * np.pi * 11 / 12,) * 2)
    run.write_json("data.json", {**facts, "domain": {"units": 3}})
    with pytest.raises(ValueError, match=r"The domain in data.json of .* is invalid"):
        domain_of(run)


def test_data_inside_the_run_folder_are_found_after_a_move(store, tmp_path):
    inside = tmp_path / "run" / "data.h5"
    inside.parent.mkdir()
    inside.write_bytes(store.read_bytes())
    train_run(RECIPE, inside, Run(tmp_path / "run"))
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    run = Run(tmp_path / "elsewhere")
    assert data_of(run) == tmp_path / "elsewhere" / "data.h5"
    before = run.weights.read_bytes()
    resume_run(run)
    assert run.weights.read_bytes() == before


def test_invalid_recipe_leaves_no_run_folder(store, tmp_path):
    run = Run(tmp_path / "run")
    for wrong in ("train.lr=-1", "train.batch=99", "model.name=transolvr", "task.normaliser=chanel"):
        with pytest.raises(ValueError, match=r"[.?]$"):
            train_run(changed(RECIPE, [wrong]), store, run)
        assert not run.path.exists()
    train_run(RECIPE, store, run)
    assert run.finished


def test_input_field_must_be_constant_in_time(store, tmp_path):
    recipe = replace(RECIPE, task=replace(TASK, inputs=("slope", "height"), targets=("slope",)))
    with pytest.raises(ValueError, match="height is not predicted but changes in time"):
        train_run(recipe, store, Run(tmp_path / "moving"))

    def freeze(values):
        values[..., 0] = values[:, :1, ..., 0]

    train_run(recipe, changed_store(store, tmp_path / "constant.h5", freeze), Run(tmp_path / "constant"))


@pytest.mark.parametrize(
    ("trajectory", "message"),
    [
        (0, r"Training trajectory 0 of .*nan.h5 contains non-finite values, the first in frame 3 of height"),
        (3, r"Validation trajectory 3 of .* contains non-finite values, the first in frame 3 of height"),
        (5, r"Test trajectory 5 of .* contains non-finite values, the first in frame 3 of height"),
    ],
)
def test_non_finite_data_are_rejected_before_training(store, tmp_path, trajectory, message):
    def spoil(values):
        values[trajectory, 3, 2, 1, 0] = np.nan

    with pytest.raises(ValueError, match=message):
        train_run(RECIPE, changed_store(store, tmp_path / "nan.h5", spoil), Run(tmp_path / "run"))


def test_corrupt_data_are_rejected_by_every_command(store, tmp_path):
    run, copy = Run(tmp_path / "run"), tmp_path / "copy.h5"
    train_run(RECIPE, store, run)

    def damage(trajectory):
        copy.write_bytes(store.read_bytes())
        with h5py.File(copy, "r+") as file:
            row = file["fields"][trajectory]
            row.reshape(-1).view(np.uint32)[7] ^= 1
            file["fields"][trajectory] = row

    for trajectory in (0, 3, 5):  # in the training, validation and test part
        damage(trajectory)
        with pytest.raises(ValueError, match=f"is corrupt in trajectory {trajectory}: checksum mismatch"):
            train_run(RECIPE, copy, Run(tmp_path / "other"))
        assert not (tmp_path / "other").exists()
    with pytest.raises(ValueError, match="is corrupt in trajectory 5"):
        (tmp_path / "run" / "data.json").write_text(
            (tmp_path / "run" / "data.json").read_text().replace(str(store), str(copy))
        )
        evaluate_run(run)
    with pytest.raises(ValueError, match="is corrupt in trajectory 5"):
        forecast_file(run.path, copy, 2, tmp_path / "out.h5", torch.device("cpu"))


def test_non_finite_test_trajectory_is_an_error_not_a_blow_up(store, tmp_path):
    def spoil(values):
        values *= 1.01  # so that none of them is a training trajectory
        values[5, 3, 2, 1, 0] = np.nan

    run = Run(tmp_path / "run")
    train_run(RECIPE, store, run)
    with pytest.raises(ValueError, match="Trajectory 5 of the data"):
        evaluate_run(run, path=changed_store(store, tmp_path / "nan.h5", spoil))


def test_resume_with_other_data_is_rejected(store, tmp_path):
    train_run(RECIPE, store, Run(tmp_path / "run"))
    other = changed_store(store, tmp_path / "other.h5", lambda values: np.negative(values, out=values))
    with pytest.raises(ValueError, match="was started with other data"):
        resume_run(Run(tmp_path / "run"), other)


def test_setting_epochs_unsets_updates(store, tmp_path):
    run = Run(tmp_path / "run")
    train_run(changed(RECIPE, ["train.epochs=1"]), store, run)
    assert read_tensors(run.weights)[1]["step"] == 3 * 5 // 2
    assert changed(recipe_of("fsi"), ["train.epochs=2"]).train.updates is None
    assert changed(recipe_of("fsi"), ["train.epochs=2", "train.updates=7"]).train.updates == 7


def test_zero_field_makes_the_relative_loss_fail_but_not_the_squared_one(store, tmp_path):
    def zero_field(values):
        values[:4, :, ..., 1] = 0

    path = changed_store(store, tmp_path / "zero.h5", zero_field)
    with pytest.raises(ValueError, match=r"loss of step 1 is not finite.*train\.loss=squared"):
        train_run(RECIPE, path, Run(tmp_path / "run"))
    train_run(changed(RECIPE, ["train.loss=squared"]), path, Run(tmp_path / "squared"))
    assert torch.isfinite(read_tensors(Run(tmp_path / "squared").weights)[0]["readout.weight"]).all()
