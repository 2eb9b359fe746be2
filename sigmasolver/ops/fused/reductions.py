"""Sums over points: partial sums over chunks of points, then over chunks in a fixed order, all in float32.

Letters: N rows, C columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["added", "column_sums", "put", "sum_partials"]


@triton.jit
def put(several, i: tl.constexpr, new):  # type: ignore[no-untyped-def]
    """Several tensors, with `new` in the place of the i-th."""
    return several[:i] + (new,) + several[i + 1 :]  # noqa: RUF005, Triton knows no stars


@triton.jit
def added(sums, i: tl.constexpr, more):  # type: ignore[no-untyped-def]
    """Several sums, with `more` added to the i-th."""
    return put(sums, i, sums[i] + more)


@triton.jit
def _column_sums(x, s, N, C, BN: tl.constexpr, BC: tl.constexpr, SPAN: tl.constexpr):  # type: ignore[no-untyped-def]
    chunk, c = tl.program_id(0), tl.program_id(1) * BC + tl.arange(0, BC)
    total = tl.zeros((BN, BC), tl.float32)
    for start in range(0, SPAN, BN):
        n = chunk * SPAN + start + tl.arange(0, BN)
        keep = (n[:, None] < N) & (c[None, :] < C)
        total += tl.load(x + n.to(tl.int64)[:, None] * C + c[None, :], mask=keep, other=0.0).to(tl.float32)
    tl.store(s + chunk * C + c, tl.sum(total, axis=0), mask=c < C)


@triton.jit
def _fold(x, y, N, S, BN: tl.constexpr, BS: tl.constexpr):  # type: ignore[no-untyped-def]
    s = tl.program_id(0) * BS + tl.arange(0, BS)
    total = tl.zeros((BN, BS), tl.float32)
    for start in range(0, N, BN):
        n = start + tl.arange(0, BN)
        keep = (n[:, None] < N) & (s[None, :] < S)
        total += tl.load(x + n.to(tl.int64)[:, None] * S + s[None, :], mask=keep, other=0.0)
    tl.store(y + s, tl.sum(total, axis=0), mask=s < S)


def sum_partials(parts: torch.Tensor) -> torch.Tensor:
    """The sum over the first axis of contiguous float32 partial sums, few rows as a rule, always in the same order."""
    N, S = len(parts), parts[0].numel()
    out = torch.empty(parts.shape[1:], device=parts.device, dtype=torch.float32)
    BS = 8 if S <= 1024 else 32  # narrow tiles, so that there are programs enough
    _fold[(triton.cdiv(S, BS),)](parts, out, N, S, BN=2048 // BS, BS=BS)
    return out


def column_sums(x_NC: torch.Tensor) -> torch.Tensor:
    """(C,) in float32: the sum of the rows, always in the same order."""
    N, C = x_NC.shape
    span, block = 128, min(128, triton.next_power_of_2(C))
    chunks = triton.cdiv(N, span)
    sums = torch.empty(chunks, C, device=x_NC.device, dtype=torch.float32)
    _column_sums[(chunks, triton.cdiv(C, block))](x_NC, sums, N, C, BN=32, BC=block, SPAN=span)
    return sum_partials(sums)
