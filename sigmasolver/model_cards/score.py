"""A pretrained model measured on windows that it has not seen, and the solver beside it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from sigmasolver.data.reader import Reader
from sigmasolver.data.windows import Windows
from sigmasolver.evaluate import Request, measure, metrics, rows_of
from sigmasolver.forecast import Forecaster
from sigmasolver.ops.precision import matmul_precision
from sigmasolver.recipes import Recipe
from sigmasolver.report.published import Column, tables
from sigmasolver.runtime.parallel import World
from sigmasolver.simulate import simulator_of
from sigmasolver.simulate.coarse import coarse_work, finer_grid, full_work

__all__ = [
    "SolverRow",
    "card_columns",
    "compare_with_solver",
    "picked",
    "score",
    "seconds_of_model",
    "shipped_windows",
    "time_solver",
    "unseen_windows",
]

REPEATS = 3
"""Timed calls, after one that warms up; the median counts."""


@dataclass(frozen=True)
class SolverRow:
    """The solver on one grid: seconds for one case, and its errors in the order of the card (None: it is the truth)."""

    grid: tuple[int, ...]
    seconds: float
    errors: list[float] | None = None


def shipped_windows(store: Reader, recipe: Recipe) -> Windows:
    """The windows of a folder's store, one of each trajectory; thinned already."""
    spec = replace(recipe.evaluation_windows(), starts=1, time_stride=1, space_stride=1)
    return Windows(store, range(len(store)), spec)


def unseen_windows(store: Reader, recipe: Recipe) -> Windows:
    """The first window of every trajectory of a simulated file."""
    return Windows(store, range(len(store)), replace(recipe.evaluation_windows(), starts=1))


def score(
    forecaster: Forecaster,
    windows: Windows,
    recipe: Recipe,
    device: torch.device | str = "cpu",
    tick: Callable[[int, int], None] | None = None,
) -> list[dict[str, Any]]:
    """One row for each column that the paper has for the task: mean and deviation over windows, and the yardstick's."""
    with matmul_precision("float32"):
        measured = measure(forecaster, windows, Request(), World(device=torch.device(device)), tick)
    ours, plain = (rows_of(one, recipe.task.targets, 1.0) for one in measured)
    rows = []
    for column in card_columns(recipe):
        value, deviation = picked(ours, column)
        rows.append({"metric": column.metric, "field": column.field, "value": value, "deviation": deviation,
                     "yardstick": picked(plain, column)[0]})  # fmt: skip
    return rows


def card_columns(recipe: Recipe) -> list[Column]:
    found = [column for column in tables()["main"].columns if column.task == recipe.task.name]
    if not found:
        raise ValueError(f"The paper's main table has no column for {recipe.task.name}, so no card can be made.")
    return found


def picked(rows: Sequence[dict[str, Any]], column: Column) -> tuple[float, float | None]:
    """The value and the deviation of this column's metric and field."""
    found = [r for r in rows if (r["metric"], r["field"], r["lead"]) == (column.metric, column.field, None)]
    if len(found) != 1 or found[0]["value"] is None:
        raise ValueError(
            f"No finite {column.metric} of {column.field} found; evaluate the run on its test split first."
        )
    return found[0]["value"], found[0].get("deviation")


def seconds_of_model(windows: Windows, recipe: Recipe, forecaster: Forecaster, device: torch.device) -> float:
    """Seconds of one case: the median of `REPEATS` calls of the model, times the calls of a forecast."""
    history, task = windows.batch([0])[0].to(device), recipe.task
    with torch.no_grad(), matmul_precision("float32"):
        one = _seconds(lambda: forecaster.rollout(history, task.block).frames, device, REPEATS)
    return one * math.ceil(task.horizon / task.block)


def compare_with_solver(
    windows: Windows, start: torch.Tensor, recipe: Recipe, scores: Sequence[dict[str, Any]]
) -> list[SolverRow]:
    """The solver on its own grid, on the model's, and on the coarsest grid, in steps of a fifth, on which its errors
    are not above those in `scores`; on the CPU, one case at a time.

    A flow goes on from `start` (B, n, n), the last given frames in full resolution: that is what a user of the solver
    has. Where no grid below the solver's own is adequate, there are two rows.
    """
    task, seed = recipe.task, _seed_of(windows)
    simulator, points, device = simulator_of(task.name), windows.coordinates[0], torch.device("cpu")
    full = full_work(simulator, seed, 0, 1)
    if full is None:
        return []
    _, future = windows.batch(range(len(windows)))
    tried: list[SolverRow] = []
    grid = len(points)
    while grid < max(full.grid):
        work = coarse_work(simulator, seed, start, points, task.horizon, task.time_stride, grid)
        assert work is not None  # known, as `full_work` is
        errors = _errors(work.call()[..., None].float(), future, recipe)
        adequate = all(error <= row["value"] for error, row in zip(errors, scores, strict=True))
        if not tried or adequate:
            tried.append(SolverRow((grid, grid), _seconds_of_solver(windows, recipe, grid, device), errors))
        if adequate:
            break
        grid = finer_grid(simulator, grid)
    return [SolverRow(full.grid, _full_seconds(windows, recipe, device)), *tried]


def time_solver(
    windows: Windows, recipe: Recipe, rows: Sequence[dict[str, Any]], device: torch.device
) -> list[SolverRow]:
    """The solver on the grids of a card, timed on this machine; the errors are those of the card."""
    timed = []
    for row in rows:
        if row["errors"] is None:
            seconds = _full_seconds(windows, recipe, device)
        else:
            seconds = _seconds_of_solver(windows, recipe, row["grid"][0], device)
        timed.append(SolverRow(tuple(row["grid"]), seconds, row["errors"]))
    return timed


def _full_seconds(windows: Windows, recipe: Recipe, device: torch.device) -> float:
    """Of one case on the grid of the truth: of a long flow two frames are timed, and one, and the others cost as much
    as the second."""
    simulator, frames = simulator_of(recipe.task.name), recipe.task.horizon * recipe.task.time_stride

    def timed(count: int) -> float:
        work = full_work(simulator, _seed_of(windows), 0, count, device)
        assert work is not None  # or the card had no rows
        return _seconds(work.call, device, 1)

    first = timed(1)
    return first if frames == 1 else first + (frames - 1) * max(0.0, timed(2) - first)


def _seconds_of_solver(windows: Windows, recipe: Recipe, grid: int, device: torch.device) -> float:
    """Of one case; how a flow begins does not change its cost."""
    task, simulator = recipe.task, simulator_of(recipe.task.name)
    frame = windows.batch([0])[0][:, -1, ..., 0].to(device)
    work = coarse_work(
        simulator, _seed_of(windows), frame, windows.coordinates[0], task.horizon, task.time_stride, grid
    )
    assert work is not None
    return _seconds(work.call, device, REPEATS)


def _seed_of(windows: Windows) -> int:
    seed = windows.source.header.seed
    if seed is None:
        raise ValueError("The windows have no recorded simulation seed; create them with simulate.")
    return seed


def _errors(frames: torch.Tensor, true: torch.Tensor, recipe: Recipe) -> list[float]:
    """The columns of the card for frames that are there already."""
    whole, leads = metrics.relative_l2(frames, true), metrics.relative_l2_per_lead(frames, true)
    named = {"relative_l2": whole, "relative_l2_final": leads[:, -1]}
    places = [recipe.task.targets.index(column.field or "") for column in card_columns(recipe)]
    return [
        float(named[column.metric][:, place].mean()) for column, place in zip(card_columns(recipe), places, strict=True)
    ]


def _seconds(call: Callable[[], object], device: torch.device, repeats: int) -> float:
    times = []
    for _ in range(repeats + 1):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begin = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begin)
    return sorted(times[1:])[repeats // 2]
