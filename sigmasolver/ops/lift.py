"""The lift: fields and positions of every point to the channels of the stream (app:encoding-recomposition).

H = GELU([positions, x] W1^T + b1) W2^T + b2 + offset
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sigmasolver.ops import fused
from sigmasolver.ops.affine import Affine, linear

__all__ = ["lift"]

MOST_FIELDS = 64
"""That one program of the fused twin holds at once."""


def lift(
    x: torch.Tensor, positions: torch.Tensor, first: Affine, second: Affine, offset: torch.Tensor, split: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """x (B, *grid, q) and positions (*grid, P), the same for every sample -> (B, *grid, C) and what `ops.stream` says.

    `first` (I, P + q) takes the positions, then the fields; `second` is (C, I), `offset` (C,). With `split` the fused
    twin makes two tensors of the stream.
    """
    C, inner = second[0].shape
    held = C <= fused.WIDEST and inner <= 2 * fused.WIDEST and x.shape[-1] <= MOST_FIELDS
    if fused.quick(x) and held and not positions.requires_grad:
        from sigmasolver.ops.fused.lift import lift as twin

        return twin(x, positions, first, second, offset, split)
    both = torch.cat((positions.expand(x.shape[0], *positions.shape), x), dim=-1)
    return linear(F.gelu(linear(both, *first)), *second) + offset, None
