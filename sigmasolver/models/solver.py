"""The solver: lift, blocks, readout (sec:method-decomposition, app:encoding-recomposition).

fields ---+
          +-- concat -> Linear, GELU, Linear -> + offset (+ time) -> block x depth -> LN -> Linear -> fields
positions-+

`GridModel` is the base class that it shares with the baselines: sizes, positions, time embedding, input checks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from sigmasolver.models.config import SolverConfig, check_grid
from sigmasolver.models.layers import (
    LayerNorm,
    TimeEmbedding,
    coordinates,
    distances,
    distances_and_proportional,
    linear,
    perceptron,
    proportional,
)
from sigmasolver.ops.lift import lift
from sigmasolver.ops.readout import readout

__all__ = ["GridModel", "Solver", "with_points"]


class GridModel(nn.Module):
    """`(B, *grid, in_channels)` -> `(B, *grid, out_channels)`; the base class of all models.

    A subclass sets `time` to its time embedding or to None, and calls `check` first in its `forward`.
    """

    time: TimeEmbedding | None

    def __init__(self, config: SolverConfig) -> None:
        super().__init__()
        self.config = config

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    def points(self, x: torch.Tensor) -> torch.Tensor:
        """The position features of the grid: (*grid, position channels)."""
        grid, kind = tuple(x.shape[1:-1]), self.config.options.positions
        if kind == "coordinates":
            return coordinates(grid, x.dtype, x.device)
        if kind == "proportional":
            return proportional(grid, x.dtype, x.device)
        if kind == "distances":
            return distances(grid, self.config.lattice, x.dtype, x.device)
        return distances_and_proportional(grid, self.config.lattice, x.dtype, x.device)

    def embedded(self, time: torch.Tensor | None) -> torch.Tensor | None:
        """The time embedding, broadcastable over the grid: (B, 1, ..., width); None if the model has none."""
        if self.time is None or time is None:
            return None
        embedding: torch.Tensor = self.time(time)
        return embedding.reshape(embedding.shape[0], *(1,) * self.config.axes, -1)

    def with_time(self, H: torch.Tensor, time: torch.Tensor | None) -> torch.Tensor:
        """H (B, *grid, width) plus the time embedding, if any."""
        embedded = self.embedded(time)
        return H if embedded is None else H + embedded

    def check(self, x: torch.Tensor, time: torch.Tensor | None) -> None:
        """Raise a ValueError if the model cannot process this input."""
        config = self.config
        if x.dtype != self.dtype and not torch.is_autocast_enabled(x.device.type):
            raise ValueError(f"Input has dtype {x.dtype}, but this solver has {self.dtype}; convert one of them.")
        if x.ndim != config.axes + 2:
            raise ValueError(
                f"Input has shape {tuple(x.shape)}; expected (batch, {config.axes} grid axes, "
                f"{config.in_channels} channels)."
            )
        if x.shape[-1] != config.in_channels:
            raise ValueError(f"Input has {x.shape[-1]} channels in its last axis; expected {config.in_channels}.")
        check_grid(tuple(x.shape[1:-1]), config.padding)
        numbers = "one number" if config.scalars == 1 else f"{config.scalars} numbers"
        if self.time is not None and time is None:
            raise ValueError(f"This solver has a time embedding; pass `time`, {numbers} per sample.")
        if self.time is None and time is not None:
            raise ValueError("This solver has no time embedding; omit `time` or build it with time_embedding=True.")
        allowed = ((x.shape[0], config.scalars), (x.shape[0],))[: 2 if config.scalars == 1 else 1]
        if time is not None and time.shape not in allowed:
            raise ValueError(
                f"time has shape {tuple(time.shape)}; expected {numbers} for each of {x.shape[0]} samples."
            )
        if config.options.check_input:
            _refuse_non_finite(x)


class Solver(GridModel):
    """`(B, *grid, in_channels)` -> `(B, *grid, out_channels)` for one, two or three axes and any grid.

    `block(config)` builds one block, `(B, *grid, width)` -> the same shape, and is called `depth` times: `Block` with a
    row of `VARIANTS` for Transolver-sigma, another block for baselines with the same lift and readout.

    Initialisation: channel-mixing matrices normal with standard deviation 0.02 (complex ones: each part), biases zero;
    depthwise and pointwise convolutions and their biases uniform in +-1/sqrt(fan_in), torch's default; LayerNorm one
    and zero; temperatures 0.5; gamma zero; offset uniform in [0, 1/width).
    """

    def __init__(self, block: Callable[[SolverConfig], nn.Module], config: SolverConfig) -> None:
        super().__init__(config)
        width = config.width
        self.lift = perceptron(config.position_channels + config.in_channels, 2 * width, width)
        self.offset = nn.Parameter(torch.rand(width).div_(width))
        self.time = TimeEmbedding(width, config.scalars) if config.scalars else None
        self.blocks = nn.ModuleList(block(config) for _ in range(config.depth))
        self.norm = LayerNorm(width)
        self.readout = linear(width, config.out_channels)

    def forward(self, x: torch.Tensor, time: torch.Tensor | None = None) -> torch.Tensor:
        """`time`, for solvers with a time embedding: (B,), or (B, n) with conditions after the time."""
        self.check(x, time)
        H = lift(x, self.points(x), self.lift, self.offset, self.embedded(time), self.blocks)
        for block in self.blocks:
            H = block(H)
        return readout(H, self.norm, self.readout)


def with_points(x: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
    """Concatenate positions (*grid, P) and fields (B, *grid, q) to (B, *grid, P + q)."""
    return torch.cat((points.expand(x.shape[0], *points.shape), x), dim=-1)


def _refuse_non_finite(x: torch.Tensor) -> None:
    bad = ~torch.isfinite(x)
    if bad.any():
        sample, *point, channel = bad.nonzero()[0].tolist()
        raise ValueError(
            f"Input has {int(bad.sum())} NaN or infinite values, the first in sample {sample}, channel {channel}, "
            f"at grid point {tuple(point)}; clean the data first."
        )
