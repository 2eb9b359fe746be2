"""The kernels of `tables`: one program for each row of a table of addresses."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["adamw", "prepare"]


@triton.jit
def prepare(table, PIECE: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Row: parameter, tensor, first number, how many, columns of the parameter, both strides, whether float32."""
    row = table + tl.program_id(0) * WIDTH
    n = tl.arange(0, PIECE)
    keep = n < tl.load(row + 3)
    n = (tl.load(row + 2) + n).to(tl.int32)
    columns = tl.load(row + 4).to(tl.int32)
    value = tl.load(tl.load(row).to(tl.pointer_type(tl.float32)) + n, mask=keep, other=0.0)
    place = n // columns * tl.load(row + 5) + n % columns * tl.load(row + 6)
    if tl.load(row + 7) == 1:
        tl.store(tl.load(row + 1).to(tl.pointer_type(tl.float32)) + place, value, mask=keep)
    else:
        tl.store(tl.load(row + 1).to(tl.pointer_type(tl.bfloat16)) + place, value.to(tl.bfloat16), mask=keep)


@triton.jit
def adamw(  # type: ignore[no-untyped-def]
    table, rate, FIRST: tl.constexpr, SECOND: tl.constexpr, LOG_FIRST: tl.constexpr, LOG_SECOND: tl.constexpr,
    EPS: tl.constexpr, DECAY: tl.constexpr, PIECE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Row: parameter, gradient, both moments, number of steps before this one, how many numbers. LOG: to base 2."""
    row = table + tl.program_id(0) * WIDTH
    n = tl.arange(0, PIECE)
    keep = n < tl.load(row + 5)
    at_w = tl.load(row).to(tl.pointer_type(tl.float32)) + n
    at_m = tl.load(row + 2).to(tl.pointer_type(tl.float32)) + n
    at_v = tl.load(row + 3).to(tl.pointer_type(tl.float32)) + n
    g = tl.load(tl.load(row + 1).to(tl.pointer_type(tl.float32)) + n, mask=keep, other=0.0)
    # One minus a power near one: in float64.
    t = tl.load(tl.load(row + 4).to(tl.pointer_type(tl.float32))).to(tl.float64) + 1
    first, second = (1 - tl.exp2(t * LOG_FIRST)).to(tl.float32), (1 - tl.exp2(t * LOG_SECOND)).to(tl.float32)
    r = tl.load(rate)
    w = tl.load(at_w, mask=keep, other=0.0) * (1 - r * DECAY)
    m = FIRST * tl.load(at_m, mask=keep, other=0.0) + (1 - FIRST) * g
    v = SECOND * tl.load(at_v, mask=keep, other=0.0) + (1 - SECOND) * g * g
    tl.store(at_w, w - r / first * m / (tl.sqrt(v) / tl.sqrt(second) + EPS), mask=keep)
    tl.store(at_m, m, mask=keep)
    tl.store(at_v, v, mask=keep)
