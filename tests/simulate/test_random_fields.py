"""Gaussian random fields against sums over their spectra.

A field is a linear map of white noise, so unit impulses give its covariance exactly, without sampling error.
"""

import math

import pytest
import torch

from sigmasolver.simulate.random_fields import neumann_field, periodic_field, white_noise
from sigmasolver.simulate.simulator import generator


def noise(count: int, grid: int) -> torch.Tensor:
    return white_noise([generator("test", 0, index) for index in range(count)], grid)


def impulses(grid: int) -> torch.Tensor:
    return torch.eye(grid**2, dtype=torch.float64).reshape(-1, grid, grid)


def covariance(responses: torch.Tensor) -> torch.Tensor:
    flat = responses.flatten(1)
    return flat.T @ flat


def periodic_power(grid: int, box: float) -> torch.Tensor:
    """Variance of each mode at α = 2.5, τ = 7."""
    k = torch.fft.fftfreq(grid, 1 / grid, dtype=torch.float64) * 2 * math.pi / box
    power = 2 * 7.0**3 * (k[:, None] ** 2 + k**2 + 49) ** -2.5
    power[0, 0] = 0
    return power


@pytest.mark.parametrize(("box", "published"), [(1.0, 0.265), (2 * math.pi, 2.02)])
def test_periodic_field_has_the_published_standard_deviation(box: float, published: float) -> None:
    impulse = torch.zeros(1, 256, 256, dtype=torch.float64)
    impulse[0, 0, 0] = 1
    deviation = float(periodic_field(impulse, box, 2.5, 7.0).square().sum().sqrt())
    assert deviation == pytest.approx(math.sqrt(float(periodic_power(256, box).sum())), rel=1e-12)
    assert deviation == pytest.approx(published, rel=0.02)


@pytest.mark.parametrize("box", [1.0, 2 * math.pi])
def test_periodic_field_has_the_covariance_of_its_spectrum(box: float) -> None:
    s = 8
    x = torch.arange(s, dtype=torch.float64)
    lag = (x[:, None] - x) * 2 * math.pi / s
    k = torch.fft.fftfreq(s, 1 / s, dtype=torch.float64)
    wave = torch.polar(torch.ones(()).double(), k[:, None, None] * lag)
    expected = torch.einsum("ab,axz,byw->xyzw", periodic_power(s, box).to(wave.dtype), wave, wave).real
    measured = covariance(periodic_field(impulses(s), box, 2.5, 7.0))
    torch.testing.assert_close(measured, expected.reshape(s**2, s**2), rtol=0, atol=1e-13)


def test_periodic_field_has_the_distribution_of_the_published_generator() -> None:
    """Real part of the inverse transform of complex noise whose two parts have variance 1 each."""
    s = 8
    k = torch.fft.fftfreq(s, 1 / s, dtype=torch.float64)
    scale = s**2 * math.sqrt(2) * 7**1.5 * (4 * math.pi**2 * (k[:, None] ** 2 + k**2) + 49) ** -1.25
    scale[0, 0] = 0
    inputs = torch.cat((impulses(s) + 0j, 1j * impulses(s)))
    expected = covariance(torch.fft.ifft2(scale * inputs).real)
    actual = covariance(periodic_field(impulses(s), 1.0, 2.5, 7.0))
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-14)


def test_neumann_field_has_the_covariance_of_its_spectrum() -> None:
    s, smoothness, shift = 9, 2.0, 3.0
    x = (torch.arange(s, dtype=torch.float64) + 0.5) / s
    k = torch.arange(s, dtype=torch.float64)
    waves = torch.cos(math.pi * k[:, None] * x) * math.sqrt(2)
    waves[0] = 1
    power = shift ** (2 * smoothness - 2) * (math.pi**2 * (k[:, None] ** 2 + k**2) + shift**2) ** -smoothness
    power[0, 0] = 0
    expected = torch.einsum("ab,ax,by,az,bw->xyzw", power, waves, waves, waves, waves)
    measured = covariance(neumann_field(impulses(s), smoothness, shift))
    torch.testing.assert_close(measured, expected.reshape(s**2, s**2), rtol=0, atol=1e-13)


def test_random_fields_have_mean_zero() -> None:
    for field in (periodic_field(noise(3, 32), 1.0, 2.5, 7.0), neumann_field(noise(3, 32), 2.0, 3.0)):
        assert field.std() > 0.1
        assert field.mean((-2, -1)).abs().max() < 1e-14


def test_white_noise_is_standard_normal_and_independent() -> None:
    first, second = noise(2, 128)
    other = white_noise([generator("test", 1, 0)], 128)[0]
    for sample in (first, second, other):  # bounds of five standard deviations for 128² independent numbers
        assert abs(sample.mean()) < 5 / 128
        assert abs(sample.square().mean() - 1) < 5 * math.sqrt(2) / 128
        assert abs(sample.pow(4).mean() - 3) < 5 * math.sqrt(96) / 128
    for pair in ((first, second), (first, other)):
        assert abs((pair[0] * pair[1]).mean()) < 5 / 128


def test_random_fields_depend_only_on_their_own_generator() -> None:
    grid = 33
    together = periodic_field(noise(5, grid), 1.0, 2.5, 7.0), neumann_field(noise(5, grid), 2.0, 3.0)
    for index in (4, 0, 2):
        alone = white_noise([generator("test", 0, index)], grid)
        assert torch.equal(periodic_field(alone, 1.0, 2.5, 7.0)[0], together[0][index])
        assert torch.equal(neumann_field(alone, 2.0, 3.0)[0], together[1][index])
