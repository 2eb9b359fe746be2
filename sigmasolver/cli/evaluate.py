"""The command that measures the errors of runs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sigmasolver.cli.app import Cohort, Device, OldSplit, Plugins, Precision, Split, Symmetries, app, device_of, numbers
from sigmasolver.cli.terminal import console, print_scores, progress

if TYPE_CHECKING:
    from sigmasolver.runs import Run

__all__ = [
    "Anyway",
    "OtherData",
    "Runs",
    "evaluate",
    "runs_of",
    "warn_not_compared",
    "warn_other_code",
    "warn_unfinished",
]

Runs = Annotated[list[Path], typer.Argument(help="Run folders, or names of pretrained models.")]
OtherData = Annotated[
    Path | None,
    typer.Option(
        help="Where the run's data are now, or other data, as for `train --data`, all of which is used for testing."
    ),
]

Anyway = Annotated[
    bool,
    typer.Option(
        "--anyway", help="Continue even if units, domain size, boundaries or time step differ from the training data."
    ),
]


@app.command()
def evaluate(
    runs: Runs,
    data: OtherData = None,
    horizon: Annotated[int | None, typer.Option(help="Frames to forecast, also beyond the training horizon.")] = None,
    grid: Annotated[
        str | None, typer.Option(help="Grid points per axis, such as 141 or 64,128; default: the training grid.")
    ] = None,
    windows: Annotated[int | None, typer.Option(help="Number of evenly spaced windows; default: all.")] = None,
    protocol: Annotated[str, typer.Option(help="Rollout protocol: free or teacher-forced.")] = "free",
    split: Split = "test",
    part: OldSplit = None,
    batch: Annotated[int, typer.Option(help="Batch size, in windows.")] = 8,
    precision: Precision = "float32",
    cohort: Cohort = None,
    symmetries: Symmetries = 1,
    anyway: Anyway = False,
    plugin: Plugins = None,
    device: Device = "auto",
) -> None:
    """Evaluate runs on unseen data, next to a trivial baseline; writes records.jsonl."""
    from sigmasolver.evaluate import Request, evaluate_run
    from sigmasolver.runtime.parallel import join

    points = None if grid is None else numbers(grid, "--grid")
    request = Request(horizon, points, windows, protocol, part or split, batch, precision, cohort, symmetries)
    rows = []
    with join(device_of(device)) as world:
        folders = runs_of(runs) if world.first else []
        world.wait()  # until pretrained models are copied
        for run in folders or runs_of(runs, announce=False):
            warn_unfinished(run)
            warn_other_code(run)
            if data is not None:
                warn_not_compared(run, data)
            with progress(f"evaluating {run.path.name}", None) if world.first else nullcontext() as update:
                rows += evaluate_run(run, request, data, world, update, anyway)
        if world.first:
            for name in dict.fromkeys(row["task"] for row in rows):
                print_scores(console(), [row for row in rows if row["task"] == name])


def runs_of(arguments: Sequence[Path], announce: bool = True) -> list[Run]:
    """The runs that are meant, without duplicates; pretrained models are copied to run folders."""
    from sigmasolver.model_cards.share import as_run

    runs: dict[Path, Run] = {}
    for path in arguments:
        run = as_run(path)
        if announce and run.path not in {path, *runs}:
            console(stderr=True).print(f"the results of the pretrained {path} are stored in {run.path}", soft_wrap=True)
        runs.setdefault(run.path, run)
    return list(runs.values())


def warn_unfinished(run: Run) -> None:
    from sigmasolver.runs import read_facts

    if run.weights.exists() and run.resume.exists() and not run.finished:
        step, steps = read_facts(run.weights)["step"], read_facts(run.resume)["steps"]
        message = f"{run.path} is not finished: using its weights at step {step} of {steps}"
        console(stderr=True).print(message, soft_wrap=True)


def warn_other_code(run: Run) -> None:
    """Warn if a plugin has changed since training, or a name now refers to other code."""
    from sigmasolver.forecast.checkpoint import load_recipe, other_origins

    for message in other_origins(run, load_recipe(run)):
        console(stderr=True).print(message, soft_wrap=True)


def warn_not_compared(run: Run, data: Path) -> None:
    from sigmasolver.forecast.checkpoint import domain_of, not_compared

    if domain_of(run) is None:
        console(stderr=True).print(not_compared(run, data), soft_wrap=True)
