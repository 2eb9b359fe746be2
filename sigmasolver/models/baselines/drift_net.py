"""DRIFT-Net (Li and Salim, ICLR 2026): a U-Net of layers with a spectral and a local branch.

    x -- patches of 4^d -- LN -- [c] --merge-- [2c] --merge-- [4c] --merge-- [8c]        [.] a stage of layers
                                  |             |              |              |
                              ConvNeXt x2   ConvNeXt x2    ConvNeXt x2        |
                                  |             |              |              |
    y -- 5^d -- patches of 4^d - [c] -unmerge- [2c] -unmerge- [4c] -unmerge- [8c]

A layer:    H <- H + LN(S(H) + D(H) + H W + b),    H <- H + LN(MLP(H)),    D depthwise 3^d, MLP four times as wide.

The spectral branch S splits the spectrum into a low-frequency box and its complement, mixes channels in the box only,
and blends both by weights alpha in (0, 1) that are constant on each of six radial bands:

    X = rFFT(H) / N = X_low + X_high,    Y = alpha (X_low W_c) + (1 - alpha) X_high,    S(H) = irFFT(Y),
    alpha = sigmoid(A_2 ReLU(A_1 m + a_1) + a_2),    m = the mean of |X| over each band, per channel.

W_c is complex and shared by all frequencies. A stage adds its input to its output before merging; merging concatenates
2^d neighbours and projects them to twice the channels, unmerging reverses this. The decoder adds the skip connections.

From the released code: all of the above, T with c = 48 and four layers per stage. Three of its faults are
corrected here; `released=True` reproduces the first two:
    box      rows [0, 0.562 n) by array index, which include at most a few of the highest negative frequencies, so that
             a wave and its mirror image are treated differently. Here |k_a| < 0.562 (n_a / 2 + 1) on every axis.
    bands    radius from array indices, so that k = -1 counts as the highest. Here from |k_a|, as in its own loss.
    cut      two "learnable" parameters per layer that get no gradient because of a rounding, so that the cut stays at
             its initial value, 0.562 = sigmoid(0.25). Here it is a constant. The mean is always low, even on a grid of
             one token.
Unused parameters of the released code (a second norm per layer, two maps per decoder stage for a disabled loss) are
left out; its norm cannot be called without a time and is a plain LayerNorm here.
Inferred: one and three axes, grids that are not a multiple of 4 x 8 points (zero-padded at the high end, then cropped),
stages that are not square. Imaginary parts of self-conjugate modes, which W_c can produce, are dropped on every device.

Letters: B batch, C channels of a stage, n tokens on an axis, K frequencies of the half spectrum, Q bands.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn

from sigmasolver.models.config import SolverConfig
from sigmasolver.models.layers import LayerNorm, cropped, full_precision, linear, padded, perceptron
from sigmasolver.models.solver import GridModel
from sigmasolver.ops.constants import grid_constant

__all__ = ["DriftNet", "SpectralBranch", "drift_net", "low_box", "radial_bands"]

PATCH = 4
STAGES = 4
UNIT = PATCH * 2 ** (STAGES - 1)
"""Points per axis of a token of the last stage."""
BANDS = 6
CUT = 1 / (1 + math.exp(-0.25))


def _lengths(grid: tuple[int, ...], released: bool) -> tuple[int, ...]:
    """The number of distinct |k| per axis; as released, the length of each axis of the half spectrum."""
    return (*(n if released else n // 2 + 1 for n in grid[:-1]), grid[-1] // 2 + 1)


def _waves(grid: tuple[int, ...], released: bool, device: torch.device) -> list[torch.Tensor]:
    """|k| (as released: the array index) along each axis of the half spectrum, shaped to broadcast."""
    waves = []
    for axis, points in enumerate(grid):
        last = axis == len(grid) - 1
        k = torch.arange(points // 2 + 1 if last else points, device=device)
        k = k if released or last else torch.minimum(k, points - k)
        waves.append(k.reshape(-1, *(1,) * (len(grid) - 1 - axis)))
    return waves


@grid_constant
def low_box(grid: tuple[int, ...], released: bool, device: torch.device) -> torch.Tensor:
    """(*half spectrum), True on the low frequencies."""
    low = torch.ones((), dtype=torch.bool, device=device)
    for k, length in zip(_waves(grid, released, device), _lengths(grid, released), strict=True):
        low = low & (k < max(1, int(CUT * length)))
    return low


@grid_constant
def radial_bands(grid: tuple[int, ...], released: bool, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """(2, Q, K): the averaging weights of each band, zero if it is empty, and its membership mask.

    Radii are scaled to 1 at the end of each axis, divided by the largest, and split into rings of equal width; in
    float32, so that all dtypes agree on the edges of the bands.
    """
    squared = torch.zeros((), dtype=torch.float32, device=device)
    for k, length in zip(_waves(grid, released, device), _lengths(grid, released), strict=True):
        squared = squared + (k.float() / max(length - 1, 1)).square()
    radius = squared.sqrt().flatten()
    band = (radius / (radius.max() + 1e-8) * BANDS).clamp(max=BANDS - 1).long()
    members = (band == torch.arange(BANDS, device=device)[:, None]).double()
    return torch.stack((members / members.sum(dim=1, keepdim=True).clamp(min=1), members)).to(dtype)


@grid_constant
def _self_conjugate(points: int, device: torch.device) -> torch.Tensor:
    """(K, 1) on the last axis: True for the mean and, if n is even, the Nyquist frequency."""
    return (2 * torch.arange(points // 2 + 1, device=device) % points == 0)[:, None]


def _to_points(Y: torch.Tensor, grid: tuple[int, ...]) -> torch.Tensor:
    """The inverse of rFFT / N on the axes between batch and channels."""
    last = len(grid)
    if last > 1:
        Y = torch.fft.ifftn(Y, dim=tuple(range(1, last)), norm="forward")
    # FFT libraries disagree on the imaginary parts of self-conjugate modes.
    Y = torch.where(_self_conjugate(grid[-1], Y.device), Y.real.to(Y.dtype), Y)
    out: torch.Tensor = torch.fft.irfft(Y, n=grid[-1], dim=last, norm="forward")
    return out


def _normal(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape).normal_(std=0.02))


class SpectralBranch(nn.Module):
    """H (B, *grid, C) -> S(H), in float32 at least: there is no FFT in bf16."""

    HIDDEN = 128

    def __init__(self, width: int, released: bool = False) -> None:
        super().__init__()
        self.released = released
        self.weight = _normal(width, width, 2)
        self.gate = nn.Sequential(linear(BANDS, self.HIDDEN), nn.ReLU(), linear(self.HIDDEN, BANDS), nn.Sigmoid())

    def forward(self, H: torch.Tensor) -> torch.Tensor:
        if not H.shape[0]:  # torch.fft rejects an empty batch
            return H
        grid = tuple(H.shape[1:-1])
        wide = torch.promote_types(H.dtype, torch.float32)
        with full_precision(H):
            X = torch.fft.rfftn(H.to(wide), dim=tuple(range(1, len(grid) + 1)), norm="forward")
            low, high = self.split(X, grid)
            alpha = self.alpha(X, grid)
            mixed = low @ torch.view_as_complex(self.weight.to(wide))
            return _to_points(alpha * mixed + (1 - alpha) * high, grid).to(H.dtype)

    def split(self, X: torch.Tensor, grid: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """X_low and X_high."""
        low = low_box(grid, self.released, X.device)[..., None]
        return X * low, X * ~low

    def alpha(self, X: torch.Tensor, grid: tuple[int, ...]) -> torch.Tensor:
        """The blending weights of the mixed low part, (B, *half spectrum, C)."""
        size_BKC = X.abs().flatten(1, -2)
        mean_QK, members_QK = radial_bands(grid, self.released, size_BKC.dtype, X.device)
        m_BCQ = (mean_QK @ size_BKC).mT
        alpha_BCQ = self.gate(m_BCQ.to(self.weight.dtype)).to(size_BKC.dtype)
        out: torch.Tensor = (alpha_BCQ @ members_QK).mT.reshape(X.shape)
        return out


class Layer(nn.Module):
    """(B, *grid, C) -> the same shape; a post-norm residual layer."""

    EXPANSION = 4

    def __init__(self, width: int, axes: int, released: bool = False) -> None:
        super().__init__()
        self.spectral = SpectralBranch(width, released)
        self.local = _convolution(width, width, 3, axes, groups=width, bias=False)
        self.pointwise = linear(width, width)
        self.spectral_norm = LayerNorm(width)
        self.mlp = perceptron(width, self.EXPANSION * width, width)
        self.mlp_norm = LayerNorm(width)

    def forward(self, H: torch.Tensor) -> torch.Tensor:
        H = H + self.spectral_norm(self.spectral(H) + _channels_first(self.local, H) + self.pointwise(H))
        out: torch.Tensor = H + self.mlp_norm(self.mlp(H))
        return out


def _convolution(inputs: int, outputs: int, kernel: int, axes: int, groups: int = 1, bias: bool = True) -> nn.Module:
    """A zero-padded convolution that keeps the grid; normal weights with standard deviation 0.02."""
    make = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[axes - 1]
    layer = make(inputs, outputs, kernel, padding=kernel // 2, groups=groups, bias=bias)
    return _init_normal(layer)


def _init_normal(layer: nn.Conv1d | nn.Conv2d | nn.Conv3d) -> nn.Module:
    nn.init.normal_(layer.weight, std=0.02)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer


def _channels_first(layer: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Apply a channels-first layer to (B, *grid, C)."""
    return layer(x.movedim(-1, 1)).movedim(1, -1)


class Merge(nn.Module):
    """(B, *grid, C) -> (B, *grid / 2, 2 C)."""

    def __init__(self, width: int, axes: int) -> None:
        super().__init__()
        self.reduce = linear(2**axes * width, 2 * width, bias=False)
        self.norm = LayerNorm(2 * width)

    def forward(self, H: torch.Tensor) -> torch.Tensor:
        axes = H.ndim - 2
        halves = [length for n in H.shape[1:-1] for length in (n // 2, 2)]
        H = H.reshape(H.shape[0], *halves, H.shape[-1])
        tokens, neighbours = range(1, 2 * axes, 2), range(2, 2 * axes + 1, 2)
        out: torch.Tensor = self.norm(self.reduce(H.permute(0, *tokens, *neighbours, 2 * axes + 1).flatten(axes + 1)))
        return out


class Unmerge(nn.Module):
    """(B, *grid, C) -> (B, 2 *grid, C / 2)."""

    def __init__(self, width: int, axes: int) -> None:
        super().__init__()
        self.expand = linear(width, 2**axes * (width // 2), bias=False)
        self.norm = LayerNorm(width // 2)
        self.mix = linear(width // 2, width // 2, bias=False)

    def forward(self, H: torch.Tensor) -> torch.Tensor:
        grid, axes = H.shape[1:-1], H.ndim - 2
        H = self.expand(H).reshape(H.shape[0], *grid, *(2,) * axes, H.shape[-1] // 2)
        order = [dim for axis in range(axes) for dim in (1 + axis, 1 + axes + axis)]
        H = H.permute(0, *order, 2 * axes + 1).reshape(H.shape[0], *(2 * n for n in grid), H.shape[-1])
        out: torch.Tensor = self.mix(self.norm(H))
        return out


class ConvNeXt(nn.Module):
    """H + scale * MLP(LN(depthwise 7^d (H))); the scale of each channel is initialised to 1e-6."""

    def __init__(self, width: int, axes: int) -> None:
        super().__init__()
        self.local = _convolution(width, width, 7, axes, groups=width)
        self.norm = LayerNorm(width)
        self.mlp = perceptron(width, 4 * width, width)
        self.scale = nn.Parameter(torch.full((width,), 1e-6))

    def forward(self, H: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = H + self.scale * self.mlp(self.norm(_channels_first(self.local, H)))
        return out


class DriftNet(GridModel):
    """`(B, *grid, in_channels)` -> `(B, *grid, out_channels)` for one, two or three axes and any grid.

    `blocks` are the layers of the encoder stages, then those of the decoder stages, `layers` per stage. Weights are
    initialised normal with standard deviation 0.02 and biases zero; `recover` has torch's default initialisation.
    """

    SKIP_BLOCKS = 2

    def __init__(self, config: SolverConfig, embed: int, layers: int, released: bool = False) -> None:
        super().__init__(config)
        self.time, self.layers, axes = None, layers, config.axes
        widths = [embed * 2**stage for stage in range(STAGES)]
        patches = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[axes - 1]
        self.embed = _init_normal(patches(config.in_channels, embed, PATCH, PATCH))
        self.embed_norm = LayerNorm(embed)
        self.blocks = nn.ModuleList(
            Layer(width, axes, released) for width in (*widths, *reversed(widths)) for _ in range(layers)
        )
        self.merges = nn.ModuleList(Merge(width, axes) for width in widths[:-1])
        self.skips = nn.ModuleList(
            nn.Sequential(*(ConvNeXt(width, axes) for _ in range(self.SKIP_BLOCKS))) for width in widths[:-1]
        )
        self.unmerges = nn.ModuleList(Unmerge(width, axes) for width in reversed(widths[1:]))
        recover = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[axes - 1]
        self.recover = recover(embed, config.out_channels, PATCH, PATCH)
        self.smooth = _convolution(config.out_channels, config.out_channels, 5, axes, bias=False)

    def forward(self, x: torch.Tensor, time: torch.Tensor | None = None) -> torch.Tensor:
        """`time` must be None: there is no time embedding."""
        self.check(x, time)
        # Zero-pad the high end of every axis to a whole number of tokens in the last stage.
        H = self.embed_norm(
            _channels_first(self.embed, padded(x, [points + -points % UNIT for points in x.shape[1:-1]]))
        )
        skips = []
        for stage in range(STAGES):
            residual, H = H, self._stage(stage, H)
            if stage < STAGES - 1:
                skips.append(self.skips[stage](H))
                H = self.merges[stage](H + residual)
        for stage in range(STAGES):
            if stage:
                H = self.unmerges[stage - 1](H) + skips.pop()
            H = self._stage(STAGES + stage, H)
        # Full precision for the output, which bf16 would limit to eight significant bits.
        with full_precision(x):
            y = _channels_first(self.recover, H.to(self.dtype))
            return _channels_first(self.smooth, cropped(y, x.shape[1:-1]))

    def _stage(self, stage: int, H: torch.Tensor) -> torch.Tensor:
        for index in range(stage * self.layers, (stage + 1) * self.layers):
            H = self.blocks[index](H)
        return H


def drift_net(config: SolverConfig, released: bool = False) -> DriftNet:
    """DRIFT-Net with 3/8 `width` channels in the first stage and `depth` / 2 layers per stage; 128 and 8 give size T.

    `heads`, `slices`, `modes` and the options `expansion`, `positions`, `lattice`, `padding`, `dropout` are ignored.
    """
    return DriftNet(config, max(1, 3 * config.width // 8), (config.depth + 1) // 2, released)
