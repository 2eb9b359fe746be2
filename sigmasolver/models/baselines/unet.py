"""U-Net (Ronneberger et al., MICCAI 2015) in the form used for PDE benchmarks: four levels down and up.

    lift --- pad --- D(C, C) --------------------- skip --------------------- D(2C, C) --- Linear --- crop --- head --->
                        pool, D(C, 2C) ----------- skip ----------- D(4C, C), up
                              pool, D(2C, 4C) ---- skip ---- D(8C, 2C), up
                                    pool, D(4C, 8C) -skip- D(16C, 4C), up
                                          pool, D(8C, 8C), up

    D(a, b)    from a to b channels, two times: bias-free 3^d convolution, norm, ReLU; the inner width is b in the
               encoder and a/2 in the decoder
    pool       max pooling over 2^d points
    up         linear interpolation to twice the points with aligned corners; then concatenated after the skip
    C          `width`

From the first paper: the U, its pooling, skip connections and double convolutions. From Neural-Solver-Library, the
public code of the group behind these comparisons: the whole diagram, zero padding at the high end to a multiple of 2^4
points, the lift of Transolver-sigma without its channel offset, a head Linear, GELU, Linear; torch's default
initialisation. There the norm is InstanceNorm with weight and bias for time-dependent tasks and BatchNorm for steady
ones. The config does not say which of the two a task is, so the norms are two models: `unet`, whose samples are
independent, and `unet-batchnorm`.
Inferred: the paper does not describe its U-Net. If the deepest level would be a single point, which InstanceNorm maps
to zero, the last axis is padded once more. A "circular" axis wraps around in the convolutions only.
The time embedding is added to the lift, as in Neural-Solver-Library. InstanceNorm removes whatever is constant over the
grid, so `unet` depends on the time only through its zero padding; `unet-batchnorm` depends on it fully.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from sigmasolver.models.config import SolverConfig
from sigmasolver.models.layers import Convolution, Linear, TimeEmbedding, cropped, full_precision, padded, perceptron
from sigmasolver.models.solver import GridModel, with_points

__all__ = ["NORMS", "UNet", "unet"]

NORMS = ("instance", "batch")


class InstanceNorm(nn.GroupNorm):
    """`(B, channels, *grid)`: InstanceNorm with a weight and a bias per channel.

    A GroupNorm with one channel per group, because nn.InstanceNorm rejects an empty batch.
    """

    def __init__(self, channels: int) -> None:
        super().__init__(channels, channels)

    def forward(self, H: torch.Tensor) -> torch.Tensor:
        # On channels-last memory the CPU kernel of torch loses two digits.
        return super().forward(H.contiguous())


def normalisation(kind: str, channels: int, axes: int) -> nn.Module:
    """The norm layer of this kind, channels first."""
    if kind == "batch":
        return (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[axes - 1](channels)
    return InstanceNorm(channels)


class DoubleConvolution(nn.Module):
    """`(B, *grid, inputs)` -> `(B, *grid, outputs)`: convolution, norm, ReLU, two times."""

    KERNEL = 3

    def __init__(self, inputs: int, inner: int, outputs: int, padding: Sequence[str], norm: str) -> None:
        super().__init__()
        pairs = ((inputs, inner), (inner, outputs))
        self.convolutions = nn.ModuleList(
            Convolution(before, self.KERNEL, padding, after, bias=False) for before, after in pairs
        )
        self.norms = nn.ModuleList(normalisation(norm, after, len(padding)) for _, after in pairs)

    def forward(self, H: torch.Tensor) -> torch.Tensor:
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            H = torch.relu(norm(convolution(H).movedim(-1, 1))).movedim(1, -1)
        return H


def pooled(H: torch.Tensor) -> torch.Tensor:
    """Max pooling over 2^d points."""
    pool = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[H.ndim - 3]
    return pool(H.movedim(-1, 1), 2).movedim(1, -1)


def interpolated(H: torch.Tensor) -> torch.Tensor:
    """Linear interpolation to twice the points on every axis, with aligned corners."""
    mode = ("linear", "bilinear", "trilinear")[H.ndim - 3]
    size = [2 * points for points in H.shape[1:-1]]
    return F.interpolate(H.movedim(-1, 1), size, mode=mode, align_corners=True).movedim(1, -1)


class UNet(GridModel):
    """`(B, *grid, in_channels)` -> `(B, *grid, out_channels)` with one of `NORMS`."""

    LEVELS = 4

    def __init__(self, config: SolverConfig, norm: str = "instance") -> None:
        super().__init__(config)
        if norm not in NORMS:
            raise ValueError(f'norm is "{norm}"; choose from {", ".join(NORMS)}.')
        self.norm = norm
        C, double = config.width, partial(DoubleConvolution, padding=config.padding, norm=norm)
        self.lift = perceptron(config.position_channels + config.in_channels, 2 * C, C, Linear)
        self.time = TimeEmbedding(C, config.scalars) if config.scalars else None
        widths = (C, 2 * C, 4 * C, 8 * C, 8 * C)
        down = [double(before, after, after) for before, after in itertools.pairwise((C, *widths))]
        up = [double(2 * skip, skip, max(skip // 2, C)) for skip in reversed(widths[:-1])]
        self.levels = nn.ModuleList((*down, *up))
        self.project = Linear(C, C)
        self.head = perceptron(C, C, config.out_channels, Linear)

    def forward(self, x: torch.Tensor, time: torch.Tensor | None = None) -> torch.Tensor:
        """`time`, for models with a time embedding: (B,), or (B, n) with conditions after the time."""
        self.check(x, time)
        grid = tuple(x.shape[1:-1])
        H = self.with_time(self.lift(with_points(x, self.points(x))), time)
        top, *levels = self.levels
        skips = [top(padded(H, self._padded_grid(grid)))]
        for level in levels[: self.LEVELS]:
            skips.append(level(pooled(skips[-1])))
        H = skips.pop()
        for level in levels[self.LEVELS :]:
            H = level(torch.cat((skips.pop(), interpolated(H)), dim=-1))
        H = cropped(self.project(H), grid)
        with full_precision(x):
            out: torch.Tensor = self.head(H.to(self.dtype))
            return out

    @property
    def blocks(self) -> Sequence[nn.Module]:
        """The modules that can be recomputed in backward; recomputing a BatchNorm would update its statistics twice."""
        return tuple(self.levels) if self.norm == "instance" else ()

    def _padded_grid(self, grid: Sequence[int]) -> list[int]:
        """The number of points per axis after zero padding."""
        unit = 2**self.LEVELS
        sizes = [math.ceil(n / unit) * unit for n in grid]
        if max(sizes) == unit:
            sizes[-1] += unit
        return sizes


def unet(config: SolverConfig, norm: str = "instance") -> UNet:
    """U-Net with four levels; `depth`, `heads`, `slices`, `modes` and the options `expansion` and `dropout` are
    ignored."""
    return UNet(config, norm)
