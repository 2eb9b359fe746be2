"""Commands that train."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sigmasolver.cli.app import Device, Settings, Steady, app, device_of
from sigmasolver.terminal import console, progress, training

if TYPE_CHECKING:
    from sigmasolver.parallel import World
    from sigmasolver.recipes import Recipe
    from sigmasolver.runs import Run
    from sigmasolver.suite import Deadline
    from sigmasolver.train.engine import Place
    from sigmasolver.train.own import Wishes

__all__ = ["suite", "train"]

Minutes = Annotated[
    float | None, typer.Option(help="Save the state and stop after so many minutes; the same command goes on.")
]


@app.command()
def train(
    task: Annotated[
        str | None,
        typer.Argument(help="A recipe: a task (ns2d, kf2d, ...) or kf2d-released and the like; none: your own data."),
    ] = None,
    data: Annotated[Path | None, typer.Option(help="A store, or your own .h5, .npy, .npz or folder of them.")] = None,
    out: Annotated[Path | None, typer.Option(help="The run folder to make, or to go on with.")] = None,
    resume: Annotated[Path | None, typer.Option(help="A run folder to go on with; nothing else is needed.")] = None,
    model: Annotated[
        str | None, typer.Option(help="transolver-sigma or another; `sigmasolver models` lists them.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Fixes first weights and order of windows; 42 if not given.")] = None,
    fields: Annotated[str | None, typer.Option(help="Own data: the fields to use, such as u,v.")] = None,
    targets: Annotated[str | None, typer.Option(help="Own data: those to predict; the others are given.")] = None,
    steady: Steady = None,
    history: Annotated[int | None, typer.Option(help="Own data: frames the model sees.")] = None,
    block: Annotated[int | None, typer.Option(help="Own data: frames it predicts in one call.")] = None,
    horizon: Annotated[int | None, typer.Option(help="Own data: frames that are evaluated.")] = None,
    minutes: Minutes = None,
    settings: Settings = None,
    device: Device = "auto",
    engine: Annotated[str, typer.Option(help="auto, eager, compiled, graph or compiled-graph.")] = "auto",
    shard: Annotated[bool, typer.Option("--shard", help="Under torchrun: split the parameters (FSDP2).")] = False,
) -> None:
    """Train a model. Stop it at any moment: `sigmasolver train --resume RUN` continues to the same weights."""
    from sigmasolver.parallel import join
    from sigmasolver.recipes import changed, recipe_of
    from sigmasolver.runs import Run
    from sigmasolver.suite import Deadline
    from sigmasolver.train.engine import Place
    from sigmasolver.train.job import resume_run, train_run
    from sigmasolver.train.own import Wishes

    deadline = Deadline(minutes)
    own = {
        "--fields": fields, "--targets": targets, "--history": history, "--block": block, "--horizon": horizon,
        "--steady": steady,
    }  # fmt: skip
    with join(device_of(device)) as world:
        place = Place(world, engine_of(engine, world), shard)
        if resume is not None:
            given = (task, out, settings, model, seed, *own.values())
            if any(value is not None for value in given):
                raise ValueError(
                    "A run that goes on keeps its recipe; give --resume alone, or with --data and --device."
                )
            with training(world) as watch:
                resume_run(Run(resume), data, place, watch, deadline.passed)
            return say_trained(Run(resume), world)
        seed = 42 if seed is None else seed
        published = changed(recipe_of(task, model, seed), settings or []) if task is not None else None
        if data is None or out is None:
            raise ValueError("Say what to learn from with --data, and where the run shall lie with --out.")
        if task is not None and any(value is not None for value in own.values()):
            named = next(name for name, value in own.items() if value is not None)
            raise ValueError(f"{named} is for data of your own; change a task with --set task.history=4 and the like.")
        if published is not None:
            store, recipe = _as_store(data, out, None, None, None, world), published
        else:
            wishes = Wishes(
                data.resolve().stem,
                _names(fields),
                _names(targets),
                history,
                block,
                horizon,
                model or "transolver-sigma",
                seed,
            )
            store, recipe = _own(data, out, wishes, steady, settings or [], world)
        with training(world) as watch:
            train_run(recipe, store, Run(out), place, watch, deadline.passed)
        say_trained(Run(out), world)


@app.command()
def suite(
    name: Annotated[
        str,
        typer.Argument(
            help="main, counterparts, counterparts-matched, ablations, slice-updates, scaling, efficiency, "
            "comparison, ledger or factors."
        ),
    ],
    data: Annotated[Path, typer.Option(help="A folder with one store for each task: ns2d.h5, ...")] = Path("data"),
    data_seed: Annotated[
        int | None, typer.Option(help="Simulate stores that are missing there, with this seed.")
    ] = None,
    out: Annotated[Path, typer.Option(help="The folder that holds the runs.")] = Path("runs"),
    only: Annotated[
        list[str] | None, typer.Option(help="Only runs whose name matches, such as 'ns2d-*-42'; repeatable.")
    ] = None,
    minutes: Minutes = None,
    show: Annotated[
        bool, typer.Option("--list", help="List the runs and how far they are, and train nothing.")
    ] = False,
    settings: Settings = None,
    device: Device = "auto",
    engine: Annotated[str, typer.Option(help="auto, eager, compiled, graph or compiled-graph.")] = "auto",
) -> None:
    """Train and evaluate the rows of a suite in order; the same command continues it.

    Most suites are tables of the paper; ledger holds our results at its budgets, factors varies one setting of KF2D,
    efficiency has the workloads that `measure` times.
    """
    from fnmatch import fnmatch

    from sigmasolver.parallel import join
    from sigmasolver.recipes import changed, suite_of
    from sigmasolver.runs import Run
    from sigmasolver.suite import Deadline, is_done
    from sigmasolver.train.engine import Place

    deadline, screen = Deadline(minutes), console()
    rows = suite_of(name)
    chosen = [key for key in rows if only is None or any(fnmatch(key, one) for one in only)]
    if not chosen:
        raise ValueError(f'No run of the suite {name} matches "{", ".join(only or ())}"; list them with --list.')
    if show:
        for key in chosen:
            screen.print(f"{key:45} {_progress_of(Run(out / key), changed(rows[key], settings or []))}")
        return
    with join(device_of(device)) as world:
        place = Place(world, engine_of(engine, world))
        for key in chosen:
            # All rows of a task share one store, whichever of them are trained now.
            task = rows[key].task.name
            siblings = {k: changed(one, settings or []) for k, one in rows.items() if one.task.name == task}
            if not is_done(Run(out / key), siblings[key]):
                if not _finish_row(key, siblings, data, data_seed, out, place, deadline):
                    return
            elif world.first:
                screen.print(f"{key}: finished before")


def _progress_of(run: Run, recipe: Recipe) -> str:
    from sigmasolver.suite import fraction_done, is_done

    if run.finished:
        return "finished" if is_done(run, recipe) else "trained, not evaluated"
    done = fraction_done(run)
    return f"{100 * done:.1f} %" if done else "open"


def _finish_row(
    key: str,
    siblings: dict[str, Recipe],
    data: Path,
    data_seed: int | None,
    out: Path,
    place: Place,
    deadline: Deadline,
) -> bool:
    """Simulate, train and evaluate one row; False where the time did not suffice."""
    from sigmasolver.runs import Run
    from sigmasolver.suite import OutOfTimeError, ensure_store, fraction_done, run_row

    recipe, run, screen = siblings[key], Run(out / key), console()
    try:
        with progress(f"simulating {recipe.task.name}", None) as move:

            def simulated(done: int, total: int, part: float) -> None:
                deadline.check("simulating")
                move(done, total)

            store = ensure_store(recipe, data, siblings.values(), data_seed, place, simulated)
        if place.world.first:
            screen.print(f"{key}: training from {100 * fraction_done(run):.1f} %")
        with training(place.world) as watch:
            run_row(recipe, store, run, place, deadline, watch)
    except OutOfTimeError as stopped:
        if place.world.first:
            trained = f"{100 * fraction_done(run):.1f} % trained"
            screen.print(f"{key}: stopped by --minutes while {stopped} ({trained}); the same command goes on")
        return False
    return True


def _own(
    data: Path, out: Path, wishes: Wishes, steady: bool | None, settings: list[str], world: World
) -> tuple[Path, Recipe]:
    """The store and the recipe for data of one's own; every choice is printed."""
    from sigmasolver.data.store import open_store
    from sigmasolver.recipes import changed
    from sigmasolver.train.own import own_recipe

    if wishes.fields and wishes.targets:
        wishes = replace(wishes, fields=tuple(dict.fromkeys((*wishes.fields, *wishes.targets))))
    # Nothing here is a public data set, though its shape may look like one.
    store = _as_store(data, out, "arrays" if data.suffix != ".mat" else None, wishes.fields, steady, world)
    with open_store(store) as reader:
        if steady and (frames := len(reader.header.layout.times)) > 1:
            raise ValueError(f"{data} is a store of {frames} frames, not steady; import its source with --steady.")
        recipe, notes = own_recipe(reader.header, len(reader), wishes, world.device.type == "cuda")
    recipe = changed(recipe, settings)
    notes += [f"then set: {', '.join(settings)}"] if settings else []
    for note in notes if world.first else ():
        console().print(f"  {note}", soft_wrap=True)
    return store, recipe


def _names(text: str | None) -> tuple[str, ...] | None:
    return tuple(name.strip() for name in text.split(",")) if text else None


def engine_of(text: str, world: World) -> str:
    """A CUDA graph where there is one GPU; torch as it is elsewhere."""
    if text != "auto":
        return text
    return "graph" if world.device.type == "cuda" and world.size == 1 else "eager"


def _as_store(
    data: Path, out: Path, kind: str | None, names: tuple[str, ...] | None, steady: bool | None, world: World
) -> Path:
    """The data as a store: itself, or imported into the run folder."""
    from sigmasolver.data.formats import import_data as convert
    from sigmasolver.data.formats.hdf5 import is_store
    from sigmasolver.data.header import OtherStoreError

    if not data.exists():
        raise ValueError(f"There is no file or folder {data}.")
    if is_store(data):
        return data
    store = out / "data.h5"
    if world.first:
        with progress("importing", None) as move:
            try:
                made = convert(data, store, kind, progress=move, names=names, steady=steady)
            except OtherStoreError:
                if (out / "recipe.json").exists():
                    raise
                store.unlink()  # what an earlier command imported before it failed; no run stands on it
                made = convert(data, store, kind, progress=move, names=names, steady=steady)
        shape = " × ".join(map(str, made.shape))
        console().print(f"{store}: {made.count} trajectories of {shape} from {made.kind}", soft_wrap=True)
        for note in made.notes:
            console().print(f"  {note}", soft_wrap=True)
    world.wait()
    return store


def say_trained(run: Run, world: World) -> None:
    if not world.first:
        return
    last = (run.read_log() or [{}])[-1]
    loss = f", {last['step']} steps, loss {last['loss']:.4g}" if last else ""
    error = f", validation error {100 * last['error']:.3g} %" if last.get("error") is not None else ""
    done = "trained" if run.finished else "stopped"
    then = f"evaluate {run.path}" if run.finished else f"train --resume {run.path}"
    console().print(f"{run.path}: {done}{loss}{error}\nnext: sigmasolver {then}", soft_wrap=True)
