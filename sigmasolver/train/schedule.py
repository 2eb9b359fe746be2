"""The learning rate over a run: one cycle, a cosine up to the maximum and a cosine down to almost nothing.

    initial = max_lr / start_divisor,   final = initial / final_divisor,
    up over the first warmup * steps - 1 steps, then down to the last step.

A pure function of the step, so that a run resumes from its step counter alone, and one that works on a tensor, so that
a captured training step can compute its own rate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

__all__ = ["OneCycle"]


@dataclass(frozen=True)
class OneCycle:
    max_lr: float
    steps: int
    warmup: float = 0.3
    start_divisor: float = 25.0
    final_divisor: float = 1e4

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"A schedule of {self.steps} steps was asked for; train for at least one.")
        if not 0 < self.max_lr < math.inf:
            raise ValueError(f"The maximum learning rate is {self.max_lr}; it must be positive.")
        if not 0 <= self.warmup <= 1:
            raise ValueError(f"warmup is {self.warmup}; it is the fraction of steps before the maximum, from 0 to 1.")
        if self.start_divisor < 1 or self.final_divisor < 1:
            raise ValueError("start_divisor and final_divisor divide the maximum learning rate and must be at least 1.")

    def rate(self, step: torch.Tensor | int) -> torch.Tensor:
        """The learning rate of this step (counted from 0), float64, on the step's device."""
        now = torch.as_tensor(step, dtype=torch.float64)
        initial = self.max_lr / self.start_divisor
        final = initial / self.final_divisor
        top, last = self.warmup * self.steps - 1, self.steps - 1
        rising = _cosine(initial, self.max_lr, (now / top) if top > 0 else torch.ones_like(now))
        falling = _cosine(self.max_lr, final, (now - top) / max(last - top, 1e-12))
        return torch.where(now <= top, rising, falling)


def _cosine(start: float, end: float, fraction: torch.Tensor) -> torch.Tensor:
    return end + (start - end) / 2 * (1 + torch.cos(math.pi * fraction.clamp(0, 1)))
