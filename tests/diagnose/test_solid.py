"""Values in a solid do not affect any diagnosis: a pointwise model is diagnosed on the fluid points only."""

import numpy as np
import pytest
import torch
from torch import nn

from sigmasolver.data.header import Header
from sigmasolver.data.layout import Layout
from sigmasolver.data.normalise import Normaliser
from sigmasolver.data.store import Writer, open_store
from sigmasolver.data.windows import Windows
from sigmasolver.diagnose.components import components
from sigmasolver.diagnose.decomposition import TERMS, decomposition
from sigmasolver.diagnose.interventions import interventions
from sigmasolver.diagnose.maps import maps
from sigmasolver.diagnose.subject import NotApplicable, Subject
from sigmasolver.diagnose.trust import trust
from sigmasolver.forecast import Forecaster
from sigmasolver.recipes import ModelRecipe, Recipe, TrainRecipe
from sigmasolver.runs import Run
from sigmasolver.tasks import Task

FIELDS, SOLID, FLUID = ("u", "v"), "solid", 6
FLOW = np.random.default_rng(4).normal(size=(6, 5, 10, 4, 2)) + np.array([2.0, 0.0])


class Nonlinear(nn.Module):
    """Pointwise and nonlinear."""

    def __init__(self, factor):
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(factor))

    def forward(self, x):
        return self.factor * torch.sin(x[..., :2])


def plain(fields):
    return Normaliser("none", fields, torch.zeros(len(fields)).double(), torch.ones(len(fields)).double())


def forecaster(factor, mask):
    inputs = (*FIELDS, SOLID) if mask else FIELDS
    return Forecaster(Nonlinear(factor), plain(inputs), plain(FIELDS), 1, history=1, mask=SOLID if mask else None)


def subject_of(folder, mask, junk=0.0):
    """All points with a mask, and junk in the solid; or the fluid points only."""
    values = np.concatenate([FLOW, np.zeros((6, 5, 10, 4, 1))], -1)
    values[:, :, FLUID:, :, 2] = 1
    values[:, :, FLUID:, :, :2] = junk * np.random.default_rng(5).normal(size=(6, 5, 10 - FLUID, 4, 2))
    values = values if mask else values[:, :, :FLUID, :, :2]
    names = (*FIELDS, SOLID) if mask else FIELDS
    axes = tuple(np.arange(float(points)) for points in values.shape[2:4])
    path = folder / f"{mask}{junk}.h5"
    with Writer(
        path, Header(Layout(names, ("1",) * len(names), ("wall",) * 2, axes, np.arange(5.0)), "t", {}), 6
    ) as writer:
        writer.append(values.astype(np.float32))
    grid = values.shape[2:4]
    task = Task("flow", names, FIELDS, grid, 1, 1, 3, 4, 2, "channel", mask=SOLID if mask else None)
    recipe, store = Recipe(task, ModelRecipe(), TrainRecipe(batch=2)), open_store(path)
    windows = Windows(store, [4, 5], recipe.evaluation_window_spec())
    training = Windows(store, [0, 1, 2, 3], recipe.training_window_spec())
    main, peers = forecaster(0.9, mask), (forecaster(1.1, mask), forecaster(0.8, mask))
    return Subject(Run(folder), recipe, main, windows, torch.arange(len(windows)), 3, 3, training, peers)


def numbers(findings, exclude=()):
    rows = {(row["metric"], row["field"], row["lead"], row["case"]): row["value"] for row in findings.rows}
    return {key: value for key, value in rows.items() if not key[0].startswith(tuple(exclude) or ("-",))}


@pytest.mark.parametrize("junk", [0.0, 50.0])
@pytest.mark.parametrize("diagnostic", [decomposition, trust, maps, interventions])
def test_diagnostics_ignore_the_solid(tmp_path, diagnostic, junk):
    masked = numbers(diagnostic(subject_of(tmp_path, True, junk)), exclude=("distance",))
    expected = numbers(diagnostic(subject_of(tmp_path, False)), exclude=("distance",))
    assert masked.keys() == expected.keys() and expected
    for key, value in expected.items():
        assert masked[key] == pytest.approx(value, rel=1e-6, abs=1e-9), key


def test_trust_distances_ignore_values_in_the_solid(tmp_path):
    clean, junk_values = (numbers(trust(subject_of(tmp_path, True, junk))) for junk in (0.0, 50.0))
    assert clean == junk_values and any(key[0] == "distance_lead" for key in clean)


def test_decomposition_terms_add_up_with_a_solid(tmp_path):
    arrays = {
        name: values.astype(float) for name, values in decomposition(subject_of(tmp_path, True, 9.0)).arrays.items()
    }
    injection, propagation, cross, total = (arrays[name] for name in TERMS)
    np.testing.assert_allclose(injection + propagation + cross, total, rtol=1e-5)
    assert propagation[:, 1:].min() > 0


def test_components_not_applicable_with_a_solid(tmp_path):
    with pytest.raises(NotApplicable, match="the points of the solid in these data"):
        components(subject_of(tmp_path, True))
