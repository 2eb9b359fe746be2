"""Modules small enough for Triton's interpreter."""

import torch
from torch import nn

from sigmasolver.models import Options, build_model
from tests.ops.device import DEVICE


def with_parameters(layer: nn.Module, weight: torch.Tensor, bias: torch.Tensor) -> nn.Module:
    """Replace the parameters of the layer by these tensors, so that gradients reach them."""
    del layer.weight, layer.bias
    layer.weight, layer.bias = weight, bias
    return layer


def linear(weight: torch.Tensor, bias: torch.Tensor) -> nn.Linear:
    return with_parameters(nn.Linear(*reversed(weight.shape)), weight, bias)


def norm(weight: torch.Tensor, bias: torch.Tensor, eps: float) -> nn.LayerNorm:
    return with_parameters(nn.LayerNorm(len(weight), eps), weight, bias)


def solver(grid: tuple[int, ...], name: str = "transolver-sigma", depth: int = 1, **options) -> nn.Module:
    """A solver from 3 fields to 2, with every weight perturbed, so that none is zero."""
    model = build_model(
        name, grid=grid, in_channels=3, out_channels=2, width=16, depth=depth, heads=2, slices=5, modes=2,
        options=Options(**options),
    )  # fmt: skip
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.to(DEVICE)
