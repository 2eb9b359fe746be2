"""What a training will cost, told before it is launched.

    cost of one update = a + b · points

Parameters, optimiser states and launches are the constant part; nearly everything else grows with the points of the
grid. So a few updates of the very same recipe on two smaller grids, on the device at hand, tell memory and time on the
whole one. Where that does not fit, changes are tried one on top of another, each measured in the same way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import gcd, inf, prod

import torch

from sigmasolver.forecast.checkpoint import refuse_beyond_limits, skeleton
from sigmasolver.models.layers import draws_noise
from sigmasolver.recipes import Recipe, changed
from sigmasolver.train.dry_run import Cost, cost_of, planned_windows
from sigmasolver.train.engine import Execution
from sigmasolver.train.job import lies_on, memory_of, refuse_too_large
from sigmasolver.train.loop import StepPlan

__all__ = ["MARGIN", "Prediction", "advise", "on_grid", "predict", "probe_grids"]

SHARES = ((1 / 4, 1 / 2), (1 / 16, 1 / 8), (1 / 64, 1 / 32))
"""Parts of the points that the two smaller grids have; the smaller pairs are for what does not fit by far."""
APART = 1.2
"""A line through two grids needs at least this ratio of their points."""
PATIENCE = 600.0
"""Seconds: an update on the smallest grid that takes longer is not measured."""
MARGIN = 0.05
"""Share of the memory that is left free: an allocator cannot use every gap."""

Move = Callable[[float, int | None], None]


@dataclass(frozen=True)
class Prediction:
    """Of a whole training by `recipe`."""

    recipe: Recipe
    parameters: int
    update: Cost
    """Of one update on the whole grid."""
    updates: int
    windows: int
    """Bytes of all training windows."""
    resident: bool
    """Whether they lie on the device during the training."""
    known: bool
    """Whether the length of the stored trajectories is known; else `updates` and `windows` may be more."""
    probed: tuple[tuple[int, ...], ...]
    """The grids that were measured."""

    @property
    def memory(self) -> float:
        """Bytes that the device must have."""
        return self.update.memory + (self.windows if self.resident else 0)

    @property
    def seconds(self) -> float:
        """Of the training, without its checks."""
        return self.updates * self.update.seconds

    def fits(self, memory: float) -> bool:
        return self.memory <= (1 - MARGIN) * memory


def on_grid(recipe: Recipe, grid: tuple[int, ...]) -> Recipe:
    """The recipe on another grid; one number holds for all axes."""
    axes = len(recipe.task.grid)
    if len(grid) not in (1, axes):
        raise ValueError(
            f"The grid has {len(grid)} axes, but {recipe.task.name} has {axes}; give one number, or one for each axis."
        )
    return replace(recipe, task=replace(recipe.task, grid=grid * axes if len(grid) == 1 else grid))


def predict(recipe: Recipe, execution: Execution, memory: float, move: Move | None = None) -> Prediction:
    """What the training costs on this device, where it may take `memory` bytes."""
    if not 0 < memory < inf:
        raise ValueError(f"The memory is {memory / 1e9:g} GB; it must be positive and finite.")
    _refuse_hopeless(recipe, execution)
    parameters = sum(one.numel() for one in skeleton(recipe).parameters())
    windows, known = planned_windows(recipe)
    updates = StepPlan(recipe, windows).steps
    probed = _probe(recipe, execution, move)
    update = _extrapolated(probed, prod(recipe.task.grid))
    resident = lies_on(windows, execution.world.device, int(memory))
    return Prediction(recipe, parameters, update, updates, windows.nbytes(), resident, known, tuple(probed))


def advise(
    prediction: Prediction, execution: Execution, memory: float, move: Move | None = None
) -> Iterator[tuple[tuple[str, ...], Prediction]]:
    """Settings that need less memory, with what they cost, up to the first that fit.

    Each change comes on top of those before it that saved memory. The last one yielded fits, if any does.
    """
    recipe, best = prediction.recipe, prediction
    kept: dict[str, str] = {}
    for name, value in _changes(recipe, execution):
        tried = {**kept, name: value}
        settings = tuple(f"{key}={text}" for key, text in tried.items())
        found = predict(changed(recipe, settings), execution, memory, move)
        yield settings, found
        if found.fits(memory):
            return
        if found.memory < best.memory:
            best, kept = found, tried


def probe_grids(recipe: Recipe, shares: tuple[float, float] = SHARES[0]) -> tuple[tuple[int, ...], ...]:
    """Grids with about these parts of the points, all axes scaled alike.

    An axis stays odd, or a multiple of the power of two that it is one of, up to a quarter of what is left, because
    kernels are as fast as their sizes are round; none becomes too short for the modes. Where that leaves no two grids
    that differ enough, the whole one.
    """
    config = recipe.model.config(recipe.task)
    least = [max(3, 2 * (modes - 1)) for modes in config.modes_per_axis]

    def shorter(points: int, low: int, scale: float) -> int:
        unit = max(2, gcd(points, 2 ** (max(1, int(points * scale) // 4).bit_length() - 1)))
        wanted = points - unit * round(points * (1 - scale) / unit)
        return min(points, wanted if wanted >= low else low + (points - low) % 2)

    small, large = (
        tuple(shorter(points, low, share ** (1 / config.axes)) for points, low in zip(config.grid, least, strict=True))
        for share in shares
    )
    return (small, large) if APART * prod(small) <= prod(large) < prod(config.grid) else (config.grid,)


def _refuse_hopeless(recipe: Recipe, execution: Execution) -> None:
    """Refuse what cannot even be measured here: by the least that an update on the smallest grid needs."""
    refuse_beyond_limits(recipe)
    grid = probe_grids(recipe, SHARES[-1])[0]
    refuse_too_large(on_grid(recipe, grid), execution)
    if execution.world.device.type == "cuda":
        return
    model = recipe.model
    # Every block mixes the channels of each point; forward and backward pass are three products with each matrix.
    work = 6 * 4 * model.width**2 * model.depth * prod(grid) * recipe.train.batch
    seconds = work / _speed()
    if seconds > PATIENCE:
        raise ValueError(
            f"An update on {' × '.join(map(str, grid))} points, a fraction of the grid, takes at least "
            f"{seconds / 60:,.0f} minutes here, too long to measure; lower model.width, model.depth or "
            "train.batch, or plan on the device that will train."
        )


def _speed() -> float:
    """Operations a second of a matrix product on this CPU."""
    matrix = torch.ones(512, 512)
    matrix @ matrix  # the first one wakes the library
    start = time.perf_counter()
    matrix @ matrix
    return 2 * 512**3 / (time.perf_counter() - start)


def _probe(recipe: Recipe, execution: Execution, move: Move | None) -> dict[tuple[int, ...], Cost]:
    """What an update costs on two smaller grids, as large ones as the device bears."""
    room = memory_of(execution.world.device)
    choices = [probe_grids(recipe, shares) for shares in SHARES]
    for grids in (choices[0], *(pair for pair in choices[1:] if len(pair) > 1)):
        measured: dict[tuple[int, ...], Cost] = {}
        try:
            for number, grid in enumerate(grids):
                if measured and measured[grids[0]].memory * prod(grid) / prod(grids[0]) > room:
                    break
                measured[grid] = cost_of(on_grid(recipe, grid), execution)
                if move is not None:
                    move(number + 1, len(grids))
        except torch.OutOfMemoryError:
            continue
        if len(measured) == len(grids):
            return measured
    raise ValueError(
        f"An update on {' × '.join(map(str, grids[-1]))} points, a fraction of the grid, does not fit "
        "on this device; lower "
        "train.batch or model.width, or use a device with more memory."
    )


def _extrapolated(probed: dict[tuple[int, ...], Cost], points: int) -> Cost:
    (near, last), *rest = sorted(
        ((prod(grid), cost) for grid, cost in probed.items()), reverse=True, key=lambda one: one[0]
    )
    if not rest:
        return last
    far, first = rest[0]

    def line(at_far: float, at_near: float) -> float:
        # Less work never takes longer, but a clock may say so.
        return at_near + max(0.0, (at_near - at_far) / (near - far)) * (points - near)

    return Cost(line(first.memory, last.memory), line(first.seconds, last.seconds))


def _changes(recipe: Recipe, execution: Execution) -> Iterator[tuple[str, str]]:
    """What can be set to need less memory, in the order of the harm it does."""
    train, model = recipe.train, recipe.model
    if train.precision != "bf16":
        yield "train.precision", "bf16"
    network = skeleton(recipe)
    drawn = execution.captured and (model.options.dropout > 0 or draws_noise(network))
    if not train.recompute and not drawn and len(getattr(network, "blocks", ())):
        yield "train.recompute", "true"
    batch, width, unit = train.batch, model.width, 2 * model.heads
    while batch > 1:
        batch //= 2
        yield "train.batch", str(batch)
    while (width := 3 * width // 4 // unit * unit) >= unit:
        yield "model.width", str(width)
