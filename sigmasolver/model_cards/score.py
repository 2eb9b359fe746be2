"""A pretrained model measured on windows it has not seen, with the solver beside it, on the machine at hand."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from sigmasolver import pretrained
from sigmasolver.data.reader import Reader
from sigmasolver.data.store import open_store
from sigmasolver.data.windows import Windows
from sigmasolver.evaluate import Request, measure, metrics, rows_of
from sigmasolver.forecast import Forecaster
from sigmasolver.forecast.checkpoint import load, recipe_in
from sigmasolver.forecast.files import write_forecast
from sigmasolver.forecast.replay import Replay
from sigmasolver.ops.precision import matmul_precision
from sigmasolver.recipes import Recipe
from sigmasolver.report.published import Column, tables
from sigmasolver.runs import Run, provenance, read_facts
from sigmasolver.runtime.parallel import World
from sigmasolver.simulate import simulator_of
from sigmasolver.simulate.coarse import Work, coarse_work, full_work

__all__ = [
    "Demonstration",
    "SolverRow",
    "card_columns",
    "compare_with_solver",
    "demonstrate",
    "picked",
    "score",
    "shipped_windows",
    "unseen_windows",
]


@dataclass(frozen=True)
class SolverRow:
    """The solver on one grid: seconds for one case, and its errors in the order of the card (None: it is the truth)."""

    grid: tuple[int, ...]
    seconds: float
    errors: list[float] | None = None


@dataclass(frozen=True)
class Demonstration:
    """A pretrained model at work on this machine."""

    card: dict[str, Any]
    scores: list[dict[str, Any]]
    seconds: float
    """Of the model, for one case."""
    solver: list[SolverRow]
    machine: str
    said: str | None
    """Of the file that was written."""


def demonstrate(
    name: str,
    device: torch.device,
    precision: str = "float32",
    out: Path | None = None,
    tick: Callable[[int, int], None] | None = None,
) -> Demonstration:
    """Forecast the unseen windows of a pretrained model, with the solver beside it; writes the forecasts to `out`."""
    folder = pretrained.folder(name)
    recipe, forecaster = recipe_in(Run(folder)), Replay(load(folder, device), precision)
    with open_store(folder / "windows.h5") as store:
        windows = shipped_windows(store, recipe)
        scores = score(forecaster, windows, recipe, device, tick)
        seconds, solver = compare_with_solver(windows, recipe, forecaster, scores, device)
        said = None if out is None else _write_frames(out, name, forecaster, windows, recipe, device)
    return Demonstration(pretrained.card(name), scores, seconds, solver, provenance(device)["machine"], said)


def _write_frames(
    out: Path, name: str, forecaster: Forecaster, windows: Windows, recipe: Recipe, device: torch.device
) -> str:
    task, old = recipe.task, windows.source.header.layout
    units = dict(zip(old.fields, old.units, strict=True))
    layout = replace(
        old, fields=task.targets, units=tuple(units[name] for name in task.targets), times=old.times[-task.horizon :]
    )
    frames = []
    with torch.no_grad(), matmul_precision("float32"):
        for number in range(len(windows)):
            history, _ = windows.batch([number])
            frames.append(forecaster.rollout(history.to(device), task.horizon).frames.cpu())
    step = read_facts(Run(pretrained.folder(name)).weights)["step"]
    return write_forecast(
        out, torch.cat(frames).numpy(), layout, {"run": name, "step": step, "start": "windows of the package"}
    )


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
        raise ValueError(f"The paper's main table has no column for {recipe.task.name}; such a model has no card.")
    return found


def picked(rows: Sequence[dict[str, Any]], column: Column) -> tuple[float, float | None]:
    """The value and the deviation of this column's metric and field."""
    found = [r for r in rows if (r["metric"], r["field"], r["lead"]) == (column.metric, column.field, None)]
    if len(found) != 1 or found[0]["value"] is None:
        raise ValueError(
            f"There is no finite {column.metric} of {column.field}; evaluate the run on its test part first."
        )
    return found[0]["value"], found[0].get("deviation")


def compare_with_solver(
    windows: Windows,
    recipe: Recipe,
    forecaster: Forecaster,
    scores: Sequence[dict[str, Any]],
    device: torch.device,
    repeats: int = 3,
) -> tuple[float, list[SolverRow]]:
    """Seconds of the model for one case; the solver on its own grid, on the model's, and where it is as good.

    One case at a time, each warmed up once; the median of `repeats`, except for the long solve on the fine grid. The
    last row is the coarsest grid, in steps of a fifth, on which the solver's errors are not above those in `scores`.
    """
    task, seed = recipe.task, windows.source.header.seed
    history, future = (part.to(device) for part in windows.batch(range(len(windows))))
    with torch.no_grad(), matmul_precision("float32"):
        seconds = _seconds(lambda: forecaster.rollout(history[:1], task.horizon).frames, device, repeats)
    if seed is None:
        raise ValueError("The windows do not say which seed they were simulated with; make them with simulate.")
    simulator, apart, rows = simulator_of(task.name), task.time_stride, []
    full = full_work(simulator, seed, 0, task.horizon, apart, device)
    if full is None:
        return seconds, []
    rows.append(SolverRow(full.grid, _seconds(full.call, device, 1) / full.share))
    points = windows.coordinates[0]

    def coarse(count: int, grid: int) -> Work | None:
        return coarse_work(simulator, seed, range(count), history[:count], points, task.horizon, apart, grid)

    grid, first, adequate = len(points), True, False
    while not adequate and grid < max(full.grid):
        one, every = coarse(1, grid), coarse(len(windows), grid)
        if one is None or every is None:
            break
        errors = _errors(every.call()[..., None].float(), future, recipe)
        adequate = all(error <= row["value"] for error, row in zip(errors, scores, strict=True))
        if first or adequate:
            rows.append(SolverRow(one.grid, _seconds(one.call, device, repeats) / one.share, errors))
        grid, first = math.ceil(1.2 * grid), False
    return seconds, rows


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
