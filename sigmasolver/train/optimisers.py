"""Optimisers by name: AdamW, and those that users register; and the learning rate that they are given at every step.

One cycle, a cosine up to the maximum and a cosine down to almost nothing:

    initial = max_lr / start_divisor,   final = initial / final_divisor,
    up over the first warmup * steps - 1 steps, then down to the last step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from inspect import unwrap
from typing import Any

import torch
from torch import nn

from sigmasolver.plugins import Registry
from sigmasolver.recipes import TrainRecipe

__all__ = ["OPTIMISERS", "AdamW", "OneCycle", "build_optimiser", "reads_tensor", "register_optimiser", "set_rate"]

Make = Callable[[list[nn.Parameter], TrainRecipe], torch.optim.Optimizer]


class AdamW(torch.optim.AdamW):
    """torch's AdamW. To keep its compiler from tracing the methods below, torch loads the compiler, a second or more of
    every start. Nothing traces an optimiser here, so they are called as they are written."""

    step = torch.no_grad()(unwrap(torch.optim.AdamW.step))
    add_param_group = unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = unwrap(torch.optim.Optimizer.zero_grad)
    state_dict = unwrap(torch.optim.Optimizer.state_dict)
    load_state_dict = unwrap(torch.optim.Optimizer.load_state_dict)


def _adamw(parameters: list[nn.Parameter], train: TrainRecipe) -> torch.optim.Optimizer:
    capturable = parameters[0].device.type == "cuda"
    return AdamW(parameters, weight_decay=train.weight_decay, fused=True, capturable=capturable)


def _check(name: str, builder: Any) -> Make:
    if not callable(builder):
        raise ValueError(
            f'The builder of "{name}" must be a function of parameters and settings, not {type(builder).__name__}.'
        )
    return builder


OPTIMISERS: Registry[Make] = Registry(
    "optimiser",
    {"adamw": _adamw},
    "sigmasolver.optimisers",
    _check,
    "sigmasolver.train.optimisers.register_optimiser",
)


def register_optimiser(name: str, builder: Make) -> None:
    """Make an optimiser of your own known by name: recipes and trainings then find it under `train.optimiser`.

    Args:
        name: letters, digits, dots, hyphens and underscores; a name that is taken is refused.
        builder: gets the list of parameters and the `train` part of the recipe (`weight_decay`, ...) and returns a
            `torch.optim.Optimizer`. The trainer sets the learning rate of its groups before every step. What it
            remembers belongs into `state`, as tensors and numbers: a resumed run gets that back.

    Example:
        >>> import torch, sigmasolver
        >>> from sigmasolver.train.optimisers import register_optimiser
        >>> def momentum(parameters, train):
        ...     return torch.optim.SGD(parameters, momentum=0.9, weight_decay=train.weight_decay)
        >>> register_optimiser("momentum", momentum)
        >>> sigmasolver.recipe_of("darcy", settings=["train.optimiser=momentum"]).train.optimiser
        'momentum'
    """
    OPTIMISERS.register(name, builder)


def build_optimiser(parameters: list[nn.Parameter], train: TrainRecipe, rate: torch.Tensor) -> torch.optim.Optimizer:
    """The optimiser of a recipe, with `rate` as its learning rate where it `reads_tensor`."""
    optimiser = OPTIMISERS.find(train.optimiser)(parameters, train)
    if not isinstance(optimiser, torch.optim.Optimizer):
        raise ValueError(
            f'The builder of "{train.optimiser}" returned {type(optimiser).__name__}; it must return a '
            "torch.optim.Optimizer."
        )
    set_rate(optimiser, rate)
    return optimiser


def reads_tensor(optimiser: torch.optim.Optimizer) -> bool:
    """Whether its learning rate can be a tensor that changes in place, as a captured step needs; else it is a number
    that is set before every step."""
    return all(group.get("fused") or group.get("capturable") for group in optimiser.param_groups)


def set_rate(optimiser: torch.optim.Optimizer, rate: torch.Tensor | float) -> None:
    if isinstance(rate, float) or reads_tensor(optimiser):
        for group in optimiser.param_groups:
            group["lr"] = rate


@dataclass(frozen=True)
class OneCycle:
    """A pure function of the step, so that a run resumes from its step counter alone, and one that works on a tensor,
    so that a captured training step can compute its own rate."""

    max_lr: float
    steps: int
    warmup: float = 0.3
    start_divisor: float = 25.0
    final_divisor: float = 1e4

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"The schedule has {self.steps} steps; it must have at least 1.")
        if not 0 < self.max_lr < math.inf:
            raise ValueError(f"The maximum learning rate is {self.max_lr}; it must be positive.")
        if not 0 <= self.warmup <= 1:
            raise ValueError(f"warmup is {self.warmup}; it must be a fraction of the steps, from 0 to 1.")
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
