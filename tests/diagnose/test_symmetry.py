"""The diagnostic of symmetries against forecasts made by hand."""

from dataclasses import replace

import pytest
import torch

from sigmasolver.data.normalise import fit
from sigmasolver.data.store import open_store
from sigmasolver.data.windows import Windows
from sigmasolver.diagnose.subject import NotApplicable, Subject
from sigmasolver.diagnose.symmetry import COPIES, symmetry
from sigmasolver.forecast.checkpoint import build
from sigmasolver.forecast.symmetric import symmetric_forecasts
from sigmasolver.recipes import ModelRecipe, Recipe, TrainRecipe
from sigmasolver.runs import Run
from sigmasolver.simulate.darcy import Darcy
from sigmasolver.simulate.generate import generate
from sigmasolver.symmetries import SYMMETRIES
from sigmasolver.tasks import Task

TASK = Task("small", ("coefficient",), ("pressure",), (9, 9), 1, 1, 1, 4, 3, "scalar", steady=True, symmetries="square")
RECIPE = Recipe(TASK, ModelRecipe(width=16, depth=1, heads=2, slices=4, modes=3), TrainRecipe(batch=2))


def subject_of(store, folder, task=TASK):
    recipe = replace(RECIPE, task=task)
    training = Windows(store, range(4), recipe.training_window_spec())
    windows = Windows(store, [4, 5, 6], recipe.evaluation_window_spec())
    torch.manual_seed(0)
    forecaster = build(recipe, *fit("scalar", training))
    forecaster.model.eval()
    return Subject(Run(folder), recipe, forecaster, windows, torch.arange(3), 1, 2)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("darcy") / "darcy.h5"
    generate(Darcy(grid=9), 7, 0, path)
    return path


def test_rows_match_hand_computed_values(data, tmp_path):
    with open_store(data) as store:
        subject = subject_of(store, tmp_path)
        findings = symmetry(subject)
        history, truth = subject.windows.batch([0, 1, 2])
    rows = {(row["metric"], row["field"]): row for row in findings.rows}
    assert COPIES == 8 == rows["members", None]["value"]
    forecasts = []
    for turns in range(4):  # the square, without the package's tables
        for mirrored in (False, True):
            moved = torch.rot90(history.transpose(2, 3) if mirrored else history, turns, (2, 3))
            with torch.no_grad():
                frames = torch.rot90(subject.forecaster(moved), -turns, (2, 3))
            forecasts.append(frames.transpose(2, 3) if mirrored else frames)
    members = torch.stack(forecasts).double()
    size = truth.double().flatten(1).norm(dim=1)
    spread = members.std(0, correction=0).flatten(1).norm(dim=1) / size
    error = (members.mean(0) - truth).flatten(1).norm(dim=1) / size
    single = (members[0] - truth).flatten(1).norm(dim=1) / size
    for metric, values in (("spread_lead", spread), ("error_lead", error), ("single_lead", single)):
        for field in ("pressure", None):
            assert rows[metric, field]["value"] == pytest.approx(float(values.mean()), rel=1e-4)
            assert rows[metric, field]["deviation"] == pytest.approx(float(values.std()), rel=1e-3)
    assert float(spread.mean()) > 1e-3


def test_spread_is_at_most_the_root_mean_square_error(data, tmp_path):
    """For any truth: here the models are untrained, and the truth is scaled away from them or close to them."""
    with open_store(data) as store:
        subject = subject_of(store, tmp_path)
        history, truth = subject.windows.batch([0, 1, 2])
        group = SYMMETRIES["square"]
        members = torch.stack(
            [f.frames for f in symmetric_forecasts(subject.forecaster, history, 1, group, 8)]
        ).double()
    spread = members.std(0, correction=0).flatten(1).norm(dim=1)
    for other in (truth.double(), members.mean(0), members[0]):
        error = (members - other).square().mean(0).flatten(1).sum(1).sqrt()
        assert bool((spread <= error * (1 + 1e-9)).all())


def test_task_without_symmetries_is_skipped_with_the_reason(data, tmp_path):
    with open_store(data) as store:
        subject = subject_of(store, tmp_path, replace(TASK, symmetries=None))
        with pytest.raises(NotApplicable, match="No symmetries of the task small are known"):
            symmetry(subject)


def test_vectors_with_other_names_are_skipped_with_the_reason(data, tmp_path):
    with open_store(data) as store:
        subject = subject_of(store, tmp_path, replace(TASK, vectors=()))
        task = replace(TASK, inputs=("coefficient", "force_x", "force_y"))
        with pytest.raises(NotApplicable, match="but not force_x, force_y; rename these fields"):
            symmetry(replace(subject, recipe=replace(subject.recipe, task=task)))
