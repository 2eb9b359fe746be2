"""Points to slices and back (eq:physical-slicing, eq:srpa-update, eq:srpa-deslicing): plain definitions.

Letters: B batch, H heads, N points, M slices, D head width.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

__all__ = ["EPSILON", "SliceMap", "attention_matrix", "deslice", "routing", "slice_states"]

EPSILON = 1e-5
"""The stabiliser of the slice mass; with it a constant field is not exactly preserved."""


class SliceMap(NamedTuple):
    """What routes points to slices, as the parameters are stored."""

    weight: torch.Tensor
    """(M, D), shared by the heads."""
    bias: torch.Tensor
    """(M,)"""
    temperature: torch.Tensor
    """(H,)"""
    limits: tuple[float, float]
    """The lowest and highest temperature that is used."""


def routing(
    R_BHND: torch.Tensor, weight_DM: torch.Tensor, bias_M: torch.Tensor, temperature_H: torch.Tensor
) -> torch.Tensor:
    """P = softmax over slices of (R W_s + b_s) / tau; every point's row sums to one. Gives (B, H, N, M)."""
    logits = R_BHND @ weight_DM + bias_M
    return torch.softmax(logits / temperature_H[:, None, None].to(logits.dtype), dim=-1)


def slice_states(P_BHNM: torch.Tensor, F_BHND: torch.Tensor) -> torch.Tensor:
    """Z = D^-1 P^T F with D the mass of each slice plus epsilon: means of the features, weighted by the routing."""
    mass_BHM = P_BHNM.sum(dim=-2) + EPSILON
    return (P_BHNM.mT @ F_BHND) / mass_BHM[..., None]


def attention_matrix(Q_BHMD: torch.Tensor, K_BHMD: torch.Tensor) -> torch.Tensor:
    """A = softmax(Q K^T / sqrt(d_h)): row = asking slice, column = slice that answers."""
    return torch.softmax((Q_BHMD @ K_BHMD.mT) / math.sqrt(Q_BHMD.shape[-1]), dim=-1)


def deslice(P_BHNM: torch.Tensor, Z_BHMD: torch.Tensor) -> torch.Tensor:
    """O = P Z: every point reads the slices with the weights it was routed by."""
    return P_BHNM @ Z_BHMD
