"""The entry of a block: local context by a depthwise convolution, its residual, and the norms of the branches.

H' = H + conv(H),      y_i = LN_i(H'_i),      H' = [H'_1, H'_2, ...] in equal groups of channels
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sigmasolver.ops import fused
from sigmasolver.ops.affine import Affine, layer_norm
from sigmasolver.ops.convolution import LONGEST, depthwise_residual
from sigmasolver.ops.stream import whole

__all__ = ["context_norms"]


def context_norms(
    H: torch.Tensor,
    rest: torch.Tensor | None,
    convolution: Affine,
    padding: Sequence[str],
    norms: Sequence[Affine],
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor | None, list[torch.Tensor]]:
    """`H` (B, *grid, C) and its rest (`ops.stream`) -> H', its rest, and one normed tensor (B, *grid, C / groups) for
    each norm."""
    small = convolution[0].shape[-1] <= LONGEST and H.shape[-1] // len(norms) <= fused.WIDEST
    if fused.usable(H) and small and len(norms) <= 2:
        from sigmasolver.ops.fused.context import context_norms as twin

        return twin(H, rest, convolution, padding, norms, eps)
    H = depthwise_residual(whole(H, rest), *convolution, padding)
    shares = H.chunk(len(norms), dim=-1)
    return H, None, [layer_norm(share, *norm, eps) for share, norm in zip(shares, norms, strict=True)]
