"""Fourier operators with truncated DFTs: factorised over the axes, or over all axes at once.

Axis-factorised (eq:spectral-axis-transform to eq:spectral-aggregation).

For every axis a, with orthonormal transforms along that axis alone and complex channel matrices W_a(k):

    R_a = irFFT_a( rFFT_a(V)[k] W_a(k)  for k < K_a,  0 otherwise ),      result = sum_a R_a

Only K_a of the n_a/2 + 1 modes are kept, so the transforms are thin matrix products: analysis (2K x n), one real
2C x 2C' block per mode, synthesis (n x 2K). Everything is real: there are no complex tensors, and bf16,
`torch.compile`, `torch.export` and odd lengths work. `axis_fourier_rfft` is the same operator with the FFT: the
reference of the tests and the baseline of the benchmarks.

Over all axes at once, `grid_fourier` (the FNO): one transform of the full grid and one matrix W(k_1, ..., k_d) per kept
mode, with non-negative modes on the last axis and both signs on the others, because the field is real.

Letters: B batch, n points on the axis, K kept modes, C channels, P points before the axis (batch included),
Q points after it. A weight is (K, C, C', 2): real and imaginary part of W(k), applied from the right.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from sigmasolver.ops.dispatch import choose
from sigmasolver.ops.fourier_bases import analysis_basis, available_modes, signed_basis, synthesis_basis

__all__ = [
    "analysis_basis",
    "available_modes",
    "axis_fourier",
    "axis_fourier_rfft",
    "grid_fourier",
    "signed_basis",
    "synthesis_basis",
]


def _real_blocks(weight: torch.Tensor) -> torch.Tensor:
    """(K, C, C', 2) -> (K, 2C, 2C'): [Re, Im] @ [[Wr, Wi], [-Wi, Wr]] is the complex product in real numbers."""
    real, imaginary = weight.unbind(-1)
    return torch.cat((torch.cat((real, imaginary), -1), torch.cat((-imaginary, real), -1)), -2)


def axis_fourier(V: torch.Tensor, weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Apply the operator to `V` (B, *grid, C) with one weight (K_a, C, C', 2) per axis; gives (B, *grid, C')."""
    if fused := choose("fourier", V, unless={"there is no weight": not weights}, products=True):
        return fused.axis_fourier(V, list(weights))
    total: torch.Tensor | None = None
    channels = V.shape[-1]
    for axis, weight in enumerate(weights, start=1):
        n = V.shape[axis]
        K, out_channels = min(weight.shape[0], available_modes(n)), weight.shape[2]
        P, Q = math.prod(V.shape[:axis]), math.prod(V.shape[axis + 1 : -1])
        analyse = analysis_basis(n, K, V.dtype, V.device).expand(P, -1, -1)
        synthesise = synthesis_basis(n, K, V.dtype, V.device).expand(P, -1, -1)

        modes = torch.bmm(analyse, V.reshape(P, n, Q * channels))
        modes = modes.view(P, K, 2, Q, channels).permute(1, 0, 3, 2, 4).reshape(K, P * Q, 2 * channels)
        modes = torch.bmm(modes, _real_blocks(weight[:K]))
        modes = modes.view(K, P, Q, 2, out_channels).permute(1, 0, 3, 2, 4).reshape(P, 2 * K, Q * out_channels)

        if total is None:
            response = torch.bmm(synthesise, modes)
        else:  # beta = 1: the sum over axes needs no extra pass over memory
            response = torch.baddbmm(total.view(P, n, Q * out_channels), synthesise, modes)
        total = response.view(*V.shape[:-1], out_channels)
    if total is None:
        raise ValueError("The spectral operator needs one weight per axis, but got none.")
    return total


def axis_fourier_rfft(V: torch.Tensor, weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """The definition of `axis_fourier` with rFFTs and complex arithmetic (float32 and float64 only): the reference of
    tests and benchmarks."""
    total = V.new_zeros(())
    for axis, weight in enumerate(weights, start=1):
        n = V.shape[axis]
        K, out_channels = min(weight.shape[0], available_modes(n)), weight.shape[2]
        spectrum = torch.fft.rfft(V, dim=axis, norm="ortho").movedim(axis, -2)
        modes = torch.einsum("...kc,kcd->...kd", spectrum[..., :K, :], torch.view_as_complex(weight[:K].contiguous()))
        self_conjugate = (2 * torch.arange(K, device=V.device) % n == 0)[:, None]
        modes = torch.where(self_conjugate, modes.real.to(modes.dtype), modes)
        filtered = spectrum.new_zeros(*spectrum.shape[:-1], out_channels)
        filtered[..., :K, :] = modes
        total = total + torch.fft.irfft(filtered.movedim(-2, axis), n=n, dim=axis, norm="ortho")
    return total


def grid_fourier(V: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """irFFT_1..d( rFFT_1..d(V)[k] W(k) for the kept k, 0 otherwise ): (B, *grid, C) -> (B, *grid, C').

    `weight` is (2 K_1, ..., 2 K_{d-1}, K_d, C, C', 2); an axis of length 2 K holds the modes 0, ..., K - 1, then
    -K, ..., -1. A grid with fewer modes uses the lowest of each sign. An imaginary part that W puts on a self-conjugate
    mode of the last axis has no meaning for a real field and is dropped, as by an inverse rFFT.
    """
    *before, n, channels = V.shape
    axes, out_channels, P = len(before), weight.shape[-2], math.prod(before)
    K = min(weight.shape[axes - 1], available_modes(n))
    weight = weight.narrow(axes - 1, 0, K)
    modes = torch.bmm(analysis_basis(n, K, V.dtype, V.device).expand(P, -1, -1), V.reshape(P, n, channels))
    modes = modes.view(*before, K, 2, channels)
    bases = {}
    for axis in range(axes - 1, 0, -1):
        points, per_sign = V.shape[axis], weight.shape[axis - 1] // 2
        positive, negative = min(per_sign, (points + 1) // 2), min(per_sign, points // 2)
        ends = weight.narrow(axis - 1, 0, positive), weight.narrow(axis - 1, 2 * per_sign - negative, negative)
        weight = torch.cat(ends, dim=axis - 1) if positive + negative < 2 * per_sign else weight
        bases[axis] = signed_basis(points, positive, negative, V.dtype, V.device)
        modes = _apply_along(modes, axis, bases[axis])

    mode_shape, count = modes.shape[:-2], math.prod(weight.shape[:-3])
    modes = modes.reshape(V.shape[0], count, 2 * channels).transpose(0, 1)
    modes = torch.bmm(modes, _real_blocks(weight.reshape(count, channels, out_channels, 2)))
    modes = modes.transpose(0, 1).reshape(*mode_shape, 2, out_channels)

    for axis in range(1, axes):
        modes = _apply_along(modes, axis, bases[axis].mT)
    synthesise = synthesis_basis(n, K, V.dtype, V.device).expand(P, -1, -1)
    return torch.bmm(synthesise, modes.reshape(P, 2 * K, out_channels)).view(*before, n, out_channels)


def _apply_along(values: torch.Tensor, axis: int, matrix: torch.Tensor) -> torch.Tensor:
    """Apply a real matrix (2M, 2n) along `axis` to the complex values (..., 2, C), whose second-to-last axis holds real
    and imaginary part."""
    *shape, _, channels = values.shape
    P, n, Q = math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])
    pairs = values.reshape(P, n, Q, 2, channels).transpose(2, 3).reshape(P, 2 * n, Q * channels)
    M = matrix.shape[0] // 2
    out = torch.bmm(matrix.expand(P, -1, -1), pairs).view(P, M, 2, Q, channels).transpose(2, 3)
    return out.reshape(*shape[:axis], M, *shape[axis + 1 :], 2, channels)
