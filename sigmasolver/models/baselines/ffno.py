"""F-FNO, the factorised Fourier neural operator (Tran et al., ICLR 2023): a spectral operator, then an MLP.

    H --- S(H) = sum over axes of the filtered H --- Linear, ReLU, Linear --- LN --- + H ---> H

S is `models.spectral.SpectralOperator` at full width, with separate weights in every block; the hidden width of the
feed-forward network is 4 x width. This is the form of the reacting-flow benchmark that the paper compares with
(tab:realm-results); its blocks have exactly the same parameters. Lift and readout are those of `models.solver`, so that
models differ in their blocks only; the initialisation is that of Transolver-sigma.

The authors' own form for Navier-Stokes, `ffno-markov`:

    [x, fields] --- N --- H --- d = N(ReLU(N(S(H)))) --- H + d ---> H         after the last layer: N(N(d)), not H + d

N is a weight-normalised linear map, g v / |v| for every output; S is shared by all layers; there is no layer norm, and
no activation between the two maps of the head, whose inner width is 128. All of this follows their released code
(24 layers, width 64, 16 modes: 1,072,834 parameters), including Xavier-normal Fourier weights with gain 0.1 and torch's
default initialisation of everything else. Their runs take one frame (a Markov step) of normalised fields with noise,
which is set by task and training, not by the model. Their code concatenates the coordinates after the fields, which
only permutes the columns of the lift.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from sigmasolver.models.config import SolverConfig
from sigmasolver.models.layers import LayerNorm, Linear, TimeEmbedding, coordinates, full_precision, linear
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
        out: torch.Tensor = H + self.norm(self.feed_forward(self.spectral(H)))
        return out


def ffno(config: SolverConfig) -> Solver:
    """F-FNO with `depth` blocks; `heads`, `slices` and the options `expansion` and `dropout` are ignored."""
    return Solver(FactorisedBlock, config)


class NormalisedLinear(nn.Module):
    """A weight-normalised linear layer, g v / |v| x + b: length and direction of each row are separate parameters.

    Initialised like nn.Linear.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        initial = Linear(inputs, outputs)
        self.direction, self.bias = initial.weight, initial.bias
        self.length = nn.Parameter(initial.weight.detach().norm(dim=1, keepdim=True))

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
            # xavier_normal_ on the authors' layout (C, C', modes, 2), where torch takes modes x 2 as the kernel size.
            nn.init.normal_(weight, std=self.GAIN * math.sqrt(2 / (2 * C * 2 * len(weight))))
        self.blocks = nn.ModuleList(
            nn.Sequential(NormalisedLinear(C, inner), nn.ReLU(), NormalisedLinear(inner, C))
            for _ in range(config.depth)
        )
        self.head = nn.Sequential(NormalisedLinear(C, self.INNER), NormalisedLinear(self.INNER, config.out_channels))

    def forward(self, x: torch.Tensor, time: torch.Tensor | None = None) -> torch.Tensor:
        """`time`, for models with a time embedding: (B,), or (B, n) with conditions after the time."""
        self.check(x, time)
        points = coordinates(tuple(x.shape[1:-1]), x.dtype, x.device)
        H = self.with_time(self.lift(with_points(x, points)).to(self.dtype), time)
        change = H
        for block in self.blocks:
            with full_precision(x):
                filtered = self.spectral(H)
            change = block(filtered)
            H = H + change
        with full_precision(x):
            out: torch.Tensor = self.head(change.to(self.dtype))
            return out


def ffno_markov(config: SolverConfig) -> MarkovFFNO:
    """The authors' F-FNO with `depth` layers; `heads`, `slices` and the options `expansion`, `dropout` and `positions`
    are ignored."""
    return MarkovFFNO(config)
