"""SwiGLU (eq:swiglu-implementation): [SiLU(H W_g + b_g) * (H W_u + b_u)] W_d + b_d."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sigmasolver.ops.affine import linear
from sigmasolver.ops.dispatch import choose, takes
from sigmasolver.ops.fused.tuning import ALIGNED

__all__ = ["swiglu"]


def swiglu(
    H: torch.Tensor,
    weight_in: torch.Tensor,
    bias_in: torch.Tensor,
    weight_out: torch.Tensor,
    bias_out: torch.Tensor,
) -> torch.Tensor:
    """Gate and up projection share one matrix product: `weight_in` (2F, C) holds the gate's rows, then the up's.

    On a GPU the inner width is padded with zeros to a multiple of ALIGNED: SiLU(0) * 0 = 0, so nothing changes.
    """
    if takes("inner width", "padded", "as it is", _why_unpadded(H, weight_out.shape[1])):
        weight_in, bias_in, weight_out = _padded(weight_in, bias_in, weight_out)
    both = linear(H, weight_in, bias_in)
    return linear(_gated(both), weight_out, bias_out)


def _gated(both: torch.Tensor) -> torch.Tensor:
    """SiLU(first half) * second half."""
    if fused := choose("swiglu", both):
        return fused.silu_product(both)
    gate, up = both.chunk(2, dim=-1)
    return F.silu(gate) * up


def _why_unpadded(H: torch.Tensor, inner: int) -> str | None:
    if not H.is_cuda:
        return "the tensor is not on a GPU"
    return None if inner % ALIGNED else f"{inner} is a multiple of {ALIGNED}"


def _padded(
    weight_in: torch.Tensor, bias_in: torch.Tensor, weight_out: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    inner = weight_out.shape[1]
    more = -inner % ALIGNED
    rows = F.pad(weight_in.unflatten(0, (2, inner)), (0, 0, 0, more)).flatten(0, 1)
    return rows, F.pad(bias_in.unflatten(0, (2, inner)), (0, more)).flatten(), F.pad(weight_out, (0, more))
