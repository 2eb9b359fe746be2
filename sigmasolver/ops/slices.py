"""From points to slices and back (eq:physical-slicing, eq:srpa-update, eq:srpa-deslicing).

Letters: B batch, H heads, N points, M slices, D head width, C = H D channels.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import nn

from sigmasolver.ops.dispatch import Limit, choose
from sigmasolver.ops.fused import dot_precision, shared_memory, tuning
from sigmasolver.ops.modules import EPSILON, RoutingModule, UpdateModule, affine_of

__all__ = [
    "EPSILON",
    "attention_matrix",
    "deslice",
    "routing",
    "slice_attention",
    "slice_limits",
    "slice_states",
    "split_heads",
]


def slice_attention(
    R: torch.Tensor,
    F: torch.Tensor,
    route: RoutingModule,
    update: UpdateModule,
    project: nn.Linear,
    dropout: nn.Dropout,
) -> torch.Tensor:
    """R and F (B, *grid, C) -> (B, *grid, C): slice the points, update the slices, deslice, project the output."""
    slices, heads = route.map.weight.shape[0], len(route.map.temperature)
    fused = choose(
        "slices",
        R,
        limits=slice_limits(R, heads, slices),
        unless={"dropout is active": dropout.training and dropout.p > 0},
        parts={"the routing": route, "the update": update, "the projection": project, "the dropout": dropout},
    )
    if fused:
        flat = R.flatten(1, -2), F.flatten(1, -2)
        return fused.slice_attention(*flat, route.map, update.tensors, affine_of(project)).view(R.shape)
    P_BHNM = route(split_heads(R, heads))
    Z_BHMD = slice_states(P_BHNM, split_heads(F, heads))
    O = deslice(P_BHNM, update(Z_BHMD)).transpose(1, 2).reshape(R.shape)
    return dropout(project(O))


def split_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """(B, *grid, C) -> (B, H, N, D): flatten the points and split the channels into heads of width D."""
    points = math.prod(x.shape[1:-1])  # not -1: a batch may be empty
    return x.reshape(x.shape[0], points, heads, x.shape[-1] // heads).transpose(1, 2)


def routing(
    R_BHND: torch.Tensor, weight_DM: torch.Tensor, bias_M: torch.Tensor, temperature_H: torch.Tensor
) -> torch.Tensor:
    """P (B, H, N, M) = softmax over slices of (R W_s + b_s) / tau; the row of each point sums to one."""
    logits = R_BHND @ weight_DM + bias_M
    return torch.softmax(logits / temperature_H[:, None, None].to(logits.dtype), dim=-1)


def slice_states(P_BHNM: torch.Tensor, F_BHND: torch.Tensor) -> torch.Tensor:
    """Z = P^T F / (mass + epsilon), with mass the sum of P over points: routing-weighted means of the features."""
    # An explicit dtype keeps autocast from first copying P to it.
    wide = torch.promote_types(P_BHNM.dtype, torch.float32)
    mass_BHM = P_BHNM.sum(dim=-2, dtype=wide) + EPSILON
    Z_BHMD = (P_BHNM.mT @ F_BHND) / mass_BHM[..., None]
    return Z_BHMD.to(torch.promote_types(P_BHNM.dtype, F_BHND.dtype))


def attention_matrix(Q_BHMD: torch.Tensor, K_BHMD: torch.Tensor) -> torch.Tensor:
    """A = softmax(Q K^T / sqrt(d_h)): rows are queries, columns are keys."""
    return torch.softmax((Q_BHMD @ K_BHMD.mT) / math.sqrt(Q_BHMD.shape[-1]), dim=-1)


def deslice(P_BHNM: torch.Tensor, Z_BHMD: torch.Tensor) -> torch.Tensor:
    """O = P Z: each point reads the slices with its routing weights."""
    return P_BHNM @ Z_BHMD


def slice_limits(R: torch.Tensor, heads: int, slices: int) -> Iterator[Limit]:
    """Limits of the kernels over points and slices; a generator, so that nothing is computed during tracing."""
    D = R.shape[-1] // heads
    yield "width", R.shape[-1], tuning.MAX_CHANNELS
    yield "number of slices", slices, tuning.MAX_SLICES
    yield "head width", D, tuning.MAX_HEAD_WIDTH
    yield "padded slices times padded head width", tuning.tile_size(slices) * tuning.tile_size(D), tuning.MAX_STATE_SIZE
    if R.is_cuda:
        kind = "bf16" if R.element_size() == 2 else dot_precision()
        yield "shared memory in bytes", tuning.slice_shared_bytes(kind, slices, D), shared_memory(R)
