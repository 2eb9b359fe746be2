"""Forecasts as files: given frames come in as any array file, predicted frames go out as a store, NetCDF,
Zarr or plain arrays."""

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
from sigmasolver.data.formats import Reading, open_data, opened
from sigmasolver.data.formats.history import has_header, history_of, read_history, read_times
from sigmasolver.data.formats.netcdf_zarr_write import require_xarray, write_netcdf, write_zarr
from sigmasolver.data.formats.user_arrays import SUFFIXES
from sigmasolver.data.header import Header
from sigmasolver.data.layout import Layout, turn
from sigmasolver.data.normalise import TimeScale
from sigmasolver.data.reader import Reader
from sigmasolver.data.store import is_store, write_store
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

KINDS = (".h5", ".npy", ".npz", ".nc", ".zarr")
SOURCE = "forecast"
"""What a store says of itself when it holds a forecast: its frames and points are those of the model already."""


@dataclass(frozen=True)
class Start:
    """Frames to forecast from, thinned as the run's data were."""

    history: torch.Tensor
    """`(count, T_in, *grid, fields)`."""
    header: Header | None
    """Of the store or the files they come from; None: plain arrays."""
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
        raise ValueError(f"The number of steps must be at least 1, got {steps}.")
    run = Run(path)
    recipe = recipe_in(run)
    task = recipe.task
    forecaster = Replay(load(path, device), precision)
    known = domain_of(run)
    given = _given(run, recipe, start, known)
    _refuse_too_long(steps, given, len(task.targets))
    differs = _check_domain(run, recipe, known, start, given, anyway)
    layout, times = _layout(given, steps, task, known), None
    if forecaster.time_scale is not None:
        times = _times(start, given, layout, forecaster.time_scale)
        layout = replace(layout, times=times[1:])
    said, frames = given.said, []
    if task.mask is not None:
        kept = "zero" if task.steady else "copied from the last input frame"
        said.append(f"where {task.mask} is 1, the forecast is {kept}")
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
    if given.header is not None and "attributes" in given.header.parameters:
        parameters["attributes"] = given.header.parameters["attributes"]
    said.append(write_forecast(out, predicted, layout, parameters))
    return said


def check_name(out: Path) -> None:
    """Refuse a file that cannot be written, before anything is computed."""
    if out.is_dir() and out.suffix != ".zarr":
        raise ValueError(f"{out} is a folder; pass a file name ending in {', '.join(KINDS)}.")
    if out.suffix not in KINDS:
        raise ValueError(f'Unknown output format "{out.name}"; the file name must end in {", ".join(KINDS)}.')
    if out.exists():
        raise ValueError(f"{out} already exists; choose another name or remove it.")
    if out.suffix in (".nc", ".zarr"):
        require_xarray(out)


def write_forecast(out: Path, predicted: np.ndarray, layout: Layout, parameters: Mapping[str, Any]) -> str:
    """Predicted frames `(trajectories, frames, *grid, fields)` as a file; returns what there is to tell."""
    _write(out, predicted, Header(layout, SOURCE, parameters))
    shape = " × ".join(map(str, predicted.shape))
    return f"{out}: {shape} (trajectories, frames, grid, fields {', '.join(layout.fields)})"


def _given(run: Run, recipe: Recipe, start: Path, known: Domain | None) -> Start:
    """The frames in whatever `train --data` takes; a file of arrays may hold one history alone, too."""
    reading, kind = reading_in(run, recipe) if (run.path / "data.json").exists() else (Reading(), None)
    arrays = start.suffix.lower() in SUFFIXES and not start.is_dir() and reading.axes is None
    if is_store(start) or arrays or not start.exists():
        return _read(run, start, recipe.task, None, known)
    with opened(start, reading, kind) as reader:
        return _read(run, start, recipe.task, reader, known)


def _read(run: Run, start: Path, task: Task, reader: Reader | None, known: Domain | None) -> Start:
    """The newest frames of the file, as far apart in time and space as those that the run learned from.

    A store is thinned in time as the run's data were, unless it is a forecast; frames in plain arrays are taken as
    they are. The grid is thinned where that gives the run's own.
    """
    if reader is None:
        values, header = read_history(start, task.inputs, len(task.grid), task.steady), _header(start)
    else:
        values, header = history_of(reader, start, task.inputs, len(task.grid)), reader.header
    if header is not None and known is not None:
        values, header = _turned(run, values, header, known)
    frames, grid = values.shape[1], values.shape[2:-1]
    apart = 1 if header is None or _made(header)["source"] == SOURCE else task.time_stride
    needed = (task.history - 1) * apart + 1
    if frames < needed:
        raise ValueError(f"{start} has {frames} frames, but a forecast needs {needed}.")
    said = [f"{start} has {frames} frames; the last {needed} were used"] if frames > needed else []
    if apart > 1:
        said.append(f"1 of {apart} frames was used, as in training")
    elif task.time_stride > 1 and header is None:
        said.append(f"assuming consecutive frames are {task.time_stride} frames of the training data apart")
    stride = task.space_stride
    if grid == task.grid or tuple(-(-points // stride) for points in grid) != task.grid:
        stride = 1
    if stride > 1:
        said.append(f"1 of {stride} points along each axis was used, as in training")
    elif grid != task.grid:
        grids = [" × ".join(map(str, one)) for one in (grid, task.grid)]
        said.append(
            f"the frames have a grid of {grids[0]}, but the model was trained on {grids[1]}: the forecast is less "
            "reliable"
        )
    space = (slice(None, None, stride),) * len(grid)
    history = torch.tensor(values[(slice(None), slice(frames - needed, None, apart), *space)])
    times = None if header is None else header.layout.times
    if header is None and not task.steady:
        times = read_times(start, frames)
    return Start(history, header, frames, times, apart, stride, said)


def _turned(run: Run, values: np.ndarray, header: Header, known: Domain) -> tuple[np.ndarray, Header]:
    """With the axes in the order of the run's data: NetCDF and Zarr are read as x, y, z, whatever the run has."""
    names, wanted = header.layout.axis_names, known.axis_names
    made = _made(header)
    untold = not header.layout.axes and "axes" not in header.parameters.get("made", {})
    if names == wanted or sorted(names) != sorted(wanted):
        return values, header
    if untold and made["source"] == SOURCE and made["parameters"].get("run") == run.path.name:
        # A forecast from before axes had names is in the order of its run.
        return values, replace(header, layout=replace(header.layout, axes=wanted))
    order = [names.index(name) for name in wanted]
    return turn(values, 2, order), replace(header, layout=header.layout.turned(order))


def _refuse_too_long(steps: int, given: Start, fields: int) -> None:
    """All frames of a forecast are held in memory, twice while they are put together."""
    count, _, *grid, _ = given.history.shape
    needed = 2 * 4 * count * steps * prod(grid) * fields
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > memory:
        raise ValueError(
            f"A forecast of {steps} frames for {count} trajectories needs {needed / 1e9:.3g} GB of memory, but this "
            f"machine has {memory / 1e9:.3g} GB; use fewer steps, or continue from the last frames of a shorter "
            "forecast."
        )


def _check_domain(
    run: Run, recipe: Recipe, known: Domain | None, start: Path, given: Start, anyway: bool
) -> str | None:
    """In what the frames differ from the training data, where that was allowed; arrays tell at most their times."""
    header = given.header
    if header is not None and _made(header)["source"] == SOURCE:
        parameters = _made(header)["parameters"]
        if parameters.get("run") == run.path.name:
            return parameters.get("anyway")  # checked when it was made
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
            f"{start} has no times: assuming its frames are the first {given.frames} of a trajectory, {scale.unit:g} "
            "apart"
        )
    return last + scale.unit * np.arange(len(layout.times) + 1)


def _header(start: Path) -> Header | None:
    if not has_header(start):
        return None
    with open_data(start) as data:
        return data.header


def _made(header: Header) -> Mapping[str, Any]:
    """The source and the parameters of the values; NetCDF and Zarr that this package wrote keep those of the store."""
    made = header.parameters.get("made", {})
    return {"source": header.source, "parameters": header.parameters} | made


def _write(out: Path, frames: np.ndarray, header: Header) -> None:
    match out.suffix:
        case ".h5":
            return write_store(out, header, frames)
        case ".nc":
            return write_netcdf(out, frames, header)
        case ".zarr":
            return write_zarr(out, frames, header)
    with plain_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        with replacing(out) as file:
            if out.suffix == ".npy":
                np.save(file, frames)
            else:
                np.savez(file, fields=frames, names=np.array(header.layout.fields))


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
        grid, axes = given.history.shape[2:-1], () if known is None else known.axes
        coordinates, boundary = tuple(np.arange(points, dtype=np.float64) for points in grid), ("open",) * len(grid)
    else:
        layout, axes = given.header.layout, given.header.layout.axes
        units |= zip(layout.fields, layout.units, strict=True)
        coordinates, boundary = tuple(axis[:: given.space_stride] for axis in layout.coordinates), layout.boundary
    named = tuple(units.get(name, "1") for name in task.targets)
    return Layout(task.targets, named, boundary, coordinates, times, axes)
