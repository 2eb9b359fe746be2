"""Fused Triton kernels of the hot operations: they match the plain definitions up to round-off.

`ops.dispatch` decides where they are used. Sums are accumulated in float32 in a fixed order, so that results are
bitwise reproducible. Tile sizes are in `tuning`.

In a kernel, sizes are words: constexprs in upper case (CHANNELS, and TILE_CHANNELS for the padded size of a tile),
runtime arguments in lower case (points). Single letters are tensors, and sizes in their shapes, as listed at the top of
each file. A program holds one TILE at a time and loops over a CHUNK.
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
    """The object that a captured step is using, or None; shared by all threads, as autograd runs the backward pass in
    another one."""

    def __init__(self) -> None:
        self.current: T | None = None

    @contextmanager
    def activate(self, value: T) -> Iterator[None]:
        before, self.current = self.current, value
        try:
            yield
        finally:
            self.current = before


def dot_precision() -> str:
    """Input precision of float32 products, by torch's TF32 setting; three passes of TF32 are as exact as float32."""
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "tf32x3"


def product_dtype(x: torch.Tensor, otherwise: torch.dtype) -> torch.dtype:
    """Dtype of matrix products of this tensor: autocast's if it is enabled."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else otherwise


def cast_for_products(x: torch.Tensor) -> torch.Tensor:
    """Cast this tensor to the dtype of its matrix products."""
    return x.to(product_dtype(x, x.dtype))


def gpu_class(x: torch.Tensor) -> Gpu:
    """Class of the device of this tensor, which selects the rows of `tuning`."""
    return Gpu.with_shared_memory(shared_memory(x))


def shared_memory(x: torch.Tensor) -> int:
    """Bytes of shared memory available to a program on the device of this tensor; 0 for a CPU."""
    return _shared_memory(x.device) if x.is_cuda else 0


def multiprocessors(x: torch.Tensor) -> int:
    """Multiprocessors of the device of this tensor; for a CPU, where kernels are interpreted or only compiled, those of
    an H200."""
    return _multiprocessors(x.device) if x.is_cuda else 132


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def _shared_memory(device: torch.device) -> int:
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", 0))  # not reported on AMD


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """View as (N, C), without a copy if the rows are evenly strided, as in a slice of the channels."""
    C = x.shape[-1]
    if x.is_contiguous():
        return x.view(-1, C)  # the backward pass of as_strided would copy
    row_stride = x.stride(-2)
    even = x.stride(-1) == 1
    expected = row_stride
    for size, stride in zip(reversed(x.shape[:-1]), reversed(x.stride()[:-1]), strict=True):
        even = even and stride == expected
        expected *= size
    if not even:
        return x.contiguous().view(-1, C)
    return x.as_strided((x[..., 0].numel(), C), (row_stride, 1))
