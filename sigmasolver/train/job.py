"""Train from a data file to a finished run folder: split, windows, normalisers, network, loop."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch

from sigmasolver.data.domain import Domain, unevenly_spaced
from sigmasolver.data.formats import is_identified_by_state, open_data, opened
from sigmasolver.data.layout import shape_text
from sigmasolver.data.mask import check_mask
from sigmasolver.data.normalise import TimeScale, fit
from sigmasolver.data.reader import Reader
from sigmasolver.data.windows import Windows
from sigmasolver.forecast import Forecaster
from sigmasolver.forecast.checkpoint import (
    begin,
    build,
    data_of,
    load_read_options,
    load_recipe,
    open_as_recorded,
    read_normalisers,
    read_time_scale,
    record_origins,
    refuse_beyond_limits,
    refuse_unregistered,
    skeleton,
    write_normalisers,
)
from sigmasolver.forecast.forecaster import refuse_boundary_without_effect
from sigmasolver.models.variants import MODELS
from sigmasolver.ops.precision import refuse_tf32_without_gpu
from sigmasolver.plugins import Registry
from sigmasolver.recipes import Recipe
from sigmasolver.runs import Run
from sigmasolver.runs.files import remove_abandoned
from sigmasolver.runtime.parallel import local_process_count
from sigmasolver.settings import to_plain
from sigmasolver.symmetries import SYMMETRIES, refuse_unsuitable, symmetries_of
from sigmasolver.train.engine import Execution, blocks_to_recompute
from sigmasolver.train.loop import Data, Progress, StepPlan, train
from sigmasolver.train.objectives import LOSSES
from sigmasolver.train.optimisers import OPTIMISERS, trainable_parameters

__all__ = [
    "available_memory",
    "fits_on_device",
    "refuse_other_grid",
    "refuse_too_large",
    "refuse_without_effect",
    "resume_run",
    "train_run",
]

ON_GPU, ON_CPU = 0.4, 0.25
"""Fraction of the memory (free memory on a GPU, total on a CPU) that training windows may take; the network needs the
remainder."""


def train_run(
    recipe: Recipe,
    source: str | Path | Reader,
    run: Run,
    execution: Execution | None = None,
    watch: Callable[[Progress], None] | None = None,
    stop: Callable[[], bool] | None = None,
    test: str | Path | Reader | None = None,
) -> None:
    """Train `recipe` on these data; an unfinished run is resumed, a finished one is left unchanged.

    Once `stop()` returns True, the training saves its state and returns. `test` is a separate test data set.
    """
    execution = Execution() if execution is None else execution
    started = (run.path / "recipe.json").exists()
    if started and not run.finished:
        refuse_tf32_without_gpu(
            recipe.train.precision,
            execution.world.device,
            f"{run.path} cannot be resumed on a CPU with train.precision=tf32; resume it on a GPU, or train a new run "
            "with train.precision=float32.",
        )
    elif not run.finished:
        refuse_tf32_without_gpu(recipe.train.precision, execution.world.device)
    if not started:
        refuse_without_effect(recipe)
    for name, registry in _registries(recipe)[1:]:
        registry.find(name)
    if recipe.train.augment:
        symmetries_of(recipe.task).on(recipe.task.grid)
    refuse_too_large(recipe, execution)
    network = skeleton(recipe)  # built first, to fail before any data are read
    trainable_parameters(network, recipe.model.name)
    if recipe.train.recompute:
        blocks_to_recompute(network)
    with open_as_recorded(run, recipe, open_data(source)) as store:
        data, forecaster = _prepare(recipe, store, run, execution, test)
        if run.finished:
            if execution.world.first:
                remove_abandoned(run.resume)  # left by a run killed after saving its final weights
            return
        with run.locked("training") if execution.world.first else nullcontext():
            train(recipe, data, forecaster.to(execution.world.device), run, execution, watch, stop=stop)


def resume_run(
    run: Run,
    path: str | Path | None = None,
    execution: Execution | None = None,
    watch: Callable[[Progress], None] | None = None,
    stop: Callable[[], bool] | None = None,
) -> None:
    """Resume a run; `path` is the new location of its data, if they were moved."""
    recipe = load_recipe(run)
    for name, registry in _registries(recipe):
        refuse_unregistered(run, name, registry)
    source = opened(data_of(run) if path is None else Path(path), *load_read_options(run, recipe))
    train_run(recipe, source, run, execution, watch, stop)


def _registries(recipe: Recipe) -> tuple[tuple[str, Registry[Any]], ...]:
    """Return the registered names in a recipe, each with its registry."""
    names: list[tuple[str, Registry[Any]]] = [
        (recipe.model.name, MODELS),
        (recipe.train.loss, LOSSES),
        (recipe.train.optimiser, OPTIMISERS),
    ]
    if recipe.task.symmetries is not None:
        names.append((recipe.task.symmetries, SYMMETRIES))
    return tuple(names)


def _prepare(
    recipe: Recipe, store: Reader, run: Run, execution: Execution, test: str | Path | Reader | None
) -> tuple[Data, Forecaster]:
    training = recipe.windows_of(store, "train")
    if training is None:
        raise ValueError(f"The training split of {store.path} is empty; give it at least one window.")
    refuse_other_grid(training, recipe)
    if recipe.train.augment:
        refuse_unsuitable(symmetries_of(recipe.task), recipe.task, store.header, recipe.task.space_stride)
    validation = recipe.windows_of(store, "validation")
    _check_masks(recipe, training)
    if validation is not None:
        _check_values(recipe, validation, "validation")
    unseen = recipe.windows_of(store, "test", recipe.training_window_spec())
    if unseen is not None:  # fail now rather than in the evaluation after the training
        _check_values(recipe, unseen, "test")
    StepPlan(recipe, training).rates()
    training = _resident_if_fits(training, execution.world.device)
    if execution.world.first:
        _open_run(recipe, training, store, {"train": training, "validation": validation, "test": unseen}, run, test)
    execution.world.wait()
    forecaster = build(recipe, *read_normalisers(run, recipe), read_time_scale(run, recipe))
    return Data(training, validation, store.fingerprint), forecaster


def refuse_without_effect(recipe: Recipe) -> None:
    """Raise ValueError if a setting would be ignored. Runs of earlier versions may have such settings, so recipes do
    not refuse them themselves."""
    train, boundary = recipe.train, recipe.task.boundary
    if train.objective == "pushforward" and train.calls == 1:
        raise ValueError(
            "The objective pushforward with calls=1 is the objective direct; set train.calls to at least 2, or "
            "train.objective=direct."
        )
    for name, default in (("calls", 1), ("push_after", 0), ("push_every", 1)):
        value = getattr(train, name)
        if train.objective != "pushforward" and value != default:
            raise ValueError(
                f"{name} is {value}, which only the objective pushforward uses, not {train.objective}; set "
                f"train.{name}={default}, or train.objective=pushforward."
            )
    if boundary is not None:
        refuse_boundary_without_effect(boundary, recipe.task.targets)


def refuse_too_large(recipe: Recipe, execution: Execution) -> None:
    """Raise ValueError, before the model is built, if its weights, gradients and optimiser states exceed the memory, or
    if the activations that its blocks keep for the backward pass do (at least two values per channel and point).

    Blocks are alike, so every two of them (DRIFT-Net's come in pairs) add the same number of parameters: the counts of
    two shallow models give that of any depth.
    """
    refuse_beyond_limits(recipe)
    model = recipe.model
    two, four = (
        sum(tensor.numel() for tensor in skeleton(replace(recipe, model=replace(model, depth=depth))).parameters())
        for depth in (2, 4)
    )
    needed = 16 * (two + (model.depth - 2) * (four - two) / 2) / (execution.world.size if execution.shard else 1)
    memory = available_memory(execution.world.device)
    if needed > memory:
        raise ValueError(
            f"A model of width {model.width} and depth {model.depth} takes {needed / 1e9:.3g} GB for its weights, "
            f"gradients and optimiser states, but {memory / 1e9:.3g} GB are available; lower "
            "model.width, model.depth or "
            "model.slices."
        )
    points = prod(recipe.task.grid) * max(1, recipe.train.batch // execution.world.size)
    values = points * model.width * model.depth * (1 if recipe.train.recompute else 2)
    activations = values * (2 if recipe.train.precision == "bf16" else 4)
    if activations > memory:
        raise ValueError(
            f"A step of width {model.width}, depth {model.depth} and batch {recipe.train.batch} on "
            f"{shape_text(recipe.task.grid)} points needs more than {activations / 1e9:.3g} GB, but "
            f"{memory / 1e9:.3g} GB are available; lower one of them, or set train.recompute=true."
        )


def refuse_other_grid(training: Windows, recipe: Recipe) -> None:
    if training.grid != recipe.task.grid:
        raise ValueError(
            f"The data have grid {shape_text(training.grid)}, but the recipe has "
            f"{shape_text(recipe.task.grid)}; set task.space_stride or task.grid."
        )


def _open_run(
    recipe: Recipe,
    training: Windows,
    store: Reader,
    parts: Mapping[str, Windows | None],
    run: Run,
    test: str | Path | Reader | None,
) -> None:
    """Create the run folder, or check that it belongs to this run. Everything is validated before a file is written, so
    that a corrected command can use the same folder."""
    known = (run.path / "normaliser.json").exists()
    inputs, targets = (
        read_normalisers(run, recipe) if known else fit(recipe.task.normaliser, training, recipe.task.mask)
    )
    domain = Domain.of(store.header.layout, training.fields, training.times)
    if not known:
        _refuse_time_dependent_inputs(recipe, training)
        _refuse_uneven_times(recipe, domain, store.path)
    build(recipe, inputs, targets)
    tested = None if test is None else _check_test(recipe, test, store, parts, domain, run)
    begin(run, recipe)
    record_origins(run, recipe)
    _record_data(run, store, parts, domain, tested)
    if not known:
        scale = TimeScale.of(training.times) if recipe.model.options.time_embedding else None
        write_normalisers(run, inputs, targets, store.fingerprint, scale)


def _check_values(recipe: Recipe, windows: Windows, part: str) -> None:
    windows.check_finite(part)
    _check_masks(recipe, windows)


def _check_masks(recipe: Recipe, windows: Windows) -> None:
    if recipe.task.mask is not None:
        channel = windows.fields.index(recipe.task.mask)
        for trajectory, values in zip(windows.trajectories, windows.each(), strict=True):
            check_mask(values, channel, recipe.task.mask, trajectory)


def _refuse_time_dependent_inputs(recipe: Recipe, training: Windows) -> None:
    """Raise ValueError if a field that is only an input changes in time: a rollout carries it along unchanged."""
    input_only = [] if recipe.task.steady else [name for name in recipe.task.inputs if name not in recipe.task.targets]
    channels = [training.fields.index(name) for name in input_only]
    for values in training.each() if input_only else ():
        for name, channel in zip(input_only, channels, strict=True):
            if bool((values[..., channel] != values[:1, ..., channel]).any()):
                raise ValueError(
                    f"The field {name} is not predicted but changes in time; predict it too, or omit "
                    "it. If the data have "
                    "no time, import them again with --steady."
                )


def _refuse_uneven_times(recipe: Recipe, domain: Domain, path: Path) -> None:
    """Raise ValueError for unevenly spaced frames, unless the model takes the time as an input."""
    uneven = unevenly_spaced(domain.time_steps)
    if uneven is not None and not recipe.model.options.time_embedding:
        raise ValueError(
            f"The frames of {path} are {uneven}, but this model has no time input; resample them at equal steps, or "
            "set model.options.time_embedding=true."
        )


def _check_test(
    recipe: Recipe,
    source: str | Path | Reader,
    store: Reader,
    parts: Mapping[str, Windows | None],
    domain: Domain,
    run: Run,
) -> dict[str, Any]:
    """Return the record of the test data, which must match the training data and share no trajectory with them."""
    with open_data(source) as data:
        path = data.path
        windows = Windows(data, range(len(data)), recipe.evaluation_window_spec())
        _check_values(recipe, windows, "test")
        differences = domain.differences(Domain.of(data.header.layout, windows.fields, windows.times))
        if differences:
            raise ValueError(f"The test data {path} differ from the training data: {'; '.join(differences)}.")
        by_state = any(is_identified_by_state(reader.header.source) for reader in (store, data))
        identity = Reader.sample if by_state else Reader.digest
        same = data.header.layout.fields == store.header.layout.fields
        fields = store.header.layout.fields if same else windows.fields  # else those of the task, which both have
        trained = {identity(store, number, fields) for number in _trained_trajectories(parts)}
        for number in range(len(data)):
            if identity(data, number, fields) in trained:
                raise ValueError(
                    f"Trajectory {number} of the test data {path} is also in the training data; "
                    "remove it from one of them."
                )
        if data.header.shares_seed(store.header.source, store.header.seed):
            raise ValueError(
                f"The test data {path} are simulated with seed {data.header.seed}, like the training data, so their "
                "trajectories may be the same; simulate one of them with another seed."
            )
        frames = len(data.header.layout.times)
        return {
            "path": _recorded_path(path, run),
            "fingerprint": data.fingerprint,
            "count": len(data),
            "frames": frames,
            "fields": list(data.header.layout.fields),
        }


def _recorded_path(path: Path, run: Run) -> str:
    """Return a path as it is recorded in a run: relative inside the run folder, which may be moved; else absolute."""
    source, folder = path.resolve(), run.path.resolve()
    return str(source.relative_to(folder)) if source.is_relative_to(folder) else str(source)


def _trajectories_by_part(parts: Mapping[str, Windows | None]) -> dict[str, list[int]]:
    """Return the trajectories of each part."""
    return {part: [] if windows is None else list(windows.trajectories) for part, windows in parts.items()}


def _trained_trajectories(parts: Mapping[str, Windows | None]) -> list[int]:
    """Return the trajectories used in training, without duplicates: one may have windows in several parts."""
    members = _trajectories_by_part(parts)
    return list(dict.fromkeys((*members["train"], *members["validation"])))


def _record_data(
    run: Run,
    store: Reader,
    parts: Mapping[str, Windows | None],
    domain: Domain,
    test: dict[str, Any] | None,
) -> None:
    """Record the data of the run in data.json, or check that they are still the same."""
    samples: list[str] = []
    if (run.path / "data.json").exists():
        record = run.read_json("data.json")
        fingerprint, test = record.get("fingerprint"), test or record.get("test")
        samples = record.get("samples", [])
        if fingerprint != store.fingerprint:
            raise ValueError(
                f"{run.path} was started with other data: their fingerprint is {fingerprint}, but {store.path} has "
                f"{store.fingerprint}; give the same file, or choose another folder."
            )
    # The digests reveal a later test set that shares a trajectory with the training, whatever file it is in. Where they
    # depend on names and dates of files, the samples do.
    fields, trained = store.header.layout.fields, _trained_trajectories(parts)
    digests = [store.digest(number, fields) for number in trained]
    facts = {
        "path": _recorded_path(store.path, run),
        "fingerprint": store.fingerprint,
        "source": store.header.source,
        "seed": store.header.seed,
        "header": store.header.digest,
        "frames": len(store.header.layout.times),
        "parts": _trajectories_by_part(parts),
        "digests": digests,
        "domain": to_plain(domain),
        "fields": list(fields),
    }
    stated = {name: store.header.parameters[name] for name in ("reading", "skipped") if name in store.header.parameters}
    stated["mask"] = store.header.parameters.get("mask")
    stated["missing"] = sorted(store.missing)
    facts |= stated if test is None else {**stated, "test": test}
    if is_identified_by_state(store.header.source):
        facts["samples"] = samples or [store.sample(number, fields) for number in trained]
    if store.notes:
        facts["notes"] = list(store.notes)
    unseen = parts["test"]
    if unseen is not None and unseen.windows_per_trajectory is None:
        # The number of listed windows cannot be computed from the length of a trajectory.
        facts["listed"] = len(unseen)
    if not (run.path / "data.json").exists() or run.read_json("data.json") != facts:
        run.write_json("data.json", facts)


def available_memory(device: torch.device) -> int:
    """Bytes available to a training: free memory on a GPU; on a CPU all of it, divided evenly among its processes."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // local_process_count()


def fits_on_device(windows: Windows, device: torch.device, memory: int) -> bool:
    """Whether training windows are kept on a device with this much memory, rather than read batch by batch."""
    return windows.fits(int((ON_GPU if device.type == "cuda" else ON_CPU) * memory))


def _resident_if_fits(windows: Windows, device: torch.device) -> Windows:
    return windows.resident(device) if fits_on_device(windows, device, available_memory(device)) else windows
