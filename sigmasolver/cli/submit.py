"""The command that submits another command as a job."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sigmasolver.cli.app import app
from sigmasolver.cli.suite import Nodes, Processes, Slurm
from sigmasolver.cli.terminal import console

__all__ = ["submit"]

MULTIPROCESS = ("train", "evaluate", "suite")
"""Commands that can run in several processes."""


@app.command()
def submit(
    name: Annotated[str, typer.Argument(help="Name of the job.")],
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="-- COMMAND", help="Command to run, such as -- train kf2d --data kf2d.h5 --out runs/kf2d."
        ),
    ],
    slurm: Slurm = None,
    nodes: Nodes = 1,
    processes: Processes = 1,
    jobs: Annotated[Path, typer.Option(help="Folder for the jobs and their logs.")] = Path("jobs"),
) -> None:
    """Submit a command as a Slurm job that is requeued and resumed until it finishes."""
    from sigmasolver.experiments.jobs import Command, Jobs, slurm_options

    known = {info.name or info.callback.__name__ for info in app.registered_commands if info.callback is not None}
    if words[0] not in known or words[0] == "submit":
        raise ValueError(f'"{words[0]}" is not a command that a job can run; pass one after --, such as -- train kf2d.')
    if nodes * processes > 1 and words[0] not in MULTIPROCESS:
        raise ValueError(
            f"{words[0]} runs in one process; --nodes and --processes apply only to {', '.join(MULTIPROCESS)}."
        )
    if Path(name).name != name or not name.strip("."):
        raise ValueError(f'"{name}" is not a valid job name; use letters, digits and hyphens.')
    registry, screen = Jobs(jobs), console()
    if state := registry.active([name]).get(name):
        raise ValueError(f"The job {name} is already {state}; wait for it, or choose another name.")
    job = registry.submit(name, "slurm", Command(words, processes, nodes), slurm_options(slurm or []))
    screen.print(f"{name}: submitted, {job.describe()}", soft_wrap=True)
