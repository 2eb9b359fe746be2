"""The command that writes the page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from sigmasolver.cli.app import app
from sigmasolver.terminal import console

__all__ = ["report"]


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders of one task, evaluated; diagnosed shows more.")],
    out: Annotated[Path, typer.Option(help="The page, one HTML file without need of a network.")] = Path("page.html"),
    title: Annotated[str | None, typer.Option(help="Its title; none: the task.")] = None,
    show: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
) -> None:
    """Write what is known of runs as one page: summary, errors, forecasts to play, why they drift, provenance."""
    from sigmasolver.diagnose.records import read_findings
    from sigmasolver.diagnose.run import DIAGNOSTICS
    from sigmasolver.report.assemble import study_of
    from sigmasolver.report.page import write_page
    from sigmasolver.runs import Run, read_rows

    rows: list[dict[str, Any]] = []
    arrays: dict[str, dict[str, Any]] = {}
    for path in dict.fromkeys(runs):
        run, own = Run(path), path.resolve().name
        run.recipe()  # says so where this is no run
        if any(row["run"] == own for row in rows):
            raise ValueError(f"Two of the runs are named {own}; rename one of the folders.")
        mine = list(read_rows(run.records))
        for name in DIAGNOSTICS:
            if (found := read_findings(run, name)) is not None:
                mine += found.rows
                arrays.setdefault(name, {})[own] = found.arrays
        rows += [{**row, "run": own} for row in mine]
    write_page(out, study_of(rows, arrays, title))
    console().print(f"{out}: {out.stat().st_size / 1e6:.1f} MB", soft_wrap=True)
    if show:
        typer.launch(out.resolve().as_uri())
