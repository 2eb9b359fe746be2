"""The spectral operator: axis-factorised Fourier filter with learned complex channel matrices (sec:method-spectral).

V --+-- rFFT_1 -> lowest K_1 modes times W_1(k) -> irFFT_1 --+
    +-- rFFT_2 -> lowest K_2 modes times W_2(k) -> irFFT_2 --+--> sum
    +-- ...                                                --+
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from sigmasolver.ops.fourier import axis_fourier

__all__ = ["SpectralOperator"]


class SpectralOperator(nn.Module):
    """`(B, *grid, width)` -> the same shape; linear, no bias.

    The weights of one axis are reals of shape (modes, width, width, 2). A grid with fewer than `modes` modes on an
    axis uses the lowest ones it has. Real and imaginary parts start normal with deviation 0.02, as every
    channel-mixing map of the family does.
    """

    def __init__(self, width: int, modes: Sequence[int]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.empty(K, width, width, 2)) for K in modes)
        self.operator = axis_fourier
        for weight in self.weights:
            nn.init.trunc_normal_(weight, std=0.02)

    def forward(self, V: torch.Tensor) -> torch.Tensor:
        return self.operator(V, list(self.weights))
