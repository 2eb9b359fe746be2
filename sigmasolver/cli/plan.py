"""The command that predicts the cost of a training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from sigmasolver.cli.app import Device, Plugins, Settings, app, device_of, numbers
from sigmasolver.cli.terminal import console, progress, say_threads
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
    from sigmasolver.train.job import memory_of
    from sigmasolver.train.plan import advise, on_grid, predict

    recipe = named_recipe(task, config, model, None, settings or [])
    if recipe is None:
        raise ValueError("Missing recipe: pass a task such as smoke3d, or a file with --config.")
    recipe = recipe if grid is None else on_grid(recipe, numbers(grid, "--grid"))
    world = World(device=device_of(device))
    execution = Execution(world, engine_of(engine, world))
    there = memory_of(world.device)
    room = there if memory is None else 1e9 * memory
    with progress("measuring on smaller grids", None) as move:
        prediction = predict(recipe, execution, room, move)
    say_threads(world)
    _say(prediction, execution, room)
    if check:
        _check(prediction, execution, there)
    if prediction.fits(room):
        return
    console().print("Changes, with memory and training time estimated the same way:", soft_wrap=True)
    with progress("measuring changes", None) as move:
        for words, found in advise(prediction, execution, room, move):
            prediction = found
            typed = " ".join(f"--set {word}" for word in words)
            console().print(f"  {_gigabytes(found.memory):>9}  {_time(found.seconds):>9}  {typed}", soft_wrap=True)
    if prediction.fits(room):
        console().print("The last one fits.")
    else:
        console().print("None of them fits; use a coarser grid with --grid, or a device with more memory.")
    raise typer.Exit(1)


def _say(found: Prediction, execution: Execution, room: float) -> None:
    from sigmasolver.data.layout import shape_text
    from sigmasolver.train.plan import MARGIN

    screen, recipe = console(), found.recipe
    size = f"{recipe.model.name} of width {recipe.model.width} and depth {recipe.model.depth}"
    how = f"batch {recipe.train.batch}, {recipe.train.precision}{', recompute' if recipe.train.recompute else ''}"
    screen.print(
        f"{recipe.task.name} on {shape_text(recipe.task.grid)}: {size}, {how}, "
        f"{execution.engine} on {execution.world.device}",
        soft_wrap=True,
    )
    least = "" if found.known else "at least "
    table = Table("", box=SIMPLE_HEAD, show_header=False)
    table.add_column(justify="right")
    table.add_row("parameters", f"{found.parameters:,}")
    table.add_row("memory of one update", _gigabytes(found.update.memory))
    location = "on the device" if found.resident else "read as needed"
    table.add_row(f"training windows, {location}", least + _gigabytes(found.windows))
    table.add_row("memory needed on the device", _gigabytes(found.memory))
    table.add_row("time of one update", _time(found.update.seconds))
    table.add_row("updates", f"{least}{found.updates:,}")
    table.add_row("training time, without validation", least + _time(found.seconds))
    screen.print(table)
    screen.print(
        f"  measured on {' and '.join(map(shape_text, found.probed))}; memory {_how(execution)}", soft_wrap=True
    )
    verdict = "It fits" if found.fits(room) else "It does NOT fit"
    left = f"{100 * MARGIN:.0f} % are kept free"
    screen.print(f"{verdict}: {_gigabytes(found.memory)} of {_gigabytes(room)} ({left}).", soft_wrap=True)


def _check(prediction: Prediction, execution: Execution, there: float) -> None:
    from sigmasolver.train.dry_run import cost_of

    if prediction.update.memory > there:
        console().print("Not checked: an update on the full grid does not fit on this device.")
        return
    measured: Cost = cost_of(prediction.recipe, execution)
    table = Table("one update", box=SIMPLE_HEAD)
    for column in ("predicted", "measured", "error"):
        table.add_column(column, justify="right")
    said = prediction.update
    for name, one, other, words in (
        ("memory", said.memory, measured.memory, _gigabytes),
        ("time", said.seconds, measured.seconds, _time),
    ):
        table.add_row(name, words(one), words(other), f"{100 * (one / other - 1):+.1f} %")
    console().print(table)


def _how(execution: Execution) -> str:
    if execution.world.device.type == "cuda":
        return "from the GPU's allocator"
    return "counted from live tensors"


def _gigabytes(count: float) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def _time(seconds: float) -> str:
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min"), (1, "s")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{1e3 * seconds:.1f} ms"
