"""The Typer application, and the options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sigmasolver.cli.help import Group
from sigmasolver.version import __version__

if TYPE_CHECKING:
    import torch

__all__ = [
    "Cohort",
    "Device",
    "Dtype",
    "OldSplit",
    "Plugins",
    "Precision",
    "Settings",
    "Split",
    "Steady",
    "Symmetries",
    "app",
    "device_of",
    "numbers",
]

app = typer.Typer(
    no_args_is_help=True,
    cls=Group,
    pretty_exceptions_enable=False,
    help="Neural PDE solvers on structured grids, and how far to trust their forecasts.",
)

Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Change a setting; repeatable.")
]


def _load_plugins(context: typer.Context, paths: list[Path] | None) -> list[Path] | None:
    if not context.resilient_parsing:  # shell completion runs nothing
        from sigmasolver.plugins import load_plugin

        for path in paths or ():
            load_plugin(path)
    return paths


Plugins = Annotated[
    list[Path] | None,
    typer.Option(
        "--plugin",
        metavar="FILE.py",
        callback=_load_plugins,
        help="Python file that registers a custom model, loss, optimiser, task or symmetries; repeatable.",
    ),
]
Device = Annotated[str, typer.Option(help="auto (a GPU if available), cpu, cuda or cuda:1.")]
Precision = Annotated[str, typer.Option(help="Precision of the forecast: float32, tf32 (on a GPU) or bf16.")]
Cohort = Annotated[
    str | None,
    typer.Option(
        help="A fixed set of test windows: the paper's rollout, decomposition or corrections, or a test mode of "
        "RealPDEBench: seen, in_dist, out_dist or unseen."
    ),
]
Symmetries = Annotated[
    int, typer.Option(help="Average forecasts over this many symmetries of the task (docs/symmetries.md).")
]
Steady = Annotated[
    bool | None,
    typer.Option(
        "--steady/--unsteady", help="Your data: arrays (count, *grid) without time, or (count, frames, *grid)."
    ),
]
Split = Annotated[str, typer.Option(help="train, validation or test.")]
OldSplit = Annotated[str | None, typer.Option("--part", hidden=True, help="The earlier name of --split.")]
Dtype = Annotated[str, typer.Option(help="Storage type: float32 or float16.")]


def _print_version(value: bool) -> None:
    if value:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options common to all commands."""


def device_of(text: str) -> torch.device:
    from sigmasolver.runtime.parallel import device_of as parse_device

    return parse_device(text)


def numbers(text: str, option: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f'{option} must be one or more integers such as 64 or 64,128, got "{text}".') from None
