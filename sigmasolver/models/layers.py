"""Layers and position features shared by all models."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from sigmasolver.ops import affine
from sigmasolver.ops.constants import grid_constant
from sigmasolver.ops.convolution import depthwise_convolution
from sigmasolver.ops.wrap import wrap

__all__ = [
    "Convolution",
    "DepthwiseConvolution",
    "DrawsNoise",
    "LayerNorm",
    "Linear",
    "TimeEmbedding",
    "coordinates",
    "cropped",
    "distances",
    "distances_and_proportional",
    "draws_noise",
    "extended",
    "full_precision",
    "linear",
    "padded",
    "perceptron",
    "proportional",
]


def full_precision(x: torch.Tensor) -> torch.autocast:
    """Context without autocast on the device of `x`."""
    return torch.autocast(x.device.type, enabled=False)


@grid_constant
def coordinates(grid: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """(*grid, axes): every axis from 0 to 1, end points included."""
    axes = [_from_0_to_1(n, device) for n in grid]
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).to(dtype)


def _from_0_to_1(points: int, device: torch.device) -> torch.Tensor:
    if not torch.compiler.is_compiling():
        return torch.linspace(0, 1, points, dtype=torch.float64, device=device)
    # The same arithmetic as `torch.linspace`, which would fix the number of points in an exported program.
    index, step = torch.arange(points, dtype=torch.float64, device=device), 1 / (points - 1)
    return torch.where(index < points // 2, step * index, 1 - step * (points - 1 - index))


@grid_constant
def proportional(grid: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """(*grid, axes): the first axis from 0 to 1, the others at the same spacing, so that aspect ratios are kept."""
    axes = [torch.arange(n, dtype=torch.float64, device=device) / (grid[0] - 1) for n in grid]
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).to(dtype)


@grid_constant
def distances_and_proportional(
    grid: tuple[int, ...], reference: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """(*grid, reference^axes + axes): `distances`, then `proportional`."""
    return torch.cat((distances(grid, reference, dtype, device), proportional(grid, dtype, device)), dim=-1)


@grid_constant
def distances(grid: tuple[int, ...], reference: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """(*grid, reference^axes): Euclidean distance of every point to every point of a reference lattice."""
    points = coordinates(grid, torch.float64, device)
    lattice = coordinates((reference,) * len(grid), torch.float64, device).reshape(-1, len(grid))
    # Axis by axis: all difference vectors at once would need `axes` times the memory of the result.
    squared = sum((points[..., a, None] - lattice[:, a]).square() for a in range(len(grid)))
    return torch.as_tensor(squared).sqrt().to(dtype)


class Linear(nn.Linear):
    """nn.Linear, computed by `ops.affine.linear`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return affine.linear(x, self.weight, self.bias)


class LayerNorm(nn.LayerNorm):
    """nn.LayerNorm over the channels, computed by `ops.affine.layer_norm`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return affine.layer_norm(x, self.weight, self.bias, self.eps)


def linear(inputs: int, outputs: int, bias: bool = True) -> nn.Linear:
    """A linear layer with Transolver-sigma's initialisation: normal weights with standard deviation 0.02, zero bias."""
    layer = Linear(inputs, outputs, bias)
    nn.init.trunc_normal_(layer.weight, std=0.02)
    if bias:
        nn.init.zeros_(layer.bias)
    return layer


def perceptron(inputs: int, inner: int, outputs: int, layer: Callable[[int, int], nn.Module] = linear) -> nn.Sequential:
    """Linear, GELU, Linear on the channels of every point; `layer=Linear` has torch's default initialisation."""
    return nn.Sequential(layer(inputs, inner), nn.GELU(), layer(inner, outputs))


def extended(grid: Sequence[int], fractions: Sequence[float]) -> list[int]:
    """The number of points per axis, increased by these fractions."""
    return [points + round(fraction * points) for points, fraction in zip(grid, fractions, strict=True)]


def padded(x: torch.Tensor, grid: Sequence[int]) -> torch.Tensor:
    """(B, *smaller, C) -> (B, *grid, C), zero-padded at the high end of every axis."""
    missing = [points - size for points, size in zip(grid, x.shape[1:-1], strict=True)]
    return F.pad(x, [0, 0, *(cells for more in reversed(missing) for cells in (0, more))]) if any(missing) else x


def cropped(x: torch.Tensor, grid: Sequence[int]) -> torch.Tensor:
    """(B, *larger, C) -> (B, *grid, C): the low end of every axis."""
    for axis, points in enumerate(grid, start=1):
        x = x.narrow(axis, 0, points)
    return x


class DrawsNoise(nn.Module):
    """Base class of modules other than dropout that draw random numbers during training."""


def draws_noise(model: nn.Module) -> bool:
    """Whether a module other than dropout draws random numbers during training."""
    return any(isinstance(part, DrawsNoise) for part in model.modules())


class Convolution(nn.Module):
    """A dense convolution, channels last, that keeps the grid; torch's default initialisation.

    `outputs` defaults to `channels`.
    """

    def __init__(
        self, channels: int, kernel: int, padding: Sequence[str], outputs: int | None = None, bias: bool = True
    ) -> None:
        super().__init__()
        self.padding = tuple(padding)
        outputs = channels if outputs is None else outputs
        shape = (kernel,) * len(self.padding)
        reach = 1 / math.sqrt(channels * math.prod(shape))
        self.weight = nn.Parameter(torch.empty(outputs, channels, *shape).uniform_(-reach, reach))
        self.bias = nn.Parameter(torch.empty(outputs).uniform_(-reach, reach)) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        reach = self.weight.shape[-1] // 2
        wrapped = [reach if end == "circular" else 0 for end in self.padding]
        x = wrap(x, wrapped).movedim(-1, 1)
        convolve = (F.conv1d, F.conv2d, F.conv3d)[len(wrapped) - 1]
        return convolve(x, self.weight, self.bias, padding=[reach - cells for cells in wrapped]).movedim(1, -1)


class DepthwiseConvolution(nn.Module):
    """One kernel per channel, with bias; torch's default initialisation, U(-1, 1) / sqrt(kernel points)."""

    def __init__(self, channels: int, kernel: int, padding: Sequence[str]) -> None:
        super().__init__()
        self.padding = tuple(padding)
        shape = (kernel,) * len(self.padding)
        reach = 1 / math.sqrt(math.prod(shape))
        self.weight = nn.Parameter(torch.empty(channels, 1, *shape).uniform_(-reach, reach))
        self.bias = nn.Parameter(torch.empty(channels).uniform_(-reach, reach))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return depthwise_convolution(x, self.weight, self.bias, self.padding)


class TimeEmbedding(nn.Module):
    """(B,) or (B, scalars), the time first -> (B, width): sinusoidal features of each scalar, concatenated, then an
    MLP."""

    LONGEST_PERIOD = 1e4

    def __init__(self, width: int, scalars: int = 1) -> None:
        super().__init__()
        self.width, self.scalars = width, scalars
        self.mlp = nn.Sequential(linear(scalars * width, width), nn.SiLU(), linear(width, width))

    def forward(self, time: torch.Tensor) -> torch.Tensor:
        half = self.width // 2
        own = next(self.mlp.parameters()).dtype
        # Angles in float32 at least: bf16 would round a time of 1000 to the nearest 8.
        wide = torch.promote_types(torch.promote_types(time.dtype, own), torch.float32)
        steps = torch.arange(half, device=time.device, dtype=wide) / half
        # Not len(time), which would fix the batch size of an exported model.
        angles = time.to(wide).reshape(-1, self.scalars, 1) * self.LONGEST_PERIOD**-steps
        out: torch.Tensor = self.mlp(torch.cat((angles.cos(), angles.sin()), dim=-1).flatten(1).to(own))
        return out
