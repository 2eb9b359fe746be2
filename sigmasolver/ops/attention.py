"""Softmax attention between all tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sigmasolver.ops.dispatch import TRANSFORMED, is_transformed, prefers

__all__ = ["attention"]


def attention(
    Q_BHND: torch.Tensor,
    K_BHND: torch.Tensor,
    V_BHND: torch.Tensor,
    dropout: float = 0.0,
    mask_NN: torch.Tensor | None = None,
) -> torch.Tensor:
    """softmax(Q K^T / sqrt(D)) V, (B, H, N, D); `dropout` is the dropout probability of the attention weights.

    B may be several axes. A token attends only where the boolean mask is true. Uses `scaled_dot_product_attention`,
    which never materialises the N x N matrix but supports neither forward-mode nor second derivatives; in forward mode
    and inside a `torch.func` transform, which may need them, the products are explicit.
    """
    # Unlike a fused kernel, torch's function can be traced: `is_traced` would avoid it too often.
    reason = TRANSFORMED if is_transformed(Q_BHND) else None
    if not prefers("attention", "scaled_dot_product_attention", "explicit products", reason):
        S_BHNN = Q_BHND @ K_BHND.mT * Q_BHND.shape[-1] ** -0.5
        if mask_NN is not None:
            S_BHNN = S_BHNN.masked_fill(~mask_NN, -torch.inf)
        return F.dropout(torch.softmax(S_BHNN, dim=-1), dropout) @ V_BHND
    q, k, v = (x.flatten(0, -4) for x in (Q_BHND, K_BHND, V_BHND))  # torch's kernels expect four axes
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask_NN, dropout_p=dropout)
    return out.unflatten(0, Q_BHND.shape[:-3])
