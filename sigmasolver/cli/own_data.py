"""Options with which a user says how their own files are to be read, and the import that follows them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sigmasolver.cli.terminal import console, progress

if TYPE_CHECKING:
    from sigmasolver.data.formats import Imported, Reading
    from sigmasolver.runtime.parallel import World

__all__ = [
    "Axes",
    "Boundary",
    "Mask",
    "SkipBad",
    "TimeStep",
    "Units",
    "as_store",
    "names_of",
    "reading_of",
    "say_imported",
]

Axes = Annotated[
    str | None, typer.Option(metavar="NAMES", help="Own arrays: their axes in order, such as count,time,x,y,field.")
]
Boundary = Annotated[
    str | None,
    typer.Option(metavar="KINDS", help="Own data: the boundary of each axis, such as periodic,wall; one word for all."),
]
TimeStep = Annotated[float | None, typer.Option("--dt", metavar="TIME", help="Own data: time between two frames.")]
Units = Annotated[
    str | None, typer.Option(metavar="UNITS", help="Own data: the unit of each field, such as m/s,m/s,Pa.")
]
Mask = Annotated[
    str | None, typer.Option(metavar="FIELD", help="Own data: the field that is 1 in a solid and 0 in the fluid.")
]
SkipBad = Annotated[
    bool, typer.Option("--skip-bad", help="Leave out trajectories with NaN or infinite values, and record which.")
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


def as_store(data: Path, store: Path, reading: Reading, world: World, own: bool, stderr: bool = False) -> Path:
    """The data as a store: themselves where they can be read as they are, else imported to `store`.

    `own`: nothing there is a public data set, though its shape may look like one. `stderr`: where to report.
    """
    from sigmasolver.data.formats import guess_kind, import_data, is_read_in_place, open_data, skip_bad
    from sigmasolver.data.header import OtherStoreError
    from sigmasolver.data.store import is_store

    if not data.exists():
        raise ValueError(f"There is no file or folder {data}.")
    if is_store(data):
        if "reading" in reading.recorded:
            raise ValueError(
                f"{data} is a store, which has its axes, boundary, times and units; import its source again to change "
                "them."
            )
        if not reading.skip_bad:
            return data
    in_place = is_read_in_place(data)
    if in_place and not reading.recorded and not reading.skip_bad:
        if world.first:
            with open_data(data) as reader:
                for note in reader.notes:
                    console(stderr=stderr).print(f"  {note}", soft_wrap=True)
        return data
    if in_place and guess_kind(data).select is None:
        reading = replace(reading, fields=None, steady=None)  # all are imported, and the recipe takes some
    kind = "arrays" if own and not in_place and data.suffix != ".mat" else None

    def convert() -> Imported:
        if is_store(data):
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
            more = f" and {len(made.bad) - 8} more" if len(made.bad) > 8 else ""
            raise ValueError(
                f"{data} has values that are not finite in {', '.join(made.bad[:8])}{more}; repair them, or leave them "
                "out with --skip-bad."
            )
    world.wait()
    return store


def say_imported(made: Imported, stderr: bool = False) -> None:
    screen = console(stderr=stderr)
    shape = " × ".join(map(str, made.shape))
    screen.print(f"{made.path}: {made.count} trajectories of {shape} from {made.kind}", soft_wrap=True)
    for note in made.notes:
        screen.print(f"  {note}", soft_wrap=True)
