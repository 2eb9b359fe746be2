"""Softmax over the last axis in the dtype of the logits, and Gumbel softmax with a temperature for each row."""

from __future__ import annotations

import torch

from sigmasolver.ops.dispatch import choose
from sigmasolver.ops.fused.tuning import MAX_SLICES

__all__ = ["TINY", "gumbel", "gumbel_softmax", "softmax"]

TINY = 1e-8


def softmax(logits: torch.Tensor) -> torch.Tensor:
    """Softmax that accumulates in float32 or wider, in bf16 too. Autocast would cast the logits and the result to
    float32: three times the memory traffic, where the next matrix product rounds the result to bf16 anyway."""
    with torch.autocast(logits.device.type, enabled=False):
        return torch.softmax(logits, dim=-1)


def gumbel(uniform: torch.Tensor) -> torch.Tensor:
    """Gumbel(0, 1) samples from uniform ones, bounded at both ends by the published 1e-8."""
    return -torch.log(-torch.log(uniform + TINY) + TINY)


def gumbel_softmax(logits: torch.Tensor, uniform: torch.Tensor | None, temperature: torch.Tensor) -> torch.Tensor:
    """softmax((s + g) / t) over the last axis: logits s (..., N, M), noise g = gumbel(u) with u (..., N, M) in float32
    or wider (None: no noise), temperatures t (..., N, 1)."""
    fused = choose(
        "gumbel",
        logits,
        limits=(("number of slices", logits.shape[-1], MAX_SLICES),),
        unless={"there is no noise": uniform is None},
    )
    if fused:
        return fused.gumbel_softmax(logits, uniform, temperature)
    if uniform is not None:
        logits = logits + gumbel(uniform).to(logits.dtype)
    return torch.softmax(logits / temperature, dim=-1)
