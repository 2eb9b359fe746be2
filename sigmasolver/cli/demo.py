"""The command that demonstrates the package."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sigmasolver.cli.app import app
from sigmasolver.cli.terminal import console

__all__ = ["demo"]


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for data, runs and the page.")] = Path("demo"),
) -> None:
    """Forecast a turbulent flow with a pretrained model, train three small models, and show both on an HTML page."""
    from sigmasolver.cli.demo_flow import run

    run(console(), out)
