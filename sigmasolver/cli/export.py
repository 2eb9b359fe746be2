"""The command that writes a run for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sigmasolver.cli.app import Plugins, app
from sigmasolver.cli.evaluate import warn_other_code, warn_unfinished
from sigmasolver.cli.terminal import console

__all__ = ["export"]


@app.command()
def export(
    run: Annotated[str, typer.Argument(help="A run folder, or the name of a pretrained model.")],
    out: Annotated[Path, typer.Option(help="Output file: .onnx, or .pt2 for torch-export and aoti.")],
    to: Annotated[str, typer.Option(help="onnx, torch-export or aoti.")] = "onnx",
    data: Annotated[
        Path | None, typer.Option(help="Data to check the file against; default: the run's test data.")
    ] = None,
    plugin: Plugins = None,
) -> None:
    """Export one forecast step to a single file for other programs, and check it against the run on real windows."""
    from sigmasolver.export import export_run
    from sigmasolver.export.run import LIMIT
    from sigmasolver.pretrained import resolve
    from sigmasolver.runs import Run

    warn_unfinished(Run(resolve(run)))
    warn_other_code(Run(resolve(run)))
    screen = console(stderr=True)
    exported = export_run(run, to, out, data, lambda text: screen.print(f"  {text}", soft_wrap=True))
    grid = "any grid" if exported.fixed is None else f"only the grid of the run ({exported.fixed})"
    console().print(
        f"{out}: {out.stat().st_size / 1e6:.1f} MB, accepts any batch size and {grid}\n  relative L2 difference from "
        f"the run {exported.difference:.2g} on {exported.windows} real windows (limit {LIMIT:g})",
        soft_wrap=True,
    )
