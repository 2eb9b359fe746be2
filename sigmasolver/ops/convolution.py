"""Depthwise convolution on channels-last grids of one, two or three axes, odd kernels, same size out as in."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

__all__ = ["PADDINGS", "depthwise_convolution"]

PADDINGS = ("zeros", "circular")
_CONVOLUTIONS = (F.conv1d, F.conv2d, F.conv3d)


def depthwise_convolution(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, padding: Sequence[str]
) -> torch.Tensor:
    """`x` (B, *grid, C), `weight` (C, 1, *kernel), `bias` (C); `padding` names "zeros" or "circular" for each axis.

    The channel axis is moved by a view: two- and three-dimensional kernels of torch read that layout as it is.
    """
    zeros = []
    for axis, kind in enumerate(padding, start=1):
        reach = weight.shape[axis + 1] // 2
        if kind == "circular" and reach:
            x = torch.cat((x.narrow(axis, x.shape[axis] - reach, reach), x, x.narrow(axis, 0, reach)), dim=axis)
        zeros.append(0 if kind == "circular" else reach)
    convolve = _CONVOLUTIONS[len(zeros) - 1]
    return convolve(x.movedim(-1, 1), weight, bias, padding=zeros, groups=weight.shape[0]).movedim(1, -1)
