"""The paper's bounds on states of real forecasts, with perturbed and with trained weights."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from sigmasolver.data.store import open_store
from sigmasolver.data.windows import Windows
from sigmasolver.diagnose.corrections import corrections
from sigmasolver.diagnose.profiles import exact_attention, exact_update, geometry, profile
from sigmasolver.diagnose.subject import Subject
from sigmasolver.diagnose.watch import record_slices, slice_operators
from sigmasolver.forecast.checkpoint import load
from sigmasolver.models.slices import SliceUpdate
from sigmasolver.runs import Run
from sigmasolver.simulate.generate import generate
from sigmasolver.train.job import train_run
from tests.diagnose.subjects import MODEL, RECIPE, WAVES, hooks_in, number, perturb, subject_of

SLACK, ROUND_OFF = 1 + 1e-10, 1e-15


def check_bounds(metrics):
    """Check the bounds for every head and case."""
    for name in ("diameter", "variation"):
        after, bound = metrics[f"{name}_after"], metrics[f"bound_{name}"]
        assert (after <= SLACK * bound + ROUND_OFF * metrics[f"{name}_before"]).all()
        if f"floor_{name}" in metrics:
            assert (metrics[f"floor_{name}"] <= SLACK * after).all()
            assert (metrics[f"floor_{name}"] <= metrics[f"{name}_before"]).all()
    assert (metrics["dobrushin"] <= SLACK).all() and (metrics["dobrushin"] >= 0).all()


@pytest.mark.parametrize("kind", ["residual", "replace"])
@pytest.mark.parametrize("noise", [0.05, 0.5, 3.0])
def test_profile_bounds_hold_for_any_weights(kind, noise):
    update = SliceUpdate(kind, 6)
    perturb(update, noise)
    for spread in (1e-6, 1.0, 30.0):  # almost collapsed slices too
        Z = 1 + spread * torch.randn(3, 2, 7, 6)
        metrics = profile(update, Z)
        check_bounds(metrics)
        assert all(values.dtype == torch.float64 and values.shape == (3, 2) for values in metrics.values())


def test_profile_bounds_match_the_paper():
    update, Z = SliceUpdate("residual", 6), torch.randn(3, 2, 7, 6)
    perturb(update, 0.5)
    for gamma in (-0.3, 2.0):
        update.gamma.data.fill_(gamma)
        metrics, W = profile(update, Z), update.attention.value.weight.detach().double()
        A = update.double().attention.weights(Z.double()).detach()
        Pi = torch.eye(7, dtype=torch.float64) - 1 / 7
        eta = torch.stack([(A[:, :, i] - A[:, :, j]).abs().sum(-1) / 2 for i in range(7) for j in range(7)]).amax(0)
        norm = torch.linalg.svdvals(W)[0]
        factors = {"diameter": eta * norm, "variation": torch.linalg.svdvals(Pi @ A @ Pi)[..., 0] * norm}
        update.float()
        for name, factor in factors.items():
            change, before = abs(update.gamma.item()) * factor, metrics[f"{name}_before"]
            torch.testing.assert_close(metrics[f"bound_{name}"], (1 + change) * before)
            torch.testing.assert_close(metrics[f"floor_{name}"], (1 - change).clamp(min=0) * before)
        torch.testing.assert_close(metrics["dobrushin"], eta)


@pytest.mark.parametrize("name", ["transolver-sigma", "transolver", "transolver-srpa", "slice-keep"])
def test_exact_update_matches_the_model(name):
    subject = subject_of(name)
    _, history, _ = next(subject.batches())
    with torch.no_grad(), record_slices(subject.forecaster.model) as views:
        subject.forecaster(history)
    for view in views:
        A = exact_attention(view.operator.update, view.Z_BHMD)
        updated = exact_update(view.operator.update, view.Z_BHMD, A)
        torch.testing.assert_close(updated, view.updated_BHMD.double(), rtol=1e-4, atol=1e-5)
        assert (A is None) == (name == "slice-keep")


@pytest.mark.parametrize("name", ["transolver-sigma", "transolver", "transolver-srpa"])
def test_geometry_bounds_hold_for_perturbed_models(name):
    findings = geometry(subject_of(name, noise=0.4))
    check_bounds(findings.arrays)
    assert findings.arrays["dobrushin"].shape == (2, 3, 2)  # layers, cases, heads
    assert findings.arrays["dobrushin"].min() > 1e-3  # attention is not uniform
    for layer in (1, 2):
        for metric in ("diameter_after", "bound_variation", "kappa"):
            expected = findings.arrays[metric][layer - 1].mean()
            assert number(findings, metric, layer=layer) == pytest.approx(expected, rel=1e-6)


def test_geometry_of_kept_slices_attains_the_bounds():
    findings = geometry(subject_of("slice-keep"))
    for name in ("diameter", "variation"):
        before, after, bound = (findings.arrays[key] for key in (f"{name}_before", f"{name}_after", f"bound_{name}"))
        assert np.array_equal(before, after) and np.array_equal(before, bound) and before.min() > 0
    assert "dobrushin" not in findings.arrays and "floor_diameter" not in findings.arrays


@pytest.mark.parametrize("name, kept", [("transolver", False), ("transolver-srpa", True)])
def test_uniform_attention_collapses_a_replacement_but_not_a_residual(name, kept):
    subject = subject_of(name)
    for operator in slice_operators(subject):
        operator.update.attention.query.weight.data.zero_()
    metrics = geometry(subject).arrays
    assert metrics["dobrushin"].max() < 1e-12 and metrics["kappa"].max() < 1e-12
    ratio = metrics["diameter_after"] / metrics["diameter_before"]
    np.testing.assert_allclose(ratio, 1.0 if kept else 0.0, atol=1e-6)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A model trained for 200 steps, and test windows."""
    folder = tmp_path_factory.mktemp("trained")
    generate(WAVES, 6, 0, folder / "waves.h5")
    recipe = replace(RECIPE, model=replace(MODEL, name="transolver-srpa"))
    train_run(recipe, folder / "waves.h5", Run(folder / "run"))
    with open_store(folder / "waves.h5") as store:
        windows = Windows(store, (4, 5), recipe.evaluation_window_spec())
        indices = torch.arange(len(windows))
        yield Subject(Run(folder / "run"), recipe, load(folder / "run"), windows, indices, 4, 2)


def test_geometry_bounds_hold_for_trained_weights(trained):
    findings = geometry(trained)
    check_bounds(findings.arrays)
    gammas = [number(corrections(trained), "gamma", layer=layer) for layer in (1, 2)]
    assert min(map(abs, gammas)) > 1e-3  # the corrections are active
    change = np.abs(findings.arrays["diameter_after"] / findings.arrays["diameter_before"] - 1)
    assert change.max() > 0
    assert hooks_in(trained.forecaster) == 0
