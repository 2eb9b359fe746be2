"""Bases of the discrete Fourier transform along one axis, as thin matrices.

Letters: n points on the axis, K kept modes.
"""

from __future__ import annotations

import math

import torch

from sigmasolver.ops.constants import grid_constant

__all__ = ["analysis_basis", "available_modes", "signed_basis", "synthesis_basis"]


def available_modes(points: int) -> int:
    """Length of the one-sided spectrum of a real signal with this many points."""
    return points // 2 + 1


def _modulo(values: torch.Tensor, points: int) -> torch.Tensor:
    """Remainder by a tensor rather than a number: ONNX supports it with a dynamic number of points too."""
    return values % torch.full((1, 1), points, device=values.device)


def _sqrt(points: int) -> float:
    # A traced program with a dynamic number of points supports powers, but not math.sqrt.
    return points**0.5 if torch.compiler.is_compiling() else math.sqrt(points)


def _angles(points: int, modes: int, device: torch.device) -> torch.Tensor:
    """2 pi k j / n as (K, n) in float64; k j is first reduced modulo n in integers, so large products stay exact."""
    k = torch.arange(modes, device=device)[:, None]
    j = torch.arange(points, device=device)[None, :]
    return _modulo(k * j, points).double() * (2 * math.pi / points)


def _sine(points: int, modes: int, device: torch.device) -> torch.Tensor:
    """sin(2 pi k j / n), with the rows of the constant and the Nyquist mode exactly zero, as in exact arithmetic.

    These two modes have no imaginary part. FFT libraries disagree on how to treat one that W(k) introduces; zero rows
    drop it on every device.
    """
    k = torch.arange(modes, device=device)[:, None]
    return torch.where(_modulo(2 * k, points) == 0, 0.0, _angles(points, modes, device).sin())


@grid_constant
def analysis_basis(points: int, modes: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """(2K, n): rows 2k and 2k+1 give the real and imaginary part of mode k of the orthonormal real DFT."""
    cosine, sine = _angles(points, modes, device).cos(), _sine(points, modes, device)
    basis = torch.stack((cosine, -sine), dim=1).reshape(2 * modes, points)
    return (basis / _sqrt(points)).to(dtype)


@grid_constant
def synthesis_basis(points: int, modes: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """(n, 2K): back to n points; modes with a conjugate partner count twice, the constant and Nyquist mode once."""
    k = torch.arange(modes, device=device)[:, None]
    weight = torch.where(_modulo(2 * k, points) == 0, 1.0, 2.0).double() / _sqrt(points)
    cosine, sine = _angles(points, modes, device).cos(), _sine(points, modes, device)
    return torch.stack((weight * cosine, -weight * sine), dim=1).reshape(2 * modes, points).T.contiguous().to(dtype)


@grid_constant
def signed_basis(points: int, positive: int, negative: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """(2M, 2n): the modes 0, 1, ..., then -negative, ..., -1 of n complex values, all as pairs of real and imaginary
    part. Its rows are orthonormal, so its transpose is the synthesis."""
    k = torch.cat((torch.arange(positive, device=device), torch.arange(-negative, 0, device=device)))
    angles = _modulo(k[:, None] * torch.arange(points, device=device), points).double() * (2 * math.pi / points)
    cosine, sine = angles.cos(), angles.sin()
    pairs = torch.stack((torch.stack((cosine, sine), -1), torch.stack((-sine, cosine), -1)), dim=1)
    return (pairs.reshape(2 * len(k), 2 * points) / _sqrt(points)).to(dtype)
