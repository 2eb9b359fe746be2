"""Affine maps and layer normalisation of the channels of every point."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sigmasolver.ops import fused

__all__ = ["Affine", "layer_norm", "linear"]

Affine = tuple[torch.Tensor, torch.Tensor]
"""Weight and bias."""


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x W^T + b on the last axis."""
    if bias is not None and fused.usable(x):
        from sigmasolver.ops.fused.linear import linear as twin

        return twin(x, weight, bias)
    return F.linear(x, weight, bias)


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """Mean zero and deviation one on the last axis, then weight and bias."""
    if fused.usable(x):
        from sigmasolver.ops.fused.rows import layer_norm as twin

        return twin(x, weight, bias, eps)
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)
