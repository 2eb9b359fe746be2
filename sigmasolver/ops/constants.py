"""Tensors that depend on the grid alone (DFT bases, positions): made once per grid, never stored with a model."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec

import torch

__all__ = ["grid_constant"]

P = ParamSpec("P")
KEPT = 16
pinned: list[torch.Tensor] = []
"""What a captured CUDA graph reads; it must outlive its place among the last few."""


def grid_constant(make: Callable[P, torch.Tensor]) -> Callable[P, torch.Tensor]:
    """Remember the last few results of a tensor-valued function of hashable arguments.

    Computing instead of storing keeps float64 models exact (a float32 buffer cast up would not be) and lets any grid
    arrive. While a tracer runs (`torch.compile`, `torch.export`) nothing is remembered: the few operations become
    part of the graph, where common-subexpression elimination leaves one copy for all blocks.
    """
    remembered: dict[object, torch.Tensor] = {}

    @wraps(make)
    def cached(*args: P.args, **kwargs: P.kwargs) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return make(*args, **kwargs)
        key = (args, tuple(sorted(kwargs.items())))
        if key not in remembered:
            # A tensor born in inference mode could not be used by a later training step.
            with torch.inference_mode(False), torch.no_grad():
                value = make(*args, **kwargs)
            # A fake tensor must not outlive its tracer, nor a wrapper of torch.func its transform.
            if type(value) is not torch.Tensor or torch._C._functorch.is_functorch_wrapped_tensor(value):
                return value
            if len(remembered) >= KEPT:
                remembered.pop(next(iter(remembered)))
            remembered[key] = value
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            pinned.append(remembered[key])
        return remembered[key]

    return cached
