"""Turbulence against exact solutions, invariants and a plain triad sum."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sigmasolver.simulate.turbulence import IT3D, Modes, Turbulence, embed, extract

SMALL = Turbulence(grid=12, viscosity=0.02, reynolds=10.0, frames=2, steps_per_frame=4, precision="float64")
DECAYING = replace(SMALL, forced=False, viscosity=0.05, step=0.01)


def points(grid: int) -> tuple[Tensor, ...]:
    line = torch.arange(grid, dtype=torch.float64) * (2 * math.pi / grid)
    return torch.meshgrid(line, line, line, indexing="ij")


def waves(grid: int) -> Tensor:
    """Wavenumbers (3, N, N, N) of the full, unhalved transform."""
    line = torch.fft.fftfreq(grid, 1 / grid, dtype=torch.float64)
    return torch.stack(torch.meshgrid(line, line, line, indexing="ij"))


def coefficients(velocity: Tensor) -> Tensor:
    """Full Fourier coefficients (..., 3, N, N, N) of velocities (..., N, N, N, 3)."""
    return torch.fft.fftn(velocity.double(), dim=(-4, -3, -2), norm="forward").movedim(-1, -4)


def energy(velocity: Tensor) -> Tensor:
    return velocity.double().square().sum(-1).mean((-3, -2, -1)) / 2


def dissipation(velocity: Tensor, viscosity: float) -> Tensor:
    k = waves(velocity.shape[-2])
    return viscosity * (k.square().sum(0) * coefficients(velocity).abs().square()).sum((-4, -3, -2, -1))


def taylor_reynolds(velocity: Tensor, viscosity: float) -> Tensor:
    return torch.sqrt(20 / 3 * energy(velocity) ** 2 / (viscosity * dissipation(velocity, viscosity)))


def kurtosis(velocity: Tensor) -> float:
    return float(velocity.pow(4).mean() / velocity.square().mean() ** 2)


def taylor_green(grid: int) -> Tensor:
    x, y, z = points(grid)
    flow = (x.sin() * y.cos() * z.cos(), -x.cos() * y.sin() * z.cos(), torch.zeros_like(x))
    return torch.stack(flow, -1)[None]


def test_initial_turbulence_has_its_energy_and_no_divergence_or_mean() -> None:
    for phases in ("released", "rogallo"):
        simulator = replace(SMALL, phases=phases)
        start = simulator.initial(3, [0, 1])
        assert torch.allclose(energy(start), torch.tensor(simulator.energy, dtype=torch.float64), rtol=1e-14, atol=0)
        u = coefficients(start)
        assert (waves(12) * u).sum(1).abs().max() < 1e-13
        assert u[..., 0, 0, 0].abs().max() < 1e-14


def test_it3d_energy_is_that_of_the_public_data_set() -> None:
    assert IT3D.viscosity == pytest.approx(0.0054288, abs=1e-7)
    assert IT3D.energy == pytest.approx(2.39706, abs=1e-5)
    kolmogorov = 50.0
    assert IT3D.energy == pytest.approx(84 * (IT3D.viscosity * kolmogorov) ** 2 / math.sqrt(20 / 3), rel=1e-14)


def test_forced_flow_keeps_energy_divergence_and_mean() -> None:
    frames = SMALL.evolve(SMALL.initial(0, [0, 1]))
    velocity = frames[..., 1:]
    assert (energy(velocity) / SMALL.energy - 1).abs().max() < 1e-12
    u = coefficients(velocity)
    assert (waves(12) * u).sum(-4).abs().max() < 1e-12
    assert u[..., 0, 0, 0].abs().max() < 1e-13
    assert frames[..., 0].mean((-3, -2, -1)).abs().max() < 1e-13


def test_forcing_scales_only_the_low_modes() -> None:
    once = replace(SMALL, frames=1, steps_per_frame=1)
    start = once.initial(0, [0])
    forced, free = (coefficients(s.evolve(start)[:, 0, ..., 1:]) for s in (once, replace(once, forced=False)))
    low = (waves(12).square().sum(0) <= 9).expand_as(forced)
    assert torch.allclose(forced[~low], free[~low], atol=1e-14)
    ratio = (forced * free.conj())[low].sum().real / free[low].abs().square().sum()
    assert ratio > 1
    assert torch.allclose(forced[low], ratio * free[low], atol=1e-14)


def test_turbulence_evolve_from_the_initial_flow_equals_simulate() -> None:
    frames = SMALL.evolve(SMALL.initial(5, [2]))
    assert torch.allclose(SMALL.simulate(5, [2]), frames.float(), atol=1e-6)


def test_without_viscosity_and_forcing_energy_is_conserved() -> None:
    inviscid = replace(SMALL, forced=False, viscosity=1e-30, step=0.005, steps_per_frame=20)
    start = 0.5 * SMALL.initial(0, [0])
    frames = inviscid.evolve(start)[..., 1:]
    assert (frames[:, -1] - start).norm() > 0.1 * start.norm()
    assert (energy(frames) / energy(start) - 1).abs().max() < 1e-12


def test_step_is_classical_runge_kutta_with_the_head_of_the_last_stage() -> None:
    once = replace(DECAYING, step=0.05, frames=1, steps_per_frame=1)
    modes = Modes.of(6, torch.complex128, torch.device("cpu"))
    start = once.initial(0, [0])
    u = extract(torch.fft.rfftn(start, dim=(1, 2, 3), norm="forward").movedim(-1, 1), 6)
    a, _ = once.tendency(u, modes)
    b, _ = once.tendency(u + 0.025 * a, modes)
    c, _ = once.tendency(u + 0.025 * b, modes)
    d, head = once.tendency(u + 0.05 * c, modes)
    end = torch.cat((head, u + 0.05 / 6 * (a + 2 * b + 2 * c + d)), 1)
    expected = torch.fft.irfftn(embed(end, 12), s=(12,) * 3, dim=(-3, -2, -1), norm="forward").movedim(1, -1)
    assert torch.allclose(once.evolve(start)[:, 0], expected, atol=1e-13)


def test_runge_kutta_has_order_four() -> None:
    start = 3 * SMALL.initial(0, [0]) / math.sqrt(SMALL.energy)
    time = 0.08

    def run(steps: int) -> Tensor:
        return replace(DECAYING, step=time / steps, steps_per_frame=steps, frames=1).evolve(start)[..., 1:]

    exact = run(64)
    errors = [float((run(steps) - exact).norm()) for steps in (4, 8, 16)]
    for coarse, fine in itertools.pairwise(errors):
        assert math.log2(coarse / fine) == pytest.approx(4, abs=0.25)


@pytest.mark.parametrize("turn", [0, 1, 2])
def test_beltrami_flow_decays_exactly_and_has_no_head(turn: int) -> None:
    x, y, z = points(12)
    a, b, c = 1.0, 0.7, 0.4
    flow = (a * z.sin() + c * y.cos(), b * x.sin() + a * z.cos(), c * y.sin() + b * x.cos())
    # A cyclic permutation of the axes keeps the handedness, so the flow stays Beltrami.
    start = torch.stack(flow, -1).permute(*[(i + turn) % 3 for i in range(3)], 3).roll(-turn, -1)[None]
    frames = DECAYING.evolve(start)[0]
    for frame, time in zip(frames, DECAYING.layout.times, strict=True):
        assert torch.allclose(frame[..., 1:], start[0] * math.exp(-DECAYING.viscosity * time), atol=1e-13)
        assert frame[..., 0].abs().max() < 1e-13


@pytest.mark.parametrize("axes", [(0, 1, 2), (1, 2, 0), (2, 0, 1)])
def test_two_dimensional_flow_decays_exactly_with_the_analytic_head(axes: tuple[int, int, int]) -> None:
    coordinates = points(12)
    x, y = coordinates[axes[0]], coordinates[axes[1]]
    start = torch.zeros(1, 12, 12, 12, 3, dtype=torch.float64)
    start[0, ..., axes[0]] = x.sin() * y.cos()
    start[0, ..., axes[1]] = -x.cos() * y.sin()
    head = ((2 * x).cos() + (2 * y).cos() - (2 * x).cos() * (2 * y).cos()) / 4
    frames = DECAYING.evolve(start)[0]
    for frame, time in zip(frames, DECAYING.layout.times, strict=True):
        decay = math.exp(-2 * DECAYING.viscosity * time)
        assert torch.allclose(frame[..., 1:], start[0] * decay, atol=1e-13)
        # The head is that of the last stage, which is only of third order in the step.
        assert torch.allclose(frame[..., 0], head * decay**2, atol=(2 * DECAYING.viscosity * DECAYING.step) ** 3)


def test_taylor_green_dissipation_follows_its_power_series() -> None:
    """Taylor and Green (1937), to fourth order in time: the remainder is of fifth order."""
    r = 10.0
    simulator = replace(DECAYING, grid=16, viscosity=1 / r, step=0.02, steps_per_frame=5, frames=2)
    actual = dissipation(simulator.evolve(taylor_green(16))[0, ..., 1:], 1 / r) / (0.75 / r)
    error = []
    for value, t in zip(actual, simulator.layout.times, strict=True):
        series = 1 - 6 * t / r + (5 / 48 + 18 / r**2) * t**2 - (5 / 3 + 36 / r**2) * t**3 / r
        series += (50 / 6336 + 1835 / (144 * r**2) + 54 / r**4) * t**4
        error.append(abs(float(value) - series))
    assert error[0] < 1e-6
    assert math.log2(error[1] / error[0]) == pytest.approx(5, abs=0.3)


def test_tendency_equals_the_plain_sum_over_triads() -> None:
    """The 3/2 rule leaves no alias: dû/dt is the truncated convolution, mode by mode."""
    grid, h, nu = 8, 4, 0.3
    simulator = Turbulence(grid=grid, viscosity=nu, precision="float64")
    full = coefficients(simulator.initial(0, [0]))[0]
    line = range(1 - h, h)
    retained = [(x, y, z) for x in line for y in line for z in line]
    u = {(x, y, z): full[:, x, y, z] for x, y, z in retained}
    vorticity = {m: 1j * torch.linalg.cross(torch.tensor(m).to(c), c) for m, c in u.items()}
    modes = Modes.of(h, torch.complex128, torch.device("cpu"))
    state = extract(torch.fft.rfftn(simulator.initial(0, [0]).movedim(-1, 1), dim=(-3, -2, -1), norm="forward"), h)
    tendency, head = simulator.tendency(state, modes)
    for mode in [(0, 0, 1), (3, 3, 3), (-3, 1, 3), (1, -3, 0), (2, -2, 1), (0, 3, 0)]:
        product = torch.zeros(3, dtype=torch.complex128)
        for p in retained:
            q = (mode[0] - p[0], mode[1] - p[1], mode[2] - p[2])
            if q in vorticity:
                product += torch.linalg.cross(u[p], vorticity[q])
        n = torch.tensor(mode).to(product)
        parallel = (n * product).sum() / (n * n).sum()
        assert torch.allclose(head[(0, 0, *mode)], -1j * parallel, atol=1e-13)
        expected = product - n * parallel - nu * (n * n).sum() * u[mode]
        assert torch.allclose(tendency[(0, slice(None), *mode)], expected, atol=1e-13)


def test_embed_is_interpolation() -> None:
    torch.manual_seed(1)
    coarse = torch.fft.rfftn(torch.randn(8, 8, 8, dtype=torch.float64), norm="forward")
    modes = extract(coarse, 4)
    fine = torch.fft.irfftn(embed(modes, 24), s=(24,) * 3, norm="forward")
    assert torch.allclose(fine[::3, ::3, ::3], torch.fft.irfftn(embed(modes, 8), s=(8,) * 3, norm="forward"))
    assert torch.equal(extract(embed(modes, 24), 4), modes)


def test_uniform_velocity_only_advects_the_flow() -> None:
    simulator = replace(DECAYING, step=0.0025, steps_per_frame=40, frames=1)
    x, y, z = points(12)
    swirl = torch.stack((z.sin() + y.cos(), x.sin() + z.cos(), y.sin() + x.cos()), -1)
    start = taylor_green(12) + swirl
    wind = torch.tensor([2 * math.pi / 12 / 0.1, 0.0, -4 * math.pi / 12 / 0.1], dtype=torch.float64)
    at_rest, advected = (simulator.evolve(u)[:, 0, ..., 1:] for u in (start, start + wind))
    assert torch.allclose(advected, at_rest.roll((1, -2), (1, 3)) + wind, atol=1e-7)
    assert not torch.allclose(advected, at_rest + wind, atol=1e-2)


def test_released_phases_make_a_jet_at_the_corner_and_rogallo_does_not() -> None:
    jet, plain = (Turbulence(grid=32, phases=p).initial(0, [0])[0] for p in ("released", "rogallo"))
    assert kurtosis(jet) > 10
    assert kurtosis(plain) == pytest.approx(3, abs=0.5)
    peak = torch.unravel_index(jet.square().sum(-1).argmax(), (32, 32, 32))
    assert all(min(int(i), 32 - int(i)) <= 2 for i in peak)
    assert jet.square().sum(-1).max() > 8 * plain.square().sum(-1).max()


def test_taylor_reynolds_number_rises_and_energy_stays() -> None:
    simulator = Turbulence(grid=24, viscosity=0.03, reynolds=40, step=0.02, steps_per_frame=5, frames=5)
    velocity = simulator.simulate(0, [0])[0, ..., 1:]
    reynolds = taylor_reynolds(torch.cat((simulator.initial(0, [0]), velocity)), simulator.viscosity)
    assert bool((reynolds.diff() > 0).all())
    assert reynolds[-1] > 1.3 * reynolds[0]
    assert (energy(velocity) / simulator.energy - 1).abs().max() < 1e-6


def test_turbulence_float32_agrees_with_float64() -> None:
    single, double = (replace(SMALL, precision=p).simulate(0, [0]) for p in ("float32", "float64"))
    assert (single - double).norm() / double.norm() < 1e-6
    assert not torch.equal(single, double)


def test_turbulence_reports_progress() -> None:
    reported: list[float] = []
    SMALL.simulate(0, [0, 1], tick=reported.append)
    assert reported[0] == pytest.approx(0.25) and reported[-1] == pytest.approx(1)
    assert reported == sorted(reported)


def test_turbulence_layout_matches_the_frames() -> None:
    layout = IT3D.layout
    assert layout.fields == ("pressure", "velocity_x", "velocity_y", "velocity_z")
    assert layout.times == pytest.approx([0.05 * f for f in range(1, 21)])
    assert [len(c) for c in layout.coordinates] == [60, 60, 60]
    assert layout.coordinates[0][1] == pytest.approx(2 * math.pi / 60)
    frames = SMALL.simulate(0, [0])
    assert frames.shape == (1, 2, 12, 12, 12, 4) and frames.dtype == torch.float32


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("grid", 15, "even grid"),
        ("grid", 2, "even grid"),
        ("viscosity", 0.0, "positive viscosity"),
        ("step", -0.1, "positive step"),
        ("frames", 0, "positive frames"),
        ("reynolds", float("nan"), "reynolds must be a finite number"),
        ("forcing_wavenumber", 30.0, "forcing_wavenumber from 1"),
        ("phases", "random", "released and rogallo"),
        ("precision", "float16", "float32 or float64"),
    ],
)
def test_turbulence_rejects_invalid_parameters(field: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        Turbulence(**{field: value})  # type: ignore[arg-type]
    assert str(error.value).count("\n") == 0 and str(error.value).endswith(".")


def test_turbulence_rejects_wrong_shapes_no_indices_and_blow_up() -> None:
    with pytest.raises(ValueError, match=r"shape \(batch, 12, 12, 12, 3\)"):
        SMALL.evolve(torch.zeros(1, 12, 12, 3))
    with pytest.raises(ValueError, match="at least one index"):
        SMALL.simulate(0, [])
    with pytest.raises(ValueError, match="smaller than 3"):
        replace(SMALL, step=3.0, steps_per_frame=40).simulate(0, [0])


@pytest.mark.slow
def test_it3d_full_size_statistics() -> None:
    """One trajectory of the public set's size: about four minutes on one core."""
    frames = IT3D.simulate(0, [0])[0]
    velocity, head = frames[..., 1:], frames[..., 0]
    reynolds = taylor_reynolds(velocity, IT3D.viscosity)
    assert 30 < reynolds[0] < 40 and 76 < reynolds[-1] < 83
    assert bool((reynolds.diff() > 0).all())
    assert velocity.double().square().mean((1, 2, 3, 4)).sqrt().tolist() == pytest.approx([1.26413] * 20, rel=1e-5)
    assert float(head[0].std()) == pytest.approx(2.6, abs=0.3) and float(head[-1].std()) == pytest.approx(2.0, abs=0.2)
    assert float((velocity[1] - velocity[0]).norm() / velocity[0].norm()) == pytest.approx(0.61, abs=0.06)
    assert float((velocity[-1] - velocity[-2]).norm() / velocity[-2].norm()) == pytest.approx(0.27, abs=0.03)
