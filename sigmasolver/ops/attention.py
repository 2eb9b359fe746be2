"""Softmax attention between all tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F

__all__ = ["attention"]


def attention(Q_BHND: torch.Tensor, K_BHND: torch.Tensor, V_BHND: torch.Tensor, dropout: float = 0.0) -> torch.Tensor:
    """softmax(Q K^T / sqrt(D)) V, (B, H, N, D); `dropout` is the share of the attention that is dropped.

    By torch's fused call, which never stores the N x N matrix but knows neither forward-mode nor second derivatives:
    inside a transform of `torch.func`, which may want them, it is written out.
    """
    if not torch.compiler.is_compiling() and torch._C._functorch.is_functorch_wrapped_tensor(Q_BHND):
        A_BHNN = torch.softmax(Q_BHND @ K_BHND.mT * Q_BHND.shape[-1] ** -0.5, dim=-1)
        return F.dropout(A_BHNN, dropout) @ V_BHND
    return F.scaled_dot_product_attention(Q_BHND, K_BHND, V_BHND, dropout_p=dropout)
