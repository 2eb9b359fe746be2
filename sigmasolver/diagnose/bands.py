"""Large and small scales of a field: two orthogonal projections that add up to the identity.

    Q_low: the Fourier coefficients with |k_a| < K_a on every axis a,      Q_high = I - Q_low

They act on the predicted state, not on latent channels, and are fixed before anything is measured
(app:spectral-physical-complementarity, Q_mix). On a non-periodic grid they are still orthogonal projections.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["Bands"]


@dataclass(frozen=True)
class Bands:
    """Projections of frames (B, T, *grid, q); `modes` are the K_a, one per grid axis."""

    modes: tuple[int, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.modes) <= 3 or min(self.modes) < 1:
            raise ValueError(f"modes must have one to three entries of at least 1, got {self.modes}.")

    def low(self, frames: torch.Tensor) -> torch.Tensor:
        """Q_low."""
        axes = tuple(range(2, frames.ndim - 1))
        if len(axes) != len(self.modes):
            raise ValueError(f"modes must have one entry per axis, got {len(self.modes)} for {len(axes)} axes.")
        grid = frames.shape[2:-1]
        spectrum = torch.fft.rfftn(frames, dim=axes)
        for position, (axis, points, modes) in enumerate(zip(axes, grid, self.modes, strict=True), start=1):
            frequencies = torch.fft.rfftfreq if position == len(axes) else torch.fft.fftfreq
            wavenumbers = frequencies(points, 1 / points, dtype=torch.float64, device=frames.device).abs().round()
            keep = (wavenumbers < modes).to(frames.dtype)
            spectrum = spectrum * keep.view(-1, *(1,) * (frames.ndim - 1 - axis))
        return torch.fft.irfftn(spectrum, s=grid, dim=axes)

    def high(self, frames: torch.Tensor) -> torch.Tensor:
        """Q_high."""
        return frames - self.low(frames)
