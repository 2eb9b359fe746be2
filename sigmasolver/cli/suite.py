"""The command that trains the rows of a suite, in this process or as jobs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sigmasolver.cli.app import Device, Plugins, Settings, app, device_of
from sigmasolver.cli.terminal import console, progress, training
from sigmasolver.cli.train import Minutes, engine_of

if TYPE_CHECKING:
    from sigmasolver.experiments.jobs import Job, JobSpec
    from sigmasolver.experiments.queue import Deadline
    from sigmasolver.recipes import Recipe
    from sigmasolver.runs import Run
    from sigmasolver.train.engine import Execution

__all__ = ["Nodes", "Processes", "Slurm", "suite"]

On = Annotated[str | None, typer.Option(help="Run each row as a job: on slurm, or local for this machine.")]
Slurm = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=VALUE",
        help="An sbatch option: partition=gpu, time=600 (minutes), gpus-per-node=1; repeatable.",
    ),
]
Processes = Annotated[int, typer.Option(min=1, help="Processes per node of a job, started with torchrun.")]
Nodes = Annotated[int, typer.Option(min=1, help="Nodes per Slurm job.")]


@app.command()
def suite(
    name: Annotated[
        str,
        typer.Argument(
            help="main, counterparts, counterparts-matched, ablations, slice-updates, scaling, efficiency, "
            "comparison, cost, ledger or factors."
        ),
    ],
    data: Annotated[
        Path, typer.Option(help="Folder with one store per task (ns2d.h5) or public data as downloaded (fsi/).")
    ] = Path("data"),
    data_seed: Annotated[int | None, typer.Option(help="Simulate missing stores with this seed.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for the runs.")] = Path("runs"),
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Only runs whose name matches, such as 'ns2d-*-42'; repeatable."),
    ] = None,
    minutes: Minutes = None,
    windows: Annotated[
        int | None,
        typer.Option(min=1, help="Number of evenly spaced test windows to evaluate; default: the whole test split."),
    ] = None,
    diagnose: Annotated[
        bool,
        typer.Option(
            "--diagnose",
            help="Also diagnose each row on the paper's sample of windows: error decomposition, slice corrections.",
        ),
    ] = False,
    ledger: Annotated[
        Path | None,
        typer.Option(help="JSON Lines file of results: skip the runs in it, and add each finished row."),
    ] = None,
    show: Annotated[bool, typer.Option("--list", help="List the runs and their progress without training.")] = False,
    settings: Settings = None,
    plugin: Plugins = None,
    device: Device = "auto",
    engine: Annotated[str, typer.Option(help="auto, eager, compiled, graph or compiled-graph.")] = "auto",
    data_only: Annotated[bool, typer.Option("--data-only", help="Simulate missing stores without training.")] = False,
    on: On = None,
    slurm: Slurm = None,
    nodes: Nodes = 1,
    processes: Processes = 1,
    most: Annotated[int | None, typer.Option("--jobs", min=1, help="Maximum number of jobs at a time.")] = None,
    detach: Annotated[
        bool, typer.Option("--detach", help="Submit the jobs to Slurm and exit without waiting.")
    ] = False,
) -> None:
    """Train and evaluate the rows of a suite in order; the same command resumes it.

    With --on, every row runs as a separate job. Most suites are tables of the paper; ledger contains our results at
    its budgets, factors varies one setting of KF2D, and efficiency contains the workloads of `measure`.
    """
    from fnmatch import fnmatch

    from sigmasolver.experiments.jobs import Jobs
    from sigmasolver.experiments.ledger import collect, recorded_runs, write
    from sigmasolver.experiments.queue import Deadline, is_done, run_row
    from sigmasolver.recipes import changed, suite_of
    from sigmasolver.runs import Run
    from sigmasolver.runs.files import refuse_folder
    from sigmasolver.runtime.interrupts import TERMINATED, Termination
    from sigmasolver.runtime.parallel import join
    from sigmasolver.train.engine import Execution

    deadline, screen = Deadline(minutes), console()
    rows = suite_of(name)
    selected = [key for key in rows if only is None or any(fnmatch(key, pattern) for pattern in only)]
    if not selected:
        raise ValueError(f'No run of the suite {name} matches "{", ".join(only or ())}"; list them with --list.')
    recorded: set[str] = set()
    if ledger is not None:
        refuse_folder(ledger)
        recorded = recorded_runs(
            ledger, {key: changed(rows[key], settings or []) for key in selected}, data_seed, windows
        )
    if show:
        jobs = Jobs(_jobs_folder(out))
        active = jobs.active(selected)
        for key in selected:
            if key in recorded:
                screen.print(f"{key:45} in {ledger}", soft_wrap=True)
                continue
            status = _run_status(Run(out / key), changed(rows[key], settings or []), windows, data_seed)
            screen.print(f"{key:45} {status}{_job_status(jobs.find(key), active.get(key), status)}", soft_wrap=True)
        return
    if ledger is not None and not data_only:
        write(ledger, [])  # fail before the training, not after it, if it cannot be written
    if skipped := recorded.intersection(selected):
        screen.print(f"{ledger}: has {len(skipped)} of {len(selected)} runs", soft_wrap=True)
        selected = [key for key in selected if key not in skipped]
    if on is not None:
        if minutes is not None:
            raise ValueError("--minutes stops this command, not its jobs; limit a job with --slurm time=MINUTES.")
        if ledger is not None and detach:
            raise ValueError("--ledger requires this command to wait; omit --detach, or repeat it after the jobs.")
        arguments = ["suite", name, "--data", str(data), "--out", str(out), "--device", device, "--engine", engine]
        arguments += ["--data-seed", str(data_seed)] if data_seed is not None else []
        arguments += [argument for setting in settings or () for argument in ("--set", setting)]
        arguments += ["--windows", str(windows)] if windows is not None else []
        arguments += ["--diagnose"] if diagnose else []
        tasks = {rows[key].task.name for key in selected}
        recipes = {key: changed(recipe, settings or []) for key, recipe in rows.items() if recipe.task.name in tasks}
        specs = _job_specs(arguments, recipes, selected, data, data_seed, out, processes, nodes, data_only, windows)
        failed = _run_jobs(specs, out, on, slurm or [], nodes, most, detach)
        if ledger is not None and not data_only:
            write(ledger, [row for key in selected if key not in failed for row in collect(Run(out / key), windows)])
        if failed:
            raise typer.Exit(1)
        return
    job_options = {
        "--slurm": slurm,
        "--jobs": most,
        "--detach": detach,
        "--nodes": nodes > 1,
        "--processes": processes > 1,
    }
    for option in (option for option, value in job_options.items() if value):
        raise ValueError(f"{option} applies only to jobs; add --on slurm or --on local.")
    with join(device_of(device)) as world, Termination():
        execution = Execution(world, engine_of(engine, world))
        finish = None if data_only else partial(run_row, windows=windows, diagnose=diagnose)
        for key in selected:
            # All rows of a task share one store, also those that are not selected.
            task = rows[key].task.name
            siblings = {k: changed(recipe, settings or []) for k, recipe in rows.items() if recipe.task.name == task}
            run = Run(out / key)
            if data_only or not is_done(run, siblings[key], windows, data_seed):
                if not _finish_row(key, siblings, data, data_seed, run, execution, deadline, finish):
                    raise typer.Exit(TERMINATED if Termination.requested else 0)
            elif world.first:
                screen.print(f"{key}: already finished")
            if ledger is not None and world.first and not data_only:
                write(ledger, collect(run, windows))


def _run_status(run: Run, recipe: Recipe, windows: int | None, data_seed: int | None) -> str:
    from sigmasolver.experiments.queue import fraction_done, is_done

    if run.finished:
        return "finished" if is_done(run, recipe, windows, data_seed) else "trained, not evaluated"
    done = fraction_done(run)
    return f"{100 * done:.1f} %" if done else "pending"


def _jobs_folder(out: Path) -> Path:
    """A sibling of `out`, where every folder is a run."""
    return Path(f"{out if out.name else out.resolve()}-jobs")


def _job_status(job: Job | None, state: str | None, status: str) -> str:
    """The newest job of an unfinished row, for --list."""
    if job is None or status == "finished":
        return ""
    return f", {job.describe()}: {state or 'ended'}"


def _job_specs(
    arguments: list[str],
    recipes: dict[str, Recipe],
    selected: list[str],
    data: Path,
    data_seed: int | None,
    out: Path,
    processes: int,
    nodes: int,
    data_only: bool,
    windows: int | None,
) -> list[JobSpec]:
    """One job for each store to simulate, and one for each row."""
    from sigmasolver.experiments.jobs import Command, JobSpec
    from sigmasolver.experiments.queue import is_done, store_is_ready
    from sigmasolver.runs import Run

    stores, rows = {}, []
    for key in selected:
        recipe, task = recipes[key], recipes[key].task.name
        siblings = [sibling for sibling in recipes.values() if sibling.task.name == task]
        ready = partial(store_is_ready, recipe, data, siblings, data_seed)
        if task not in stores:
            command = Command([*arguments, "--only", key, "--data-only"])
            stores[task] = JobSpec(f"data-{task}", command, ready)
        command = Command([*arguments, "--only", key], processes, nodes)
        done = partial(is_done, Run(out / key), recipe, windows, data_seed)
        rows.append(JobSpec(key, command, done, after=f"data-{task}"))
    return [*stores.values(), *(rows if not data_only else ())]


def _run_jobs(
    specs: list[JobSpec], out: Path, on: str, slurm: list[str], nodes: int, max_jobs: int | None, detach: bool
) -> list[str]:
    """Submit the jobs, wait for them unless `detach`, and return the names of those that failed."""
    from sigmasolver.experiments.jobs import Jobs, slurm_options, supervise

    if on not in ("slurm", "local"):
        raise ValueError(f'Unknown --on "{on}"; choose from slurm, local.')
    if on == "local":
        for option, value in {"--slurm": slurm, "--nodes": nodes > 1, "--detach": detach}.items():
            if value:
                raise ValueError(f"{option} requires --on slurm.")
        max_jobs = max_jobs or 1
    if detach and max_jobs is not None:
        raise ValueError("--jobs requires this command to wait; omit --detach, or limit the jobs in Slurm.")
    screen = console()
    failed = supervise(
        specs,
        Jobs(_jobs_folder(out)),
        on,
        slurm_options(slurm),
        max_jobs,
        lambda line: screen.print(line, soft_wrap=True),
        detach,
    )
    if failed:
        screen.print(f"{len(failed)} of {len(specs)} failed: {', '.join(failed)}", soft_wrap=True)
    return failed


def _finish_row(
    key: str,
    siblings: dict[str, Recipe],
    data: Path,
    data_seed: int | None,
    run: Run,
    execution: Execution,
    deadline: Deadline,
    finish: Callable[..., None] | None,
) -> bool:
    """Simulate the data of one row and `finish` it with `run_row` (None: only simulate); False if the time limit was
    reached."""
    from sigmasolver.experiments.queue import OutOfTimeError, ensure_store, fraction_done
    from sigmasolver.runtime.interrupts import Termination

    recipe, screen = siblings[key], console()
    try:
        with progress(f"simulating {recipe.task.name}", None) as update:

            def on_progress(done: int, total: int, fraction: float) -> None:
                deadline.check("simulating")
                update(done, total)

            store = ensure_store(recipe, data, siblings.values(), data_seed, execution, on_progress)
        if finish is None:
            if execution.world.first:
                screen.print(f"{store}: complete", soft_wrap=True)
            return True
        if execution.world.first:
            doing = "evaluating" if run.finished else f"training from {100 * fraction_done(run):.1f} %"
            screen.print(f"{key}: {doing}")
        with training(execution.world) as watch:
            finish(recipe, store, run, execution, deadline, watch)
    except OutOfTimeError as stopped:
        if execution.world.first:
            progress_text = f"{100 * fraction_done(run):.1f} % trained"
            cause = "SIGTERM" if Termination.requested else "--minutes"
            message = f"{key}: stopped by {cause} while {stopped} ({progress_text}); the same command resumes"
            screen.print(message, soft_wrap=True)
        return False
    return True
