"""The solver: lift, blocks, readout (sec:method-decomposition, app:encoding-recomposition).

fields ---+
          +-- concat -> Linear, GELU, Linear -> + offset (+ time) -> block x depth -> LN -> Linear -> fields
positions-+
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from sigmasolver.models.config import SolverConfig
from sigmasolver.models.grid_model import GridModel
from sigmasolver.models.layers import LayerNorm, TimeEmbedding, linear, perceptron
from sigmasolver.ops.lift import lift
from sigmasolver.ops.readout import readout

__all__ = ["Solver"]


class Solver(GridModel):
    """`(B, *grid, in_channels)` -> `(B, *grid, out_channels)` for one, two or three axes and any grid.

    `block` makes one block, `(B, *grid, width)` -> the same shape; it is called `depth` times. A Transolver-sigma is
    made with `Block` and a row of the family, a baseline of the same frame with its own block.

    Weights at the start: every channel-mixing matrix normal with deviation 0.02 (complex ones: each part), biases
    zero; depthwise and pointwise convolutions uniform in +-1/sqrt(inputs per output) with their biases, as torch's
    convolutions do; LayerNorm one and zero; temperatures 0.5; gamma zero; offset uniform in [0, 1/width).
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
        """`time` is for solvers with an embedding: (B,), or (B, n) where conditions follow the time."""
        self.check(x, time)
        H = lift(x, self.points(x), self.lift, self.offset, self.embedded(time), self.blocks)
        for block in self.blocks:
            H = block(H)
        return readout(H, self.norm, self.readout)
