"""The command that demonstrates the package on a small flow."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sigmasolver.cli.app import app
from sigmasolver.cli.terminal import console

if TYPE_CHECKING:
    pass

__all__ = ["demo"]


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for data, runs and the page.")] = Path("demo"),
) -> None:
    """Simulate a small turbulent flow, train three models on it, and compare their forecasts on a page."""
    from sigmasolver.cli.demo_flow import run

    run(console(), out)
