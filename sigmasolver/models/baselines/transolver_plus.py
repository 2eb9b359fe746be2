"""Transolver++ (Luo et al., ICML 2025): slices with a temperature per point, routed with Gumbel noise.

    Y --> X --+-- t = max(GELU(GELU(X W_1 + b_1) W_2 + b_2) + beta_h, 0.01) --+
              |                                                               |
              +-- s = X W_s + b_s --------------------------> P = softmax((s + g) / t) --+----------+
              |                                                                          |          |
              +---------------------------------------------------> Z = D^-1 P^T X --> A Z W_v --> O = P Z+ --> Proj_o

One projection X is used for routing and as features. t is a temperature per point and head, beta_h a scalar per head,
initialised to 0.5; W_1 (D -> M), W_2 (M -> 1), W_s and the bias-free query, key and value are shared by the heads.
The noise g = -log(-log(u + 1e-8) + 1e-8), u uniform in [0, 1), makes P a relaxed sample of one slice per point.

From the released code (point clouds, one aircraft data set): all of the above with a linear X, and noise in eval mode
too, so that its predictions differ from call to call. Its reductions over several GPUs are on a single one here.
Inferred: the grid form. Scripts for the standard benchmarks are not released; the local form has a dense 3^d
convolution as X, like Transolver on grids, and all sizes are Transolver's.

Letters: B batch, H heads, N points, M slices, D head width, d axes.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from sigmasolver.models.baselines.attention_solver import attention_solver
from sigmasolver.models.config import SolverConfig
from sigmasolver.models.layers import Convolution, DrawsNoise, linear, perceptron
from sigmasolver.models.slices import SliceUpdate
from sigmasolver.models.solver import Solver
from sigmasolver.ops.slices import deslice, slice_states, split_heads
from sigmasolver.ops.softmax import gumbel_softmax

__all__ = ["NOISES", "EideticAttention", "GumbelRouting", "transolver_plus"]

NOISES = ("training", "always")
"""When the routing is noisy; "always" is the released behaviour."""


class GumbelRouting(DrawsNoise):
    """X (B, H, N, D) -> P (B, H, N, M), whose rows sum to one."""

    COLDEST, START = 0.01, 0.5

    def __init__(self, head_width: int, heads: int, slices: int, noise: str) -> None:
        super().__init__()
        self.noise = noise
        self.project = linear(head_width, slices)
        self.cooling = nn.Sequential(*perceptron(head_width, slices, 1), nn.GELU())
        self.temperature = nn.Parameter(torch.full((heads,), self.START))

    def temperatures(self, X_BHND: torch.Tensor) -> torch.Tensor:
        """The clamped temperatures, (B, H, N, 1)."""
        out: torch.Tensor = (self.cooling(X_BHND) + self.temperature[:, None, None]).clamp(min=self.COLDEST)
        return out

    def forward(self, X_BHND: torch.Tensor) -> torch.Tensor:
        logits, uniform = self.project(X_BHND), None
        if self.training or self.noise == "always":
            # Drawn in float32 at least: eight bits of bf16 would truncate the tails of the distribution.
            uniform = torch.rand_like(logits, dtype=torch.promote_types(logits.dtype, torch.float32))
        return gumbel_softmax(logits, uniform, self.temperatures(X_BHND))


class EideticAttention(nn.Module):
    """`(B, *grid, width)` -> the same shape.

    Initialisation: torch's default for the convolution, all else as in Transolver-sigma.
    """

    KERNEL = 3

    def __init__(self, config: SolverConfig, local: bool = True, noise: str = "training") -> None:
        super().__init__()
        if noise not in NOISES:
            raise ValueError(f'noise is "{noise}"; choose from {", ".join(NOISES)}.')
        self.heads, width, dropout = config.heads, config.width, config.options.dropout
        self.embed = Convolution(width, self.KERNEL, config.padding) if local else linear(width, width)
        self.routing = GumbelRouting(width // self.heads, self.heads, config.slices, noise)
        self.update = SliceUpdate("replace", width // self.heads)
        self.project = linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, Y: torch.Tensor) -> torch.Tensor:
        X_BHND = split_heads(self.embed(Y), self.heads).contiguous()  # one copy instead of one per product
        P_BHNM = self.routing(X_BHND)
        O_BHND = deslice(P_BHNM, self.update(slice_states(P_BHNM, X_BHND)))
        out: torch.Tensor = self.dropout(self.project(O_BHND.transpose(1, 2).reshape(Y.shape)))
        return out


def transolver_plus(config: SolverConfig, local: bool = True, noise: str = "training") -> Solver:
    """Transolver++ with a convolution (`local`) or a linear map before the slices; `modes` is ignored."""
    return attention_solver(partial(EideticAttention, local=local, noise=noise), config)
