"""HPM, the holistic physics mixer (Yue et al., 2025): a projection to fixed frequencies and back, with a learned gate.

    Y --+-- dense 3^d --> R --> G = softmax((R W_g + b_g) / clip(tau, 0.1, 5)) --> E = G * Phi
        |
        +-- dense 3^d --> F --> S = LN(E^T F) --> O = E (S W) --> Proj_o

G weights the frequencies at each point. Phi (N, K) is one basis for all heads and blocks, with rows of unit length. LN
is over frequencies and channels of a head jointly, with a weight and a bias of that shape; W has no bias and is shared
by all heads and frequencies. E^T F is a sum, not a mean: LN removes the dependence on the number of points. The mixer
takes the place of the attention in Transolver's blocks.

Phi consists of product cosines, the eigenfunctions of the Laplacian on the unit cube with Neumann boundaries,

    phi_p(i) = product over axes of c_p cos(pi p_a i_a / (n_a - 1)),    0 <= p_a < n_a,

ordered by the eigenvalue |p|^2, then by p, so that every machine selects the same K. The factors c_p make them
orthonormal under the trapezoidal rule; then each row of K values is normalised.

From the released code: everything but Phi, which it computes from a Laplacian of the point cloud, separately in every
block, and stores in each block as a frozen parameter. Product cosines span the same space except for one or two
functions at the cut (principal cosines 0.997 to 0.9998), need no eigenvalue solver and no memory per block, and are
defined on every grid. `stored` keeps one basis per block, to reproduce the sizes in bytes of the published table.
Inferred: one and three axes (the released Laplacian is one of surfaces).

Letters: B batch, H heads, N points, K frequencies, D head width, d axes.
"""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from sigmasolver.models.baselines.attention_solver import attention_solver
from sigmasolver.models.config import SolverConfig
from sigmasolver.models.layers import Convolution, linear
from sigmasolver.models.slices import Routing
from sigmasolver.models.solver import Solver
from sigmasolver.ops.constants import grid_constant
from sigmasolver.ops.gated_basis import through_basis

__all__ = ["SpectralMixer", "cosines", "hpm", "lowest_frequencies", "row_normalised_cosines"]


def lowest_frequencies(grid: tuple[int, ...], count: int) -> list[tuple[int, ...]]:
    """The `count` multi-indices p of smallest |p|^2 on this grid, ties ordered by p."""
    if math.prod(grid) < count:
        raise ValueError(
            f"Grid {grid} has {math.prod(grid)} points, but HPM has {count} frequencies; use a grid "
            "with at least as many "
            "points, or another model."
        )
    # All indices <= p on every axis are sorted before p, so p can be among the first `count` only if they are fewer.
    indices: list[tuple[int, ...]] = [()]
    for points in grid:
        indices = [(*p, q) for p in indices for q in range(min(points, count // math.prod(lower + 1 for lower in p)))]
    return sorted(indices, key=lambda p: (sum(q * q for q in p), p))[:count]


def cosines(grid: tuple[int, ...], count: int, device: torch.device) -> torch.Tensor:
    """(*grid, K) in float64: product cosines, orthonormal under the trapezoidal rule on the unit cube."""
    indices = torch.tensor(lowest_frequencies(grid, count), device=device)
    product = torch.ones((), dtype=torch.float64, device=device)
    for axis, points in enumerate(grid):
        p, last = indices[:, axis], points - 1
        # Reduce i p modulo the period in integers, so that large products stay exact.
        angles = (torch.arange(points, device=device)[:, None] * p % (2 * last)).double() * (math.pi / last)
        wave = angles.cos() * (2 - (p % last == 0).double()).sqrt()
        product = product[..., None, :] * wave if axis else wave
    return product


@grid_constant
def row_normalised_cosines(grid: tuple[int, ...], count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Phi (N, K): a row of unit length per point."""
    return F.normalize(cosines(grid, count, device), dim=-1).reshape(-1, count).to(dtype)


class SpectralMixer(nn.Module):
    """`(B, *grid, width)` -> the same shape.

    Initialisation: torch's default for convolutions, W uniform in +-1/sqrt(head width), else as in Transolver-sigma.
    """

    KERNEL = 3

    def __init__(self, config: SolverConfig, frequencies: int = 128, stored: bool = False) -> None:
        super().__init__()
        lowest_frequencies(config.grid, frequencies)  # raises on too few points, before allocating anything
        # The sorting need not be traced. Marked here, not at import: marking imports torch._dynamo (one second).
        torch.compiler.assume_constant_result(lowest_frequencies)
        width, head_width = config.width, config.width // config.heads
        self.heads, self.frequencies, self.grid = config.heads, frequencies, config.grid
        self.gate_path = Convolution(width, self.KERNEL, config.padding)
        self.feature_path = Convolution(width, self.KERNEL, config.padding)
        self.gate = Routing(head_width, config.heads, frequencies)
        self.norm = nn.LayerNorm((frequencies, head_width))
        bound = 1 / math.sqrt(head_width)
        self.mix = nn.Parameter(torch.empty(head_width, head_width).uniform_(-bound, bound))
        self.project = linear(width, width)
        self.dropout = nn.Dropout(config.options.dropout)
        self.basis = None
        if stored:
            phi = row_normalised_cosines(config.grid, frequencies, self.mix.dtype, self.mix.device)
            self.basis = nn.Parameter(phi.clone(), requires_grad=False)

    def forward(self, Y: torch.Tensor) -> torch.Tensor:
        R, F = self.gate_path(Y), self.feature_path(Y)
        O = through_basis(R, F, self.gate, partial(self._phi, Y), lambda S_BHKD: self.norm(S_BHKD) @ self.mix)
        out: torch.Tensor = self.dropout(self.project(O))
        return out

    def _phi(self, Y: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        grid = tuple(Y.shape[1:-1])
        if self.basis is not None and grid == self.grid:
            return self.basis.to(dtype)
        return row_normalised_cosines(grid, self.frequencies, dtype, Y.device)


def hpm(config: SolverConfig, frequencies: int = 128, stored: bool = False) -> Solver:
    """HPM with a shared basis of `frequencies` or, if `stored`, one per block; `slices` and `modes` are ignored."""
    return attention_solver(partial(SpectralMixer, frequencies=frequencies, stored=stored), config)
