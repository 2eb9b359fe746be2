"""The command that writes tiny synthetic stand-ins for downloadable data."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sigmasolver.cli.app import app
from sigmasolver.cli.terminal import console

if TYPE_CHECKING:  # keeps torch out of --help
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
    from sigmasolver.runs.files import replacing_folder
    from sigmasolver.simulate.fixtures import FIXTURES, fixture_of
    from sigmasolver.simulate.fixtures.tiny import settings_for
    from sigmasolver.tasks import TASKS

    screen = console()
    if name is None:
        for key, fixture in FIXTURES.items():
            screen.print(f"{key}: {fixture.description}", soft_wrap=True)
        return
    if out is None:
        raise ValueError("Missing --out: pass the folder to write to.")
    fixture = fixture_of(name)
    if out.is_dir() and fixture.home is not None:
        data = _add_to_folder(fixture, out / fixture.home, seed)
    else:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise ValueError(f"{out} is not an empty folder; choose another.")
        out.parent.mkdir(parents=True, exist_ok=True)
        with replacing_folder(out) as folder:
            data = out / fixture.write(folder, seed).relative_to(folder)
    screen.print(f"{data}: {fixture.description}; synthetic, not the published data", soft_wrap=True)
    command = ["sigmasolver", "train", "--data", str(data), "--out", f"runs/{name}"]
    if name in TASKS:
        with open_data(data) as reader:
            settings = settings_for(name, reader)
        command = [*command[:2], name, *command[2:], *(word for setting in settings for word in ("--set", setting))]
    screen.print(f"next: {shlex.join(command)}", soft_wrap=True)


def _add_to_folder(fixture: Fixture, home: Path, seed: int) -> Path:
    """Write the fixture to `home` inside an existing folder; files already next to it are not overwritten."""
    from sigmasolver.runs.files import replacing_folder

    if home.exists():
        raise ValueError(f"{home} already exists; choose another folder.")
    with replacing_folder(home) as folder:
        data = fixture.write(folder, seed)
        for file in (entry for entry in folder.iterdir() if entry.is_file()):
            if (home.parent / file.name).exists():
                file.unlink()
            else:
                file.replace(home.parent / file.name)
        for entry in data.iterdir():
            entry.replace(folder / entry.name)
        data.rmdir()
    return home
