"""Reductions over points: partial sums over chunks of points, then over the chunks in a fixed order, all in float32.

Letters: N rows, C columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sigmasolver.ops.fused import tuning
from sigmasolver.ops.fused.jit import jit

__all__ = ["add_at", "column_sums", "replace_at", "sum_partials"]


@jit
def replace_at(tensors: tl.tuple, i: tl.constexpr, new: tl.tensor) -> tl.tuple:
    """A tuple of tensors with the i-th element replaced by `new`."""
    return tensors[:i] + (new,) + tensors[i + 1 :]  # noqa: RUF005, Triton does not support unpacking


@jit
def add_at(tensors: tl.tuple, i: tl.constexpr, more: tl.tensor) -> tl.tuple:
    """A tuple of tensors with `more` added to the i-th element."""
    return replace_at(tensors, i, tensors[i] + more)


@jit
def _column_sums(
    x: tl.tensor, sums: tl.tensor,
    rows: tl.tensor, columns: tl.tensor, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr, CHUNK: tl.constexpr,
) -> None:  # fmt: skip
    """sums (chunks, C): sums[k] = sum of x[n] over the rows n of chunk k; x (N, C)."""
    chunk, c = tl.program_id(0), tl.program_id(1) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    total = tl.zeros((TILE_ROWS, TILE_COLUMNS), tl.float32)
    for start in range(0, CHUNK, TILE_ROWS):
        n = chunk * CHUNK + start + tl.arange(0, TILE_ROWS)
        keep = (n[:, None] < rows) & (c[None, :] < columns)
        total += tl.load(x + n.to(tl.int64)[:, None] * columns + c[None, :], mask=keep, other=0.0).to(tl.float32)
    tl.store(sums + chunk * columns + c, tl.sum(total, axis=0), mask=c < columns)


@jit
def _fold(
    partials: tl.tensor, sums: tl.tensor,
    rows: tl.tensor, columns: tl.tensor, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
) -> None:  # fmt: skip
    """sums (C,): sums[c] = sum over n of partials[n, c]; partials (N, C) in float32."""
    c = tl.program_id(0) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    total = tl.zeros((TILE_ROWS, TILE_COLUMNS), tl.float32)
    for start in range(0, rows, TILE_ROWS):
        n = start + tl.arange(0, TILE_ROWS)
        keep = (n[:, None] < rows) & (c[None, :] < columns)
        total += tl.load(partials + n.to(tl.int64)[:, None] * columns + c[None, :], mask=keep, other=0.0)
    tl.store(sums + c, tl.sum(total, axis=0), mask=c < columns)


def sum_partials(partials: torch.Tensor) -> torch.Tensor:
    """Sum contiguous float32 partial sums, usually few rows, over the first axis in a fixed order."""
    rows, columns = len(partials), partials[0].numel()
    sums = torch.empty(partials.shape[1:], device=partials.device, dtype=torch.float32)
    tile = tuning.PARTIALS_COLUMNS[columns > tuning.FEW_PARTIALS]
    _fold[(triton.cdiv(columns, tile),)](
        partials, sums, rows, columns, TILE_ROWS=tuning.PARTIALS_TILE // tile, TILE_COLUMNS=tile
    )
    return sums


def column_sums(x_NC: torch.Tensor) -> torch.Tensor:
    """(C,) in float32: the sum of the rows, in a fixed order."""
    rows, columns = x_NC.shape
    tile = min(tuning.COLUMNS_TILE, triton.next_power_of_2(columns))
    chunks = triton.cdiv(rows, tuning.COLUMNS_CHUNK)
    sums = torch.empty(chunks, columns, device=x_NC.device, dtype=torch.float32)
    _column_sums[(chunks, triton.cdiv(columns, tile))](
        x_NC, sums, rows, columns, TILE_ROWS=tuning.COLUMNS_ROWS, TILE_COLUMNS=tile, CHUNK=tuning.COLUMNS_CHUNK
    )
    return sum_partials(sums)
