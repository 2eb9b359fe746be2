"""Options that describe how to read a user's own files, and the import that applies them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sigmasolver.cli.terminal import console, progress
from sigmasolver.settings import split_names

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sigmasolver.data.formats import Imported, ReadOptions
    from sigmasolver.data.reader import Reader
    from sigmasolver.runtime.parallel import World

__all__ = [
    "Axes",
    "Boundary",
    "Mask",
    "SkipBad",
    "TimeStep",
    "Units",
    "names_of",
    "print_imported",
    "read_options_of",
    "training_data",
]

BY_SHAPE = "factformer-kf2d"
"""The public data set that is recognised only by the shape of its array."""
Axes = Annotated[
    str | None, typer.Option(metavar="NAMES", help="Your data: axes in order, such as count,time,x,y,field.")
]
Boundary = Annotated[
    str | None,
    typer.Option(metavar="KINDS", help="Your data: boundary of each axis, such as periodic,wall, or one for all axes."),
]
TimeStep = Annotated[float | None, typer.Option("--dt", metavar="TIME", help="Your data: time between two frames.")]
Units = Annotated[str | None, typer.Option(metavar="UNITS", help="Your data: unit of each field, such as m/s,m/s,Pa.")]
Mask = Annotated[
    str | None, typer.Option(metavar="FIELD", help="Your data: field that is 1 in the solid and 0 in the fluid.")
]
SkipBad = Annotated[
    bool, typer.Option("--skip-bad", help="Skip trajectories with NaN or infinite values, and record which.")
]


def names_of(text: str | None) -> tuple[str, ...] | None:
    """The names of an option, or None if it is not given."""
    return split_names(text) if text else None


def read_options_of(
    fields: tuple[str, ...] | None,
    steady: bool | None,
    axes: str | None,
    boundary: str | None,
    dt: float | None,
    units: str | None,
    mask: str | None,
    skip_bad: bool,
) -> ReadOptions:
    from sigmasolver.data.formats import ReadOptions

    return ReadOptions(fields, steady, names_of(axes), names_of(boundary), dt, names_of(units), mask, skip_bad)


def training_data(
    data: Path, store: Path, options: ReadOptions, world: World, own: bool, stderr: bool = False
) -> Reader:
    """Open the data in place, or import them to `store` if trajectories are to be skipped.

    `own`: the data are the user's own, not a public data set recognised by its shape. `stderr`: print to stderr.
    """
    from sigmasolver.data.formats import ReadOptions, guess_format, open_data
    from sigmasolver.data.store import is_store

    if not data.exists():
        raise ValueError(f"File or folder not found: {data}.")
    if is_store(data):
        if "reading" in options.recorded:
            raise ValueError(
                f"{data} is a store with fixed axes, boundary, times and units; import its source again to change them."
            )
        if not options.skip_bad:
            return open_data(data)
        return _open_imported(data, store, options, None, world, stderr)
    file_format = guess_format(data)
    if file_format.describes_itself:
        if not options.recorded and not options.skip_bad:
            options = ReadOptions()  # it defines all its fields; the recipe selects some
        elif file_format.select is None:
            options = replace(options, fields=None, steady=None)
    kind = "arrays" if own and file_format.name == BY_SHAPE else file_format.name
    if options.skip_bad or store.exists():  # resume the import of an earlier command
        return _open_imported(data, store, options, kind, world, stderr)
    reader = open_data(data, options, kind)
    _examine(reader, world, stderr)
    return reader


def _examine(reader: Reader, world: World, stderr: bool) -> None:
    """Print notes on data that are read in place, and reject non-finite values before anything is computed. Public data
    sets may be huge, so their values are checked when the training reads them."""
    from sigmasolver.data.formats.in_place import ForeignReader

    notes, bad = reader.notes, list[str]()
    if isinstance(reader, ForeignReader) and not reader.examined:
        with progress("reading", None) as update:
            values = reader.examine(update)
        notes, bad = (*notes, *values.notes()), values.bad_labels()
    if world.first:
        shape = " × ".join(map(str, reader.header.shape))
        description = f"{len(reader)} trajectories of {shape} from {reader.header.source}, read in place"
        _print_with_notes(f"{reader.path}: {description}", notes, stderr)
    if bad:
        raise _non_finite_error(reader.path, bad)


def _non_finite_error(data: Path, bad: Sequence[str]) -> ValueError:
    remainder = f" and {len(bad) - 8} more" if len(bad) > 8 else ""
    return ValueError(
        f"{data} has non-finite values in {', '.join(bad[:8])}{remainder}; fix them, or skip them with --skip-bad."
    )


def _open_imported(
    data: Path, store: Path, options: ReadOptions, kind: str | None, world: World, stderr: bool
) -> Reader:
    from sigmasolver.data.formats import import_data, open_data, skip_bad
    from sigmasolver.data.header import OtherStoreError

    def convert() -> Imported:
        if kind is None:
            return skip_bad(data, store)
        with progress("importing", None) as update:
            return import_data(data, store, kind, progress=update, options=options)

    if world.first:
        try:
            imported = convert()
        except OtherStoreError:
            if (store.parent / "recipe.json").exists():
                raise
            store.unlink()  # left over from a failed command; no run uses it
            imported = convert()
        print_imported(imported, stderr)
        if imported.bad:
            raise _non_finite_error(data, imported.bad)
    world.wait()
    return open_data(store)


def print_imported(imported: Imported, stderr: bool = False) -> None:
    shape = " × ".join(map(str, imported.shape))
    _print_with_notes(
        f"{imported.path}: {imported.count} trajectories of {shape} from {imported.kind}", imported.notes, stderr
    )


def _print_with_notes(line: str, notes: Sequence[str], stderr: bool) -> None:
    screen = console(stderr=stderr)
    screen.print(line, soft_wrap=True)
    for note in notes:
        screen.print(f"  {note}", soft_wrap=True)
