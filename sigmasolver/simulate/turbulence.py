"""Isotropic turbulence in a periodic box (IT3D), forced or decaying, by a pseudo-spectral method.

    ∂u/∂t = u × ω − ∇P + ν Δu,    ∇·u = 0,    ω = ∇ × u,    box (2π)³

Letters: u velocity, ω vorticity, P = p + |u|²/2 total head (zero mean), ν viscosity, k wavenumber, E
kinetic energy per unit mass. A velocity is stored as its Fourier coefficients with |k_i| < h = grid/2 on
every axis: a complex array (B, 3, n, n, h) with n = 2h − 1, axes in FFT order, the last one halved because
the field is real. The product u × ω is formed on 3/2 as many points per axis, so that none of its aliases
reaches a retained mode. Time: classical Runge-Kutta of order four. A forced flow keeps its energy: after every
step the modes |k| ≤ `forcing_wavenumber` are scaled by one factor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from sigmasolver.data.layout import Layout
from sigmasolver.settings import check_types
from sigmasolver.simulate.simulator import PRECISIONS, Simulator, Tick, generator, run_slices

__all__ = ["IT3D", "Modes", "Turbulence", "embed", "extract"]

_SPATIAL_DIMS = (-3, -2, -1)

# Factor from a uniform number r in [0, 1) to an angle. The public data set was generated with imaginary angles: its
# "phases" e^{iθ} = e^{−2πr} are real and positive, so all modes add up to a jet at the corner of the box.
_ANGLE_FACTORS = {"released": 2j * math.pi, "rogallo": 2 * math.pi}


def _corners(h: int) -> list[tuple[slice, slice]]:
    halves = (slice(h), slice(1 - h, None))
    return [(x, y) for x in halves for y in halves]


def embed(modes: Tensor, size: int) -> Tensor:
    """Zero-pad modes `(..., n, n, h)` to the half spectrum `(..., size, size, size//2 + 1)` of another grid."""
    h = modes.shape[-1]
    spectrum = modes.new_zeros(*modes.shape[:-3], size, size, size // 2 + 1)
    for x, y in _corners(h):
        spectrum[..., x, y, :h] = modes[..., x, y, :]
    return spectrum


def extract(spectrum: Tensor, h: int) -> Tensor:
    """Truncate a half spectrum to the modes with every |k_i| < h: the inverse of `embed`."""
    modes = spectrum.new_empty(*spectrum.shape[:-3], 2 * h - 1, 2 * h - 1, h)
    for x, y in _corners(h):
        modes[..., x, y, :] = spectrum[..., x, y, :h]
    return modes


def _to_grid(modes: Tensor, size: int) -> Tensor:
    return torch.fft.irfftn(embed(modes, size), s=(size,) * 3, dim=_SPATIAL_DIMS, norm="forward")


def _to_modes(values: Tensor, h: int) -> Tensor:
    return extract(torch.fft.rfftn(values, dim=_SPATIAL_DIMS, norm="forward"), h)


@dataclass(frozen=True)
class Modes:
    """Multipliers of the modes, for the linear operators."""

    gradient: Tensor
    """i k: (1, 3, n, n, h)"""
    inverse: Tensor
    """−i k / |k|²: its dot product with the modes of u × ω gives the total head"""
    squared: Tensor
    """|k|²: (n, n, h)"""
    weight: Tensor
    """Number of modes that each stored one represents: 1 where the last wavenumber is 0, else 2"""

    @staticmethod
    def of(h: int, dtype: torch.dtype, device: torch.device) -> Modes:
        """Build the multipliers of the modes |k_i| < h in this complex dtype."""
        full = torch.cat((torch.arange(h), torch.arange(1 - h, 0)))
        k = torch.stack(torch.meshgrid(full, full, torch.arange(h), indexing="ij")).double().to(device)
        squared = k.square().sum(0)
        gradient = 1j * k[None]
        inverse = -gradient / squared.clamp(min=1.0)
        weight = torch.where(k[2] == 0, 1.0, 2.0)
        return Modes(gradient.to(dtype), inverse.to(dtype), squared.to(dtype.to_real()), weight.to(dtype.to_real()))

    def solenoidal(self, vector: Tensor) -> tuple[Tensor, Tensor]:
        """Return the divergence-free part of a vector field, and the zero-mean potential of its gradient part."""
        potential = (self.inverse * vector).sum(1, keepdim=True)
        return torch.addcmul(vector, self.gradient, potential, value=-1), potential


@dataclass(frozen=True)
class Turbulence(Simulator):
    """Trajectories `(frames, grid, grid, grid, 4)` of total head and velocity from a random solenoidal flow.

    `reynolds` fixes the energy: it is the Taylor Reynolds number √(20/3) E/√(νε) at the dissipation ε = 1;
    the flow itself starts far below it. The initial spectrum peaks at `forcing_wavenumber`. Frame f is the
    flow after (f + 1)·`steps_per_frame` steps; its head is, as in the public data set, that of the last
    Runge-Kutta stage.
    """

    name: ClassVar[str] = "turbulence"

    grid: int = 60
    """Points per axis."""
    viscosity: float = 50.0 ** (-4 / 3)
    """ν."""
    reynolds: float = 84.0
    """Taylor Reynolds number that fixes the energy."""
    forced: bool = True
    """Whether large scales are driven."""
    forcing_wavenumber: float = 3.0
    """Where the initial spectrum peaks and the forcing acts."""
    phases: str = "released"
    """released, as the public code draws them, or rogallo: uniform."""
    step: float = 0.002
    """Time step of the solver."""
    steps_per_frame: int = 25
    """Steps between stored frames."""
    frames: int = 20
    """Number of stored frames."""
    precision: str = "float32"
    """float32 or float64."""

    def __post_init__(self) -> None:
        check_types(self)
        if self.grid < 4 or self.grid % 2:
            raise ValueError(f"turbulence needs an even grid of at least 4 points per axis, not {self.grid}.")
        for field in ("viscosity", "reynolds", "step", "steps_per_frame", "frames"):
            if not getattr(self, field) > 0:
                raise ValueError(f"turbulence needs a positive {field}, not {getattr(self, field)}.")
        if not 1 <= self.forcing_wavenumber < self.grid / 2:
            raise ValueError(
                f"turbulence needs a forcing_wavenumber from 1 to below grid/2 = {self.grid / 2:g}, "
                f"not {self.forcing_wavenumber}."
            )
        if self.phases not in _ANGLE_FACTORS:
            raise ValueError(f"turbulence supports the phases {' and '.join(_ANGLE_FACTORS)}, not {self.phases!r}.")
        if self.precision not in PRECISIONS:
            raise ValueError(f"turbulence runs in {' or '.join(PRECISIONS)}, not in {self.precision!r}.")

    @property
    def energy(self) -> float:
        """Kinetic energy ½⟨|u|²⟩ of the initial flow, kept constant if `forced`."""
        return self.reynolds * math.sqrt(self.viscosity * 3 / 20)

    @property
    def layout(self) -> Layout:
        points = np.arange(self.grid) * (2 * math.pi / self.grid)
        return Layout(
            fields=("pressure", "velocity_x", "velocity_y", "velocity_z"),
            units=("1",) * 4,
            boundary=("periodic",) * 3,
            coordinates=(points,) * 3,
            times=self.step * self.steps_per_frame * np.arange(1, self.frames + 1),
        )

    def batch_size(self, device: torch.device | str = "cpu") -> int:
        return torch.get_num_threads() if torch.device(device).type == "cpu" else max(1, 50 * 60**3 // self.grid**3)

    def simulate(
        self, seed: int, indices: Sequence[int], device: torch.device | str = "cpu", tick: Tick | None = None
    ) -> Tensor:
        device = torch.device(device)
        frames = torch.empty((len(indices), self.frames, *(self.grid,) * 3, 4), dtype=torch.float32, device=device)
        modes = self._modes(device)

        def work(part: slice, tock: Tick) -> None:
            self._run(self._initial_modes(seed, indices[part], device), modes, frames[part], tock)

        run_slices(len(indices), device, work, tick)
        return frames

    def initial(self, seed: int, indices: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
        """Return the velocities at time 0, which are not stored: float64 `(B, grid, grid, grid, 3)`."""
        return _to_grid(self._initial_modes(seed, indices, torch.device(device)), self.grid).movedim(1, -1)

    def evolve(self, velocity: Tensor, tick: Tick | None = None) -> Tensor:
        """Integrate velocities `(B, *grid, 3)` to frames `(B, frames, grid, grid, grid, 4)`, in `precision`.

        Only their divergence-free part below wavenumber grid/2 is used.
        """
        if velocity.ndim != 5 or tuple(velocity.shape[1:]) != (*(self.grid,) * 3, 3):
            raise ValueError(
                f"the velocity must have shape (batch, {self.grid}, {self.grid}, {self.grid}, 3), "
                f"not {tuple(velocity.shape)}."
            )
        modes = self._modes(velocity.device)
        values = velocity.movedim(-1, 1).to(PRECISIONS[self.precision])
        start, _ = modes.solenoidal(_to_modes(values, self.grid // 2))
        frames = values.new_empty(len(velocity), self.frames, *(self.grid,) * 3, 4)
        run_slices(len(start), start.device, lambda part, tock: self._run(start[part], modes, frames[part], tock), tick)
        return frames

    def _modes(self, device: torch.device) -> Modes:
        return Modes.of(self.grid // 2, PRECISIONS[self.precision].to_complex(), device)

    def _initial_modes(self, seed: int, indices: Sequence[int], device: torch.device) -> Tensor:
        """Return the coefficients (B, 3, n, n, h) of random solenoidal flows with energy `energy`, in float64.

        α and β are the amplitudes along the two directions normal to k; k₁₂ is the length of k in the x-y plane.
        """
        h = self.grid // 2
        shape = (3, 2 * h - 1, 2 * h - 1, h)
        draws = (torch.rand(shape, generator=generator(self.name, seed, i), dtype=torch.float64) for i in indices)
        noise = torch.stack(tuple(draws)).to(device)
        modes = Modes.of(h, torch.complex128, device)
        k1, k2, k3 = modes.gradient[0].imag
        k = modes.squared.sqrt().clamp(min=1.0)
        k12 = torch.hypot(k1, k2).clamp(min=1.0)
        peak = self.forcing_wavenumber
        # Like the public code, take the square root of the usual k² and k^(−5/3) laws once too often.
        spectrum = torch.where(k <= peak, k / peak, (k / peak) ** (-5 / 6))
        theta1, theta2, phi = (noise * _ANGLE_FACTORS[self.phases]).to(torch.complex128).unbind(1)
        amplitude = spectrum.sqrt() / k
        alpha = amplitude * torch.exp(1j * theta1) * torch.cos(phi)
        beta = amplitude * torch.exp(1j * theta2) * torch.sin(phi)
        u = torch.stack(
            (
                (alpha * k * k2 + beta * k1 * k3) / (k * k12),
                (beta * k2 * k3 - alpha * k * k1) / (k * k12),
                beta * k12 / k,
            ),
            dim=1,
        )
        # A real field needs û(−k) = û(k)*, which the half spectrum does not enforce where k₃ = 0.
        plane = u[..., 0]
        u[..., 0] = (plane + plane.flip(-1, -2).roll((1, 1), (-1, -2)).conj()) / 2
        u, _ = modes.solenoidal(u)
        u[..., 0, 0, 0] = 0
        squares = (modes.weight * (u.real**2 + u.imag**2)).sum((1, 2, 3, 4), keepdim=True)
        return u * torch.sqrt(2 * self.energy / squares)

    def tendency(self, u: Tensor, modes: Modes) -> tuple[Tensor, Tensor]:
        """Return dû/dt, (B, 3, n, n, h), and the total head, (B, 1, n, n, h), of the state û."""
        pair = torch.cat((u, torch.linalg.cross(modes.gradient, u, dim=1)), dim=1)
        velocity, vorticity = _to_grid(pair, 3 * self.grid // 2).chunk(2, dim=1)
        product = _to_modes(torch.linalg.cross(velocity, vorticity, dim=1), self.grid // 2)
        tendency, head = modes.solenoidal(product)
        return tendency.addcmul_(modes.squared, u, value=-self.viscosity), head

    def _step(self, u: Tensor, modes: Modes) -> tuple[Tensor, Tensor]:
        """Take one Runge-Kutta step with forcing; also return the total head of the last stage."""
        slope, head = self.tendency(u, modes)
        total = slope
        for reach, weight in ((0.5, 2.0), (0.5, 2.0), (1.0, 1.0)):
            slope, head = self.tendency(torch.add(u, slope, alpha=reach * self.step), modes)
            total = torch.add(total, slope, alpha=weight)
        u = torch.add(u, total, alpha=self.step / 6)
        return (self._force(u, modes) if self.forced else u), head

    def _force(self, u: Tensor, modes: Modes) -> Tensor:
        """Remove the mean flow and rescale the low modes so that the energy is `energy` again.

        The sums are in float64; in single precision the energy would drift.
        """
        u[..., 0, 0, 0] = 0
        low = modes.squared <= self.forcing_wavenumber**2
        squares = modes.weight * (u.real.square() + u.imag.square()).sum(1)
        total = squares.sum((1, 2, 3), dtype=torch.float64)
        forced = (squares * low).sum((1, 2, 3), dtype=torch.float64)
        scale = torch.sqrt((2 * self.energy - (total - forced)) / forced).to(squares.dtype)
        return u * torch.where(low, scale[:, None, None, None, None], 1.0)

    def _run(self, u: Tensor, modes: Modes, frames: Tensor, tick: Tick) -> None:
        """Integrate from û and write all frames into `frames`."""
        u = u.to(modes.gradient.dtype)
        for f in range(self.frames):
            for _ in range(self.steps_per_frame):
                u, head = self._step(u, modes)
            frames[:, f] = _to_grid(torch.cat((head, u), dim=1), self.grid).movedim(1, -1)
            tick((f + 1) / self.frames)
        # A non-finite mode spreads to all others in one product, so checking the last state is enough.
        if not bool(torch.isfinite(u).all()):
            raise ValueError(f"the turbulence diverged; use a step smaller than {self.step}.")


IT3D = Turbulence()
