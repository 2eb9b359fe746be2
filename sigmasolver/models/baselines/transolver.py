"""Transolver on structured grids (Wu et al., ICML 2024): blocks of Physics-Attention and an MLP.

    H --- + PhysicsAttention(LN(H)) --- + MLP(LN(H)) ---> H

The attention is `PhysicsAttention`, whose slice update is exchangeable: replace is Transolver, residual and keep are
the other rows of tab:slice-attention-analysis.
"""

from __future__ import annotations

from functools import partial

from sigmasolver.models.baselines.attention_solver import attention_solver
from sigmasolver.models.baselines.physics_attention import PhysicsAttention
from sigmasolver.models.config import SolverConfig
from sigmasolver.models.solver import Solver

__all__ = ["transolver"]


def transolver(config: SolverConfig, update: str = "replace") -> Solver:
    """Transolver with this slice update, one of `models.slices.UPDATES`; `modes` is ignored."""
    return attention_solver(partial(PhysicsAttention, update=update), config)
