"""Fused twins of the hot operations, in Triton: the same signature and the same numbers as the plain ones.

They are used on a GPU where Triton is installed; SIGMASOLVER_FUSED=0 in the environment, or `plain()` around a piece
of code, switches all of them off. Everywhere else the plain definitions run. Sums are kept in float32 and made in a
fixed order: the same input gives the same bits.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Generic, TypeVar

import torch

__all__ = ["WIDEST", "Slot", "dot_precision", "filled", "plain", "quick", "shared_memory", "untraced", "usable"]

T = TypeVar("T")

WIDEST = 256
"""Channels that one program of a fused twin holds at once."""
interpreted = False
"""Set by tests: Triton's interpreter serves tensors of a CPU too."""
_off = 0


@contextmanager
def plain() -> Iterator[None]:
    """Inside, every operation takes its plain definition."""
    global _off
    _off += 1
    try:
        yield
    finally:
        _off -= 1


class Slot(Generic[T]):
    """What a captured step has in use, or None; one for all threads, as a backward pass runs in a thread of its own."""

    def __init__(self) -> None:
        self.now: T | None = None

    @contextmanager
    def holding(self, one: T) -> Iterator[None]:
        before, self.now = self.now, one
        try:
            yield
        finally:
            self.now = before


@cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None and os.environ.get("SIGMASOLVER_FUSED", "1") != "0"


def usable(x: torch.Tensor) -> bool:
    """Whether the fused twins serve this tensor; a tracer (`torch.compile`, `torch.export`) sees plain operations."""
    return (
        untraced(x)  # first: what follows is not for a tracer, which would break its graph there
        and (x.is_cuda or interpreted)
        and x.dtype in (torch.float32, torch.bfloat16)
        and x.shape[1:].numel() < 2**31  # offsets inside a sample are 32 bits wide
        and _off == 0
        and _installed()
        and x.numel() > 0
    )


def untraced(x: torch.Tensor) -> bool:
    """Neither a tracer nor forward-mode differentiation nor a function transform looks on."""
    if torch.compiler.is_compiling() or torch.autograd.forward_ad._current_level >= 0:
        return False
    plain_tensor = isinstance(x, torch.nn.Parameter) or type(x) is torch.Tensor
    return plain_tensor and not torch._C._functorch.is_functorch_wrapped_tensor(x)


def dot_precision() -> str:
    """What products of float32 tiles run in, by torch's own switch; three passes of TF32 are as exact as float32."""
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "tf32x3"


def filled(size: int) -> int:
    """What a tile has for so many rows or columns: matrix units multiply powers of 2 from 16 on; the rest is masked."""
    return max(16, 1 << (size - 1).bit_length())


def shared_memory(x: torch.Tensor) -> int:
    """Bytes that a program may have on the device of this tensor; a CPU has none."""
    return _shared_memory(x.device) if x.is_cuda else 0


@cache
def _shared_memory(device: torch.device) -> int:
    known = torch.cuda.get_device_properties(device)
    return int(getattr(known, "shared_memory_per_block_optin", 0))  # AMD's do not say


def quick(x: torch.Tensor) -> bool:
    """Whether matrix units take products of this tensor under autocast and TF32 as they are set.

    Without them the libraries' float32 products are quicker than those inside a fused twin.
    """
    if not usable(x):
        return False
    narrow = torch.is_autocast_enabled(x.device.type) or x.dtype == torch.bfloat16
    return narrow or interpreted or torch.backends.cuda.matmul.allow_tf32
