"""Training objectives against their sequential definitions, and losses computed by hand, in float64."""

import math

import pytest
import torch
from torch import nn

from sigmasolver.tasks import field_groups
from sigmasolver.train.objectives import Loss, direct, frame_by_frame, pushforward, relative_l2, teacher_forced

T_IN, H, N, Q = 3, 4, 6, 2


class Small(nn.Module):
    """A nonlinear model that maps T_IN frames to `block` frames."""

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


LOSS = Loss(((0,), (1,)))


def gradient(loss, model):
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])


def test_teacher_forced_gradient_equals_frame_by_frame():
    model, (history, future) = Small(), batch()
    window, loss = history, 0.0
    for t in range(H):
        loss = loss + LOSS(model(window), future[:, t : t + 1]).mean()
        window = torch.cat((window, future[:, t : t + 1]), 1)[:, -T_IN:]
    folded = teacher_forced(model, history, future, LOSS)
    torch.testing.assert_close(folded, loss, rtol=1e-13, atol=0)
    torch.testing.assert_close(gradient(folded, model), gradient(loss, model), rtol=1e-11, atol=1e-14)


def test_frame_by_frame_accumulates_the_teacher_forced_gradient():
    """Sum of one backward pass per frame against that of the folded batch; also with an input-only field."""
    model, (history, future) = Small(), batch()
    for truth, loss in ((future, LOSS), (future[..., :1], Loss())):
        forecast = (lambda h: model(h)[..., :1]) if truth.shape[-1] == 1 else model
        folded = teacher_forced(forecast, history, truth, loss)
        expected = gradient(folded, model)
        model.zero_grad()
        losses = []
        for window, frame, _ in frame_by_frame(history, truth):
            assert window.shape[1] == T_IN and frame.shape[1] == 1
            losses.append(direct(forecast, window, frame, loss))
            losses[-1].backward()
        accumulated = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        torch.testing.assert_close(sum(losses), folded, rtol=1e-13, atol=0)
        torch.testing.assert_close(accumulated, expected, rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize(("block", "calls"), [(1, 1), (1, 3), (2, 2)])
def test_pushforward_has_a_gradient_only_through_its_last_call(block, calls):
    model, (history, future) = Small(block), batch()
    window = history
    for _ in range(calls - 1):
        window = torch.cat((window, model(window).detach()), 1)[:, -T_IN:]
    start = (calls - 1) * block
    expected = LOSS(model(window), future[:, start : start + block]).mean()
    loss = pushforward(model, history, future, LOSS, calls)
    torch.testing.assert_close(loss, expected, rtol=1e-13, atol=0)
    torch.testing.assert_close(gradient(loss, model), gradient(expected, model), rtol=1e-11, atol=1e-14)


def test_pushforward_with_one_call_is_direct():
    model, (history, future) = Small(2), batch()
    assert torch.equal(pushforward(model, history, future, LOSS, 1), direct(model, history, future, LOSS))


def test_relative_l2_and_grouped_loss_by_hand():
    truth = torch.zeros(1, 2, 2, 2, 3, dtype=torch.float64)
    truth[..., 0], truth[..., 1], truth[..., 2] = 1.0, 2.0, 4.0
    prediction = truth.clone()
    prediction[..., 0] += 0.1
    prediction[..., 1] += 0.4
    prediction[..., 2] += 0.4
    torch.testing.assert_close(relative_l2(prediction, truth), torch.tensor([[0.1, 0.2, 0.1]], dtype=torch.float64))
    assert Loss(((0,), (1, 2)))(prediction, truth).item() == pytest.approx(0.1 + 0.15)


@pytest.mark.parametrize("exponent", [-115, -60, 0, 40, 63, 110])
def test_relative_l2_is_bitwise_independent_of_the_scale(exponent):
    """Scaling the data by 2^k leaves the loss unchanged and divides its gradient by 2^k, in float32, far beyond where
    squares overflow; for ordinary numbers both are those of the plain ratio."""
    truth, prediction = torch.randn(2, 3, 5, 6, 2), torch.randn(2, 3, 5, 6, 2, requires_grad=True)
    axes = (1, 2, 3)
    plain = torch.linalg.vector_norm(prediction - truth, dim=axes) / torch.linalg.vector_norm(truth, dim=axes)
    (slope,) = torch.autograd.grad(plain.sum(), prediction)
    factor = 2.0**exponent
    large = (factor * prediction).detach().requires_grad_()
    scaled = relative_l2(large, factor * truth)
    assert torch.equal(scaled, plain)
    (scaled_slope,) = torch.autograd.grad(scaled.sum(), large)
    assert torch.equal(scaled_slope * factor, slope)


def test_relative_l2_at_float32_extremes_and_zero_truth():
    for size in (3e38, 1e-44):
        truth = torch.full((1, 1, 4, 1), size)
        assert relative_l2(truth / 2, truth).item() == pytest.approx(0.5, rel=0.2 if size < 1 else 1e-6)
    zero, one = torch.zeros(1, 1, 4, 1), torch.ones(1, 1, 4, 1)
    assert relative_l2(one, zero).isinf().all() and relative_l2(zero, zero).isnan().all()
    for bad in (torch.inf, torch.nan):
        assert not relative_l2(bad * one, one).isfinite().any() and not relative_l2(one, bad * one).isfinite().any()


def test_direct_loss_is_the_mean_of_ratios():
    truth = torch.ones(2, 1, 4, 1, dtype=torch.float64)
    truth[1] = 100.0
    prediction = truth + 1
    history = torch.zeros(2, 1, 4, 1, dtype=torch.float64)
    assert direct(lambda _: prediction, history, truth, Loss()).item() == pytest.approx((1 + 0.01) / 2)


def test_field_groups_join_velocity_components():
    assert field_groups(("density", "velocity_x", "velocity_y")) == {"density": (0,), "velocity": (1, 2)}
    assert field_groups(("vorticity",)) == {"vorticity": (0,)}


def test_derivative_term_by_hand():
    """For u = sin(pi x) sin(pi y), zero on the boundary, scaling has the same relative error in all slopes."""
    x = torch.linspace(0, math.pi, 9, dtype=torch.float64)
    truth = (torch.sin(x)[:, None] * torch.sin(x))[None, None, ..., None]
    assert Loss(derivative=0.1)(1.05 * truth, truth).item() == pytest.approx(0.05 * (1 + 2 * 0.1))


def test_derivative_term_uses_central_differences():
    """Against a loop over points, with a prediction that is no multiple of the truth, so that the stencil matters."""
    truth, prediction = (torch.randn(2, 1, 5, 6, 1, dtype=torch.float64) for _ in range(2))
    expected = []
    for p, t in zip(prediction[:, 0, ..., 0], truth[:, 0, ..., 0], strict=True):
        loss = (p - t).norm() / t.norm()
        inner = [[float(p[i, j]) if 0 < i < 4 and 0 < j < 5 else 0.0 for j in range(6)] for i in range(5)]

        def at(field, i, j):
            return float(field[i][j]) if 0 <= i < 5 and 0 <= j < 6 else 0.0

        for di, dj in ((1, 0), (0, 1)):
            numerator = denominator = 0.0
            for i in range(5):
                for j in range(6):
                    slope_p, slope_t = (at(f, i + di, j + dj) - at(f, i - di, j - dj) for f in (inner, t))
                    numerator, denominator = numerator + (slope_p - slope_t) ** 2, denominator + slope_t**2
            loss = loss + 0.3 * math.sqrt(numerator / denominator)
        expected.append(loss)
    torch.testing.assert_close(Loss(derivative=0.3)(prediction, truth), torch.stack(expected), rtol=1e-12, atol=0)


def test_derivative_term_ignores_boundary_points_of_the_prediction():
    truth = torch.rand(1, 1, 7, 7, 1, dtype=torch.float64)
    changed = truth.clone()
    changed[:, :, 0] += 5.0
    slopes = [Loss(derivative=1.0)(p, truth) - Loss()(p, truth) for p in (truth, changed)]
    torch.testing.assert_close(slopes[0], slopes[1], rtol=1e-13, atol=0)
    assert slopes[0] > 0, "a prediction with a zero boundary differs from a truth without one"


def test_objectives_reject_wrong_numbers_of_frames():
    model, (history, future) = Small(2), batch()
    with pytest.raises(ValueError, match="predicts 2 per call"):
        teacher_forced(model, history, future, LOSS)
    with pytest.raises(ValueError, match="3 calls of 2 frames need more than the 4"):
        pushforward(model, history, future, LOSS, 3)
