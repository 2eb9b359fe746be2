"""Predict the time and memory of a training before it starts.

    cost of one update = a + b · points

Parameters, optimiser states and kernel launches are the constant part; nearly everything else is proportional to the
number of grid points. So a few updates of the same recipe on two smaller grids, on the same device, give memory and
time on the full grid. If that does not fit, changes are tried cumulatively, each measured in the same way.
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
from sigmasolver.symmetries import symmetries_of
from sigmasolver.train.dry_run import Cost, estimate_cost, planned_windows
from sigmasolver.train.engine import Execution, blocks_of
from sigmasolver.train.job import available_memory, fits_on_device, refuse_too_large, refuse_without_effect
from sigmasolver.train.loop import StepPlan

__all__ = ["MARGIN", "Prediction", "advise", "on_grid", "predict", "probe_grids"]

SHARES = ((1 / 4, 1 / 2), (1 / 16, 1 / 8), (1 / 64, 1 / 32))
"""Fractions of the points on the two probe grids; later pairs are for recipes that exceed the memory by far."""
MIN_RATIO = 1.2
"""Minimum ratio between the points of the two grids, for a well-conditioned extrapolation."""
PATIENCE = 600.0
"""Maximum seconds of an update on the smallest grid; a slower one is not measured."""
MARGIN = 0.05
"""Fraction of the memory left free, for fragmentation in the allocator."""

Move = Callable[[float, int | None], None]


@dataclass(frozen=True)
class Prediction:
    """Predicted cost of a full training by `recipe`."""

    recipe: Recipe
    parameters: int
    update: Cost
    """Cost of one update on the full grid."""
    updates: int
    windows: int
    """Bytes of all training windows."""
    resident: bool
    """Whether they are kept on the device during the training."""
    known: bool
    """Whether the length of the stored trajectories is known; otherwise `updates` and `windows` are lower bounds."""
    probed: tuple[tuple[int, ...], ...]
    """The grids that were measured."""

    @property
    def memory(self) -> float:
        """Bytes required on the device."""
        return self.update.memory + (self.windows if self.resident else 0)

    @property
    def seconds(self) -> float:
        """Duration of the training, without validation."""
        return self.updates * self.update.seconds

    def fits(self, memory: float) -> bool:
        return self.memory <= (1 - MARGIN) * memory


def on_grid(recipe: Recipe, grid: tuple[int, ...]) -> Recipe:
    """Return the recipe on another grid; a single number is used for all axes."""
    axes = len(recipe.task.grid)
    if len(grid) not in (1, axes):
        raise ValueError(
            f"The grid has {len(grid)} axes, but {recipe.task.name} has {axes}; give one number, or one for each axis."
        )
    return replace(recipe, task=replace(recipe.task, grid=grid * axes if len(grid) == 1 else grid))


def predict(recipe: Recipe, execution: Execution, memory: float, move: Move | None = None) -> Prediction:
    """Predict the cost of the training on this device, with `memory` bytes available."""
    if not 0 < memory < inf:
        raise ValueError(f"The memory is {memory / 1e9:g} GB; it must be positive and finite.")
    if recipe.train.augment:
        symmetries_of(recipe.task).on(recipe.task.grid)
    _refuse_unmeasurable(recipe, execution)
    parameters = sum(parameter.numel() for parameter in skeleton(recipe).parameters())
    windows, known = planned_windows(recipe)
    updates = StepPlan(recipe, windows).steps
    probed = _probe(recipe, execution, move)
    update = _extrapolate(probed, prod(recipe.task.grid))
    resident = fits_on_device(windows, execution.world.device, int(memory))
    return Prediction(recipe, parameters, update, updates, windows.nbytes(), resident, known, tuple(probed))


def advise(
    prediction: Prediction, execution: Execution, memory: float, move: Move | None = None
) -> Iterator[tuple[tuple[str, ...], Prediction]]:
    """Yield settings that need less memory, with their cost, until one fits.

    Each change is added to the earlier ones that saved memory. The last one yielded fits, if any does.
    """
    recipe, best = prediction.recipe, prediction
    accepted: dict[str, str] = {}
    for name, value in _changes(recipe, execution):
        tried = {**accepted, name: value}
        settings = tuple(f"{key}={text}" for key, text in tried.items())
        candidate = predict(changed(recipe, settings), execution, memory, move)
        yield settings, candidate
        if candidate.fits(memory):
            return
        if candidate.memory < best.memory:
            best, accepted = candidate, tried


def probe_grids(recipe: Recipe, shares: tuple[float, float] = SHARES[0]) -> tuple[tuple[int, ...], ...]:
    """Return two grids with about these fractions of the points, all axes scaled alike.

    An axis keeps its parity and its factor of two (up to a quarter of its new length), because kernels are faster at
    round sizes; no axis becomes too short for the modes. If the two grids would differ too little, only the full grid
    is returned.
    """
    config = recipe.model.config(recipe.task)
    shortest = [max(3, 2 * (modes - 1)) for modes in config.modes_per_axis]

    def shorter(points: int, minimum: int, scale: float) -> int:
        unit = max(2, gcd(points, 2 ** (max(1, int(points * scale) // 4).bit_length() - 1)))
        length = points - unit * round(points * (1 - scale) / unit)
        return min(points, length if length >= minimum else minimum + (points - minimum) % 2)

    small, large = (
        tuple(
            shorter(points, minimum, share ** (1 / config.axes))
            for points, minimum in zip(config.grid, shortest, strict=True)
        )
        for share in shares
    )
    return (small, large) if MIN_RATIO * prod(small) <= prod(large) < prod(config.grid) else (config.grid,)


def _refuse_unmeasurable(recipe: Recipe, execution: Execution) -> None:
    """Raise ValueError if not even the smallest grid can be measured here, by a lower bound on its cost."""
    refuse_without_effect(recipe)
    refuse_beyond_limits(recipe)
    grid = probe_grids(recipe, SHARES[-1])[0]
    refuse_too_large(on_grid(recipe, grid), execution)
    if execution.world.device.type == "cuda":
        return
    model = recipe.model
    # Every block mixes the channels of each point; forward and backward pass take three products with each matrix.
    work = 6 * 4 * model.width**2 * model.depth * prod(grid) * recipe.train.batch
    seconds = work / _flops_per_second()
    if seconds > PATIENCE:
        raise ValueError(
            f"An update on {' × '.join(map(str, grid))} points, a fraction of the grid, takes at least "
            f"{seconds / 60:,.0f} minutes here, too long to measure; lower model.width, model.depth or "
            "train.batch, or plan on the device that will train."
        )


def _flops_per_second() -> float:
    """FLOP/s of a matrix product on this CPU."""
    matrix = torch.ones(512, 512)
    matrix @ matrix  # warm up the library
    start = time.perf_counter()
    matrix @ matrix
    return 2 * 512**3 / (time.perf_counter() - start)


def _probe(recipe: Recipe, execution: Execution, move: Move | None) -> dict[tuple[int, ...], Cost]:
    """Measure an update on two smaller grids, the largest pair that fits on the device."""
    memory = available_memory(execution.world.device)
    # Augmentation costs next to nothing, but its symmetries may not fit the smaller grids.
    recipe = replace(recipe, train=replace(recipe.train, augment=False))
    pairs = [probe_grids(recipe, shares) for shares in SHARES]
    for grids in (pairs[0], *(pair for pair in pairs[1:] if len(pair) > 1)):
        measured: dict[tuple[int, ...], Cost] = {}
        try:
            for index, grid in enumerate(grids):
                if measured and measured[grids[0]].memory * prod(grid) / prod(grids[0]) > memory:
                    break
                measured[grid] = estimate_cost(on_grid(recipe, grid), execution)
                if move is not None:
                    move(index + 1, len(grids))
        except torch.OutOfMemoryError:
            continue
        if len(measured) == len(grids):
            return measured
    raise ValueError(
        f"An update on {' × '.join(map(str, grids[-1]))} points, a fraction of the grid, does not fit "
        "on this device; lower "
        "train.batch or model.width, or use a device with more memory."
    )


def _extrapolate(probed: dict[tuple[int, ...], Cost], points: int) -> Cost:
    (large, large_cost), *smaller = sorted(
        ((prod(grid), cost) for grid, cost in probed.items()), reverse=True, key=lambda item: item[0]
    )
    if not smaller:
        return large_cost
    small, small_cost = smaller[0]

    def line(at_small: float, at_large: float) -> float:
        # Timings are noisy: the slope must not become negative.
        return at_large + max(0.0, (at_large - at_small) / (large - small)) * (points - large)

    return Cost(line(small_cost.memory, large_cost.memory), line(small_cost.seconds, large_cost.seconds))


def _changes(recipe: Recipe, execution: Execution) -> Iterator[tuple[str, str]]:
    """Yield settings that reduce memory, the least harmful first."""
    train, model = recipe.train, recipe.model
    if train.precision != "bf16":
        yield "train.precision", "bf16"
    network = skeleton(recipe)
    draws = execution.captured and (model.options.dropout > 0 or draws_noise(network))
    if not train.recompute and not draws and blocks_of(network):
        yield "train.recompute", "true"
    batch, width, unit = train.batch, model.width, 2 * model.heads
    while batch > 1:
        batch //= 2
        yield "train.batch", str(batch)
    while (width := 3 * width // 4 // unit * unit) >= unit:
        yield "model.width", str(width)
