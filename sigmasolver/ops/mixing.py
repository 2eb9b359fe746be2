"""The exit of a block: branches joined to the stream, and the channels mixed (eq:swiglu-implementation).

x = H + [s_1, s_2, ...],      out = x + SwiGLU(LN(x))
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sigmasolver.ops import fused
from sigmasolver.ops.affine import Affine, layer_norm
from sigmasolver.ops.stream import whole
from sigmasolver.ops.swiglu import swiglu

__all__ = ["joined", "mixing_residual"]


def joined(H: torch.Tensor, parts: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """`H` with one branch added to each equal share of its channels; None leaves a share as it is."""
    if len(parts) == 1:
        return H if parts[0] is None else H + parts[0]
    shares = H.chunk(len(parts), dim=-1)
    return torch.cat([h if part is None else h + part for h, part in zip(shares, parts, strict=True)], dim=-1)


def mixing_residual(
    H: torch.Tensor,
    rest: torch.Tensor | None,
    parts: Sequence[torch.Tensor | None],
    norm: Affine,
    gate_up: Affine,
    down: Affine,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Join, then x + SwiGLU(LN(x)), as `ops.stream` has it; `gate_up` and `down` as `ops.swiglu` has them."""
    given = [part for part in parts if part is not None]
    if fused.quick(H) and len(given) == len(parts) <= 2 and H.shape[-1] <= fused.WIDEST:
        from sigmasolver.ops.fused.mixing import mixing_residual as twin

        return twin(H, rest, given, norm, gate_up, down, eps)
    x = joined(whole(H, rest), parts)
    return x + swiglu(layer_norm(x, *norm, eps), *gate_up, *down), None
