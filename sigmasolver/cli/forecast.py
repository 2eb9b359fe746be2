"""The command that forecasts from frames in a file, or demonstrates a pretrained model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from sigmasolver.cli.app import Device, Plugins, Precision, Symmetries, app, device_of
from sigmasolver.cli.evaluate import Anyway, warn_other_code, warn_unfinished
from sigmasolver.cli.terminal import console, progress

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from sigmasolver.model_cards.demonstrate import Demonstration

__all__ = ["forecast", "print_demonstration"]


@app.command()
def forecast(
    run: Annotated[str, typer.Argument(help="A run folder, or the name of a pretrained model.")],
    start: Annotated[
        Path | None,
        typer.Option(
            "--input",
            help="Initial frames, in any format of `train --data`; default: the windows shipped with a pretrained "
            "model.",
        ),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help="Number of frames to forecast; default: the horizon of the task.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Output file: .h5 (a store), .nc, .zarr, .npy or .npz; required with --input.")
    ] = None,
    animation: Annotated[
        Path | None,
        typer.Option(help="Also write the forecast of a pretrained model's first window as an animated PNG."),
    ] = None,
    precision: Precision = "float32",
    symmetries: Symmetries = 1,
    spread: Annotated[
        Path | None,
        typer.Option(help="Also write the deviation of the forecasts over --symmetries at each point; with --input."),
    ] = None,
    anyway: Anyway = False,
    plugin: Plugins = None,
    device: Device = "auto",
) -> None:
    """Forecast from your own frames, or score a pretrained model on the unseen windows shipped with it."""
    from sigmasolver.forecast.checkpoint import load_recipe
    from sigmasolver.forecast.files import forecast_file
    from sigmasolver.pretrained import is_pretrained, resolve
    from sigmasolver.runs import Run

    path = resolve(run)
    if start is None:
        if not is_pretrained(path):
            raise ValueError(f"Missing --input: {path} ships no initial frames.")
        if steps is not None:
            raise ValueError("--steps requires --input; the windows of a pretrained model have a fixed length.")
        if spread is not None:
            raise ValueError("--spread requires --input.")
        _forecast_shipped(path.name, out, animation, precision, symmetries, device_of(device))
        return
    if animation is not None:
        raise ValueError("--animation shows the windows of a pretrained model; omit --input.")
    if out is None:
        raise ValueError("Missing --out: pass the file to write the forecast to.")
    warn_unfinished(Run(path))
    warn_other_code(Run(path))
    steps = load_recipe(Run(path)).task.horizon if steps is None else steps
    with progress("forecasting", None) as update:
        messages = forecast_file(
            path, start, steps, out, device_of(device), update, precision, anyway, symmetries, spread
        )
    for message in messages:
        console().print(message, soft_wrap=True)


def _forecast_shipped(
    name: str, out: Path | None, animation: Path | None, precision: str, symmetries: int, device: torch.device
) -> None:
    from sigmasolver.forecast.files import check_name
    from sigmasolver.model_cards.demonstrate import demonstrate
    from sigmasolver.runs.files import os_errors_as_value_errors, refuse_folder, replacing

    if out is not None:
        check_name(out)
    if animation is not None:
        refuse_folder(animation)
    with progress(f"forecasting {name}", None) as update:
        demonstration = demonstrate(name, device, precision, out, update, symmetries)
    print_demonstration(console(), demonstration)
    console().print(f"computed in {precision}", soft_wrap=True)
    if demonstration.message is not None:
        console().print(demonstration.message, soft_wrap=True)
    if animation is not None:
        with os_errors_as_value_errors(animation), replacing(animation) as file:
            file.write(demonstration.animation().moving)
        console().print(str(animation), soft_wrap=True)


def print_demonstration(screen: Console, demonstration: Demonstration) -> None:
    """Print a pretrained model, its errors and times next to the solver's, and the errors on its card."""
    from sigmasolver.model_cards.demonstrate import ERRORS

    card, windows, test = demonstration.card, demonstration.card["windows"], demonstration.card["test"]
    training, results = card["training"], demonstration.table()
    screen.print(
        f"{card['name']}: {card['model']}, {card['parameters']:,} parameters, trained for {training['epochs']} epochs "
        f"({100 * training['budget_share']:.3g} % of the paper's budget)\n"
        f"{windows['count']} unseen case{'s' * (windows['count'] > 1)} on {' × '.join(map(str, test['grid']))} "
        f"(simulate {card['task']} --seed {windows['seed']})",
        soft_wrap=True,
    )
    table = Table(box=SIMPLE_HEAD)
    for index, column in enumerate(results.columns):
        table.add_column(column, justify="right" if index else "left")
    for row in results.rows:
        table.add_row(*row)
    screen.print(table)
    for shipped, tested in zip(windows["scores"], test["scores"], strict=True):
        paper = "" if tested["paper"] is None else f", paper {tested['paper'].replace('±', ' ± ')} %"
        screen.print(
            f"{tested['field']}, {ERRORS[tested['metric']]}: the model card reports {100 * shipped['value']:.3g} % "
            f"here and {100 * tested['value']:.3g} % on {test['windows']} test windows{paper}",
            soft_wrap=True,
        )
    screen.print(results.caption, soft_wrap=True)
    if demonstration.average is not None:
        screen.print(demonstration.average.message, soft_wrap=True)
