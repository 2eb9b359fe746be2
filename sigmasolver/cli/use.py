"""Commands that use what was trained, and those that show what there is."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from sigmasolver.cli.app import Cohort, Device, Precision, app, device_of, numbers
from sigmasolver.terminal import console, print_scores, progress

if TYPE_CHECKING:
    import torch

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
    run: Annotated[str, typer.Argument(help="The folder of a trained run, or the name of a pretrained model.")],
    start: Annotated[
        Path | None,
        typer.Option("--input", help="The given frames: .npy, .npz, .h5 or a store; none: a pretrained model's own."),
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Frames to forecast; none: the task's horizon.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Where the forecast goes: .h5 (a store), .npy or .npz; needed with --input.")
    ] = None,
    precision: Precision = "float32",
    anyway: Anyway = False,
    device: Device = "auto",
) -> None:
    """Forecast from frames of your own, or score a pretrained model on unseen windows that come with it."""
    from sigmasolver.deliver import forecast_file
    from sigmasolver.pretrained import is_pretrained, resolve
    from sigmasolver.runs import Run
    from sigmasolver.trained import recipe_in

    path = resolve(run)
    if start is None:
        if not is_pretrained(path):
            raise ValueError(f"Name the frames to forecast from with --input; {path} brings none of its own.")
        if steps is not None:
            raise ValueError("--steps goes with --input; the windows of a pretrained model have a length of their own.")
        _forecast_shipped(path.name, out, precision, device_of(device))
        return
    if out is None:
        raise ValueError("Say with --out where the forecast shall be written.")
    _say_unfinished(Run(path))
    steps = recipe_in(Run(path)).task.horizon if steps is None else steps
    with progress("forecasting", None) as move:
        said = forecast_file(path, start, steps, out, device_of(device), move, precision, anyway)
    for line in said:
        console().print(line, soft_wrap=True)


def _forecast_shipped(name: str, out: Path | None, precision: str, device: torch.device) -> None:
    from sigmasolver.deliver import check_name
    from sigmasolver.model_cards.score import demonstrate

    if out is not None:
        check_name(out)
    with progress(f"forecasting {name}", None) as move:
        shown = demonstrate(name, device, precision, out, move)
    card, screen = shown.card, console()
    grid, windows, test = " × ".join(map(str, card["test"]["grid"])), card["windows"], card["test"]
    screen.print(
        f"{name}: {card['model']}, {card['parameters']:,} parameters, trained for {_budget(card)}\n"
        f"{windows['count']} unseen cases on {grid} (simulate {card['task']} --seed {windows['seed']})",
        soft_wrap=True,
    )
    table = Table("", box=SIMPLE_HEAD)
    for row in shown.scores:
        table.add_column(f"{row['field']}, {ERRORS[row['metric']]}", justify="right")
    table.add_column("a case takes", justify="right")
    model = [_percent(row["value"]) for row in shown.scores]
    table.add_row(f"{card['model']}, {grid}", *model, _time(shown.seconds))
    table.add_row(test["yardstick"], *(_percent(row["yardstick"]) for row in shown.scores), "–")
    for solver in shown.solver:
        errors = ["the truth"] * len(model) if solver.errors is None else [_percent(one) for one in solver.errors]
        table.add_row(f"solver, {' × '.join(map(str, solver.grid))}", *errors, _time(solver.seconds))
    screen.print(table)
    for again, first in zip(windows["scores"], test["scores"], strict=True):
        paper = "" if first["paper"] is None else f", paper {first['paper'].replace('±', ' ± ')} %"
        screen.print(
            f"{first['field']}: the card says {_percent(again['value'])} here and {_percent(first['value'])} on "
            f"{test['windows']} test windows{paper}",
            soft_wrap=True,
        )
    screen.print(f"{shown.machine}, {precision}; times for one case at a time", soft_wrap=True)
    if shown.said is not None:
        screen.print(shown.said, soft_wrap=True)


ERRORS = {"relative_l2": "relative L2", "relative_l2_final": "relative L2, final frame"}


def _percent(value: float) -> str:
    return f"{100 * value:.3g} %"


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def _budget(card: dict[str, Any]) -> str:
    training = card["training"]
    return f"{training['epochs']} epochs ({100 * training['budget_share']:.3g} % of the paper's budget)"


@app.command()
def models() -> None:
    """List the family and the baselines with their size at the Darcy task, and the pretrained models."""
    from sigmasolver.models import SolverConfig, count_parameters, list_models, matched_width

    config = SolverConfig((85, 85), 1, 1)
    table = Table("model", box=SIMPLE_HEAD)
    for column in ("parameters", "MB", "width for equal size"):
        table.add_column(column, justify="right")
    for name in list_models():
        parameters = count_parameters(name, config)
        table.add_row(name, f"{parameters:,}", f"{4 * parameters / 1e6:.2f}", str(matched_width(name, config)))
    console().print(table)
    _print_pretrained()


def _print_pretrained() -> None:
    from sigmasolver import pretrained

    table = Table("pretrained", "model", box=SIMPLE_HEAD)
    for column in ("parameters", "error %", "paper %", "budget"):
        table.add_column(column, justify="right", no_wrap=True)
    for name in pretrained.names():
        card = pretrained.card(name)
        scores = card["test"]["scores"]
        task = "" if name == card["task"] else f"{card['task']} "
        table.add_row(
            f"{name} {task}{'×'.join(map(str, card['test']['grid']))}",
            card["model"],
            f"{card['parameters']:,}",
            " / ".join(f"{100 * row['value']:.3g}" for row in scores),
            " / ".join((row["paper"] or "–").replace("±", " ± ") for row in scores),
            f"{100 * card['training']['budget_share']:.3g} %",
        )
    console().print(table)
    said = "  relative L2 on the test part, share of the paper's epochs; try one: sigmasolver forecast NAME"
    console().print(said, soft_wrap=True)


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
