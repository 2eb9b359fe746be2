"""Forecasts as files: given frames come in as any array file, predicted frames go out as a store or plain arrays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from sigmasolver.data.formats.hdf5 import is_store
from sigmasolver.data.formats.history import read_history, read_times
from sigmasolver.data.header import Header
from sigmasolver.data.normalise import TimeScale
from sigmasolver.data.store import open_store, write_store
from sigmasolver.files import plain_errors, replacing
from sigmasolver.replay import Replay
from sigmasolver.runs import Run, read_facts
from sigmasolver.simulate.simulator import Layout
from sigmasolver.tasks import Task
from sigmasolver.trained import load, recipe_in

__all__ = ["forecast_file"]

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
) -> list[str]:
    """Forecast `steps` frames after the frames in `start` with the run at `path`; returns what there is to tell."""
    if out.suffix not in KINDS:
        raise ValueError(f'The forecast cannot be written as "{out.name}"; end its name in {", ".join(KINDS)}.')
    if out.exists():
        raise ValueError(f"{out} is there already; choose another name or remove it.")
    if steps < 1:
        raise ValueError(f"A forecast of {steps} frames was asked for; ask for at least one.")
    run = Run(path)
    task = recipe_in(run).task
    forecaster = Replay(load(path, device), precision)
    given = _read(start, task)
    layout, times = _layout(given, steps, task), None
    if forecaster.time_scale is not None:
        times = _times(start, given, layout, forecaster.time_scale)
        layout = replace(layout, times=times[1:])
    said, frames = given.said, []
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
    _write(out, predicted, task.targets, Header(layout, SOURCE, parameters))
    shape = " × ".join(map(str, predicted.shape))
    said.append(f"{out}: {shape} (trajectories, frames, grid, fields {', '.join(task.targets)})")
    return said


def _read(start: Path, task: Task) -> Start:
    """The newest frames of the file, as far apart in time and space as those that the run learned from.

    A store is thinned in time as the run's data were, unless it is a forecast; frames in plain arrays are taken as
    they are. The grid is thinned where that gives the run's own.
    """
    values = read_history(start, task.inputs, len(task.grid))
    header = _header(start)
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
    return Start(history, header, frames, apart, stride, said)


def _times(start: Path, given: Start, layout: Layout, scale: TimeScale) -> np.ndarray:
    """(1 + steps,): the time of the last given frame, and of the frames after it in a forecast of this layout."""
    if given.header is not None:
        return np.concatenate((given.header.layout.times[-1:], layout.times))
    known, last, step = read_times(start, given.frames), scale.origin + (given.frames - 1) * scale.unit, scale.unit
    if known is None:
        given.said.append(
            f"{start} has no times: its frames are taken as the first {given.frames} of a trajectory, "
            f"{scale.unit:g} apart"
        )
    else:
        last, step = known[-1], known[-1] - known[-2] if given.frames > 1 else scale.unit
    return last + step * np.arange(len(layout.times) + 1)


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


def _layout(given: Start, steps: int, task: Task) -> Layout:
    """Coordinates, units and times that go on from those of a store; numbers 0, 1, 2, ... where arrays had none."""
    count = np.arange(1, steps + 1, dtype=np.float64)
    if given.header is None:
        grid = given.history.shape[2:-1]
        coordinates = tuple(np.arange(points, dtype=np.float64) for points in grid)
        return Layout(task.targets, ("1",) * len(task.targets), ("open",) * len(grid), coordinates, count)
    layout = given.header.layout
    units = dict(zip(layout.fields, layout.units, strict=True))
    step = layout.times[-1] - layout.times[-2] if len(layout.times) > 1 else 1.0
    return Layout(
        task.targets,
        tuple(units.get(name, "1") for name in task.targets),
        layout.boundary,
        tuple(axis[:: given.space_stride] for axis in layout.coordinates),
        layout.times[-1] + step * given.time_stride * count,
    )
