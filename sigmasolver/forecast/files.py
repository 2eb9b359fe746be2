"""Forecasts from files to files: read input frames from any supported data file, write predicted frames as a store,
NetCDF, Zarr or plain arrays."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sigmasolver.data.domain import Domain, time_steps
from sigmasolver.data.formats import ReadOptions, describes_itself, guess_format, opened
from sigmasolver.data.formats.history import history_of, open_histories
from sigmasolver.data.formats.metadata import FORECAST
from sigmasolver.data.formats.netcdf_zarr_write import require_xarray, write_netcdf, write_zarr
from sigmasolver.data.formats.user_arrays import SUFFIXES
from sigmasolver.data.header import Header
from sigmasolver.data.layout import Layout, transpose_axes
from sigmasolver.data.mask import check_mask
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
    symmetries_of_run,
)
from sigmasolver.forecast.forecaster import Forecaster
from sigmasolver.forecast.replay import Replay
from sigmasolver.forecast.symmetric import symmetric_rollout
from sigmasolver.recipes import Recipe
from sigmasolver.runs import Run, read_facts
from sigmasolver.runs.files import os_errors_as_value_errors, replacing
from sigmasolver.symmetries import SymmetryGroup, refuse_unsuitable
from sigmasolver.tasks import Task

__all__ = ["check_name", "forecast_file", "spread_message", "write_forecast"]

OUTPUT_SUFFIXES = (".h5", ".npy", ".npz", ".nc", ".zarr")


@dataclass(frozen=True)
class Start:
    """Frames to forecast from, with the strides of the run's data applied."""

    history: torch.Tensor
    """`(count, T_in, *grid, fields)`."""
    header: Header
    """Header of the data file; what it lacks is taken from the training data."""
    missing: frozenset[str]
    """The parts of the layout that the file lacks, see `Reader.missing`."""
    adopted: tuple[str, ...]
    """Those taken from the training data, unless they equal the defaults, in words."""
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
    symmetries: int = 1,
    spread: Path | None = None,
) -> list[str]:
    """Forecast `steps` frames after the frames in `start` with the run at `path`; return messages for the user.

    With several `symmetries` the forecast is their mean, and `spread` is a file for their deviation at each point.
    Frames that differ from the training data in units, box, boundaries or time step are rejected; with `anyway` they
    are forecast, and the output store records the differences.
    """
    check_name(out)
    if spread is not None:
        check_name(spread)
    for name, number in (("steps", steps), ("symmetries", symmetries)):
        if number < 1:
            raise ValueError(f"The number of {name} must be at least 1, got {number}.")
    if spread is not None and (symmetries == 1 or spread == out):
        raise ValueError(
            "A spread needs --symmetries with at least 2." if symmetries == 1 else f"{out} cannot be both outputs."
        )
    run = Run(path)
    recipe = load_recipe(run)
    task = recipe.task
    group = symmetries_of_run(run, recipe) if symmetries > 1 else None
    forecaster = Replay(load(path, device), precision)
    known = domain_of(run)
    given = _read_start(run, recipe, start, known, forecaster.time_scale)
    _check_memory(steps, given, len(task.targets))
    differs = _check_domain(run, recipe, known, start, given, anyway)
    layout, times = _forecast_layout(given, steps, task, known, forecaster.time_scale), None
    if forecaster.time_scale is not None:
        times = np.concatenate((given.header.layout.times[-1:], layout.times))
    messages = given.messages
    if given.adopted and out.suffix != ".npy":
        messages.append(f"{start} has no {', '.join(given.adopted)}: taken from the training data")
    if task.mask is not None:
        solid_values = "zero" if task.steady else "copied from the last input frame"
        messages.append(f"where {task.mask} is 1, the forecast is {solid_values}")
    if group is not None:
        refuse_unsuitable(group, task, given.header, given.space_stride)
        group.on(given.history.shape[2:-1]).first(symmetries)
    symmetric = None if group is None else (group, symmetries)
    predicted, deviation, notes = _forecast_histories(forecaster, given.history, steps, times, symmetric, device, tick)
    messages += notes
    parameters = {"run": run.path.name, "step": read_facts(run.weights)["step"], "start": start.name}
    if precision != "float32":
        parameters["precision"] = precision
    if differs is not None:
        parameters["anyway"] = differs
    if "attributes" in given.header.parameters:
        parameters["attributes"] = given.header.parameters["attributes"]
    if group is not None:
        parameters["symmetries"] = symmetries
    messages.append(write_forecast(out, predicted, layout, parameters))
    if spread is not None:
        parameters["spread"] = f"deviation over {symmetries} symmetries"
        messages.append(write_forecast(spread, deviation, layout, parameters))
    return messages


def _forecast_histories(
    forecaster: Forecaster,
    histories: torch.Tensor,
    steps: int,
    times: np.ndarray | None,
    symmetric: tuple[SymmetryGroup, int] | None,
    device: torch.device,
    tick: Callable[[int, int], None] | None,
) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Frames of all forecasts, their deviation over symmetries (empty without), and messages about them."""
    frames, deviations, ratios, messages = [], [], [], []
    for number, sample in enumerate(histories, start=1):
        history, time = sample[None].to(device), None if times is None else times[None]
        if symmetric is None:
            result = forecaster.rollout(history, steps, time=time)
        else:
            average = symmetric_rollout(forecaster, history, steps, *symmetric, time=time)
            result = average.mean
            deviations.append(average.spread.cpu().numpy())
            ratios.append(average.relative_spread().cpu())
        frames.append(result.frames.cpu().numpy())
        if result.stopped is not None:
            messages.append(f"trajectory {number - 1}: {result}")
        if tick is not None:
            tick(number, len(histories))
    if symmetric is not None:
        messages.append(spread_message(torch.cat(ratios), symmetric[1]))
    return np.concatenate(frames), np.concatenate(deviations) if deviations else np.empty(0), messages


def spread_message(ratios: torch.Tensor, symmetries: int) -> str:
    """What the relative spread (trajectories, leads, fields) over symmetries says about the error."""
    first, last = (100 * float(ratios[:, lead].mean()) for lead in (0, -1))
    if not math.isfinite(last):
        return f"mean over {symmetries} symmetries; some of the forecasts are not finite"
    leads = f"{first:.3g} %" if ratios.shape[1] == 1 else f"{first:.3g} % at lead 1, {last:.3g} % at the last lead"
    return (
        f"mean over {symmetries} symmetries; the forecasts deviate from it by {leads} of their norm: on average, the "
        "error of one of them is at least that"
    )


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
    _write_file(out, predicted, Header(layout, FORECAST, parameters))
    shape = " × ".join(map(str, predicted.shape))
    return f"{out}: {shape} (trajectories, frames, grid, fields {', '.join(layout.fields)})"


def _read_start(run: Run, recipe: Recipe, start: Path, known: Domain | None, scale: TimeScale | None) -> Start:
    """Read the input frames from any format of `train --data`; a file of arrays may also hold a single history."""
    task = recipe.task
    options, kind, facts = ReadOptions(mask=task.mask), None, dict[str, Any]()
    if (run.path / "data.json").exists():
        (options, kind), facts = load_read_options(run, recipe, others=True), run.read_json("data.json")
    if not start.exists():
        raise ValueError(f"{start} not found.")
    whole = True
    if _holds_arrays(start, kind, facts.get("source")):
        # Options for files of another kind do not apply to arrays.
        options = options if kind == "arrays" else ReadOptions(mask=options.mask)
        reader = open_histories(start, task.inputs, len(task.grid), task.steady, options, task.targets)
        whole = reader.header.shape[0] == facts.get("frames")
    else:
        reader = _open_start(start, options, kind)
    with reader:
        return _select_frames(run, start, task, reader, whole, known, scale)


def _holds_arrays(start: Path, kind: str | None, source: object) -> bool:
    """Whether this is one file of a user's own arrays, in a run with data of this kind and source."""
    if not start.is_file() or start.suffix.lower() not in SUFFIXES or is_store(start):
        return False
    return kind == "arrays" or (not describes_itself(start) and guess_format(start).name != source)


def _open_start(start: Path, options: ReadOptions, kind: str | None) -> Reader:
    """Open files like the data of the run, but a forecast without its options: it states its own metadata."""
    try:
        reader = opened(start, options, kind)
        if not _is_forecast(reader):
            return reader
        reader.close()
        return opened(start, ReadOptions())
    except ValueError:
        with suppress(ValueError):  # the options may not suit a forecast
            reader = opened(start, ReadOptions())
            if _is_forecast(reader):
                return reader
        raise


def _is_forecast(reader: Reader) -> bool:
    return bool(_provenance(reader.header)["source"] == FORECAST)


def _select_frames(
    run: Run,
    start: Path,
    task: Task,
    reader: Reader,
    whole: bool,
    known: Domain | None,
    scale: TimeScale | None,
) -> Start:
    """The newest frames of the file, with the strides in time and space of the training data.

    `whole`: whether the file holds whole trajectories like the training data. Only then, their frames are those of the
    simulation even without times. The space stride is applied if that gives the run's grid.
    """
    values, header, missing = history_of(reader, start, task.inputs, len(task.grid)), reader.header, reader.missing
    if known is not None:
        if "axes" in missing:
            header = replace(header, layout=replace(header.layout, axes=known.axes))
        values, header = _reorder_axes(run, values, header, known)
    frames, grid = values.shape[1], values.shape[2:-1]
    times = None if "times" in missing else header.layout.times
    forecast = _is_forecast(reader)  # its frames already have the stride
    time_stride = 1 if forecast else _time_stride(start, task, times, frames, whole, known)
    needed = (task.history - 1) * time_stride + 1
    if frames < needed:
        raise ValueError(f"{start} has {frames} frames, but a forecast needs {needed}.")
    messages = [f"{start} has {frames} frames; the last {needed} were used"] if frames > needed else []
    if time_stride > 1:
        messages.append(f"1 of {time_stride} frames was used, as in training")
    elif task.time_stride > 1 and times is None:
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
    if times is None and scale is not None:
        messages.append(
            f"{start} has no times: assuming its frames are the first {frames} of a trajectory, "
            f"{scale.unit / time_stride:g} apart"
        )
    layout, adopted = _completed(header.layout, missing, task, known, scale, time_stride)
    space = (slice(None, None, space_stride),) * len(grid)
    history = torch.tensor(values[(slice(None), slice(frames - needed, None, time_stride), *space)])
    if task.mask is not None:
        for number, sample in enumerate(history):
            check_mask(sample, task.inputs.index(task.mask), task.mask, number)
    return Start(history, replace(header, layout=layout), missing, adopted, time_stride, space_stride, messages)


def _time_stride(
    start: Path, task: Task, times: np.ndarray | None, frames: int, whole: bool, known: Domain | None
) -> int:
    """The stride in time that gives the frames of training.

    It follows from the times of the file, if they fit; else a history with exactly the frames of the model has none,
    and other data have that of the run. Arrays without times may be either, as a forecast has only frames of the model,
    so they need one of these two lengths.
    """
    steps = () if times is None else time_steps(times)
    if steps and known is not None:
        for stride in (task.time_stride, 1):
            if known.has_step(stride * sum(steps) / 2):
                return stride
    if task.time_stride == 1 or frames <= task.history:
        return 1
    if whole or times is not None:
        return task.time_stride
    raise ValueError(
        f"{start} has {frames} frames without times, so it is unknown whether all of them or one of {task.time_stride} "
        f"are frames of the model; save it as an .npz with `times`, or give exactly the last {task.history} frames of "
        "the model."
    )


def _completed(
    layout: Layout, missing: frozenset[str], task: Task, known: Domain | None, scale: TimeScale | None, time_stride: int
) -> tuple[Layout, tuple[str, ...]]:
    """The layout with its missing parts taken from the training data, and which of them differ from the defaults.

    Coordinates are taken only on the grid of the training data, with or without its stride. Times start with the
    training data for a model that knows the time, else at 0.
    """
    complete = layout
    if known is not None:
        units = dict(zip(known.fields, known.units, strict=True))
        if "units" in missing:
            complete = replace(complete, units=tuple(units.get(name, "1") for name in layout.fields))
        if "boundary" in missing:
            complete = replace(complete, boundary=known.boundary)
        grid, strides = tuple(map(len, layout.coordinates)), {known.points: 1, task.grid: task.space_stride}
        if grid in strides:
            coordinates = [
                known.points_of(axis)[:: strides[grid]] if name in missing else values
                for axis, (name, values) in enumerate(zip(layout.axis_names, layout.coordinates, strict=True))
            ]
            complete = replace(complete, coordinates=tuple(coordinates))
    if "times" in missing:
        origin = 0.0 if scale is None else scale.origin
        times = origin + _frame_step(known, scale) / time_stride * np.arange(len(layout.times))
        complete = replace(complete, times=times)
    even = " (evenly spaced from 0)" if known is not None and not known.coordinates else ""
    parts = {
        "units": layout.units != complete.units,
        "boundary": layout.boundary != complete.boundary,
        f"coordinates{even}": any(map(np.any, map(np.subtract, layout.coordinates, complete.coordinates))),
        "time step": scale is None and not np.array_equal(layout.times, complete.times),
    }
    return complete, tuple(name for name, differs in parts.items() if differs)


def _frame_step(known: Domain | None, scale: TimeScale | None) -> float:
    """The time between two frames of the model; 1 if it is not recorded."""
    step = None if known is None else known.step
    return scale.unit if scale is not None else 1.0 if step is None else step


def _reorder_axes(run: Run, values: np.ndarray, header: Header, known: Domain) -> tuple[np.ndarray, Header]:
    """Transpose to the axis order of the run's data: NetCDF and Zarr are read as x, y, z, whatever the run uses."""
    names, expected = header.layout.axis_names, known.axis_names
    origin = _provenance(header)
    unnamed = not header.layout.axes and "axes" not in header.parameters.get("made", {})
    if names == expected or sorted(names) != sorted(expected):
        return values, header
    if unnamed and origin["source"] == FORECAST and origin["parameters"].get("run") == run.path.name:
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
    """Compare what the file specifies with the training data; return the differences allowed by `anyway`."""
    header, layout = given.header, given.header.layout
    if _provenance(header)["source"] == FORECAST:
        parameters = _provenance(header)["parameters"]
        if parameters.get("run") == run.path.name:
            differs: str | None = parameters.get("anyway")  # checked when it was written
            return differs
    if given.missing.issuperset(("units", "boundary", "times", *layout.axis_names)):
        return None
    if known is None:
        given.messages.append(not_compared(run, start))
        return None
    times = layout.times[:: -given.time_stride][::-1] if "times" not in given.missing else layout.times[:1]
    domain = Domain.of(layout, layout.fields, times)
    if len(domain.points) == len(known.points):
        trained = [
            name in given.missing or _has_points_of(known, axis, layout.coordinates[axis], recipe.task)
            for axis, name in enumerate(domain.axis_names)
        ]
        lengths = [known.lengths[axis] if same else domain.lengths[axis] for axis, same in enumerate(trained)]
        points = [known.points[axis] if same else domain.points[axis] for axis, same in enumerate(trained)]
        domain = replace(domain, lengths=tuple(lengths), points=tuple(points))
    return refuse_other_domain(run, recipe, start, domain, anyway)


def _has_points_of(known: Domain, axis: int, points: np.ndarray, task: Task) -> bool:
    """Whether these are the points of an axis of the training data, with or without the stride: of data without
    coordinates, a forecast has the indices 0, 2, 4, ...."""
    return any(np.array_equal(points, known.points_of(axis)[::stride]) for stride in (1, task.space_stride))


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
                np.savez(file, fields=frames, **_metadata(header))


def _metadata(header: Header) -> dict[str, Any]:
    """The metadata of an .npz, under the names that are read from a user's own arrays."""
    layout = header.layout
    words = {"names": layout.fields, "units": layout.units, "boundary": layout.boundary, "axes": layout.axis_names}
    times = {"times" if name == "t" else name: values for name, values in header.axes().items()}
    return {name: np.array(values) for name, values in words.items()} | times | {"source": np.array([header.source])}


def _forecast_layout(given: Start, steps: int, task: Task, known: Domain | None, scale: TimeScale | None) -> Layout:
    """Coordinates, units and times continued from those of the file.

    Units of fields that the file lacks, and the time step of a single frame, are taken from the training data.
    """
    layout = given.header.layout
    units = {} if known is None else dict(zip(known.fields, known.units, strict=True))
    units |= zip(layout.fields, layout.units, strict=True)
    step = _frame_step(known, scale)
    if len(layout.times) > 1:
        step = given.time_stride * (layout.times[-1] - layout.times[-2])
    times = layout.times[-1] + step * np.arange(1, steps + 1, dtype=np.float64)
    coordinates = tuple(axis[:: given.space_stride] for axis in layout.coordinates)
    target_units = tuple(units.get(name, "1") for name in task.targets)
    return Layout(task.targets, target_units, layout.boundary, coordinates, times, layout.axes)
