"""The physical operator: Slice-Residual Physics-Attention and its two relatives (sec:method-srpa).

    Y --+-- depthwise 5^d, pointwise --> R --> P = softmax((R W_s + b_s) / tau) --+-------------------+
        |                                                                         |                   |
        +-- depthwise 5^d, pointwise --> F ------------------------> Z = D^-1 P^T F --> update --> O = P Z+ --> Proj_o

Three updates of the slice states (eq:appendix-identity-interaction), with Delta = A Z W_v and
A = softmax(Z W_q (Z W_k)^T / sqrt(D)):
    residual  Z + gamma Delta   (SRPA; gamma starts at zero)
    replace   Delta             (vanilla Physics-Attention)
    keep      Z                 (no slice attention)

`routing`, `update` and `update.attention` are sub-modules so that a forward hook can watch P, Z and Delta.
Letters: B batch, H heads, N points, M slices, D head width, C channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import nn

from sigmasolver.models.layers import DepthwiseConvolution, Linear, linear, split_heads, watched
from sigmasolver.ops import fused
from sigmasolver.ops.convolution import depthwise_pair
from sigmasolver.ops.slices import SliceMap, attention_matrix, deslice, routing, slice_states

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
        """The temperatures that are used."""
        return self.temperature.clamp(self.COLDEST, self.HOTTEST)


class SliceAttention(nn.Module):
    """Z -> Delta = A Z W_v; queries, keys and values have no bias and share their matrices across heads."""

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
        # Written out rather than through the fused attention call: M is small, and forward-mode derivatives work.
        return self.dropout(self.weights(Z_BHMD)) @ self.value(Z_BHMD)


class SliceUpdate(nn.Module):
    """Z -> Z+ by one of `UPDATES`. gamma has shape (1,): sharded training cannot hold a parameter without an axis."""

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
        return delta_BHMD if self.kind == "replace" else Z_BHMD + self.gamma * delta_BHMD

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What there is of W_q, W_k, W_v, gamma."""
        if self.kind == "keep":
            return ()
        maps = (self.attention.query.weight, self.attention.key.weight, self.attention.value.weight)
        return (*maps, self.gamma) if self.kind == "residual" else maps


class SliceOperator(nn.Module):
    """Routed points to slices, the update, back to points, output projection; how R and F are made is for others."""

    def _build(self, width: int, heads: int, slices: int, update: str, dropout: float) -> None:
        """Made after the paths of R and F, so that a seed gives the same weights as ever."""
        self.heads = heads
        self.routing = Routing(width // heads, heads, slices)
        self.update = SliceUpdate(update, width // heads, dropout)
        self.project = linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def attend(self, R: torch.Tensor, F: torch.Tensor) -> torch.Tensor:
        """R and F (B, *grid, C) -> (B, *grid, C)."""
        if fused.usable(R) and self._plain_enough(R):
            return self._fused(R, F)
        P_BHNM = self.routing(split_heads(R, self.heads))
        Z_BHMD = slice_states(P_BHNM, split_heads(F, self.heads))
        O = deslice(P_BHNM, self.update(Z_BHMD)).transpose(1, 2).reshape(R.shape)
        return self.dropout(self.project(O))

    def _plain_enough(self, R: torch.Tensor) -> bool:
        """Whoever watches a part needs its tensors stored, which the fused twin never does; nor does it drop out."""
        from sigmasolver.ops.fused.slices import fits

        dropping = self.training and self.dropout.p > 0
        sizes = R.shape[-1] <= fused.WIDEST and fits(R, self.heads, self.routing.project.out_features)
        return sizes and not dropping and not watched(*self.children())

    def _fused(self, R: torch.Tensor, F: torch.Tensor) -> torch.Tensor:
        from sigmasolver.ops.fused.slices import slice_attention

        project = self.routing.project
        limits = self.routing.COLDEST, self.routing.HOTTEST
        route = SliceMap(project.weight, project.bias, self.routing.temperature, limits)
        out = slice_attention(
            R.flatten(1, -2), F.flatten(1, -2), route, self.update.tensors(), (self.project.weight, self.project.bias)
        )
        return out.view(R.shape)


class PhysicalOperator(SliceOperator):
    """`(B, *grid, width)` -> the same shape, on grids of as many axes as `padding` names."""

    KERNEL = 5

    def __init__(
        self,
        width: int,
        heads: int,
        slices: int,
        padding: Sequence[str],
        update: str = "residual",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.routing_path = self._path(width, padding)
        self.feature_path = self._path(width, padding)
        self._build(width, heads, slices, update, dropout)

    def _path(self, width: int, padding: Sequence[str]) -> nn.Sequential:
        # The pointwise map is a convolution of kernel size one and starts as torch starts those.
        return nn.Sequential(DepthwiseConvolution(width, self.KERNEL, padding), Linear(width, width))

    def forward(self, Y: torch.Tensor) -> torch.Tensor:
        return self.attend(*self._paths(Y))

    def _paths(self, Y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """R and F (B, *grid, C): two convolutions of one input, each followed by its pointwise map."""
        if watched(self.routing_path, self.feature_path):
            return self.routing_path(Y), self.feature_path(Y)
        routing, feature = (cast(DepthwiseConvolution, path[0]) for path in (self.routing_path, self.feature_path))
        R, F = depthwise_pair(Y, (routing.weight, routing.bias), (feature.weight, feature.bias), routing.padding)
        return self.routing_path[1](R), self.feature_path[1](F)
