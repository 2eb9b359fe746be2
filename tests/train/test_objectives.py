"""Objectives against their sequential definitions and hand-computed losses, in float64."""

import math

import pytest
import torch
from torch import nn

from sigmasolver.tasks import field_groups
from sigmasolver.train.objectives import Loss, direct, frame_by_frame, pushforward, relative_l2, teacher_forced

T_IN, H, N, Q = 3, 4, 6, 2


class Small(nn.Module):
    """A nonlinear model of T_IN frames that gives `block` frames."""

    def __init__(self, block=1):
        super().__init__()
        self.block = block
        self.mix = nn.Linear(T_IN * Q, block * Q).double()

    def forward(self, history):
        flat = history.movedim(1, -2).flatten(-2)
        return torch.tanh(self.mix(flat)).unflatten(-1, (self.block, Q)).movedim(-2, 1)


def batch(b=2):
    frames = torch.randn(b, T_IN + H, N, N, Q, dtype=torch.float64)
    return frames[:, :T_IN], frames[:, T_IN:]


BOTH = Loss(((0,), (1,)))


def gradient(loss, model):
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])


def test_teacher_forcing_in_one_call_has_the_gradient_of_frame_after_frame():
    model, (history, future) = Small(), batch()
    window, loss = history, 0.0
    for t in range(H):
        loss = loss + BOTH(model(window), future[:, t : t + 1]).mean()
        window = torch.cat((window, future[:, t : t + 1]), 1)[:, -T_IN:]
    folded = teacher_forced(model, history, future, BOTH)
    torch.testing.assert_close(folded, loss, rtol=1e-13, atol=0)
    torch.testing.assert_close(gradient(folded, model), gradient(loss, model), rtol=1e-11, atol=1e-14)


def test_gradients_accumulated_frame_by_frame_are_those_of_the_folded_call():
    """One backward pass for each frame, added up, against the one of the folded batch; a field that is given too."""
    model, (history, future) = Small(), batch()
    for truth, loss in ((future, BOTH), (future[..., :1], Loss())):
        learns = (lambda h: model(h)[..., :1]) if truth.shape[-1] == 1 else model
        folded = teacher_forced(learns, history, truth, loss)
        wanted = gradient(folded, model)
        model.zero_grad()
        losses = []
        for window, frame, _ in frame_by_frame(history, truth):
            assert window.shape[1] == T_IN and frame.shape[1] == 1
            losses.append(direct(learns, window, frame, loss))
            losses[-1].backward()
        found = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        torch.testing.assert_close(sum(losses), folded, rtol=1e-13, atol=0)
        torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize(("block", "calls"), [(1, 1), (1, 3), (2, 2)])
def test_pushforward_learns_through_its_last_call_only(block, calls):
    model, (history, future) = Small(block), batch()
    window = history
    for _ in range(calls - 1):
        window = torch.cat((window, model(window).detach()), 1)[:, -T_IN:]
    start = (calls - 1) * block
    expected = BOTH(model(window), future[:, start : start + block]).mean()
    loss = pushforward(model, history, future, BOTH, calls)
    torch.testing.assert_close(loss, expected, rtol=1e-13, atol=0)
    torch.testing.assert_close(gradient(loss, model), gradient(expected, model), rtol=1e-11, atol=1e-14)


def test_one_pushforward_call_is_direct():
    model, (history, future) = Small(2), batch()
    assert torch.equal(pushforward(model, history, future, BOTH, 1), direct(model, history, future, BOTH))


def test_losses_by_hand():
    truth = torch.zeros(1, 2, 2, 2, 3, dtype=torch.float64)
    truth[..., 0], truth[..., 1], truth[..., 2] = 1.0, 2.0, 4.0
    prediction = truth.clone()
    prediction[..., 0] += 0.1
    prediction[..., 1] += 0.4
    prediction[..., 2] += 0.4
    torch.testing.assert_close(relative_l2(prediction, truth), torch.tensor([[0.1, 0.2, 0.1]], dtype=torch.float64))
    assert Loss(((0,), (1, 2)))(prediction, truth).item() == pytest.approx(0.1 + 0.15)


@pytest.mark.parametrize("exponent", [-115, -60, 0, 40, 63, 110])
def test_the_unit_of_the_data_changes_no_bit_of_the_loss(exponent):
    """Times 2^k the loss stays and its gradient is over 2^k, in float32, far beyond where squares leave its range; and
    for ordinary numbers both are those of the plain ratio."""
    truth, prediction = torch.randn(2, 3, 5, 6, 2), torch.randn(2, 3, 5, 6, 2, requires_grad=True)
    axes = (1, 2, 3)
    plain = torch.linalg.vector_norm(prediction - truth, dim=axes) / torch.linalg.vector_norm(truth, dim=axes)
    (slope,) = torch.autograd.grad(plain.sum(), prediction)
    factor = 2.0**exponent
    large = (factor * prediction).detach().requires_grad_()
    found = relative_l2(large, factor * truth)
    assert torch.equal(found, plain)
    (other,) = torch.autograd.grad(found.sum(), large)
    assert torch.equal(other * factor, slope)


def test_extremes_of_float32_and_a_truth_of_zero():
    for size in (3e38, 1e-44):
        truth = torch.full((1, 1, 4, 1), size)
        assert relative_l2(truth / 2, truth).item() == pytest.approx(0.5, rel=0.2 if size < 1 else 1e-6)
    zero, one = torch.zeros(1, 1, 4, 1), torch.ones(1, 1, 4, 1)
    assert relative_l2(one, zero).isinf().all() and relative_l2(zero, zero).isnan().all()
    for bad in (torch.inf, torch.nan):
        assert not relative_l2(bad * one, one).isfinite().any() and not relative_l2(one, bad * one).isfinite().any()


def test_mean_of_ratios_not_ratio_of_means():
    truth = torch.ones(2, 1, 4, 1, dtype=torch.float64)
    truth[1] = 100.0
    prediction = truth + 1
    history = torch.zeros(2, 1, 4, 1, dtype=torch.float64)
    assert direct(lambda _: prediction, history, truth, Loss()).item() == pytest.approx((1 + 0.01) / 2)


def test_velocity_components_share_one_loss():
    assert field_groups(("density", "velocity_x", "velocity_y")) == {"density": (0,), "velocity": (1, 2)}
    assert field_groups(("vorticity",)) == {"vorticity": (0,)}


def test_derivative_term_by_hand():
    """On u = sin(pi x) sin(pi y) with its zero ring, a scaled prediction has the same relative error in every slope."""
    x = torch.linspace(0, math.pi, 9, dtype=torch.float64)
    truth = (torch.sin(x)[:, None] * torch.sin(x))[None, None, ..., None]
    assert Loss(derivative=0.1)(1.05 * truth, truth).item() == pytest.approx(0.05 * (1 + 2 * 0.1))


def test_the_derivative_term_is_of_central_differences():
    """Against a loop over points; a prediction that is no multiple of the truth tells one stencil from another."""
    truth, prediction = (torch.randn(2, 1, 5, 6, 1, dtype=torch.float64) for _ in range(2))
    expected = []
    for p, t in zip(prediction[:, 0, ..., 0], truth[:, 0, ..., 0], strict=True):
        loss = (p - t).norm() / t.norm()
        inner = [[float(p[i, j]) if 0 < i < 4 and 0 < j < 5 else 0.0 for j in range(6)] for i in range(5)]

        def at(field, i, j):
            return float(field[i][j]) if 0 <= i < 5 and 0 <= j < 6 else 0.0

        for di, dj in ((1, 0), (0, 1)):
            above = below = 0.0
            for i in range(5):
                for j in range(6):
                    slope_p, slope_t = (at(f, i + di, j + dj) - at(f, i - di, j - dj) for f in (inner, t))
                    above, below = above + (slope_p - slope_t) ** 2, below + slope_t**2
            loss = loss + 0.3 * math.sqrt(above / below)
        expected.append(loss)
    torch.testing.assert_close(Loss(derivative=0.3)(prediction, truth), torch.stack(expected), rtol=1e-12, atol=0)


def test_the_ring_of_a_prediction_counts_only_without_derivatives():
    truth = torch.rand(1, 1, 7, 7, 1, dtype=torch.float64)
    changed = truth.clone()
    changed[:, :, 0] += 5.0
    slopes = [Loss(derivative=1.0)(p, truth) - Loss()(p, truth) for p in (truth, changed)]
    torch.testing.assert_close(slopes[0], slopes[1], rtol=1e-13, atol=0)
    assert slopes[0] > 0, "a prediction with a zero ring differs from a truth without one"


def test_mistakes_are_one_sentence():
    model, (history, future) = Small(2), batch()
    with pytest.raises(ValueError, match="predicts 2 per call"):
        teacher_forced(model, history, future, BOTH)
    with pytest.raises(ValueError, match="3 calls of 2 frames need more than the 4"):
        pushforward(model, history, future, BOTH, 3)
