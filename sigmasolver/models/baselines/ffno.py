"""F-FNO, the factorised Fourier neural operator (Tran et al., ICLR 2023): a spectral operator, then a feed-forward map.

    H --- S(H) = sum over axes of the filtered H --- Linear, ReLU, Linear --- LN --- + H ---> H

S is `models.spectral.SpectralOperator` at full width, with weights of its own in every block; inside, the feed-forward
map is four times as wide. This is the form of the reacting-flow benchmark that the paper compares with
(tab:realm-results), whose blocks it has to the last parameter. Lift and readout are those of `models.solver`, so that
models differ in their blocks alone; weights start as in the family.

The authors' own form for Navier-Stokes, `ffno-markov`:

    [x, fields] --- N --- H --- d = N(ReLU(N(S(H)))) --- H + d ---> H         after the last layer: N(N(d)), not H + d

N is a linear map with normalised weights, g v / |v| for every output; S is one operator for all layers; no layer norm,
and no activation between the two maps of the head, whose inner width is 128. It is all from their released code
(24 layers, width 64, 16 modes: 1,072,834 parameters), as are its Xavier-normal Fourier weights with gain 0.1 and
torch's start of the rest. Their runs read one frame (a Markov step) of normalised fields with noise, which a task and
its training say, not a model. Their code puts the coordinates after the fields: another order of the first columns.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from sigmasolver.models.config import SolverConfig
from sigmasolver.models.layers import LayerNorm, Linear, TimeEmbedding, coordinates, linear
from sigmasolver.models.solver import GridModel, Solver, with_points
from sigmasolver.models.spectral import SpectralOperator
from sigmasolver.ops import affine

__all__ = ["FactorisedBlock", "MarkovFFNO", "NormalisedLinear", "ffno", "ffno_markov"]


class FactorisedBlock(nn.Module):
    """`(B, *grid, width)` -> the same shape: H + LN(W_2 ReLU(W_1 S(H) + b_1) + b_2)."""

    FACTOR = 4

    def __init__(self, config: SolverConfig) -> None:
        super().__init__()
        config.check_modes()
        width, inner = config.width, self.FACTOR * config.width
        self.spectral = SpectralOperator(width, config.modes_per_axis, config.domain_padding)
        self.feed_forward = nn.Sequential(linear(width, inner), nn.ReLU(), linear(inner, width))
        self.norm = LayerNorm(width)

    def forward(self, H: torch.Tensor) -> torch.Tensor:
        return H + self.norm(self.feed_forward(self.spectral(H)))


def ffno(config: SolverConfig) -> Solver:
    """F-FNO with `depth` blocks; `heads`, `slices` and the options `expansion` and `dropout` are not used."""
    return Solver(FactorisedBlock, config)


class NormalisedLinear(nn.Module):
    """g v / |v| times the channels, plus a bias: the length of a row of weights is learned apart from its direction.

    Starts as torch's linear map does.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        start = Linear(inputs, outputs)
        self.direction, self.bias = start.weight, start.bias
        self.length = nn.Parameter(start.weight.detach().norm(dim=1, keepdim=True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.direction * (self.length / self.direction.norm(dim=1, keepdim=True))
        return affine.linear(x, weight, self.bias)


class MarkovFFNO(GridModel):
    """`(B, *grid, in_channels)` -> `(B, *grid, out_channels)` in the authors' own form."""

    FACTOR, INNER, GAIN = 4, 128, 0.1

    def __init__(self, config: SolverConfig) -> None:
        super().__init__(config)
        config.check_modes()
        C, inner = config.width, self.FACTOR * config.width
        self.lift = NormalisedLinear(config.axes + config.in_channels, C)
        self.time = TimeEmbedding(C, config.scalars) if config.scalars else None
        self.spectral = SpectralOperator(C, config.modes_per_axis, config.domain_padding)
        for weight in self.spectral.weights:
            # Xavier's rule as torch applies it to the authors' layout (C, C', modes, 2): modes x 2 is its kernel.
            nn.init.normal_(weight, std=self.GAIN * math.sqrt(2 / (2 * C * 2 * len(weight))))
        self.blocks = nn.ModuleList(
            nn.Sequential(NormalisedLinear(C, inner), nn.ReLU(), NormalisedLinear(inner, C))
            for _ in range(config.depth)
        )
        self.head = nn.Sequential(NormalisedLinear(C, self.INNER), NormalisedLinear(self.INNER, config.out_channels))

    def forward(self, x: torch.Tensor, time: torch.Tensor | None = None) -> torch.Tensor:
        """`time` is for models with an embedding: (B,), or (B, n) where conditions follow the time."""
        self.check(x, time)
        points = coordinates(tuple(x.shape[1:-1]), x.dtype, x.device)
        H = self.with_time(self.lift(with_points(x, points)).to(self.dtype), time)
        change = H
        for block in self.blocks:
            with torch.autocast(x.device.type, enabled=False):
                filtered = self.spectral(H)
            change = block(filtered)
            H = H + change
        with torch.autocast(x.device.type, enabled=False):
            return self.head(change.to(self.dtype))


def ffno_markov(config: SolverConfig) -> MarkovFFNO:
    """The authors' F-FNO with `depth` layers; `heads`, `slices` and the options `expansion`, `dropout` and `positions`
    are not used."""
    return MarkovFFNO(config)
