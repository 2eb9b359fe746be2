"""Protocols of the modules that operations accept.

The plain form of an operation calls its modules, so that hooks see every tensor; the fused form reads their parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
from torch import nn

__all__ = [
    "EPSILON",
    "Affine",
    "DepthwiseModule",
    "MixingModule",
    "Part",
    "RoutingModule",
    "SliceMap",
    "UpdateModule",
    "affine_of",
]

Affine = tuple[torch.Tensor, torch.Tensor]
"""Weight and bias."""
EPSILON = 1e-5
"""Stabiliser added to the slice mass; because of it a constant field is not exactly preserved."""


class SliceMap(NamedTuple):
    """Parameters of the routing from points to slices, in the layout in which they are stored."""

    weight: torch.Tensor
    """(M, D), shared by the heads."""
    bias: torch.Tensor
    """(M,)"""
    temperature: torch.Tensor
    """(H,)"""
    limits: tuple[float, float]
    """Range to which temperatures are clipped."""


def affine_of(layer: nn.Linear | nn.LayerNorm) -> Affine:
    return layer.weight, layer.bias


class Part(Protocol):
    """A module on which hooks can be registered."""

    def modules(self) -> Iterator[nn.Module]: ...


class DepthwiseModule(Part, Protocol):
    """A depthwise convolution on channels-last grids: weight (C, 1, *kernel), bias (C,), padding by axis."""

    @property
    def weight(self) -> torch.Tensor: ...
    @property
    def bias(self) -> torch.Tensor: ...
    @property
    def padding(self) -> tuple[str, ...]: ...
    def __call__(self, x: torch.Tensor, /) -> torch.Tensor: ...


class MixingModule(Part, Protocol):
    """SwiGLU over all channels, or over groups of channels."""

    @property
    def maps(self) -> tuple[Affine, Affine] | None:
        """Gate and up projection, then down projection; None where each group of channels has its own."""

    def __call__(self, H: torch.Tensor, /) -> torch.Tensor: ...


class RoutingModule(Part, Protocol):
    """R (B, H, N, D) -> P (B, H, N, M)."""

    @property
    def map(self) -> SliceMap: ...
    def __call__(self, R_BHND: torch.Tensor, /) -> torch.Tensor: ...


class UpdateModule(Part, Protocol):
    """Z (B, H, M, D) -> Z+."""

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Empty (keep), W_q W_k W_v (replace), or these and gamma (residual)."""

    def __call__(self, Z_BHMD: torch.Tensor, /) -> torch.Tensor: ...
