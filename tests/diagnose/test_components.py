"""Gains and defects of components against dense linear algebra, and the recurrence on a trained model."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from sigmasolver.data.normalise import Normaliser
from sigmasolver.data.store import open_store
from sigmasolver.data.windows import Windows
from sigmasolver.diagnose import components as module
from sigmasolver.diagnose import gains
from sigmasolver.diagnose.bands import Bands
from sigmasolver.diagnose.components import (
    component_gains,
    components,
    contracting,
    envelope,
    spectral_radius,
    trace_errors,
)
from sigmasolver.diagnose.gains import MeanJacobian, block_output, history_update, largest_gain, mean_products
from sigmasolver.diagnose.subject import NotApplicable
from sigmasolver.forecast import Forecaster, feed_back, rollout
from sigmasolver.forecast.checkpoint import load, load_recipe
from tests.diagnose.subjects import STEADY, TASK, hooks_in, number, rows_named, subject_in_3d, subject_of
from tests.theory.linear_model import geometric_sum, random_reversal, real_fourier_basis

N, LOW = 12, 3
IDENTITY = {"identity": lambda states: states}
QUICK = "ffno"
"""The model of tests of what is counted and reported, whatever the model: the fastest one."""
SCALES = {"low": Bands((LOW,)).low, "high": Bands((LOW,)).high}


@pytest.fixture
def skip_norms(monkeypatch):
    """Skip the norm iteration where its result is not tested."""
    monkeypatch.setattr(gains, "MAX_PRODUCTS", 1)


# --- a linear model, against dense matrices


class Dense(nn.Module):
    """(B, N, T_in) -> (B, N, T_out) by one matrix (T_out N, T_in N), frame by frame."""

    def __init__(self, matrix, block):
        super().__init__()
        self.matrix, self.block = nn.Parameter(torch.tensor(matrix), requires_grad=False), block

    def forward(self, channels):
        return (channels.mT.flatten(1) @ self.matrix.T).unflatten(-1, (self.block, N)).mT


class Linear:
    """The contracting dynamics of the theory, and a model of them with `history` input and `block` output frames."""

    def __init__(self, history, block, calls=5, samples=3):
        random, dynamics = np.random.default_rng(0), random_reversal(3, N, 2)
        self.history, self.block = history, block
        states = [random.standard_normal((samples, N))]
        for _ in range(history + calls * block - 1):
            states.append(states[-1] @ dynamics.exact.T)
        self.truth = np.stack(states, axis=1)  # (B, frames, N)
        powers = [np.linalg.matrix_power(dynamics.spectral, step + 1) for step in range(block)]
        self.output = np.zeros((block * N, history * N))
        self.output[:, -N:] = np.concatenate(powers)
        self.output += 0.02 * random.standard_normal(self.output.shape)
        # Append the block to the history, keep the newest frames.
        appended = np.concatenate((np.eye(history * N), self.output))
        self.update = appended[-history * N :]
        basis = np.kron(np.eye(history), real_fourier_basis(N)[: 2 * LOW - 1])  # constant, LOW - 1 pairs
        low = basis.T @ basis
        self.projections = low, np.eye(history * N) - low

    def forecaster(self):
        plain = Normaliser("channel", ("height",), torch.zeros(1).double(), torch.ones(1).double())
        model = Dense(self.output, self.block)
        return Forecaster(model, plain, plain, self.block, history=self.history)

    def tensors(self):
        frames = torch.tensor(self.truth)[..., None]
        return frames[:, : self.history], frames[:, self.history :]

    def dense_trace(self):
        """s_k, e_k and δ_k by dense algebra: (K + 1 or K, B, T_in N)."""
        calls = (self.truth.shape[1] - self.history) // self.block
        s = [
            self.truth[:, k * self.block : k * self.block + self.history].reshape(len(self.truth), -1)
            for k in range(calls + 1)
        ]
        visited = [s[0]]
        for _ in range(calls):
            visited.append(visited[-1] @ self.update.T)
        defects = [s[k] @ self.update.T - s[k + 1] for k in range(calls)]
        return np.array(s), np.array(visited) - np.array(s), np.array(defects)


def norms(vectors, projections):
    """(K, B, n) -> (B, K, components)"""
    return np.stack([np.linalg.norm(vectors @ Q, axis=-1).T for Q in projections], axis=-1)


@pytest.mark.parametrize(("history", "block"), [(1, 1), (3, 1), (3, 2), (1, 3)])
def test_components_of_a_linear_model_match_dense_algebra(history, block):
    linear = Linear(history, block)
    forecaster, (start, truth) = linear.forecaster(), linear.tensors()
    trace = trace_errors(forecaster, start, truth, SCALES)
    s, e, delta = linear.dense_trace()
    close = {"rtol": 1e-9, "atol": 1e-12}
    np.testing.assert_allclose(trace.error, norms(e, linear.projections), **close)
    np.testing.assert_allclose(trace.defect, norms(delta, linear.projections), **close)
    for i, target in enumerate(linear.projections):
        for j, source in enumerate(linear.projections):
            amplified = np.linalg.norm(e[1:-1] @ (target @ linear.update @ source).T, axis=-1)
            expected = amplified / np.linalg.norm(e[1:-1] @ source, axis=-1)
            np.testing.assert_allclose(trace.amplification[:, 1:, i, j], expected.T, **close)
    assert (trace.amplification[:, 0] == 0).all() and (trace.residual < 1e-10).all()

    exact = np.array(
        [[np.linalg.norm(Qi @ linear.update @ Qj, 2) for Qj in linear.projections] for Qi in linear.projections]
    )
    J = MeanJacobian(history_update(forecaster, start[..., 1:]), start, start + 1)
    estimated = component_gains(J, SCALES, start, tolerance=1e-13)
    np.testing.assert_allclose(estimated, np.broadcast_to(exact, estimated.shape), rtol=1e-9)
    assert exact[0, 1] > 0.01 and exact[1, 0] > 0.01  # the components are coupled

    # The sum of matrix powers in the paper bounds the error.
    eps, calls = trace.defect.numpy().max(axis=1), len(delta)
    published = [sum(np.linalg.matrix_power(exact, j) for j in range(k)) @ eps.T for k in range(1, calls + 1)]
    bound = envelope(estimated, torch.tensor(eps), calls)
    np.testing.assert_allclose(bound[:, 1:], np.array(published).transpose(2, 0, 1), rtol=1e-9)
    assert (trace.error <= bound * (1 + 1e-9)).all() and (bound[:, 0] == 0).all()
    measured = envelope(trace.amplification[:, 1:].amax(1), torch.tensor(eps), calls)
    assert (trace.error <= measured * (1 + 1e-9)).all() and (measured <= bound * (1 + 1e-9)).all()
    np.testing.assert_allclose(spectral_radius(estimated)[0], np.abs(np.linalg.eigvals(exact)).max(), rtol=1e-9)
    assert bool(contracting(estimated)[0]) == (np.abs(np.linalg.eigvals(exact)).max() < 1)
    # A history longer than its block keeps frames, with gain one in each component.
    assert history <= block or (np.diag(exact) >= 1).all()

    # eq:rollout-block-output-bound, frames that the history does not keep included.
    y = np.array([linear.truth[:, history + k * block : history + (k + 1) * block] for k in range(calls)])
    y = y.reshape(calls, len(start), -1)
    for values, histories in ((trace.output_error, s[:-1] + e[:-1]), (trace.output_defect, s[:-1])):
        expected = np.linalg.norm(histories @ linear.output.T - y, axis=-1).T
        np.testing.assert_allclose(values, expected, **close)
    J = MeanJacobian(block_output(forecaster, start[..., 1:]), start, start)
    L = largest_gain(J.__matmul__, J.transposed, start, 1e-13)
    np.testing.assert_allclose(L, np.linalg.norm(linear.output, 2), rtol=1e-9)
    amplified = np.linalg.norm(e[1:-1] @ linear.output.T, axis=-1) / np.linalg.norm(e[1:-1], axis=-1)
    np.testing.assert_allclose(trace.output_amplification[:, 1:], amplified.T, **close)
    outside = trace.output_defect + L[:, None] * trace.error[:, :-1].norm(dim=-1)
    assert (trace.output_error <= outside * (1 + 1e-9)).all()


@pytest.mark.parametrize(("history", "block"), [(1, 1), (3, 2)])
def test_identity_projection_gives_the_scalar_gain(history, block):
    """Q₁ = I: one gain a = ‖J̄‖ and one defect, and the bound is δ G_k(a) of eq:rollout-finite-bound."""
    linear = Linear(history, block)
    forecaster, (start, truth) = linear.forecaster(), linear.tensors()
    trace, (_, e, delta) = trace_errors(forecaster, start, truth, IDENTITY), linear.dense_trace()
    np.testing.assert_allclose(trace.error[..., 0], np.linalg.norm(e, axis=-1).T, rtol=1e-9, atol=1e-12)
    J = MeanJacobian(history_update(forecaster, start[..., 1:]), start, start)
    estimated, gain = component_gains(J, IDENTITY, start), largest_gain(J.__matmul__, J.transposed, start)
    assert torch.equal(estimated[:, 0, 0], gain)
    padded = component_gains(J, {**IDENTITY, "nothing": torch.zeros_like}, start)
    assert torch.equal(padded[:, 0, 0], gain) and float(padded.sum()) == float(gain.sum())
    torch.testing.assert_close(spectral_radius(padded), gain)
    bound = envelope(estimated, trace.defect.amax(1), len(delta))
    for sample, a in enumerate(gain.tolist()):
        largest = np.linalg.norm(delta[:, sample], axis=-1).max()
        expected = [largest * geometric_sum(a, k) for k in range(len(delta) + 1)]
        np.testing.assert_allclose(bound[sample, :, 0], expected, rtol=1e-9)


def test_contracting_equals_spectral_radius_below_one():
    A = torch.rand(200, 2, 2, dtype=torch.float64)
    radius = torch.linalg.eigvals(A).abs().amax(-1)
    torch.testing.assert_close(spectral_radius(A), radius)
    assert torch.equal(contracting(A), radius < 1) and 0 < contracting(A).sum() < 200


# --- a trained model


def trained(runs, horizon=3):
    """A briefly trained forecaster in float64, with history and truth of three windows."""
    run = runs["first"]
    forecaster = load(run.path, "cpu").double()
    with open_store(run.read_json("data.json")["path"]) as store:
        spec = replace(load_recipe(run).evaluation_window_spec(), horizon=horizon)
        history, future = Windows(store, run.read_json("data.json")["parts"]["test"], spec).batch(torch.arange(3))
    return forecaster, history.double(), future.double()


def test_error_recurrence_holds_to_round_off_on_a_trained_model(runs):
    """Q_i e_{k+1} = Q_i δ_k + Σ_j Q_i J̄_k Q_j e_k, vector by vector; hence the step and the bound in norms."""
    forecaster, history, truth = trained(runs)
    bands, nodes = Bands((3, 3)), 7
    parts = {"low": bands.low, "high": bands.high}
    true = visited = history
    for call in range(3):
        update, following = history_update(forecaster, true[..., 1:]), feed_back(true, truth[:, call : call + 1])
        with torch.no_grad():
            delta, reached = update(true) - following, update(visited)
        images = mean_products(update, true, visited, [project(visited - true) for project in parts.values()], nodes)
        for project in parts.values():
            expected = project(delta) + sum(project(image) for image in images)
            torch.testing.assert_close(project(reached - following), expected, rtol=0, atol=1e-12)
        true, visited = following, reached
    assert (visited - true).norm() > 0.1  # there is an error to propagate

    trace = trace_errors(forecaster, history, truth, parts, nodes)
    assert (trace.residual < 1e-12).all()
    step = trace.defect + (trace.amplification @ trace.error[:, :-1, :, None])[..., 0]
    assert (trace.error[:, 1:] <= step * (1 + 1e-12)).all()
    bound = envelope(trace.amplification[:, 1:].amax(1), trace.defect.amax(1), 3)
    assert (trace.error <= bound * (1 + 1e-12)).all()


def test_trace_histories_match_truth_and_free_forecast(runs):
    forecaster, history, truth = trained(runs, 4)
    trace = trace_errors(forecaster, history, truth, IDENTITY, nodes=1)
    with torch.no_grad():
        frames = rollout(forecaster, history, 4).frames
    assert len(trace.histories) == 4
    for call, histories in enumerate(trace.histories):
        for actual, future in zip(histories[:2], (truth, frames), strict=True):
            assert torch.equal(actual, torch.cat((history, future), dim=1)[:, call : call + 2])


# --- rows


def test_components_rows_match_trace_and_norm_estimates(monkeypatch):
    monkeypatch.setattr(gains, "MAX_PRODUCTS", 3)  # for the rows and for the reference
    subject = subject_of(QUICK, replace(TASK, block=2), dtype=torch.float64)
    findings = components(subject)
    assert findings.arrays["leads"].tolist() == findings.arrays["gain_leads"].tolist() == [2, 4]
    assert findings.arrays["cases"].tolist() == subject.indices[[0, 1, 3, 4]].tolist()
    _, history, truth = next(replace(subject, indices=subject.indices[[0, 1, 3, 4]], batch=4).batches())
    bands = Bands((3, 3))
    parts = {"low": bands.low, "high": bands.high}
    trace = trace_errors(subject.forecaster, history, truth, parts)
    for component, name in enumerate(parts):
        for call in range(2):
            for metric, values in (("error", trace.error[:, call + 1]), ("defect", trace.defect[:, call])):
                (row,) = rows_named(findings, f"{metric}_{name}", lead=2 * call + 2)
                assert row["value"] == pytest.approx(values[:, component].mean().item(), rel=1e-10)
                assert row["deviation"] == pytest.approx(values[:, component].std().item(), rel=1e-6)
        largest = trace.defect[..., component].amax(1).mean().item()
        assert number(findings, f"uniform_defect_{name}") == pytest.approx(largest, rel=1e-10)
    # Names are source_target; rows of the matrix are targets.
    reported = number(findings, "amplification_low_high", lead=4)
    assert reported == pytest.approx(trace.amplification[:, 1, 1, 0].mean().item(), rel=1e-10)
    A = []
    for call, (true, visited, _) in enumerate(trace.histories):
        J = MeanJacobian(history_update(subject.forecaster, true[..., 2:]), true, visited)
        A.append(component_gains(J, parts, true))
        reported = number(findings, "gain_low_high_lower_estimate", lead=2 * call + 2)
        assert reported == pytest.approx(A[-1][:, 1, 0].mean().item(), rel=1e-10)
        gain = largest_gain(J.__matmul__, J.transposed, true).mean().item()
        assert number(findings, "gain_lower_estimate", lead=2 * call + 2) == pytest.approx(gain, rel=1e-10)
    largest = {"measured": trace.amplification[:, 1:].amax(1), "lower_estimate": torch.stack(A, 1).amax(1)}
    for kind, matrices in largest.items():
        bound = envelope(matrices, trace.defect.amax(1), 2)
        for component, name in enumerate(parts):
            reported = number(findings, f"bound_{kind}_{name}", lead=4)
            assert reported == pytest.approx(bound[:, 2, component].mean().item(), rel=1e-10)
        within = (trace.error[:, 1:] <= bound[:, 1:] * (1 + 1e-9)).double().mean().item()
        assert number(findings, f"within_{kind}") == within
        radius = spectral_radius(matrices).mean().item()
        assert number(findings, f"spectral_radius_{kind}") == pytest.approx(radius, rel=1e-10)
        fraction = contracting(matrices).double().mean().item()
        assert number(findings, f"contracting_{kind}") == fraction
    assert number(findings, "within_measured") == 1.0
    assert [number(findings, f"modes_axis{axis}") for axis in (1, 2)] == [3, 3]
    assert not any("output" in row["metric"] for row in findings.rows)  # the history keeps every frame
    assert all("lower_estimate" in row["metric"] for row in findings.rows if "gain" in row["metric"] and row["lead"])


def test_within_counts_errors_above_the_bound(monkeypatch, skip_norms):
    """Estimates far below the norm give a bound that is violated and counted; the measured bound still holds."""
    monkeypatch.setattr(module, "largest_gain", lambda forward, backward, like, *_, **__: like.new_zeros(len(like)))
    findings = components(subject_of(QUICK))
    assert number(findings, "within_measured") == 1.0
    error, defect = (findings.arrays[f"{name}_low"] for name in ("error", "defect"))
    broken = (error > defect.max(1, keepdims=True) * 1.0001).mean()
    assert broken > 0 and number(findings, "within_lower_estimate") < 1
    np.testing.assert_allclose(findings.arrays["bound_lower_estimate_low"][:, -1], defect.max(1), rtol=1e-6)


def test_output_bound_covers_frames_dropped_from_the_history(skip_norms):
    subject = subject_of(task=replace(TASK, history=1, block=2), dtype=torch.float64)
    findings = components(subject)
    error, defect = (findings.arrays[f"output_{name}"] for name in ("error", "defect"))
    history_bound = np.hypot(*(findings.arrays[f"bound_measured_{name}"][:, 0] for name in ("low", "high")))
    L = findings.arrays["output_amplification"][:, 0]
    bound = defect + np.stack((0 * L, L * history_bound), axis=1)
    np.testing.assert_allclose(findings.arrays["output_bound_measured"], bound, rtol=1e-5)
    assert (error <= bound * 1.0001).all() and number(findings, "output_within_measured") == 1
    assert number(findings, "output_gain_lower_estimate", lead=4) > 0


def test_bound_of_a_single_call_is_its_defect(skip_norms):
    findings = components(replace(subject_of(), horizon=1))
    assert number(findings, "bound_measured_low", lead=1) == number(findings, "error_low", lead=1)
    assert not rows_named(findings, "spectral_radius_measured") and number(findings, "within_measured") == 1


def test_gains_of_a_long_forecast_are_estimated_at_few_calls(monkeypatch):
    monkeypatch.setattr(gains, "MAX_PRODUCTS", 2)
    subject = subject_of(QUICK, replace(TASK, horizon=6), windows=2)
    sparse = components(subject)
    monkeypatch.setattr(module, "GAIN_CALLS", 6)
    full = components(subject)
    assert sparse.arrays["gain_leads"].tolist() == [1, 3, 4, 6]
    assert full.arrays["gain_leads"].tolist() == [1, 2, 3, 4, 5, 6]
    for metric in ("gain_lower_estimate", "gain_low_high_lower_estimate"):
        assert np.array_equal(sparse.arrays[metric], full.arrays[metric][:, [0, 2, 3, 5]])
        assert len(set(full.arrays[metric][0].tolist())) == 6  # the calls differ
    assert (number(sparse, "gain_calls"), number(sparse, "gain_cases")) == (4, 2)
    assert number(sparse, "gain_tolerance") == gains.TOLERANCE


@pytest.mark.parametrize("block", [1, 3])
def test_components_progress_counts_calls_and_products(block, monkeypatch):
    monkeypatch.setattr(gains, "MAX_PRODUCTS", 5)
    ticks = []
    subject = replace(subject_of(QUICK, replace(TASK, block=block), windows=2), horizon=3)
    plain = components(subject)
    with_ticks = components(replace(subject, tick=lambda *progress: ticks.append(progress)))
    assert [row["value"] for row in with_ticks.rows] == [row["value"] for row in plain.rows]  # unaffected by the ticks
    done, totals = zip(*ticks, strict=True)
    calls, norms_per_call = 3 // block, 5 + (block > 2)
    assert set(totals) == {calls + calls * norms_per_call * 5} and done[-1] == totals[0]
    assert list(done) == sorted(done) and done[:calls] == tuple(range(1, calls + 1))
    assert len(set(done)) - calls >= calls * norms_per_call * 3
    assert hooks_in(subject.forecaster) == 0


@pytest.mark.parametrize("name", ["physolver", "transolver", "ffno", "linearno"])
def test_components_support_any_model(name, skip_norms):
    findings = components(replace(subject_of(name), horizon=2))
    assert number(findings, "within_measured") == 1 and number(findings, "gain_lower_estimate", lead=2) > 0


def test_components_in_3d_use_a_single_case(skip_norms):
    findings = components(subject_in_3d())
    assert findings.arrays["gain_lower_estimate"].shape == (1, 2)
    assert rows_named(findings, "gain_lower_estimate", lead=2)[0]["deviation"] is None
    assert number(findings, "modes_axis3") == 2


def test_components_not_applicable_to_steady_tasks_or_short_horizons():
    with pytest.raises(NotApplicable, match="steady task has no history"):
        components(subject_of(task=STEADY))
    with pytest.raises(NotApplicable, match="The horizon must be at least the 3 frames of one call, got 2"):
        components(replace(subject_of(task=replace(TASK, block=3)), horizon=2))


def test_components_of_a_blown_up_forecast_are_not_finite(skip_norms):
    subject = replace(subject_of(), horizon=2)
    with torch.no_grad():
        subject.forecaster.model.readout.weight.fill_(1e30)
    findings = components(subject)
    assert not np.isfinite(number(findings, "error_low", lead=2))
    assert not np.isfinite(number(findings, "within_measured"))
    assert not np.isfinite(findings.arrays["gain_lower_estimate"][:, 1]).any()
