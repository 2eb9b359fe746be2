"""Affine maps of the channels whose bias gradient is one quick pass: y = x W^T + b, db = sum over points of dy."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from sigmasolver.ops.fused.lanes import aside
from sigmasolver.ops.fused.rows import column_sums
from sigmasolver.ops.fused.tables import narrowed

__all__ = ["linear", "product"]


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b, summed and given in float32 also where the factors are narrow."""
    if a.dtype == torch.float32 or not a.is_cuda:
        return (a @ b).float()
    return torch.mm(a, b, out_dtype=torch.float32)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        narrow = narrowed(weight, x.dtype)
        ctx.save_for_backward(x, narrow)
        ctx.kinds = weight.dtype, bias.dtype
        return F.linear(x, narrow, narrowed(bias, x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        dy = dy.contiguous()
        found = aside(lambda: (product(dy.T, x).to(ctx.kinds[0]), column_sums(dy).to(ctx.kinds[1])), dy, x)
        return dy @ weight if ctx.needs_input_grad[0] else None, *found


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """`torch.nn.functional.linear`; under autocast in the narrow type."""
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    with torch.autocast(x.device.type, enabled=False):
        return _Linear.apply(x.reshape(-1, x.shape[-1]), weight, bias).view(*x.shape[:-1], -1)
