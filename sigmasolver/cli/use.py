"""Commands that use what was trained, and those that show what there is."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from sigmasolver.cli.app import Cohort, Device, Precision, app, device_of, numbers
from sigmasolver.terminal import console, print_scores, progress

if TYPE_CHECKING:
    from sigmasolver.runs import Run

__all__ = ["demo", "evaluate", "forecast", "models"]

Anyway = Annotated[
    bool,
    typer.Option("--anyway", help="Also where units, box, boundaries or time step are not those of the training."),
]


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Where data, runs and the page go.")] = Path("demo"),
) -> None:
    """Simulate a small turbulent flow, train three models on it, and compare their forecasts on a page."""
    from sigmasolver.demo import run

    run(console(), out)


@app.command()
def evaluate(
    runs: Annotated[list[Path], typer.Argument(help="Run folders.")],
    data: Annotated[Path | None, typer.Option(help="Another store; all its trajectories are the test.")] = None,
    horizon: Annotated[int | None, typer.Option(help="Frames to forecast, also beyond the training horizon.")] = None,
    grid: Annotated[str | None, typer.Option(help="Points per axis, such as 141 or 64,128.")] = None,
    windows: Annotated[int | None, typer.Option(help="How many windows, evenly spread; none: all.")] = None,
    protocol: Annotated[str, typer.Option(help="free or teacher-forced.")] = "free",
    part: Annotated[str, typer.Option(help="train, validation or test.")] = "test",
    batch: Annotated[int, typer.Option(help="Windows at a time.")] = 8,
    precision: Precision = "float32",
    cohort: Cohort = None,
    anyway: Anyway = False,
    device: Device = "auto",
) -> None:
    """Measure runs on data they have not seen, beside a forecast that has learned nothing; writes records.jsonl."""
    from sigmasolver.evaluate import Request, evaluate_run
    from sigmasolver.parallel import join
    from sigmasolver.runs import Run

    points = None if grid is None else numbers(grid, "--grid")
    request = Request(horizon, points, windows, protocol, part, batch, precision, cohort)
    rows = []
    with join(device_of(device)) as world:
        for path in dict.fromkeys(runs):
            _say_unfinished(Run(path))
            if data is not None:
                _say_not_compared(Run(path), data)
            with progress(f"evaluating {path.name}", None) if world.first else nullcontext() as move:
                rows += evaluate_run(Run(path), request, data, world, move, anyway)
        if world.first:
            for name in dict.fromkeys(row["task"] for row in rows):
                print_scores(console(), [row for row in rows if row["task"] == name])


@app.command()
def forecast(
    run: Annotated[Path, typer.Argument(help="The folder of a trained run.")],
    start: Annotated[Path, typer.Option("--input", help="The given frames: .npy, .npz, .h5 or a store.")],
    steps: Annotated[int, typer.Option(help="Frames to forecast.")],
    out: Annotated[Path, typer.Option(help="Where the forecast goes: .h5 (a store), .npy or .npz.")],
    precision: Precision = "float32",
    anyway: Anyway = False,
    device: Device = "auto",
) -> None:
    """Forecast from frames of your own."""
    from sigmasolver.deliver import forecast_file
    from sigmasolver.runs import Run

    _say_unfinished(Run(run))
    with progress("forecasting", None) as move:
        said = forecast_file(run, start, steps, out, device_of(device), move, precision, anyway)
    for line in said:
        console().print(line, soft_wrap=True)


@app.command()
def models() -> None:
    """List the family and the baselines with their parameter counts at the size of the Darcy task."""
    from sigmasolver.models import SolverConfig, count_parameters, list_models, matched_width

    config = SolverConfig((85, 85), 1, 1)
    table = Table("model", box=SIMPLE_HEAD)
    for column in ("parameters", "MB", "width for equal size"):
        table.add_column(column, justify="right")
    for name in list_models():
        parameters = count_parameters(name, config)
        table.add_row(name, f"{parameters:,}", f"{4 * parameters / 1e6:.2f}", str(matched_width(name, config)))
    console().print(table)


def _say_unfinished(run: Run) -> None:
    from sigmasolver.runs import read_facts

    if run.weights.exists() and run.resume.exists() and not run.finished:
        at, steps = read_facts(run.weights)["step"], read_facts(run.resume)["steps"]
        said = f"{run.path} is not finished: these are its weights of step {at} of {steps}"
        console(stderr=True).print(said, soft_wrap=True)


def _say_not_compared(run: Run, data: Path) -> None:
    from sigmasolver.trained import domain_of, not_compared

    if domain_of(run) is None:
        console(stderr=True).print(not_compared(run, data), soft_wrap=True)
