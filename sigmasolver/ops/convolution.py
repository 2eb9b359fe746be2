"""Depthwise convolution on channels-last grids of one, two or three axes, odd kernels, same size out as in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from sigmasolver.ops.dispatch import TRACED, Limit, choose, is_traced, takes
from sigmasolver.ops.fused.tuning import LONGEST_KERNEL
from sigmasolver.ops.modules import Affine, DepthwiseModule

__all__ = ["PADDINGS", "depthwise_convolution", "depthwise_residual", "separable_pair"]

PADDINGS = ("zeros", "circular")


def depthwise_convolution(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, padding: Sequence[str]
) -> torch.Tensor:
    """`x` (B, *grid, C), `weight` (C, 1, *kernel), `bias` (C); `padding` names "zeros" or "circular" for each axis."""
    if fused := choose("convolution", x, limits=_limits(weight)):
        return fused.depthwise(x, weight, bias, padding)
    return _plain(x, weight, bias, padding)


def depthwise_residual(x: torch.Tensor, convolution: DepthwiseModule) -> torch.Tensor:
    """x + the convolution of x."""
    limits, parts = _limits(convolution.weight), {"the convolution": convolution}
    if fused := choose("convolution", x, limits=limits, parts=parts):
        return fused.depthwise(x, convolution.weight, convolution.bias, convolution.padding, residual=True)
    return x + convolution(x)


def separable_pair(x: torch.Tensor, first: nn.Sequential, second: nn.Sequential) -> tuple[torch.Tensor, torch.Tensor]:
    """Two separable convolutions of one input: each a depthwise convolution, then a map of the channels."""
    kernels = [cast(DepthwiseModule, path[0]) for path in (first, second)]
    parts = {"the first path": first, "the second path": second}
    if fused := choose("convolution", x, limits=_limits(kernels[0].weight), parts=parts):
        maps: list[Affine] = [(kernel.weight, kernel.bias) for kernel in kernels]
        one, two = fused.depthwise_pair(x, *maps, kernels[0].padding)
        return first[1](one), second[1](two)
    return first(x), second(x)


def _limits(weight: torch.Tensor) -> tuple[Limit]:
    return (("kernel size", weight.shape[-1], LONGEST_KERNEL),)


def _plain(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, padding: Sequence[str]) -> torch.Tensor:
    zeros = []
    for axis, kind in enumerate(padding, start=1):
        reach = weight.shape[axis + 1] // 2
        if kind == "circular" and reach:
            x = torch.cat((x.narrow(axis, x.shape[axis] - reach, reach), x, x.narrow(axis, 0, reach)), dim=axis)
        zeros.append(0 if kind == "circular" else reach)
    if len(zeros) == 1:  # torch's two-dimensional kernels are the quicker ones, on a line as well
        return _convolve(x.unsqueeze(1), weight.unsqueeze(2), bias, [0, *zeros]).squeeze(1)
    if len(zeros) == 3 and takes("convolution backward", "plane by plane", "torch's own", _why_torchs_own(x)):
        if torch.is_autocast_enabled("cpu"):  # cast here as autocast would inside, so that its gradients have one type
            x, weight, bias = (one.to(torch.get_autocast_dtype("cpu")) for one in (x, weight, bias))
        return _Volume.apply(x, weight, bias, zeros)
    return _convolve(x, weight, bias, zeros)


def _why_torchs_own(x: torch.Tensor) -> str | None:
    if is_traced(x):
        return TRACED
    if x.is_cuda:
        return "the tensor is on a GPU"
    return None if torch.is_grad_enabled() else "gradients are switched off"


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
        opposite = [size - 1 - zeros for size, zeros in zip(weight.shape[2:], ctx.zeros, strict=True)]
        dx = _convolve(g, weight.flip(2, 3, 4), None, opposite)
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
