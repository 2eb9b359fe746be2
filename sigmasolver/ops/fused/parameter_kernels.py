"""Kernels over all parameters of a model: one program per row of a table of addresses, int64 (programs, columns).

Kept apart from `weight_cache` and `adamw`, which must import without Triton.
"""

from __future__ import annotations

import triton.language as tl

from sigmasolver.ops.fused.jit import jit

__all__ = ["adamw_step", "arrange_weights"]


@jit
def arrange_weights(table: tl.tensor, PIECE: tl.constexpr, TABLE_COLUMNS: tl.constexpr) -> None:
    """to[i across + j along] = weight[i, j] for up to PIECE elements of a weight (I, J), cast to the dtype of `to`.

    Columns: address of weight, address of `to`, first element, number of elements, J, across, along, whether `to` is
    float32.
    """
    row = table + tl.program_id(0) * TABLE_COLUMNS
    n = tl.arange(0, PIECE)
    keep = n < tl.load(row + 3)
    n = (tl.load(row + 2) + n).to(tl.int32)
    columns = tl.load(row + 4).to(tl.int32)
    value = tl.load(tl.load(row).to(tl.pointer_type(tl.float32)) + n, mask=keep, other=0.0)
    offsets = n // columns * tl.load(row + 5) + n % columns * tl.load(row + 6)
    if tl.load(row + 7) == 1:
        tl.store(tl.load(row + 1).to(tl.pointer_type(tl.float32)) + offsets, value, mask=keep)
    else:
        tl.store(tl.load(row + 1).to(tl.pointer_type(tl.bfloat16)) + offsets, value.to(tl.bfloat16), mask=keep)


@jit
def adamw_step(
    table: tl.tensor, learning_rate: tl.tensor,
    BETA1: tl.constexpr, BETA2: tl.constexpr, LOG_BETA1: tl.constexpr, LOG_BETA2: tl.constexpr,
    EPS: tl.constexpr, DECAY: tl.constexpr, PIECE: tl.constexpr, TABLE_COLUMNS: tl.constexpr,
) -> None:  # fmt: skip
    """The update of `adamw` for up to PIECE elements of a parameter. LOG_BETA is to base 2.

    Columns: addresses of parameter, gradient, first and second moment, and step count before this update; number of
    elements.
    """
    row = table + tl.program_id(0) * TABLE_COLUMNS
    n = tl.arange(0, PIECE)
    keep = n < tl.load(row + 5)
    weight = tl.load(row).to(tl.pointer_type(tl.float32)) + n
    first = tl.load(row + 2).to(tl.pointer_type(tl.float32)) + n
    second = tl.load(row + 3).to(tl.pointer_type(tl.float32)) + n
    g = tl.load(tl.load(row + 1).to(tl.pointer_type(tl.float32)) + n, mask=keep, other=0.0)
    # In float64: 1 - beta^t cancels where beta^t is close to 1.
    t = tl.load(tl.load(row + 4).to(tl.pointer_type(tl.float32))).to(tl.float64) + 1
    bias1, bias2 = (1 - tl.exp2(t * LOG_BETA1)).to(tl.float32), (1 - tl.exp2(t * LOG_BETA2)).to(tl.float32)
    r = tl.load(learning_rate)
    w = tl.load(weight, mask=keep, other=0.0) * (1 - r * DECAY)
    m = BETA1 * tl.load(first, mask=keep, other=0.0) + (1 - BETA1) * g
    v = BETA2 * tl.load(second, mask=keep, other=0.0) + (1 - BETA2) * g * g
    tl.store(weight, w - r / bias1 * m / (tl.sqrt(v) / tl.sqrt(bias2) + EPS), mask=keep)
    tl.store(first, m, mask=keep)
    tl.store(second, v, mask=keep)
