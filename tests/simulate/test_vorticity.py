"""The vorticity solver against analytic flows, invariants, and plain implementations of the published steps."""

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from sigmasolver.simulate.simulator import generator
from sigmasolver.simulate.vorticity import DEMO, KF2D, NS2D, Vorticity, velocity

TAU = 2 * math.pi
UNFORCED = Vorticity(
    viscosity=0.0,
    forcing_cosine=0.0,
    forcing_sine=0.0,
    box=TAU,
    grid=32,
    stored=32,
    frames=1,
    precision="float64",
)
"""No viscosity, drag or forcing: each test enables what it needs."""


def points(grid: int, box: float) -> tuple[torch.Tensor, torch.Tensor]:
    x = box * torch.arange(grid, dtype=torch.float64) / grid
    return x[:, None], x[None, :]


def smooth(flow: Vorticity, index: int = 0) -> torch.Tensor:
    """A smooth random vorticity with a few large scales and unit standard deviation."""
    field = replace(flow, field_smoothness=8.0).initial(0, [index])
    return field / field.std()


def energy(vorticity: torch.Tensor, box: float) -> torch.Tensor:
    return velocity(vorticity, box).square().sum(-1).mean((-2, -1)) / 2


def error(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


def test_ns2d_initial_vorticity_matches_the_published_field() -> None:
    """Covariance 7^3 (-Δ + 49)^(-5/2) on the unit torus, with the factor 2 of its generator: every wave of the noise
    is multiplied by √2 7^(3/2) (|2πk|² + 49)^(-5/4)."""
    grid = 32
    noise = torch.randn(grid, grid, generator=generator("vorticity", 5, 0), dtype=torch.float64).numpy()
    k = TAU * np.fft.fftfreq(grid, 1 / grid)
    amplitude = math.sqrt(2) * 7**1.5 * (k[:, None] ** 2 + k**2 + 49.0) ** -1.25
    amplitude[0, 0] = 0
    expected = grid * np.fft.ifft2(amplitude * np.fft.fft2(noise)).real
    np.testing.assert_allclose(replace(NS2D, grid=grid, stored=grid).initial(5, [0])[0], expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("drag", [0.0, 0.1])
@pytest.mark.parametrize(("box", "waves"), [(1.0, 1), (TAU, 2)])
def test_taylor_green_vortices_decay_at_the_analytic_rate(drag: float, box: float, waves: int) -> None:
    flow = replace(UNFORCED, viscosity=1e-3, drag=drag, box=box, step=0.01, interval=0.5, frames=4)
    x, y = points(flow.grid, box)
    k = TAU * waves / box
    start = torch.sin(k * x) * torch.sin(k * y)
    rate = 2 * flow.viscosity * k**2 + drag
    frames = flow.evolve(start[None])[0]
    for frame, time in zip(frames, flow.layout.times, strict=True):
        # Crank-Nicolson: relative error rate³ step² time / 12.
        torch.testing.assert_close(frame, math.exp(-rate * time) * start, rtol=0, atol=1e-7)


def test_laminar_kolmogorov_flow_is_steady() -> None:
    flow = replace(KF2D, grid=64, stored=64, burn_in=0.0, frames=8, precision="float64")
    _, y = points(64, TAU)
    laminar = (-8 * torch.cos(8 * y) / (0.1 + 64 / 1000)).expand(1, 64, 64)
    assert float(laminar.max()) == pytest.approx(48.8, abs=0.05)
    torch.testing.assert_close(flow.evolve(laminar)[:, -1], laminar, rtol=0, atol=1e-8)


@pytest.mark.parametrize(("scheme", "order"), [("euler", 1), ("heun", 2)])
def test_order_of_the_time_integrator(scheme: str, order: int) -> None:
    flow = replace(KF2D, scheme=scheme, grid=32, stored=32, burn_in=0.0, frames=1, precision="float64")
    flow = replace(flow, interval=0.4, step=0.04, forcing_wave=(0, 2), viscosity=0.01)
    start = smooth(flow)
    runs = [replace(flow, step=step).evolve(start) for step in (0.04, 0.02, 0.01, 0.005)]
    differences = [float((a - b).norm()) for a, b in itertools.pairwise(runs)]
    for coarse, fine in itertools.pairwise(differences):
        assert math.log2(coarse / fine) == pytest.approx(order, abs=0.15)


def published_step(w: np.ndarray, flow: Vorticity) -> np.ndarray:
    """One step in convective form, with full complex spectra and four fields, written in the plainest way."""
    N, dt = flow.grid, flow.step
    k = np.fft.fftfreq(N, 1 / N) * TAU / flow.box
    kx, ky = k[:, None], k[None, :]
    k2 = kx**2 + ky**2
    safe = np.where(k2 == 0, 1, k2)
    n = np.abs(np.fft.fftfreq(N, 1 / N))
    square = (n[:, None] <= N / 3) & (n[None, :] <= N / 3)
    circle = n[:, None] ** 2 + n[None, :] ** 2 <= (N / 3) ** 2
    mask = (square if flow.dealias == "square" else circle) & (k2 > 0)
    x = flow.box * np.arange(N) / N
    phase = TAU / flow.box * (flow.forcing_wave[0] * x[:, None] + flow.forcing_wave[1] * x[None, :])
    force = np.fft.fft2(flow.forcing_cosine * np.cos(phase) + flow.forcing_sine * np.sin(phase))

    def tendency(w_hat: np.ndarray) -> np.ndarray:
        psi = w_hat / safe
        back = [np.fft.ifft2(f).real for f in (1j * ky * psi, -1j * kx * psi, 1j * kx * w_hat, 1j * ky * w_hat)]
        return mask * (force - np.fft.fft2(back[0] * back[2] + back[1] * back[3]))

    rate = flow.viscosity * k2 + flow.drag
    w_hat = mask * np.fft.fft2(w)
    g, d = (1 - dt * rate / 2) * w_hat, 1 + dt * rate / 2
    h = tendency(w_hat)
    new = (g + dt * h) / d
    if flow.scheme == "heun":
        new = (g + dt / 2 * (h + tendency(new))) / d
    return np.fft.ifft2(new).real


@pytest.mark.parametrize("row", [NS2D, KF2D], ids=["ns2d", "kf2d"])
@pytest.mark.parametrize("scheme", ["euler", "heun"])
@pytest.mark.parametrize("grid", [32, 40])
def test_vorticity_step_equals_the_published_step(row: Vorticity, scheme: str, grid: int) -> None:
    flow = replace(row, scheme=scheme, grid=grid, stored=grid, step=0.01, interval=0.02, burn_in=0.0, frames=1)
    flow = replace(flow, precision="float64")
    start = flow.initial(0, [0])
    expected = published_step(published_step(start[0].numpy(), flow), flow)
    np.testing.assert_allclose(flow.evolve(start)[0, 0], expected, rtol=0, atol=1e-12)
    # The precision of the benchmark gives the same.
    single = replace(flow, precision="float32").evolve(start)[0, 0]
    assert error(single.double(), torch.from_numpy(expected)) < 1e-6


def test_box_only_sets_the_unit_of_length() -> None:
    """The unit torus of NS2D and the 2π torus of KF2D have the same flow, with viscosity scaled by the box."""
    unit = replace(NS2D, grid=32, stored=32, viscosity=1e-4, drag=0.1, interval=0.2, precision="float64")
    wide = replace(unit, box=TAU, viscosity=1e-4 * TAU**2)
    start = 10 * smooth(unit)
    torch.testing.assert_close(wide.evolve(start), unit.evolve(start), rtol=0, atol=1e-10)


def test_ns2d_and_kf2d_agree_with_equal_parameters() -> None:
    names = ("viscosity", "drag", "box", "forcing_wave", "forcing_cosine", "forcing_sine", "dealias")
    numerics: dict[str, Any] = {
        "grid": 32,
        "stored": 16,
        "step": 0.005,
        "burn_in": 0.1,
        "interval": 0.1,
        "frames": 3,
    }
    kolmogorov = replace(KF2D, **numerics)
    same = replace(NS2D, **numerics, **{name: getattr(KF2D, name) for name in names})
    assert torch.equal(kolmogorov.simulate(0, [0, 1]), same.simulate(0, [0, 1]))


def test_mean_vorticity_stays_zero() -> None:
    for row in (NS2D, KF2D):
        flow = replace(row, grid=64, stored=64, burn_in=0.0, frames=5, interval=row.step * 20)
        frames = flow.evolve(flow.initial(0, [0]) + 3.0)
        assert frames.mean((-2, -1)).abs().max() < 1e-6 * frames.std()


def test_inviscid_flow_conserves_energy_and_enstrophy() -> None:
    flow = replace(UNFORCED, step=0.005, interval=0.25, frames=4)
    start = smooth(flow)
    frames = flow.evolve(start)[0]
    assert error(frames[-1], frames[0]) > 0.2  # it moved
    for invariant in (energy(frames, TAU), frames.square().mean((-2, -1))):
        # Heun adds energy at third order in the step.
        torch.testing.assert_close(invariant, invariant[:1].expand_as(invariant), rtol=2e-6, atol=0)


def test_vorticity_energy_budget() -> None:
    """dE/dt = -2νZ - 2μE + <ψ f>, with Z half the mean square vorticity, in a forced, damped, viscous flow."""
    flow = replace(NS2D, grid=48, stored=48, viscosity=1e-3, drag=0.1, precision="float64", frames=2)
    flow = replace(flow, step=0.001, interval=0.001)
    start = 3 * smooth(flow)
    before, middle = start[0], flow.evolve(start)[0, 0]
    after = flow.evolve(start)[0, 1]
    rate = (energy(after, 1.0) - energy(before, 1.0)) / 0.002
    k = torch.fft.fftfreq(48, 1 / 48, dtype=torch.float64) * TAU
    k2 = k[:, None] ** 2 + k**2
    k2[0, 0] = 1
    psi = torch.fft.ifft2(torch.fft.fft2(middle) / k2).real
    budget = -flow.viscosity * middle.square().mean() - 2 * flow.drag * energy(middle, 1.0)
    budget = budget + (psi * flow.forcing()).mean()
    assert abs(float(rate - budget)) < 1e-5 * abs(float(budget))


def test_velocity_is_divergence_free_with_the_vorticity_as_curl() -> None:
    flow = replace(NS2D, grid=64, stored=64, interval=0.002, frames=1, precision="float64")
    w = flow.evolve(smooth(flow))[:, 0]
    u = velocity(w, flow.box)
    k = torch.fft.fftfreq(64, 1 / 64, dtype=torch.float64) * TAU
    u_hat, v_hat = (torch.fft.fft2(u[..., axis]) for axis in (0, 1))
    divergence = torch.fft.ifft2(1j * k[:, None] * u_hat + 1j * k * v_hat).real
    curl = torch.fft.ifft2(1j * k[:, None] * v_hat - 1j * k * u_hat).real
    assert divergence.abs().max() < 1e-12 * w.abs().max()
    torch.testing.assert_close(curl, w, rtol=0, atol=1e-12)


def test_kolmogorov_flow_has_its_shift_symmetries() -> None:
    """Kolmogorov flow is invariant under any shift along x, and under 1/8 of the box along y."""
    flow = replace(KF2D, grid=64, stored=64, burn_in=0.0, interval=0.1, step=0.005, frames=1, precision="float64")
    start = flow.initial(0, [0])
    plain = flow.evolve(start)
    for shift, axis, symmetric in ((5, -2, True), (8, -1, True), (3, -1, False)):
        moved = flow.evolve(start.roll(shift, axis))
        assert (error(moved, plain.roll(shift, axis)) < 1e-11) == symmetric


def test_decaying_turbulence_loses_enstrophy_and_keeps_energy_longer() -> None:
    flow = replace(
        UNFORCED,
        viscosity=5e-3,
        grid=64,
        stored=64,
        field_scale=3.0,
        step=5e-3,
        interval=0.5,
        precision="float32",
    )
    flow = replace(flow, frames=3)
    frames = flow.evolve(flow.initial(0, [0, 1])).double()
    enstrophy, kinetic = frames.square().mean((-2, -1)), energy(frames, TAU)
    assert (enstrophy.diff(dim=1) < 0).all() and (kinetic.diff(dim=1) < 0).all()
    assert (enstrophy[:, -1] / enstrophy[:, 0] < kinetic[:, -1] / kinetic[:, 0]).all()


def test_stored_frames_are_grid_points_at_the_layout_times() -> None:
    flow = replace(NS2D, grid=48, stored=48, burn_in=0.1, interval=0.05, frames=4, step=0.005)
    full = flow.simulate(0, [0])
    assert torch.equal(replace(flow, stored=12).simulate(0, [0]), full[:, :, ::4, ::4])
    later = replace(flow, burn_in=0.2, frames=2).simulate(0, [0])
    assert torch.equal(later, full[:, 2:])
    np.testing.assert_allclose(flow.layout.times, [0.15, 0.2, 0.25, 0.3])
    np.testing.assert_allclose(replace(flow, stored=12).layout.coordinates[0], flow.layout.coordinates[0][::4])


def test_ns2d_and_kf2d_have_the_published_frames() -> None:
    np.testing.assert_allclose(NS2D.layout.times, np.arange(1, 21))
    np.testing.assert_allclose(KF2D.layout.times[[0, -1]], [2 + 1 / 32, 12])
    assert (NS2D.frames, NS2D.stored, KF2D.frames, KF2D.stored) == (20, 64, 320, 256)


def test_demo_flow_is_turbulent_statistically_steady_and_resolved() -> None:
    frames = DEMO.simulate(0, [0])[0, ..., 0].double()
    assert frames.shape == (20, 64, 64)
    assert 3 < frames.std() < 5.5
    half = frames[:10].std() / frames[10:].std()
    assert 0.7 < half < 1.4
    change = (frames[1:] - frames[:-1]).flatten(1).norm(dim=1) / frames[1:].flatten(1).norm(dim=1)
    assert 0.1 < change.mean() < 0.4
    spectrum = torch.fft.rfft2(frames).abs().square().mean((0, 1))
    assert spectrum[28:].max() < 1e-3 * spectrum[1:8].max()


def test_vorticity_reports_progress() -> None:
    seen: list[float] = []
    replace(NS2D, grid=16, stored=16, frames=3, interval=0.01).simulate(0, range(3), tick=seen.append)
    assert seen == sorted(seen) and seen[-1] == pytest.approx(1.0) and len(seen) >= 9


def test_vorticity_raises_when_the_flow_diverges() -> None:
    unstable = replace(NS2D, grid=32, stored=32, step=1.0, field_scale=100.0)
    with pytest.raises(ValueError, match=r"the flow diverged; use a step smaller than 1\.0"):
        unstable.simulate(0, [0])


def test_vorticity_rejects_an_initial_field_of_wrong_shape() -> None:
    with pytest.raises(ValueError, match=r"must be \(batch, 32, 32\), not \(1, 16, 16\)"):
        UNFORCED.evolve(torch.zeros(1, 16, 16))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("step", 1e-300, r"a flow takes more than 10\^9 steps"),
        ("grid", 2, "grid must be at least 4"),
        ("stored", 60, "stored must be a divisor of grid"),
        ("frames", 0, "frames must be at least 1"),
        ("viscosity", -1e-5, "viscosity must not be negative"),
        ("viscosity", math.nan, "viscosity must be a finite number"),
        ("drag", -0.1, "drag must not be negative"),
        ("box", 0.0, "box must be positive"),
        ("forcing_wave", (0, 0), "forcing_wave must lie between 1 and grid/3 waves"),
        ("forcing_wave", (0, 90), "forcing_wave must lie between 1 and grid/3 waves"),
        ("forcing_wave", (1,), "forcing_wave must be a list of 2 values"),
        ("forcing_wave", (0.5, 1), "forcing_wave must be a list of 2 values, each an integer"),
        ("forcing_cosine", math.inf, "forcing_cosine must be a finite number"),
        ("field_smoothness", 1.0, "field_smoothness must exceed 1"),
        ("field_shift", 0.0, "field_shift must be positive"),
        ("dealias", "none", "dealias must be one of square, circle, not none"),
        ("scheme", "rk4", "scheme must be one of euler, heun, not rk4"),
        ("precision", "float16", "precision must be one of float32, float64, not float16"),
        ("step", 0.0, "step must be positive"),
        ("step", 0.3, "interval must be a whole number of steps of 0.3"),
        ("burn_in", -1.0, "burn_in must be a whole number of steps"),
        ("interval", 0.0, "interval must be a whole number of steps"),
    ],
)
def test_vorticity_rejects_invalid_parameters(field: str, value: object, message: str) -> None:
    change: dict[str, Any] = {field: value}
    with pytest.raises(ValueError, match=message):
        replace(NS2D, **change)


def test_forcing_removed_by_the_circular_mask_is_rejected() -> None:
    with pytest.raises(ValueError, match="circular dealiasing removes it"):
        Vorticity(dealias="circle", forcing_wave=(9, 9), grid=32, stored=32)
    assert Vorticity(dealias="square", forcing_wave=(9, 9), grid=32, stored=32).forcing_wave == (9, 9)
