"""The tasks match tab:forecast-protocols and the layouts of their simulators."""

from dataclasses import replace

import pytest

from sigmasolver.simulate import simulator_of
from sigmasolver.tasks import CANONICAL, TASKS

PROTOCOLS = {  # train, test, history, block, horizon as the paper prints them; Darcy's are one frame
    "darcy": (1000, 200, 1, 1, 1),
    "ns2d": (1000, 200, 10, 1, 10),
    "kf2d": (100, 20, 10, 4, 16),
    "it3d": (1000, 100, 10, 2, 10),
    "smoke3d": (2000, 200, 4, 4, 16),
}


@pytest.mark.parametrize("name", PROTOCOLS)
def test_tasks_match_the_paper(name):
    task = TASKS[name]
    assert (task.train, task.test, task.history, task.block, task.horizon) == PROTOCOLS[name]


@pytest.mark.parametrize("name", [task.name for task in CANONICAL])
def test_tasks_fit_the_simulated_data(name):
    task, layout = TASKS[name], simulator_of(name).layout
    assert set(task.inputs) | set(task.targets) <= set(layout.fields)
    assert tuple(-(-len(axis) // task.space_stride) for axis in layout.coordinates) == task.grid
    frames = -(-len(layout.times) // task.time_stride)
    needed = 1 if task.steady else task.history + task.horizon
    assert frames >= needed
    assert task.starts is None or task.starts <= frames - needed + 1


def test_task_channels():
    assert (TASKS["ns2d"].in_channels, TASKS["ns2d"].out_channels) == (10, 1)
    assert (TASKS["kf2d"].in_channels, TASKS["kf2d"].out_channels) == (10, 4)
    assert (TASKS["smoke3d"].in_channels, TASKS["smoke3d"].out_channels) == (16, 16)


def test_task_errors():
    with pytest.raises(ValueError, match="block of ns2d is 0"):
        replace(TASKS["ns2d"], block=0)
    with pytest.raises(ValueError, match="must not exceed the horizon of 10"):
        replace(TASKS["ns2d"], block=11)
    with pytest.raises(ValueError, match="inputs must begin with its targets"):
        replace(TASKS["ns2d"], targets=("pressure",))
