"""Steady Darcy flow through a two-phase medium, discretised as the public 421² files were.

    -∇·(a ∇u) = f on (0,1)²,  u = 0 on the boundary,  a = high where a Gaussian field is >= 0, else low.

    a  coefficient (permeability)     u  pressure     f  source     K  points per side     h = 1/(K-1)

1. a is interpolated from the K×K cell centres (i+1/2)/K to the K×K nodes i/(K-1) by a not-a-knot cubic spline.
   It overshoots at the interfaces, so node values are clipped to [low, high]: this changes u by well below a
   percent (a test checks it), and keeps the matrix positive definite.
2. Five-point flux form on the interior nodes, face coefficient = mean of its two nodes.
3. u is interpolated back to the cell centres by the same kind of spline: its outermost rows lie half a cell
   from the wall and are not zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np
import torch

from sigmasolver.data.layout import Layout
from sigmasolver.settings import check_types
from sigmasolver.simulate.random_fields import neumann_field, white_noise
from sigmasolver.simulate.simulator import Simulator, Tick, generator, map_samples

__all__ = ["Darcy", "interpolation", "solve"]


def interpolation(nodes: np.ndarray, points: np.ndarray) -> torch.Tensor:
    """Return the matrix of the not-a-knot cubic spline from values at `nodes` to values at `points`, float64."""
    from scipy.interpolate import make_interp_spline

    return torch.from_numpy(make_interp_spline(nodes, np.eye(len(nodes)), k=3)(points))


@lru_cache(maxsize=8)
def _spline_matrices(grid: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Matrices of the splines centres -> nodes and nodes -> centres along one axis, float64 `(K, K)`."""
    centres = (np.arange(grid) + 0.5) / grid
    nodes = np.linspace(0, 1, grid)
    return interpolation(centres, nodes), interpolation(nodes, centres)


@lru_cache(maxsize=8)
def _sine_basis(grid: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Eigenvectors (symmetric, orthonormal) and eigenvalues of -h² × the five-point Laplacian, float64."""
    mode = torch.arange(1, grid - 1, dtype=torch.float64)
    vectors = math.sqrt(2 / (grid - 1)) * torch.sin(math.pi / (grid - 1) * mode[:, None] * mode)
    values = 4 * torch.sin(math.pi / (2 * (grid - 1)) * mode) ** 2
    return vectors, values[:, None] + values


def _dot(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a * b).sum((-2, -1), keepdim=True)


def solve(
    nodes: torch.Tensor, source: torch.Tensor | float, tolerance: float = 1e-10, iterations: int = 500
) -> torch.Tensor:
    """Compute the pressure `(B, K, K)` at the nodes, zero on the boundary, from the coefficient `(B, K, K)` there.

    `source` is a number or interior node values `(B, K-2, K-2)`. Conjugate gradients, preconditioned by the
    exact constant-coefficient solve in the sine basis, until each residual is below `tolerance` times its
    right-hand side. The sine transform is a dense product: cheap at these sizes, and simpler than a Fourier
    transform of twice the length. The number of iterations depends on the contrast, not on K.
    """
    K = nodes.shape[-1]
    rows = (nodes[:, 1:, 1:-1] + nodes[:, :-1, 1:-1]) / 2
    columns = (nodes[:, 1:-1, 1:] + nodes[:, 1:-1, :-1]) / 2
    vectors, values = (table.to(nodes) for table in _sine_basis(K))

    def stiffness(p: torch.Tensor) -> torch.Tensor:
        q = torch.nn.functional.pad(p, (1, 1, 1, 1))
        across = rows * (q[:, 1:, 1:-1] - q[:, :-1, 1:-1])
        along = columns * (q[:, 1:-1, 1:] - q[:, 1:-1, :-1])
        return across[:, :-1] - across[:, 1:] + along[:, :, :-1] - along[:, :, 1:]

    def precondition(r: torch.Tensor) -> torch.Tensor:
        return vectors @ ((vectors @ r @ vectors) / values) @ vectors

    u = nodes.new_zeros(len(nodes), K - 2, K - 2)
    r = u + source / (K - 1) ** 2
    target = tolerance**2 * _dot(r, r)
    p = z = precondition(r)
    rz = _dot(r, z)
    for _ in range(iterations + 1):
        active = ~(_dot(r, r) <= target)
        if not bool(active.any()):
            return torch.nn.functional.pad(u, (1, 1, 1, 1))
        Ap = stiffness(p)
        # A converged sample takes steps of exactly zero, so it does not depend on the other samples of its batch.
        alpha = torch.where(active, rz / _dot(p, Ap), 0)
        u = u + alpha * p
        r = r - alpha * Ap
        z = precondition(r)
        rz, previous = _dot(r, z), rz
        p = z + torch.where(active, rz / previous, 0) * p
    raise ValueError(
        f"the Darcy solver did not converge to {tolerance} in {iterations} iterations; "
        "lower the contrast, clip the coefficient or allow more iterations."
    )


@dataclass(frozen=True)
class Darcy(Simulator):
    """Coefficient and pressure `(1, grid, grid, 2)` at cell centres."""

    name: ClassVar[str] = "darcy"

    grid: int = 421
    """Points per side."""
    low: float = 3.0
    """Coefficient of the first phase."""
    high: float = 12.0
    """Coefficient of the second phase."""
    field_smoothness: float = 2.0
    """α of the Gaussian field whose sign picks the phase; a larger value gives rounder inclusions."""
    field_shift: float = 3.0
    """τ of the Gaussian field; a larger value gives smaller inclusions."""
    source: float = 1.0
    """Constant right-hand side f."""
    clip: bool = True
    """Node values of the coefficient are clipped to [low, high]."""
    tolerance: float = 1e-10
    """Relative residual at which the solver stops."""
    iterations: int = 500
    """Maximum number of conjugate gradient iterations."""

    def __post_init__(self) -> None:
        check_types(self)
        for valid, message in (
            (self.grid >= 5, f"grid must be at least 5, not {self.grid}"),
            (0 < self.low <= self.high, "low and high must satisfy 0 < low <= high"),
            (self.field_smoothness > 1, f"field_smoothness must exceed 1, not {self.field_smoothness}"),
            (self.field_shift > 0, f"field_shift must be positive, not {self.field_shift}"),
            (0 < self.tolerance < 1, f"tolerance must lie between 0 and 1, not {self.tolerance}"),
            (self.iterations >= 1, f"iterations must be at least 1, not {self.iterations}"),
        ):
            if not valid:
                raise ValueError(f"{message}.")

    @property
    def layout(self) -> Layout:
        centres = (np.arange(self.grid) + 0.5) / self.grid
        return Layout(
            fields=("coefficient", "pressure"),
            units=("1", "1"),
            boundary=("wall", "wall"),
            coordinates=(centres, centres),
            times=np.zeros(1),
        )

    def batch_size(self, device: torch.device | str = "cpu") -> int:
        """On a GPU about 15 float64 vectors per sample, some 4 GB in total."""
        return (
            2 * torch.get_num_threads() if torch.device(device).type == "cpu" else max(1, 200 * 421**2 // self.grid**2)
        )

    def coefficient(self, seed: int, indices: Sequence[int], device: torch.device | str = "cpu") -> torch.Tensor:
        """Return the two-phase coefficient at the cell centres, `(B, grid, grid)` float64."""
        noise = white_noise([generator(self.name, seed, index) for index in indices], self.grid, device)
        field = neumann_field(noise, self.field_smoothness, self.field_shift)
        return self.low + (self.high - self.low) * (field >= 0).double()

    def pressure(self, coefficient: torch.Tensor, tick: Tick | None = None) -> torch.Tensor:
        """Compute the pressure from the coefficient, both at the cell centres, `(B, grid, grid)` float64."""
        return map_samples(lambda tile, tick: self._pressure(tile), coefficient, tick)

    def _pressure(self, coefficient: torch.Tensor) -> torch.Tensor:
        to_nodes, to_centres = (table.to(coefficient) for table in _spline_matrices(self.grid))
        nodes = to_nodes @ coefficient @ to_nodes.T
        if self.clip:
            nodes = nodes.clamp(self.low, self.high)
        u = solve(nodes, self.source, self.tolerance, self.iterations)
        return to_centres @ u @ to_centres.T

    def simulate(
        self, seed: int, indices: Sequence[int], device: torch.device | str = "cpu", tick: Tick | None = None
    ) -> torch.Tensor:
        coefficient = self.coefficient(seed, indices, device)
        return torch.stack((coefficient, self.pressure(coefficient, tick)), dim=-1)[:, None].float()
