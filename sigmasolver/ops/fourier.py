"""Axis-factorised Fourier operator (eq:spectral-axis-transform to eq:spectral-aggregation).

For every axis a, with orthonormal transforms along that axis alone and complex channel matrices W_a(k):

    R_a = irFFT_a( rFFT_a(V)[k] W_a(k)  for k < K_a,  0 otherwise ),      result = sum_a R_a

Only K_a of the n_a/2 + 1 modes are kept, so the transforms are thin matrix products: analysis (2K x n), one real
2C x 2C' block per mode, synthesis (n x 2K). Everything is real: no complex tensor exists, and bf16, `torch.compile`,
`torch.export` and odd lengths work. `axis_fourier_rfft` is the same operator through the FFT; it is the
oracle of the tests and the yardstick of the benchmarks.

Letters: B batch, n points on the axis, K kept modes, C channels, P points before the axis (batch included),
Q points after it. A weight is (K, C, C', 2): real and imaginary part of W(k), applied from the right.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from sigmasolver.ops.dispatch import choose
from sigmasolver.ops.fourier_bases import analysis_basis, available_modes, synthesis_basis

__all__ = ["analysis_basis", "available_modes", "axis_fourier", "axis_fourier_rfft", "synthesis_basis"]


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
        else:  # beta = 1: the sum over axes costs no pass of its own
            response = torch.baddbmm(total.view(P, n, Q * out_channels), synthesise, modes)
        total = response.view(*V.shape[:-1], out_channels)
    if total is None:
        raise ValueError("The spectral operator needs one weight per axis and got none.")
    return total


def axis_fourier_rfft(V: torch.Tensor, weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """The same operator through rFFT and complex arithmetic (float32 and float64 only)."""
    total = V.new_zeros(())
    for axis, weight in enumerate(weights, start=1):
        n = V.shape[axis]
        K, out_channels = min(weight.shape[0], available_modes(n)), weight.shape[2]
        spectrum = torch.fft.rfft(V, dim=axis, norm="ortho").movedim(axis, -2)
        kept = torch.einsum("...kc,kcd->...kd", spectrum[..., :K, :], torch.view_as_complex(weight[:K].contiguous()))
        self_conjugate = (2 * torch.arange(K, device=V.device) % n == 0)[:, None]
        kept = torch.where(self_conjugate, kept.real.to(kept.dtype), kept)
        filtered = spectrum.new_zeros(*spectrum.shape[:-1], out_channels)
        filtered[..., :K, :] = kept
        total = total + torch.fft.irfft(filtered.movedim(-2, axis), n=n, dim=axis, norm="ortho")
    return total
