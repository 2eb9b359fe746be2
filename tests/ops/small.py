"""A solver that is small enough for Triton's interpreter."""

import torch
from torch import nn

from sigmasolver.models import Options, build_model
from tests.ops.device import DEVICE


def solver(grid: tuple[int, ...], name: str = "transolver-sigma", depth: int = 1, **options) -> nn.Module:
    """3 fields to 2; every weight is moved a little, so that none is zero."""
    model = build_model(
        name, grid=grid, in_channels=3, out_channels=2, width=16, depth=depth, heads=2, slices=5, modes=2,
        options=Options(**options),
    )  # fmt: skip
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.to(DEVICE)
