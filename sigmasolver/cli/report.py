"""Commands that show records: the tables and figures of the paper and the page, made from what runs have measured."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sigmasolver.cli.app import app
from sigmasolver.cli.terminal import console, folder_labels, print_table

if TYPE_CHECKING:
    import numpy as np

    from sigmasolver.report.rows import Arrays, Need, Rows
    from sigmasolver.runs import Run

__all__ = ["figure", "report", "table"]

SWEEPS = ("scaling",)
"""Tables and figures of runs whose recipes differ on purpose."""
Runs = Annotated[list[Path], typer.Argument(help="Run folders.")]
Where = Annotated[
    list[str] | None,
    typer.Option("--where", metavar="NAME=VALUE", help="Only rows with this fact: horizon=20, ...; repeatable."),
]


@app.command()
def figure(
    name: Annotated[
        str,
        typer.Argument(
            help="teacher-forcing, rollout, decomposition, maps, case-study, corrections, routing, spectra, "
            "components, efficiency or scaling."
        ),
    ],
    runs: Runs,
    out: Annotated[Path, typer.Option(help="The folder for NAME.png and NAME.pdf.")] = Path(),
    field: Annotated[
        str | None, typer.Option(help="The field to show; velocity: all its components; default: all, or the main one.")
    ] = None,
    where: Where = None,
) -> None:
    """Draw a figure of the paper from the records of runs."""
    from sigmasolver.report.figures import FIGURES, Material, save
    from sigmasolver.settings import lookup

    drawing = lookup(FIGURES, name, "figure")
    if field is not None and not drawing.by_field:
        raise ValueError(f"The figure {name} shows no field; omit --field.")
    rows, arrays = _records(runs, drawing.needs, where or [], name in SWEEPS)
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
    runs: Runs,
    latex: Annotated[bool, typer.Option("--latex", help="A LaTeX tabular (booktabs).")] = False,
    where: Where = None,
) -> None:
    """Print a table of the paper from the records of runs, with the published numbers beside them.

    Drawn with bold and underlined numbers in a terminal, written as Markdown to a file or pipe.
    """
    from sigmasolver.report.paper_tables import TABLES
    from sigmasolver.report.tables import to_latex, to_markdown
    from sigmasolver.settings import lookup

    wanted = lookup(TABLES, name, "table")
    rows, _ = _records(runs, wanted.needs, where or [], name in SWEEPS)
    made, screen = wanted.make(rows), console()
    if screen.is_terminal and not latex:
        screen.print(made.caption)
        print_table(screen, made)
    else:
        typer.echo(to_latex(made) if latex else f"{made.caption}\n\n{to_markdown(made)}", nl=False)


@app.command()
def report(
    runs: Runs,
    out: Annotated[Path, typer.Option(help="The page, one self-contained HTML file.")] = Path("page.html"),
    title: Annotated[str | None, typer.Option(help="Title; default: the task.")] = None,
    where: Where = None,
    show: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
) -> None:
    """Write one page about runs: summary, errors, playable forecasts, causes of drift, provenance."""
    from sigmasolver.diagnose.run import DIAGNOSTICS
    from sigmasolver.report.assemble import study_of
    from sigmasolver.report.page import write_page

    rows, arrays = _read(runs, tuple(DIAGNOSTICS), (), where or [])
    write_page(out, study_of(rows, arrays, title))
    console().print(f"{out}: {out.stat().st_size / 1e6:.1f} MB", soft_wrap=True)
    if show:
        typer.launch(out.resolve().as_uri())


def _records(
    paths: Sequence[Path], needs: Sequence[Need], conditions: Sequence[str], sweep: bool
) -> tuple[Rows, Arrays]:
    """The rows of evaluations and of the diagnoses that are needed, and the arrays of these by the name of the run."""
    from sigmasolver.report.rows import refuse_mixed_cohorts, runs_in

    diagnostics = tuple(dict.fromkeys(name for need in needs if (name := need.facts.get("diagnostic")) is not None))
    rows, found = _read(paths, diagnostics, needs, conditions, sweep)
    refuse_mixed_cohorts([row for row in rows if any(need.takes(row) for need in needs)])
    return rows, {run: {k: v for held in found.values() for k, v in held.get(run, {}).items()} for run in runs_in(rows)}


def _read(
    paths: Sequence[Path],
    diagnostics: Sequence[str],
    needs: Sequence[Need],
    conditions: Sequence[str],
    sweep: bool = False,
) -> tuple[Rows, dict[str, Arrays]]:
    """The rows of these runs, and of each diagnostic the arrays by run; missing needs raise.

    Runs of one model by different recipes are not seeds of each other: outside of a `sweep` their names say so.
    """
    from sigmasolver.diagnose.records import read_findings
    from sigmasolver.report.rows import once, where
    from sigmasolver.runs import read_records

    rows: list[dict[str, Any]] = []
    arrays: dict[str, dict[str, dict[str, np.ndarray]]] = {}
    labelled = _labelled(paths)
    for own, copies in labelled.items():
        mine = [row for run in copies for row in read_records(run.records)]
        for name in diagnostics:
            made = next((made for run in copies if (made := read_findings(run, name)) is not None), None)
            if made is not None:
                arrays.setdefault(name, {})[own] = made.arrays
                mine += made.rows
        for need in needs:
            if not any(need.takes(row) for row in mine):
                raise ValueError(need.missing(str(copies[0].path)))
        folders = [run.path.resolve().name for run in copies]
        rows += once([{**row, "run": own, "folders": folders, "measured_as": row.get("run")} for row in mine])
    if not sweep:
        names = _names_by_recipe(rows, {own: copies[0] for own, copies in labelled.items()})
        rows = [{**row, "model": names.get((row["run"], row["model"]), row["model"])} for row in rows]
    return where(rows, conditions), dict(arrays)


def _names_by_recipe(rows: Sequence[dict[str, Any]], runs: dict[str, Run]) -> dict[tuple[str, str], str]:
    """By run and model, a name in place of the model where a task has runs of it by several recipes: that of the folder
    without its seed, so that the seeds of one recipe still count as such."""
    groups: dict[tuple[str, str], dict[str, dict[str, str]]] = {}
    for row in rows:
        if row.get("seed") is not None:
            recipe = _recipe_without_seed(runs[row["run"]])
            short = row["run"].removesuffix(f"-{row['seed']}")
            groups.setdefault((row["task"], row["model"]), {}).setdefault(recipe, {})[row["run"]] = short
    named: dict[tuple[str, str], str] = {}
    for (_, model), recipes in groups.items():
        if len(recipes) > 1:
            shorts = [set(held.values()) for held in recipes.values()]
            clear = all(len(one) == 1 for one in shorts) and len(set.union(*shorts)) == len(shorts)
            named |= {(run, model): short if clear else run for held in recipes.values() for run, short in held.items()}
    return named


def _recipe_without_seed(run: Run) -> str:
    """Settings that an older recipe does not name have their defaults."""
    from sigmasolver.forecast.checkpoint import recipe_in

    try:
        recipe = recipe_in(run).to_plain()
    except ValueError:
        recipe = run.recipe()
    train = recipe.get("train")
    if isinstance(train, dict):
        recipe = {**recipe, "train": {key: value for key, value in train.items() if key != "seed"}}
    return json.dumps(recipe, sort_keys=True)


def _labelled(paths: Sequence[Path]) -> dict[str, list[Run]]:
    """Each run with its copies, by the label of its first folder. Folders with the same weights and the same recipe
    hold the same run."""
    from sigmasolver.runs import Run

    found: dict[Any, list[Run]] = {}
    given: dict[Path, Path] = {}
    for path in paths:
        given.setdefault(path.resolve(), path)
    for resolved, path in given.items():
        run = Run(path)
        recipe = run.recipe()  # raises if this is no run
        same = (run.digest, json.dumps(recipe, sort_keys=True)) if run.weights.exists() else resolved
        found.setdefault(same, []).append(run)
    labels = dict(zip(folder_labels([group[0].path for group in found.values()]), found.values(), strict=True))
    for label, group in labels.items():
        for copy in group[1:]:
            console(stderr=True).print(
                f"{copy.path} holds the same run as {group[0].path}; it is shown once, as {label}.", soft_wrap=True
            )
    return labels
