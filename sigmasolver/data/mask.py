"""Solid parts of a domain: a given field that is 1 in the solid and 0 in the fluid, the same at all times.

What is measured or learned counts the fluid points of each sample alone. A mask without any solid changes no bit.
"""

from __future__ import annotations

import torch

__all__ = ["check_mask", "count_fluid", "fluid_of", "in_fluid", "zero_in_solid"]


def fluid_of(frames: torch.Tensor, channel: int) -> torch.Tensor:
    """(B, 1, *grid, 1) of bool from frames (B, T, *grid, q) whose field `channel` is the mask."""
    return frames[:, -1:, ..., channel : channel + 1] < 0.5


def zero_in_solid(frames: torch.Tensor, fluid: torch.Tensor) -> torch.Tensor:
    """The frames (B, T, *grid, q) with zeros in the solid."""
    return torch.where(fluid, frames, torch.zeros((), dtype=frames.dtype, device=frames.device))


def count_fluid(fluid: torch.Tensor) -> torch.Tensor:
    """(B,): how many points are fluid."""
    return fluid.flatten(1).sum(1)


def in_fluid(frames: torch.Tensor, fluid: torch.Tensor) -> torch.Tensor:
    """(T, points, q): the fluid points of one sample (T, *grid, q), `fluid` (*grid)."""
    return frames[:, fluid]


def check_mask(values: torch.Tensor, channel: int, name: str, trajectory: int) -> None:
    """Refuse a trajectory (T, *grid, q) whose mask is none: other values than 0 and 1, changing in time, no fluid."""
    mask = values[..., channel]
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise ValueError(f"The mask {name} of trajectory {trajectory} must contain only 0 (fluid) and 1 (solid).")
    if not bool((mask == mask[:1]).all()):
        raise ValueError(f"The mask {name} of trajectory {trajectory} changes in time; the solid must be stationary.")
    if bool((mask == 1).all()):
        raise ValueError(
            f"The mask {name} of trajectory {trajectory} is 1 everywhere, which leaves no fluid; invert it."
        )
