"""Options with which a user says how their own files are to be read, and the import that follows them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sigmasolver.cli.terminal import console, progress

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sigmasolver.data.formats import Imported, Reading
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
    "reading_of",
    "say_imported",
    "training_data",
]

BY_SHAPE = "factformer-kf2d"
"""The public data set that nothing but the shape of its array tells."""
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
    """Names between commas."""
    return tuple(name.strip() for name in text.split(",")) if text else None


def reading_of(
    fields: tuple[str, ...] | None,
    steady: bool | None,
    axes: str | None,
    boundary: str | None,
    dt: float | None,
    units: str | None,
    mask: str | None,
    skip_bad: bool,
) -> Reading:
    from sigmasolver.data.formats import Reading

    return Reading(fields, steady, names_of(axes), names_of(boundary), dt, names_of(units), mask, skip_bad)


def training_data(data: Path, store: Path, reading: Reading, world: World, own: bool, stderr: bool = False) -> Reader:
    """The data as they lie. Where trajectories are to be left out, they are imported to `store` without these.

    `own`: nothing there is a public data set that only its shape tells. `stderr`: where to report.
    """
    from sigmasolver.data.formats import Reading, guess_kind, open_data
    from sigmasolver.data.store import is_store

    if not data.exists():
        raise ValueError(f"File or folder not found: {data}.")
    if is_store(data):
        if "reading" in reading.recorded:
            raise ValueError(
                f"{data} is a store with fixed axes, boundary, times and units; import its source again to change them."
            )
        if not reading.skip_bad:
            return open_data(data)
        return _imported(data, store, reading, None, world, stderr)
    row = guess_kind(data)
    if row.describes_itself:
        if not reading.recorded and not reading.skip_bad:
            reading = Reading()  # all its fields are there, and the recipe takes some
        elif row.select is None:
            reading = replace(reading, fields=None, steady=None)
    kind = "arrays" if own and row.name == BY_SHAPE else row.name
    if reading.skip_bad or store.exists():  # what an earlier command imported goes on
        return _imported(data, store, reading, kind, world, stderr)
    reader = open_data(data, reading, kind)
    _examine(reader, world, stderr)
    return reader


def _examine(reader: Reader, world: World, stderr: bool) -> None:
    """Say what is worth knowing of data that are read in place, and refuse values that are not finite before anything
    is computed. Those of public data sets, which may be huge, show when the training reads them."""
    from sigmasolver.data.formats.in_place import ForeignReader

    notes, bad = reader.notes, list[str]()
    if isinstance(reader, ForeignReader) and not reader.examined:
        with progress("reading", None) as move:
            found = reader.examine(move)
        notes, bad = (*notes, *found.notes()), found.bad_in_words()
    if world.first:
        shape = " × ".join(map(str, reader.header.shape))
        what = f"{len(reader)} trajectories of {shape} from {reader.header.source}, read in place"
        _say(f"{reader.path}: {what}", notes, stderr)
    if bad:
        raise _not_finite(reader.path, bad)


def _not_finite(data: Path, bad: Sequence[str]) -> ValueError:
    more = f" and {len(bad) - 8} more" if len(bad) > 8 else ""
    return ValueError(
        f"{data} has non-finite values in {', '.join(bad[:8])}{more}; fix them, or skip them with --skip-bad."
    )


def _imported(data: Path, store: Path, reading: Reading, kind: str | None, world: World, stderr: bool) -> Reader:
    from sigmasolver.data.formats import import_data, open_data, skip_bad
    from sigmasolver.data.header import OtherStoreError

    def convert() -> Imported:
        if kind is None:
            return skip_bad(data, store)
        with progress("importing", None) as move:
            return import_data(data, store, kind, progress=move, reading=reading)

    if world.first:
        try:
            made = convert()
        except OtherStoreError:
            if (store.parent / "recipe.json").exists():
                raise
            store.unlink()  # what an earlier command imported before it failed; no run stands on it
            made = convert()
        say_imported(made, stderr)
        if made.bad:
            raise _not_finite(data, made.bad)
    world.wait()
    return open_data(store)


def say_imported(made: Imported, stderr: bool = False) -> None:
    shape = " × ".join(map(str, made.shape))
    _say(f"{made.path}: {made.count} trajectories of {shape} from {made.kind}", made.notes, stderr)


def _say(line: str, notes: Sequence[str], stderr: bool) -> None:
    screen = console(stderr=stderr)
    screen.print(line, soft_wrap=True)
    for note in notes:
        screen.print(f"  {note}", soft_wrap=True)
