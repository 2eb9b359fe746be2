"""Depthwise convolution on channels-last grids of one to three axes, with odd kernels and "same" padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from sigmasolver.ops.dispatch import TRACED, Limit, choose, is_traced, prefers
from sigmasolver.ops.fused.tuning import MAX_KERNEL_SIZE
from sigmasolver.ops.modules import Affine, DepthwiseModule

__all__ = ["PADDINGS", "depthwise_convolution", "depthwise_residual", "separable_pair"]

PADDINGS = ("zeros", "circular")


def depthwise_convolution(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, padding: Sequence[str]
) -> torch.Tensor:
    """`x` (B, *grid, C), `weight` (C, 1, *kernel), `bias` (C); `padding` is "zeros" or "circular" for each axis."""
    if fused := choose("convolution", x, limits=_kernel_limits(weight)):
        return fused.depthwise(x, weight, bias, padding)
    return _plain(x, weight, bias, padding)


def depthwise_residual(x: torch.Tensor, convolution: DepthwiseModule) -> torch.Tensor:
    """x + convolution(x)."""
    limits, parts = _kernel_limits(convolution.weight), {"the convolution": convolution}
    if fused := choose("convolution", x, limits=limits, parts=parts):
        return fused.depthwise(x, convolution.weight, convolution.bias, convolution.padding, residual=True)
    return x + convolution(x)


def separable_pair(x: torch.Tensor, first: nn.Sequential, second: nn.Sequential) -> tuple[torch.Tensor, torch.Tensor]:
    """Two separable convolutions of the same input: each a depthwise convolution, then a linear map of the channels."""
    kernels = [cast(DepthwiseModule, path[0]) for path in (first, second)]
    parts = {"the first path": first, "the second path": second}
    if fused := choose("convolution", x, limits=_kernel_limits(kernels[0].weight), parts=parts):
        maps: list[Affine] = [(kernel.weight, kernel.bias) for kernel in kernels]
        first_out, second_out = fused.depthwise_pair(x, *maps, kernels[0].padding)
        return first[1](first_out), second[1](second_out)
    return first(x), second(x)


def _kernel_limits(weight: torch.Tensor) -> tuple[Limit]:
    return (("kernel size", weight.shape[-1], MAX_KERNEL_SIZE),)


def _plain(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, padding: Sequence[str]) -> torch.Tensor:
    zero_padding = []
    for axis, kind in enumerate(padding, start=1):
        radius = weight.shape[axis + 1] // 2
        if kind == "circular" and radius:
            x = torch.cat((x.narrow(axis, x.shape[axis] - radius, radius), x, x.narrow(axis, 0, radius)), dim=axis)
        zero_padding.append(0 if kind == "circular" else radius)
    if len(zero_padding) == 1:  # torch's 2-D kernels are faster, even for a single axis
        return _convolve(x.unsqueeze(1), weight.unsqueeze(2), bias, [0, *zero_padding]).squeeze(1)
    if len(zero_padding) == 3 and prefers(
        "convolution backward", "plane by plane", "torch's own", _why_torch_backward(x)
    ):
        if torch.is_autocast_enabled("cpu"):  # cast here, as autocast would inside: all gradients then have one dtype
            x, weight, bias = (tensor.to(torch.get_autocast_dtype("cpu")) for tensor in (x, weight, bias))
        return _Convolution3d.apply(x, weight, bias, zero_padding)
    return _convolve(x, weight, bias, zero_padding)


def _why_torch_backward(x: torch.Tensor) -> str | None:
    if is_traced(x):
        return TRACED
    if x.is_cuda:
        return "the tensor is on a GPU"
    return None if torch.is_grad_enabled() else "gradients are switched off"


def _convolve(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, zero_padding: Sequence[int]
) -> torch.Tensor:
    # Moving the channel axis is a view: torch's 2-D and 3-D kernels read channels-last memory directly.
    convolve = F.conv2d if len(zero_padding) == 2 else F.conv3d
    return convolve(x.movedim(-1, 1), weight, bias, padding=list(zero_padding), groups=weight.shape[0]).movedim(1, -1)


class _Convolution3d(torch.autograd.Function):
    """3-D depthwise convolution for a CPU, where torch's own backward pass is several times slower than this one.

    The gradient of the input is a convolution with the flipped kernel; that of the weight is computed with 2-D
    convolutions, one plane of the kernel at a time.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, zero_padding: Sequence[int]
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.zero_padding = zero_padding
        return _convolve(x, weight, bias, zero_padding)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        transposed_padding = [size - 1 - zeros for size, zeros in zip(weight.shape[2:], ctx.zero_padding, strict=True)]
        dx = _convolve(g, weight.flip(2, 3, 4), None, transposed_padding)
        depth_padding, *plane_padding = ctx.zero_padding
        padded = F.pad(x, [0, 0, 0, 0, 0, 0, depth_padding, depth_padding])
        planes = g.flatten(0, 1).movedim(-1, 1)
        dw = [
            torch.ops.aten.convolution_backward(
                planes, padded.narrow(1, offset, g.shape[1]).flatten(0, 1).movedim(-1, 1), weight[:, :, offset], None,
                [1, 1], plane_padding, [1, 1], False, [0, 0], weight.shape[0], [False, True, False],
            )[1]
            for offset in range(weight.shape[2])
        ]  # fmt: skip
        return dx, torch.stack(dw, dim=2), g.flatten(0, -2).sum(0), None
