"""The readout: every point of the stream to its fields (app:encoding-recomposition).

u = LN(H) W^T + b
"""

from __future__ import annotations

import torch

from sigmasolver.ops import fused
from sigmasolver.ops.affine import Affine, layer_norm, linear

__all__ = ["readout"]

MOST_FIELDS = 8
"""That the fused twin sums one by one; more are a matrix product's work."""


def readout(H: torch.Tensor, norm: Affine, out: Affine, eps: float) -> torch.Tensor:
    """H (..., C) -> (..., q); `out` is (q, C), all in one type."""
    fields, C = out[0].shape
    if fused.usable(H) and fields <= MOST_FIELDS and C <= fused.WIDEST:
        from sigmasolver.ops.fused.readout import readout as twin

        return twin(H, norm, out, eps)
    return linear(layer_norm(H, *norm, eps), *out)
