"""Solid regions of a domain: an input field that is 1 in the solid and 0 in the fluid, constant in time.

Losses, statistics and metrics use only the fluid points of each sample. A mask without solid points does not change any
result.
"""

from __future__ import annotations

import torch

__all__ = ["check_mask", "count_fluid", "fluid_of", "in_fluid", "zero_in_solid"]


def fluid_of(frames: torch.Tensor, channel: int) -> torch.Tensor:
    """Boolean fluid mask (B, 1, *grid, 1) of frames (B, T, *grid, q) whose field `channel` is the solid mask."""
    return frames[:, -1:, ..., channel : channel + 1] < 0.5


def zero_in_solid(frames: torch.Tensor, fluid: torch.Tensor) -> torch.Tensor:
    """Set frames (B, T, *grid, q) to zero in the solid."""
    return torch.where(fluid, frames, torch.zeros((), dtype=frames.dtype, device=frames.device))


def count_fluid(fluid: torch.Tensor) -> torch.Tensor:
    """Number of fluid points per sample, (B,)."""
    return fluid.flatten(1).sum(1)


def in_fluid(frames: torch.Tensor, fluid: torch.Tensor) -> torch.Tensor:
    """Fluid points (T, points, q) of one sample (T, *grid, q), with `fluid` (*grid)."""
    return frames[:, fluid]


def check_mask(values: torch.Tensor, channel: int, name: str, trajectory: int) -> None:
    """Validate the mask of a trajectory (T, *grid, q): only 0 and 1, constant in time, some fluid."""
    mask = values[..., channel]
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise ValueError(f"The mask {name} of trajectory {trajectory} must contain only 0 (fluid) and 1 (solid).")
    if not bool((mask == mask[:1]).all()):
        raise ValueError(f"The mask {name} of trajectory {trajectory} changes in time; the solid must be stationary.")
    if bool((mask == 1).all()):
        raise ValueError(
            f"The mask {name} of trajectory {trajectory} is 1 everywhere, which leaves no fluid; invert it."
        )
