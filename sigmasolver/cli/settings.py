"""The command that lists the settings for `--set`."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from sigmasolver.cli.app import Plugins, app
from sigmasolver.cli.terminal import console

__all__ = ["settings"]


@app.command()
def settings(
    name: Annotated[
        str | None, typer.Argument(help="A recipe such as kf2d, to show its values; default: the default values.")
    ] = None,
    simulator: Annotated[
        bool, typer.Option("--simulator", help="List the parameters of a simulator, for `simulate NAME --set`.")
    ] = False,
    plugin: Plugins = None,
) -> None:
    """List the settings for --set: name, type, value and meaning."""
    from sigmasolver.recipes import Recipe, recipe_of
    from sigmasolver.settings import list_settings
    from sigmasolver.simulate import simulator_of

    if simulator and name is None:
        raise ValueError("Missing simulator name: sigmasolver settings NAME --simulator.")
    if name is None:
        entries = list_settings(Recipe)
    else:
        entries = list_settings(simulator_of(name) if simulator else recipe_of(name))
    screen = console()
    if not screen.is_terminal:  # one line per setting, for grep and cut
        for entry in entries:
            typer.echo("\t".join((entry.name, entry.kind, entry.value, entry.meaning)))
        return
    table = Table("setting", "type", "default" if name is None else "value", "", box=SIMPLE_HEAD)
    for entry in entries:
        table.add_row(*map(Text, (entry.name, entry.kind, entry.value, entry.meaning)))
    screen.print(table)
