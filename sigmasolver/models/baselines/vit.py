"""ViT, the vision transformer (Dosovitskiy et al., ICLR 2021), for fields: attention between all patches.

    fields --- pad --- patches of 4^d points --- Linear --- + positions --- block x depth --- LN --- Linear --->

    block    T --- + attention(LN(T)) --- + MLP(LN(T)) ---> T             MLP: width -> 4 width -> width, one GELU
    attention    softmax(Q K^T / sqrt(D)) V per head, then a linear map; Q, K and V are bias-free maps of T

The last linear map decodes a token to the 4^d points of its patch. The field is zero-padded at the high end to whole
patches, and the output cropped. Every patch of `config.grid` has a learned position embedding; on other grids the
embeddings are interpolated linearly, as the paper does for images of another resolution.

From the paper of the ViT: tokens, learned positions, pre-norm blocks, the inner width, the final norm. From the closest
public code for PDEs, Unisolver's backbone: patches of 4 points per axis, no class token, no bias in Q, K and V, the map
back to a patch. Inferred: the paper does not describe the ViT of its comparison; at 128 x 128 points, width 128 and
depth 8 this one has 1.74 M parameters. Weights and positions are initialised as in Transolver-sigma.

Letters: B batch, H heads, N tokens, D head width, d axes.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from sigmasolver.models.block import Branch
from sigmasolver.models.config import SolverConfig
from sigmasolver.models.layers import LayerNorm, TimeEmbedding, cropped, full_precision, linear, padded, perceptron
from sigmasolver.models.solver import GridModel
from sigmasolver.ops.attention import attention
from sigmasolver.ops.slices import split_heads

__all__ = ["SelfAttention", "ViT", "from_patches", "to_patches", "vit"]


def to_patches(x: torch.Tensor, patch: int) -> torch.Tensor:
    """(B, *grid, C) -> (B, *tokens, patch^d C): the points of a patch in grid order, channels fastest."""
    batch, *grid, channels = x.shape
    axes = len(grid)
    split = x.reshape(batch, *(size for n in grid for size in (n // patch, patch)), channels)
    order = (0, *range(1, 2 * axes, 2), *range(2, 2 * axes + 1, 2), 2 * axes + 1)
    return split.permute(order).reshape(batch, *(n // patch for n in grid), patch**axes * channels)


def from_patches(T: torch.Tensor, patch: int) -> torch.Tensor:
    """(B, *tokens, patch^d C) -> (B, *grid, C), the inverse of `to_patches`."""
    batch, *tokens, inner = T.shape
    axes = len(tokens)
    split = T.reshape(batch, *tokens, *(patch,) * axes, inner // patch**axes)
    order = (0, *(dim for axis in range(axes) for dim in (1 + axis, 1 + axes + axis)), 2 * axes + 1)
    return split.permute(order).reshape(batch, *(n * patch for n in tokens), inner // patch**axes)


class SelfAttention(nn.Module):
    """`(B, *tokens, width)` -> the same shape."""

    def __init__(self, config: SolverConfig) -> None:
        super().__init__()
        self.heads, width = config.heads, config.width
        self.query, self.key, self.value = (linear(width, width, bias=False) for _ in range(3))
        self.project = linear(width, width)
        self.dropout = nn.Dropout(config.options.dropout)

    def forward(self, Y: torch.Tensor) -> torch.Tensor:
        Q_BHND, K_BHND, V_BHND = (split_heads(layer(Y), self.heads) for layer in (self.query, self.key, self.value))
        O_BHND = attention(Q_BHND, K_BHND, V_BHND, self.dropout.p if self.training else 0.0)
        out: torch.Tensor = self.dropout(self.project(O_BHND.transpose(1, 2).reshape(Y.shape)))
        return out


class ViT(GridModel):
    """`(B, *grid, in_channels)` -> `(B, *grid, out_channels)` with patches of `patch` points per axis."""

    FACTOR = 4

    def __init__(self, config: SolverConfig, patch: int = 4) -> None:
        super().__init__(config)
        self.patch, C, points = patch, config.width, patch**config.axes
        self.embed = linear(points * config.in_channels, C)
        self.positions = nn.Parameter(torch.empty(*self._tokens(config.grid), C))
        nn.init.trunc_normal_(self.positions, std=0.02)
        self.time = TimeEmbedding(C, config.scalars) if config.scalars else None
        self.blocks = nn.ModuleList(self._block(config) for _ in range(config.depth))
        self.norm = LayerNorm(C)
        self.readout = linear(C, points * config.out_channels)

    def _block(self, config: SolverConfig) -> nn.Module:
        C = config.width
        mlp = perceptron(C, self.FACTOR * C, C)
        return nn.Sequential(OrderedDict(attention=Branch(C, SelfAttention(config)), mlp=Branch(C, mlp)))

    def forward(self, x: torch.Tensor, time: torch.Tensor | None = None) -> torch.Tensor:
        """`time`, for models with a time embedding: (B,), or (B, n) with conditions after the time."""
        self.check(x, time)
        grid = tuple(x.shape[1:-1])
        tokens = self._tokens(grid)
        patches = to_patches(padded(x, [n * self.patch for n in tokens]), self.patch)
        T = self.with_time(self.embed(patches) + self._position_embedding(tokens), time)
        for block in self.blocks:
            T = block(T)
        with full_precision(x):
            T = self.readout(self.norm(T.to(self.dtype)))
        return cropped(from_patches(T, self.patch), grid)

    def _tokens(self, grid: Sequence[int]) -> tuple[int, ...]:
        return tuple(math.ceil(n / self.patch) for n in grid)

    def _position_embedding(self, tokens: tuple[int, ...]) -> torch.Tensor:
        """The position embeddings of the tokens, (*tokens, width)."""
        if tokens == tuple(self.positions.shape[:-1]):
            return self.positions
        mode = ("linear", "bilinear", "trilinear")[len(tokens) - 1]
        return F.interpolate(self.positions.movedim(-1, 0)[None], tokens, mode=mode)[0].movedim(0, -1)


def vit(config: SolverConfig, patch: int = 4) -> ViT:
    """ViT with `depth` blocks; `slices`, `modes` and the options `expansion`, `positions`, `lattice` and, apart
    from the check of the grid, `padding` are ignored."""
    return ViT(config, patch)
