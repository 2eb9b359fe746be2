"""Sums over points: partial sums over chunks of points, then over chunks in a fixed order, all in float32.

Letters: N rows, C columns, S partial sums in a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sigmasolver.ops.fused import tuning

__all__ = ["added", "column_sums", "replaced", "sum_partials"]


@triton.jit
def replaced(tensors: tl.tuple, i: tl.constexpr, new: tl.tensor) -> tl.tuple:
    """A tuple of tensors with `new` in place of the i-th."""
    return tensors[:i] + (new,) + tensors[i + 1 :]  # noqa: RUF005, Triton knows no stars


@triton.jit
def added(tensors: tl.tuple, i: tl.constexpr, more: tl.tensor) -> tl.tuple:
    """A tuple of tensors with `more` added to the i-th."""
    return replaced(tensors, i, tensors[i] + more)


@triton.jit
def _column_sums(
    x: tl.tensor, sums: tl.tensor,
    N: tl.tensor, C: tl.tensor, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr,
) -> None:  # fmt: skip
    """sums (chunks, C): sums[k] = sum of x[n] over the rows n of chunk k; x (N, C)."""
    chunk, c = tl.program_id(0), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, CHUNK, ROWS):
        n = chunk * CHUNK + start + tl.arange(0, ROWS)
        keep = (n[:, None] < N) & (c[None, :] < C)
        total += tl.load(x + n.to(tl.int64)[:, None] * C + c[None, :], mask=keep, other=0.0).to(tl.float32)
    tl.store(sums + chunk * C + c, tl.sum(total, axis=0), mask=c < C)


@triton.jit
def _fold(
    partials: tl.tensor, sums: tl.tensor, N: tl.tensor, S: tl.tensor, ROWS: tl.constexpr, COLUMNS: tl.constexpr
) -> None:
    """sums (S,): sums[s] = sum over n of partials[n, s]; partials (N, S) in float32."""
    s = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, N, ROWS):
        n = start + tl.arange(0, ROWS)
        keep = (n[:, None] < N) & (s[None, :] < S)
        total += tl.load(partials + n.to(tl.int64)[:, None] * S + s[None, :], mask=keep, other=0.0)
    tl.store(sums + s, tl.sum(total, axis=0), mask=s < S)


def sum_partials(partials: torch.Tensor) -> torch.Tensor:
    """The sum over the first axis of contiguous float32 partial sums, few rows as a rule, always in the same order."""
    N, S = len(partials), partials[0].numel()
    sums = torch.empty(partials.shape[1:], device=partials.device, dtype=torch.float32)
    columns = 8 if S <= tuning.FEW_PARTIALS else 32
    _fold[(triton.cdiv(S, columns),)](partials, sums, N, S, ROWS=tuning.PARTIALS_TILE // columns, COLUMNS=columns)
    return sums


def column_sums(x_NC: torch.Tensor) -> torch.Tensor:
    """(C,) in float32: the sum of the rows, always in the same order."""
    N, C = x_NC.shape
    columns = min(tuning.COLUMNS_TILE, triton.next_power_of_2(C))
    chunks = triton.cdiv(N, tuning.COLUMNS_CHUNK)
    sums = torch.empty(chunks, C, device=x_NC.device, dtype=torch.float32)
    _column_sums[(chunks, triton.cdiv(C, columns))](
        x_NC, sums, N, C, ROWS=tuning.COLUMNS_ROWS, COLUMNS=columns, CHUNK=tuning.COLUMNS_CHUNK
    )
    return sum_partials(sums)
