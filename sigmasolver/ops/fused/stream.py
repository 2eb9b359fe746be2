"""Load and store the residual stream (`ops.stream`) inside kernels."""

from __future__ import annotations

import triton.language as tl

from sigmasolver.ops.fused.jit import jit

__all__ = ["load_stream", "store_stream"]


@jit
def load_stream(
    main: tl.tensor, low: tl.tensor, offsets: tl.tensor, keep: tl.tensor, TWO_PARTS: tl.constexpr
) -> tl.tensor:
    """main[offsets] + low[offsets] in float32, 0 outside the mask `keep`; without TWO_PARTS, main[offsets] alone."""
    x = tl.load(main + offsets, mask=keep, other=0.0).to(tl.float32)
    if TWO_PARTS:
        x += tl.load(low + offsets, mask=keep, other=0.0).to(tl.float32)
    return x


@jit
def store_stream(
    main: tl.tensor, low: tl.tensor, offsets: tl.tensor, x: tl.tensor, keep: tl.tensor, TWO_PARTS: tl.constexpr
) -> None:
    """The inverse of `load_stream`. With TWO_PARTS, `main` is bf16, the upper half of a float32."""
    if TWO_PARTS:
        # Round in integer arithmetic: converting to bf16 and back would take four times as long.
        rounded = ((x.to(tl.int32, bitcast=True) + 0x8000) & -0x10000).to(tl.float32, bitcast=True)
        # The low part first: x is then dead, which saves registers (twenty in `mixing._mixing_forward`).
        tl.store(low + offsets, (x - rounded).to(low.dtype.element_ty), mask=keep)
        tl.store(main + offsets, rounded.to(main.dtype.element_ty), mask=keep)
    else:
        tl.store(main + offsets, x.to(main.dtype.element_ty), mask=keep)
