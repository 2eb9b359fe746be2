"""The command that submits another one as a job."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sigmasolver.cli.app import app
from sigmasolver.cli.suite import Nodes, Processes, Slurm
from sigmasolver.cli.terminal import console

__all__ = ["submit"]

SHARED = ("train", "evaluate", "suite")
"""Commands that several processes can share."""


@app.command()
def submit(
    name: Annotated[str, typer.Argument(help="What to call the job.")],
    words: Annotated[
        list[str], typer.Argument(metavar="-- COMMAND", help="A command: -- train kf2d --data kf2d.h5 --out runs/kf2d.")
    ],
    slurm: Slurm = None,
    nodes: Nodes = 1,
    processes: Processes = 1,
    jobs: Annotated[Path, typer.Option(help="The folder that holds the jobs and their logs.")] = Path("jobs"),
) -> None:
    """Submit one command as a Slurm job; it is requeued and resumed until it is finished."""
    from sigmasolver.experiments.jobs import Command, Jobs, slurm_options

    known = {one.name or one.callback.__name__ for one in app.registered_commands if one.callback is not None}
    if words[0] not in known or words[0] == "submit":
        raise ValueError(f'"{words[0]}" is no command that a job could run; write it after --, such as -- train kf2d.')
    if nodes * processes > 1 and words[0] not in SHARED:
        raise ValueError(f"{words[0]} runs in one process; --nodes and --processes are for {', '.join(SHARED)}.")
    if Path(name).name != name or not name.strip("."):
        raise ValueError(f'"{name}" cannot be the name of a job; write letters, digits and hyphens.')
    listed, screen = Jobs(jobs), console()
    if state := listed.active([name]).get(name):
        raise ValueError(f"The job {name} is {state} already; wait for it, or choose another name.")
    job = listed.submit(name, "slurm", Command(words, processes, nodes), slurm_options(slurm or []))
    screen.print(f"{name}: submitted, {job.described()}", soft_wrap=True)
