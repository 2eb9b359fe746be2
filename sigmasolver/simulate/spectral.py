"""Fourier tools for real fields on a square torus of side L with N points a side.

A field is kept as the half-spectrum that `torch.fft.rfft2` returns, `(N, N//2 + 1)`: the first axis carries
the signed wavenumber kx, the last the non-negative ky.
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
    """Which modes the 2/3 rule keeps, `(N, N//2 + 1)` bool.

    "square" keeps |kx|, |ky| < N/3, "circle" keeps |k| < N/3. The inequality is strict so that a product of
    two kept fields is free of aliases on every N: on multiples of 3 the mode N/3 would meet its own alias.
    """
    kx, ky = wavenumbers(grid, 2 * math.pi, device)
    if shape == "square":
        return (3 * kx.abs() < grid) & (3 * ky < grid)
    if shape == "circle":
        return 9 * (kx**2 + ky**2) < grid**2
    raise ValueError(f'dealias must be "square" or "circle", not "{shape}"')


def resample(field: torch.Tensor, grid: int) -> torch.Tensor:
    """The trigonometric polynomial of `(..., n, n)` at `(..., grid, grid)` points; waves that the coarser of the two
    grids does not resolve, the shortest of an even one included, are left out."""
    points = field.shape[-1]
    if points == grid:
        return field
    spectrum, kept = torch.fft.rfft2(field, norm="forward"), (min(points, grid) - 1) // 2
    resampled = spectrum.new_zeros((*field.shape[:-2], grid, grid // 2 + 1))
    resampled[..., : kept + 1, : kept + 1] = spectrum[..., : kept + 1, : kept + 1]
    resampled[..., grid - kept :, : kept + 1] = spectrum[..., points - kept :, : kept + 1]
    return torch.fft.irfft2(resampled, s=(grid, grid), norm="forward")
