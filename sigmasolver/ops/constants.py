"""Tensors that depend on the grid alone (DFT bases, positions): computed once per grid, never stored with a model."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec

import torch

__all__ = ["grid_constant"]

P = ParamSpec("P")
MAX_CACHED = 16
pinned: list[torch.Tensor] = []
"""Constants that captured CUDA graphs read: they must survive eviction from the cache."""


def grid_constant(compute: Callable[P, torch.Tensor]) -> Callable[P, torch.Tensor]:
    """Cache the last few results of a tensor-valued function of hashable arguments.

    Computing the constants rather than registering buffers keeps float64 models exact (an upcast float32 buffer would
    not be) and works for any grid. Nothing is cached during tracing (`torch.compile`, `torch.export`): the few
    operations become part of the graph, where common-subexpression elimination leaves one copy for all blocks.
    """
    cache: dict[object, torch.Tensor] = {}

    @wraps(compute)
    def cached(*args: P.args, **kwargs: P.kwargs) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return compute(*args, **kwargs)
        key = (args, tuple(sorted(kwargs.items())))
        if key not in cache:
            # A tensor created in inference mode could not be used by a later training step.
            with torch.inference_mode(False), torch.no_grad():
                value = compute(*args, **kwargs)
            # A fake tensor must not outlive its tracer, nor a torch.func wrapper its transform.
            if type(value) is not torch.Tensor or torch._C._functorch.is_functorch_wrapped_tensor(value):
                return value
            if len(cache) >= MAX_CACHED:
                cache.pop(next(iter(cache)))
            cache[key] = value
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            pinned.append(cache[key])
        return cache[key]

    return cached
