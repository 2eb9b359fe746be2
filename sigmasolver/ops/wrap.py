"""Periodic padding of grids, for convolutions with wrap-around."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from sigmasolver.ops.dispatch import choose

__all__ = ["wrap"]


def wrap(x: torch.Tensor, cells: Sequence[int]) -> torch.Tensor:
    """(B, *grid, C) -> (B, *padded, C): pad both ends of each axis by `cells` points from its opposite end."""
    if not any(cells):
        return x
    # For a grid that is too small, the plain form raises an informative error.
    short = any(width > points for width, points in zip(cells, x.shape[1:-1], strict=True))
    if fused := choose("wrap", x, unless={"an axis is too short": short}):
        return fused.wrap(x, cells)
    padding = [width for width in reversed(cells) for _ in range(2)]
    return F.pad(x.movedim(-1, 1), padding, mode="circular").movedim(1, -1)
