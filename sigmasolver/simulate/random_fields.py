"""Gaussian random fields: white noise coloured by a power of a shifted Laplacian, mean removed.

Neumann field on the unit square (samples at cell centres (i + 1/2)/s):
    covariance τ^(2α-2) (-Δ + τ²)^(-α), -Δ with zero normal derivative.
Periodic field on a square torus of side L (samples at i L/s):
    independent Fourier coefficients of variance 2 τ^(2α-2) (|k|² + τ²)^(-α), |k| in radians per unit length.

    α  smoothness     τ  shift     s  points per side

The factor 2 is the convention of the first public Navier-Stokes generator (real and imaginary noise of
variance 1 each, then the real part), which produced the benchmark file; its later port has half that variance.

Noise is drawn on the CPU in float64, one generator per sample; the transforms run in float64 on any device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch

from sigmasolver.simulate.simulator import Tick, map_samples, run_each
from sigmasolver.simulate.spectral import wavenumbers

__all__ = ["neumann_field", "periodic_field", "white_noise"]


def white_noise(generators: Sequence[torch.Generator], grid: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Standard normal noise `(len(generators), grid, grid)`, float64, each sample from its own generator."""
    noise = torch.empty(len(generators), grid, grid, dtype=torch.float64)

    def fill(index: int, tick: Tick) -> None:
        noise[index].normal_(generator=generators[index])

    run_each(len(generators), fill)
    return noise.to(device)


@lru_cache(maxsize=8)
def _cosine_basis(grid: int) -> torch.Tensor:
    """Orthonormal cosine basis of cell-centred samples, `(mode, point)`, float64."""
    mode = torch.arange(grid, dtype=torch.float64)[:, None]
    point = torch.arange(grid, dtype=torch.float64)[None, :] + 0.5
    basis = math.sqrt(2 / grid) * torch.cos(math.pi / grid * mode * point)
    basis[0] /= math.sqrt(2)
    return basis


def neumann_field(noise: torch.Tensor, smoothness: float, shift: float) -> torch.Tensor:
    """Neumann Gaussian field `(B, s, s)` at cell centres of the unit square from white noise `(B, s, s)`."""
    s = noise.shape[-1]
    k = math.pi * torch.arange(s, dtype=noise.dtype, device=noise.device)
    amplitude = s * shift ** (smoothness - 1) * (k[:, None] ** 2 + k**2 + shift**2) ** (-smoothness / 2)
    amplitude[0, 0] = 0
    basis = _cosine_basis(s).to(noise)
    return map_samples(lambda tile, tick: basis.T @ (amplitude * tile) @ basis, noise)


def periodic_field(noise: torch.Tensor, box: float, smoothness: float, shift: float) -> torch.Tensor:
    """Periodic Gaussian field `(B, s, s)` on a torus of side `box` from white noise `(B, s, s)`."""
    s = noise.shape[-1]
    kx, ky = wavenumbers(s, box, noise.device)
    # Filtering real noise needs half the random numbers of complex noise and gives the same distribution: the
    # orthonormal transform of real noise has E|c_k|² = 1, like the Hermitian part of noise of variance 1 + 1.
    amplitude = math.sqrt(2) * shift ** (smoothness - 1) * (kx**2 + ky**2 + shift**2) ** (-smoothness / 2)
    amplitude[0, 0] = 0

    def colour(tile: torch.Tensor, tick: Tick) -> torch.Tensor:
        return torch.fft.irfft2(amplitude * torch.fft.rfft2(tile, norm="ortho"), s=(s, s), norm="forward")

    return map_samples(colour, noise)
