"""The residual stream between the blocks of a solver: one tensor, or two bf16 parts.

    H = main + low        main: H rounded to bf16        low: the remainder, rounded to bf16

Under autocast the fused operations pass the stream on in two parts. The forward pass then has a 16-bit mantissa, while
the gradient, which autograd computes in the dtype of `main`, and everything saved for backward take half the bytes of
float32. No gradient flows through `low`: it moves with `main`, so the gradient of `main` is that of H.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

__all__ = ["LOW_PRECISION", "Residual", "Stream", "StreamBlock", "merged", "split", "stream_of"]

LOW_PRECISION = torch.bfloat16


class Stream(NamedTuple):
    """The residual stream as two parts of the same shape."""

    main: torch.Tensor
    low: torch.Tensor


Residual = torch.Tensor | Stream
"""The residual stream in either form."""


class StreamBlock(nn.Module):
    """A block that accepts the residual stream in either form; all other blocks receive a single tensor."""


def merged(H: Residual) -> torch.Tensor:
    """The stream as a single tensor."""
    return H.main.float() + H.low if isinstance(H, Stream) else H


def split(H: Residual) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The main part and the low part, which is None for a single tensor."""
    return (H.main, H.low) if isinstance(H, Stream) else (H, None)


def stream_of(main: torch.Tensor, low: torch.Tensor | None) -> Residual:
    """The inverse of `split`."""
    return main if low is None else Stream(main, low)
