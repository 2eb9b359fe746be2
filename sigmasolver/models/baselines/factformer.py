"""FactFormer (Li et al., NeurIPS 2023): attention factorised into a kernel matrix per axis, then latent time marching.

    fields -> lift -> block x depth -> expand -> [ + e_t, + MLP(LN) ] per frame -> head -> fields of that frame

Block, on H with n_1 x ... x n_d points and C channels:

    H <- H + P(x) + Attention(H + P(x))        P(x) = W [sin(2 pi x B), cos(2 pi x B)] + b,  B frozen, normal
    Y = LN(H),  V = Y W_v                      h heads of width D
    for every axis a:
        z_a = MLP(LN(mean of Y W_in W_a over the other axes))        n_a x C; MLP: Linear, gated GELU, Linear
        K_a = R(z_a W_q) R(z_a W_k)^T                                n_a x n_a per head; no softmax, no scaling
    O = K_1 x ... x K_d applied to V
    Attention = W_2 GELU(W_1 (O - mean) / std), statistics per sample and head, over all points and channels

R is a rotary embedding: it rotates each pair of channels (j, j + E/2) of a query or key of width E = kernel D by the
angle 64 x 10000^(-2j/E), so that K_a depends on the distance of two points. The mean over the other axes is taken
first: it commutes with the linear maps, which then act on n_a rows instead of all points. The latent state takes one
step per output frame (`out_frames`); a head of grouped linear maps decodes each of them.

From the paper: factorised kernels, pooling, rotary positions, latent marching. From the released code: all sizes,
norms, biases and the initialisation, the random Fourier features before every block, the box in which positions are
measured, the convolutions for tasks with walls. Its settings as models:

    model               heads  kernel  latent  box   features  lift       also
    factformer          any    2       2       2 pi  8         linear     (Kolmogorov flow; timing runs of Transolver-σ)
    factformer-it3d     6      3       1.5     2 pi  8         by field
    factformer-smoke3d  6      3       1.5     8     1         by field   margin of 2 cells, convolutions
    factformer-darcy    12     2       none    1     1         linear     convolutions

The box of `factformer` on other tasks is our choice, as is upsampling to the input grid. The frequencies B are frozen
parameters, as in the released code: they are stored and count as bytes, but not as trainable parameters.

Letters: B batch, H heads, N points, C width, D head width, d axes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F
from torch import nn

from sigmasolver.models.config import SolverConfig
from sigmasolver.models.layers import LayerNorm, Linear, TimeEmbedding, cropped, full_precision, padded
from sigmasolver.models.solver import GridModel
from sigmasolver.ops.constants import grid_constant

__all__ = ["FactFormer", "FactorisedAttention", "Form", "factformer"]

GROUPS = 8
"""Channel groups of the head's first map."""


@dataclass(frozen=True)
class Form:
    """Settings that differ between the released tasks."""

    heads: int | None = None
    """None: `heads` of the config."""
    head_width: int = 64
    kernel: int = 2
    """Width of queries and keys, as a multiple of the head width."""
    latent: float | None = 2.0
    """Width of the latent state, as a multiple of `width`; None: no marching, one map to all channels."""
    norm_groups: int = 16
    """Groups of the head's GroupNorm."""
    box: float = 2 * math.pi
    """Length of every axis; positions run from 0 to `box`."""
    features: float = 8.0
    """Standard deviation of the frozen frequencies."""
    by_field: bool = False
    """Lift each field separately, then mix fields and frames."""
    margin: int = 0
    """Number of points of zero padding at the high end of every axis, around the blocks."""
    convolutions: bool = False
    """Concatenate the output of a small convolutional network, for tasks with walls."""


@grid_constant
def axis_points(points: int, box: float, margin: int, device: torch.device) -> torch.Tensor:
    """(n,) in float64: from 0 to `box`, end points included; the margin continues with the same spacing."""
    return torch.arange(points, dtype=torch.float64, device=device) * (box / (points - margin - 1))


@grid_constant
def rotation(
    points: int, box: float, margin: int, width: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """(2, n, width / 2): cosines and sines of the rotary angles."""
    frequencies = 10_000.0 ** -(torch.arange(0, width, 2, dtype=torch.float64, device=device) / width)
    angles = 64 * axis_points(points, box, margin, device)[:, None] * frequencies
    return torch.stack((angles.cos(), angles.sin())).to(dtype)


def rotate(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """(..., n, E): rotate each pair of channels (j, j + E/2) by its angle."""
    (cosine, sine), (first, second) = table, x.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


def standardise(
    x: torch.Tensor, groups: int, eps: float, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """(B, *grid, C): group norm over all points and the channels of a group, with optional weight and bias (C,).

    Group statistics are combined from channel statistics; then one pass scales and shifts.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    channel_statistics = torch.var_mean(wide.flatten(1, -2), dim=1, correction=0)
    variance, mean = (statistic.unflatten(-1, (groups, -1)) for statistic in channel_statistics)
    centre = mean.mean(-1, keepdim=True)
    group_variance = (variance + (mean - centre).square()).mean(-1, keepdim=True)
    scale = (group_variance + eps).rsqrt().expand_as(mean).flatten(1)
    scale = scale if weight is None else scale * weight
    shift = -centre.expand_as(mean).flatten(1) * scale
    shift = shift if bias is None else shift + bias
    channels = (x.shape[0], *(1,) * (x.ndim - 2), x.shape[-1])
    return torch.addcmul(shift.view(channels), wide, scale.view(channels)).to(x.dtype)


def standardise_heads(O_BHnD: torch.Tensor, eps: float) -> torch.Tensor:
    """(B, H, *grid, D): zero mean and unit variance over all points and channels of a head.

    With the unbiased variance; torch's group_norm uses the biased one.
    """
    count, heads = math.prod(O_BHnD.shape[2:]), O_BHnD.shape[1]
    correction = (count - 1) / count
    with full_precision(O_BHnD):  # group_norm accumulates in float32, also for bf16 inputs
        weight = O_BHnD.new_full((heads,), math.sqrt(correction))
        return F.group_norm(O_BHnD.flatten(2), heads, weight, eps=eps * correction).view(O_BHnD.shape)


class FourierFeatures(nn.Module):
    """(*grid, C): random Fourier features of the positions with frozen frequencies, then a linear map.

    The frequencies stay float32 whatever dtype the model is cast to: phases reach hundreds of radians, beyond the
    precision of bf16. By the angle addition formulas, sines and cosines are evaluated for n_a points per axis only.
    """

    def __init__(self, config: SolverConfig, form: Form) -> None:
        super().__init__()
        self.form = form
        frequencies = form.features * torch.randn(config.axes, config.width // 2)
        self.frequencies = nn.Parameter(frequencies, requires_grad=False)
        self.linear = Linear(config.width, config.width)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        before = self.frequencies.data
        nn.Module._apply(self, fn, recurse)
        if self.frequencies.dtype != before.dtype:
            self.frequencies.data = before.to(self.frequencies.device)
        return self

    def forward(self, grid: tuple[int, ...]) -> torch.Tensor:
        form, wide = self.form, torch.promote_types(self.linear.weight.dtype, torch.float32)
        sine: torch.Tensor | None = None
        cosine: torch.Tensor | None = None
        for points, frequency in zip(grid, self.frequencies, strict=True):
            x = axis_points(points, form.box, form.margin, self.frequencies.device)
            phase = 2 * math.pi * x[:, None] * frequency.double()
            s, c = phase.sin().to(wide), phase.cos().to(wide)
            if sine is None or cosine is None:
                sine, cosine = s, c
            else:
                sine, cosine = sine[..., None, :], cosine[..., None, :]
                sine, cosine = sine * c + cosine * s, cosine * c - sine * s
        assert sine is not None and cosine is not None
        out: torch.Tensor = self.linear(torch.cat((sine, cosine), dim=-1).to(self.linear.weight.dtype))
        return out


class AxisKernel(nn.Module):
    """(B, n, C) -> (B, H, n, n): the attention kernel of one axis."""

    START = 0.02

    def __init__(self, config: SolverConfig, form: Form, heads: int) -> None:
        super().__init__()
        self.form, self.heads, self.width = form, heads, form.kernel * form.head_width
        width = config.width
        self.reduce = Linear(width, width, bias=False)
        self.norm = LayerNorm(width)
        self.gate_up = Linear(width, 2 * width)
        self.down = Linear(width, width)
        self.query = Linear(width, heads * self.width, bias=False)
        self.key = Linear(width, heads * self.width, bias=False)
        for projection in (self.query, self.key):
            nn.init.xavier_uniform_(projection.weight, gain=self.START)

    def forward(self, pooled_BnC: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(self.norm(self.reduce(pooled_BnC))).chunk(2, dim=-1)
        z_BnC = self.down(F.gelu(gate) * up)
        wide = torch.promote_types(z_BnC.dtype, torch.float32)
        table = rotation(z_BnC.shape[1], self.form.box, self.form.margin, self.width, wide, z_BnC.device)
        q, k = (
            rotate(project(z_BnC).unflatten(-1, (self.heads, self.width)).transpose(1, 2), table).to(z_BnC.dtype)
            for project in (self.query, self.key)
        )
        return q @ k.mT


class FactorisedAttention(nn.Module):
    """`(B, *grid, C)` -> the same shape."""

    def __init__(self, config: SolverConfig, form: Form) -> None:
        super().__init__()
        self.heads = form.heads or config.heads
        width, inner = config.width, self.heads * form.head_width
        self.norm = LayerNorm(width)
        self.value = Linear(width, inner, bias=False)
        self.enter = Linear(width, width, bias=False)
        self.kernels = nn.ModuleList(AxisKernel(config, form, self.heads) for _ in config.grid)
        self.project = nn.Sequential(Linear(inner, width, bias=False), nn.GELU(), Linear(width, width, bias=False))

    def forward(self, H: torch.Tensor) -> torch.Tensor:
        Y = self.norm(H)
        O = self.value(Y).unflatten(-1, (self.heads, -1)).movedim(-2, 1)  # (B, H, *grid, D)
        # The order is free: from the last axis to the first, each head ends up contiguous.
        for axis, kernel in reversed(list(enumerate(self.kernels))):
            other_axes = [1 + other for other in range(len(self.kernels)) if other != axis]
            K = kernel(self.enter(Y.mean(other_axes) if other_axes else Y))
            lines = O.movedim(2 + axis, 2)
            O = (K @ lines.flatten(3)).view(lines.shape).movedim(2, 2 + axis)
        out: torch.Tensor = self.project(standardise_heads(O, eps=1e-8).movedim(1, -2).flatten(-2))
        return out


class Block(nn.Module):
    """`(B, *grid, C)` -> the same shape: positions, then attention."""

    def __init__(self, config: SolverConfig, form: Form) -> None:
        super().__init__()
        self.positions = FourierFeatures(config, form)
        self.attention = FactorisedAttention(config, form)

    def forward(self, H: torch.Tensor) -> torch.Tensor:
        H = H + self.positions(tuple(H.shape[1:-1]))
        out: torch.Tensor = H + self.attention(H)
        return out


class LiftByField(nn.Module):
    """`(B, *grid, frames x fields)` -> `(B, *grid, C)`: each value to C / (2 fields) channels, then mix frames."""

    def __init__(self, config: SolverConfig) -> None:
        super().__init__()
        fields, half = config.in_fields, config.width // 2
        if half % fields:
            raise ValueError(
                f"width {config.width} cannot be split over the fields: half of it is not divisible "
                f"by {fields} fields; "
                f"use a width such as {2 * fields * max(1, round(half / fields))}."
            )
        self.frames = config.in_frames
        self.weight = nn.Parameter(torch.empty(fields, half // fields).uniform_(-1, 1))
        self.bias = nn.Parameter(torch.empty(fields, half // fields).uniform_(-1, 1))
        self.mix = Linear(self.frames * half, config.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        frames = x.unflatten(-1, (self.frames, -1))
        out: torch.Tensor = self.mix(F.gelu(frames[..., None] * self.weight + self.bias).flatten(-3))
        return out


class GroupedLinear(nn.Module):
    """A bias-free linear map per group of channels."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        bound = 1 / math.sqrt(inputs // GROUPS)
        self.weight = nn.Parameter(torch.empty(GROUPS, inputs // GROUPS, outputs // GROUPS).uniform_(-bound, bound))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("...gi,gio->...go", x.unflatten(-1, (GROUPS, -1)), self.weight).flatten(-2)


class GroupNorm(nn.Module):
    """nn.GroupNorm with channels last."""

    def __init__(self, channels: int, groups: int) -> None:
        super().__init__()
        self.groups = groups
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return standardise(x, self.groups, 1e-5, self.weight, self.bias)


class WallConvolutions(nn.Module):
    """`(B, *grid, C)` -> `(B, *grid, 2 C)`: 3^d convolutions to half resolution and back; concatenates the input."""

    def __init__(self, config: SolverConfig) -> None:
        super().__init__()
        width, half = config.width, config.width // 2
        kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[config.axes - 1]
        self.down = nn.Sequential(kind(width, half, 3, 2, 1), nn.GELU(), kind(half, half, 3, 1, 1))
        self.up = nn.Sequential(kind(half, half, 3, 1, 1), nn.GELU(), kind(half, width, 3, 1, 1))

    def forward(self, H: torch.Tensor) -> torch.Tensor:
        normed = standardise(H, H.shape[-1], eps=1e-5).movedim(-1, 1)
        coarse = self.down(normed)
        fine = self.up(F.interpolate(coarse, size=tuple(H.shape[1:-1]), mode="nearest"))
        return torch.cat((fine.movedim(1, -1), H), dim=-1)


class Steady(nn.Module):
    """`(B, *grid, inputs)` -> `(B, *grid, out_channels)`: the head for steady tasks."""

    def __init__(self, config: SolverConfig, inputs: int) -> None:
        super().__init__()
        self.norm = GroupNorm(inputs, GROUPS)
        self.inner = Linear(inputs, config.width, bias=False)
        self.readout = Linear(config.width, config.out_channels)

    def forward(self, H: torch.Tensor) -> torch.Tensor:
        return read(self.readout, F.gelu(self.inner(self.norm(H))))


class Marching(nn.Module):
    """`(B, *grid, inputs)` -> `(B, *grid, out_channels)`: one step of the latent state per frame, each decoded."""

    START = 0.02

    def __init__(self, config: SolverConfig, form: Form, inputs: int, latent: int) -> None:
        super().__init__()
        width = config.width
        self.expand = Linear(inputs, latent, bias=False)
        self.steps = nn.Parameter(self.START * torch.randn(config.out_frames, latent))
        self.norm = LayerNorm(latent)
        self.mlp = nn.Sequential(Linear(latent, width), nn.GELU(), Linear(width, latent))
        self.head = nn.Sequential(
            GroupNorm(latent, form.norm_groups),
            GroupedLinear(latent, width),
            nn.GELU(),
            Linear(width, width // 2, bias=False),
            nn.GELU(),
        )
        self.readout = Linear(width // 2, config.out_fields)

    def forward(self, H: torch.Tensor) -> torch.Tensor:
        state, frames = self.expand(H).to(self.steps.dtype), []
        for step in self.steps:
            state = state + step
            state = state + self.mlp(self.norm(state))
            frames.append(read(self.readout, self.head(state)))
        return torch.cat(frames, dim=-1)


def read(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """Apply the layer in the dtype of its weights: bf16 would limit the output to eight significant bits."""
    with full_precision(x):
        out: torch.Tensor = layer(x.to(layer.weight.dtype))
        return out


class FactFormer(GridModel):
    """`(B, *grid, in_channels)` -> `(B, *grid, out_channels)` for one, two or three axes and any grid.

    Linear maps and convolutions have torch's default initialisation; queries and keys are Xavier uniform, gain 0.02.
    """

    def __init__(self, config: SolverConfig, form: Form) -> None:
        super().__init__(config)
        self.form, width = form, config.width
        latent = None if form.latent is None else int(form.latent * width)
        if width % GROUPS or (latent is not None and latent % math.lcm(GROUPS, form.norm_groups)):
            raise ValueError(
                f"width {width} is invalid for FactFormer, whose head has {GROUPS} and {form.norm_groups} groups of "
                f"channels; use a multiple of {2 * GROUPS}."
            )
        self.lift: nn.Module = LiftByField(config) if form.by_field else Linear(config.in_channels, width)
        self.time = TimeEmbedding(width, config.scalars) if config.scalars else None
        self.blocks = nn.ModuleList(Block(config, form) for _ in range(config.depth))
        self.walls: nn.Module = WallConvolutions(config) if form.convolutions else nn.Identity()
        inputs = 2 * width if form.convolutions else width
        self.answer: nn.Module = Steady(config, inputs) if latent is None else Marching(config, form, inputs, latent)

    def forward(self, x: torch.Tensor, time: torch.Tensor | None = None) -> torch.Tensor:
        """`time`, for models with a time embedding: (B,), or (B, n) with conditions after the time."""
        self.check(x, time)
        grid = x.shape[1:-1]
        H = self.with_time(self.lift(x).to(self.dtype), time)  # the residual stream keeps this dtype
        H = padded(H, [points + self.form.margin for points in grid])
        for block in self.blocks:
            H = block(H)
        out: torch.Tensor = self.answer(self.walls(cropped(H, grid)))
        return out


def factformer(config: SolverConfig, form: Form | None = None) -> FactFormer:
    """FactFormer in one of its forms; `slices`, `modes` and the options `expansion`, `positions` and `dropout` are
    ignored."""
    return FactFormer(config, form or Form())
