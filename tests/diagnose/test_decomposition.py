"""The decomposition is exact: identities in float64, against a slow definition, for any model."""

import numpy as np
import pytest
import torch
from torch import nn

from sigmasolver.data.normalise import Normaliser
from sigmasolver.data.store import open_store
from sigmasolver.data.windows import Windows
from sigmasolver.diagnose.decomposition import TERMS, decompose, decomposition
from sigmasolver.diagnose.subject import Subject
from sigmasolver.forecast import Forecaster
from sigmasolver.forecast.checkpoint import load, load_recipe

EXACT = {"rtol": 1e-12, "atol": 1e-12}


class Pointwise(nn.Module):
    """A matrix on the channels of every point."""

    def __init__(self, matrix):
        super().__init__()
        self.matrix = nn.Parameter(matrix)

    def forward(self, x):
        return x @ self.matrix.T


class Nonlinear(nn.Module):
    """Nonlinear and nonlocal."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.first, self.last = nn.Linear(inputs, 16).double(), nn.Linear(16, outputs).double()

    def forward(self, x):
        inner = torch.tanh(self.first(x))
        return self.last(inner + inner.roll(1, dims=1) + inner.mean((1, 2), keepdim=True))


def normaliser(fields):
    mean, scale = torch.linspace(-1, 1, len(fields)), torch.linspace(0.5, 2, len(fields))
    return Normaliser("channel", fields, mean.double(), scale.double())


def forecaster(model, fields, block=1, boundary=None, more=(), history=None):
    return Forecaster(
        model, normaliser((*fields, *more)), normaliser(fields), block, boundary, history=history
    ).double()


def plain(fields):
    q = len(fields)
    return Normaliser("none", fields, torch.zeros(q).double(), torch.ones(q).double())


def by_definition(step, block, history, truth):
    """δ and π frame by frame; `step` maps a history to a block."""
    length, q = history.shape[1], truth.shape[-1]
    given = history[:, -1:, ..., q:]
    visited = known = history
    injected, propagated = [], []
    for start in range(0, truth.shape[1], block):
        free, forced = step(visited), step(known)
        true = truth[:, start : start + block]
        injected.append(forced[:, : true.shape[1]] - true)
        propagated.append((free - forced)[:, : true.shape[1]])
        for name, frames in (("free", free), ("true", true)):
            fixed = given.expand(-1, frames.shape[1], *given.shape[2:])
            extended = torch.cat((visited if name == "free" else known, torch.cat((frames, fixed), -1)), 1)
            visited, known = (extended[:, -length:], known) if name == "free" else (visited, extended[:, -length:])
    return torch.cat(injected, 1), torch.cat(propagated, 1)


def energy(first, second):
    per_field = (first * second).sum((2, 3))
    return torch.cat((per_field, per_field.sum(-1, keepdim=True)), -1)


@pytest.mark.parametrize(("block", "horizon", "more"), [(1, 4, ()), (2, 5, ()), (3, 6, ("geometry",))])
@torch.no_grad()
def test_decompose_matches_the_paper_for_blocks_and_given_fields(block, horizon, more):
    fields = ("velocity_x", "velocity_y")
    forecast = forecaster(Nonlinear(3 * (2 + len(more)), 2 * block), fields, block, "lower-walls", more)
    history = torch.randn(2, 3, 6, 5, 2 + len(more), dtype=torch.float64)
    history[..., 2:] = history[:, :1, ..., 2:]
    truth = torch.randn(2, horizon, 6, 5, 2, dtype=torch.float64)
    terms = decompose(forecast, history, truth)
    injected, propagated = by_definition(forecast, block, history, truth)
    torch.testing.assert_close(terms["injection"], energy(injected, injected), **EXACT)
    torch.testing.assert_close(terms["propagation"], energy(propagated, propagated), **EXACT)
    torch.testing.assert_close(terms["cross"], 2 * energy(injected, propagated), **EXACT)
    torch.testing.assert_close(terms["truth"], energy(truth, truth), **EXACT)
    summed = terms["injection"] + terms["propagation"] + terms["cross"]
    torch.testing.assert_close(summed, terms["total"], rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(terms["total"], energy(injected + propagated, injected + propagated), **EXACT)
    assert terms["propagation"][:, :block].eq(0).all() and terms["propagation"][:, block:].gt(0).all()


@torch.no_grad()
def test_decompose_applies_the_boundary_operator_to_both_parts():
    """A truth that satisfies the wall has no error there; without the operator it does."""
    fields = ("velocity_x", "velocity_y")
    model = Nonlinear(2, 2)
    history = torch.randn(1, 1, 4, 4, 2, dtype=torch.float64)
    walled, free = (forecaster(model, fields, 1, name) for name in ("lower-walls", None))
    truth = torch.randn(1, 3, 4, 4, 2, dtype=torch.float64)
    truth[:, :, 0, :, 0] = truth[:, :, :, 0, 1] = 0
    with_walls, without = (decompose(variant, history, truth) for variant in (walled, free))
    raw = free(history)
    at_wall = raw[:, 0, 0, :, 0].square().sum() + raw[:, 0, :, 0, 1].square().sum()
    gained = without["injection"][0, 0, -1] - with_walls["injection"][0, 0, -1]
    torch.testing.assert_close(gained, at_wall, **EXACT)
    injected, propagated = by_definition(walled, 1, history, truth)
    assert injected[:, :, 0, :, 0].eq(0).all() and propagated[:, :, 0, :, 0].eq(0).all()


@torch.no_grad()
def test_propagation_of_a_linear_model_matches_matrix_powers():
    """π_k = Σ_{j<k} A^{k-j} δ_j = A e_{k-1}."""
    fields = ("u", "v")
    A, B = (0.5 * torch.randn(2, 2, dtype=torch.float64) for _ in range(2))
    forecast = Forecaster(Pointwise(A), plain(fields), plain(fields), 1)
    start = torch.randn(3, 1, 4, 4, 2, dtype=torch.float64)
    truth = torch.cat([start @ torch.matrix_power(B, k).T for k in range(1, 6)], 1)
    defects = torch.cat((start, truth[:, :-1]), 1) @ (A - B).T
    terms = decompose(forecast, start, truth)
    torch.testing.assert_close(terms["injection"], energy(defects, defects), **EXACT)
    for k in range(5):
        powers = sum((defects[:, [j]] @ torch.matrix_power(A, k - j).T for j in range(k)), torch.zeros_like(start))
        torch.testing.assert_close(terms["propagation"][:, [k]], energy(powers, powers), **EXACT)
        torch.testing.assert_close(terms["cross"][:, [k]], 2 * energy(powers, defects[:, [k]]), **EXACT)


@torch.no_grad()
def test_decompose_of_a_perfect_model_is_zero():
    forecast = forecaster(Nonlinear(2, 2), ("u", "v"))
    history = torch.randn(2, 1, 4, 4, 2, dtype=torch.float64)
    frames, truth = history, []
    for _ in range(4):
        frames = forecast(frames)
        truth.append(frames)
    terms = decompose(forecast, history, torch.cat(truth, 1))
    assert all(terms[name].eq(0).all() for name in TERMS) and terms["truth"].gt(0).all()


@torch.no_grad()
def test_decompose_keeps_non_finite_values():
    forecast = Forecaster(Pointwise(torch.tensor([[1e200]]).double()), plain(("u",)), plain(("u",)), 1)
    terms = decompose(forecast, torch.ones(1, 1, 3, 3, 1).double(), torch.ones(1, 3, 3, 3, 1).double())
    assert not terms["total"][:, 1:].isfinite().any()


# --- a run, a baseline and a custom model


@pytest.fixture(scope="module")
def raw(study):
    with open_store(study / "flow.h5") as store:
        yield store


def subject_of(raw, run, model=None, horizon=5):
    recipe = load_recipe(run)
    loaded = load(run.path)
    subject_forecaster = loaded if model is None else loaded.around(model)
    windows = Windows(raw, [6, 7], recipe.evaluation_window_spec(horizon))
    return Subject(run, recipe, subject_forecaster, windows, torch.arange(len(windows)), horizon, 3)


class Custom(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(2, 1, 3, padding=1)

    def forward(self, x):
        return self.layer(x.movedim(-1, 1)).movedim(1, -1)


def value(findings, metric, lead, field=None):
    (row,) = [r for r in findings.rows if (r["metric"], r["lead"], r["field"]) == (metric, lead, field)]
    return row["value"]


@pytest.mark.parametrize("which", ["first", "ffno", "custom"])
def test_decomposition_rows_are_means_over_windows(runs, raw, which):
    subject = subject_of(raw, runs["ffno" if which == "ffno" else "first"], Custom() if which == "custom" else None)
    findings = decomposition(subject)
    windows = Windows(raw, [6, 7], subject.recipe.evaluation_window_spec(5))
    history, truth = windows.batch(range(len(windows)))
    with torch.no_grad():
        injected, propagated = by_definition(subject.forecaster, 1, history, truth)
    assert findings.arrays["total"].shape == (4, 5, 2)
    for lead in range(1, 6):
        d, p, y = (frames[:, lead - 1].double().numpy() for frames in (injected, propagated, truth))
        terms = {
            "injection": (d**2).sum((1, 2, 3)),
            "propagation": (p**2).sum((1, 2, 3)),
            "cross": 2 * (d * p).sum((1, 2, 3)),
            "total": ((d + p) ** 2).sum((1, 2, 3)),
        }
        size = (y**2).sum((1, 2, 3))
        for name, energies in terms.items():
            near = {"rel": 2e-4, "abs": 1e-4 * terms["total"].mean()}
            for field in (None, "vorticity"):
                assert value(findings, name, lead, field) == pytest.approx(energies.mean(), **near)
            relative = value(findings, f"{name}_relative", lead)
            assert relative == pytest.approx((energies / size).mean(), rel=2e-4, abs=1e-4)
            np.testing.assert_allclose(
                findings.arrays[name][:, lead - 1, -1], energies, 1e-3, 1e-3 * abs(energies).max()
            )
        shares = [value(findings, f"{name}_share", lead) for name in ("injection", "propagation", "cross")]
        assert sum(shares) == pytest.approx(1, abs=1e-12)
        assert shares[0] == pytest.approx(terms["injection"].mean() / terms["total"].mean(), rel=1e-3)
    assert value(findings, "propagation", 1) == 0


def test_subject_rejects_short_windows_and_empty_selections(runs, raw):
    good = subject_of(raw, runs["first"])
    parts = (good.run, good.recipe, good.forecaster, good.windows)
    with pytest.raises(ValueError, match="The horizon is 6, but the windows have only 5 future frames"):
        Subject(*parts, good.indices, 6, 3)
    with pytest.raises(ValueError, match="No windows selected"):
        Subject(*parts, good.indices[:0], 5, 3)


def test_decomposition_rejects_non_finite_data(runs, raw):
    subject = subject_of(raw, runs["first"])

    class Broken(Windows):
        def batch(self, indices):
            history, future = super().batch(indices)
            return history, torch.where(torch.tensor(indices.tolist()).view(-1, 1, 1, 1, 1) == 2, torch.nan, future)

    bad = Broken(raw, [6, 7], subject.recipe.evaluation_window_spec(5))
    with pytest.raises(ValueError, match="Trajectory 7 of the data contains non-finite values"):
        decomposition(Subject(subject.run, subject.recipe, subject.forecaster, bad, subject.indices, 5, 3))
