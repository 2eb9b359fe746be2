"""The solver as a baseline: on its own grid it equals the simulator, on coarser ones it converges at its order."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from sigmasolver.simulate.coarse import coarse_work, finer_grid, full_work
from sigmasolver.simulate.darcy import Darcy, interpolation
from sigmasolver.simulate.spectral import resample
from sigmasolver.simulate.vorticity import DEMO


def test_coarse_work_of_darcy_on_its_own_grid_equals_the_simulator():
    fine = Darcy(grid=61)
    work = coarse_work(fine, 3, torch.zeros(2, 61, 61), fine.layout.coordinates[0], 1, 1, 61)
    truth = fine.simulate(3, [0, 1])[:, :, ..., 1]
    assert torch.allclose(work.call().float(), truth, rtol=1e-5, atol=0)
    assert torch.allclose(full_work(fine, 3, 1, 1).call().float(), truth[1:], rtol=1e-5, atol=0)


def test_coarse_work_of_darcy_is_second_order_for_a_smooth_coefficient():
    """Error c h², of the fine solution too: (1/15² - 1/60²) / (1/30² - 1/60²) = 5 between 16 and 31 points of 61."""
    fine = Darcy(grid=61, low=5.0, high=5.0)
    errors = []
    for grid in (16, 31):
        points = np.linspace(0.2, 0.8, grid)
        frames = coarse_work(fine, 3, torch.zeros(1, grid, grid), points, 1, 1, grid).call()[0, 0]
        to_points = interpolation(fine.layout.coordinates[0], points)
        truth = to_points @ fine.pressure(fine.coefficient(3, [0]))[0] @ to_points.T
        errors.append(float((frames - truth).norm() / truth.norm()))
    assert errors[0] / errors[1] == pytest.approx(5, rel=0.1)


def test_coarse_work_of_a_flow_on_its_own_grid_equals_the_simulator():
    simulator = replace(DEMO, grid=64, stored=64, frames=4, precision="float64")
    truth = simulator.simulate(5, [0, 1])
    work = coarse_work(simulator, 5, truth[:, 1, ..., 0], simulator.layout.coordinates[0], 1, 2, 64)
    assert torch.allclose(work.call()[:, 0].float(), truth[:, 3, ..., 0], atol=1e-4)  # the initial frame is float32
    assert full_work(simulator, 5, 0, 3).call().shape == (1, 3, 64, 64)


def test_coarse_work_of_a_flow_converges_on_finer_grids():
    """From a start with few waves, at points of the model's grid, with longer steps on coarser grids."""
    simulator = replace(DEMO, grid=96, stored=96, frames=2, burn_in=0.0, precision="float64")
    start = resample(simulator.initial(5, [0]), 24)
    points = np.arange(24) * simulator.box / 24
    truth = simulator.evolve(resample(start, 96))[:, 1, ::4, ::4]
    errors = []
    for grid in (24, 36, 48, 72):
        frames = coarse_work(simulator, 5, start, points, 1, 2, grid).call()
        assert frames.shape == (1, 1, 24, 24)
        errors.append(float((frames[:, 0] - truth).norm() / truth.norm()))
    assert all(later < 0.5 * earlier for earlier, later in pairwise(errors)) and errors[-1] < 0.01


def test_resample_is_exact_for_resolved_waves():
    def waves(points: int) -> torch.Tensor:
        x = 2 * torch.pi * torch.arange(points, dtype=torch.float64) / points
        return torch.cos(3 * x[:, None] - 2 * x) + 0.5 * torch.sin(4 * x) + 1

    for few, many in ((9, 10), (10, 16), (11, 31)):
        assert torch.allclose(resample(waves(few), many), waves(many), atol=1e-12)
        assert torch.allclose(resample(waves(many), few), waves(few), atol=1e-12)
    short = torch.cos(2 * torch.pi * 6 * torch.arange(16, dtype=torch.float64) / 16).expand(16, 16)
    assert resample(short, 8).abs().max() < 1e-12, (
        "waves that the coarse grid does not resolve must not alias onto others"
    )


def test_finer_grid_of_a_flow_has_fast_transforms():
    assert finer_grid(DEMO, 128) == 160 and finer_grid(Darcy(), 85) == 102
