"""The command that trains one model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sigmasolver.cli.app import Device, Settings, Steady, app, device_of
from sigmasolver.cli.terminal import console, progress, training

if TYPE_CHECKING:
    from sigmasolver.parallel import World
    from sigmasolver.recipes import Recipe
    from sigmasolver.runs import Run
    from sigmasolver.train.infer_recipe import UserChoices

__all__ = ["Minutes", "engine_of", "say_trained", "train"]

Minutes = Annotated[
    float | None, typer.Option(help="Save the state and stop after this many minutes; the same command resumes.")
]


@app.command()
def train(
    task: Annotated[
        str | None,
        typer.Argument(
            help="A recipe: a task (ns2d, kf2d, ...) or a variant such as kf2d-released; omit it for your own data."
        ),
    ] = None,
    data: Annotated[Path | None, typer.Option(help="A store, or your own .h5, .npy, .npz or folder of them.")] = None,
    out: Annotated[Path | None, typer.Option(help="The run folder to create or resume.")] = None,
    resume: Annotated[Path | None, typer.Option(help="A run folder to resume; nothing else is needed.")] = None,
    model: Annotated[
        str | None, typer.Option(help="transolver-sigma or another; `sigmasolver models` lists them.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed of the initial weights and the order of windows; default: 42.")
    ] = None,
    fields: Annotated[str | None, typer.Option(help="Own data: the fields to use, such as u,v.")] = None,
    targets: Annotated[str | None, typer.Option(help="Own data: fields to predict; the rest are inputs only.")] = None,
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
    """Train a model. Stop at any time; `sigmasolver train --resume RUN` continues to the same weights."""
    from sigmasolver.experiments.queue import Deadline
    from sigmasolver.interrupts import Termination
    from sigmasolver.parallel import join
    from sigmasolver.recipes import changed, recipe_of
    from sigmasolver.runs import Run
    from sigmasolver.train.engine import Execution
    from sigmasolver.train.infer_recipe import UserChoices
    from sigmasolver.train.job import resume_run, train_run

    deadline = Deadline(minutes)
    own = {
        "--fields": fields, "--targets": targets, "--history": history, "--block": block, "--horizon": horizon,
        "--steady": steady,
    }  # fmt: skip
    with join(device_of(device)) as world, Termination():
        execution = Execution(world, engine_of(engine, world), shard)
        if resume is not None:
            given = (task, out, settings, model, seed, *own.values())
            if any(value is not None for value in given):
                raise ValueError("A resumed run keeps its recipe; use --resume alone, or with --data and --device.")
            with training(world) as watch:
                resume_run(Run(resume), data, execution, watch, deadline.passed)
            return say_trained(Run(resume), world)
        seed = 42 if seed is None else seed
        published = changed(recipe_of(task, model, seed), settings or []) if task is not None else None
        if data is None or out is None:
            raise ValueError("Missing --data or --out: name the training data and the run folder.")
        if task is not None and any(value is not None for value in own.values()):
            named = next(name for name, value in own.items() if value is not None)
            raise ValueError(
                f"{named} is only for your own data; change a task with --set, such as --set task.history=4."
            )
        if published is not None:
            store, recipe = _as_store(data, out, None, None, None, world), published
        else:
            choices = UserChoices(
                data.resolve().stem,
                _names(fields),
                _names(targets),
                history,
                block,
                horizon,
                model or "transolver-sigma",
                seed,
            )
            store, recipe = _infer(data, out, choices, steady, settings or [], world)
        with training(world) as watch:
            train_run(recipe, store, Run(out), execution, watch, deadline.passed)
        say_trained(Run(out), world)


def _infer(
    data: Path, out: Path, choices: UserChoices, steady: bool | None, settings: list[str], world: World
) -> tuple[Path, Recipe]:
    """The store and the recipe for a user's own data; every choice is printed."""
    from sigmasolver.data.store import open_store
    from sigmasolver.recipes import changed
    from sigmasolver.train.infer_recipe import infer_recipe

    if choices.fields and choices.targets:
        choices = replace(choices, fields=tuple(dict.fromkeys((*choices.fields, *choices.targets))))
    # Nothing here is a public data set, though its shape may look like one.
    store = _as_store(data, out, "arrays" if data.suffix != ".mat" else None, choices.fields, steady, world)
    with open_store(store) as reader:
        if steady and (frames := len(reader.header.layout.times)) > 1:
            raise ValueError(f"{data} is a store of {frames} frames, not steady; import its source with --steady.")
        recipe, notes = infer_recipe(reader.header, len(reader), choices, world.device.type == "cuda")
    recipe = changed(recipe, settings)
    notes += [f"then set: {', '.join(settings)}"] if settings else []
    for note in notes if world.first else ():
        console().print(f"  {note}", soft_wrap=True)
    return store, recipe


def _names(text: str | None) -> tuple[str, ...] | None:
    return tuple(name.strip() for name in text.split(",")) if text else None


def engine_of(text: str, world: World) -> str:
    """A CUDA graph on a single GPU; eager elsewhere."""
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
    from sigmasolver.interrupts import TERMINATED, Termination

    if not world.first:
        return
    last = (run.read_log() or [{}])[-1]
    loss = f", {last['step']} steps, loss {last['loss']:.4g}" if last else ""
    error = f", validation error {100 * last['error']:.3g} %" if last.get("error") is not None else ""
    done = "trained" if run.finished else "stopped"
    then = f"evaluate {run.path}" if run.finished else f"train --resume {run.path}"
    console().print(f"{run.path}: {done}{loss}{error}\nnext: sigmasolver {then}", soft_wrap=True)
    if Termination.asked and not run.finished:
        raise typer.Exit(TERMINATED)
