"""Muon: the update of every matrix is its momentum with all singular values brought near one.

    B <- mu B + (1 - mu) G,   N = mu B + (1 - mu) G               G gradient, mu 0.95, N Nesterov's momentum
    W <- (1 - rate decay) W - rate 0.2 sqrt(max(rows, columns)) O(N)

O(N) = U f(S) V^T for N = U S V^T, with f(s) between about 0.7 and 1.2 for all but the smallest s, comes from five
Newton-Schulz iterations, which are products of matrices only. The factor 0.2 sqrt(...) makes the root mean square of an
update about 0.2, as reported for AdamW (arXiv 2502.16982), so that its learning rate is a sensible start.

Matrices are the parameters with two dimensions, and spectral weights (..., width, width, 2): one complex matrix for
each mode, which acts on pairs of reals as [[Re, -Im], [Im, Re]]. This form is kept by the iterations, so one procedure
serves both. All other parameters (norms, biases, depthwise kernels, scales) are updated by AdamW.
"""

from __future__ import annotations

from collections import defaultdict
from math import sqrt
from typing import Any

import torch

from sigmasolver.train.adamw import AdamW

__all__ = ["Muon", "is_complex", "is_matrix", "orthogonalised"]

COEFFICIENTS = 3.4445, -4.7750, 2.0315
"""Of the iteration p(s) = a s + b s^3 + c s^5, whose fast growth at zero is worth more than an exact limit of one."""
ITERATIONS = 5
MOMENTUM = 0.95
RMS = 0.2
SMALLEST = 1e-7
"""Lower bound of the norm by which a matrix is divided before the iterations."""


class Muon(AdamW):
    """Muon for matrices, AdamW for the other parameters, with one learning rate and weight decay."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        groups = self.param_groups
        for group in groups:
            matrices = [p for p in group["params"] if is_matrix(p) and p.grad is not None]
            if matrices:
                self._update_matrices(matrices, group)
        self.param_groups = [{**group, "params": [p for p in group["params"] if not is_matrix(p)]} for group in groups]
        try:
            super().step(closure)
        finally:
            self.param_groups = groups

    def __setstate__(self, state: dict[str, Any]) -> None:
        torch.optim.Optimizer.__setstate__(self, state)  # AdamW's expects its own state of every parameter

    def _update_matrices(self, parameters: list[torch.Tensor], group: dict[str, Any]) -> None:
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter]["momentum"] = torch.zeros_like(parameter)
        momenta = [self.state[parameter]["momentum"] for parameter in parameters]
        torch._foreach_lerp_(momenta, gradients, 1 - MOMENTUM)
        directions = torch._foreach_lerp(gradients, momenta, MOMENTUM)
        torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
        # Matrices of one shape go through the iterations together, in fewer launches.
        alike: dict[tuple[object, ...], list[int]] = defaultdict(list)
        for index, parameter in enumerate(parameters):
            alike[parameter.shape, parameter.dtype, parameter.device].append(index)
        for members in alike.values():
            matrices = _as_matrices(torch.stack([directions[index] for index in members]))
            scale = RMS * sqrt(max(matrices.shape[1:])) * group["lr"]
            updates = _as_parameters(orthogonalised(matrices), parameters[members[0]]).mul(scale).contiguous()
            torch._foreach_sub_([parameters[index] for index in members], updates.unbind())


def is_complex(parameter: torch.Tensor) -> bool:
    """Whether these are spectral weights, square complex matrices stored as pairs of reals."""
    *modes, rows, columns, parts = parameter.shape if parameter.ndim > 3 else (0, 1, 1)
    return bool(modes) and rows == columns and parts == 2


def is_matrix(parameter: torch.Tensor) -> bool:
    """Whether Muon updates this parameter."""
    return parameter.ndim == 2 or is_complex(parameter)


def _as_matrices(values: torch.Tensor) -> torch.Tensor:
    """Batch of real matrices of parameters of one shape, along the first axis: (count, rows, columns), or
    (count * modes, 2 rows, 2 columns) of spectral weights."""
    if values.ndim == 3:
        return values
    real, imaginary = values.flatten(0, -4).unbind(-1)
    return torch.cat((torch.cat((real, -imaginary), 2), torch.cat((imaginary, real), 2)), 1)


def _as_parameters(matrices: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Undo `_as_matrices`: (count, *shape of the parameter `like`)."""
    if not is_complex(like):
        return matrices
    columns = matrices.shape[2] // 2
    return torch.stack(matrices[:, :, :columns].chunk(2, 1), -1).view(-1, *like.shape)


def orthogonalised(matrices: torch.Tensor) -> torch.Tensor:
    """U f(S) V^T of a batch (count, rows, columns) of matrices U S V^T."""
    wide = matrices.shape[1] <= matrices.shape[2]
    X = matrices if wide else matrices.mT
    X = X / X.norm(dim=(1, 2), keepdim=True).clamp(min=SMALLEST)
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = X @ X.mT  # of the shorter side
        X = torch.baddbmm(X, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), X, beta=a)
    return X if wide else X.mT
