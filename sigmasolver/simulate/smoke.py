"""Rising smoke in a closed box (Smoke3D): buoyant incompressible flow on a staggered grid.

    ∂ρ/∂t + u·∇ρ = 0,    ∂u/∂t + u·∇u = −∇p + ν Δu + b ρ e_z,    ∇·u = 0,    u = 0 on the walls

Letters: ρ density, u velocity, p pressure, ν viscosity, b buoyancy, N cells per axis. A velocity is an array
`(B, 3, N, N, N)`: component c sits on the lower faces across axis c, so that its index 0 along that axis is
the wall and always zero. The upper wall is not stored. Everything outside the box is zero, including the ghost
points half a cell behind a wall, for tangential components. One step: semi-Lagrangian advection of density and
velocity by the old velocity (one step back and trilinear interpolation); buoyancy from the new density; one
explicit step of diffusion; exact projection onto divergence-free fields by cosine transforms.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from sigmasolver.data.layout import Layout
from sigmasolver.settings import check_types
from sigmasolver.simulate.simulator import PRECISIONS, Simulator, Tick, generator, run_slices

__all__ = [
    "SMOKE3D",
    "Smoke",
    "Walls",
    "advect_density",
    "advect_velocity",
    "diffuse",
    "divergence",
    "lookup",
]


def lookup(values: Tensor, position: Tensor) -> Tensor:
    """Trilinear interpolation of `values` (B, X, Y, Z) at `position` (B, 3, *shape), in index units.

    A position outside the array is clamped to its edge.
    """
    index = torch.zeros((), dtype=torch.long, device=values.device)
    weights = []
    for axis, size in enumerate(values.shape[1:]):
        coordinate = position[:, axis].clamp(0, size - 1)
        lower = coordinate.floor().clamp_(max=size - 2)
        weights.append((coordinate - lower).flatten(1))
        index = index * size + lower.long()
    index = index.flatten(1)
    # One index serves all eight corners: each has its own view of the array, starting at the corner's offset.
    _, rows, columns = values.shape[1:]
    offsets = [(x * rows + y) * columns + z for x in (0, 1) for y in (0, 1) for z in (0, 1)]
    flat = values.flatten(1)
    corners = [flat[:, offset:].gather(1, index) for offset in offsets]
    for weight in weights:
        half = len(corners) // 2
        corners = [torch.lerp(a, b, weight) for a, b in zip(corners[:half], corners[half:], strict=True)]
    return corners[0].view(len(values), *position.shape[2:])


def _at_centres(velocity: Tensor) -> Tensor:
    """Return the velocity at the cell centres: the mean of the two faces."""
    last = velocity.shape[-1] - 1
    mean = velocity.clone()
    for axis in range(3):
        mean[:, axis].narrow(axis + 1, 0, last).add_(velocity[:, axis].narrow(axis + 1, 1, last))
    return mean.mul_(0.5)


def _cell_indices(like: Tensor) -> Tensor:
    """Return the cell index along each axis, (3, N, N, N)."""
    line = torch.arange(like.shape[-1], device=like.device, dtype=like.dtype)
    return torch.stack(torch.meshgrid(line, line, line, indexing="ij"))


def advect_density(density: Tensor, velocity: Tensor, reach: float) -> Tensor:
    """Advect the density (B, N, N, N) by `reach` cells per unit of velocity (B, 3, N, N, N)."""
    return lookup(density, _cell_indices(density) - reach * _at_centres(velocity))


def advect_velocity(velocity: Tensor, reach: float) -> Tensor:
    """Advect the velocity by itself; it is zero on the walls."""
    last = velocity.shape[-1] - 1
    centred = _at_centres(velocity)
    carrier = centred.unsqueeze(1).repeat(1, 3, 1, 1, 1, 1)
    for axis in range(3):
        at_faces = carrier[:, axis].narrow(axis + 2, 1, last)
        at_faces.add_(centred.narrow(axis + 2, 0, last)).mul_(0.5)
        carrier[:, axis, axis] = velocity[:, axis]
    # One layer of zero padding represents the walls and the ghost points behind them, and shifts every index by one.
    position = (_cell_indices(velocity) + 1 - reach * carrier).flatten(0, 1)
    advected = lookup(F.pad(velocity, (1,) * 6).flatten(0, 1), position)
    return _zero_walls(advected.unflatten(0, (-1, 3)))


def diffuse(velocity: Tensor, number: float) -> Tensor:
    """One explicit step of diffusion; `number` = ν step / cell²."""
    last = velocity.shape[-1] - 1
    diffused = (1 - 6 * number) * velocity
    for axis in (-3, -2, -1):
        diffused.narrow(axis, 1, last).add_(velocity.narrow(axis, 0, last), alpha=number)
        diffused.narrow(axis, 0, last).add_(velocity.narrow(axis, 1, last), alpha=number)
    return _zero_walls(diffused)


def divergence(velocity: Tensor, cell_size: float) -> Tensor:
    """∇·u at the cell centres, (B, N, N, N), from the velocity on the lower faces of the cells."""
    inner = velocity.shape[-1] - 1
    net_flux = torch.zeros_like(velocity[:, 0])
    for axis in range(3):
        component = velocity[:, axis]
        net_flux.sub_(component).narrow(axis + 1, 0, inner).add_(component.narrow(axis + 1, 1, inner))
    return net_flux.div_(cell_size)


def _zero_walls(velocity: Tensor) -> Tensor:
    for axis in range(3):
        velocity[:, axis].select(axis + 1, 0).zero_()
    return velocity


def _transform_axes(values: Tensor, matrix: Tensor) -> Tensor:
    """Multiply the last three axes of (B, x, y, z) by one matrix; each pass rotates the next axis to the end."""
    for _ in range(3):
        values = (values @ matrix.T).movedim(-1, 1)
    return values


@dataclass(frozen=True)
class Walls:
    """Pressure solver in a closed box of N cells per axis, by the cosine transform that diagonalises its Laplacian."""

    cosines: Tensor
    """Orthonormal cosine transform (type II), (N, N)"""
    inverse: Tensor
    """One over the eigenvalues of the seven-point Laplacian, (N, N, N); 0 for the constant"""
    size: float

    @staticmethod
    def of(cells: int, size: float, device: torch.device | str = "cpu") -> Walls:
        k = torch.arange(cells, dtype=torch.float64, device=device)
        cosines = torch.cos(math.pi / cells * k[:, None] * (k + 0.5)) * math.sqrt(2 / cells)
        cosines[0] = math.sqrt(1 / cells)
        line = torch.sin(math.pi / (2 * cells) * k).square() * (-4 / size**2)
        inverse = 1 / (line[:, None, None] + line[:, None] + line)
        inverse[0, 0, 0] = 0
        return Walls(cosines, inverse, size)

    def pressure(self, source: Tensor) -> Tensor:
        """Return the zero-mean solution p of Δp = source, (B, N, N, N).

        The matrix products stay in float64, whatever the flow's precision: they are cheap, and TF32, if a
        training enables it on the same device, does not affect them.
        """
        modes = _transform_axes(source.double(), self.cosines) * self.inverse
        return _transform_axes(modes, self.cosines.T).to(source.dtype)

    def project(self, velocity: Tensor) -> Tensor:
        """Return the nearest divergence-free velocity: u − ∇p."""
        pressure = self.pressure(divergence(velocity, self.size))
        last = velocity.shape[-1] - 1
        projected = velocity.clone()
        for axis in range(3):
            ahead, behind = (pressure.narrow(axis + 1, start, last) for start in (1, 0))
            projected[:, axis].narrow(axis + 1, 1, last).sub_(ahead - behind, alpha=1 / self.size)
        return projected


@dataclass(frozen=True)
class Smoke(Simulator):
    """Trajectories `(frames, grid, grid, grid, 4)` of density and velocity, from rest and a random cloud.

    The cloud is |g|, g a Gaussian field of unit variance whose mode n (waves per box, each |n_i| ≤ `waves`)
    has amplitude |n|^(−2·`smoothness`): a function of space, so that every grid starts from the same cloud.
    With the default smoothness the modes beyond 8 are below single precision. The first `warmup` steps are
    not stored. Velocities are on lower faces; see the module docstring.
    """

    name: ClassVar[str] = "smoke"

    grid: int = 64
    """Cells per axis."""
    length: float = 8.0
    """Side of the box."""
    viscosity: float = 0.003
    """ν."""
    buoyancy: float = 0.5
    """Upward force per unit of density."""
    step: float = 0.75
    """Time step; each is one stored frame."""
    warmup: int = 8
    """Steps before the first stored frame."""
    frames: int = 20
    """Number of stored frames."""
    smoothness: float = 4.0
    """A larger value gives a smoother cloud."""
    waves: int = 8
    """Maximum number of waves per box in the cloud."""
    precision: str = "float32"
    """float32 or float64."""

    def __post_init__(self) -> None:
        check_types(self)
        for field in ("length", "step", "frames", "waves"):
            if not getattr(self, field) > 0:
                raise ValueError(f"smoke needs a positive {field}, not {getattr(self, field)}.")
        for field in ("viscosity", "warmup", "smoothness"):
            if not getattr(self, field) >= 0:
                raise ValueError(f"smoke needs a {field} of at least 0, not {getattr(self, field)}.")
        if self.grid <= 2 * self.waves:
            raise ValueError(
                f"smoke with {self.waves} waves needs more than {2 * self.waves} cells per axis, "
                f"not {self.grid}; use a finer grid or fewer waves."
            )
        if self.precision not in PRECISIONS:
            raise ValueError(f"smoke runs in {' or '.join(PRECISIONS)}, not in {self.precision!r}.")
        if self._diffusion_number > 1 / 6:
            raise ValueError(
                f"smoke is unstable with viscosity*step/cell**2 = {self._diffusion_number:.3g} above 1/6; "
                f"use a step of at most {self.step / (6 * self._diffusion_number):.3g}."
            )

    @property
    def cell(self) -> float:
        """Size of a cell."""
        return self.length / self.grid

    @property
    def _diffusion_number(self) -> float:
        return self.viscosity * self.step / self.cell**2

    @property
    def layout(self) -> Layout:
        return Layout(
            fields=("density", "velocity_x", "velocity_y", "velocity_z"),
            units=("1",) * 4,
            boundary=("wall",) * 3,
            coordinates=((np.arange(self.grid) + 0.5) * self.cell,) * 3,
            times=self.step * np.arange(self.warmup + 1, self.warmup + self.frames + 1),
        )

    def batch_size(self, device: torch.device | str = "cpu") -> int:
        return torch.get_num_threads() if torch.device(device).type == "cpu" else max(1, 50 * 64**3 // self.grid**3)

    def simulate(
        self, seed: int, indices: Sequence[int], device: torch.device | str = "cpu", tick: Tick | None = None
    ) -> Tensor:
        device = torch.device(device)
        frames = torch.empty((len(indices), self.frames, *(self.grid,) * 3, 4), dtype=torch.float32, device=device)

        def work(part: slice, tock: Tick) -> None:
            density = self.initial(seed, indices[part], device).to(PRECISIONS[self.precision])
            self._run(density, density.new_zeros(len(density), 3, *density.shape[1:]), frames[part], tock)

        run_slices(len(indices), device, work, tick)
        return frames

    def initial(self, seed: int, indices: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
        """Return the density of these trajectories at time 0, which is not stored: float64 (B, N, N, N)."""
        shape = (2, *(2 * self.waves + 1,) * 3)
        draws = (torch.randn(shape, generator=generator(self.name, seed, i), dtype=torch.float64) for i in indices)
        noise = torch.stack(tuple(draws)).to(device)
        n = torch.arange(-self.waves, self.waves + 1, dtype=torch.float64, device=device)
        squared = n[:, None, None] ** 2 + n[:, None] ** 2 + n**2
        amplitude = torch.where(squared > 0, squared.clamp(min=1) ** -self.smoothness, 0.0)
        position = (torch.arange(self.grid, dtype=torch.float64, device=device) + 0.5) / self.grid
        waves = torch.exp(2j * math.pi * position[:, None] * n)
        field = _transform_axes(torch.complex(noise[:, 0], noise[:, 1]) * amplitude, waves).real
        deviation, mean = torch.std_mean(field, (1, 2, 3), correction=0, keepdim=True)
        return ((field - mean) / deviation).abs()

    def evolve(self, density: Tensor, velocity: Tensor | None = None, tick: Tick | None = None) -> Tensor:
        """Integrate a density `(B, grid, grid, grid)` to frames `(B, frames, grid, grid, grid, 4)`, in `precision`.

        The velocity `(B, grid, grid, grid, 3)` is on lower faces; without one the fluid is at rest.
        """
        space = (self.grid,) * 3
        if density.ndim != 4 or tuple(density.shape[1:]) != space:
            raise ValueError(f"the density must have shape (batch, *{space}), not {tuple(density.shape)}.")
        density = density.to(PRECISIONS[self.precision])
        if velocity is None:
            velocity = density.new_zeros(*density.shape, 3)
        elif velocity.shape != (*density.shape, 3):
            raise ValueError(
                f"the velocity must have shape {(*density.shape, 3)} to match the density, not {tuple(velocity.shape)}."
            )
        faces = _zero_walls(velocity.movedim(-1, 1).to(density.dtype, copy=True))
        frames = density.new_empty(len(density), self.frames, *space, 4)
        run_slices(len(density), density.device, lambda p, tock: self._run(density[p], faces[p], frames[p], tock), tick)
        return frames

    def _run(self, density: Tensor, velocity: Tensor, frames: Tensor, tick: Tick) -> None:
        """Integrate from this state and write all frames into `frames`."""
        reach = self.step / self.cell
        walls = Walls.of(self.grid, self.cell, density.device)
        last = self.grid - 1
        for step in range(self.warmup + self.frames):
            density = advect_density(density, velocity, reach)
            velocity = advect_velocity(velocity, reach)
            at_faces = density.narrow(3, 1, last) + density.narrow(3, 0, last)
            velocity[:, 2].narrow(3, 1, last).add_(at_faces, alpha=0.5 * self.buoyancy * self.step)
            velocity = walls.project(diffuse(velocity, self._diffusion_number))
            if step >= self.warmup:
                frame = frames[:, step - self.warmup]
                frame[..., 0] = density
                frame[..., 1:] = velocity.movedim(1, -1)
            tick((step + 1) / (self.warmup + self.frames))


SMOKE3D = Smoke()
