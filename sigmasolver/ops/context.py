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
    H: Residual, convolution: DepthwiseModule | None, norms: Sequence[nn.Module]
) -> tuple[Residual, list[torch.Tensor]]:
    """H (B, *grid, C) -> H' and its normalised groups, (B, *grid, C / groups) each, one for every norm.

    Without a convolution H' is H. A norm may be the identity.
    """
    if convolution is None:
        return _normalised(merged(H), norms)
    main, _ = split(H)
    layer_norms = [norm for norm in norms if isinstance(norm, nn.LayerNorm)]
    fused = choose(
        "context",
        main,
        limits=(
            ("kernel size", convolution.weight.shape[-1], MAX_KERNEL_SIZE),
            ("number of branches", len(norms), 2),
            ("width of a branch", main.shape[-1] // len(norms), MAX_CHANNELS),
        ),
        unless={"a branch passes its channels on": len(layer_norms) < len(norms)},
        parts={"the context": convolution} | {f"the norm of branch {i}": norm for i, norm in enumerate(norms)},
    )
    if fused:
        maps = [affine_of(norm) for norm in layer_norms]
        weights = convolution.weight, convolution.bias
        return fused.add_context(H, weights, convolution.padding, maps, layer_norms[0].eps)
    return _normalised(depthwise_residual(merged(H), convolution), norms)


def _normalised(H: torch.Tensor, norms: Sequence[nn.Module]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    groups = H.chunk(len(norms), dim=-1)
    return H, [norm(group) for norm, group in zip(norms, groups, strict=True)]
