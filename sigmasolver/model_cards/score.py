"""Score a pretrained model on unseen windows, and compare it with the solver."""

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
    "card_errors",
    "compare_with_solver",
    "score",
    "seconds_of_model",
    "shipped_windows",
    "time_solver",
    "unseen_windows",
    "value_of",
]

REPEATS = 3
"""Number of timed calls after a warm-up call; the median is used."""


@dataclass(frozen=True)
class SolverRow:
    """The solver on one grid: seconds for one case, and its errors in the order of the card (None: it is the truth)."""

    grid: tuple[int, ...]
    seconds: float
    errors: list[float] | None = None


def shipped_windows(store: Reader, recipe: Recipe) -> Windows:
    """The windows of a folder's store, one per trajectory, with strides already applied."""
    spec = replace(recipe.evaluation_window_spec(), windows_per_trajectory=1, time_stride=1, space_stride=1)
    return Windows(store, range(len(store)), spec)


def unseen_windows(store: Reader, recipe: Recipe) -> Windows:
    """The first window of every trajectory of a simulated file."""
    return Windows(store, range(len(store)), replace(recipe.evaluation_window_spec(), windows_per_trajectory=1))


def score(
    forecaster: Forecaster,
    windows: Windows,
    recipe: Recipe,
    device: torch.device | str = "cpu",
    tick: Callable[[int, int], None] | None = None,
) -> list[dict[str, Any]]:
    """One row per column of the task in the paper: mean and deviation over windows, and the mean of the baseline."""
    with matmul_precision("float32"):
        measured = measure(forecaster, windows, Request(), World(device=torch.device(device)), tick)
    ours, baseline = (rows_of(measurement, recipe.task.targets, None) for measurement in measured)
    rows = []
    for column in card_columns(recipe):
        value, deviation = value_of(ours, column)
        rows.append({"metric": column.metric, "field": column.field, "value": value, "deviation": deviation,
                     "yardstick": value_of(baseline, column)[0]})  # fmt: skip
    return rows


def card_columns(recipe: Recipe) -> list[Column]:
    columns = [column for column in tables()["main"].columns if column.task == recipe.task.name]
    if not columns:
        raise ValueError(f"The paper's main table has no column for {recipe.task.name}, so no card can be made.")
    return columns


def value_of(rows: Sequence[dict[str, Any]], column: Column) -> tuple[float, float | None]:
    """The value and deviation of the metric and field of a column."""
    matches = [row for row in rows if (row["metric"], row["field"], row["lead"]) == (column.metric, column.field, None)]
    if len(matches) != 1 or matches[0]["value"] is None:
        raise ValueError(
            f"No finite {column.metric} of {column.field} found; evaluate the run on its test split first."
        )
    return matches[0]["value"], matches[0].get("deviation")


def seconds_of_model(windows: Windows, recipe: Recipe, forecaster: Forecaster, device: torch.device) -> float:
    """Time of one case: the median of `REPEATS` calls of the model, times the number of calls per forecast."""
    history, task = windows.batch([0])[0].to(device), recipe.task
    with torch.no_grad(), matmul_precision("float32"):
        seconds_per_call = _median_seconds(lambda: forecaster.rollout(history, task.block).frames, device, REPEATS)
    return seconds_per_call * math.ceil(task.horizon / task.block)


def compare_with_solver(
    windows: Windows, start: torch.Tensor, recipe: Recipe, scores: Sequence[dict[str, Any]]
) -> list[SolverRow]:
    """The solver on its own grid, on the model's, and on the coarsest grid, refined in steps of a fifth, on which its
    errors do not exceed those in `scores`; on the CPU, one case at a time.

    A flow continues from `start` (B, n, n), the last input frames at full resolution, which a user of the solver has.
    If no grid coarser than the solver's own is accurate enough, there are two rows.
    """
    task, seed = recipe.task, _seed_of(windows)
    simulator, points, device = simulator_of(task.name), windows.coordinates[0], torch.device("cpu")
    full = full_work(simulator, seed, 0, 1)
    if full is None:
        return []
    _, future = windows.batch(range(len(windows)))
    coarse_rows: list[SolverRow] = []
    grid = len(points)
    while grid < max(full.grid):
        work = coarse_work(simulator, seed, start, points, task.horizon, task.time_stride, grid)
        assert work is not None  # a simulator with `full_work` also has `coarse_work`
        errors = card_errors(work.call()[..., None].float(), future, recipe)
        adequate = all(error <= row["value"] for error, row in zip(errors, scores, strict=True))
        if not coarse_rows or adequate:
            coarse_rows.append(SolverRow((grid, grid), _seconds_of_solver(windows, recipe, grid, device), errors))
        if adequate:
            break
        grid = finer_grid(simulator, grid)
    return [SolverRow(full.grid, _seconds_on_full_grid(windows, recipe, device)), *coarse_rows]


def time_solver(
    windows: Windows, recipe: Recipe, rows: Sequence[dict[str, Any]], device: torch.device
) -> list[SolverRow]:
    """Time the solver on the grids of a card on this machine; the errors are those of the card."""
    timed = []
    for row in rows:
        if row["errors"] is None:
            seconds = _seconds_on_full_grid(windows, recipe, device)
        else:
            seconds = _seconds_of_solver(windows, recipe, row["grid"][0], device)
        timed.append(SolverRow(tuple(row["grid"]), seconds, row["errors"]))
    return timed


def _seconds_on_full_grid(windows: Windows, recipe: Recipe, device: torch.device) -> float:
    """Time of one case on the full grid. For a flow it is extrapolated from one and two frames: every further frame
    costs as much as the second."""
    simulator, frames = simulator_of(recipe.task.name), recipe.task.horizon * recipe.task.time_stride

    def seconds_for(count: int) -> float:
        work = full_work(simulator, _seed_of(windows), 0, count, device)
        assert work is not None  # otherwise the card would have no solver rows
        return _median_seconds(work.call, device, 1)

    first = seconds_for(1)
    return first if frames == 1 else first + (frames - 1) * max(0.0, seconds_for(2) - first)


def _seconds_of_solver(windows: Windows, recipe: Recipe, grid: int, device: torch.device) -> float:
    """Time of one case; the cost does not depend on the initial frame."""
    task, simulator = recipe.task, simulator_of(recipe.task.name)
    frame = windows.batch([0])[0][:, -1, ..., 0].to(device)
    work = coarse_work(
        simulator, _seed_of(windows), frame, windows.coordinates[0], task.horizon, task.time_stride, grid
    )
    assert work is not None
    return _median_seconds(work.call, device, REPEATS)


def _seed_of(windows: Windows) -> int:
    seed = windows.source.header.seed
    if seed is None:
        raise ValueError("The windows have no recorded simulation seed; create them with simulate.")
    return seed


def card_errors(frames: torch.Tensor, truth: torch.Tensor, recipe: Recipe) -> list[float]:
    """The errors of the card's columns for given frames."""
    overall, per_lead = metrics.relative_l2(frames, truth), metrics.relative_l2_per_lead(frames, truth)
    by_metric = {"relative_l2": overall, "relative_l2_final": per_lead[:, -1]}
    indices = [recipe.task.targets.index(column.field or "") for column in card_columns(recipe)]
    return [
        float(by_metric[column.metric][:, index].mean())
        for column, index in zip(card_columns(recipe), indices, strict=True)
    ]


def _median_seconds(call: Callable[[], object], device: torch.device, repeats: int) -> float:
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
