"""The command that trains the rows of a suite."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sigmasolver.cli.app import Device, Plugins, Settings, app, device_of
from sigmasolver.cli.terminal import console, progress, training
from sigmasolver.cli.train import Minutes, engine_of

if TYPE_CHECKING:
    from sigmasolver.experiments.queue import Deadline
    from sigmasolver.recipes import Recipe
    from sigmasolver.runs import Run
    from sigmasolver.train.engine import Execution

__all__ = ["suite"]


@app.command()
def suite(
    name: Annotated[
        str,
        typer.Argument(
            help="main, counterparts, counterparts-matched, ablations, slice-updates, scaling, efficiency, "
            "comparison, ledger or factors."
        ),
    ],
    data: Annotated[
        Path, typer.Option(help="A folder with one store for each task (ns2d.h5) or public data as downloaded (fsi/).")
    ] = Path("data"),
    data_seed: Annotated[int | None, typer.Option(help="Simulate missing stores with this seed.")] = None,
    out: Annotated[Path, typer.Option(help="The folder that holds the runs.")] = Path("runs"),
    only: Annotated[
        list[str] | None, typer.Option(help="Only runs whose name matches, such as 'ns2d-*-42'; repeatable.")
    ] = None,
    minutes: Minutes = None,
    show: Annotated[bool, typer.Option("--list", help="List the runs and their progress without training.")] = False,
    settings: Settings = None,
    plugin: Plugins = None,
    device: Device = "auto",
    engine: Annotated[str, typer.Option(help="auto, eager, compiled, graph or compiled-graph.")] = "auto",
) -> None:
    """Train and evaluate the rows of a suite in order; the same command continues it.

    Most suites are tables of the paper; ledger holds our results at its budgets, factors varies one setting of KF2D,
    efficiency has the workloads that `measure` times.
    """
    from fnmatch import fnmatch

    from sigmasolver.experiments.queue import Deadline, is_done
    from sigmasolver.parallel import join
    from sigmasolver.recipes import changed, suite_of
    from sigmasolver.runs import Run
    from sigmasolver.train.engine import Execution

    deadline, screen = Deadline(minutes), console()
    rows = suite_of(name)
    chosen = [key for key in rows if only is None or any(fnmatch(key, one) for one in only)]
    if not chosen:
        raise ValueError(f'No run of the suite {name} matches "{", ".join(only or ())}"; list them with --list.')
    if show:
        for key in chosen:
            screen.print(f"{key:45} {_progress_of(Run(out / key), changed(rows[key], settings or []))}")
        return
    with join(device_of(device)) as world:
        execution = Execution(world, engine_of(engine, world))
        for key in chosen:
            # All rows of a task share one store, whichever of them are trained now.
            task = rows[key].task.name
            siblings = {k: changed(one, settings or []) for k, one in rows.items() if one.task.name == task}
            if not is_done(Run(out / key), siblings[key]):
                if not _finish_row(key, siblings, data, data_seed, out, execution, deadline):
                    return
            elif world.first:
                screen.print(f"{key}: already finished")


def _progress_of(run: Run, recipe: Recipe) -> str:
    from sigmasolver.experiments.queue import fraction_done, is_done

    if run.finished:
        return "finished" if is_done(run, recipe) else "trained, not evaluated"
    done = fraction_done(run)
    return f"{100 * done:.1f} %" if done else "pending"


def _finish_row(
    key: str,
    siblings: dict[str, Recipe],
    data: Path,
    data_seed: int | None,
    out: Path,
    execution: Execution,
    deadline: Deadline,
) -> bool:
    """Simulate, train and evaluate one row; False if time ran out."""
    from sigmasolver.experiments.queue import OutOfTimeError, ensure_store, fraction_done, run_row
    from sigmasolver.runs import Run

    recipe, run, screen = siblings[key], Run(out / key), console()
    try:
        with progress(f"simulating {recipe.task.name}", None) as move:

            def simulated(done: int, total: int, part: float) -> None:
                deadline.check("simulating")
                move(done, total)

            store = ensure_store(recipe, data, siblings.values(), data_seed, execution, simulated)
        if execution.world.first:
            screen.print(f"{key}: training from {100 * fraction_done(run):.1f} %")
        with training(execution.world) as watch:
            run_row(recipe, store, run, execution, deadline, watch)
    except OutOfTimeError as stopped:
        if execution.world.first:
            trained = f"{100 * fraction_done(run):.1f} % trained"
            screen.print(f"{key}: stopped by --minutes while {stopped} ({trained}); the same command resumes")
        return False
    return True
