"""What the axes and channels of a trajectory mean."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

__all__ = ["Layout"]


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
