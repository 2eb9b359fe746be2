"""F-FNO, the factorised Fourier neural operator (Tran et al., ICLR 2023): a spectral operator, then a feed-forward map.

    H --- S(H) = sum over axes of the filtered H --- Linear, ReLU, Linear --- LN --- + H ---> H

S is `models.spectral.SpectralOperator` at full width, with weights of its own in every block; inside, the feed-forward
map is four times as wide. This is the form of the reacting-flow benchmark that the paper compares with
(tab:realm-results), whose blocks it has to the last parameter. The authors' own runs differ in details: no
normalisation but normalised weights, for Navier-Stokes one set of Fourier weights for all blocks, a head that reads
the last correction without its residual. Lift and readout are those of `models.solver`, so that models differ in their
blocks alone; weights start as in the family.
"""

from __future__ import annotations

import torch
from torch import nn

from sigmasolver.models.config import SolverConfig
from sigmasolver.models.layers import LayerNorm, linear
from sigmasolver.models.solver import Solver
from sigmasolver.models.spectral import SpectralOperator

__all__ = ["FactorisedBlock", "ffno"]


class FactorisedBlock(nn.Module):
    """`(B, *grid, width)` -> the same shape: H + LN(W_2 ReLU(W_1 S(H) + b_1) + b_2)."""

    FACTOR = 4

    def __init__(self, config: SolverConfig) -> None:
        super().__init__()
        config.check_modes()
        width, inner = config.width, self.FACTOR * config.width
        self.spectral = SpectralOperator(width, config.modes_per_axis)
        self.feed_forward = nn.Sequential(linear(width, inner), nn.ReLU(), linear(inner, width))
        self.norm = LayerNorm(width)

    def forward(self, H: torch.Tensor) -> torch.Tensor:
        return H + self.norm(self.feed_forward(self.spectral(H)))


def ffno(config: SolverConfig) -> Solver:
    """F-FNO with `depth` blocks; `heads`, `slices` and the options `expansion` and `dropout` are not used."""
    return Solver(FactorisedBlock, config)
