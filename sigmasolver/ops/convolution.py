"""Depthwise convolution on channels-last grids of one, two or three axes, odd kernels, same size out as in."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from sigmasolver.ops import fused

__all__ = ["PADDINGS", "depthwise_convolution", "depthwise_pair", "depthwise_residual"]

PADDINGS = ("zeros", "circular")
LONGEST = 5
"""The longest kernel that the fused twin is written for."""
_CONVOLUTIONS = (F.conv1d, F.conv2d, F.conv3d)


def depthwise_convolution(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, padding: Sequence[str]
) -> torch.Tensor:
    """`x` (B, *grid, C), `weight` (C, 1, *kernel), `bias` (C); `padding` names "zeros" or "circular" for each axis."""
    if _fusable(x, weight):
        from sigmasolver.ops.fused.convolution import depthwise

        return depthwise(x, weight, bias, padding)
    return _plain(x, weight, bias, padding)


def depthwise_residual(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, padding: Sequence[str]
) -> torch.Tensor:
    """x + the convolution of x."""
    if _fusable(x, weight):
        from sigmasolver.ops.fused.convolution import depthwise

        return depthwise(x, weight, bias, padding, residual=True)
    return x + _plain(x, weight, bias, padding)


def depthwise_pair(
    x: torch.Tensor,
    first: tuple[torch.Tensor, torch.Tensor],
    second: tuple[torch.Tensor, torch.Tensor],
    padding: Sequence[str],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two convolutions of one input, each given as (weight, bias)."""
    if _fusable(x, first[0]):
        from sigmasolver.ops.fused.convolution import depthwise_pair as twin

        return twin(x, first, second, padding)
    return _plain(x, *first, padding), _plain(x, *second, padding)


def _fusable(x: torch.Tensor, weight: torch.Tensor) -> bool:
    return fused.usable(x) and weight.shape[-1] <= LONGEST


def _plain(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, padding: Sequence[str]) -> torch.Tensor:
    # The channel axis is moved by a view: two- and three-dimensional kernels of torch read that layout as it is.
    zeros = []
    for axis, kind in enumerate(padding, start=1):
        reach = weight.shape[axis + 1] // 2
        if kind == "circular" and reach:
            x = torch.cat((x.narrow(axis, x.shape[axis] - reach, reach), x, x.narrow(axis, 0, reach)), dim=axis)
        zeros.append(0 if kind == "circular" else reach)
    convolve = _CONVOLUTIONS[len(zeros) - 1]
    return convolve(x.movedim(-1, 1), weight, bias, padding=zeros, groups=weight.shape[0]).movedim(1, -1)
