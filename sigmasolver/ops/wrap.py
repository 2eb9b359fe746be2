"""Periodic axes of a grid continued beyond both ends, for convolutions that go round."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from sigmasolver.ops.dispatch import choose

__all__ = ["wrap"]


def wrap(x: torch.Tensor, cells: Sequence[int]) -> torch.Tensor:
    """(B, *grid, C) -> (B, *larger, C): every axis with so many points more at both ends, taken from its other end."""
    if not any(cells):
        return x
    # The plain form says what is wrong with a grid that is too small.
    short = any(more > points for more, points in zip(cells, x.shape[1:-1], strict=True))
    if fused := choose("wrap", x, unless={"an axis is too short": short}):
        return fused.wrap(x, cells)
    ends = [more for more in reversed(cells) for _ in range(2)]
    return F.pad(x.movedim(-1, 1), ends, mode="circular").movedim(1, -1)
