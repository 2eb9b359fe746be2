"""The physical operator: Slice-Residual Physics-Attention and two alternative updates (sec:method-srpa).

    Y --+-- depthwise 5^d, pointwise --> R --> P = softmax((R W_s + b_s) / tau) --+-------------------+
        |                                                                         |                   |
        +-- depthwise 5^d, pointwise --> F ------------------------> Z = D^-1 P^T F --> update --> O = P Z+ --> Proj_o

Three updates of the slice states (eq:appendix-identity-interaction), with Delta = A Z W_v and
A = softmax(Z W_q (Z W_k)^T / sqrt(D)):
    residual  Z + gamma Delta   (SRPA; gamma starts at zero)
    replace   Delta             (vanilla Physics-Attention)
    keep      Z                 (no slice attention)

`routing`, `update` and `update.attention` are submodules, so that forward hooks can observe P, Z and Delta.
Letters: B batch, H heads, N points, M slices, D head width, C channels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from sigmasolver.models.layers import DepthwiseConvolution, Linear, linear
from sigmasolver.ops.convolution import separable_pair
from sigmasolver.ops.modules import SliceMap
from sigmasolver.ops.slices import attention_matrix, routing, slice_attention

__all__ = ["UPDATES", "PhysicalOperator", "Routing", "SliceAttention", "SliceOperator", "SliceUpdate"]

UPDATES = ("residual", "replace", "keep")


class Routing(nn.Module):
    """R (B, H, N, D) -> P (B, H, N, M); one affine map for all heads, one temperature for each."""

    COLDEST, HOTTEST, START = 0.1, 5.0, 0.5

    def __init__(self, head_width: int, heads: int, slices: int) -> None:
        super().__init__()
        self.project = linear(head_width, slices)
        self.temperature = nn.Parameter(torch.full((heads,), self.START))

    def forward(self, R_BHND: torch.Tensor) -> torch.Tensor:
        return routing(R_BHND, self.project.weight.mT, self.project.bias, self.clipped())

    def clipped(self) -> torch.Tensor:
        """The temperatures clamped to [COLDEST, HOTTEST], as used."""
        return self.temperature.clamp(self.COLDEST, self.HOTTEST)

    @property
    def map(self) -> SliceMap:
        """The parameters, with temperatures not yet clamped."""
        return SliceMap(self.project.weight, self.project.bias, self.temperature, (self.COLDEST, self.HOTTEST))


class SliceAttention(nn.Module):
    """Z -> Delta = A Z W_v; bias-free query, key and value matrices shared across heads."""

    def __init__(self, head_width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.query = linear(head_width, head_width, bias=False)
        self.key = linear(head_width, head_width, bias=False)
        self.value = linear(head_width, head_width, bias=False)
        self.dropout = nn.Dropout(dropout)

    def weights(self, Z_BHMD: torch.Tensor) -> torch.Tensor:
        """The attention matrix A (B, H, M, M) before dropout."""
        return attention_matrix(self.query(Z_BHMD), self.key(Z_BHMD))

    def forward(self, Z_BHMD: torch.Tensor) -> torch.Tensor:
        # Written out instead of scaled_dot_product_attention: M is small, and forward-mode AD must work.
        out: torch.Tensor = self.dropout(self.weights(Z_BHMD)) @ self.value(Z_BHMD)
        return out


class SliceUpdate(nn.Module):
    """Z -> Z+ by one of `UPDATES`. gamma has shape (1,): FSDP2 cannot shard a 0-d parameter."""

    def __init__(self, kind: str, head_width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.kind = kind
        if kind != "keep":
            self.attention = SliceAttention(head_width, dropout)
        if kind == "residual":
            self.gamma = nn.Parameter(torch.zeros(1))

    def forward(self, Z_BHMD: torch.Tensor) -> torch.Tensor:
        if self.kind == "keep":
            return Z_BHMD
        delta_BHMD = self.attention(Z_BHMD)
        out: torch.Tensor = delta_BHMD if self.kind == "replace" else Z_BHMD + self.gamma * delta_BHMD
        return out

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Those of W_q, W_k, W_v, gamma that the update has."""
        if self.kind == "keep":
            return ()
        maps = (self.attention.query.weight, self.attention.key.weight, self.attention.value.weight)
        return (*maps, self.gamma) if self.kind == "residual" else maps


class SliceOperator(nn.Module):
    """Slicing, slice update, deslicing, output projection; subclasses compute R and F.

    `paths` is created by the caller, before all other parameters: the order of random draws fixes the initial weights.
    """

    def __init__(
        self, paths: tuple[nn.Module, nn.Module], width: int, heads: int, slices: int, update: str, dropout: float
    ) -> None:
        super().__init__()
        self.heads = heads
        self.routing_path, self.feature_path = paths
        self.routing = Routing(width // heads, heads, slices)
        self.update = SliceUpdate(update, width // heads, dropout)
        self.project = linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def attend(self, R: torch.Tensor, F: torch.Tensor) -> torch.Tensor:
        """R and F (B, *grid, C) -> Proj_o(P update(D^-1 P^T F)), P = routing(R): (B, *grid, C)."""
        return slice_attention(R, F, self.routing, self.update, self.project, self.dropout)


class PhysicalOperator(SliceOperator):
    """`(B, *grid, width)` -> the same shape; `padding` names the padding of each grid axis."""

    KERNEL = 5
    routing_path: nn.Sequential
    feature_path: nn.Sequential

    def __init__(
        self,
        width: int,
        heads: int,
        slices: int,
        padding: Sequence[str],
        update: str = "residual",
        dropout: float = 0.0,
    ) -> None:
        paths = self._path(width, padding), self._path(width, padding)
        super().__init__(paths, width, heads, slices, update, dropout)

    def _path(self, width: int, padding: Sequence[str]) -> nn.Sequential:
        # Linear, not `linear`: initialised like a convolution of kernel size one.
        return nn.Sequential(DepthwiseConvolution(width, self.KERNEL, padding), Linear(width, width))

    def forward(self, Y: torch.Tensor) -> torch.Tensor:
        return self.attend(*separable_pair(Y, self.routing_path, self.feature_path))
