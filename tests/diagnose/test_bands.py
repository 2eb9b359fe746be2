"""Two orthogonal projections whose sum is the identity, on grids of one to three axes, odd and even."""

import math

import pytest
import torch

from sigmasolver.diagnose.bands import Bands

GRIDS = [((8,), (3,)), ((9,), (4,)), ((8, 6), (2, 3)), ((7, 9), (3, 2)), ((4, 5, 6), (2, 2, 2))]


def frames(grid, seed=0):
    return torch.randn(2, 3, *grid, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("grid, modes", GRIDS)
def test_bands_are_complementary_orthogonal_projections(grid, modes):
    bands, x, y = Bands(modes), frames(grid), frames(grid, 1)
    exact = {"rtol": 0, "atol": 1e-14}
    torch.testing.assert_close(bands.low(x) + bands.high(x), x, **exact)
    for Q, other in ((bands.low, bands.high), (bands.high, bands.low)):
        torch.testing.assert_close(Q(Q(x)), Q(x), **exact)
        torch.testing.assert_close(other(Q(x)), torch.zeros_like(x), **exact)
        assert (Q(x) * y).sum() == pytest.approx(float((x * Q(y)).sum()), rel=1e-11)  # self-adjoint
        assert Q(x).norm() > 0.1
    assert x.norm() ** 2 == pytest.approx(float(bands.low(x).norm() ** 2 + bands.high(x).norm() ** 2), rel=1e-13)


@pytest.mark.parametrize("grid, modes", GRIDS)
def test_low_band_rank_is_the_number_of_low_wavenumbers(grid, modes):
    """The trace of Q_low: on every axis 2K - 1 of the n coefficients have |k| < K."""
    points = math.prod(grid)
    units = torch.eye(points, dtype=torch.float64).reshape(points, 1, *grid, 1)
    trace = torch.trace(Bands(modes).low(units).reshape(points, points))
    assert trace == pytest.approx(math.prod(2 * K - 1 for K in modes), rel=1e-12)


def test_single_waves_fall_into_their_band():
    n, bands = 16, Bands((4, 4))
    angle = 2 * math.pi * torch.arange(n, dtype=torch.float64) / n
    for kx, ky in ((0, 0), (3, 3), (0, 3), (4, 0), (2, 5), (8, 0)):
        wave = torch.cos(kx * angle[:, None] + ky * angle[None, :] + 0.3)[None, None, ..., None]
        expected = wave if max(kx, ky) < 4 else torch.zeros_like(wave)
        torch.testing.assert_close(bands.low(wave), expected, rtol=0, atol=1e-14)


def test_high_band_is_zero_if_all_wavenumbers_are_low():
    x = frames((8, 8))
    torch.testing.assert_close(Bands((5, 5)).high(x), torch.zeros_like(x), rtol=0, atol=1e-14)


def test_bands_reject_invalid_modes():
    with pytest.raises(ValueError, match=r"entries of at least 1, got \(0, 2\)"):
        Bands((0, 2))
    with pytest.raises(ValueError, match="modes must have one entry per axis, got 1 for 2 axes"):
        Bands((3,)).low(frames((8, 8)))
