"""F-FNO: its block against the FFT, what the factorised filter implies, and how the weights start."""

import pytest
import torch

from sigmasolver.models import SolverConfig, build_model
from sigmasolver.models.baselines.ffno import FactorisedBlock
from sigmasolver.ops.fourier import axis_fourier_rfft

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


def test_both_forms_of_the_operator_serve_it():
    block, H = shaken((10, 9)), field(2, 10, 9, 8)
    thin = block(H)
    block.spectral.operator = axis_fourier_rfft
    torch.testing.assert_close(block(H), thin, rtol=0, atol=1e-12)


@pytest.mark.parametrize("grid", GRIDS)
def test_it_commutes_with_shifts_along_every_axis(grid):
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
