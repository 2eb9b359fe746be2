"""Parameters in the layouts that fused kernels read (low precision, transposed, padded with zeros), made by one kernel.

    to[i across + j along] = weight[i, j]        for weights seen as (I, J) matrices

A captured step makes all layouts at its start instead of one by one where they are needed.
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
    """How a parameter, seen as a matrix (I, J), lies in the tensor that a kernel reads."""

    shape: tuple[int, ...]
    """Of that tensor; what no number of the parameter reaches is zero."""
    matrix: tuple[int, int]
    strides: tuple[int, int]
    """Between rows and between columns of the parameter, in numbers of that tensor."""
    dtype: torch.dtype

    def copy(self, weight: torch.Tensor) -> torch.Tensor:
        """A tensor of this layout, with torch."""
        dense = math.prod(self.shape) == math.prod(self.matrix)
        out = (torch.empty if dense else torch.zeros)(self.shape, device=weight.device, dtype=self.dtype)
        out.as_strided(self.matrix, self.strides).copy_(weight.detach().reshape(self.matrix))
        return out


def arrange(weight: torch.Tensor, layout: WeightLayout) -> torch.Tensor:
    """The parameter in this layout, from the cache where one is in use; read it, do not write to it."""
    cache = _active.now
    return layout.copy(weight) if cache is None else cache.get(weight, layout)


def cast_weight(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The parameter in this type; itself where it is of that type."""
    if weight.dtype == dtype:
        return weight
    size = weight.numel()
    return arrange(weight, WeightLayout(tuple(weight.shape), (1, size), (size, 1), dtype))


class WeightCache:
    """The layouts of a model's parameters: learned in a step that copies them one by one, then made all at once."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._parameters = {one.data_ptr(): one for one in parameters if one.is_contiguous()}
        self._tensors: dict[tuple[int, WeightLayout], torch.Tensor] = {}
        self._table: torch.Tensor | None = None
        self._ready = False

    @contextmanager
    def learn(self) -> Iterator[None]:
        """Inside: weights are copied where they are needed, and their layouts remembered."""
        self._ready = False
        with _active.holding(self):
            yield

    @contextmanager
    def use(self) -> Iterator[None]:
        """Inside: every remembered layout is there already, made at the beginning of the values of that moment."""
        self.launch()
        self._ready = True
        with _active.holding(self):
            yield

    def launch(self) -> None:
        """The kernel alone, which makes every remembered layout."""
        if self._tensors:
            if self._table is None:
                raise ValueError("The table of layouts is missing; call `fill` after the last step that learned.")
            kernels = importlib.import_module("sigmasolver.ops.fused.parameter_kernels")
            kernels.arrange_weights[(len(self._table),)](self._table, PIECE=PIECE, TABLE_COLUMNS=self._table.shape[1])

    def fill(self) -> None:
        """Write the table of what was learned."""
        rows = []
        for (address, layout), to in self._tensors.items():
            (_, J), wide = layout.matrix, int(layout.dtype == torch.float32)
            for start in range(0, math.prod(layout.matrix), PIECE):
                count = min(PIECE, math.prod(layout.matrix) - start)
                rows.append((address, to.data_ptr(), start, count, J, *layout.strides, wide))
        device = next(iter(self._tensors.values())).device if self._tensors else None
        self._table = torch.tensor(rows, dtype=torch.int64, device=device) if rows else None

    def get(self, weight: torch.Tensor, layout: WeightLayout) -> torch.Tensor:
        """The parameter in this layout; a copy of its own where the cache has none."""
        key = weight.data_ptr(), layout
        if not weight.is_contiguous():  # a view that begins where a parameter does
            return layout.copy(weight)
        if self._ready:
            # Before the first replay nothing is there yet: another thread makes its own.
            known = key in self._tensors and (not weight.is_cuda or torch.cuda.is_current_stream_capturing())
            return self._tensors[key] if known else layout.copy(weight)
        own = self._parameters.get(key[0])
        whole = own is not None and own.dtype == torch.float32 and own.numel() == math.prod(layout.matrix)
        if whole and layout.dtype in (torch.float32, torch.bfloat16):
            self._tensors.setdefault(key, torch.zeros(layout.shape, device=weight.device, dtype=layout.dtype))
        return layout.copy(weight)


_active: Slot[WeightCache] = Slot()
