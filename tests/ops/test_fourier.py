"""The axis-factorised Fourier operator against the FFT, and the properties of a truncated Fourier filter."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sigmasolver.ops.fourier import (
    analysis_basis,
    available_modes,
    axis_fourier,
    axis_fourier_rfft,
    synthesis_basis,
)

CPU = torch.device("cpu")


def weights(modes, channels=3, out_channels=4, dtype=torch.float64):
    return [torch.randn(k, channels, out_channels, 2, dtype=dtype) for k in modes]


@settings(max_examples=40, deadline=None)
@given(
    grid=st.lists(st.integers(2, 11), min_size=1, max_size=3),
    modes=st.integers(1, 9),
    channels=st.integers(1, 4),
    out_channels=st.integers(1, 4),
    seed=st.integers(0, 1000),
)
def test_axis_fourier_equals_the_fft_for_odd_and_even_lengths(grid, modes, channels, out_channels, seed):
    torch.manual_seed(seed)
    V = torch.randn(2, *grid, channels, dtype=torch.float64, requires_grad=True)
    W = [w.requires_grad_() for w in weights([modes] * len(grid), channels, out_channels)]
    dft, fft = axis_fourier(V, W), axis_fourier_rfft(V, W)
    assert dft.shape == (2, *grid, out_channels)
    torch.testing.assert_close(dft, fft, rtol=0, atol=1e-12)
    v = torch.randn_like(dft)
    for a, b in zip(torch.autograd.grad(dft, [V, *W], v), torch.autograd.grad(fft, [V, *W], v), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("n", [2, 5, 8, 9])
def test_analysis_basis_is_the_orthonormal_rfft_and_synthesis_its_inverse(n):
    x = torch.randn(n, dtype=torch.float64)
    K = available_modes(n)
    spectrum = torch.view_as_real(torch.fft.rfft(x, norm="ortho")).reshape(-1)
    torch.testing.assert_close(analysis_basis(n, K, torch.float64, CPU) @ x, spectrum, rtol=0, atol=1e-14)
    torch.testing.assert_close(synthesis_basis(n, K, torch.float64, CPU) @ spectrum, x, rtol=0, atol=1e-14)


@pytest.mark.parametrize("n", [6, 7])
def test_axis_fourier_ignores_modes_beyond_the_spectrum(n):
    V = torch.randn(1, n, 2, dtype=torch.float64)
    (W,) = weights([10], 2, 2)
    torch.testing.assert_close(axis_fourier(V, [W]), axis_fourier(V, [W[: n // 2 + 1]]), rtol=0, atol=0)


def test_axis_fourier_is_linear():
    U, V = torch.randn(2, 2, 6, 7, 3, dtype=torch.float64)
    W = weights([3, 4])
    torch.testing.assert_close(
        axis_fourier(2.5 * U - V, W), 2.5 * axis_fourier(U, W) - axis_fourier(V, W), rtol=0, atol=1e-13
    )


@pytest.mark.parametrize("shift", [(1, 0), (0, 3), (2, 5)])
def test_axis_fourier_commutes_with_shifts(shift):
    V = torch.randn(2, 6, 7, 3, dtype=torch.float64)
    W = weights([3, 4])
    torch.testing.assert_close(
        axis_fourier(V.roll(shift, dims=(1, 2)), W),
        axis_fourier(V, W).roll(shift, dims=(1, 2)),
        rtol=0,
        atol=1e-13,
    )


@pytest.mark.parametrize("n", [12, 13])
def test_axis_fourier_ignores_modes_at_and_above_the_cutoff(n):
    K = 4
    x = torch.arange(n, dtype=torch.float64) * (2 * math.pi / n)
    for k in range(available_modes(n)):
        wave = torch.cos(k * x + 0.3)[None, :, None]
        response = axis_fourier(wave, [torch.ones(K, 1, 1, 2, dtype=torch.float64)]).abs().max()
        assert (response < 1e-13) == (k >= K), (k, response)


def test_axis_fourier_with_identity_weights_sums_low_passes_over_axes():
    V = torch.randn(1, 8, 9, 2, dtype=torch.float64)
    identity = [torch.stack((torch.eye(2), torch.zeros(2, 2)), -1).double().expand(k, 2, 2, 2) for k in (5, 5)]
    torch.testing.assert_close(axis_fourier(V, identity), 2 * V, rtol=0, atol=1e-13)


def test_axis_fourier_drops_imaginary_weights_on_constant_and_nyquist():
    """These modes of a real field have no imaginary part; FFT libraries disagree on how to treat one."""
    V = torch.randn(1, 8, 1, dtype=torch.float64)
    W = torch.zeros(5, 1, 1, 2, dtype=torch.float64)
    W[0, ..., 1] = W[4, ..., 1] = 1.0
    assert axis_fourier(V, [W]).abs().max() == 0


def test_axis_fourier_of_band_limited_input_agrees_across_grids():
    """Orthonormal factors cancel between analysis and synthesis: the operator acts on the function, not the grid."""

    def sample(n):
        x = torch.arange(n, dtype=torch.float64) * (2 * math.pi / n)
        X, Y = torch.meshgrid(x, x, indexing="ij")
        return torch.stack((torch.sin(2 * X + Y) + torch.cos(3 * Y), 1 + torch.cos(X - 2 * Y)), -1)[None]

    W = weights([4, 5], 2, 2)
    coarse, fine = axis_fourier(sample(12), W), axis_fourier(sample(36), W)
    torch.testing.assert_close(fine[:, ::3, ::3], coarse, rtol=0, atol=1e-13)


def test_axis_fourier_accuracy_in_float32_and_bfloat16():
    V, W = torch.randn(2, 16, 15, 8, dtype=torch.float64), weights([4, 4], 8, 8)
    exact = axis_fourier(V, W)
    for dtype, bound in ((torch.float32, 1e-6), (torch.bfloat16, 1e-2)):
        rounded = axis_fourier(V.to(dtype), [w.to(dtype) for w in W]).double()
        assert (rounded - exact).norm() / exact.norm() < bound


def test_axis_fourier_passes_gradcheck():
    V = torch.randn(1, 4, 5, 2, dtype=torch.float64, requires_grad=True)
    W = [w.requires_grad_() for w in weights([2, 3], 2, 2)]
    assert torch.autograd.gradcheck(lambda v, *w: axis_fourier(v, w), (V, *W))


def test_axis_fourier_rejects_an_empty_list_of_weights():
    with pytest.raises(ValueError, match="one weight per axis"):
        axis_fourier(torch.ones(1, 4, 1), [])
