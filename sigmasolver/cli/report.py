"""Commands that show records: the tables and figures of the paper, made from what runs have measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sigmasolver.cli.app import app
from sigmasolver.terminal import console

if TYPE_CHECKING:
    import numpy as np

    from sigmasolver.report.rows import Arrays, Need, Rows

__all__ = ["figure", "table"]

Runs = Annotated[list[Path], typer.Argument(help="Run folders.")]
Where = Annotated[
    list[str] | None,
    typer.Option(
        "--where", metavar="NAME=VALUE", help="Only rows with this fact: horizon=20, ...; may be given often."
    ),
]


@app.command()
def figure(
    name: Annotated[
        str,
        typer.Argument(
            help="teacher-forcing, rollout, decomposition, maps, case-study, corrections, routing, efficiency or "
            "scaling."
        ),
    ],
    runs: Runs,
    out: Annotated[Path, typer.Option(help="The folder for NAME.png and NAME.pdf.")] = Path(),
    field: Annotated[str | None, typer.Option(help="The field to show; none: all together, or the main one.")] = None,
    where: Where = None,
) -> None:
    """Draw a figure of the paper from the records of runs."""
    from sigmasolver.report.figures import FIGURES, Material, save
    from sigmasolver.settings import row

    drawing = row(FIGURES, name, "figure")
    if field is not None and not drawing.by_field:
        raise ValueError(f"The figure {name} shows no field; leave --field out.")
    rows, arrays = _records(runs, drawing.needs, where or [])
    for path in save(drawing.draw(Material(rows, arrays, field)), out, name):
        console().print(str(path), soft_wrap=True)


@app.command()
def table(
    name: Annotated[
        str,
        typer.Argument(
            help="comparison, main, realpdebench, ablations, slice-updates, realm, canonical-seeds, "
            "realpdebench-seeds, realm-seeds, scaling, cohorts or efficiency."
        ),
    ],
    runs: Runs,
    latex: Annotated[bool, typer.Option("--latex", help="A LaTeX tabular (booktabs) instead of Markdown.")] = False,
    where: Where = None,
) -> None:
    """Print a table of the paper from the records of runs, with the published numbers beside them."""
    from sigmasolver.report.paper_tables import TABLES
    from sigmasolver.report.tables import to_latex, to_markdown
    from sigmasolver.settings import row

    wanted = row(TABLES, name, "table")
    rows, _ = _records(runs, wanted.needs, where or [])
    made = wanted.make(rows)
    typer.echo(to_latex(made) if latex else f"{made.caption}\n\n{to_markdown(made)}", nl=False)


def _records(paths: Sequence[Path], needs: Sequence[Need], conditions: Sequence[str]) -> tuple[Rows, Arrays]:
    """The rows of evaluations and of the diagnoses that are needed, and the arrays of these by the name of the run."""
    from sigmasolver.diagnose.records import read_findings
    from sigmasolver.report.rows import where
    from sigmasolver.runs import Run, read_rows

    diagnostics = dict.fromkeys(name for need in needs if (name := need.facts.get("diagnostic")) is not None)
    rows: list[dict[str, Any]] = []
    arrays: dict[str, dict[str, np.ndarray]] = {}
    for path in dict.fromkeys(paths):
        run, own = Run(path), path.resolve().name
        if own in arrays:
            raise ValueError(f"Two of the runs are named {own}; rename one of the folders.")
        run.recipe()  # says so where this is no run
        found = [made for name in diagnostics if (made := read_findings(run, name)) is not None]
        arrays[own] = {name: array for made in found for name, array in made.arrays.items()}
        mine = [*read_rows(run.records), *(row for made in found for row in made.rows)]
        for need in needs:
            if not any(need.takes(row) for row in mine):
                raise ValueError(need.missing(str(path)))
        rows += [{**row, "run": own} for row in mine]  # the folder may have another name by now
    return where(rows, conditions), arrays
