"""The residual stream between the blocks of a solver: one tensor, or two bf16 parts.

    H = main + low        main: H rounded to bf16        low: the remainder, rounded to bf16

Under autocast the fused operations hand the stream on in two parts. Forward it then has sixteen bits of fraction, while
its gradient, which autograd makes in the type of `main`, and all that is saved for the backward pass take half of
float32's bytes. No gradient goes through `low`: it moves with `main`, so the gradient of `main` is that of H.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

__all__ = ["LOW_PRECISION", "Residual", "Stream", "StreamBlock", "merged", "split", "stream_of"]

LOW_PRECISION = torch.bfloat16


class Stream(NamedTuple):
    """The residual stream in two parts of one shape."""

    main: torch.Tensor
    low: torch.Tensor


Residual = torch.Tensor | Stream
"""The residual stream in either form."""


class StreamBlock(nn.Module):
    """A block that takes the residual stream in either form; any other block is given one tensor."""


def merged(H: Residual) -> torch.Tensor:
    """The stream as one tensor."""
    return H.main.float() + H.low if isinstance(H, Stream) else H


def split(H: Residual) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The main part, and the low part of a stream that has one."""
    return (H.main, H.low) if isinstance(H, Stream) else (H, None)


def stream_of(main: torch.Tensor, low: torch.Tensor | None) -> Residual:
    """The inverse of `split`."""
    return main if low is None else Stream(main, low)
