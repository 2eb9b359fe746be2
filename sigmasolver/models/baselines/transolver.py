"""Transolver on structured grids (Wu et al., ICML 2024): Physics-Attention, with its slice update as a part.

    Y --+-- dense 3^d --> R --> P = softmax((R W_s + b_s) / clip(tau, 0.1, 5)) --+-------------------+
        |                                                                        |                   |
        +-- dense 3^d --> F -----------------------> Z = D^-1 P^T F --> update --> O = P Z+ --> Proj_o

D is the mass of each slice plus 1e-5, as published: `ops.slices.slice_states` is the same definition. The updates are
those of `models.slices` (tab:slice-attention-analysis): replace (Transolver), residual (SRPA), keep (no attention).

Letters: B batch, H heads, N points, M slices, D head width, d axes.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from sigmasolver.models.baselines.frame import attention_solver
from sigmasolver.models.config import SolverConfig
from sigmasolver.models.layers import Convolution, linear, split_heads
from sigmasolver.models.slices import UPDATES, Routing, SliceUpdate
from sigmasolver.models.solver import Solver
from sigmasolver.ops.slices import deslice, slice_states

__all__ = ["PhysicsAttention", "transolver"]


class PhysicsAttention(nn.Module):
    """`(B, *grid, width)` -> the same shape. Convolutions start as torch's do, all other weights as in the family."""

    KERNEL = 3

    def __init__(self, config: SolverConfig, update: str = "replace") -> None:
        super().__init__()
        if update not in UPDATES:
            raise ValueError(f'update is "{update}"; choose from {", ".join(UPDATES)}.')
        self.heads, width, dropout = config.heads, config.width, config.options.dropout
        self.routing_path = Convolution(width, self.KERNEL, config.padding)
        self.feature_path = Convolution(width, self.KERNEL, config.padding)
        self.routing = Routing(width // self.heads, self.heads, config.slices)
        self.update = SliceUpdate(update, width // self.heads, dropout)
        self.project = linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, Y: torch.Tensor) -> torch.Tensor:
        P_BHNM = self.routing(split_heads(self.routing_path(Y), self.heads))
        Z_BHMD = slice_states(P_BHNM, split_heads(self.feature_path(Y), self.heads))
        O_BHND = deslice(P_BHNM, self.update(Z_BHMD))
        return self.dropout(self.project(O_BHND.transpose(1, 2).reshape(Y.shape)))


def transolver(config: SolverConfig, update: str = "replace") -> Solver:
    """Transolver with this slice update, one of `models.slices.UPDATES`; `modes` is not used."""
    return attention_solver(partial(PhysicsAttention, update=update), config)
