"""A trajectory depends only on simulator, parameters, seed and index: bitwise on a CPU, up to round-off on a GPU."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from sigmasolver.simulate import Darcy, Simulator, Smoke, Turbulence
from sigmasolver.simulate.vorticity import KF2D, NS2D

SMALL: dict[str, Simulator] = {
    "darcy": Darcy(grid=65),
    "ns2d": replace(NS2D, grid=64, stored=32, frames=2, interval=100 * NS2D.step),
    "kf2d": replace(KF2D, grid=64, stored=32, frames=2, burn_in=0.0, interval=100 * KF2D.step),
    "it3d": Turbulence(grid=12, viscosity=0.02, reynolds=10.0, frames=2, steps_per_frame=4),
    "smoke3d": Smoke(grid=20, frames=2, warmup=2),
}
GPU_TOLERANCE = {"darcy": 1e-6, "ns2d": 1e-5, "kf2d": 1e-5, "it3d": 1e-5, "smoke3d": 1e-4}
"""Relative tolerance between devices after these few steps, in float32 (Darcy solves in float64)."""


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("task", SMALL)
def test_simulate_is_bitwise_independent_of_batch_order_and_threads(task: str, threads: int) -> None:
    simulator = SMALL[task]
    reference = torch.cat([simulator.simulate(7, [index]) for index in range(5)])
    assert reference.dtype == torch.float32
    assert reference.shape[1:] == (
        len(simulator.layout.times),
        *(len(axis) for axis in simulator.layout.coordinates),
        len(simulator.layout.fields),
    )
    torch.set_num_threads(3 - threads)
    assert torch.equal(simulator.simulate(7, range(5)), reference)
    order = [4, 1, 3]
    assert torch.equal(simulator.simulate(7, order), reference[order])


@pytest.mark.parametrize("task", SMALL)
def test_seed_and_index_change_the_trajectory(task: str) -> None:
    simulator = SMALL[task]
    first, other_index, other_seed = (simulator.simulate(*arguments) for arguments in ((7, [0]), (7, [1]), (8, [0])))
    for other in (other_index, other_seed):
        assert (first - other).norm() > 0.1 * first.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("task", SMALL)
def test_simulate_gpu_parity(task: str) -> None:
    simulator = SMALL[task]
    on_cpu, on_gpu = simulator.simulate(3, range(3)), simulator.simulate(3, range(3), "cuda").cpu()
    assert (on_gpu - on_cpu).norm() < GPU_TOLERANCE[task] * on_cpu.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("task", ["ns2d", "kf2d"])
def test_simulate_gpu_parity_float64(task: str) -> None:
    flow = replace(SMALL[task], precision="float64")
    on_cpu, on_gpu = (flow.evolve(flow.initial(0, [0], device)).cpu() for device in ("cpu", "cuda"))
    assert (on_gpu - on_cpu).norm() < 1e-12 * on_cpu.norm()


@pytest.mark.parametrize("index", [1.0, slice(0, 2), "1"])
def test_trajectory_index_must_be_an_integer(index: object) -> None:
    with pytest.raises(TypeError):
        SMALL["darcy"].simulate(0, [index])  # type: ignore[list-item]


def test_simulator_accepts_numpy_numbers_and_lists() -> None:
    flow = replace(NS2D, grid=np.int64(64), forcing_wave=[1, 2], viscosity=np.float32(0.5))
    assert flow == replace(NS2D, grid=64, forcing_wave=(1, 2), viscosity=0.5)
    assert type(flow.grid) is int and type(flow.viscosity) is float
