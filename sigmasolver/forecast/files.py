"""Forecasts from files to files: read input frames from any supported data file, write predicted frames as a store,
NetCDF, Zarr or plain arrays."""

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
from sigmasolver.data.formats import ReadOptions, open_data, opened
from sigmasolver.data.formats.history import has_header, history_of, read_history, read_times
from sigmasolver.data.formats.netcdf_zarr_write import require_xarray, write_netcdf, write_zarr
from sigmasolver.data.formats.user_arrays import SUFFIXES
from sigmasolver.data.header import Header
from sigmasolver.data.layout import Layout, transpose_axes
from sigmasolver.data.normalise import TimeScale
from sigmasolver.data.reader import Reader
from sigmasolver.data.store import is_store, write_store
from sigmasolver.forecast.checkpoint import (
    domain_of,
    load,
    load_read_options,
    load_recipe,
    not_compared,
    refuse_other_domain,
)
from sigmasolver.forecast.replay import Replay
from sigmasolver.recipes import Recipe
from sigmasolver.runs import Run, read_facts
from sigmasolver.runs.files import os_errors_as_value_errors, replacing
from sigmasolver.tasks import Task

__all__ = ["check_name", "forecast_file", "write_forecast"]

OUTPUT_SUFFIXES = (".h5", ".npy", ".npz", ".nc", ".zarr")
SOURCE = "forecast"
"""Source name of a store that holds a forecast: its frames and points already have the strides of the model."""


@dataclass(frozen=True)
class Start:
    """Frames to forecast from, with the strides of the run's data applied."""

    history: torch.Tensor
    """`(count, T_in, *grid, fields)`."""
    header: Header | None
    """Header of the data file; None for plain arrays."""
    frames: int
    """Number of frames in the file."""
    times: np.ndarray | None
    """Their times; None if the file has none."""
    time_stride: int
    space_stride: int
    messages: list[str]


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
    """Forecast `steps` frames after the frames in `start` with the run at `path`; return messages for the user.

    Frames that differ from the training data in units, box, boundaries or time step are rejected; with `anyway` they
    are forecast, and the output store records the differences.
    """
    check_name(out)
    if steps < 1:
        raise ValueError(f"The number of steps must be at least 1, got {steps}.")
    run = Run(path)
    recipe = load_recipe(run)
    task = recipe.task
    forecaster = Replay(load(path, device), precision)
    known = domain_of(run)
    given = _read_start(run, recipe, start, known)
    _check_memory(steps, given, len(task.targets))
    differs = _check_domain(run, recipe, known, start, given, anyway)
    layout, times = _forecast_layout(given, steps, task, known), None
    if forecaster.time_scale is not None:
        times = _forecast_times(start, given, layout, forecaster.time_scale)
        layout = replace(layout, times=times[1:])
    messages, frames = given.messages, []
    if task.mask is not None:
        solid_values = "zero" if task.steady else "copied from the last input frame"
        messages.append(f"where {task.mask} is 1, the forecast is {solid_values}")
    for number, sample in enumerate(given.history, start=1):
        result = forecaster.rollout(sample[None].to(device), steps, time=None if times is None else times[None])
        frames.append(result.frames.cpu().numpy())
        if result.stopped is not None:
            messages.append(f"trajectory {number - 1}: {result}")
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
    messages.append(write_forecast(out, predicted, layout, parameters))
    return messages


def check_name(out: Path) -> None:
    """Raise ValueError for a file that cannot be written, before anything is computed."""
    if out.is_dir() and out.suffix != ".zarr":
        raise ValueError(f"{out} is a folder; pass a file name ending in {', '.join(OUTPUT_SUFFIXES)}.")
    if out.suffix not in OUTPUT_SUFFIXES:
        raise ValueError(f'Unknown output format "{out.name}"; the file name must end in {", ".join(OUTPUT_SUFFIXES)}.')
    if out.exists():
        raise ValueError(f"{out} already exists; choose another name or remove it.")
    if out.suffix in (".nc", ".zarr"):
        require_xarray(out)


def write_forecast(out: Path, predicted: np.ndarray, layout: Layout, parameters: Mapping[str, Any]) -> str:
    """Write predicted frames `(trajectories, frames, *grid, fields)` as a file; return a message for the user."""
    _write_file(out, predicted, Header(layout, SOURCE, parameters))
    shape = " × ".join(map(str, predicted.shape))
    return f"{out}: {shape} (trajectories, frames, grid, fields {', '.join(layout.fields)})"


def _read_start(run: Run, recipe: Recipe, start: Path, known: Domain | None) -> Start:
    """Read the input frames from any format of `train --data`; a file of arrays may also hold a single history."""
    options, kind = load_read_options(run, recipe) if (run.path / "data.json").exists() else (ReadOptions(), None)
    arrays = start.suffix.lower() in SUFFIXES and not start.is_dir() and options.axes is None
    if is_store(start) or arrays or not start.exists():
        return _select_frames(run, start, recipe.task, None, known)
    with opened(start, options, kind) as reader:
        return _select_frames(run, start, recipe.task, reader, known)


def _select_frames(run: Run, start: Path, task: Task, reader: Reader | None, known: Domain | None) -> Start:
    """The newest frames of the file, with the strides in time and space of the training data.

    The time stride of the run is applied to a store unless it is a forecast, and not to plain arrays. The space stride
    is applied if that gives the run's grid.
    """
    if reader is None:
        values, header = read_history(start, task.inputs, len(task.grid), task.steady), _header(start)
    else:
        values, header = history_of(reader, start, task.inputs, len(task.grid)), reader.header
    if header is not None and known is not None:
        values, header = _reorder_axes(run, values, header, known)
    frames, grid = values.shape[1], values.shape[2:-1]
    time_stride = 1 if header is None or _provenance(header)["source"] == SOURCE else task.time_stride
    needed = (task.history - 1) * time_stride + 1
    if frames < needed:
        raise ValueError(f"{start} has {frames} frames, but a forecast needs {needed}.")
    messages = [f"{start} has {frames} frames; the last {needed} were used"] if frames > needed else []
    if time_stride > 1:
        messages.append(f"1 of {time_stride} frames was used, as in training")
    elif task.time_stride > 1 and header is None:
        messages.append(f"assuming consecutive frames are {task.time_stride} frames of the training data apart")
    space_stride = task.space_stride
    if grid == task.grid or tuple(-(-points // space_stride) for points in grid) != task.grid:
        space_stride = 1
    if space_stride > 1:
        messages.append(f"1 of {space_stride} points along each axis was used, as in training")
    elif grid != task.grid:
        grids = [" × ".join(map(str, shape)) for shape in (grid, task.grid)]
        messages.append(
            f"the frames have a grid of {grids[0]}, but the model was trained on {grids[1]}: the forecast is less "
            "reliable"
        )
    space = (slice(None, None, space_stride),) * len(grid)
    history = torch.tensor(values[(slice(None), slice(frames - needed, None, time_stride), *space)])
    times = None if header is None else header.layout.times
    if header is None and not task.steady:
        times = read_times(start, frames)
    return Start(history, header, frames, times, time_stride, space_stride, messages)


def _reorder_axes(run: Run, values: np.ndarray, header: Header, known: Domain) -> tuple[np.ndarray, Header]:
    """Transpose to the axis order of the run's data: NetCDF and Zarr are read as x, y, z, whatever the run uses."""
    names, expected = header.layout.axis_names, known.axis_names
    origin = _provenance(header)
    unnamed = not header.layout.axes and "axes" not in header.parameters.get("made", {})
    if names == expected or sorted(names) != sorted(expected):
        return values, header
    if unnamed and origin["source"] == SOURCE and origin["parameters"].get("run") == run.path.name:
        # A forecast written before axes had names is in the order of its run.
        return values, replace(header, layout=replace(header.layout, axes=expected))
    order = [names.index(name) for name in expected]
    return transpose_axes(values, 2, order), replace(header, layout=header.layout.transposed(order))


def _check_memory(steps: int, given: Start, fields: int) -> None:
    """Raise ValueError if a forecast does not fit in memory: all frames are kept, twice while concatenating."""
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
    """Compare the frames with the training data; return the differences allowed by `anyway`. Arrays have only times."""
    header = given.header
    if header is not None and _provenance(header)["source"] == SOURCE:
        parameters = _provenance(header)["parameters"]
        if parameters.get("run") == run.path.name:
            differs: str | None = parameters.get("anyway")  # checked when it was written
            return differs
    if given.times is None:
        return None
    if known is None:
        given.messages.append(not_compared(run, start))
        return None
    domain = replace(known, time_steps=time_steps(given.times[:: -given.time_stride][::-1]))
    if header is not None:
        domain = Domain.of(header.layout, header.layout.fields, given.times[:: -given.time_stride][::-1])
    return refuse_other_domain(run, recipe, start, domain, anyway)


def _forecast_times(start: Path, given: Start, layout: Layout, scale: TimeScale) -> np.ndarray:
    """(1 + steps,): times of the last input frame and of the frames after it in a forecast of this layout."""
    if given.times is not None and given.frames > 1:
        return np.concatenate((given.times[-1:], layout.times))
    last = scale.origin + (given.frames - 1) * scale.unit
    if given.times is not None:
        last = given.times[-1]
    else:
        given.messages.append(
            f"{start} has no times: assuming its frames are the first {given.frames} of a trajectory, {scale.unit:g} "
            "apart"
        )
    return last + scale.unit * np.arange(len(layout.times) + 1)


def _header(start: Path) -> Header | None:
    if not has_header(start):
        return None
    with open_data(start) as data:
        return data.header


def _provenance(header: Header) -> Mapping[str, Any]:
    """Source and parameters of the values; NetCDF and Zarr written by this package keep those of the original store."""
    original: dict[str, Any] = header.parameters.get("made", {})
    return {"source": header.source, "parameters": header.parameters} | original


def _write_file(out: Path, frames: np.ndarray, header: Header) -> None:
    match out.suffix:
        case ".h5":
            return write_store(out, header, frames)
        case ".nc":
            return write_netcdf(out, frames, header)
        case ".zarr":
            return write_zarr(out, frames, header)
    with os_errors_as_value_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        with replacing(out) as file:
            if out.suffix == ".npy":
                np.save(file, frames)
            else:
                np.savez(file, fields=frames, names=np.array(header.layout.fields))


def _forecast_layout(given: Start, steps: int, task: Task, known: Domain | None) -> Layout:
    """Coordinates, units and times continued from those of the file; 0, 1, 2, ... for arrays without any.

    Missing units, and the time step of a single frame, are taken from the training data.
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
    target_units = tuple(units.get(name, "1") for name in task.targets)
    return Layout(task.targets, target_units, boundary, coordinates, times, axes)
