"""The command that estimates the cost of a training run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from sigmasolver.cli.app import Device, Plugins, Settings, app, device_of, numbers
from sigmasolver.cli.terminal import console, print_threads, progress
from sigmasolver.cli.train import Config, engine_of, named_recipe

if TYPE_CHECKING:
    from sigmasolver.train.dry_run import Cost
    from sigmasolver.train.engine import Execution
    from sigmasolver.train.plan import Prediction

__all__ = ["plan"]


@app.command()
def plan(
    task: Annotated[str | None, typer.Argument(help="A task with a recipe, such as smoke3d.")] = None,
    model: Annotated[str | None, typer.Option(help="Model name, as for `train`.")] = None,
    grid: Annotated[
        str | None, typer.Option(help="Grid points per axis, such as 141 or 64,128; default: the task's grid.")
    ] = None,
    settings: Settings = None,
    config: Config = None,
    plugin: Plugins = None,
    device: Device = "auto",
    engine: Annotated[str, typer.Option(help="auto, eager, compiled, graph or compiled-graph.")] = "auto",
    memory: Annotated[float | None, typer.Option(help="Memory limit in GB; default: the memory of the device.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Also run one update on the full grid and compare.")] = False,
) -> None:
    """Estimate training memory and time from updates on smaller grids; exit code 1 if the training does not fit."""
    from sigmasolver.runtime.parallel import World
    from sigmasolver.train.engine import Execution
    from sigmasolver.train.job import available_memory
    from sigmasolver.train.plan import advise, on_grid, predict

    recipe = named_recipe(task, config, model, None, settings or [])
    if recipe is None:
        raise ValueError("Missing recipe: pass a task such as smoke3d, or a file with --config.")
    recipe = recipe if grid is None else on_grid(recipe, numbers(grid, "--grid"))
    world = World(device=device_of(device))
    execution = Execution(world, engine_of(engine, world))
    available = available_memory(world.device)
    limit = available if memory is None else 1e9 * memory
    with progress("measuring on smaller grids", None) as update:
        prediction = predict(recipe, execution, limit, update)
    print_threads(world)
    _print_prediction(prediction, execution, limit)
    if check:
        _check_prediction(prediction, execution, available)
    if prediction.fits(limit):
        return
    console().print("Changes, with memory and training time estimated the same way:", soft_wrap=True)
    with progress("measuring changes", None) as update:
        for overrides, candidate in advise(prediction, execution, limit, update):
            prediction = candidate
            options = " ".join(f"--set {override}" for override in overrides)
            console().print(
                f"  {_memory_text(candidate.memory):>9}  {_time_text(candidate.seconds):>9}  {options}", soft_wrap=True
            )
    if prediction.fits(limit):
        console().print("The last one fits.")
    else:
        console().print("None of them fits; use a coarser grid with --grid, or a device with more memory.")
    raise typer.Exit(1)


def _print_prediction(prediction: Prediction, execution: Execution, limit: float) -> None:
    from sigmasolver.data.layout import shape_text
    from sigmasolver.train.plan import MARGIN

    screen, recipe = console(), prediction.recipe
    size = f"{recipe.model.name} of width {recipe.model.width} and depth {recipe.model.depth}"
    setup = f"batch {recipe.train.batch}, {recipe.train.precision}{', recompute' if recipe.train.recompute else ''}"
    screen.print(
        f"{recipe.task.name} on {shape_text(recipe.task.grid)}: {size}, {setup}, "
        f"{execution.engine} on {execution.world.device}",
        soft_wrap=True,
    )
    at_least = "" if prediction.known else "at least "
    table = Table("", box=SIMPLE_HEAD, show_header=False)
    table.add_column(justify="right")
    table.add_row("parameters", f"{prediction.parameters:,}")
    table.add_row("memory of one update", _memory_text(prediction.update.memory))
    location = "on the device" if prediction.resident else "read as needed"
    table.add_row(f"training windows, {location}", at_least + _memory_text(prediction.windows))
    table.add_row("memory needed on the device", _memory_text(prediction.memory))
    table.add_row("time of one update", _time_text(prediction.update.seconds))
    table.add_row("updates", f"{at_least}{prediction.updates:,}")
    table.add_row("training time, without validation", at_least + _time_text(prediction.seconds))
    screen.print(table)
    screen.print(
        f"  measured on {' and '.join(map(shape_text, prediction.probed))}; memory {_memory_source(execution)}",
        soft_wrap=True,
    )
    verdict = "It fits" if prediction.fits(limit) else "It does NOT fit"
    margin = f"{100 * MARGIN:.0f} % are kept free"
    screen.print(f"{verdict}: {_memory_text(prediction.memory)} of {_memory_text(limit)} ({margin}).", soft_wrap=True)


def _check_prediction(prediction: Prediction, execution: Execution, available: float) -> None:
    from sigmasolver.train.dry_run import estimate_cost

    if prediction.update.memory > available:
        console().print("Not checked: an update on the full grid does not fit on this device.")
        return
    measured: Cost = estimate_cost(prediction.recipe, execution)
    table = Table("one update", box=SIMPLE_HEAD)
    for column in ("predicted", "measured", "error"):
        table.add_column(column, justify="right")
    predicted = prediction.update
    for name, estimate, actual, format_value in (
        ("memory", predicted.memory, measured.memory, _memory_text),
        ("time", predicted.seconds, measured.seconds, _time_text),
    ):
        table.add_row(name, format_value(estimate), format_value(actual), f"{100 * (estimate / actual - 1):+.1f} %")
    console().print(table)


def _memory_source(execution: Execution) -> str:
    if execution.world.device.type == "cuda":
        return "from the GPU's allocator"
    return "counted from live tensors"


def _memory_text(count: float) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def _time_text(seconds: float) -> str:
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min"), (1, "s")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{1e3 * seconds:.1f} ms"
