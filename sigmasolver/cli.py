"""The command line: one sub-command per verb, no science. A mistake of the user ends in one sentence, exit code 2."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.console import Console

import sigmasolver

__all__ = ["app", "main"]

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Neural PDE solvers on structured grids, and how far to trust their forecasts.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(sigmasolver.__version__)
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options of every command."""


@app.command()
def demo() -> None:
    """Build Transolver-sigma, run it at two resolutions, and list the family with parameter counts."""
    from sigmasolver.demo import run

    run(Console())


def main() -> None:
    try:
        app()
    except ValueError as error:
        Console(stderr=True, highlight=False).print(f"sigmasolver: {error}", soft_wrap=True, markup=False)
        sys.exit(2)
