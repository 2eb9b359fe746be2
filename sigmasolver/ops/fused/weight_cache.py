"""Parameters in the layouts that fused kernels read (low precision, transposed, zero-padded), written by one kernel.

    to[i across + j along] = weight[i, j]        for weights viewed as (I, J) matrices

A captured step writes all layouts at its start rather than one by one where they are needed.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from sigmasolver.ops.fused import Slot
from sigmasolver.ops.fused.tuning import PIECE

__all__ = ["WeightCache", "WeightLayout", "arrange", "cast_weight"]


@dataclass(frozen=True)
class WeightLayout:
    """How a parameter, viewed as a matrix (I, J), is stored in the tensor that a kernel reads."""

    shape: tuple[int, ...]
    """Shape of that tensor; elements to which no element of the parameter maps are zero."""
    matrix: tuple[int, int]
    strides: tuple[int, int]
    """Strides of the rows and columns of the parameter in that tensor."""
    dtype: torch.dtype

    def copy(self, weight: torch.Tensor) -> torch.Tensor:
        """Copy `weight` to a new tensor of this layout, with torch operations."""
        dense = math.prod(self.shape) == math.prod(self.matrix)
        out = (torch.empty if dense else torch.zeros)(self.shape, device=weight.device, dtype=self.dtype)
        out.as_strided(self.matrix, self.strides).copy_(weight.detach().reshape(self.matrix))
        return out


def arrange(weight: torch.Tensor, layout: WeightLayout) -> torch.Tensor:
    """The parameter in this layout, from the active cache if there is one; read-only."""
    cache = _active.current
    return layout.copy(weight) if cache is None else cache.get(weight, layout)


def cast_weight(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The parameter in this dtype; itself if it already has it."""
    if weight.dtype == dtype:
        return weight
    size = weight.numel()
    return arrange(weight, WeightLayout(tuple(weight.shape), (1, size), (size, 1), dtype))


class WeightCache:
    """The layouts of a model's parameters: recorded in a step that copies them one by one, then written all at once."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._parameters = {parameter.data_ptr(): parameter for parameter in parameters if parameter.is_contiguous()}
        self._tensors: dict[tuple[int, WeightLayout], torch.Tensor] = {}
        self._table: torch.Tensor | None = None
        self._ready = False

    @contextmanager
    def learn(self) -> Iterator[None]:
        """Copy weights where they are needed, and record their layouts."""
        self._ready = False
        with _active.activate(self):
            yield

    @contextmanager
    def use(self) -> Iterator[None]:
        """Write every recorded layout on entry, from the values at that time; inside the block, read from the cache."""
        self.launch()
        self._ready = True
        with _active.activate(self):
            yield

    def launch(self) -> None:
        """Launch the kernel that writes every recorded layout."""
        if self._tensors:
            if self._table is None:
                raise ValueError("The table of layouts is missing; call `fill` after the last step that learned.")
            kernels = importlib.import_module("sigmasolver.ops.fused.parameter_kernels")
            kernels.arrange_weights[(len(self._table),)](self._table, PIECE=PIECE, TABLE_COLUMNS=self._table.shape[1])

    def fill(self) -> None:
        """Write the table of the recorded layouts."""
        rows = []
        for (address, layout), tensor in self._tensors.items():
            (_, J), wide = layout.matrix, int(layout.dtype == torch.float32)
            for start in range(0, math.prod(layout.matrix), PIECE):
                count = min(PIECE, math.prod(layout.matrix) - start)
                rows.append((address, tensor.data_ptr(), start, count, J, *layout.strides, wide))
        device = next(iter(self._tensors.values())).device if self._tensors else None
        self._table = torch.tensor(rows, dtype=torch.int64, device=device) if rows else None

    def get(self, weight: torch.Tensor, layout: WeightLayout) -> torch.Tensor:
        """The parameter in this layout; a separate copy if it is not cached."""
        key = weight.data_ptr(), layout
        if not weight.is_contiguous():  # a view that starts at the address of a parameter
            return layout.copy(weight)
        if self._ready:
            # The cached tensors are written on replay, not during capture: another thread needs its own copy.
            cached = key in self._tensors and (not weight.is_cuda or torch.cuda.is_current_stream_capturing())
            return self._tensors[key] if cached else layout.copy(weight)
        parameter = self._parameters.get(key[0])
        full = (
            parameter is not None and parameter.dtype == torch.float32 and parameter.numel() == math.prod(layout.matrix)
        )
        if full and layout.dtype in (torch.float32, torch.bfloat16):
            self._tensors.setdefault(key, torch.zeros(layout.shape, device=weight.device, dtype=layout.dtype))
        return layout.copy(weight)


_active: Slot[WeightCache] = Slot()
