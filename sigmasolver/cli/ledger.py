"""The command that records results at the paper's budgets and generates their page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sigmasolver.cli.app import app
from sigmasolver.cli.terminal import console

__all__ = ["ledger"]


@app.command()
def ledger(
    runs: Annotated[
        list[Path] | None, typer.Argument(help="Finished runs to add; if omitted, only the page is written.")
    ] = None,
    file: Annotated[Path, typer.Option(help="JSON Lines file of the ledger, one row per number.")] = Path(
        "results/ledger.jsonl"
    ),
    page: Annotated[Path, typer.Option(help="Markdown page to generate.")] = Path("docs/results.md"),
    windows: Annotated[
        int | None,
        typer.Option(min=1, help="Number of windows the runs were evaluated on; default: the whole test split."),
    ] = None,
) -> None:
    """Add finished runs to the ledger and generate the page that compares them with the paper."""
    from sigmasolver.experiments.ledger import collect, write
    from sigmasolver.recipes import factor_settings, suite_of
    from sigmasolver.report.ledger import results_page
    from sigmasolver.runs import Run
    from sigmasolver.runs.files import os_errors_as_value_errors, refuse_folder, replacing

    for path in (file, page):
        refuse_folder(path)
    rows = write(file, [row for run in runs or () for row in collect(Run(run), windows)])
    planned, compared, timed = (list(suite_of(name)) for name in ("ledger", "comparison", "cost"))
    text = results_page(rows, planned, factor_settings(), compared, timed)
    with os_errors_as_value_errors(page):
        page.parent.mkdir(parents=True, exist_ok=True)
        with replacing(page) as temporary:
            temporary.write(text.encode())
    console().print(f"{file}: {len(rows)} rows of {len({row['run'] for row in rows})} runs\n{page}", soft_wrap=True)
