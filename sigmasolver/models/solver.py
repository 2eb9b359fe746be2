"""The solver: lift, blocks, readout (sec:method-decomposition, app:encoding-recomposition).

fields ---+
          +-- concat -> Linear, GELU, Linear -> + offset (+ time) -> block x depth -> LN -> Linear -> fields
positions-+
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from sigmasolver.models.config import SolverConfig, check_grid
from sigmasolver.models.layers import LayerNorm, TimeEmbedding, coordinates, distances, linear, perceptron
from sigmasolver.ops.lift import lift
from sigmasolver.ops.readout import readout

__all__ = ["Solver"]


class Solver(nn.Module):
    """`(B, *grid, in_channels)` -> `(B, *grid, out_channels)` for one, two or three axes and any grid.

    `block` makes one block, `(B, *grid, width)` -> the same shape; it is called `depth` times. A Transolver-sigma is
    made with `Block` and a row of the family, a baseline of the same frame with its own block.

    Weights at the start: every channel-mixing matrix normal with deviation 0.02 (complex ones: each part), biases
    zero; depthwise and pointwise convolutions uniform in +-1/sqrt(inputs per output) with their biases, as torch's
    convolutions do; LayerNorm one and zero; temperatures 0.5; gamma zero; offset uniform in [0, 1/width).
    """

    def __init__(self, block: Callable[[SolverConfig], nn.Module], config: SolverConfig) -> None:
        super().__init__()
        self.config = config
        width, options = config.width, config.options
        position_channels = config.lattice**config.axes if options.positions == "distances" else config.axes
        self.lift = perceptron(position_channels + config.in_channels, 2 * width, width)
        self.offset = nn.Parameter(torch.rand(width) / width)
        self.time = TimeEmbedding(width, config.scalars) if config.scalars else None
        self.blocks = nn.ModuleList(block(config) for _ in range(config.depth))
        self.norm = LayerNorm(width)
        self.readout = linear(width, config.out_channels)

    def forward(self, x: torch.Tensor, time: torch.Tensor | None = None) -> torch.Tensor:
        """`time` is for solvers with an embedding: (B,), or (B, n) where conditions follow the time."""
        self._check(x, time)
        H = lift(x, self._positions(x), self.lift, self.offset, self._embedded(time), self.blocks)
        for block in self.blocks:
            H = block(H)
        return readout(H, self.norm, self.readout)

    def _embedded(self, time: torch.Tensor | None) -> torch.Tensor | None:
        """(B, 1, ..., width), the same at every point."""
        if self.time is None or time is None:
            return None
        return self.time(time).reshape(len(time), *(1,) * self.config.axes, -1)

    def _positions(self, x: torch.Tensor) -> torch.Tensor:
        """(*grid, position channels)."""
        grid = tuple(x.shape[1:-1])
        if self.config.options.positions == "distances":
            return distances(grid, self.config.lattice, x.dtype, x.device)
        return coordinates(grid, x.dtype, x.device)

    def _check(self, x: torch.Tensor, time: torch.Tensor | None) -> None:
        config = self.config
        if x.dtype != self.offset.dtype and not torch.is_autocast_enabled(x.device.type):
            raise ValueError(f"Input is {x.dtype} and this solver is {self.offset.dtype}; convert one to the other.")
        if x.ndim != config.axes + 2:
            raise ValueError(
                f"Input has shape {tuple(x.shape)}; this solver takes (batch, {config.axes} grid axes, "
                f"{config.in_channels} channels)."
            )
        if x.shape[-1] != config.in_channels:
            raise ValueError(
                f"Input has {x.shape[-1]} channels in its last axis; this solver was built for {config.in_channels}."
            )
        check_grid(tuple(x.shape[1:-1]), config.padding)
        numbers = "one number" if config.scalars == 1 else f"{config.scalars} numbers"
        if self.time is not None and time is None:
            raise ValueError(f"This solver has a time embedding; pass `time`, {numbers} per sample.")
        if self.time is None and time is not None:
            raise ValueError(
                "This solver has no time embedding; leave `time` out or build it with time_embedding=True."
            )
        allowed = ((x.shape[0], config.scalars), (x.shape[0],))[: 2 if config.scalars == 1 else 1]
        if time is not None and time.shape not in allowed:
            raise ValueError(f"time has shape {tuple(time.shape)}; pass {numbers} for each of {x.shape[0]} samples.")
        if config.options.check_input:
            _refuse_non_finite(x)


def _refuse_non_finite(x: torch.Tensor) -> None:
    bad = ~torch.isfinite(x)
    if bad.any():
        sample, *point, channel = bad.nonzero()[0].tolist()
        raise ValueError(
            f"Input has {int(bad.sum())} NaN or infinite values, the first in sample {sample}, channel {channel}, "
            f"at grid point {tuple(point)}; clean the data before the model sees it."
        )
