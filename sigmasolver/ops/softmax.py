"""Softmax over the last axis in the type of the logits, and with Gumbel noise and a temperature for every row."""

from __future__ import annotations

import torch

from sigmasolver.ops.dispatch import choose
from sigmasolver.ops.fused.tuning import MOST_SLICES

__all__ = ["TINY", "gumbel", "gumbel_softmax", "softmax"]

TINY = 1e-8


def softmax(logits: torch.Tensor) -> torch.Tensor:
    """Sums are float32 at least, in bf16 too; autocast would give the logits and the result in float32, which is three
    times the traffic where a product rounds the result to bf16 anyway."""
    with torch.autocast(logits.device.type, enabled=False):
        return torch.softmax(logits, dim=-1)


def gumbel(uniform: torch.Tensor) -> torch.Tensor:
    """Gumbel(0, 1) numbers of uniform ones, bounded by the published 1e-8 at both ends."""
    return -torch.log(-torch.log(uniform + TINY) + TINY)


def gumbel_softmax(logits: torch.Tensor, uniform: torch.Tensor | None, temperature: torch.Tensor) -> torch.Tensor:
    """softmax((s + g) / t) over the last axis: logits s (..., N, M), noise g = gumbel(u) with u (..., N, M) in float32
    at least, or none, temperatures t (..., N, 1)."""
    fused = choose(
        "gumbel",
        logits,
        limits=(("number of slices", logits.shape[-1], MOST_SLICES),),
        unless={"there is no noise": uniform is None},
    )
    if fused:
        return fused.gumbel_softmax(logits, uniform, temperature)
    if uniform is not None:
        logits = logits + gumbel(uniform).to(logits.dtype)
    return torch.softmax(logits / temperature, dim=-1)
