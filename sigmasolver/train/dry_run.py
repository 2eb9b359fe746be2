"""Training without data: updates of a recipe on random windows, and the time and memory of one of them.

Memory is the peak of an update: parameters, gradients, optimiser states and the activations kept for the backward pass,
without the training windows. On a GPU the caching allocator reports it; on a CPU live tensors are counted operation by
operation, which leaves out temporary buffers inside an operation.
"""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sigmasolver.data.header import Header
from sigmasolver.data.layout import Layout
from sigmasolver.data.normalise import Normaliser
from sigmasolver.data.windows import Windows
from sigmasolver.forecast import Forecaster
from sigmasolver.forecast.checkpoint import build
from sigmasolver.recipes import Recipe
from sigmasolver.simulate import SIMULATORS
from sigmasolver.tasks import Task
from sigmasolver.train.capture import WARM_UP
from sigmasolver.train.engine import Execution, Stepper
from sigmasolver.train.loop import StepPlan

__all__ = [
    "Cost",
    "DryRun",
    "Noise",
    "estimate_cost",
    "forecaster_of",
    "frames_of",
    "planned_windows",
    "updates_of",
    "windows_of",
    "with_random_data",
]

UPDATES = 10_000
"""Length of the simulated training, so long that the learning rate stays low in the few updates that are run."""
TIMING_SECONDS = 1.0
"""Seconds for which updates are timed; a slower update is timed once."""


class Noise:
    """Random trajectories of a task, drawn on access, so that nothing has to be simulated or stored."""

    def __init__(self, task: Task, count: int, frames: int) -> None:
        fields = tuple(dict.fromkeys((*task.inputs, *task.targets)))
        axes = tuple(np.arange(float(points)) for points in task.grid)
        layout = Layout(fields, ("1",) * len(fields), ("open",) * len(axes), axes, np.arange(float(frames)))
        self.header = Header(layout, "noise", {})
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(self.header.shape, generator=torch.Generator().manual_seed(index))


def with_random_data(recipe: Recipe) -> Recipe:
    """The recipe for random trajectories of the right size: no strides, no limits on starts, most expensive step."""
    task = replace(recipe.task, space_stride=1, time_stride=1, starts=None, normaliser="none")
    train = replace(
        recipe.train, updates=UPDATES, one_start=False, shared_start=False, starts=None, push_after=0, push_every=1
    )
    return replace(recipe, task=task, train=train)


def frames_of(recipe: Recipe) -> tuple[int, bool]:
    """Return the frames of a trajectory after the time stride, and whether that number is known.

    It is that of the task's simulator; without one, the fewest with which training and evaluation work.
    """
    specs = (recipe.training_window_spec(), recipe.evaluation_window_spec())
    minimum = max(spec.span + ((spec.windows_per_trajectory or 1) - 1) * spec.stride for spec in specs)
    simulator = SIMULATORS.get(recipe.task.name)
    stored = 0 if simulator is None else -(-len(simulator.layout.times) // recipe.task.time_stride)
    return max(stored, minimum), stored >= minimum


def planned_windows(recipe: Recipe) -> tuple[Windows, bool]:
    """Return all training windows (values are drawn only on access), and whether their number is known."""
    frames, known = frames_of(recipe)
    task = replace(recipe.task, space_stride=1, time_stride=1)
    unstrided = replace(recipe, task=task)
    source = Noise(task, len(unstrided.split(task.train + task.validation + task.test).train), frames)
    return Windows(source, range(len(source)), unstrided.training_window_spec()), known


def updates_of(recipe: Recipe) -> int:
    """Number of optimiser updates of a recipe, on trajectories with as many frames as `frames_of` returns."""
    return StepPlan(recipe, planned_windows(recipe)[0]).steps


def windows_of(recipe: Recipe, device: torch.device) -> Windows:
    """One batch of random windows on the device, for a recipe from `with_random_data`."""
    spec = recipe.training_window_spec()
    source = Noise(recipe.task, recipe.train.batch, spec.span)
    return Windows(source, range(len(source)), spec).resident(device)


def forecaster_of(recipe: Recipe, device: torch.device) -> Forecaster:
    """Untrained, with identity normalisers."""
    return build(recipe, _identity_normaliser(recipe.task.inputs), _identity_normaliser(recipe.task.targets)).to(device)


def _identity_normaliser(fields: tuple[str, ...]) -> Normaliser:
    q = len(fields)
    return Normaliser("none", fields, torch.zeros(q, dtype=torch.float64), torch.ones(q, dtype=torch.float64))


class DryRun:
    """Run one update of this recipe on random windows per call."""

    def __init__(self, recipe: Recipe, execution: Execution) -> None:
        recipe, device = with_random_data(recipe), execution.world.device
        self.windows, forecaster = windows_of(recipe, device), forecaster_of(recipe, device)
        plan = StepPlan(recipe, self.windows)
        self.stepper = Stepper(recipe, forecaster, self.windows, plan.members, plan.rates(), execution)
        self.done = 0

    def __call__(self) -> None:
        self.stepper.run(self.done)
        self.done += 1

    @property
    def loss(self) -> torch.Tensor:
        """Loss of the last update, left on the device."""
        return self.stepper.loss


@dataclass(frozen=True)
class Cost:
    """Cost of one update."""

    memory: float
    """Bytes."""
    seconds: float


def estimate_cost(recipe: Recipe, execution: Execution) -> Cost:
    """Run a few updates of this recipe on this device and measure them."""
    return _gpu_cost(recipe, execution) if execution.world.device.type == "cuda" else _cpu_cost(recipe, execution)


def _gpu_cost(recipe: Recipe, execution: Execution) -> Cost:
    device = execution.world.device
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device)
    update = DryRun(recipe, execution)
    for _ in range(WARM_UP):
        update()
    # Reset only after warm-up, because autotuning in the first updates allocates extra memory.
    torch.cuda.reset_peak_memory_stats(device)
    for _ in range(2):  # with a graph engine the first of them is the capture
        update()
    seconds = _seconds_per_update(update, lambda: torch.cuda.synchronize(device))
    return Cost(torch.cuda.max_memory_allocated(device) - before - update.windows.values_on_device.nbytes, seconds)


def _cpu_cost(recipe: Recipe, execution: Execution) -> Cost:
    # A dispatch mode does not see inside a compiled network, whose peak is at most that of the eager one.
    update = DryRun(recipe, replace(execution, engine="eager"))
    with LiveMemory(update.windows.values_on_device) as alive:
        for _ in range(2):  # only the second starts with gradients and optimiser states
            update()
    if execution.compiled:
        update = DryRun(recipe, execution)
        update()
    return Cost(alive.peak, _seconds_per_update(update, lambda: None))


def _seconds_per_update(update: Callable[[], None], wait: Callable[[], None]) -> float:
    def seconds(count: int) -> float:
        wait()
        start = time.perf_counter()
        for _ in range(count):
            update()
        wait()
        return (time.perf_counter() - start) / count

    first = seconds(1)
    return first if first > TIMING_SECONDS else seconds(max(2, min(20, int(TIMING_SECONDS / first))))


class LiveMemory(TorchDispatchMode):
    """Count the bytes of all live inputs and outputs of operations, each storage once; `apart` is not counted."""

    def __init__(self, apart: torch.Tensor) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._excluded = apart.untyped_storage()
        self._counted = {self._excluded._cdata}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._track((args, kwargs))
        result = func(*args, **(kwargs or {}))
        self._track(result)
        return result

    def _track(self, tree: Any) -> None:
        for leaf in tree_leaves(tree):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in self._counted:
                    self._counted.add(storage._cdata)
                    self.now += storage.nbytes()
                    weakref.finalize(storage, self._release, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.now)

    def _release(self, key: int, size: int) -> None:
        self._counted.discard(key)
        self.now -= size
