"""The exit of a block: add the responses of its branches to the stream, then mix the channels (eq:block-recompose).

x = H + [s_1, s_2, ...],      out = x + SwiGLU(LN(x))
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from sigmasolver.ops.dispatch import choose
from sigmasolver.ops.fused.tuning import MAX_CHANNELS
from sigmasolver.ops.modules import MixingModule, affine_of
from sigmasolver.ops.stream import Residual, merged, split

__all__ = ["add_mixing", "joined"]


def joined(H: Residual, responses: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """The stream with one response added to each of its equal groups of channels; None leaves a group unchanged."""
    x = merged(H)
    if len(responses) == 1:
        return x if responses[0] is None else x + responses[0]
    groups = x.chunk(len(responses), dim=-1)
    return torch.cat([h if s is None else h + s for h, s in zip(groups, responses, strict=True)], dim=-1)


def add_mixing(
    H: Residual, responses: Sequence[torch.Tensor | None], norm: nn.LayerNorm, mixing: MixingModule
) -> Residual:
    """Add the responses to the stream, then compute x + mixing(norm(x))."""
    (main, _), maps = split(H), mixing.maps
    fused = choose(
        "mixing",
        main,
        limits=(("number of branches", len(responses), 2), ("width", main.shape[-1], MAX_CHANNELS)),
        unless={
            "a branch passes its channels on": any(s is None for s in responses),
            "groups of channels are mixed apart": maps is None,
        },
        parts={"the norm": norm, "the mixing": mixing},
        products=True,
    )
    if fused and maps is not None:
        return fused.add_mixing(H, responses, affine_of(norm), *maps, norm.eps)
    x = joined(H, responses)
    return x + mixing(norm(x))
