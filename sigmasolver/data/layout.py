"""What the axes and channels of a trajectory mean."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

__all__ = ["Layout", "shape_text"]


@dataclass(frozen=True)
class Layout:
    """What the axes and channels of a trajectory `(frames, *grid, fields)` mean."""

    fields: tuple[str, ...]
    units: tuple[str, ...]
    boundary: tuple[str, ...]
    """How each spatial axis ends: "periodic", "wall" or "open"."""
    coordinates: tuple[np.ndarray, ...]
    """One increasing array per spatial axis (for staggered fields: of the cell centres)."""
    times: np.ndarray


def shape_text(lengths: Iterable[int]) -> str:
    """Lengths of axes as a person reads them: "64 × 64"."""
    return " × ".join(map(str, lengths))
