"""The solver as a baseline: on its own grid it is the solver itself, on a coarser one it has the order it should."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from sigmasolver.simulate.coarse import coarse_work, full_work
from sigmasolver.simulate.darcy import Darcy, interpolation
from sigmasolver.simulate.vorticity import DEMO


def test_on_its_own_grid_the_coarse_darcy_solver_is_the_solver():
    fine = Darcy(grid=61)
    work = coarse_work(fine, 3, [0, 1], torch.zeros(2, 1, 61, 61, 1), fine.layout.coordinates[0], 1, 1)
    truth = fine.simulate(3, [0, 1])[:, :, ..., 1]
    assert torch.allclose(work.call().float(), truth, rtol=1e-5, atol=0)
    assert torch.allclose(full_work(fine, 3, 1, 1, 1).call().float(), truth[1:], rtol=1e-5, atol=0)


def test_the_coarse_darcy_solver_is_of_second_order_where_the_coefficient_is_smooth():
    """Error c h², of the fine solution too: (1/15² - 1/60²) / (1/30² - 1/60²) = 5 between 16 and 31 points of 61."""
    fine = Darcy(grid=61, low=5.0, high=5.0)
    errors = []
    for grid in (16, 31):
        points = np.linspace(0.2, 0.8, grid)
        frames = coarse_work(fine, 3, [0], torch.zeros(1, 1, grid, grid, 1), points, 1, 1).call()[0, 0]
        to_points = interpolation(fine.layout.coordinates[0], points)
        truth = to_points @ fine.pressure(fine.coefficient(3, [0]))[0] @ to_points.T
        errors.append(float((frames - truth).norm() / truth.norm()))
    assert errors[0] / errors[1] == pytest.approx(5, rel=0.1)


def test_from_a_whole_frame_the_coarse_flow_solver_is_the_solver():
    simulator = replace(DEMO, grid=64, stored=64, frames=4, precision="float64")
    truth = simulator.simulate(5, [0, 1])
    work = coarse_work(simulator, 5, [0, 1], truth[:, :2], simulator.layout.coordinates[0], 1, 2)
    assert torch.allclose(work.call()[:, 0].float(), truth[:, 3, ..., 0], atol=1e-4)  # the given frame is float32
    part = full_work(simulator, 5, 0, 4, 1)
    assert part.share == 0.25 and part.call().shape[1] == 1
