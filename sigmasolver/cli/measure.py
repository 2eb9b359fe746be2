"""The command that measures the cost of training."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from sigmasolver.cli.app import Device, Plugins, Settings, app, device_of
from sigmasolver.cli.terminal import console, progress
from sigmasolver.report.digits import significant, spread

if TYPE_CHECKING:
    from sigmasolver.diagnose.subject import Findings

__all__ = ["measure"]


@app.command()
def measure(
    out: Annotated[Path, typer.Option(help="Folder for the runs, one for each recipe.")] = Path("runs"),
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Only recipes whose name matches, such as 'ns2d-*'; repeatable."),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="Folder with one store per task (ns2d.h5, ...); default: random trajectories."),
    ] = None,
    rounds: Annotated[int, typer.Option(help="Number of independent processes per recipe.")] = 3,
    seconds: Annotated[
        float | None,
        typer.Option(help="Measuring time of each process in seconds, at most one epoch; default: one epoch."),
    ] = None,
    settings: Settings = None,
    plugin: Plugins = None,
    device: Device = "auto",
) -> None:
    """Measure time and memory of the paper's efficiency workloads in independent processes, with random weights."""
    from fnmatch import fnmatch

    from sigmasolver.diagnose.workload import Protocol
    from sigmasolver.diagnose.workload import measure as measure_workloads
    from sigmasolver.recipes import changed, suite_of

    recipes = {
        name: changed(recipe, settings or [])
        for name, recipe in suite_of("efficiency").items()
        if only is None or any(fnmatch(name, pattern) for pattern in only)
    }
    if not recipes:
        raise ValueError(
            f'No recipe matches "{", ".join(only or ())}"; list them with: sigmasolver suite efficiency --list'
        )
    with progress("measuring", None) as update:
        results = measure_workloads(recipes, out, device_of(device), Protocol(rounds, seconds), data, update)
    _print_results(results)
    console().print(
        f"next: sigmasolver table efficiency {' '.join(str(out / name) for name in results)}", soft_wrap=True
    )


def _print_results(results: Mapping[str, Findings]) -> None:
    table = Table("task", box=SIMPLE_HEAD)
    table.add_column("model", no_wrap=True)
    for label in ("parameters MB", "s per epoch", "timed", "peak MB"):
        table.add_column(label, justify="right", no_wrap=label != "parameters MB")
    for findings in results.values():
        values = {row["metric"]: row["value"] for row in findings.rows}
        (epoch,) = (row for row in findings.rows if row["metric"] == "seconds_per_epoch")
        seconds, deviation = epoch["value"], epoch["deviation"]
        table.add_row(
            epoch["task"],
            epoch["model"],
            significant(values["parameter_megabytes"]),
            significant(seconds) if deviation is None else spread(seconds, deviation),
            f"{values['timed_updates']:,.0f} of {values['updates_per_epoch']:,.0f}",
            significant(values["peak_megabytes"]),
        )
    console().print(table)
    facts = next(iter(results.values())).rows[0]
    console().print("  timed: updates of an epoch that each process ran; peak memory is for one update", soft_wrap=True)
    setup = f"{facts['rounds']} processes each, {facts['operations']} operations, {facts['precision']}, eager"
    console().print(f"  {facts['machine']}, torch {facts['torch']}; {setup}", soft_wrap=True)
