"""What a model costs: storage, training memory and time, inference time.

Storage is the size of all parameter tensors, including frozen and complex ones, in decimal MB; buffers are reported
separately. Training is timed with the recipe's own update in eager float32 without TF32, on the run's training windows,
with a copy of the trained weights and a learning rate of zero. After 20 warm-up updates full epochs are timed between
two device synchronisations, including data loading but not validation, checkpoints and logging; three epochs give mean
and sample standard deviation. An epoch that would take longer than `MAX_SECONDS` is timed in part: `timed_updates` says
how many of the `updates_per_epoch` were run. Peak memory is the maximum held by tensors during an update (parameters,
gradients, optimiser states, activations), excluding the training windows: reported by the allocator on a GPU, counted
on a CPU as in `train.dry_run`.

The paper measures other workloads, in independent processes (app:efficiency-measurements): see `diagnose.workload`.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from statistics import mean, median, stdev

import torch
from torch import nn

from sigmasolver.data.windows import Windows
from sigmasolver.diagnose.subject import Findings, Subject
from sigmasolver.forecast import Forecaster
from sigmasolver.models.solver import Solver
from sigmasolver.recipes import Recipe
from sigmasolver.runtime.parallel import World
from sigmasolver.train.dry_run import LiveMemory
from sigmasolver.train.engine import Execution, Stepper
from sigmasolver.train.job import available_memory, fits_on_device
from sigmasolver.train.loop import StepPlan
from sigmasolver.train.objectives import LOSSES
from sigmasolver.train.optimisers import OPTIMISERS

__all__ = [
    "WARM_UP",
    "Updates",
    "add_epochs",
    "add_storage",
    "efficiency",
    "parameter_bytes",
    "parameter_count",
    "peak_bytes",
    "position_bytes",
    "time_rounds",
]

WARM_UP, ROUNDS = 20, 3
MAX_SECONDS = 20.0
"""Time limit of the warm-up and of each round."""
CALLS = 5
"""Timed calls of the forecaster."""


def efficiency(subject: Subject) -> Findings:
    """Rows: `parameters`, `parameter_megabytes`, `buffer_megabytes`, `position_megabytes` (models that take point
    coordinates), `inference_milliseconds` (one call for one window); if the trainer supports the model and its
    training windows are known, `seconds_per_epoch`, `updates_per_second`, `updates_per_epoch`, `timed_updates` and
    `peak_megabytes`."""
    model = subject.forecaster.model
    findings = Findings()
    add_storage(findings, model, subject.windows.grid)
    findings.add("inference_milliseconds", 1e3 * _seconds_per_call(subject))
    train = subject.recipe.train
    known = LOSSES.knows(train.loss) and OPTIMISERS.knows(train.optimiser)  # an update needs both
    if subject.training is not None and known and _is_trainable(model):
        _add_training(findings, subject, subject.training)
    return findings


def add_storage(findings: Findings, model: nn.Module, grid: tuple[int, ...]) -> None:
    """Add the storage of parameters, of buffers and of the positions on this grid."""
    findings.add("parameters", parameter_count(model))
    findings.add("parameter_megabytes", parameter_bytes(model) / 1e6)
    findings.add("buffer_megabytes", sum(buffer.nbytes for buffer in model.buffers()) / 1e6)
    position = position_bytes(model, grid)
    if position is not None:
        findings.add("position_megabytes", position / 1e6)


def add_epochs(findings: Findings, updates: Sequence[float], per_epoch: int, timed: int) -> None:
    """Add mean and sample deviation of the epoch time, from the seconds per update of repeated timings."""
    epochs = [seconds * per_epoch for seconds in updates]
    findings.add("seconds_per_epoch", mean(epochs), stdev(epochs) if len(epochs) > 1 else None)
    findings.add("updates_per_second", 1 / mean(updates))
    findings.add("updates_per_epoch", per_epoch)
    findings.add("timed_updates", timed)


def _is_trainable(model: nn.Module) -> bool:
    """Whether the trainer supports the model: it has trainable parameters, and none of them is complex."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    return bool(trainable) and not any(p.is_complex() for p in trainable)


def parameter_count(model: nn.Module) -> int:
    """Number of real parameters; a complex one counts twice."""
    return sum(p.numel() * (2 if p.is_complex() else 1) for p in model.parameters())


def parameter_bytes(model: nn.Module) -> int:
    """Bytes of all parameter tensors, including frozen ones."""
    return sum(p.numel() * p.element_size() for p in model.parameters())


def position_bytes(model: nn.Module, grid: tuple[int, ...]) -> int | None:
    """Bytes of the positions that a `Solver` takes on this grid; None for other models."""
    if not isinstance(model, Solver):
        return None
    return prod(grid) * model.config.position_channels * model.offset.element_size()


def _seconds_per_call(subject: Subject) -> float:
    """Median time of one call of the forecaster for one window."""
    indices, history, _ = next(replace(subject, indices=subject.indices[:1], tick=None).batches())
    time_of_last_frame = subject.times(indices)[:, 0]
    seconds = []
    with torch.no_grad():
        for _ in range(2 + CALLS):
            seconds.append(_time(lambda: subject.forecaster(history, time=time_of_last_frame), 1, subject.device))
    return median(seconds[2:])


def _add_training(findings: Findings, subject: Subject, training: Windows) -> None:
    device = subject.device
    windows = training.resident(device) if fits_on_device(training, device, available_memory(device)) else training
    recipe = replace(subject.recipe, train=replace(subject.recipe.train, precision="float32"))
    # A copy at a learning rate of zero: same cost, unchanged weights. It starts on the CPU so that its memory counts.
    forecaster = subject.forecaster.around(copy.deepcopy(subject.forecaster.model).float().cpu())
    updates = Updates(recipe, forecaster, windows, device, 0.0, ROUNDS)
    findings.add("peak_megabytes", peak_bytes(updates, windows) / 1e6)
    first = _time(updates.step, 1, device)
    for _ in range(min(WARM_UP, int(MAX_SECONDS / first))):
        updates.step()
    count, rounds = time_rounds(updates.step, updates.per_epoch, device, subject.tick)
    add_epochs(findings, rounds, updates.per_epoch, count)


class Updates:
    """Consecutive training updates of a recipe at a constant learning rate, enough to time `epochs` epochs."""

    def __init__(
        self, recipe: Recipe, forecaster: Forecaster, windows: Windows, device: torch.device, rate: float, epochs: int
    ) -> None:
        self.before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        plan = StepPlan(recipe, windows)
        self.per_epoch = plan.per_epoch
        steps = 2 + 1 + WARM_UP + 1 + epochs * self.per_epoch  # memory, first, warm-up, first, rounds
        forecaster = forecaster.to(device)
        forecaster.model.train()
        execution = Execution(World(device=device))
        self.stepper = Stepper(recipe, forecaster, windows, plan.members, torch.full((steps,), rate), execution)
        self.done = 0

    def step(self) -> None:
        self.stepper.run(self.done)
        self.done += 1


def peak_bytes(updates: Updates, windows: Windows) -> float:
    """Peak memory of tensors in an update, excluding training windows that reside on the device."""
    device = updates.stepper.device
    if device.type == "cuda":
        updates.step()
        torch.cuda.reset_peak_memory_stats(device)
        updates.step()
        return torch.cuda.max_memory_allocated(device) - updates.before
    with LiveMemory(windows.values_on_device) as alive:
        for _ in range(2):  # only the second starts with gradients and optimiser states
            updates.step()
    return alive.peak


def time_rounds(
    update: Callable[[], None],
    per_epoch: int,
    device: torch.device,
    tick: Callable[[int, int], None] | None = None,
    rounds: int = ROUNDS,
    limit: float | None = MAX_SECONDS,
) -> tuple[int, list[float]]:
    """Updates per round and the seconds per update of each round; a round is a full epoch if it fits in `limit`."""
    count = per_epoch
    if limit is not None:
        count = max(1, min(per_epoch, int(limit / _time(update, 1, device))))
    seconds = []
    for number in range(rounds):
        seconds.append(_time(update, count, device) / count)
        if tick is not None:
            tick(number + 1, rounds)
    return count, seconds


def _time(work: Callable[[], object], count: int, device: torch.device) -> float:
    def synchronise() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    synchronise()
    start = time.perf_counter()
    for _ in range(count):
        work()
    synchronise()
    return time.perf_counter() - start
