"""Physics-Attention on structured grids (Wu et al., ICML 2024), shared by the baselines built on it.

    Y --+-- dense 3^d --> R --> P = softmax((R W_s + b_s) / clip(tau, 0.1, 5)) --+-------------------+
        |                                                                        |                   |
        +-- dense 3^d --> F -----------------------> Z = D^-1 P^T F --> update --> O = P Z+ --> Proj_o

D is the mass of each slice plus 1e-5, as published and in `ops.slices.slice_states`. The updates are those of
`models.slices` (tab:slice-attention-analysis): replace (Transolver), residual (SRPA), keep (no attention).

Letters: N points, M slices, D head width, d axes.
"""

from __future__ import annotations

import torch

from sigmasolver.models.config import SolverConfig
from sigmasolver.models.layers import Convolution
from sigmasolver.models.slices import UPDATES, SliceOperator

__all__ = ["PhysicsAttention"]


class PhysicsAttention(SliceOperator):
    """`(B, *grid, width)` -> the same shape.

    Initialisation: torch's default for convolutions, all else as in Transolver-sigma.
    """

    KERNEL = 3

    def __init__(self, config: SolverConfig, update: str = "replace") -> None:
        if update not in UPDATES:
            raise ValueError(f'update is "{update}"; choose from {", ".join(UPDATES)}.')
        routing, feature = (Convolution(config.width, self.KERNEL, config.padding) for _ in range(2))
        super().__init__((routing, feature), config.width, config.heads, config.slices, update, config.options.dropout)

    def forward(self, Y: torch.Tensor) -> torch.Tensor:
        return self.attend(self.routing_path(Y), self.feature_path(Y))
