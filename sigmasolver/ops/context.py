"""The entry of a block: local context with a residual, and the layer norms of the branches (eq:block-context).

H' = H + conv(H),      y_i = LN_i(H'_i),      H' = [H'_1, H'_2, ...] in equal groups of channels
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from sigmasolver.ops.convolution import depthwise_residual
from sigmasolver.ops.dispatch import choose
from sigmasolver.ops.fused.tuning import MAX_CHANNELS, MAX_KERNEL_SIZE
from sigmasolver.ops.modules import DepthwiseModule, affine_of
from sigmasolver.ops.stream import Residual, merged, split

__all__ = ["add_context"]


def add_context(
    H: Residual, convolution: DepthwiseModule | None, norms: Sequence[nn.LayerNorm] | None
) -> tuple[Residual, list[torch.Tensor] | None]:
    """H (B, *grid, C) -> H' and, if there is one norm per group, the normalised groups (B, *grid, C / groups).

    Without a convolution the stream is returned unchanged. The groups are None where the caller has to normalise them.
    """
    if convolution is None:
        return merged(H), None
    main, _ = split(H)
    groups = norms or ()
    fused = choose(
        "context",
        main,
        limits=(
            ("kernel size", convolution.weight.shape[-1], MAX_KERNEL_SIZE),
            ("number of branches", len(groups), 2),
            ("width of a branch", main.shape[-1] // max(1, len(groups)), MAX_CHANNELS),
        ),
        unless={"a branch passes its channels on": not groups},
        parts={"the context": convolution} | {f"the norm of branch {i}": norm for i, norm in enumerate(groups)},
    )
    if fused:
        maps = [affine_of(norm) for norm in groups]
        weights = convolution.weight, convolution.bias
        return fused.add_context(H, weights, convolution.padding, maps, groups[0].eps)
    return depthwise_residual(merged(H), convolution), None
