"""The command that writes tiny stand-ins for data that would have to be downloaded."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sigmasolver.cli.app import app
from sigmasolver.cli.terminal import console

if TYPE_CHECKING:  # --help answers at once without torch
    from sigmasolver.simulate.fixtures import Fixture

__all__ = ["make_fixture"]


@app.command("make-fixture")
def make_fixture(
    name: Annotated[
        str | None, typer.Argument(help="A task (ns2d, fsi, ignit-hit, ...) or a format (netcdf, zarr, vtk, ...).")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder to write to.")] = None,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
) -> None:
    """Write a tiny synthetic data set for a task or format, to try it without a download; omit NAME to list them."""
    from sigmasolver.data.formats import open_data
    from sigmasolver.runs.files import making_folder
    from sigmasolver.simulate.fixtures import FIXTURES, fixture_of
    from sigmasolver.simulate.fixtures.tiny import settings_for
    from sigmasolver.tasks import TASKS

    screen = console()
    if name is None:
        for key, row in FIXTURES.items():
            screen.print(f"{key}: {row.description}", soft_wrap=True)
        return
    if out is None:
        raise ValueError("Missing --out: pass the folder to write to.")
    row = fixture_of(name)
    if out.is_dir() and row.home is not None:
        data = _beside_others(row, out / row.home, seed)
    else:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise ValueError(f"{out} is not an empty folder; choose another.")
        out.parent.mkdir(parents=True, exist_ok=True)
        with making_folder(out) as folder:
            data = out / row.write(folder, seed).relative_to(folder)
    screen.print(f"{data}: {row.description}; synthetic, not the published data", soft_wrap=True)
    words = ["sigmasolver", "train", "--data", str(data), "--out", f"runs/{name}"]
    if name in TASKS:
        with open_data(data) as reader:
            settings = settings_for(name, reader)
        words = [*words[:2], name, *words[2:], *(word for one in settings for word in ("--set", one))]
    screen.print(f"next: {shlex.join(words)}", soft_wrap=True)


def _beside_others(row: Fixture, home: Path, seed: int) -> Path:
    """The folder of one fixture among those of others; a file beside it is written only where there is none."""
    from sigmasolver.runs.files import making_folder

    if home.exists():
        raise ValueError(f"{home} already exists; choose another folder.")
    with making_folder(home) as folder:
        made = row.write(folder, seed)
        for file in (one for one in folder.iterdir() if one.is_file()):
            if (home.parent / file.name).exists():
                file.unlink()
            else:
                file.replace(home.parent / file.name)
        for one in made.iterdir():
            one.replace(folder / one.name)
        made.rmdir()
    return home
