"""Darcy flow against analytic solutions, a sparse direct solve, and the quirks of the public files."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import scipy.fft
import torch

from sigmasolver.simulate import simulator_of
from sigmasolver.simulate.darcy import Darcy, solve
from sigmasolver.simulate.simulator import generator

SMALL = Darcy(grid=65)


def manufactured(K: int) -> float:
    """Largest error for a = 2 + sin πx cos πy, u = sin πx sin 2πy."""
    x = torch.linspace(0, 1, K, dtype=torch.float64)[:, None]
    y = x.T
    pi = math.pi
    a = 2 + torch.sin(pi * x) * torch.cos(pi * y)
    u = torch.sin(pi * x) * torch.sin(2 * pi * y)
    a_x, a_y = pi * torch.cos(pi * x) * torch.cos(pi * y), -pi * torch.sin(pi * x) * torch.sin(pi * y)
    u_x, u_y = (
        pi * torch.cos(pi * x) * torch.sin(2 * pi * y),
        2 * pi * torch.sin(pi * x) * torch.cos(2 * pi * y),
    )
    f = -(a_x * u_x + a_y * u_y - 5 * pi**2 * a * u)
    return float((solve(a[None], f[None, 1:-1, 1:-1]) - u).abs().max())


def sparse_solve(nodes: np.ndarray) -> np.ndarray:
    """The same flux-form equations assembled entry by entry and solved directly."""
    from scipy.sparse import coo_matrix
    from scipy.sparse.linalg import spsolve

    K = len(nodes)
    number = {(i, j): (i - 1) * (K - 2) + j - 1 for i in range(1, K - 1) for j in range(1, K - 1)}
    entries = []
    for (i, j), row in number.items():
        for neighbour in ((i + 1, j), (i - 1, j), (i, j + 1), (i, j - 1)):
            face = (nodes[i, j] + nodes[neighbour]) / 2 * (K - 1) ** 2
            entries.append((row, row, face))
            if neighbour in number:
                entries.append((row, number[neighbour], -face))
    rows, columns, values = zip(*entries, strict=True)
    u = np.zeros((K, K))
    u[1:-1, 1:-1] = spsolve(coo_matrix((values, (rows, columns))).tocsr(), np.ones(len(number))).reshape(K - 2, -1)
    return u


def two_phase(count: int, grid: int) -> torch.Tensor:
    return dataclasses.replace(SMALL, grid=grid).coefficient(7, range(count))


def test_coefficient_matches_the_published_field() -> None:
    """The sign of a Gaussian field of covariance (-Δ + 9)^(-2) with zero normal derivative, by its cosine series."""
    grid = 33
    noise = torch.randn(grid, grid, generator=generator("darcy", 5, 0), dtype=torch.float64).numpy()
    k = np.pi * np.arange(grid)
    amplitude = (k[:, None] ** 2 + k**2 + 9.0) ** -1.0
    amplitude[0, 0] = 0
    field = scipy.fft.idctn(amplitude * noise, norm="ortho")
    actual = dataclasses.replace(simulator_of("darcy"), grid=grid).coefficient(5, [0])[0].numpy()
    np.testing.assert_array_equal(actual, np.where(field >= 0, 12.0, 3.0))


def test_solve_is_second_order_on_a_manufactured_solution() -> None:
    coarse, middle, fine = manufactured(33), manufactured(65), manufactured(129)
    assert math.log2(coarse / middle) == pytest.approx(2, abs=0.05)
    assert math.log2(middle / fine) == pytest.approx(2, abs=0.05)
    # h² extrapolates the error to 1.8e-5 on the 421 nodes of the public files.
    assert fine * (128 / 420) ** 2 == pytest.approx(1.8e-5, rel=0.05)


@pytest.mark.parametrize("value", [1.0, 3.0, 12.0])
def test_pressure_of_a_constant_coefficient(value: float) -> None:
    flow = Darcy(grid=101, low=value, high=value)
    pressure = flow.pressure(flow.coefficient(0, [0]))
    assert float(pressure.max()) == pytest.approx(0.07367 / value, rel=2e-4)


def test_solve_agrees_with_a_sparse_direct_solve() -> None:
    nodes = two_phase(2, 24)
    expected = np.stack([sparse_solve(a) for a in nodes.numpy()])
    np.testing.assert_allclose(solve(nodes, 1.0, 1e-13), expected, rtol=1e-10, atol=1e-14)


def test_solve_satisfies_the_energy_identity() -> None:
    """∫ a|∇u|² = ∫ u f, with the face coefficients of the scheme."""
    a = two_phase(3, 49)
    K = a.shape[-1]
    u = solve(a, 1.0)
    rows, columns = (a[:, 1:] + a[:, :-1]) / 2, (a[:, :, 1:] + a[:, :, :-1]) / 2
    dissipation = (rows * u.diff(dim=1).square()).sum((1, 2)) + (columns * u.diff(dim=2).square()).sum((1, 2))
    torch.testing.assert_close(dissipation, u.sum((1, 2)) / (K - 1) ** 2, rtol=1e-9, atol=0)


def test_solve_residual_meets_the_tolerance() -> None:
    a = two_phase(3, 49)
    h = 1 / (a.shape[-1] - 1)
    u = solve(a, 1.0, tolerance=1e-10)
    rows, columns = (a[:, 1:] + a[:, :-1]) / 2, (a[:, :, 1:] + a[:, :, :-1]) / 2
    flux = (rows * u.diff(dim=1)).diff(dim=1)[:, :, 1:-1] + (columns * u.diff(dim=2)).diff(dim=2)[:, 1:-1]
    residual = flux / h**2 + 1
    assert residual.square().mean((1, 2)).sqrt().max() < 1.1e-10


def test_pressure_of_a_rotated_medium_is_rotated() -> None:
    a = SMALL.coefficient(0, [0])
    turned = SMALL.pressure(a.rot90(1, (1, 2)).contiguous())
    torch.testing.assert_close(turned, SMALL.pressure(a).rot90(1, (1, 2)), rtol=1e-8, atol=1e-12)


def test_pressure_scales_with_source_and_coefficient() -> None:
    a = SMALL.coefficient(0, [0])
    plain = SMALL.pressure(a)
    scaled = Darcy(grid=65, low=6.0, high=24.0, source=5.0).pressure(2 * a)
    torch.testing.assert_close(scaled, 2.5 * plain, rtol=1e-8, atol=1e-12)


def test_outer_rows_are_half_a_cell_from_the_wall() -> None:
    """Pressure grows linearly from the wall: row 2 (5/2 cells away) over row 0 (1/2 cell) is nearly 5."""
    pressure = Darcy(grid=161).simulate(0, [0, 1])[:, 0, ..., 1]
    for turn in range(4):
        wall = pressure.rot90(turn, (1, 2))
        assert float((wall[:, 2] / wall[:, 0]).median()) == pytest.approx(4.9, abs=0.1)
    assert pressure.min() > 0


def test_clipping_changes_the_pressure_little() -> None:
    a = Darcy(grid=161).coefficient(0, [0])
    clipped, unclipped = (Darcy(grid=161, clip=clip).pressure(a) for clip in (True, False))
    assert 1e-5 < float((clipped - unclipped).norm() / unclipped.norm()) < 5e-3


def test_coefficient_has_two_phases_in_equal_parts() -> None:
    a = Darcy(grid=33).coefficient(0, range(200))
    assert set(a.unique().tolist()) == {3.0, 12.0}
    # Half the area each by symmetry of the Gaussian field: mean 7.5, deviation 4.5.
    assert float(a.mean()) == pytest.approx(7.5, abs=0.3)
    assert float(a.std()) == pytest.approx(4.5, abs=0.05)


def test_solve_of_a_converged_sample_is_independent_of_its_batch() -> None:
    """A constant medium converges in one iteration and must not drift while a rough one needs twenty."""
    rough = two_phase(1, 33)
    mixed = torch.cat((torch.ones_like(rough), rough, torch.zeros_like(rough) + 5))
    together = solve(mixed, 1.0)
    for sample, joint in zip(mixed, together, strict=True):
        torch.testing.assert_close(joint, solve(sample[None], 1.0)[0], rtol=1e-13, atol=1e-16)


def test_darcy_layout_and_progress() -> None:
    seen: list[float] = []
    SMALL.simulate(0, range(3), tick=seen.append)
    assert seen == sorted(seen) and seen[-1] == 1.0
    centres = SMALL.layout.coordinates[0]
    assert centres[0] == pytest.approx(0.5 / 65) and centres[-1] == pytest.approx(1 - 0.5 / 65)


def test_solve_raises_when_it_does_not_converge() -> None:
    with pytest.raises(ValueError, match="did not converge to 1e-10 in 3 iterations"):
        solve(two_phase(1, 33), 1.0, iterations=3)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("grid", 4, "grid must be at least 5"),
        ("low", -1.0, "0 < low <= high"),
        ("low", 13.0, "0 < low <= high"),
        ("high", math.nan, "high must be a finite number"),
        ("grid", 17.5, "grid must be an integer"),
        ("field_smoothness", 1.0, "field_smoothness must exceed 1"),
        ("field_shift", 0.0, "field_shift must be positive"),
        ("source", math.inf, "source must be a finite number"),
        ("tolerance", 0.0, "tolerance must lie between 0 and 1"),
        ("iterations", 0, "iterations must be at least 1"),
    ],
)
def test_darcy_rejects_invalid_parameters(field: str, value: float, message: str) -> None:
    change: dict[str, Any] = {field: value}
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(Darcy(), **change)
