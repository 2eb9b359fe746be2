"""What a model costs: storage, memory and time of its training, time of a forecast.

Storage is that of the parameter tensors, frozen and complex ones counted, in decimal MB; buffers are told apart. The
training is the recipe's own update in float32 without TF32, eager, on the run's training windows, with a copy of the
trained weights and a learning rate of zero. After 20 updates of warm-up whole epochs are timed between two
synchronisations, data loading included, validation, saving and logging not; three of them give mean and sample
deviation. An epoch that would take longer than `LIMIT` seconds is timed in part: `timed_updates` tells how many of
`updates_per_epoch` were made. Peak memory is the most that tensors held in an update (parameters, gradients, optimiser
states, activations) without the training windows: told by the allocator on a GPU, counted on a CPU as
`train.rehearsal` does.

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
from sigmasolver.train.dry_run import Alive
from sigmasolver.train.engine import Execution, Stepper
from sigmasolver.train.job import lies_on, memory_of
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
    "parameters_of",
    "peak_bytes",
    "position_bytes",
    "rounds_of",
]

WARM_UP, ROUNDS = 20, 3
LIMIT = 20.0
"""Seconds after which a warm-up or a round ends."""
CALLS = 5
"""Forecasts of one block that are timed."""


def efficiency(subject: Subject) -> Findings:
    """Rows: `parameters`, `parameter_megabytes`, `buffer_megabytes`, `position_megabytes` (models that are told where a
    point lies), `inference_milliseconds` (one call for one window); where the trainer can train the model and its
    training windows are known, `seconds_per_epoch`, `updates_per_second`, `updates_per_epoch`, `timed_updates` and
    `peak_megabytes`."""
    model = subject.forecaster.model
    findings = Findings()
    add_storage(findings, model, subject.windows.grid)
    findings.add("inference_milliseconds", 1e3 * _seconds_per_call(subject))
    train = subject.recipe.train
    known = LOSSES.knows(train.loss) and OPTIMISERS.knows(train.optimiser)  # an update needs both
    if subject.training is not None and known and _trains(model):
        _add_training(findings, subject, subject.training)
    return findings


def add_storage(findings: Findings, model: nn.Module, grid: tuple[int, ...]) -> None:
    """What the model stores: parameters, buffers, and the positions that it reads on this grid."""
    findings.add("parameters", parameters_of(model))
    findings.add("parameter_megabytes", parameter_bytes(model) / 1e6)
    findings.add("buffer_megabytes", sum(one.nbytes for one in model.buffers()) / 1e6)
    position = position_bytes(model, grid)
    if position is not None:
        findings.add("position_megabytes", position / 1e6)


def add_epochs(findings: Findings, updates: Sequence[float], per_epoch: int, timed: int) -> None:
    """Mean and sample deviation of an epoch, from the seconds of one update in repeated timings."""
    epochs = [one * per_epoch for one in updates]
    findings.add("seconds_per_epoch", mean(epochs), stdev(epochs) if len(epochs) > 1 else None)
    findings.add("updates_per_second", 1 / mean(updates))
    findings.add("updates_per_epoch", per_epoch)
    findings.add("timed_updates", timed)


def _trains(model: nn.Module) -> bool:
    """Whether the trainer of this package can: something learns, and nothing that learns is complex."""
    learning = [one for one in model.parameters() if one.requires_grad]
    return bool(learning) and not any(one.is_complex() for one in learning)


def parameters_of(model: nn.Module) -> int:
    """Real numbers in the parameters; a complex one has two."""
    return sum(one.numel() * (2 if one.is_complex() else 1) for one in model.parameters())


def parameter_bytes(model: nn.Module) -> int:
    """Bytes of all parameter tensors, also of those that do not learn."""
    return sum(one.numel() * one.element_size() for one in model.parameters())


def position_bytes(model: nn.Module, grid: tuple[int, ...]) -> int | None:
    """Bytes of the positions that a solver reads on this grid; None for other models."""
    if not isinstance(model, Solver):
        return None
    return prod(grid) * model.config.position_channels * model.offset.element_size()


def _seconds_per_call(subject: Subject) -> float:
    """Median time of one call of the forecaster for one window."""
    indices, history, _ = next(replace(subject, indices=subject.indices[:1], tick=None).batches())
    time_given = subject.times(indices)[:, 0]
    taken = []
    with torch.no_grad():
        for _ in range(2 + CALLS):
            taken.append(_seconds(lambda: subject.forecaster(history, time=time_given), 1, subject.device))
    return median(taken[2:])


def _add_training(findings: Findings, subject: Subject, training: Windows) -> None:
    device = subject.device
    windows = training.resident(device) if lies_on(training, device, memory_of(device)) else training
    recipe = replace(subject.recipe, train=replace(subject.recipe.train, precision="float32"))
    # A copy, and a rate of zero: it costs the same and keeps the weights. On the CPU, so that its memory is counted.
    forecaster = subject.forecaster.around(copy.deepcopy(subject.forecaster.model).float().cpu())
    updates = Updates(recipe, forecaster, windows, device, 0.0, ROUNDS)
    findings.add("peak_megabytes", peak_bytes(updates, windows) / 1e6)
    first = _seconds(updates.make, 1, device)
    for _ in range(min(WARM_UP, int(LIMIT / first))):
        updates.make()
    count, rounds = rounds_of(updates.make, updates.per_epoch, device, subject.tick)
    add_epochs(findings, rounds, updates.per_epoch, count)


class Updates:
    """One update of a recipe after another, at a constant learning rate: enough of them to time so many epochs."""

    def __init__(
        self, recipe: Recipe, forecaster: Forecaster, windows: Windows, device: torch.device, rate: float, epochs: int
    ) -> None:
        self.before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        plan = StepPlan(recipe, windows)
        self.per_epoch = plan.per_epoch
        most = 2 + 1 + WARM_UP + 1 + epochs * self.per_epoch  # memory, first, warm-up, first, rounds
        forecaster = forecaster.to(device)
        forecaster.model.train()
        execution = Execution(World(device=device))
        self.stepper = Stepper(recipe, forecaster, windows, plan.members, torch.full((most,), rate), execution)
        self.done = 0

    def make(self) -> None:
        self.stepper.run(self.done)
        self.done += 1


def peak_bytes(updates: Updates, windows: Windows) -> float:
    """The most that tensors hold at one time in an update, without training windows that lie on the device."""
    device = updates.stepper.device
    if device.type == "cuda":
        updates.make()
        torch.cuda.reset_peak_memory_stats(device)
        updates.make()
        return torch.cuda.max_memory_allocated(device) - updates.before
    with Alive(windows.values_on_device) as alive:
        for _ in range(2):  # only the second begins with gradients and optimiser states
            updates.make()
    return alive.peak


def rounds_of(
    update: Callable[[], None],
    per_epoch: int,
    device: torch.device,
    tick: Callable[[int, int], None] | None = None,
    rounds: int = ROUNDS,
    limit: float | None = LIMIT,
) -> tuple[int, list[float]]:
    """How many updates a round has, and the seconds of one update in each round: whole epochs where they fit."""
    count = per_epoch
    if limit is not None:
        count = max(1, min(per_epoch, int(limit / _seconds(update, 1, device))))
    taken = []
    for number in range(rounds):
        taken.append(_seconds(update, count, device) / count)
        if tick is not None:
            tick(number + 1, rounds)
    return count, taken


def _seconds(work: Callable[[], object], count: int, device: torch.device) -> float:
    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    wait()
    start = time.perf_counter()
    for _ in range(count):
        work()
    wait()
    return time.perf_counter() - start
