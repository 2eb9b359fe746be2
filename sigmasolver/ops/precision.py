"""What float32 matrix products run in on a GPU: float32 itself or TF32, which keeps ten bits of the fraction."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["matmul_precision"]


@contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """Inside: TF32 unless `precision` is "float32"; afterwards as before. The switch is one for the whole process."""
    switches: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [switch.allow_tf32 for switch in switches]
    try:
        for switch in switches:
            switch.allow_tf32 = precision != "float32"
        yield
    finally:
        for switch, was in zip(switches, before, strict=True):
            switch.allow_tf32 = was
