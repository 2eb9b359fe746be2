"""Forecaster and rollout: units, folding, feedback, teacher forcing, conditions, walls, non-finite samples."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from sigmasolver.data.normalise import Normaliser, TimeScale
from sigmasolver.forecast import Forecaster, rollout

F64 = torch.float64


def normaliser(fields, mean=None, scale=None):
    mean = torch.zeros(len(fields), dtype=F64) if mean is None else torch.tensor(mean, dtype=F64)
    scale = torch.ones(len(fields), dtype=F64) if scale is None else torch.tensor(scale, dtype=F64)
    return Normaliser("channel", tuple(fields), mean, scale)


class Shift(nn.Module):
    """Exact advection by one point per frame: frame t+k is the last frame shifted by k."""

    def __init__(self, block, fields=1):
        super().__init__()
        self.block, self.fields = block, fields

    def forward(self, x):
        last = x[..., -self.fields :]
        return torch.cat([last.roll(k, dims=1) for k in range(1, self.block + 1)], dim=-1)


class Slope(nn.Module):
    """Linear extrapolation from the last two of three frames, plus a function of the first."""

    def forward(self, x):
        return 2 * x[..., 2:3] - x[..., 1:2] + 0.1 * torch.tanh(x[..., 0:1])


def wave(frames, n=16):
    x = torch.arange(n, dtype=F64) * (2 * math.pi / n)
    return torch.stack([torch.sin(x - t * 2 * math.pi / n) for t in range(frames)])[None, ..., None]


@pytest.mark.parametrize("block", [1, 2, 3, 5])
@pytest.mark.parametrize("horizon", [1, 4, 7])
def test_rollout_of_an_exact_model_is_exact(block, horizon):
    truth = wave(2 + horizon)
    fields = normaliser(["u"], [0.3], [2.0])
    result = rollout(Forecaster(Shift(block), fields, fields, block), truth[:, :2], horizon)
    torch.testing.assert_close(result.frames, truth[:, 2:], rtol=0, atol=1e-13)
    assert result.stopped is None and str(result) == f"all {horizon} frames are finite"


def test_forecaster_feeds_normalised_frames_in_order():
    seen = []

    class Watch(nn.Module):
        def forward(self, x):
            seen.append(x)
            return x[..., -2:]

    fields = normaliser(["u", "v"], [1.0, -2.0], [2.0, 4.0])
    history = torch.randn(1, 3, 4, 5, 2, dtype=F64)
    forecast = Forecaster(Watch(), fields, fields, 1)(history)
    expected = torch.cat([(history[:, t] - fields.mean) / fields.scale for t in range(3)], dim=-1)
    torch.testing.assert_close(seen[0], expected, rtol=0, atol=1e-15)
    torch.testing.assert_close(forecast[:, 0], history[:, -1], rtol=0, atol=1e-15)


def test_free_rollout_is_repeated_application_and_teacher_forcing_is_not():
    forecaster = Forecaster(Slope(), normaliser(["u"]), normaliser(["u"]), 1)
    frames = torch.randn(2, 3 + 4, 6, 1, dtype=F64)
    history, truth = frames[:, :3], frames[:, 3:]
    free, forced = rollout(forecaster, history, 4), rollout(forecaster, history, 4, truth)
    window = history
    for lead in range(4):
        step = forecaster(window)
        torch.testing.assert_close(free.frames[:, lead : lead + 1], step, rtol=0, atol=0)
        window = torch.cat((window, step), 1)[:, 1:]
        from_truth = forecaster(frames[:, lead : lead + 3])
        torch.testing.assert_close(forced.frames[:, lead : lead + 1], from_truth, rtol=0, atol=0)
    assert torch.equal(free.frames[:, 0], forced.frames[:, 0])
    assert (free.frames[:, 1:] - forced.frames[:, 1:]).abs().max() > 1e-2


def test_teacher_forcing_of_a_perfect_model_equals_free_rollout():
    truth = wave(2 + 6)
    forecaster = Forecaster(Shift(2), normaliser(["u"]), normaliser(["u"]), 2)
    free, forced = rollout(forecaster, truth[:, :2], 6), rollout(forecaster, truth[:, :2], 6, truth[:, 2:])
    torch.testing.assert_close(free.frames, forced.frames, rtol=0, atol=1e-14)


def test_lower_walls_hold_in_forecasts_and_fed_back_frames():
    fields = ("density", "velocity_x", "velocity_y", "velocity_z")
    scaling = normaliser(fields, [0.5, 0.1, -0.2, 0.3], [1.0, 2.0, 3.0, 4.0])
    seen = []

    class Watch(nn.Module):
        def forward(self, x):
            seen.append(x)
            return x + 1

    history = torch.randn(1, 1, 4, 5, 3, 4, dtype=F64)
    result = rollout(Forecaster(Watch(), scaling, scaling, 1, boundary="lower-walls"), history, 2).frames
    for axis in range(3):
        wall = result[..., axis + 1].select(axis + 2, 0)
        assert wall.abs().max() == 0
        fed = seen[1][..., axis + 1].select(axis + 1, 0)
        expected = -scaling.mean[axis + 1] / scaling.scale[axis + 1]
        torch.testing.assert_close(fed, expected.expand_as(fed), rtol=0, atol=1e-15)
        inside = result[..., axis + 1].narrow(axis + 2, 1, 1)
        assert inside.abs().min() > 0
    assert result[..., 0].abs().min() > 0, "density is unchanged"


def test_around_keeps_the_map_with_another_network():
    """Normalisers, boundary, conditions, time and embedded fields."""

    class Mean(nn.Module):
        def forward(self, x, scalars):
            return x[..., :4] + x[..., 4:5] + scalars.sum(-1).view(-1, 1, 1, 1, 1)

    fields = ("density", "velocity_x", "velocity_y", "velocity_z")
    scaling = normaliser(fields, [0.5, 0.1, -0.2, 0.3], [1.0, 2.0, 3.0, 4.0])
    first = Forecaster(Mean(), scaling, scaling, 1, "lower-walls", ("reynolds",), 1, TimeScale(1.0, 0.5), ("density",))
    second = first.around(Mean())
    history, given = torch.randn(2, 1, 4, 5, 3, 4, dtype=F64), {"reynolds": torch.tensor([1.0, 2.0], dtype=F64)}
    time = torch.tensor([1.0, 3.0], dtype=F64)
    assert torch.equal(first(history, given, time), second(history, given, time))
    assert second(history, given, time)[..., 1].select(2, 0).abs().max() == 0, "the wall"
    assert (second.history, second.block) == (first.history, first.block)


def test_forecaster_casts_bf16_output_before_decoding():
    """In bf16 300 + 0.25 is 300: the mean takes up all eight bits."""

    class LowPrecision(nn.Module):
        def forward(self, x):
            return torch.full_like(x[..., :1], 0.25, dtype=torch.bfloat16)

    fields = normaliser(["temperature"], [300.0], [1.0])
    frames = Forecaster(LowPrecision(), fields, fields, 1)(torch.full((1, 1, 4, 1), 300.0))
    assert frames.dtype == torch.float32 and (frames == 300.25).all()


def test_conditions_are_constant_channels_in_the_order_of_their_names():
    class Last(nn.Module):
        def forward(self, x):
            return x[..., -2:-1] - 10 * x[..., -1:]

    forecaster = Forecaster(Last(), normaliser(["u"]), normaliser(["u"]), 1, conditions=("reynolds", "step"))
    given = {"step": torch.tensor([1.0, 2.0]), "reynolds": torch.tensor([100.0, 200.0])}
    frames = rollout(forecaster, torch.zeros(2, 1, 4, 4, 1), 2, conditions=given).frames
    assert (frames[0] == 90).all() and (frames[1] == 180).all()
    for wrong in (None, {"reynolds": torch.ones(2)}, {**given, "drag": torch.ones(2)}):
        with pytest.raises(ValueError, match="Expected the conditions reynolds, step"):
            forecaster(torch.zeros(2, 1, 4, 4, 1), wrong)
    with pytest.raises(ValueError, match="one number for each of 2 samples"):
        forecaster(torch.zeros(2, 1, 4, 4, 1), {**given, "step": torch.ones(3)})


def test_rollout_stops_when_non_finite():
    class Explode(nn.Module):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return torch.cat((x, x * (torch.inf if self.calls == 2 else 1.0)), dim=-1)

    model = Explode()
    result = rollout(Forecaster(model, normaliser(["u"]), normaliser(["u"]), 2), torch.ones(2, 1, 5, 1), 9)
    assert result.stopped == 4 and model.calls == 2
    assert torch.isfinite(result.frames[:, :3]).all() and torch.isnan(result.frames[:, 4:]).all()
    assert "lead 4 of 9" in str(result)


def test_rollout_is_differentiable():
    model = nn.Linear(1, 1).double()
    forecaster = Forecaster(model, normaliser(["u"], [0.0], [3.0]), normaliser(["u"], [0.0], [3.0]), 1)
    rollout(forecaster, torch.ones(1, 1, 4, 1, dtype=F64), 3).frames.sum().backward()
    assert model.weight.grad is not None and model.weight.grad.abs() > 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda f, h: rollout(f, h, 0), "at least 1"),
        (lambda f, h: rollout(f, h, 4, torch.zeros(1, 3, 4, 1)), "3 true frames for a horizon of 4"),
        (lambda f, h: Forecaster(f.model, f.inputs, f.targets, 1, boundary="upper-walls"), "did you mean lower-walls"),
        (lambda f, h: Forecaster(nn.Identity(), f.inputs, f.targets, 2)(h), "not a multiple of 2 frames"),
    ],
)
def test_forecaster_rejects_invalid_arguments(call, message):
    forecaster = Forecaster(Shift(1), normaliser(["u"]), normaliser(["u"]), 1)
    with pytest.raises(ValueError, match=message):
        call(forecaster, torch.zeros(1, 1, 4, 1))


def test_rollout_rejects_feedback_of_other_fields():
    forecaster = Forecaster(Shift(1), normaliser(["a", "b"]), normaliser(["u"]), 1)
    history = torch.zeros(1, 1, 4, 2)
    assert rollout(forecaster, history, 1).frames.shape == (1, 1, 4, 1)
    with pytest.raises(ValueError, match="cannot be fed back"):
        rollout(forecaster, history, 2)


def test_rollout_method_takes_arrays_and_longer_histories():
    truth = wave(9)
    fields = normaliser(["u"])
    forecaster = Forecaster(Shift(1), fields, fields, 1, history=2)
    result = forecaster.rollout(truth[:, :5].float().numpy(), 4)
    torch.testing.assert_close(result.frames.double(), truth[:, 5:], rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match="at least 2 frames, got 1"):
        forecaster.rollout(truth[:, :1], 4)


def test_rollout_method_takes_arrays_of_any_memory_layout():
    history = wave(5).float().numpy()
    fields = normaliser(["u"])
    forecaster = Forecaster(Shift(1), fields, fields, 1, history=2)
    expected = forecaster.rollout(history, 3).frames
    reversed_twice = np.ascontiguousarray(history[:, :, ::-1])[:, :, ::-1]
    assert reversed_twice.strides[2] < 0
    for values in (history.astype(">f4"), history.astype(">f8"), reversed_twice, np.asfortranarray(history)):
        assert torch.equal(forecaster.rollout(values, 3).frames, expected)
        assert torch.equal(forecaster.rollout(values, 3, time=np.array(2.0, ">f8")).frames, expected)


def test_rollout_carries_given_fields():
    """The model advances the first field by the second, which stays fixed."""

    class Drift(nn.Module):
        def forward(self, x):
            return x[..., 2:3] + x[..., 3:4]

    forecaster = Forecaster(Drift(), normaliser(["u", "speed"]), normaliser(["u"]), 1)
    history = torch.zeros(1, 2, 4, 2, dtype=F64)
    history[..., 1] = 0.5
    free = rollout(forecaster, history, 4).frames
    torch.testing.assert_close(free[0, :, 0, 0], torch.tensor([0.5, 1.0, 1.5, 2.0], dtype=F64))
    forced = rollout(forecaster, history, 4, truth=torch.full((1, 4, 4, 1), 7.0, dtype=F64)).frames
    torch.testing.assert_close(forced[0, :, 0, 0], torch.tensor([0.5, 7.5, 7.5, 7.5], dtype=F64))


def test_rollout_isolates_non_finite_samples():
    class Explode(nn.Module):
        def forward(self, x):
            return torch.where(x > 3, torch.nan, x + 1)

    forecaster = Forecaster(Explode(), normaliser(["u"]), normaliser(["u"]), 1)
    history = torch.tensor([0.0, 2.0], dtype=F64).view(2, 1, 1, 1).expand(2, 1, 4, 1)
    result = rollout(forecaster, history, 4)
    torch.testing.assert_close(result.frames[0, :, 0, 0], torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=F64))
    assert torch.isfinite(result.frames[1, :2]).all() and result.frames[1, 2:].isnan().all()
    assert result.stopped == 3 and str(result).startswith("1 of 2 forecasts became non-finite, the first at lead 3")


class Clock(nn.Module):
    """Fields (value, clock): the clock advances by one per frame; the value is non-finite at one time only."""

    def __init__(self, block, bad, by):
        super().__init__()
        self.block, self.bad, self.by = block, bad, by

    def forward(self, x):
        times = [x[..., -1:] + step for step in range(1, self.block + 1)]
        return torch.cat([torch.cat((torch.where(t == self.bad, self.by, 10 * t), t), -1) for t in times], -1)


def rollout_by_definition(forecaster, history, horizon, truth):
    """The definition: each sample separately, block by block; NaN after a non-finite block."""
    forecasts, first = [], []
    for number in range(len(history)):
        given, frames, non_finite = history[number : number + 1], [], False
        for start in range(0, horizon, forecaster.block):
            block = forecaster(given)
            for lead in range(start, min(start + forecaster.block, horizon)):
                frame = block[:, lead - start]
                frames.append(torch.full_like(frame, torch.nan) if non_finite else frame)
                if not torch.isfinite(frames[-1]).all():
                    first.append(lead + 1)
            non_finite = non_finite or not torch.isfinite(torch.stack(frames)).all()
            fed = block if truth is None else truth[number : number + 1, start : start + forecaster.block]
            given = torch.cat((given, fed), 1)[:, -given.shape[1] :]
        forecasts.append(torch.stack(frames, 1))
    return torch.cat(forecasts), min(first, default=None)


@pytest.mark.parametrize("forced", [False, True])
@pytest.mark.parametrize("by", [torch.nan, -torch.inf])
@pytest.mark.parametrize("bad", [3, 6, 7, 10, 50])
@pytest.mark.parametrize("block", [1, 2, 3, 7])
def test_rollout_stopping_matches_the_plain_definition(block, bad, by, forced):
    fields = normaliser(["value", "clock"])
    forecaster = Forecaster(Clock(block, bad, by), fields, fields, block)
    clocks = torch.tensor([0.0, 2.0, 4.0, 20.0], dtype=F64)  # the last sample never reaches a bad time
    history = torch.stack((torch.ones_like(clocks), clocks), -1).view(4, 1, 1, 2).expand(4, 1, 3, 2)
    leads = torch.arange(1.0, 8.0, dtype=F64)
    times = (clocks[:, None] + leads).view(4, 7, 1, 1).expand(4, 7, 3, 1)
    truth = torch.cat((torch.zeros_like(times), times), -1) if forced else None
    for selection in (slice(None), slice(0, 2), slice(2, 3)):
        given, true = history[selection], None if truth is None else truth[selection]
        result, (frames, stopped) = (
            rollout(forecaster, given, 7, true),
            rollout_by_definition(forecaster, given, 7, true),
        )
        assert torch.equal(result.frames.nan_to_num(1e9, 2e9, -2e9), frames.nan_to_num(1e9, 2e9, -2e9))
        assert result.stopped == stopped
    bad_leads = [lead for lead in (bad - clocks).tolist() if 1 <= lead <= 7]
    assert rollout(forecaster, history, 7, truth).stopped == (min(bad_leads) if bad_leads else None)
