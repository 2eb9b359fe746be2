"""Replay: bit-identical in float32, close in lower precision, and on a GPU no stale or overwritten outputs."""

import warnings

import pytest
import torch
from torch import nn

from sigmasolver.data.normalise import Normaliser
from sigmasolver.forecast import Forecaster, rollout
from sigmasolver.forecast.replay import MAX_GRAPHS, Replay
from sigmasolver.models import Options, build_model
from sigmasolver.ops.precision import matmul_precision

FIELDS = ("velocity_x", "velocity_y")


def build_forecaster(conditions=(), device="cpu", mean=(0.3, -0.2), options=None, block=2):
    """A forecaster with two input frames of two fields and perturbed parameters (gamma starts at zero)."""
    model = build_model(
        "transolver-sigma",
        grid=(12, 10),
        in_channels=4 + len(conditions),
        out_channels=2 * block,
        width=16,
        depth=2,
        heads=2,
        slices=5,
        modes=3,
        options=options,
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    statistics = torch.tensor(mean).double(), torch.tensor([1.5, 0.5]).double()
    fields = Normaliser("channel", FIELDS, *statistics)
    return Forecaster(model, fields, fields, block, "lower-walls", conditions, history=2).to(device).eval()


def history(batch=3, grid=(12, 10), device="cpu"):
    return torch.randn(batch, 2, *grid, 2, device=device)


def distance(actual, expected):
    return float((actual - expected).norm() / expected.norm())


def call_eagerly(forecaster, *given):
    with torch.no_grad(), matmul_precision("float32"):
        return forecaster(*given)


# --- on a CPU


def test_replay_float32_is_bit_identical_to_the_forecaster():
    forecaster = build_forecaster()
    replay = Replay(forecaster)
    for batch, grid in ((3, (12, 10)), (1, (12, 10)), (3, (9, 16)), (3, (12, 10))):
        frames = history(batch, grid)
        assert torch.equal(replay(frames), call_eagerly(forecaster, frames))
    replayed, expected = replay.rollout(frames, 7), forecaster.rollout(frames, 7)
    assert torch.equal(replayed.frames, expected.frames) and replayed.stopped is expected.stopped is None


def test_replay_bf16_is_close_and_keeps_the_dtype():
    forecaster, frames = build_forecaster(), history()
    result = Replay(forecaster, "bf16")(frames)
    assert result.dtype == torch.float32
    assert 1e-5 < distance(result, call_eagerly(forecaster, frames)) < 0.02
    free = [rollout(replay, frames, 4).frames for replay in (Replay(forecaster, "bf16"), Replay(forecaster))]
    assert distance(*free) < 0.02


def test_replay_bf16_keeps_fields_with_a_large_mean():
    """The bf16 spacing at 1000 is 4; only the input and output of the network may be rounded."""
    forecaster = build_forecaster(mean=(1000.0, -1000.0))
    frames = history() + torch.tensor([1000.0, -1000.0])
    result, true = Replay(forecaster, "bf16")(frames), call_eagerly(forecaster, frames)
    inside = (slice(None), slice(None), slice(1, None), slice(1, None))
    mean = torch.tensor([1000.0, -1000.0])
    assert distance(result[inside] - mean, true[inside] - mean) < 0.02


def test_replay_passes_and_validates_conditions():
    forecaster = build_forecaster(("reynolds", "step"))
    replay, frames = Replay(forecaster), history()
    for scale in (1.0, 2.0):
        given = {"step": scale * torch.rand(3), "reynolds": torch.rand(3)}
        assert torch.equal(replay(frames, given), call_eagerly(forecaster, frames, given))
        assert torch.equal(rollout(replay, frames, 3, conditions=given).frames[:, :2], replay(frames, given))
    with pytest.raises(ValueError, match="Expected the conditions reynolds, step"):
        replay(frames, {"reynolds": torch.ones(3)})


def test_replay_rejects_gradients():
    replay, frames = Replay(build_forecaster()), history()
    assert not replay(frames).requires_grad
    with pytest.raises(ValueError, match="Replay does not support gradients; call the underlying"):
        replay(frames.requires_grad_())
    with torch.no_grad():
        assert not replay(frames).requires_grad


def test_replay_in_inference_mode_keeps_weights_trainable():
    forecaster, frames = build_forecaster(), history()
    with torch.inference_mode():
        first = Replay(forecaster)(frames)
    assert torch.equal(first, call_eagerly(forecaster, frames))
    forecaster(frames).sum().backward()
    assert all(p.grad is not None for p in forecaster.model.parameters())


def test_replay_calls_forward_hooks():
    replay, frames, seen = Replay(build_forecaster()), history(), []
    assert replay.eager(frames) == "CUDA graphs require a GPU"
    replay.model.blocks[0].register_forward_hook(lambda module, inputs, output: seen.append(output))
    rollout(replay, frames, 6)
    assert len(seen) == 3 and not torch.equal(seen[0], seen[1])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: Replay(build_forecaster(), "float16"),
            'Unknown precision "float16"; choose from float32, tf32, bf16.',
        ),
        (
            lambda: Replay(build_forecaster(), "tf32")(history()),
            "TF32 requires a GPU; choose float32 or bf16 on a CPU.",
        ),
    ],
)
def test_replay_rejects_invalid_precisions(call, message):
    with pytest.raises(ValueError) as caught:
        call()
    assert str(caught.value) == message


# --- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 1e-6), ("tf32", 5e-3), ("bf16", 0.02)])
def test_replay_graph_matches_the_forecaster(precision, tolerance):
    forecaster = build_forecaster(device="cuda")
    replay = Replay(forecaster, precision)
    for batch, grid in ((3, (12, 10)), (3, (12, 10)), (1, (12, 10)), (3, (9, 16)), (3, (12, 10)), (1, (12, 10))):
        frames = history(batch, grid, "cuda")
        assert distance(replay(frames), call_eagerly(forecaster, frames)) < tolerance
    assert len(replay._graphs) == 3 and replay.eager(frames) is None
    with matmul_precision("float32"):
        assert distance(rollout(replay, frames, 5).frames, forecaster.rollout(frames, 5).frames) < 5 * tolerance


@pytest.mark.gpu
def test_replay_does_not_overwrite_returned_blocks():
    forecaster = build_forecaster(device="cuda")
    replay = Replay(forecaster)
    histories = [history(device="cuda") for _ in range(4)]
    blocks = [replay(frames) for frames in histories]
    for frames, block in zip(histories, blocks, strict=True):
        assert distance(block, call_eagerly(forecaster, frames)) < 1e-6


@pytest.mark.gpu
def test_replay_uses_updated_weights():
    forecaster, other, frames = build_forecaster(device="cuda"), build_forecaster(device="cuda"), history(device="cuda")
    replay = Replay(forecaster)
    before = replay(frames)
    forecaster.model.load_state_dict(other.model.state_dict())  # updated in place
    expected = call_eagerly(other, frames)
    assert distance(before, expected) > 1e-3 and distance(replay(frames), expected) < 1e-6
    assert len(replay._graphs) == 1
    third = build_forecaster(device="cuda")
    forecaster.model.load_state_dict(third.model.state_dict(), assign=True)  # new storage
    assert distance(replay(frames), call_eagerly(third, frames)) < 1e-6 and len(replay._graphs) == 2
    for model in (forecaster, third):
        model.model.double()
    assert distance(replay(frames.double()), call_eagerly(third, frames.double())) < 1e-12


@pytest.mark.gpu
def test_replay_graph_uses_the_conditions_of_the_call():
    forecaster, frames = build_forecaster(("reynolds",), "cuda"), history(device="cuda")
    replay = Replay(forecaster)
    for device, dtype in (("cuda", torch.float32), ("cpu", torch.float32), ("cpu", torch.float64)):
        given = {"reynolds": torch.rand(3, dtype=dtype, device=device)}
        assert distance(replay(frames, given), call_eagerly(forecaster, frames, given)) < 1e-6
    assert len(replay._graphs) == 1
    for wrong, message in (({}, "Expected the conditions"), ({"reynolds": torch.ones(2)}, "one number for each of 3")):
        with pytest.raises(ValueError, match=message):
            replay(frames, wrong)


@pytest.mark.gpu
def test_replay_runs_eagerly_with_hooks_or_check_input():
    forecaster, frames, seen = build_forecaster(device="cuda"), history(device="cuda"), []
    replay = Replay(forecaster)
    replay(frames)
    hook = forecaster.model.blocks[0].register_forward_hook(lambda module, inputs, output: seen.append(output))
    rollout(replay, frames, 6)
    assert len(seen) == 3 and "hooks" in replay.eager(frames)
    hook.remove()
    replay(frames)
    assert len(seen) == 3 and replay.eager(frames) is None
    careful = Replay(build_forecaster(device="cuda", options=Options(check_input=True)))
    assert "check_input" in careful.eager(frames) and torch.isfinite(careful(frames)).all()
    with pytest.raises(ValueError, match="NaN or infinite"):
        careful(frames * torch.nan)


@pytest.mark.gpu
def test_replay_evicts_the_oldest_graph():
    forecaster = build_forecaster(device="cuda")
    replay = Replay(forecaster)
    for batch in (*range(1, MAX_GRAPHS + 3), 1, 2):
        frames = history(batch, device="cuda")
        assert distance(replay(frames), call_eagerly(forecaster, frames)) < 1e-6
    assert len(replay._graphs) == MAX_GRAPHS


@pytest.mark.gpu
def test_replay_captured_in_inference_mode_is_reusable():
    forecaster, frames = build_forecaster(device="cuda"), history(device="cuda")
    replay = Replay(forecaster)
    with torch.inference_mode():
        replay(frames + 0)
    assert distance(replay(frames), call_eagerly(forecaster, frames)) < 1e-6


@pytest.mark.gpu
def test_rollout_host_syncs_do_not_grow_with_the_horizon():
    class Blow(nn.Module):
        def forward(self, x):
            return (x[..., -2:] + 1).masked_fill(x[..., -2:] > 3, torch.nan)

    fields = Normaliser("none", FIELDS, torch.zeros(2).double(), torch.ones(2).double())
    forecaster = Forecaster(Blow(), fields, fields, 1)
    start = torch.arange(3.0, device="cuda").view(3, 1, 1, 1).expand(3, 2, 4, 2)
    rollout(forecaster, start, 1)  # moves the statistics to the GPU
    syncs = []
    for horizon in (2, 8):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                result = rollout(forecaster, start, horizon)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        syncs.append(sum("called a synchronizing" in str(warning.message) for warning in caught))
    assert syncs[0] == syncs[1] > 0
    assert result.stopped == 3
    assert torch.isfinite(result.frames).all((2, 3)).sum(1).flatten().tolist() == [4, 3, 2]
