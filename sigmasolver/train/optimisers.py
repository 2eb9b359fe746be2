"""Optimisers by name (AdamW, Muon, and those that users register), and the learning rate schedule.

One cycle: a cosine from the initial rate up to the maximum, and a cosine down to the final one:

    initial = max_lr / start_divisor,   final = initial / final_divisor,
    up over the first warmup * steps - 1 steps, then down to the last step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from inspect import Parameter, signature
from typing import Any

import torch
from torch import nn

from sigmasolver.plugins import Registry
from sigmasolver.recipes import TrainRecipe
from sigmasolver.train.adamw import AdamW
from sigmasolver.train.muon import Muon

__all__ = [
    "OPTIMISERS",
    "OneCycle",
    "build_optimiser",
    "reads_tensor",
    "register_optimiser",
    "set_rate",
    "trainable_parameters",
]

_BY_POSITION = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
OptimiserBuilder = Callable[[list[nn.Parameter], TrainRecipe], torch.optim.Optimizer]


def _build_adamw(
    parameters: list[nn.Parameter], train: TrainRecipe, kind: type[AdamW] = AdamW
) -> torch.optim.Optimizer:
    capturable = parameters[0].device.type == "cuda"
    return kind(parameters, weight_decay=train.weight_decay, fused=True, capturable=capturable)


def _build_muon(parameters: list[nn.Parameter], train: TrainRecipe) -> torch.optim.Optimizer:
    if any(hasattr(parameter, "full_tensor") for parameter in parameters):
        raise ValueError("Muon needs whole matrices, but --shard splits them; train without it, or with adamw.")
    return _build_adamw(parameters, train, Muon)


def _check_builder(name: str, builder: Any) -> OptimiserBuilder:
    if not callable(builder):
        raise ValueError(
            f'The builder of "{name}" must be a function of parameters and settings, not {type(builder).__name__}.'
        )
    return builder


OPTIMISERS: Registry[OptimiserBuilder] = Registry(
    "optimiser",
    {"adamw": _build_adamw, "muon": _build_muon},
    "sigmasolver.optimisers",
    _check_builder,
    "sigmasolver.train.optimisers.register_optimiser",
)


def register_optimiser(name: str, builder: OptimiserBuilder) -> None:
    """Register an optimiser of your own by name, for use as `train.optimiser` in recipes.

    Args:
        name: letters, digits, dots, hyphens and underscores; it must not be taken.
        builder: takes the list of parameters and the `train` section of the recipe (`weight_decay`, ...) and returns a
            `torch.optim.Optimizer`. The trainer sets the learning rate of its groups before every step. Whatever the
            optimiser keeps between steps belongs in `state`, as tensors and numbers, which are restored on resume.

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
    """Build the optimiser of a recipe, with `rate` as its learning rate if it `reads_tensor`."""
    optimiser = OPTIMISERS.find(train.optimiser)(parameters, train)
    if not isinstance(optimiser, torch.optim.Optimizer):
        raise ValueError(
            f'The builder of "{train.optimiser}" returned {type(optimiser).__name__}; it must return a '
            "torch.optim.Optimizer."
        )
    # Of the class: a learning-rate scheduler replaces the method by a function whose signature includes self.
    _, *arguments = signature(type(optimiser).step).parameters.values()
    if any(argument.default is argument.empty for argument in arguments if argument.kind in _BY_POSITION):
        raise ValueError(
            f'The optimiser "{train.optimiser}" needs a closure that evaluates the loss again, which the trainer does '
            "not pass; choose one whose step() takes no arguments."
        )
    set_rate(optimiser, rate)
    return optimiser


def trainable_parameters(model: nn.Module, name: str) -> list[nn.Parameter]:
    """The parameters that an optimiser updates; raise ValueError if the model `name` has none."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise ValueError(f'The model "{name}" has no trainable parameters; give it at least one.')
    return parameters


def reads_tensor(optimiser: torch.optim.Optimizer) -> bool:
    """Whether its learning rate can be a tensor updated in place, as a captured step requires; otherwise it is a number
    set before every step."""
    return all(group.get("fused") or group.get("capturable") for group in optimiser.param_groups)


def set_rate(optimiser: torch.optim.Optimizer, rate: torch.Tensor | float) -> None:
    if isinstance(rate, float) or reads_tensor(optimiser):
        for group in optimiser.param_groups:
            group["lr"] = rate


@dataclass(frozen=True)
class OneCycle:
    """Learning rate as a pure function of the step, so that a run resumes from its step counter alone; it also takes a
    tensor of steps."""

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
        """Return the learning rate of this step (counted from 0), in float64 on the device of `step`."""
        now = torch.as_tensor(step, dtype=torch.float64)
        initial = self.max_lr / self.start_divisor
        final = initial / self.final_divisor
        peak, last = self.warmup * self.steps - 1, self.steps - 1
        rising = _cosine(initial, self.max_lr, (now / peak) if peak > 0 else torch.ones_like(now))
        falling = _cosine(self.max_lr, final, (now - peak) / max(last - peak, 1e-12))
        return torch.where(now <= peak, rising, falling)


def _cosine(start: float, end: float, fraction: torch.Tensor) -> torch.Tensor:
    return end + (start - end) / 2 * (1 + torch.cos(math.pi * fraction.clamp(0, 1)))
