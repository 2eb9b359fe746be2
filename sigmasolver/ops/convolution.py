"""Depthwise convolution on channels-last grids of one, two or three axes, odd kernels, same size out as in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from sigmasolver.ops import fused

__all__ = ["PADDINGS", "depthwise_convolution", "depthwise_pair", "depthwise_residual"]

PADDINGS = ("zeros", "circular")
LONGEST = 5
"""The longest kernel that the fused twin is written for."""


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
    zeros = []
    for axis, kind in enumerate(padding, start=1):
        reach = weight.shape[axis + 1] // 2
        if kind == "circular" and reach:
            x = torch.cat((x.narrow(axis, x.shape[axis] - reach, reach), x, x.narrow(axis, 0, reach)), dim=axis)
        zeros.append(0 if kind == "circular" else reach)
    if len(zeros) == 1:  # torch's two-dimensional kernels are the quicker ones, on a line as well
        return _convolve(x.unsqueeze(1), weight.unsqueeze(2), bias, [0, *zeros]).squeeze(1)
    if len(zeros) == 3 and not x.is_cuda and torch.is_grad_enabled() and fused.untraced(x):
        return _Volume.apply(x, weight, bias, zeros)
    return _convolve(x, weight, bias, zeros)


def _convolve(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, zeros: Sequence[int]) -> torch.Tensor:
    # The channel axis is moved by a view: two- and three-dimensional kernels of torch read that layout as it is.
    convolve = F.conv2d if len(zeros) == 2 else F.conv3d
    return convolve(x.movedim(-1, 1), weight, bias, padding=list(zeros), groups=weight.shape[0]).movedim(1, -1)


class _Volume(torch.autograd.Function):
    """The same on three axes for a CPU, where torch's own backward pass takes several times as long as this one.

    The gradient of the input is a convolution with the kernel turned round; that of the weight is made plane by plane
    of the kernel, with two-dimensional kernels.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, zeros: Sequence[int]
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.zeros = zeros
        return _convolve(x, weight, bias, zeros)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        rest = [size - 1 - zeros for size, zeros in zip(weight.shape[2:], ctx.zeros, strict=True)]
        dx = _convolve(g, weight.flip(2, 3, 4), None, rest)
        first, *others = ctx.zeros
        padded = F.pad(x, [0, 0, 0, 0, 0, 0, first, first])
        planes = g.flatten(0, 1).movedim(-1, 1)
        dw = [
            torch.ops.aten.convolution_backward(
                planes, padded.narrow(1, offset, g.shape[1]).flatten(0, 1).movedim(-1, 1), weight[:, :, offset], None,
                [1, 1], others, [1, 1], False, [0, 0], weight.shape[0], [False, True, False],
            )[1]
            for offset in range(weight.shape[2])
        ]  # fmt: skip
        return dx, torch.stack(dw, dim=2), g.flatten(0, -2).sum(0), None
