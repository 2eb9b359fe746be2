"""The spectral operator: axis-factorised Fourier filter with learned complex channel matrices (sec:method-spectral).

V --+-- rFFT_1 -> lowest K_1 modes times W_1(k) -> irFFT_1 --+
    +-- rFFT_2 -> lowest K_2 modes times W_2(k) -> irFFT_2 --+--> sum
    +-- ...                                                --+

On a non-periodic axis V can be zero-padded before the transforms (`domain_padding`), so that its ends do not wrap
around; the response is cropped to the points of V.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from sigmasolver.models.layers import cropped, extended, padded
from sigmasolver.ops.fourier import axis_fourier

__all__ = ["SpectralOperator"]


class SpectralOperator(nn.Module):
    """`(B, *grid, width)` -> the same shape; linear, no bias.

    The weights of one axis are reals of shape (modes, width, width, 2). A grid with fewer than `modes` modes on an
    axis uses the lowest ones it has. Real and imaginary parts are initialised normal with standard deviation
    0.02, like every channel-mixing map of Transolver-sigma. `domain_padding` is a fraction of the points per axis.
    """

    def __init__(self, width: int, modes: Sequence[int], domain_padding: Sequence[float] = ()) -> None:
        super().__init__()
        self.domain_padding = tuple(domain_padding)
        self.weights = nn.ParameterList(nn.Parameter(torch.empty(K, width, width, 2)) for K in modes)
        self.operator = axis_fourier
        for weight in self.weights:
            nn.init.trunc_normal_(weight, std=0.02)

    def forward(self, V: torch.Tensor) -> torch.Tensor:
        if not any(self.domain_padding):
            return self.operator(V, list(self.weights))
        grid = V.shape[1:-1]
        longer = padded(V, extended(grid, self.domain_padding))
        return cropped(self.operator(longer, list(self.weights)), grid).contiguous()
