"""Gains against the singular values of the explicit Jacobian in float64, and the paper's error recurrence."""

from dataclasses import replace

import pytest
import torch

from sigmasolver.diagnose.bands import Bands
from sigmasolver.diagnose.components import component_gains
from sigmasolver.diagnose.gains import MeanJacobian, history_update, largest_gain
from sigmasolver.forecast import feed_back
from tests.diagnose.subjects import TASK, hooks_in, subject_of

BANDS = Bands((2, 2))


def start(name="transolver-sigma", task=TASK):
    """A float64 forecaster, two true histories, and two perturbed ones."""
    subject = subject_of(name, task=task, dtype=torch.float64)
    _, history, _ = next(subject.batches())
    return subject.forecaster, history, history + 0.3 * torch.randn_like(history)


def explicit(update, state):
    """(B, n, n): the Jacobian of every sample by reverse mode, all rows at once."""
    size = state[0].numel()
    full = torch.autograd.functional.jacobian(update, state, vectorize=True).reshape(len(state), size, len(state), size)
    assert all(full[i, :, j].abs().max() == 0 for i in range(len(state)) for j in range(len(state)) if i != j)
    return torch.stack([full[sample, :, sample] for sample in range(len(state))])


def matrix(project, state):
    """A projection as a matrix (n, n)."""
    size = state[0].numel()
    return project(torch.eye(size, dtype=state.dtype).reshape(size, *state.shape[1:])).reshape(size, size).mT


@pytest.mark.parametrize("name", ["transolver-sigma", "transolver", "ffno", "linearno"])
def test_largest_gain_matches_singular_values_of_the_jacobian(name):
    forecaster, true, _ = start(name)
    update = history_update(forecaster, true[..., 2:])
    J = explicit(update, true)
    jacobian = MeanJacobian(update, true, true)
    parts = {"low": BANDS.low, "high": BANDS.high}
    matrices = [matrix(project, true) for project in parts.values()]
    expected = torch.stack(
        [torch.linalg.svdvals(target @ J @ source)[:, 0] for target in matrices for source in matrices], dim=-1
    ).unflatten(-1, (2, 2))
    estimated = component_gains(jacobian, parts, true)
    # Some singular value is within the tolerance; the largest may be slightly above the estimate.
    torch.testing.assert_close(estimated, expected, rtol=1e-2, atol=0)
    assert (estimated <= expected * (1 + 1e-12)).all()  # from below
    exact = torch.linalg.svdvals(J)[:, 0]
    gain = largest_gain(jacobian.__matmul__, jacobian.transposed, true)
    torch.testing.assert_close(gain, exact, rtol=2e-3, atol=0)
    assert (gain <= exact * (1 + 1e-12)).all()
    tight = largest_gain(jacobian.__matmul__, jacobian.transposed, true, tolerance=1e-8)
    torch.testing.assert_close(tight, exact, rtol=1e-12, atol=0)


def test_mean_jacobian_products_match_explicit_jacobians():
    forecaster, true, visited = start()
    update = history_update(forecaster, true[..., 2:])
    nodes = (0.5 - 0.5 / 3**0.5, 0.5 + 0.5 / 3**0.5)  # Gauss-Legendre with two points
    J = sum(explicit(update, true + node * (visited - true)) for node in nodes) / 2
    mean_jacobian, v = MeanJacobian(update, true, visited), torch.randn_like(true)
    torch.testing.assert_close((mean_jacobian @ v).flatten(1), (J @ v.flatten(1)[..., None])[..., 0])
    torch.testing.assert_close(mean_jacobian.transposed(v).flatten(1), (J.mT @ v.flatten(1)[..., None])[..., 0])


def test_mean_jacobian_propagates_the_error_of_a_call():
    """f(ŝ) - f(s) = J̄ e; the two-point sum has an error of fifth order in the segment length."""
    forecaster, true, _ = start()
    update, e = history_update(forecaster, true[..., 2:]), torch.randn_like(true)
    errors = []
    for size in (0.2, 0.1):
        J = MeanJacobian(update, true, true + size * e)
        with torch.no_grad():
            difference = update(true + size * e) - update(true)
        errors.append(float((J @ (size * e) - difference).norm()))
        assert errors[-1] < 1e-3 * difference.norm()
    assert errors[0] / errors[1] == pytest.approx(32, rel=0.3)


def test_rollout_error_is_bounded_by_injection_plus_gain_times_error():
    """The step of eq:rollout-finite-bound, call by call along a free forecast."""
    subject = subject_of(dtype=torch.float64)
    _, history, truth = next(subject.batches())
    true = visited = history
    for call in range(3):
        update = history_update(subject.forecaster, true[..., 2:])
        gain = largest_gain(*_products(MeanJacobian(update, true, visited)), true)
        with torch.no_grad():
            forced, free = update(true), update(visited)
        following = feed_back(true, truth[:, call : call + 1])
        parts = (forced - following, visited - true, free - following)
        injected, error, next_error = (part.flatten(1).norm(dim=1) for part in parts)
        assert (next_error <= injected + 1.002 * gain * error).all()
        true, visited = following, free
    assert (error > 0).all()


def _products(J):
    return J.__matmul__, J.transposed


def test_gain_is_at_least_one_if_history_exceeds_block():
    """Frames that are only shifted have gain one; the update is more than its output."""
    forecaster, true, _ = start()
    jacobian = MeanJacobian(history_update(forecaster, true[..., 2:]), true, true)
    v = torch.randn_like(true)
    torch.testing.assert_close((jacobian @ v)[:, 0], v[:, 1])
    assert (largest_gain(*_products(jacobian), true) >= 1).all()


def test_history_update_keeps_given_fields_fixed():
    task = replace(TASK, inputs=("height", "slope"), targets=("height",))
    forecaster, history, _ = start(task=task)
    update = history_update(forecaster, history[..., 1:])
    with torch.no_grad():
        expected = feed_back(history, forecaster(history))[..., :1]
        assert torch.equal(update(history[..., :1]), expected)
    J = explicit(update, history[..., :1])
    gain = largest_gain(*_products(MeanJacobian(update, history[..., :1], history[..., :1])), history[..., :1], 1e-8)
    torch.testing.assert_close(gain, torch.linalg.svdvals(J)[:, 0], rtol=1e-10, atol=0)


def test_largest_gain_of_known_operators():
    like = torch.zeros(3, 4, dtype=torch.float64)
    diagonal = torch.tensor([[1.0, -7.0, 2.0, 0.0], [0.0, 0.0, 0.0, 0.0], [3.0, 3.0, 3.0, 3.0]]).double()
    gains = largest_gain(lambda v: diagonal * v, lambda u: diagonal * u, like, tolerance=1e-10)
    torch.testing.assert_close(gains, torch.tensor([7.0, 0.0, 3.0]).double())
    broken = torch.tensor([[1.0] * 4, [torch.nan] * 4, [2.0] * 4]).double()
    gains = largest_gain(lambda v: broken * v, lambda u: broken * u, like)
    torch.testing.assert_close(gains, torch.tensor([1.0, torch.nan, 2.0]).double(), equal_nan=True)


def test_largest_gain_stops_at_the_tolerance():
    """A looser tolerance needs fewer products; the squared result is within the tolerance of an eigenvalue."""
    forecaster, true, _ = start("ffno")
    update = history_update(forecaster, true[..., 2:])
    jacobian, values = MeanJacobian(update, true, true), torch.linalg.svdvals(explicit(update, true))
    counts = []
    for tolerance in (1e-2, 5e-3, 1e-6):
        ticks = []
        gain = largest_gain(*_products(jacobian), true, tolerance, ticks.append)
        assert ticks == list(range(1, len(ticks) + 1))
        counts.append(len(ticks))
        nearest = (values.square() - gain.square()[:, None]).abs().amin(1)
        assert (nearest <= tolerance * gain.square()).all()
    assert counts[0] < counts[1] < counts[2] < 64


def test_mean_jacobian_leaves_no_gradients_or_hooks():
    forecaster, true, visited = start()
    with torch.no_grad():
        before = forecaster(true)
    jacobian = MeanJacobian(history_update(forecaster, true[..., 2:]), true, visited)
    image = jacobian.transposed(jacobian @ true)
    assert not image.requires_grad and all(p.grad is None for p in forecaster.parameters())
    with torch.no_grad():
        assert torch.equal(before, forecaster(true))
    assert hooks_in(forecaster) == 0
