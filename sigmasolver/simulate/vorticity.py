"""Two-dimensional incompressible flow on a torus, in vorticity form, by a Fourier method.

    ω_t + u·∇ω = ν Δω - μ ω + f,   u = ψ_y,  v = -ψ_x,  -Δψ = ω,
    f = c cos(2π m·x / L) + s sin(2π m·x / L).

    ω  vorticity   u, v  velocity   ψ  stream function   ν  viscosity   μ  drag   L  side of the box
    m  forcing wave (whole waves along x, y)   c, s  forcing cosine and sine   N  grid points per side
    x is the first array axis, y the second; a hat is a Fourier coefficient, k its wavenumber, Λ = ν|k|² + μ

One solver covers decaying turbulence, the forced flow of the Navier-Stokes benchmark (NS2D) and Kolmogorov
flow (KF2D), which differ only in their parameters.

Space. The state is truncated by the 2/3 rule, so quadratic products are free of aliases and all forms of the
advection term are equivalent; the velocity form
    -(u·∇ω)^ = (kx² - ky²) (uv)^ - kx ky (u² - v²)^
needs the fewest transforms (two inverse, two forward) and only real multipliers.

Time. Advection and forcing explicit, viscosity and drag by Crank-Nicolson:
    D = Δt / (1 + Δt Λ/2),   δ(ω̂, n) = D (n + f̂ - Λ ω̂),
    Euler:  ω̂ <- ω̂ + δ(ω̂, n(ω̂)),
    Heun:   ω̂* = ω̂ + δ(ω̂, n(ω̂)),   ω̂ <- ω̂ + (ω̂* - ω̂ + δ(ω̂, n(ω̂*))) / 2.
Written as increments, because ν|k|²Δt of the large scales is near float32 round-off and would be lost in a factor
1 - ν|k|²Δt.
Heun needs max|k| max|u| Δt below about 0.6. Euler adds an anti-diffusion u²Δt/2: keep Δt <= 1e-4 with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar

import numpy as np
import torch

from sigmasolver.data.layout import Layout
from sigmasolver.settings import check_types
from sigmasolver.simulate.random_fields import periodic_field, white_noise
from sigmasolver.simulate.simulator import PRECISIONS, Simulator, Tick, generator, map_samples
from sigmasolver.simulate.spectral import DEALIAS, dealias_mask, wavenumbers

__all__ = ["DEMO", "KF2D", "NS2D", "Vorticity", "velocity"]

Pointwise = Callable[..., torch.Tensor]

EVALUATIONS = {"euler": 1, "heun": 2}


def _curl_factors(grid: int, box: float, device: torch.device) -> torch.Tensor:
    """(i ky, -i kx) / |k|², which turns vorticity into velocity: complex128 `(2, 1, N, N//2 + 1)`."""
    kx, ky = wavenumbers(grid, box, device)
    square = kx**2 + ky**2
    square[0, 0] = 1
    return 1j * torch.stack((ky / square, -kx / square))[:, None]


def velocity(vorticity: torch.Tensor, box: float) -> torch.Tensor:
    """Return the velocity `(..., N, N, 2)` of the vorticity `(..., N, N)`, mean zero, on a torus of side `box`."""
    s = vorticity.shape[-2:]
    spectrum = torch.fft.rfft2(vorticity)
    curl = _curl_factors(s[0], box, vorticity.device)[:, 0].to(spectrum.dtype)
    return torch.stack([torch.fft.irfft2(row * spectrum, s=s) for row in curl], dim=-1)


def _products(velocities: torch.Tensor) -> torch.Tensor:
    u, v = velocities.unbind()
    return torch.stack((u * v, (u + v) * (u - v)))


def _predict(w: torch.Tensor, n: torch.Tensor, tables: tuple[torch.Tensor, ...]) -> torch.Tensor:
    mixed, difference, damping, force = tables
    return w + (mixed * n[0] + difference * n[1] + force - damping * w)


def _correct(w: torch.Tensor, guess: torch.Tensor, n: torch.Tensor, tables: tuple[torch.Tensor, ...]) -> torch.Tensor:
    mixed, difference, damping, force = tables
    return w + 0.5 * ((guess - w) + (mixed * n[0] + difference * n[1] + force - damping * w))


@lru_cache(maxsize=1)
def _compiled_pointwise() -> tuple[Pointwise, Pointwise, Pointwise]:
    """The three pointwise functions compiled for a GPU, one pass over memory each; they are not launch-bound."""
    return torch.compile(_products), torch.compile(_predict), torch.compile(_correct)


class _Stepper:
    """Coefficients of one flow on one device, and its time step. The state is complex `(B, N, N//2 + 1)`."""

    def __init__(self, flow: Vorticity, device: torch.device) -> None:
        real = PRECISIONS[flow.precision]
        self.shape = (flow.grid, flow.grid)
        self.mask = dealias_mask(flow.grid, flow.dealias, device)
        self.mask[0, 0] = False
        self.evaluations = EVALUATIONS[flow.scheme]
        self.pointwise = _compiled_pointwise() if device.type == "cuda" else (_products, _predict, _correct)
        self.curl = _curl_factors(flow.grid, flow.box, device).to(real.to_complex())

        kx, ky = wavenumbers(flow.grid, flow.box, device)
        rate = flow.viscosity * (kx**2 + ky**2) + flow.drag
        D = self.mask.double() * flow.step / (1 + flow.step * rate / 2)
        # Transforms in a step are not normalised, which saves passes; the tables include the 1/N² of the forward ones.
        mixed = D * (kx**2 - ky**2) / flow.grid**2
        difference = -D * kx * ky / flow.grid**2
        force = torch.view_as_real(D * torch.fft.rfft2(flow.forcing(device), norm="forward"))
        tables = [mixed[..., None], difference[..., None], (D * rate)[..., None], force]
        if device.type == "cpu":  # where a broadcast last axis of 2 is not vectorised
            tables = [table.expand(force.shape) for table in tables]
        self.tables = tuple(table.to(real).contiguous() for table in tables)

    def spectrum(self, field: torch.Tensor) -> torch.Tensor:
        return self.mask * torch.fft.rfft2(field, norm="forward")

    def field(self, w: torch.Tensor) -> torch.Tensor:
        return torch.fft.irfft2(w, s=self.shape, norm="forward")

    def advection(self, w: torch.Tensor) -> torch.Tensor:
        """N² times (uv)^ and (u² - v²)^, real `(2, B, N, N//2 + 1, 2)`."""
        products, _, _ = self.pointwise
        return torch.view_as_real(torch.fft.rfft2(products(self.field(self.curl * w))))

    def step(self, w: torch.Tensor) -> torch.Tensor:
        _, predict, correct = self.pointwise
        state = torch.view_as_real(w)
        new = predict(state, self.advection(w), self.tables)
        if self.evaluations == 2:
            guess = torch.view_as_complex(new)
            new = correct(state, new, self.advection(guess), self.tables)
        return torch.view_as_complex(new)


@dataclass(frozen=True)
class Vorticity(Simulator):
    """Vorticity `(frames, stored, stored, 1)` at times burn_in + interval, burn_in + 2 interval, ...

    The defaults are NS2D. Its published generator is `scheme="euler", step=1e-4`: ten times the work, with
    differences that the flow amplifies over twenty time units.
    """

    name: ClassVar[str] = "vorticity"

    viscosity: float = 1e-5
    """1/Re in the units of KF2D."""
    drag: float = 0.0
    """Linear friction μ."""
    box: float = 1.0
    """Side of the square L."""
    forcing_wave: tuple[int, int] = (1, 1)
    """Whole waves of the forcing along x and y."""
    forcing_cosine: float = 0.1
    """Amplitude of the cosine in the forcing."""
    forcing_sine: float = 0.1
    """Amplitude of the sine in the forcing."""
    field_smoothness: float = 2.5
    """α of the Gaussian initial vorticity."""
    field_shift: float = 7.0
    """τ of the Gaussian initial vorticity: its spectrum is flat up to this wavenumber."""
    field_scale: float = 1.0
    """Factor on the Gaussian initial vorticity."""
    grid: int = 256
    """Points per side of the computational grid."""
    stored: int = 64
    """Points per side of the stored frames, every (grid/stored)-th point of the grid."""
    dealias: str = "square"
    """Shape of the 2/3 rule in wavenumber space: square or circle."""
    scheme: str = "heun"
    """heun or euler."""
    step: float = 2e-3
    """Time step of the solver."""
    burn_in: float = 0.0
    """Time before the first stored interval."""
    interval: float = 1.0
    """Time between stored frames."""
    frames: int = 20
    """Number of stored frames."""
    precision: str = "float32"
    """float32 or float64."""

    def __post_init__(self) -> None:
        check_types(self)
        wave = max(abs(m) for m in self.forcing_wave)
        unforced = self.forcing_cosine == self.forcing_sine == 0
        for valid, message in (
            (self.grid >= 4, f"grid must be at least 4, not {self.grid}"),
            (self.stored >= 1 and self.grid % self.stored == 0, "stored must be a divisor of grid"),
            (self.frames >= 1, f"frames must be at least 1, not {self.frames}"),
            (self.viscosity >= 0, f"viscosity must not be negative, not {self.viscosity}"),
            (self.drag >= 0, f"drag must not be negative, not {self.drag}"),
            (self.box > 0, f"box must be positive, not {self.box}"),
            (unforced or 0 < 3 * wave < self.grid, "forcing_wave must lie between 1 and grid/3 waves"),
            (
                unforced or self.dealias == "square" or 9 * sum(m * m for m in self.forcing_wave) < self.grid**2,
                "forcing_wave must be shorter than grid/3, or the circular dealiasing removes it",
            ),
            (self.field_smoothness > 1, f"field_smoothness must exceed 1, not {self.field_smoothness}"),
            (self.field_shift > 0, f"field_shift must be positive, not {self.field_shift}"),
            (self.step > 0, f"step must be positive, not {self.step}"),
            (
                self.burn_in + self.frames * self.interval <= 1e9 * self.step,
                f"step is {self.step}, so a flow takes more than 10^9 steps; use a larger step",
            ),
        ):
            if not valid:
                raise ValueError(f"{message}.")
        for name, choices in (("dealias", DEALIAS), ("scheme", EVALUATIONS), ("precision", PRECISIONS)):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, not {getattr(self, name)}.")
        for duration, minimum in (("interval", 1), ("burn_in", 0)):
            steps = getattr(self, duration) / self.step
            if not (steps > minimum - 0.5 and abs(steps - round(steps)) < 1e-6 * max(1.0, steps)):
                raise ValueError(f"{duration} must be a whole number of steps of {self.step}, at least {minimum}.")

    @property
    def layout(self) -> Layout:
        points = self.box * np.arange(self.stored) / self.stored
        return Layout(
            fields=("vorticity",),
            units=("1/time",),
            boundary=("periodic", "periodic"),
            coordinates=(points, points),
            times=self.burn_in + self.interval * np.arange(1, self.frames + 1),
        )

    def batch_size(self, device: torch.device | str = "cpu") -> int:
        """On a GPU enough samples to fill it (400 at 256²), with at most 3.4 GB of frames."""
        if torch.device(device).type == "cpu":
            return 2 * torch.get_num_threads()
        return max(1, min(400 * 256**2 // self.grid**2, 3_400_000_000 // (4 * self.frames * self.stored**2)))

    def forcing(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """f at the grid points, float64 `(grid, grid)`."""
        angle = 2 * math.pi / self.grid * torch.arange(self.grid, dtype=torch.float64, device=device)
        phase = self.forcing_wave[0] * angle[:, None] + self.forcing_wave[1] * angle
        return self.forcing_cosine * phase.cos() + self.forcing_sine * phase.sin()

    def initial(self, seed: int, indices: Sequence[int], device: torch.device | str = "cpu") -> torch.Tensor:
        """Return the Gaussian vorticity at time zero, float64 `(B, grid, grid)`."""
        noise = white_noise([generator(self.name, seed, index) for index in indices], self.grid, device)
        return self.field_scale * periodic_field(noise, self.box, self.field_smoothness, self.field_shift)

    def evolve(self, initial: torch.Tensor, tick: Tick | None = None) -> torch.Tensor:
        """Integrate vorticity `(B, grid, grid)` to frames `(B, frames, stored, stored)`, in `precision`.

        The mean of the initial field, which must vanish on a torus, and the modes beyond the 2/3 rule are removed.
        """
        if initial.dim() != 3 or initial.shape[1:] != (self.grid, self.grid):
            shape = tuple(initial.shape)
            raise ValueError(f"the initial vorticity must be (batch, {self.grid}, {self.grid}), not {shape}.")
        frames = map_samples(self._frames, initial, tick)
        if not bool(torch.isfinite(frames[:, -1]).all()):
            raise ValueError(f"the flow diverged; use a step smaller than {self.step}.")
        return frames

    def _frames(self, initial: torch.Tensor, tick: Tick) -> torch.Tensor:
        real, device = PRECISIONS[self.precision], initial.device
        frames = torch.empty(len(initial), self.frames, self.stored, self.stored, dtype=real, device=device)
        stepper = _Stepper(self, device)
        stride = self.grid // self.stored
        burn_in_steps, frame_steps = round(self.burn_in / self.step), round(self.interval / self.step)
        w = stepper.spectrum(initial.to(real))
        for frame in range(self.frames):
            for _ in range(frame_steps + (burn_in_steps if frame == 0 else 0)):
                w = stepper.step(w)
            frames[:, frame] = stepper.field(w)[:, ::stride, ::stride]
            tick((burn_in_steps + frame_steps * (frame + 1)) / (burn_in_steps + frame_steps * self.frames))
        return frames

    def simulate(
        self, seed: int, indices: Sequence[int], device: torch.device | str = "cpu", tick: Tick | None = None
    ) -> torch.Tensor:
        return self.evolve(self.initial(seed, indices, device), tick)[..., None].float()


NS2D = Vorticity()
"""Forced Navier-Stokes flow on the unit torus, viscosity 1e-5."""

KF2D = Vorticity(
    viscosity=1e-3,
    drag=0.1,
    box=2 * math.pi,
    forcing_wave=(0, 8),
    forcing_cosine=-8.0,
    forcing_sine=0.0,
    grid=512,
    stored=256,
    dealias="circle",
    step=1 / 1024,
    burn_in=2.0,
    interval=1 / 32,
    frames=320,
)
"""Kolmogorov flow at Reynolds number 1000 with the velocity forcing sin(8y) along x."""

DEMO = replace(
    KF2D,
    viscosity=4e-3,
    forcing_wave=(0, 4),
    forcing_cosine=-4.0,
    grid=128,
    stored=64,
    step=1 / 192,
    interval=1 / 8,
    frames=20,
)
"""A small turbulent Kolmogorov flow (Reynolds number 250) for a laptop: under a second per flow on one core."""
