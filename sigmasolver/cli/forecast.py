"""The command that forecasts from frames in a file, or shows a shipped model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from sigmasolver.cli.app import Device, Plugins, Precision, app, device_of
from sigmasolver.cli.evaluate import Anyway, say_other_code, say_unfinished
from sigmasolver.cli.terminal import console, progress

if TYPE_CHECKING:
    import torch


__all__ = ["forecast"]

ERRORS = {"relative_l2": "relative L2", "relative_l2_final": "relative L2, final frame"}


@app.command()
def forecast(
    run: Annotated[str, typer.Argument(help="The folder of a trained run, or the name of a pretrained model.")],
    start: Annotated[
        Path | None,
        typer.Option(
            "--input",
            help="Initial frames, in any form of `train --data`; default: those shipped with a pretrained model.",
        ),
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Frames to forecast; default: the task's horizon.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Output: .h5 (a store), .nc, .zarr, .npy or .npz; required with --input.")
    ] = None,
    precision: Precision = "float32",
    anyway: Anyway = False,
    plugin: Plugins = None,
    device: Device = "auto",
) -> None:
    """Forecast from your own frames, or score a pretrained model on the unseen windows shipped with it."""
    from sigmasolver.forecast.checkpoint import recipe_in
    from sigmasolver.forecast.files import forecast_file
    from sigmasolver.pretrained import is_pretrained, resolve
    from sigmasolver.runs import Run

    path = resolve(run)
    if start is None:
        if not is_pretrained(path):
            raise ValueError(f"Missing --input: {path} ships no frames to forecast from.")
        if steps is not None:
            raise ValueError("--steps requires --input; the windows of a pretrained model have a fixed length.")
        _forecast_shipped(path.name, out, precision, device_of(device))
        return
    if out is None:
        raise ValueError("Missing --out: name the file to write the forecast to.")
    say_unfinished(Run(path))
    say_other_code(Run(path))
    steps = recipe_in(Run(path)).task.horizon if steps is None else steps
    with progress("forecasting", None) as move:
        said = forecast_file(path, start, steps, out, device_of(device), move, precision, anyway)
    for line in said:
        console().print(line, soft_wrap=True)


def _forecast_shipped(name: str, out: Path | None, precision: str, device: torch.device) -> None:
    from sigmasolver.forecast.files import check_name
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
    table.add_column("time per case", justify="right")
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


def _percent(value: float) -> str:
    return f"{100 * value:.3g} %"


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def _budget(card: dict[str, Any]) -> str:
    training = card["training"]
    return f"{training['epochs']} epochs ({100 * training['budget_share']:.3g} % of the paper's budget)"
