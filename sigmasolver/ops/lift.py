"""The lift: fields and positions of every point to the channels of the stream (app:encoding-recomposition).

H = GELU([positions, x] W1^T + b1) W2^T + b2 + offset (+ shift)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch
from torch import nn

from sigmasolver.ops.dispatch import choose, splits_stream
from sigmasolver.ops.fused.tuning import MOST_CHANNELS, MOST_LIFTED_FIELDS
from sigmasolver.ops.modules import affine_of
from sigmasolver.ops.stream import Residual, merged

__all__ = ["lift"]


def lift(
    x: torch.Tensor,
    positions: torch.Tensor,
    perceptron: nn.Sequential,
    offset: torch.Tensor,
    shift: torch.Tensor | None = None,
    blocks: Iterable[nn.Module] = (),
) -> Residual:
    """x (B, *grid, q) and positions (*grid, P), the same for every sample -> the stream (B, *grid, C) for `blocks`.

    `perceptron` takes the positions, then the fields: Linear (I, P + q), GELU, Linear (C, I). `offset` is (C,); `shift`
    is added to the stream of every sample, which then is one tensor.
    """
    first, second = (cast(nn.Linear, perceptron[place]) for place in (0, 2))
    fused = choose(
        "lift",
        x,
        limits=(
            ("width", second.out_features, MOST_CHANNELS),
            ("inner width", second.in_features, 2 * MOST_CHANNELS),
            ("number of fields", x.shape[-1], MOST_LIFTED_FIELDS),
        ),
        unless={"the positions require a gradient": positions.requires_grad},
        parts={"the lift": perceptron},
        products=True,
    )
    H: Residual
    if fused:
        two_parts = shift is None and splits_stream(x, blocks)
        H = fused.lift(x, positions, affine_of(first), affine_of(second), offset, two_parts)
    else:
        H = perceptron(torch.cat((positions.expand(x.shape[0], *positions.shape), x), dim=-1)) + offset
    return H if shift is None else merged(H) + shift
