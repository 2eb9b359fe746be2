"""Precision of float32 matrix products on a GPU: full float32, or TF32 with its 10-bit mantissa."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["matmul_precision", "refuse_tf32_without_gpu"]


def refuse_tf32_without_gpu(
    precision: str, device: torch.device, message: str = "TF32 requires a GPU; choose float32 or bf16 on a CPU."
) -> None:
    """Raise ValueError with this message if the device computes float32 where TF32 is requested."""
    if precision == "tf32" and device.type != "cuda":
        raise ValueError(message)


@contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """Allow TF32 inside the block unless `precision` is "float32", then restore the process-wide setting."""
    switches: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [switch.allow_tf32 for switch in switches]
    try:
        for switch in switches:
            switch.allow_tf32 = precision != "float32"
        yield
    finally:
        for switch, allowed in zip(switches, before, strict=True):
            switch.allow_tf32 = allowed
