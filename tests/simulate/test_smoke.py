"""Smoke against exact steps, symmetries, a plain interpolation and numbers of an independent solver."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from sigmasolver.simulate.simulator import generator
from sigmasolver.simulate.smoke import (
    SMOKE3D,
    Smoke,
    Walls,
    advect_density,
    advect_velocity,
    diffuse,
    divergence,
    lookup,
)

N = 12
SMALL = Smoke(grid=N, waves=4, frames=3, warmup=2, precision="float64")


def random_faces(batch: int = 1) -> Tensor:
    """A random velocity (B, 3, N, N, N) with closed walls."""
    faces = torch.randn(batch, 3, N, N, N, dtype=torch.float64)
    for axis in range(3):
        faces[:, axis].select(axis + 1, 0).zero_()
    return faces


def wall_slices(frames: Tensor) -> list[Tensor]:
    """Return the stored lower walls of frames (B, frames, N, N, N, 4)."""
    return [frames[..., axis + 1].select(axis + 2, 0) for axis in range(3)]


def at_centres(frames: Tensor) -> Tensor:
    """Velocities (..., N, N, N, 3) at the cell centres; the upper wall, which is not stored, is zero."""
    means = []
    for axis in range(3):
        v = frames[..., axis + 1].movedim(axis - 3, -1)
        upper = torch.cat((v[..., 1:], torch.zeros_like(v[..., :1])), -1)
        means.append(((v + upper) / 2).movedim(-1, axis - 3))
    return torch.stack(means, -1)


def test_lookup_equals_the_plain_definition() -> None:
    values = torch.randn(2, 4, 5, 3, dtype=torch.float64)
    position = torch.rand(2, 3, 7, dtype=torch.float64) * 8 - 2
    actual = lookup(values, position)
    for b, p in itertools.product(range(2), range(7)):
        coordinate = [min(max(float(position[b, d, p]), 0.0), values.shape[d + 1] - 1.0) for d in range(3)]
        expected = 0.0
        for corner in itertools.product(*(range(s) for s in values.shape[1:])):
            weight = math.prod(max(0.0, 1 - abs(x - i)) for x, i in zip(coordinate, corner, strict=True))
            expected += weight * float(values[(b, *corner)])
        assert float(actual[b, p]) == pytest.approx(expected, abs=1e-14)


def test_lookup_is_exact_for_functions_linear_along_each_axis() -> None:
    x, y, z = torch.meshgrid(*(torch.arange(N, dtype=torch.float64),) * 3, indexing="ij")

    def function(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return 2 + a - 3 * b + 0.5 * a * b * c

    position = torch.rand(1, 3, 50, dtype=torch.float64) * (N - 1)
    assert torch.allclose(lookup(function(x, y, z)[None], position), function(*position[0])[None], rtol=1e-13)


def test_project_is_divergence_free_idempotent_and_orthogonal() -> None:
    walls, faces = Walls.of(N, 0.3), random_faces(2)
    projected = walls.project(faces)
    assert divergence(faces, 0.3).abs().max() > 1
    assert divergence(projected, 0.3).abs().max() < 1e-12
    assert torch.allclose(walls.project(projected), projected, atol=1e-13)
    inner = ((faces - projected) * projected).sum((1, 2, 3, 4))
    assert inner.abs().max() < 1e-11
    assert (faces - projected).norm() > 0.1 * faces.norm()
    for axis in range(3):
        assert not projected[:, axis].select(axis + 1, 0).any()


def test_pressure_solves_the_seven_point_equation_of_a_closed_box() -> None:
    source = torch.randn(1, N, N, N, dtype=torch.float64)
    source -= source.mean()
    p = Walls.of(N, 0.5).pressure(source)[0]
    laplacian = torch.zeros_like(p)
    for axis in range(3):
        # No flow through a wall: the ghost cell behind it mirrors the cell before it.
        mirrored = torch.cat((p.narrow(axis, 0, 1), p, p.narrow(axis, N - 1, 1)), axis)
        laplacian += mirrored.diff(n=2, dim=axis) / 0.25
    assert torch.allclose(laplacian, source[0], atol=1e-12)
    assert p.mean().abs() < 1e-14


def test_divergence_of_a_linear_flow_is_exact() -> None:
    faces = torch.zeros(1, 3, N, N, N, dtype=torch.float64)
    line = 0.5 * torch.arange(N, dtype=torch.float64)
    faces[0, 0], faces[0, 1], faces[0, 2] = line[:, None, None], 2 * line[:, None], -4 * line
    inside = divergence(faces, 0.5)[0, :-1, :-1, :-1]
    assert torch.allclose(inside, torch.full_like(inside, 1 + 2 - 4), atol=1e-13)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_advect_density_by_whole_cells_is_exact(axis: int) -> None:
    density = torch.zeros(1, N, N, N, dtype=torch.float64)
    density[:, 3:7, 3:7, 3:7] = torch.rand(1, 4, 4, 4, dtype=torch.float64)
    faces = torch.zeros(1, 3, N, N, N, dtype=torch.float64)
    faces[:, axis] = 1.5
    moved = advect_density(density, faces, reach=2.0)
    inside = (slice(None), *(slice(1, N - 1),) * 3)
    assert torch.equal(moved[inside], density.roll(3, axis + 1)[inside])


@pytest.mark.parametrize(("along", "across"), list(itertools.permutations(range(3), 2)))
def test_advect_velocity_by_whole_cells_is_exact(along: int, across: int) -> None:
    """A component that varies only along a uniform velocity is advected unchanged."""
    profile = torch.zeros(N, dtype=torch.float64)
    profile[4:8] = torch.rand(4, dtype=torch.float64) / 8
    shape = [N if axis == along else 1 for axis in range(3)]
    faces = torch.zeros(1, 3, N, N, N, dtype=torch.float64)
    faces[:, along] = 1.5
    faces[:, across] = profile.view(shape)
    advected = advect_velocity(faces, reach=2.0)
    # Within three cells of the walls the backward step leaves the box.
    region = tuple(slice(5, N - 1) if axis == along else slice(3, N - 3) for axis in range(3))
    assert torch.equal(advected[0, along][region], faces[0, along][region])
    assert torch.equal(advected[0, across][region], faces[0, across].roll(3, along)[region])
    assert advected[0, across][region].any()


def test_advect_velocity_interpolates_to_zero_behind_walls() -> None:
    """Interpolated a quarter of the way to the ghost cell behind the wall, a component is reduced by a quarter."""
    faces = torch.zeros(1, 3, N, N, N, dtype=torch.float64)
    faces[:, 0, 1:] = 1.0
    faces[:, 1, :, 1:] = 0.25
    advected = advect_velocity(faces, reach=2.0)
    assert torch.equal(advected[0, 0, 6, 0, 5], torch.tensor(0.75, dtype=torch.float64))
    assert torch.equal(advected[0, 0, 6, 5, 5], torch.tensor(1.0, dtype=torch.float64))


@pytest.mark.parametrize("component", [0, 1, 2])
def test_diffuse_decays_an_eigenmode_at_its_rate(component: int) -> None:
    """Zero at the walls across the axis of the component; along the walls zero half a cell behind them."""
    number, mode = 0.13, (2, 1, 3)
    faces = torch.zeros(1, 3, N, N, N, dtype=torch.float64)
    i = torch.arange(N, dtype=torch.float64)
    field, rate = torch.ones(N, N, N, dtype=torch.float64), 1.0
    for axis, m in enumerate(mode):
        index, cells = (i, N) if axis == component else (i + 1, N + 1)
        field *= (math.pi * m * index / cells).sin().view([N if a == axis else 1 for a in range(3)])
        rate -= 4 * number * math.sin(math.pi * m / (2 * cells)) ** 2
    faces[0, component] = field
    assert torch.allclose(diffuse(faces, number), rate * faces, atol=1e-14)


def test_first_step_from_rest_is_the_projected_buoyancy() -> None:
    simulator = replace(SMALL, frames=1, warmup=0)
    density = simulator.initial(0, [0])
    buoyancy = torch.zeros(1, 3, N, N, N, dtype=torch.float64)
    buoyancy[:, 2, :, :, 1:] = 0.75 * 0.5 * (density[..., 1:] + density[..., :-1]) / 2
    expected = Walls.of(N, 8 / N).project(diffuse(buoyancy, 0.003 * 0.75 / (8 / N) ** 2))
    frame = simulator.evolve(density)[:, 0]
    assert torch.equal(frame[..., 0], density)
    assert torch.allclose(frame[..., 1:].movedim(-1, 1), expected, atol=1e-15)


def test_smoke_flow_is_divergence_free_with_closed_walls() -> None:
    frames = SMALL.evolve(SMALL.initial(0, [0, 1]))
    for f in range(SMALL.frames):
        assert divergence(frames[:, f, ..., 1:].movedim(-1, 1), SMALL.cell).abs().max() < 1e-12
    assert not any(wall.any() for wall in wall_slices(frames))
    assert not any(wall.any() for wall in wall_slices(SMALL.simulate(0, [0])))
    assert frames[..., 3].abs().max() > 0.1


def test_rotating_the_cloud_rotates_the_flow() -> None:
    density = SMALL.initial(1, [0])
    frames, turned = SMALL.evolve(density), SMALL.evolve(torch.rot90(density, 1, (1, 2)))
    assert torch.allclose(turned[..., 0], torch.rot90(frames[..., 0], 1, (2, 3)), atol=1e-11)
    x, y, z = torch.rot90(at_centres(frames), 1, (2, 3)).unbind(-1)
    assert torch.allclose(at_centres(turned), torch.stack((-y, x, z), -1), atol=1e-11)
    assert (x - y).abs().max() > 0.01


def test_exchanging_x_and_y_exchanges_the_components() -> None:
    density = SMALL.initial(2, [0])
    frames, swapped = SMALL.evolve(density), SMALL.evolve(density.transpose(1, 2))
    assert torch.allclose(swapped, frames.transpose(2, 3)[..., [0, 2, 1, 3]], atol=1e-11)


def test_smoke_without_buoyancy_stays_at_rest() -> None:
    frames = replace(SMALL, buoyancy=0.0).evolve(SMALL.initial(0, [0]))
    assert not frames[..., 1:].any()
    assert all(torch.equal(frames[:, f, ..., 0], SMALL.initial(0, [0])) for f in range(SMALL.frames))


def test_smoke_of_uniform_density_stays_at_rest() -> None:
    """The buoyancy of a uniform density is a gradient, which the pressure balances exactly."""
    frames = replace(SMALL, viscosity=0.0).evolve(torch.full((1, N, N, N), 1.7, dtype=torch.float64))
    assert (frames[..., 0] - 1.7).abs().max() < 1e-14
    assert frames[..., 1:].abs().max() < 1e-13


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_density_stays_within_its_initial_range(precision: str) -> None:
    simulator = replace(SMALL, frames=12, warmup=0, buoyancy=3.0, precision=precision)
    density = simulator.initial(4, [0, 1]).to(getattr(torch, precision))
    frames = simulator.evolve(density)[..., 0]
    for b in range(2):
        assert density[b].min() <= frames[b].min() and frames[b].max() <= density[b].max()
    assert not torch.allclose(frames[:, 0], frames[:, -1], atol=0.1)


def test_evolve_uses_the_initial_velocity_and_closes_its_walls() -> None:
    velocity = torch.ones(1, N, N, N, 3, dtype=torch.float64)
    unforced = replace(SMALL, buoyancy=0.0, viscosity=0.0, frames=1, warmup=0)
    density = SMALL.initial(0, [0])
    moving = unforced.evolve(density, random_faces().movedim(1, -1))
    assert not torch.equal(moving[:, 0, ..., 0], density)
    assert not any(wall.any() for wall in wall_slices(unforced.evolve(density, velocity)))
    assert bool((velocity == 1).all())


def test_initial_cloud_has_unit_variance_and_is_the_same_on_every_grid() -> None:
    coarse, fine = (replace(SMALL, grid=grid).initial(3, [0, 1]) for grid in (12, 36))
    assert coarse.square().mean((1, 2, 3)).tolist() == pytest.approx([1.0, 1.0], abs=1e-12)
    # The centre of a coarse cell is the centre of the middle one of its three fine cells.
    assert torch.allclose(fine[:, 1::3, 1::3, 1::3], coarse, atol=1e-6)


def test_initial_cloud_equals_the_plain_sum_of_waves() -> None:
    simulator = Smoke(grid=7, waves=2, smoothness=1.5)
    noise = torch.randn(2, 5, 5, 5, generator=generator("smoke", 9, 4), dtype=torch.float64).numpy()
    x, y, z = np.meshgrid(*((np.arange(7) + 0.5) / 7,) * 3, indexing="ij")
    field = np.zeros((7, 7, 7))
    for i, j, k in itertools.product(range(5), repeat=3):
        n = (i - 2, j - 2, k - 2)
        if any(n):
            angle = 2 * np.pi * (n[0] * x + n[1] * y + n[2] * z)
            wave = noise[0, i, j, k] * np.cos(angle) - noise[1, i, j, k] * np.sin(angle)
            field += wave / (n[0] ** 2 + n[1] ** 2 + n[2] ** 2) ** 1.5
    expected = np.abs((field - field.mean()) / field.std())
    assert simulator.initial(9, [4])[0].numpy() == pytest.approx(expected, abs=1e-13)


def test_smoke_agrees_with_an_independent_solver() -> None:
    """Root mean squares and two cells of PhiFlow 2.3.4 (float64, solved to 1e-12) after 9 and 28 steps."""
    x, y, z = np.meshgrid(*((np.arange(N) + 0.5) / N,) * 3, indexing="ij")
    wave = 2 * np.pi
    cloud = np.abs(np.cos(wave * x) + np.sin(wave * (y + 0.5 * z)) + 0.3 * np.cos(wave * (x - 2 * z)))
    frames = replace(SMALL, warmup=8, frames=20).evolve(torch.from_numpy(cloud)[None])[0]
    golden = {
        0: (
            [0.974541213, 0.185045127, 0.205577213, 0.605336615],
            [1.022844263, 0.010274038, 0.024376737, 0.249073825],
            [1.735723683, -0.186300094, 0.0, 0.394668245],
        ),
        19: (
            [0.975757911, 0.059728173, 0.072974881, 0.161310813],
            [1.110520068, 0.03721896, 0.004454384, 0.046482555],
            [1.62117484, 0.106700228, 0.0, -0.072317235],
        ),
    }
    for f, (roots, inside, corner) in golden.items():
        assert frames[f].square().mean((0, 1, 2)).sqrt().tolist() == pytest.approx(roots, abs=5e-9)
        assert frames[f, 3, 5, 7].tolist() == pytest.approx(inside, abs=5e-9)
        assert frames[f, 11, 0, 11].tolist() == pytest.approx(corner, abs=5e-9)


def test_smoke_float32_agrees_with_float64() -> None:
    single, double = (replace(SMALL, precision=p).simulate(0, [0]) for p in ("float32", "float64"))
    assert (single - double).abs().max() < 1e-5
    assert not torch.equal(single, double)


def test_smoke_evolve_from_the_initial_cloud_equals_simulate() -> None:
    assert torch.equal(SMALL.simulate(5, [2]), SMALL.evolve(SMALL.initial(5, [2])).float())


def test_smoke_reports_progress() -> None:
    reported: list[float] = []
    replace(SMALL, frames=1, warmup=1).simulate(0, [0, 1], tick=reported.append)
    assert reported[0] == pytest.approx(0.25) and reported[-1] == pytest.approx(1)
    assert reported == sorted(reported)


def test_smoke_layout_matches_the_frames() -> None:
    layout = SMOKE3D.layout
    assert layout.fields == ("density", "velocity_x", "velocity_y", "velocity_z")
    assert len(layout.times) == 20
    assert (layout.times[0], layout.times[-1]) == (6.75, 21.0)
    assert layout.boundary == ("wall", "wall", "wall")
    assert layout.coordinates[2][[0, -1]] == pytest.approx([0.0625, 8 - 0.0625])
    frames = SMALL.simulate(0, [0])
    assert frames.shape == (1, 3, N, N, N, 4) and frames.dtype == torch.float32


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("grid", 16, "more than 16 cells"),
        ("length", 0.0, "positive length"),
        ("step", float("nan"), "step must be a finite number"),
        ("buoyancy", float("inf"), "buoyancy must be a finite number"),
        ("frames", 0, "positive frames"),
        ("viscosity", -1.0, "viscosity of at least 0"),
        ("warmup", -1, "warmup of at least 0"),
        ("viscosity", 0.01, "step of at most 0.26"),
        ("grid", 128, "step of at most 0.217"),
        ("precision", "float16", "float32 or float64"),
    ],
)
def test_smoke_rejects_invalid_parameters(field: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        Smoke(**{field: value})  # type: ignore[arg-type]
    assert str(error.value).count("\n") == 0 and str(error.value).endswith(".")


def test_smoke_rejects_wrong_shapes_and_no_indices() -> None:
    with pytest.raises(ValueError, match="at least one index"):
        SMALL.simulate(0, [])
    with pytest.raises(ValueError, match="the density must have shape"):
        SMALL.evolve(torch.zeros(N, N, N))
    with pytest.raises(ValueError, match="the velocity must have shape"):
        SMALL.evolve(torch.zeros(1, N, N, N), torch.zeros(1, 3, N, N, N))
