"""SwiGLU (eq:swiglu-implementation): [SiLU(H W_g + b_g) * (H W_u + b_u)] W_d + b_d."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sigmasolver.ops import fused
from sigmasolver.ops.affine import linear

__all__ = ["ALIGNED", "swiglu"]

ALIGNED = 16
"""Matrix units read rows of whole multiples; an inner width of 170 or 341 sends the product to kernels that load
single values."""


def swiglu(
    H: torch.Tensor,
    weight_in: torch.Tensor,
    bias_in: torch.Tensor,
    weight_out: torch.Tensor,
    bias_out: torch.Tensor,
) -> torch.Tensor:
    """Gate and up projection share one matrix product: `weight_in` (2F, C) holds the gate's rows, then the up's.

    On a GPU the inner width is filled up with zeros to a multiple of ALIGNED: SiLU(0) * 0 = 0, so nothing changes.
    """
    if H.is_cuda and weight_out.shape[1] % ALIGNED:
        weight_in, bias_in, weight_out = _filled(weight_in, bias_in, weight_out)
    both = linear(H, weight_in, bias_in)
    return linear(_gated(both), weight_out, bias_out)


def _gated(both: torch.Tensor) -> torch.Tensor:
    """SiLU(first half) * second half."""
    if fused.usable(both):
        from sigmasolver.ops.fused.rows import silu_product

        return silu_product(both)
    gate, up = both.chunk(2, dim=-1)
    return F.silu(gate) * up


def _filled(
    weight_in: torch.Tensor, bias_in: torch.Tensor, weight_out: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    inner = weight_out.shape[1]
    more = -inner % ALIGNED
    rows = F.pad(weight_in.unflatten(0, (2, inner)), (0, 0, 0, more)).flatten(0, 1)
    return rows, F.pad(bias_in.unflatten(0, (2, inner)), (0, more)).flatten(), F.pad(weight_out, (0, more))
