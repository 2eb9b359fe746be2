"""FNO, the Fourier neural operator (Li et al., ICLR 2021): a spectral convolution plus a pointwise map per layer.

    fields ----+
               +-- lift --- pad --- [ GELU( F^-1 (R . F H) + W H + b ) ] x depth --- crop --- Linear, GELU, Linear --->
    positions -+

F is the discrete Fourier transform over all axes and R a complex (width x width) matrix for every retained mode: the
`modes` lowest non-negative ones on the last axis, twice as many, of both signs, on the others. The last layer has no
GELU.

From the paper and the authors' code: the layer, the position of the GELUs, the initialisation (R = (U(0, 1) +
i U(0, 1)) / width^2, torch's default elsewhere), zero padding at the high end of non-periodic axes. Two forms:
    comparison    lift and positions of Transolver-sigma without its channel offset, inner width of the head = width,
                  zero-padded to a multiple of 16 points                      (Neural-Solver-Library)
    original      lift = one linear map of coordinates and fields, inner width of the head 128, 9 points of padding
                  (the authors' Darcy script; their Navier-Stokes script, which is periodic, does not pad)
The option `domain_padding` replaces this padding by a fraction of the points, on every grid.
Inferred: an axis whose option `padding` is "circular" is not padded, so that the model is shift-equivariant along it;
the authors decide this per script and Neural-Solver-Library by divisibility only. The authors' three-dimensional script
pads time only; here all axes are treated alike. The authors concatenate the fields before the coordinates, which only
permutes the columns of the lift. The paper's tables quote published FNO results, not all of which state their sizes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from sigmasolver.models.config import SolverConfig
from sigmasolver.models.layers import (
    Linear,
    TimeEmbedding,
    coordinates,
    cropped,
    extended,
    full_precision,
    padded,
    perceptron,
)
from sigmasolver.models.solver import GridModel, with_points
from sigmasolver.ops.fourier import grid_fourier

__all__ = ["FNO", "FourierConvolution", "fno"]


class FourierConvolution(nn.Module):
    """`(B, *grid, width)` -> the same shape: F^-1 (R . F H), in float32 at least.

    The weight is real, (2 modes, ..., modes, width, width, 2), see `ops.fourier.grid_fourier`.
    """

    def __init__(self, width: int, modes: Sequence[int]) -> None:
        super().__init__()
        signed = [2 * K for K in modes[:-1]]
        self.weight = nn.Parameter(torch.rand(*signed, modes[-1], width, width, 2).div_(width**2))

    def forward(self, H: torch.Tensor) -> torch.Tensor:
        wide = torch.promote_types(H.dtype, torch.float32)
        with full_precision(H):
            return grid_fourier(H.to(wide), self.weight.to(wide)).to(H.dtype)


class FourierLayer(nn.Module):
    """`(B, *grid, width)` -> the same shape: F^-1 (R . F H) + W H + b."""

    def __init__(self, width: int, modes: Sequence[int]) -> None:
        super().__init__()
        self.convolution = FourierConvolution(width, modes)
        self.pointwise = Linear(width, width)

    def forward(self, H: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.convolution(H) + self.pointwise(H)
        return out


class FNO(GridModel):
    """`(B, *grid, in_channels)` -> `(B, *grid, out_channels)` in the comparison form or the original one."""

    MULTIPLE = 16
    MARGIN, INNER = 9, 128

    def __init__(self, config: SolverConfig, original: bool = False) -> None:
        super().__init__(config)
        config.check_modes()
        self.original, self.domain_padding = original, config.domain_padding
        C, fields = config.width, config.in_channels
        if original:
            self.lift: nn.Module = Linear(config.axes + fields, C)
        else:
            self.lift = perceptron(config.position_channels + fields, 2 * C, C, Linear)
        self.time = TimeEmbedding(C, config.scalars) if config.scalars else None
        self.blocks = nn.ModuleList(FourierLayer(C, config.modes_per_axis) for _ in range(config.depth))
        self.head = perceptron(C, self.INNER if original else C, config.out_channels, Linear)

    def forward(self, x: torch.Tensor, time: torch.Tensor | None = None) -> torch.Tensor:
        """`time`, for models with a time embedding: (B,), or (B, n) with conditions after the time."""
        self.check(x, time)
        grid = tuple(x.shape[1:-1])
        points = coordinates(grid, x.dtype, x.device) if self.original else self.points(x)
        H = self.with_time(self.lift(with_points(x, points)).to(self.dtype), time)
        H = padded(H, self._padded_grid(grid))
        for index, layer in enumerate(self.blocks):
            H = layer(F.gelu(H) if index else H)
        with full_precision(x):
            out: torch.Tensor = self.head(cropped(H, grid))
            return out

    def _padded_grid(self, grid: Sequence[int]) -> list[int]:
        """The number of points per axis after zero padding."""
        if any(self.domain_padding):
            return extended(grid, self.domain_padding)
        sizes = [n + self.MARGIN if self.original else math.ceil(n / self.MULTIPLE) * self.MULTIPLE for n in grid]
        return [n if end == "circular" else size for n, size, end in zip(grid, sizes, self.config.padding, strict=True)]


def fno(config: SolverConfig, original: bool = False) -> FNO:
    """FNO with `depth` layers; `heads`, `slices` and the options `expansion` and `dropout` are ignored and, in the
    original form, `positions`."""
    return FNO(config, original)
