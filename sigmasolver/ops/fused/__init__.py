"""Fused kernels of the hot operations, in Triton: the same numbers as the plain definitions, to rounding.

`ops.dispatch` decides where they are used. Sums are kept in float32 and made in a fixed order: the same input gives the
same bits. Tile sizes are in `tuning`.

Inside a kernel sizes are words: in capitals those that are compiled in (CHANNELS, and TILE_CHANNELS of a tile, which is
padded), in small letters those that come with a launch (points). Letters are tensors, and sizes in their shapes, as the
head of each file has them. TILE is what one program holds at once, CHUNK what it walks over.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Generic, TypeVar

import torch

from sigmasolver.ops.fused.tuning import Gpu

__all__ = [
    "Slot",
    "cast_for_products",
    "dot_precision",
    "gpu_class",
    "multiprocessors",
    "product_dtype",
    "rows_of",
    "shared_memory",
]

T = TypeVar("T")


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


def dot_precision() -> str:
    """What products of float32 tiles run in, by torch's own switch; three passes of TF32 are as exact as float32."""
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "tf32x3"


def product_dtype(x: torch.Tensor, otherwise: torch.dtype) -> torch.dtype:
    """What products of this tensor run in: autocast's type where it is on."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else otherwise


def cast_for_products(x: torch.Tensor) -> torch.Tensor:
    """This tensor in the type that its products run in."""
    return x.to(product_dtype(x, x.dtype))


def gpu_class(x: torch.Tensor) -> Gpu:
    """Of the device of this tensor: which rows of `tuning` hold there."""
    return Gpu.with_shared_memory(shared_memory(x))


def shared_memory(x: torch.Tensor) -> int:
    """Bytes that a program may have on the device of this tensor; a CPU has none."""
    return _shared_memory(x.device) if x.is_cuda else 0


def multiprocessors(x: torch.Tensor) -> int:
    """Of the device of this tensor; for a CPU, where kernels are interpreted or only compiled, those of an H200."""
    return _multiprocessors(x.device) if x.is_cuda else 132


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def _shared_memory(device: torch.device) -> int:
    known = torch.cuda.get_device_properties(device)
    return int(getattr(known, "shared_memory_per_block_optin", 0))  # AMD's do not say


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """(N, C) without a copy where the rows are evenly apart, as those of a half of the channels are."""
    C = x.shape[-1]
    if x.is_contiguous():
        return x.view(-1, C)  # the gradient of as_strided would be a copy
    row_stride = x.stride(-2)
    even = x.stride(-1) == 1
    expected = row_stride
    for size, stride in zip(reversed(x.shape[:-1]), reversed(x.stride()[:-1]), strict=True):
        even = even and stride == expected
        expected *= size
    if not even:
        return x.contiguous().view(-1, C)
    return x.as_strided((x[..., 0].numel(), C), (row_stride, 1))
