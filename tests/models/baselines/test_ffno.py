"""F-FNO: its block against the FFT, what the factorised filter implies, and how the weights start; the authors' own
form against a slow definition."""

import numpy as np
import pytest
import torch

from sigmasolver.models import SolverConfig, build_model
from sigmasolver.models.baselines.ffno import FactorisedBlock, NormalisedLinear, ffno_markov
from sigmasolver.ops.fourier import axis_fourier_rfft
from tests.models.baselines import reference

GRIDS = [(16,), (10, 9), (8, 7, 6)]


def field(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def shaken(grid, modes=3):
    block = FactorisedBlock(SolverConfig(grid, 1, 1, width=8, heads=2, modes=modes)).double()
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return block


def slow(block, H):
    """The definition through torch.fft: all complex modes of every axis, those beyond the cut multiplied by nothing."""
    total = torch.zeros_like(H)
    for axis, weight in enumerate(block.spectral.weights, start=1):
        spectrum = torch.fft.fft(H, dim=axis).movedim(axis, 0)
        filtered, W = torch.zeros_like(spectrum), torch.view_as_complex(weight)
        for k in range(min(len(W), len(spectrum) // 2 + 1)):
            filtered[k] = spectrum[k] @ W[k]
            filtered[-k] = filtered[k].conj() if 2 * k % len(spectrum) else filtered[k]
        total = total + torch.fft.ifft(filtered.movedim(0, axis), dim=axis).real
    first, _, last = block.feed_forward
    out = torch.relu(total @ first.weight.T + first.bias) @ last.weight.T + last.bias
    centred = out - out.mean(-1, keepdim=True)
    scaled = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    return H + scaled * block.norm.weight + block.norm.bias


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("modes", [1, 3, 4])
def test_block_and_gradients_equal_the_definition(grid, modes):
    block, H = shaken(grid, modes), field(2, *grid, 8).requires_grad_()
    fast, plain = block(H), slow(block, H)
    torch.testing.assert_close(fast, plain, rtol=0, atol=1e-12)
    direction, learned = field(*fast.shape), [H, *block.parameters()]
    for got, expected in zip(
        torch.autograd.grad(fast, learned, direction), torch.autograd.grad(plain, learned, direction), strict=True
    ):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


def test_a_block_takes_both_forms_of_the_operator():
    block, H = shaken((10, 9)), field(2, 10, 9, 8)
    thin = block(H)
    block.spectral.operator = axis_fourier_rfft
    torch.testing.assert_close(block(H), thin, rtol=0, atol=1e-12)


@pytest.mark.parametrize("grid", GRIDS)
def test_a_block_commutes_with_shifts_along_every_axis(grid):
    block, H = shaken(grid), field(1, *grid, 8)
    for axis in range(1, len(grid) + 1):
        torch.testing.assert_close(block(H.roll(2, axis)), block(H).roll(2, axis), rtol=0, atol=1e-12)


def test_the_correction_is_blind_beyond_the_cut_and_normalised():
    """A wave with at least `modes` periods on every axis changes nothing; mean zero, variance one over the channels."""
    block, H = FactorisedBlock(SolverConfig((16, 16), 1, 1, width=8, heads=2, modes=3)).double(), field(1, 16, 16, 8)
    with torch.no_grad():
        for parameter in (*block.spectral.parameters(), *block.feed_forward.parameters()):
            parameter.mul_(50)  # far above the 1e-5 inside the norm
    points = torch.arange(16, dtype=torch.float64) * 2 * torch.pi / 16

    def wave(periods):
        return (torch.cos(periods * points)[:, None] * torch.sin(periods * points))[..., None] * torch.ones(8).double()

    correction = block(H) - H
    assert (block(H + wave(3)) - H - wave(3) - correction).abs().max() < 1e-12
    assert (block(H + wave(2)) - H - wave(2) - correction).abs().max() > 1e-3
    assert correction.mean(-1).abs().max() < 1e-12
    torch.testing.assert_close(correction.var(-1, correction=0), torch.ones(1, 16, 16).double(), rtol=0, atol=1e-3)


def test_blocks_have_weights_of_their_own_and_start_as_the_family_does():
    torch.manual_seed(3)
    model = build_model("ffno", grid=(16, 16), in_channels=1, out_channels=1, width=128, depth=2, modes=4)
    first, second = model.blocks
    assert len(first.spectral.weights) == 2 and first.spectral.weights[0].shape == (4, 128, 128, 2)
    assert not torch.equal(first.spectral.weights[0], second.spectral.weights[0])
    for weight in (*first.spectral.weights, first.feed_forward[0].weight, first.feed_forward[2].weight):
        assert weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert first.feed_forward[0].bias.abs().max() == 0 and (first.norm.weight == 1).all()


# --- the authors' own form


def written_normalised(x, w):
    """Row by row: a direction of length one, times the learned length."""
    rows = [g * v / np.sqrt((v**2).sum()) for g, v in zip(w["length"], w["direction"], strict=True)]
    return x @ np.array(rows).T + w["bias"]


def slow_markov(model, x):
    """One sample (*grid, C_in), through NumPy's FFT along one axis after another."""
    w, grid = reference.Weights(model.state_dict()), x.shape[:-1]
    points = np.stack(np.meshgrid(*(np.linspace(0, 1, n) for n in grid), indexing="ij"), -1)
    H = written_normalised(np.concatenate((points, x), -1), w / "lift")
    for index in range(model.config.depth):
        total = 0
        for axis, n in enumerate(grid):
            W = w[f"spectral.weights.{axis}"] @ np.array([1, 1j])
            lines = np.moveaxis(np.fft.rfft(H, axis=axis, norm="ortho"), axis, 0)
            filtered = np.zeros_like(lines)
            for k in range(min(len(W), len(lines))):
                filtered[k] = lines[k] @ W[k]
            total = total + np.fft.irfft(np.moveaxis(filtered, 0, axis), n=n, axis=axis, norm="ortho")
        inner = np.maximum(written_normalised(total, w / f"blocks.{index}.0"), 0)
        change = written_normalised(inner, w / f"blocks.{index}.2")
        H = H + change
    return written_normalised(written_normalised(change, w / "head.0"), w / "head.1")


@pytest.mark.parametrize("grid", [(9,), (4, 5), (8, 7), (5, 4, 6)])
def test_markov_is_its_slow_definition(small_model, grid):
    model, x = small_model("ffno-markov", (8,) * len(grid), depth=3), field(1, *grid, 2)
    with torch.no_grad():
        np.testing.assert_allclose(model(x)[0].numpy(), slow_markov(model, x[0].numpy()), rtol=0, atol=1e-11)


@pytest.mark.parametrize("grid", GRIDS)
def test_markov_without_positions_commutes_with_shifts(small_model, grid):
    model, x, rolled = small_model("ffno-markov", grid), field(1, *grid, 2), tuple(range(1, len(grid) + 1))
    steps = (5, 2, 3)[: len(grid)]
    assert (model(x.roll(steps, rolled)) - model(x).roll(steps, rolled)).abs().max() > 1e-4
    with torch.no_grad():
        model.lift.direction[:, : len(grid)].zero_()
    torch.testing.assert_close(model(x.roll(steps, rolled)), model(x).roll(steps, rolled), rtol=0, atol=1e-12)


def test_markov_reads_the_last_change_and_shares_one_filter(small_model):
    model, x, seen, calls = small_model("ffno-markov"), field(1, 12, 9, 2), [], []
    model.blocks[-1].register_forward_hook(lambda _, __, out: seen.append(out))
    model.spectral.register_forward_hook(lambda *_: calls.append(True))
    out = model(x)
    assert torch.equal(out, model.head(seen[0])) and len(calls) == 2
    stored = [key for key in model.state_dict() if "spectral" in key]
    assert stored == ["spectral.weights.0", "spectral.weights.1"]


def test_a_normalised_map_is_torchs_own_and_blind_to_the_length_of_its_direction():
    mine, x = NormalisedLinear(5, 4).double(), field(3, 5)
    theirs = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(5, 4).double())
    with torch.no_grad():
        mine.length.add_(torch.rand(4, 1))
        theirs.parametrizations.weight.original0.copy_(mine.length)
        theirs.parametrizations.weight.original1.copy_(mine.direction)
        theirs.bias.copy_(mine.bias)
        before = mine(x)
        torch.testing.assert_close(before, theirs(x), rtol=0, atol=1e-14)
        mine.direction.mul_(torch.rand(4, 1) + 0.5)
        torch.testing.assert_close(mine(x), before, rtol=0, atol=1e-14)


def test_markov_starts_as_published():
    torch.manual_seed(3)
    model = build_model("ffno-markov", grid=(32, 32), in_channels=1, out_channels=1, width=64, depth=1, modes=16)
    authors = torch.nn.init.xavier_normal_(torch.empty(64, 64, 16, 2), gain=0.1)
    for weight in model.spectral.weights:
        assert weight.std().item() == pytest.approx(authors.std().item(), rel=0.02)
    first = model.blocks[0][0]
    torch.testing.assert_close(first.length, first.direction.norm(dim=1, keepdim=True))
    assert 0.99 / 8 < first.direction.abs().max() <= 1 / 8 and first.bias.abs().max() > 0


def test_markov_filters_in_float32_under_autocast(small_model):
    model, x, seen = small_model("ffno-markov").float(), field(1, 12, 9, 2).float(), []
    model.spectral.register_forward_hook(lambda _, args, out: seen.append((args[0].dtype, out.dtype)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(x)
    assert seen == [(torch.float32, torch.float32)] * 2


def test_markov_refuses_a_grid_without_the_modes():
    with pytest.raises(ValueError, match=r"Grid \(16, 8\) is too small for modes=6"):
        ffno_markov(SolverConfig((16, 8), 1, 1, width=8, heads=2, modes=6))
