"""LinearNO (Hu et al., 2026): linear attention between points, without attention between slices.

    Y --> U --+-- Q = softmax over slices of U W_q / tau_q --+
              +-- K = softmax over points of U W_k / tau_k --+--> O = Q (K^T V) --> out
              +-- V = U W_v ---------------------------------+

Every column of K sums to one over the points, so K^T V are weighted means without a normalisation, and every row of Q
sums to one, so a constant V passes unchanged. W_q, W_k and W_v have no bias and are shared by the heads. To save passes
over large tensors, temperatures divide the matrices, not the logits, K is stored with the points last, along which it
is normalised, and K^T V is computed as (K^T U) W_v, a map of M rows instead of N.

The published code has two forms for grids:
    local    U a dense 3^d convolution; temperatures clip(tau, 0.01, 1) per head; out = Linear, GELU, Linear  (Darcy)
    plain    U a linear map; no temperatures; out = Linear                                                    (NS2D)
The published sizes of the two tasks correspond to these forms, so each form is a model of its own.

Letters: B batch, H heads, N points, M slices, D head width, d axes.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from sigmasolver.models.baselines.attention_solver import attention_solver
from sigmasolver.models.config import SolverConfig
from sigmasolver.models.layers import Convolution, linear, perceptron
from sigmasolver.models.solver import Solver
from sigmasolver.ops.slices import split_heads
from sigmasolver.ops.softmax import softmax

__all__ = ["LinearAttention", "linearno"]


class Temperature(nn.Module):
    """A weight (M, D) -> (H, M, D): divided by a learned temperature per head."""

    COLDEST, HOTTEST, START = 0.01, 1.0, 0.5

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.full((heads,), self.START))

    def forward(self, weight_MD: torch.Tensor) -> torch.Tensor:
        return weight_MD / self.value.clamp(self.COLDEST, self.HOTTEST)[:, None, None]


class LinearAttention(nn.Module):
    """`(B, *grid, width)` -> the same shape.

    Initialisation: Kaiming normal with zero bias for the convolution, all else as in Transolver-sigma.
    """

    KERNEL = 3

    def __init__(self, config: SolverConfig, local: bool = True) -> None:
        super().__init__()
        self.heads, width, head_width = config.heads, config.width, config.width // config.heads
        self.embed = self._convolution(config) if local else linear(width, width)
        self.query = linear(head_width, config.slices, bias=False)
        self.key = linear(head_width, config.slices, bias=False)
        self.value = linear(head_width, head_width, bias=False)
        self.query_temperature = Temperature(self.heads) if local else nn.Identity()
        self.key_temperature = Temperature(self.heads) if local else nn.Identity()
        self.project = perceptron(width, width, width) if local else linear(width, width)
        self.dropout = nn.Dropout(config.options.dropout)

    def _convolution(self, config: SolverConfig) -> Convolution:
        convolution = Convolution(config.width, self.KERNEL, config.padding)
        nn.init.kaiming_normal_(convolution.weight)
        assert convolution.bias is not None
        nn.init.zeros_(convolution.bias)
        return convolution

    def forward(self, Y: torch.Tensor) -> torch.Tensor:
        U_BHND = split_heads(self.embed(Y), self.heads).contiguous()  # one copy instead of one per product
        Wq_HMD, Wk_HMD = (
            temperature(layer.weight).expand(self.heads, -1, -1)
            for temperature, layer in ((self.query_temperature, self.query), (self.key_temperature, self.key))
        )
        Q_BHNM = softmax(U_BHND @ Wq_HMD.mT)
        K_BHMN = softmax(Wk_HMD @ U_BHND.mT)
        O_BHND = Q_BHNM @ self.value(K_BHMN @ U_BHND)
        out: torch.Tensor = self.dropout(self.project(O_BHND.transpose(1, 2).reshape(Y.shape)))
        return out


def linearno(config: SolverConfig, local: bool = True) -> Solver:
    """LinearNO in its local or plain form; `modes` is ignored."""
    return attention_solver(partial(LinearAttention, local=local), config)
