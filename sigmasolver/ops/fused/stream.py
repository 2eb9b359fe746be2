"""Reading and writing the residual stream (`ops.stream`) inside kernels."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["load_stream", "store_stream"]


@triton.jit
def load_stream(main, rest, place, keep, SPLIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Numbers of a stream in float32 (`ops.stream`); not SPLIT: `main` is all of it."""
    x = tl.load(main + place, mask=keep, other=0.0).to(tl.float32)
    if SPLIT:
        x += tl.load(rest + place, mask=keep, other=0.0).to(tl.float32)
    return x


@triton.jit
def store_stream(main, rest, place, x, keep, SPLIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """The way back. SPLIT: `main` is bf16, the upper half of a float32."""
    if SPLIT:
        # Rounded by whole numbers: to convert there and back again would take four times as long.
        near = ((x.to(tl.int32, bitcast=True) + 0x8000) & -0x10000).to(tl.float32, bitcast=True)
        # The rest first: x need not be held then, twenty registers in `mixing._whole`.
        tl.store(rest + place, (x - near).to(rest.dtype.element_ty), mask=keep)
        tl.store(main + place, near.to(main.dtype.element_ty), mask=keep)
    else:
        tl.store(main + place, x.to(main.dtype.element_ty), mask=keep)
