"""Forecasts as files: given frames come in as any array file, predicted frames go out as a store or plain arrays."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sigmasolver.data.domain import Domain, time_steps
from sigmasolver.data.formats import Reading, is_read_in_place, opened
from sigmasolver.data.formats.hdf5 import is_store
from sigmasolver.data.formats.history import read_history, read_times
from sigmasolver.data.formats.user_arrays import SUFFIXES
from sigmasolver.data.header import Header
from sigmasolver.data.layout import Layout
from sigmasolver.data.normalise import TimeScale
from sigmasolver.data.store import open_store, write_store
from sigmasolver.forecast.checkpoint import (
    domain_of,
    load,
    not_compared,
    reading_in,
    recipe_in,
    refuse_other_domain,
)
from sigmasolver.forecast.replay import Replay
from sigmasolver.recipes import Recipe
from sigmasolver.runs import Run, read_facts
from sigmasolver.runs.files import plain_errors, replacing
from sigmasolver.tasks import Task

__all__ = ["check_name", "forecast_file", "write_forecast"]

KINDS = (".h5", ".npy", ".npz")
SOURCE = "forecast"
"""What a store says of itself when it holds a forecast: its frames and points are those of the model already."""


@dataclass(frozen=True)
class Start:
    """Frames to forecast from, thinned as the run's data were."""

    history: torch.Tensor
    """`(count, T_in, *grid, fields)`."""
    header: Header | None
    """Of the store they come from; None: plain arrays."""
    frames: int
    """How many the file holds."""
    times: np.ndarray | None
    """Theirs; None: the file does not say."""
    time_stride: int
    space_stride: int
    said: list[str]


def forecast_file(
    path: Path,
    start: Path,
    steps: int,
    out: Path,
    device: torch.device,
    tick: Callable[[int, int], None] | None = None,
    precision: str = "float32",
    anyway: bool = False,
) -> list[str]:
    """Forecast `steps` frames after the frames in `start` with the run at `path`; returns what there is to tell.

    Frames that differ from the training data in units, box, boundaries or time step are refused; with `anyway` they are
    forecast, and a store says in what they differ.
    """
    check_name(out)
    if steps < 1:
        raise ValueError(f"A forecast of {steps} frames was asked for; ask for at least one.")
    run = Run(path)
    recipe = recipe_in(run)
    task = recipe.task
    forecaster = Replay(load(path, device), precision)
    given = _given(run, recipe, start)
    _refuse_too_long(steps, given, len(task.targets))
    known = domain_of(run)
    differs = _check_domain(run, recipe, known, start, given, anyway)
    layout, times = _layout(given, steps, task, known), None
    if forecaster.time_scale is not None:
        times = _times(start, given, layout, forecaster.time_scale)
        layout = replace(layout, times=times[1:])
    said, frames = given.said, []
    if task.mask is not None:
        kept = "zero" if task.steady else "as in the last given frame"
        said.append(f"where {task.mask} is 1 the forecast is {kept}")
    for number, one in enumerate(given.history, start=1):
        result = forecaster.rollout(one[None].to(device), steps, time=None if times is None else times[None])
        frames.append(result.frames.cpu().numpy())
        if result.stopped is not None:
            said.append(f"trajectory {number - 1}: {result}")
        if tick is not None:
            tick(number, len(given.history))
    predicted = np.concatenate(frames)
    parameters = {"run": run.path.name, "step": read_facts(run.weights)["step"], "start": start.name}
    if precision != "float32":
        parameters["precision"] = precision
    if differs is not None:
        parameters["anyway"] = differs
    said.append(write_forecast(out, predicted, layout, parameters))
    return said


def check_name(out: Path) -> None:
    """Refuse a file that cannot be written, before anything is computed."""
    if out.is_dir():
        raise ValueError(f"{out} is a folder; name a file in it that ends in {', '.join(KINDS)}.")
    if out.suffix not in KINDS:
        raise ValueError(f'The forecast cannot be written as "{out.name}"; end its name in {", ".join(KINDS)}.')
    if out.exists():
        raise ValueError(f"{out} already exists; choose another name or remove it.")


def write_forecast(out: Path, predicted: np.ndarray, layout: Layout, parameters: Mapping[str, Any]) -> str:
    """Predicted frames `(trajectories, frames, *grid, fields)` as a file; returns what there is to tell."""
    _write(out, predicted, layout.fields, Header(layout, SOURCE, parameters))
    shape = " × ".join(map(str, predicted.shape))
    return f"{out}: {shape} (trajectories, frames, grid, fields {', '.join(layout.fields)})"


def _given(run: Run, recipe: Recipe, start: Path) -> Start:
    """The frames in whatever `train --data` takes, read as the training data were; a file of arrays may also hold one
    history alone."""
    reading, kind = reading_in(run, recipe) if (run.path / "data.json").exists() else (Reading(), None)
    arrays = start.suffix.lower() in SUFFIXES and not start.is_dir() and reading.axes is None
    if arrays or not start.exists() or is_read_in_place(start):
        return _read(start, recipe.task, start)
    with opened(start, reading, kind) as reader:
        return _read(reader.path, recipe.task, start)


def _read(file: Path, task: Task, start: Path) -> Start:
    """The newest frames of the file, as far apart in time and space as those that the run learned from.

    A store is thinned in time as the run's data were, unless it is a forecast; frames in plain arrays are taken as
    they are. The grid is thinned where that gives the run's own. `start` is where the file comes from.
    """
    values = read_history(file, task.inputs, len(task.grid), task.steady)
    header = _header(file)
    frames, grid = values.shape[1], values.shape[2:-1]
    apart = 1 if header is None or header.source == SOURCE else task.time_stride
    needed = (task.history - 1) * apart + 1
    if frames < needed:
        raise ValueError(f"{start} holds {frames} frames; {needed} are needed to forecast from.")
    said = [f"{start} holds {frames} frames; the last {needed} were used"] if frames > needed else []
    if apart > 1:
        said.append(f"1 of {apart} frames was used, as in the training")
    elif task.time_stride > 1 and header is None:
        said.append(f"the frames are taken as {task.time_stride} frames of the training data apart")
    stride = task.space_stride
    if grid == task.grid or tuple(-(-points // stride) for points in grid) != task.grid:
        stride = 1
    if stride > 1:
        said.append(f"1 of {stride} points along each axis was used, as in the training")
    elif grid != task.grid:
        grids = [" × ".join(map(str, one)) for one in (grid, task.grid)]
        said.append(f"the frames have a grid of {grids[0]} and the model was trained on {grids[1]}: trust it less")
    space = (slice(None, None, stride),) * len(grid)
    history = torch.tensor(values[(slice(None), slice(frames - needed, None, apart), *space)])
    times = None if header is None else header.layout.times
    if header is None and not task.steady:
        times = read_times(file, frames)
    return Start(history, header, frames, times, apart, stride, said)


def _refuse_too_long(steps: int, given: Start, fields: int) -> None:
    """All frames of a forecast are held in memory, twice while they are put together."""
    count, _, *grid, _ = given.history.shape
    needed = 2 * 4 * count * steps * prod(grid) * fields
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > memory:
        raise ValueError(
            f"A forecast of {steps} frames for {count} trajectories takes {needed / 1e9:.3g} GB of memory, and this "
            f"machine has {memory / 1e9:.3g} GB; ask for fewer steps, or continue from the last frames of a forecast."
        )


def _check_domain(
    run: Run, recipe: Recipe, known: Domain | None, start: Path, given: Start, anyway: bool
) -> str | None:
    """In what the frames differ from the training data, where that was allowed; arrays tell at most their times."""
    header = given.header
    if header is not None and header.source == SOURCE and header.parameters.get("run") == run.path.name:
        return header.parameters.get("anyway")  # checked when it was made
    if given.times is None:
        return None
    if known is None:
        given.said.append(not_compared(run, start))
        return None
    found = replace(known, time_steps=time_steps(given.times[:: -given.time_stride][::-1]))
    if header is not None:
        found = Domain.of(header.layout, header.layout.fields, given.times[:: -given.time_stride][::-1])
    return refuse_other_domain(run, recipe, start, found, anyway)


def _times(start: Path, given: Start, layout: Layout, scale: TimeScale) -> np.ndarray:
    """(1 + steps,): the time of the last given frame, and of the frames after it in a forecast of this layout."""
    if given.times is not None and given.frames > 1:
        return np.concatenate((given.times[-1:], layout.times))
    last = scale.origin + (given.frames - 1) * scale.unit
    if given.times is not None:
        last = given.times[-1]
    else:
        given.said.append(
            f"{start} has no times: its frames are taken as the first {given.frames} of a trajectory, "
            f"{scale.unit:g} apart"
        )
    return last + scale.unit * np.arange(len(layout.times) + 1)


def _header(start: Path) -> Header | None:
    if not is_store(start):
        return None
    with open_store(start) as store:
        return store.header


def _write(out: Path, frames: np.ndarray, fields: tuple[str, ...], header: Header) -> None:
    if out.suffix == ".h5":
        write_store(out, header, frames)
        return
    with plain_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        with replacing(out) as file:
            if out.suffix == ".npy":
                np.save(file, frames)
            else:
                np.savez(file, fields=frames, names=np.array(fields))


def _layout(given: Start, steps: int, task: Task, known: Domain | None) -> Layout:
    """Coordinates, units and times that go on from those of the file; numbers 0, 1, 2, ... where arrays had none.

    What the file does not say is as in the training data: units, and the time step of a single frame.
    """
    units = {} if known is None else dict(zip(known.fields, known.units, strict=True))
    times = np.arange(1, steps + 1, dtype=np.float64)
    if given.times is not None:
        step = 1.0 if known is None or not known.time_steps else sum(known.time_steps) / 2
        if given.frames > 1:
            step = given.time_stride * (given.times[-1] - given.times[-2])
        times = given.times[-1] + step * times
    if given.header is None:
        grid = given.history.shape[2:-1]
        coordinates, boundary = tuple(np.arange(points, dtype=np.float64) for points in grid), ("open",) * len(grid)
    else:
        layout = given.header.layout
        units |= zip(layout.fields, layout.units, strict=True)
        coordinates, boundary = tuple(axis[:: given.space_stride] for axis in layout.coordinates), layout.boundary
    return Layout(task.targets, tuple(units.get(name, "1") for name in task.targets), boundary, coordinates, times)
