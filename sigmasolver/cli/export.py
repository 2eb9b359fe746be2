"""The command that writes a run for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sigmasolver.cli.app import Plugins, app
from sigmasolver.cli.evaluate import say_other_code, say_unfinished
from sigmasolver.cli.terminal import console

__all__ = ["export"]


@app.command()
def export(
    run: Annotated[str, typer.Argument(help="The folder of a trained run, or the name of a pretrained model.")],
    out: Annotated[Path, typer.Option(help="The file to write: .onnx, or .pt2 for torch-export and aoti.")],
    to: Annotated[str, typer.Option(help="onnx, torch-export or aoti.")] = "onnx",
    data: Annotated[
        Path | None, typer.Option(help="Data with windows to check the file on; default: the run's test data.")
    ] = None,
    plugin: Plugins = None,
) -> None:
    """Write one step of a forecast as one file for other programs, checked against the run on real windows."""
    from sigmasolver.export import export_run
    from sigmasolver.export.run import LIMIT
    from sigmasolver.pretrained import resolve
    from sigmasolver.runs import Run

    say_unfinished(Run(resolve(run)))
    say_other_code(Run(resolve(run)))
    screen = console(stderr=True)
    made = export_run(run, to, out, data, lambda text: screen.print(f"  {text}", soft_wrap=True))
    grid = "any grid" if made.fixed is None else f"the grid of the run alone: {made.fixed}"
    console().print(
        f"{out}: {out.stat().st_size / 1e6:.1f} MB, takes any batch and {grid}\n"
        f"  differs from the run by {made.difference:.2g} in relative L2 on {made.windows} real windows "
        f"(kept up to {LIMIT:g})",
        soft_wrap=True,
    )
