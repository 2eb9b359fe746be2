"""The solver: lift, blocks, readout (sec:method-decomposition, app:encoding-recomposition).

fields ---+
          +-- concat -> Linear, GELU, Linear -> + offset (+ time) -> block x depth -> LN -> Linear -> fields
positions-+
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import nn

from sigmasolver.models.config import SolverConfig
from sigmasolver.models.grid_model import GridModel, with_points
from sigmasolver.models.layers import LayerNorm, TimeEmbedding, linear, perceptron, watched
from sigmasolver.ops.lift import lift
from sigmasolver.ops.readout import readout
from sigmasolver.ops.stream import NARROW, whole

__all__ = ["Solver"]


class Solver(GridModel):
    """`(B, *grid, in_channels)` -> `(B, *grid, out_channels)` for one, two or three axes and any grid.

    `block` makes one block, `(B, *grid, width)` -> the same shape; it is called `depth` times. A Transolver-sigma is
    made with `Block` and a row of the family, a baseline of the same frame with its own block. A block whose class says
    `takes_rest` is given both parts of a stream that is split (`ops.stream`), and gives both.

    Weights at the start: every channel-mixing matrix normal with deviation 0.02 (complex ones: each part), biases
    zero; depthwise and pointwise convolutions uniform in +-1/sqrt(inputs per output) with their biases, as torch's
    convolutions do; LayerNorm one and zero; temperatures 0.5; gamma zero; offset uniform in [0, 1/width).
    """

    def __init__(self, block: Callable[[SolverConfig], nn.Module], config: SolverConfig) -> None:
        super().__init__(config)
        width = config.width
        self.lift = perceptron(config.position_channels + config.in_channels, 2 * width, width)
        self.offset = nn.Parameter(torch.rand(width) / width)
        self.time = TimeEmbedding(width, config.scalars) if config.scalars else None
        self.blocks = nn.ModuleList(block(config) for _ in range(config.depth))
        self.norm = LayerNorm(width)
        self.readout = linear(width, config.out_channels)

    def forward(self, x: torch.Tensor, time: torch.Tensor | None = None) -> torch.Tensor:
        """`time` is for solvers with an embedding: (B,), or (B, n) where conditions follow the time."""
        self.check(x, time)
        H, rest = self._lifted(x)
        H = self.with_time(H, time)
        for block in self.blocks:
            H, rest = (block(H), None) if rest is None else block(H, rest)
        # The answer is read in the precision of the stream: eight bits of bf16 would be its error.
        with torch.autocast(x.device.type, enabled=False):
            if rest is None:
                H = H.to(self.offset.dtype)
            if watched(self.norm, self.readout):
                return self.readout(self.norm(whole(H, rest)))
            return readout(H, rest, self.norm.affine, (self.readout.weight, self.readout.bias), self.norm.eps)

    def _lifted(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The stream and, where all blocks take it, its rest."""
        if watched(self.lift):
            return self.lift(with_points(x, self.points(x))) + self.offset, None
        first, second = (cast(nn.Linear, self.lift[place]) for place in (0, 2))
        maps = (first.weight, first.bias), (second.weight, second.bias)
        return lift(x, self.points(x), *maps, self.offset, self._splits(x.device.type))

    def _splits(self, device: str) -> bool:
        """Whether the stream may pass through the blocks in two parts; a watcher is to see it whole."""
        narrow = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == NARROW
        taken = all(getattr(block, "takes_rest", False) for block in self.blocks)
        return narrow and taken and self.time is None and not watched(self.blocks)
