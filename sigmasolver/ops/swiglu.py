"""SwiGLU (eq:swiglu-implementation): [SiLU(H W_g + b_g) * (H W_u + b_u)] W_d + b_d."""

from __future__ import annotations

import torch
import torch.nn.functional as F

__all__ = ["swiglu"]


def swiglu(
    H: torch.Tensor,
    weight_in: torch.Tensor,
    bias_in: torch.Tensor,
    weight_out: torch.Tensor,
    bias_out: torch.Tensor,
) -> torch.Tensor:
    """Gate and up projection share one matrix product: `weight_in` (2F, C) holds the gate's rows, then the up's."""
    gate, up = F.linear(H, weight_in, bias_in).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, weight_out, bias_out)
