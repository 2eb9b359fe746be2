"""SwiGLU (eq:swiglu-implementation): [SiLU(H W_g + b_g) * (H W_u + b_u)] W_d + b_d."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sigmasolver.ops.affine import linear
from sigmasolver.ops.dispatch import choose, prefers
from sigmasolver.ops.fused.tuning import ALIGNMENT

__all__ = ["swiglu"]


def swiglu(
    H: torch.Tensor,
    weight_in: torch.Tensor,
    bias_in: torch.Tensor,
    weight_out: torch.Tensor,
    bias_out: torch.Tensor,
) -> torch.Tensor:
    """Gate and up projection share a matrix product: `weight_in` (2F, C) holds the rows of the gate, then those of up.

    On a GPU the inner width is zero-padded to a multiple of ALIGNMENT: SiLU(0) * 0 = 0, so the result is the same.
    """
    if prefers("inner width", "padded", "unpadded", _why_unpadded(H, weight_out.shape[1])):
        weight_in, bias_in, weight_out = _pad_inner_width(weight_in, bias_in, weight_out)
    gate_up = linear(H, weight_in, bias_in)
    return linear(_apply_gate(gate_up), weight_out, bias_out)


def _apply_gate(gate_up: torch.Tensor) -> torch.Tensor:
    """SiLU(first half) * second half."""
    if fused := choose("swiglu", gate_up):
        return fused.silu_product(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def _why_unpadded(H: torch.Tensor, inner: int) -> str | None:
    if not H.is_cuda:
        return "the tensor is not on a GPU"
    return None if inner % ALIGNMENT else f"{inner} is a multiple of {ALIGNMENT}"


def _pad_inner_width(
    weight_in: torch.Tensor, bias_in: torch.Tensor, weight_out: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    inner = weight_out.shape[1]
    padding = -inner % ALIGNMENT
    rows = F.pad(weight_in.unflatten(0, (2, inner)), (0, 0, 0, padding)).flatten(0, 1)
    return rows, F.pad(bias_in.unflatten(0, (2, inner)), (0, padding)).flatten(), F.pad(weight_out, (0, padding))
