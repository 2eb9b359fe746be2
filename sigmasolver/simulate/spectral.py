"""Fourier tools for real fields on a square torus of side L with N points per side.

A field is stored as the half spectrum that `torch.fft.rfft2` returns, `(N, N//2 + 1)`: the first axis is the
signed wavenumber kx, the last the non-negative ky.
"""

from __future__ import annotations

import math

import torch

__all__ = ["DEALIAS", "dealias_mask", "resample", "wavenumbers"]

DEALIAS = ("square", "circle")


def wavenumbers(grid: int, box: float, device: torch.device | str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """kx `(N, 1)` and ky `(1, N//2 + 1)` in radians per unit length, float64."""
    unit = 2 * math.pi / box
    kx = torch.fft.fftfreq(grid, 1 / grid, dtype=torch.float64, device=device)
    ky = torch.fft.rfftfreq(grid, 1 / grid, dtype=torch.float64, device=device)
    return unit * kx[:, None], unit * ky[None, :]


def dealias_mask(grid: int, shape: str, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return the mask of the modes that the 2/3 rule keeps, `(N, N//2 + 1)` bool.

    "square" keeps |kx|, |ky| < N/3, "circle" keeps |k| < N/3. The inequality is strict so that a product of
    two truncated fields is free of aliases for every N: for multiples of 3 the mode N/3 would meet its own alias.
    """
    kx, ky = wavenumbers(grid, 2 * math.pi, device)
    if shape == "square":
        return (3 * kx.abs() < grid) & (3 * ky < grid)
    if shape == "circle":
        return 9 * (kx**2 + ky**2) < grid**2
    raise ValueError(f'dealias must be "square" or "circle", not "{shape}"')


def resample(field: torch.Tensor, grid: int) -> torch.Tensor:
    """Evaluate the trigonometric interpolant of `(..., n, n)` at `(..., grid, grid)` points; modes that the coarser of
    the two grids does not resolve, including the Nyquist mode of an even one, are dropped."""
    points = field.shape[-1]
    if points == grid:
        return field
    spectrum, highest = torch.fft.rfft2(field, norm="forward"), (min(points, grid) - 1) // 2
    resampled = spectrum.new_zeros((*field.shape[:-2], grid, grid // 2 + 1))
    resampled[..., : highest + 1, : highest + 1] = spectrum[..., : highest + 1, : highest + 1]
    resampled[..., grid - highest :, : highest + 1] = spectrum[..., points - highest :, : highest + 1]
    return torch.fft.irfft2(resampled, s=(grid, grid), norm="forward")
