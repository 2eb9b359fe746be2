"""Fields on the nodes of spectral elements: the neighbourhood of each element, and its queries, keys and values.

Letters: B batch, H heads, C channels, D head width, E elements, P nodes of an element, m nodes per axis of it, d axes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from sigmasolver.ops.dispatch import choose
from sigmasolver.ops.fused.tuning import MAX_ELEMENT_SIZE

__all__ = ["SHIFTS", "heads_of_elements", "nodes_of_elements", "windows"]

SHIFTS = (-1, 0, 1)
"""Offsets of the elements along an axis that a window of two elements around a node overlaps."""


def windows(x: torch.Tensor, axis: int, m: int) -> torch.Tensor:
    """(B, *nodes, C) -> (B, *other nodes, elements, 3 m C): along one axis, the nodes of each element and its two
    neighbours, with periodic wrap-around."""
    if fused := choose("elements", x):
        return fused.windows(x, axis, m)
    cells = x.movedim(axis + 1, -2).unflatten(-2, (-1, m)).flatten(-2)
    return torch.cat([cells.roll(-shift, dims=-2) if shift else cells for shift in SHIFTS], dim=-1)


def heads_of_elements(
    fields: Sequence[torch.Tensor],
    bias: torch.Tensor,
    scale: torch.Tensor,
    turns: Sequence[torch.Tensor],
    mesh: tuple[int, ...],
    m: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values (B, P, H, E, d D), the channels of the axes concatenated.

    `fields` has a tensor (B, *nodes, 3 H D) for each axis. Queries and keys are shifted by their bias (d, 2, H, D),
    normalised over nodes and channels, multiplied by scale (d, 2, *(m,) * d, D), increased by one on the first half of
    the channels, and rotated (RoPE): `turns` has the cosines and sines (2, E, P, D / 2) of the angles for each axis.
    """
    size = ("nodes of an element times head width", m ** len(mesh) * bias.shape[-1], MAX_ELEMENT_SIZE)
    if fused := choose("elements", fields[0], limits=(size,)):
        return fused.heads_of_elements(fields, bias, scale, turns, mesh, m, eps)
    parts = []
    for axis, (field, table) in enumerate(zip(fields, turns, strict=True)):
        q, k, v = _split_heads(field, bias.shape[2], mesh, m)
        shift, weight = bias[axis][:, :, None, None], scale[axis].flatten(1, -2)
        parts.append((*(_normalise_and_rotate(x + shift[i], weight[i], table, eps) for i, x in enumerate((q, k))), v))
    Q, K, V = (torch.cat(part, dim=-1).permute(0, 3, 1, 2, 4) for part in zip(*parts, strict=True))
    return Q.to(V.dtype), K.to(V.dtype), V


def nodes_of_elements(x: torch.Tensor, mesh: tuple[int, ...], m: int) -> torch.Tensor:
    """(B, P, H, E, D) -> (B, *nodes, H D)."""
    d = len(mesh)
    x = x.permute(0, 3, 1, 2, 4).flatten(-2)
    x = x.reshape(x.shape[0], *mesh, *(m,) * d, x.shape[-1])
    x = x.permute(0, *(dim for axis in range(1, d + 1) for dim in (axis, d + axis)), 2 * d + 1)
    return x.reshape(x.shape[0], *(elements * m for elements in mesh), x.shape[-1])


def _normalise_and_rotate(x: torch.Tensor, scale: torch.Tensor, table: torch.Tensor, eps: float) -> torch.Tensor:
    (cosine, sine), (f, g) = table, F.layer_norm(x, scale.shape, scale, None, eps).chunk(2, dim=-1)
    f = f + 1
    return torch.cat((f * cosine - g * sine, f * sine + g * cosine), dim=-1)


def _split_heads(x: torch.Tensor, heads: int, mesh: tuple[int, ...], m: int) -> torch.Tensor:
    """(B, *nodes, 3 H D) -> (3, B, H, E, P, D)."""
    d, width = len(mesh), x.shape[-1] // (3 * heads)
    shape = [part for elements in mesh for part in (elements, m)]
    x = x.reshape(x.shape[0], *shape, 3, heads, width)
    x = x.permute(2 * d + 1, 0, 2 * d + 2, *range(1, 2 * d, 2), *range(2, 2 * d + 1, 2), 2 * d + 3)
    return x.reshape(3, x.shape[1], heads, math.prod(mesh), m**d, width)
