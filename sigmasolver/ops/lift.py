"""The lift: from the fields and position of each point to the channels of the residual stream
(app:encoding-recomposition).

H = GELU([positions, x] W1^T + b1) W2^T + b2 + offset (+ shift)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch
from torch import nn

from sigmasolver.ops.dispatch import choose, splits_stream
from sigmasolver.ops.fused.tuning import MAX_CHANNELS, MAX_LIFTED_FIELDS
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
    """x (B, *grid, q) and positions (*grid, P), shared by all samples -> the stream (B, *grid, C) for `blocks`.

    `perceptron` maps the concatenation of positions and fields: Linear (I, P + q), GELU, Linear (C, I). `offset` is
    (C,); `shift`, if any, is added to the stream, which then is a single tensor.
    """
    first, second = (cast(nn.Linear, perceptron[index]) for index in (0, 2))
    fused = choose(
        "lift",
        x,
        limits=(
            ("width", second.out_features, MAX_CHANNELS),
            ("inner width", second.in_features, 2 * MAX_CHANNELS),
            ("number of fields", x.shape[-1], MAX_LIFTED_FIELDS),
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
