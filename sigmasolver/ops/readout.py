"""The readout: every point of the stream to its fields (app:encoding-recomposition).

u = LN(H) W^T + b
"""

from __future__ import annotations

import torch

from sigmasolver.ops import fused
from sigmasolver.ops.affine import Affine, layer_norm, linear
from sigmasolver.ops.stream import whole

__all__ = ["readout"]

MOST_FIELDS = 8
"""That the fused twin sums one by one; more are a matrix product's work."""


def readout(H: torch.Tensor, rest: torch.Tensor | None, norm: Affine, out: Affine, eps: float) -> torch.Tensor:
    """H (..., C) with its rest (`ops.stream`) -> (..., q) in the type of the weights; `out` is (q, C)."""
    fields, C = out[0].shape
    if fused.usable(H) and fields <= MOST_FIELDS and C <= fused.WIDEST:
        from sigmasolver.ops.fused.readout import readout as twin

        return twin(H, rest, norm, out, eps)
    return linear(layer_norm(whole(H, rest), *norm, eps), *out)
