"""The command that trains one model."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from sigmasolver.cli.app import Device, Plugins, Settings, Steady, app, device_of
from sigmasolver.cli.evaluate import warn_other_code
from sigmasolver.cli.own_data import (
    Axes,
    Boundary,
    Mask,
    SkipBad,
    TimeStep,
    Units,
    names_of,
    read_options_of,
    training_data,
)
from sigmasolver.cli.terminal import console, print_threads, training

if TYPE_CHECKING:
    from sigmasolver.data.reader import Reader
    from sigmasolver.recipes import Recipe
    from sigmasolver.runs import Run
    from sigmasolver.runtime.parallel import World

__all__ = ["Config", "Minutes", "engine_of", "named_recipe", "print_trained", "train"]

Minutes = Annotated[
    float | None, typer.Option(help="Save a checkpoint and stop after this many minutes; the same command resumes.")
]
Config = Annotated[
    Path | None,
    typer.Option(help="A recipe file (TOML or JSON) instead of a recipe name; see --print-config or recipe.json."),
]


@app.command()
def train(
    task: Annotated[
        str | None,
        typer.Argument(
            help="A recipe: a task (ns2d, kf2d, ...) or a variant such as kf2d-released; omit it for your own data."
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="A store; or your own .h5, .npy, .npz, NetCDF, Zarr or VTK data, as a file or folder."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Run folder to create or resume.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Run folder to resume; no other option is needed.")] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Model name, as listed by `sigmasolver models`; default: the recipe's, or transolver-sigma."),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Random seed of the initial weights and the window order; default: 42.")
    ] = None,
    fields: Annotated[str | None, typer.Option(help="Your data: fields to use, such as u,v.")] = None,
    targets: Annotated[
        str | None, typer.Option(help="Your data: fields to predict; the others are only inputs.")
    ] = None,
    steady: Steady = None,
    axes: Axes = None,
    boundary: Boundary = None,
    dt: TimeStep = None,
    units: Units = None,
    vector: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAMES",
            help="Your data: fields that form a vector in loss and metrics, such as u,v, or none; repeatable.",
        ),
    ] = None,
    mask: Mask = None,
    skip_bad: SkipBad = False,
    test: Annotated[int | None, typer.Option(help="Your data: number of test trajectories; 0: train on all.")] = None,
    test_data: Annotated[
        Path | None, typer.Option(help="Your data: separate test data; all of --data is then used for training.")
    ] = None,
    history: Annotated[int | None, typer.Option(help="Your data: number of input frames.")] = None,
    block: Annotated[int | None, typer.Option(help="Your data: number of frames predicted per call.")] = None,
    horizon: Annotated[int | None, typer.Option(help="Your data: number of frames to evaluate.")] = None,
    minutes: Minutes = None,
    settings: Settings = None,
    config: Config = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print the recipe as TOML for --config without training.")
    ] = False,
    plugin: Plugins = None,
    device: Device = "auto",
    engine: Annotated[str, typer.Option(help="auto, eager, compiled, graph or compiled-graph.")] = "auto",
    tensorboard: Annotated[
        Path | None, typer.Option(help="Also write TensorBoard event files to a subfolder of this folder.")
    ] = None,
    shard: Annotated[
        bool, typer.Option("--shard", help="Shard the parameters (FSDP2); needs several processes (torchrun).")
    ] = False,
) -> None:
    """Train a model. Stop at any time; `sigmasolver train --resume RUN` continues to the same weights."""
    from sigmasolver.data.formats import find_download
    from sigmasolver.experiments.queue import Deadline
    from sigmasolver.recipes import Recipe, changed, config_text
    from sigmasolver.runs import Run
    from sigmasolver.runtime.interrupts import Termination
    from sigmasolver.runtime.parallel import join
    from sigmasolver.settings import check_settings
    from sigmasolver.train.engine import Execution
    from sigmasolver.train.infer_recipe import UserChoices, infer_from_data
    from sigmasolver.train.job import resume_run, train_run
    from sigmasolver.train.tracking import combine_watches
    from sigmasolver.train.tracking import tensorboard as event_files

    deadline = Deadline(minutes)
    own_options = {
        "--fields": fields, "--targets": targets, "--history": history, "--block": block, "--horizon": horizon,
        "--steady": steady, "--vector": vector, "--mask": mask, "--test": test, "--test-data": test_data,
    }  # fmt: skip
    with join(device_of(device)) as world, Termination(), TemporaryDirectory(prefix="sigmasolver-") as scratch:
        execution = Execution(world, engine_of(engine, world), shard)
        if not print_config:
            print_threads(world)
        if resume is not None:
            options = (task, out, settings, model, seed, config, axes, boundary, dt, units, *own_options.values())
            if skip_bad or print_config or any(value is not None for value in options):
                raise ValueError(
                    "A resumed run keeps its recipe; use --resume alone, or only with --data and --device."
                )
            warn_other_code(Run(resume))
            with training(world) as watch, event_files(tensorboard, Run(resume)) as events:
                resume_run(Run(resume), data, execution, combine_watches(watch, events), deadline.passed)
            return print_trained(Run(resume), world)
        named = named_recipe(task, config, model, seed, settings or [])
        allowed = ("--fields", "--steady") if config is not None else ()  # these only say how to read a file
        conflict = next(
            (name for name, value in own_options.items() if value is not None and name not in allowed), None
        )
        if named is not None and conflict is not None:
            raise ValueError(
                f"{conflict} applies only to your own data; change a task with --set, such as --set task.history=4."
            )
        if named is not None and print_config:
            return typer.echo(config_text(named), nl=False)
        if data is None or (out is None and not print_config):
            raise ValueError("Missing --data or --out: pass the training data and the run folder.")
        check_settings(Recipe, settings or [])  # before the import, which may take long
        if test and test_data is not None:
            raise ValueError("With --test-data, all of --data is used for training; omit --test.")
        names, target_names = names_of(fields), names_of(targets)
        if names and target_names:
            names = tuple(dict.fromkeys((*names, *target_names)))
        read_options = read_options_of(names, steady, axes, boundary, dt, units, mask, skip_bad)
        if named is not None:
            data = find_download(named.task.name, data) or data
        folder = Path(scratch) if out is None else out
        store = training_data(
            data, folder / "data.h5", read_options, world, own=named is None or fields is not None, stderr=print_config
        )
        test_store = None
        if test_data is not None:
            test_store = training_data(
                test_data, folder / "test.h5", read_options, world, own=True, stderr=print_config
            )
        if named is None:
            choices = UserChoices(
                data.resolve().stem,
                fields=read_options.fields,
                targets=target_names,
                history=history,
                block=block,
                horizon=horizon,
                model=model or "transolver-sigma",
                seed=42 if seed is None else seed,
                vectors=_vectors(vector),
                mask=mask,
                test=test if test_store is None else 0,
                steady=read_options.steady,
            )
            recipe = changed(infer_from_data(store, choices, world.device.type == "cuda"), settings or [])
        else:
            recipe = named
        _print_plan(recipe, store, test_store, world, stderr=print_config)
        if print_config or out is None:
            return typer.echo(config_text(recipe), nl=False)
        with training(world) as watch, event_files(tensorboard, Run(out)) as events:
            train_run(recipe, store, Run(out), execution, combine_watches(watch, events), deadline.passed, test_store)
        print_trained(Run(out), world)


def named_recipe(
    task: str | None, config: Path | None, model: str | None, seed: int | None, settings: list[str]
) -> Recipe | None:
    """The recipe from a name or a file, with the settings applied; None if neither is given."""
    from sigmasolver.recipes import changed, read_config, recipe_of

    if config is None:
        return None if task is None else changed(recipe_of(task, model, 42 if seed is None else seed), settings)
    if task is not None:
        raise ValueError(f"The recipe is given twice, as {task} and --config {config}; omit one of them.")
    overrides = [
        f"{name}={value}" for name, value in (("model.name", model), ("train.seed", seed)) if value is not None
    ]
    return changed(read_config(config), [*overrides, *settings])


def _print_plan(recipe: Recipe, data: Reader, test: Reader | None, world: World, stderr: bool) -> None:
    """Print the training plan once all settings are known."""
    from sigmasolver.train.infer_recipe import describe_recipe

    windows = data.published_windows if recipe.task.split == "published" else None
    lines = describe_recipe(recipe, data.header, windows or recipe.split_of(data))
    for line in lines if world.first else ():
        test_note = f"; tested on {test.path}" if test is not None and line.startswith("split") else ""
        console(stderr=stderr).print(f"  {line}{test_note}", soft_wrap=True)


def _vectors(texts: list[str] | None) -> tuple[tuple[str, ...], ...] | None:
    if texts is None:
        return None
    return tuple(names for text in texts if text.strip() != "none" and (names := names_of(text)))


def engine_of(text: str, world: World) -> str:
    """Resolve auto: a CUDA graph on a single GPU, eager otherwise."""
    if text != "auto":
        return text
    return "graph" if world.device.type == "cuda" and world.size == 1 else "eager"


def print_trained(run: Run, world: World) -> None:
    from sigmasolver.runtime.interrupts import TERMINATED, Termination

    if not world.first:
        return
    last = (run.read_log() or [{}])[-1]
    loss = f", {last['step']} steps, loss {last['loss']:.4g}" if last else ""
    error = f", validation error {100 * last['error']:.3g} %" if last.get("error") is not None else ""
    state = "trained" if run.finished else "stopped"
    facts = run.read_json("data.json")
    data_option = "" if facts.get("test") or facts["parts"].get("test") else " --data FILE"
    command = f"evaluate {run.path}{data_option}" if run.finished else f"train --resume {run.path}"
    console().print(f"{run.path}: {state}{loss}{error}\nnext: sigmasolver {command}", soft_wrap=True)
    if Termination.requested and not run.finished:
        raise typer.Exit(TERMINATED)
