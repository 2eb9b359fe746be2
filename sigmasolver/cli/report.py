"""Commands that present records: the tables and figures of the paper, and the HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sigmasolver.cli.app import Plugins, app
from sigmasolver.cli.terminal import console, print_table

if TYPE_CHECKING:
    from sigmasolver.report.rows import Arrays, Need, Rows

__all__ = ["figure", "report", "table"]

SWEEPS = ("scaling", "training-cost")
"""Tables and figures that compare runs with different recipes."""
Runs = Annotated[list[Path], typer.Argument(help="Run folders.")]
Records = Annotated[
    list[Path],
    typer.Argument(
        help="Run folders, or a file of results (results/ledger.jsonl), where runs without the needed rows are omitted."
    ),
]
Where = Annotated[
    list[str] | None,
    typer.Option(
        "--where",
        metavar="NAME=VALUE",
        help="Only rows that match, such as horizon=20 or 'run=kf2d-*-42'; repeatable, alternatives for the same NAME.",
    ),
]


@app.command()
def figure(
    name: Annotated[
        str,
        typer.Argument(
            help="teacher-forcing, rollout, decomposition, symmetry, maps, case-study, corrections, routing, "
            "spectra, components, efficiency, training-cost or scaling."
        ),
    ],
    runs: Records,
    out: Annotated[Path, typer.Option(help="Folder for NAME.png and NAME.pdf.")] = Path(),
    field: Annotated[
        str | None, typer.Option(help="Field to show (velocity: all components); default: all fields, or the main one.")
    ] = None,
    where: Where = None,
) -> None:
    """Draw a figure of the paper from the records of runs."""
    from sigmasolver.report.figures import FIGURES, Material, save
    from sigmasolver.settings import lookup

    drawing = lookup(FIGURES, name, "figure")
    if field is not None and not drawing.by_field:
        raise ValueError(f"The figure {name} does not show a field; omit --field.")
    rows, arrays = _load_records(runs, drawing.needs, where or [], name in SWEEPS)
    for path in save(drawing.with_sample(Material(rows, arrays, field)), out, name):
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
    runs: Records,
    latex: Annotated[bool, typer.Option("--latex", help="Print a LaTeX tabular (booktabs).")] = False,
    where: Where = None,
) -> None:
    """Print a table of the paper from the records of runs, next to the published numbers.

    In a terminal the best numbers are bold or underlined; to a file or pipe the table is written as Markdown.
    """
    from sigmasolver.report.paper_tables import TABLES
    from sigmasolver.report.tables import to_latex, to_markdown
    from sigmasolver.settings import lookup

    builder = lookup(TABLES, name, "table")
    rows, _ = _load_records(runs, builder.needs, where or [], name in SWEEPS)
    content, screen = builder.make(rows), console()
    if screen.is_terminal and not latex:
        screen.print(content.caption)
        print_table(screen, content)
    else:
        typer.echo(to_latex(content) if latex else f"{content.caption}\n\n{to_markdown(content)}", nl=False)


@app.command()
def report(
    runs: Runs,
    out: Annotated[Path, typer.Option(help="HTML file to write; it is self-contained.")] = Path("page.html"),
    title: Annotated[str | None, typer.Option(help="Title of the page; default: the task.")] = None,
    where: Where = None,
    units: Annotated[
        list[str] | None,
        typer.Option(
            "--units",
            metavar="NAME=UNIT",
            help="Unit that the data do not define: time=s, length=m, FIELD=m/s; repeatable.",
        ),
    ] = None,
    show: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
    plugin: Plugins = None,
) -> None:
    """Write an HTML page about runs: summary, errors, animated forecasts, causes of drift, provenance."""
    from sigmasolver.diagnose.run import DIAGNOSTICS
    from sigmasolver.experiments.records import dimensions_of
    from sigmasolver.report.assemble import study_of
    from sigmasolver.report.page import write_page
    from sigmasolver.runs.files import refuse_folder

    refuse_folder(out)
    rows, arrays = _join_runs(runs, tuple(DIAGNOSTICS), (), where or [])
    write_page(out, study_of(rows, arrays, title, dimensions_of(runs, rows, units or [])))
    console().print(f"{out}: {out.stat().st_size / 1e6:.1f} MB", soft_wrap=True)
    if show:
        typer.launch(out.resolve().as_uri())


def _load_records(
    paths: Sequence[Path], needs: Sequence[Need], conditions: Sequence[str], sweep: bool
) -> tuple[Rows, Arrays]:
    """The rows of the evaluations and the required diagnostics, and the arrays of the latter by run."""
    from sigmasolver.experiments.records import read_results
    from sigmasolver.report.rows import refuse_mixed_cohorts, runs_in

    if len(paths) == 1 and paths[0].suffix == ".jsonl":
        return read_results(paths[0], needs, conditions), {}
    diagnostics = tuple(dict.fromkeys(name for need in needs if (name := need.facts.get("diagnostic")) is not None))
    rows, arrays = _join_runs(paths, diagnostics, needs, conditions, sweep)
    refuse_mixed_cohorts([row for row in rows if any(need.matches(row) for need in needs)])
    return rows, {
        run: {k: v for by_run in arrays.values() for k, v in by_run.get(run, {}).items()} for run in runs_in(rows)
    }


def _join_runs(
    paths: Sequence[Path],
    diagnostics: Sequence[str],
    needs: Sequence[Need],
    conditions: Sequence[str],
    sweep: bool = False,
) -> tuple[Rows, dict[str, Arrays]]:
    """Call `join_records` on these folders, and report copies of a run."""
    from sigmasolver.experiments.records import join_records, label_runs

    runs = label_runs(paths)
    for label, (first, *copies) in runs.items():
        for copy in copies:
            console(stderr=True).print(
                f"{copy.path} is a copy of {first.path}; it is shown once, as {label}.", soft_wrap=True
            )
    return join_records(runs, diagnostics, needs, conditions, sweep)
