"""F-FNO: its block against a reference with torch.fft, properties of the factorised filter, initialisation; the
authors' own form against a reference."""

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


def perturbed_block(grid, modes=3):
    block = FactorisedBlock(SolverConfig(grid, 1, 1, width=8, heads=2, modes=modes)).double()
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return block


def reference_block(block, H):
    """With torch.fft: all complex modes of every axis, zero beyond the cut."""
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
def test_factorised_block_and_gradients_equal_the_reference(grid, modes):
    block, H = perturbed_block(grid, modes), field(2, *grid, 8).requires_grad_()
    fast, slow = block(H), reference_block(block, H)
    torch.testing.assert_close(fast, slow, rtol=0, atol=1e-12)
    direction, inputs = field(*fast.shape), [H, *block.parameters()]
    for gradient, expected in zip(
        torch.autograd.grad(fast, inputs, direction), torch.autograd.grad(slow, inputs, direction), strict=True
    ):
        torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-10)


def test_factorised_block_dft_and_rfft_agree():
    block, H = perturbed_block((10, 9)), field(2, 10, 9, 8)
    dft = block(H)
    block.spectral.operator = axis_fourier_rfft
    torch.testing.assert_close(block(H), dft, rtol=0, atol=1e-12)


@pytest.mark.parametrize("grid", GRIDS)
def test_factorised_block_is_shift_equivariant(grid):
    block, H = perturbed_block(grid), field(1, *grid, 8)
    for axis in range(1, len(grid) + 1):
        torch.testing.assert_close(block(H.roll(2, axis)), block(H).roll(2, axis), rtol=0, atol=1e-12)


def test_factorised_block_ignores_modes_beyond_the_cut_and_normalises():
    """A wave with at least `modes` periods on every axis has no effect; zero mean, unit variance over the channels."""
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


def test_ffno_initialisation_and_separate_weights_per_block():
    torch.manual_seed(3)
    model = build_model("ffno", grid=(16, 16), in_channels=1, out_channels=1, width=128, depth=2, modes=4)
    first, second = model.blocks
    assert len(first.spectral.weights) == 2 and first.spectral.weights[0].shape == (4, 128, 128, 2)
    assert not torch.equal(first.spectral.weights[0], second.spectral.weights[0])
    for weight in (*first.spectral.weights, first.feed_forward[0].weight, first.feed_forward[2].weight):
        assert weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert first.feed_forward[0].bias.abs().max() == 0 and (first.norm.weight == 1).all()


# --- the authors' own form


def reference_normalised(x, w):
    """Row by row: a unit direction times the learned length."""
    rows = [g * v / np.sqrt((v**2).sum()) for g, v in zip(w["length"], w["direction"], strict=True)]
    return x @ np.array(rows).T + w["bias"]


def reference_markov(model, x):
    """One sample (*grid, C_in), with NumPy's FFT axis by axis."""
    w, grid = reference.Weights(model.state_dict()), x.shape[:-1]
    points = np.stack(np.meshgrid(*(np.linspace(0, 1, n) for n in grid), indexing="ij"), -1)
    H = reference_normalised(np.concatenate((points, x), -1), w / "lift")
    for index in range(model.config.depth):
        total = 0
        for axis, n in enumerate(grid):
            W = w[f"spectral.weights.{axis}"] @ np.array([1, 1j])
            lines = np.moveaxis(np.fft.rfft(H, axis=axis, norm="ortho"), axis, 0)
            filtered = np.zeros_like(lines)
            for k in range(min(len(W), len(lines))):
                filtered[k] = lines[k] @ W[k]
            total = total + np.fft.irfft(np.moveaxis(filtered, 0, axis), n=n, axis=axis, norm="ortho")
        inner = np.maximum(reference_normalised(total, w / f"blocks.{index}.0"), 0)
        change = reference_normalised(inner, w / f"blocks.{index}.2")
        H = H + change
    return reference_normalised(reference_normalised(change, w / "head.0"), w / "head.1")


@pytest.mark.parametrize("grid", [(9,), (4, 5), (8, 7), (5, 4, 6)])
def test_ffno_markov_equals_the_reference(small_model, grid):
    model, x = small_model("ffno-markov", (8,) * len(grid), depth=3), field(1, *grid, 2)
    with torch.no_grad():
        np.testing.assert_allclose(model(x)[0].numpy(), reference_markov(model, x[0].numpy()), rtol=0, atol=1e-11)


@pytest.mark.parametrize("grid", GRIDS)
def test_ffno_markov_without_positions_is_shift_equivariant(small_model, grid):
    model, x, axes = small_model("ffno-markov", grid), field(1, *grid, 2), tuple(range(1, len(grid) + 1))
    steps = (5, 2, 3)[: len(grid)]
    assert (model(x.roll(steps, axes)) - model(x).roll(steps, axes)).abs().max() > 1e-4
    with torch.no_grad():
        model.lift.direction[:, : len(grid)].zero_()
    torch.testing.assert_close(model(x.roll(steps, axes)), model(x).roll(steps, axes), rtol=0, atol=1e-12)


def test_ffno_markov_decodes_the_last_update_and_shares_one_filter(small_model):
    model, x, seen, calls = small_model("ffno-markov"), field(1, 12, 9, 2), [], []
    model.blocks[-1].register_forward_hook(lambda _, __, out: seen.append(out))
    model.spectral.register_forward_hook(lambda *_: calls.append(True))
    out = model(x)
    assert torch.equal(out, model.head(seen[0])) and len(calls) == 2
    stored = [key for key in model.state_dict() if "spectral" in key]
    assert stored == ["spectral.weights.0", "spectral.weights.1"]


def test_normalised_linear_equals_torch_weight_norm():
    layer, x = NormalisedLinear(5, 4).double(), field(3, 5)
    expected = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(5, 4).double())
    with torch.no_grad():
        layer.length.add_(torch.rand(4, 1))
        expected.parametrizations.weight.original0.copy_(layer.length)
        expected.parametrizations.weight.original1.copy_(layer.direction)
        expected.bias.copy_(layer.bias)
        before = layer(x)
        torch.testing.assert_close(before, expected(x), rtol=0, atol=1e-14)
        layer.direction.mul_(torch.rand(4, 1) + 0.5)
        torch.testing.assert_close(layer(x), before, rtol=0, atol=1e-14)


def test_ffno_markov_initialisation_is_as_published():
    torch.manual_seed(3)
    model = build_model("ffno-markov", grid=(32, 32), in_channels=1, out_channels=1, width=64, depth=1, modes=16)
    authors = torch.nn.init.xavier_normal_(torch.empty(64, 64, 16, 2), gain=0.1)
    for weight in model.spectral.weights:
        assert weight.std().item() == pytest.approx(authors.std().item(), rel=0.02)
    first = model.blocks[0][0]
    torch.testing.assert_close(first.length, first.direction.norm(dim=1, keepdim=True))
    assert 0.99 / 8 < first.direction.abs().max() <= 1 / 8 and first.bias.abs().max() > 0


def test_ffno_markov_filters_in_float32_under_autocast(small_model):
    model, x, seen = small_model("ffno-markov").float(), field(1, 12, 9, 2).float(), []
    model.spectral.register_forward_hook(lambda _, args, out: seen.append((args[0].dtype, out.dtype)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(x)
    assert seen == [(torch.float32, torch.float32)] * 2


def test_ffno_markov_rejects_a_grid_with_too_few_modes():
    with pytest.raises(ValueError, match=r"Grid \(16, 8\) is too small for modes=6"):
        ffno_markov(SolverConfig((16, 8), 1, 1, width=8, heads=2, modes=6))
