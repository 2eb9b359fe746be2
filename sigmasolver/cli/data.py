"""Commands that create and inspect data."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from sigmasolver.cli.app import Cohort, Dtype, OldSplit, Plugins, Settings, Split, Steady, app, device_of
from sigmasolver.cli.own_data import (
    Axes,
    Boundary,
    Mask,
    SkipBad,
    TimeStep,
    Units,
    names_of,
    print_imported,
    read_options_of,
)
from sigmasolver.cli.terminal import console, print_summary, progress

__all__ = ["import_data", "inspect", "simulate", "windows"]


@app.command()
def simulate(
    task: Annotated[str, typer.Argument(help="darcy, ns2d, kf2d, it3d, smoke3d or demo.")],
    out: Annotated[Path, typer.Option(help="Store to write or resume.")],
    count: Annotated[int, typer.Option(help="Number of trajectories.")] = 16,
    seed: Annotated[
        int, typer.Option(help="Random seed; trajectory i depends only on the seed and i, not on the count.")
    ] = 0,
    settings: Settings = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:1.")] = "cpu",
    dtype: Dtype = "float32",
) -> None:
    """Simulate the data of a task. Stop at any time; the same command resumes."""
    from sigmasolver.settings import override
    from sigmasolver.simulate import simulator_of
    from sigmasolver.simulate.generate import generate

    simulator = override(simulator_of(task), settings or [])
    target = device_of(device)
    batch = simulator.batch_size(target)
    with progress(f"simulating {task}", count) as update:
        result = generate(
            simulator,
            count,
            seed,
            out,
            target,
            dtype,
            lambda done, total, fraction: update(done + fraction * min(batch, total - done)),
        )
    present = f", {result.present} of them already present" if result.present else ""
    console().print(
        f"{out}: {result.count} trajectories{present}, {out.stat().st_size / 1e6:.1f} MB\n"
        f"fingerprint {result.fingerprint}",
        soft_wrap=True,
    )


@app.command()
def inspect(
    file: Annotated[Path, typer.Argument(help="A store, or a file or folder in any supported format.")],
    plot: Annotated[Path | None, typer.Option(help="Also plot one trajectory to this file (.png, .pdf).")] = None,
    index: Annotated[int, typer.Option(help="Index of the trajectory to plot.")] = 0,
    first: Annotated[
        int | None, typer.Option(help="Number of trajectories to read, from the first; default: all.")
    ] = None,
    steady: Steady = None,
) -> None:
    """Show the axes, fields, ranges, times and boundaries of data, any problems, and the command to train on them."""
    from sigmasolver.data.inspect import draw, summarise

    if plot is not None:  # first: report a bad option before reading a large file
        draw(file, plot, index)
    with progress("reading", None) as update:
        summary = summarise(file, update, steady, first)
    screen = console()
    print_summary(screen, summary)
    if plot is not None:
        screen.print(f"plot of trajectory {index}: {plot}", soft_wrap=True)
    if summary.damaged:
        raise typer.Exit(1)


@app.command("import-data")
def import_data(
    sources: Annotated[
        list[Path],
        typer.Argument(
            help="A file or folder in any format that `inspect` recognises, or both public Darcy flow .mat files."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Store to write or resume.")],
    kind: Annotated[str | None, typer.Option(help="Format of the source, if it cannot be inferred.")] = None,
    fields: Annotated[str | None, typer.Option(help="Your data: fields to import, such as u,v.")] = None,
    steady: Steady = None,
    axes: Axes = None,
    boundary: Boundary = None,
    dt: TimeStep = None,
    units: Units = None,
    mask: Mask = None,
    skip_bad: SkipBad = False,
    dtype: Dtype = "float32",
) -> None:
    """Convert NetCDF, Zarr, VTK, public data sets (The Well, PDEBench, FNO, ...) or your own arrays into a store."""
    from sigmasolver.data.formats import import_data as convert

    options = read_options_of(names_of(fields), steady, axes, boundary, dt, units, mask, skip_bad)
    with progress("importing", None) as update:
        imported = convert(sources, out, kind, dtype, update, options=options)
    print_imported(imported)
    console().print(f"fingerprint {imported.fingerprint}", soft_wrap=True)


@app.command()
def windows(
    task: Annotated[str, typer.Argument(help="A task with a recipe, such as kf2d.")],
    data: Annotated[Path, typer.Option(help="The store.")],
    split: Split = "train",
    part: OldSplit = None,
    cohort: Cohort = None,
    settings: Settings = None,
    plugin: Plugins = None,
) -> None:
    """List the windows of a split or cohort: trajectory, first frame of history and future, last frame (as stored)."""
    from sigmasolver.data.formats import open_data
    from sigmasolver.evaluate import in_cohort
    from sigmasolver.recipes import changed, recipe_of

    split = part or split
    if split not in ("train", "validation", "test"):
        raise ValueError(f'Unknown split "{split}"; choose from train, validation, test.')
    if cohort is not None and split != "test":
        raise ValueError("Cohorts are defined on the test split; add --split test.")
    recipe = changed(recipe_of(task), settings or [])
    with open_data(data) as store:
        selected = recipe.windows_of(store, split)
        if selected is None:
            raise ValueError(f"The {split} split of {data} is empty; choose another split.")
        if cohort is not None:
            selected = in_cohort(selected, recipe.task.name, cohort)
        sys.stdout.write("trajectory\thistory\tfuture\tlast\n")
        sys.stdout.writelines("\t".join(map(str, row)) + "\n" for row in selected.rows())
        count = selected.windows_per_trajectory
        distribution = "listed one by one in" if count is None else f"{count} in each of"
        console(stderr=True).print(f"{len(selected)} windows, {distribution} {len(selected.trajectories)} trajectories")
