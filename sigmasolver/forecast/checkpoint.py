"""Build a forecaster from a recipe, save and load it: the only module that knows the files of a trained run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sigmasolver.data.domain import Domain
from sigmasolver.data.formats import ReadOptions, opened
from sigmasolver.data.normalise import Normaliser, TimeScale
from sigmasolver.data.reader import Reader
from sigmasolver.data.store import LEGACY_AXES
from sigmasolver.forecast import Forecaster
from sigmasolver.models import build_solver, on_meta_device
from sigmasolver.models.variants import MODELS
from sigmasolver.plugins import Origin, Registry, origin_of
from sigmasolver.pretrained import resolve
from sigmasolver.recipes import Recipe
from sigmasolver.runs import Run, read_tensors, write_tensors
from sigmasolver.runs.quantise import dequantise
from sigmasolver.settings import from_plain
from sigmasolver.symmetries import SYMMETRIES, SymmetryGroup, symmetries_of

__all__ = [
    "ORIGINS",
    "begin",
    "build",
    "data_of",
    "domain_of",
    "evaluation_data_of",
    "is_data_of",
    "load",
    "load_read_options",
    "load_recipe",
    "not_compared",
    "open_as_recorded",
    "open_data_of",
    "other_origins",
    "read_normalisers",
    "read_time_scale",
    "record_origins",
    "recorded_fields",
    "refuse_beyond_limits",
    "refuse_changed_data",
    "refuse_other_domain",
    "refuse_unregistered",
    "save",
    "skeleton",
    "symmetries_of_run",
    "write_normalisers",
]

ORIGINS = "origins.json"
LIMITS = {"depth": 1000, "width": 2**24, "slices": 2**24}
"""A step through more blocks takes minutes; larger weights fit no machine, and their size overflows an integer."""


def build(recipe: Recipe, inputs: Normaliser, targets: Normaliser, time_scale: TimeScale | None = None) -> Forecaster:
    """An untrained forecaster; the recipe's seed fixes its weights.

    `time_scale` is for a model with a time embedding; None: times are not scaled.
    """
    torch.manual_seed(recipe.train.seed)
    model, task = build_solver(recipe.model.name, recipe.model.config(recipe.task)), recipe.task
    scale = (time_scale or TimeScale()) if recipe.model.options.time_embedding else None
    return Forecaster(
        model,
        inputs,
        targets,
        task.block,
        task.boundary,
        history=task.history,
        time_scale=scale,
        embedded=task.conditions,
        mask=task.mask,
    )


def refuse_beyond_limits(recipe: Recipe) -> None:
    for name, most in LIMITS.items():
        if getattr(recipe.model, name) > most:
            raise ValueError(f"model.{name} is {getattr(recipe.model, name):.7g}; the maximum is {most:,}.")


def skeleton(recipe: Recipe) -> nn.Module:
    """The network without allocated weights: raises ValueError for invalid sizes or options."""
    refuse_beyond_limits(recipe)
    try:
        with on_meta_device():
            return build_solver(recipe.model.name, recipe.model.config(recipe.task))
    except (RuntimeError, OverflowError, TypeError) as error:  # the number of bytes overflows 64 bits
        if origin_of("model", recipe.model.name) is not None:
            message = " ".join(str(error).split())
            raise ValueError(f'The builder of "{recipe.model.name}" failed: {message}') from error
        if isinstance(error, TypeError) and "verflow" not in str(error):
            raise
        raise ValueError(
            f"The model {recipe.model.name} of width {recipe.model.width} is too large for any memory; reduce its size."
        ) from None


def begin(run: Run, recipe: Recipe) -> None:
    """Write the recipe, or check that the folder has the same; settings missing in an older one have their defaults."""
    stored = load_recipe(run).to_plain() if (run.path / "recipe.json").exists() else None
    run.start(recipe.to_plain(), stored)


def load_recipe(run: Run) -> Recipe:
    """The recipe of a run folder."""
    plain = run.recipe()
    try:
        return Recipe.from_plain(plain)
    except ValueError as error:
        raise ValueError(f"The recipe of {run.path} is invalid: {error}") from None


def record_origins(run: Run, recipe: Recipe) -> None:
    """Record the origin of the recipe's names that are not built in; an existing record is kept."""
    by_kind = {kind: origin_of(kind, name) for kind, name in _registered_names(recipe).items()}
    origins = {kind: origin for kind, origin in by_kind.items() if origin is not None}
    if origins and not (run.path / ORIGINS).exists():
        run.write_json(ORIGINS, origins)


def _registered_names(recipe: Recipe) -> dict[str, str]:
    names = {"model": recipe.model.name, "loss": recipe.train.loss, "optimiser": recipe.train.optimiser}
    symmetries = recipe.task.symmetries
    return names if symmetries is None else {**names, SYMMETRIES.kind: symmetries}


def _origins(run: Run) -> dict[str, Origin]:
    stored = run.read_json(ORIGINS) if (run.path / ORIGINS).exists() else {}
    return {kind: origin for kind, origin in stored.items() if isinstance(origin, dict)}


def refuse_unregistered(run: Run, name: str, registry: Registry[Any]) -> None:
    """Raise ValueError with the origin of `name` if it is not registered: a run stores names, not code."""
    if registry.knows(name):
        return
    kind = registry.kind
    origin = _origins(run).get(kind, {})
    source, remedy = "", f"register it with {registry.function} first, or pass the plugin file with --plugin"
    if "plugin" in origin:
        remedy = f"pass that file with --plugin, or call {registry.function} first"
    elif "package" in origin:
        remedy = "install that package"
    if "plugin" in origin or "package" in origin:
        source = f" from {_describe(origin)}"
    raise ValueError(f'{run.path} was trained with the {kind} "{name}"{source}, which is not registered; {remedy}.')


def symmetries_of_run(run: Run, recipe: Recipe) -> SymmetryGroup:
    """The symmetries of the task of a run; raises ValueError if none are known."""
    if recipe.task.symmetries is not None:
        refuse_unregistered(run, recipe.task.symmetries, SYMMETRIES)
    return symmetries_of(recipe.task)


def other_origins(run: Run, recipe: Recipe) -> list[str]:
    """Messages for names of the recipe whose origin is not the one recorded in training."""
    recorded = _origins(run)
    current = {kind: origin_of(kind, name) for kind, name in _registered_names(recipe).items()}
    return [
        f"{run.path} was trained with the {kind} from {_describe(recorded[kind])}; the current one is from "
        f"{_describe(origin)}"
        for kind, origin in current.items()
        if origin is not None and kind in recorded and recorded[kind] != origin
    ]


def _describe(origin: Origin) -> str:
    if "plugin" in origin:
        return f"the plugin {origin['plugin']} (sha256 {str(origin.get('sha256'))[:12]})"
    if "package" in origin:
        return f"the package {origin['package']} {origin.get('version', '')}".rstrip()
    return f"the module {origin.get('module')}"


def data_of(run: Run) -> Path:
    """Path of the training data of a run."""
    return _data_path(run, run.read_json("data.json").get("path"))


def evaluation_data_of(run: Run) -> Path:
    """Path of the test data of a run: a separate file, or the training data."""
    test = run.read_json("data.json").get("test")
    return _data_path(run, test.get("path")) if isinstance(test, dict) else data_of(run)


def open_data_of(run: Run, recipe: Recipe, part: str = "train") -> Reader:
    """Open the data that hold a part of a run; raise ValueError if they have changed."""
    test = run.read_json("data.json").get("test") if part == "test" else None
    own = data_of(run) if test is None else evaluation_data_of(run)
    options, kind = load_read_options(run, recipe)
    if test is not None:
        # Older runs do not record the fields of their test data: all of them, unless the options select some.
        selected = options.fields if kind is not None or options.recorded else None
        options = replace(options, fields=test.get("fields", selected))
    reader = open_as_recorded(run, recipe, opened(own, options, kind))
    refuse_changed_data(run, reader, separate_test=test is not None)
    return reader


def open_as_recorded(run: Run, recipe: Recipe, source: Path | Reader) -> Reader:
    """Open files like the data of the run; a reader keeps its options. If they are the data of the run, their
    fingerprint is the recorded one."""
    facts = run.read_json("data.json") if (run.path / "data.json").exists() else {}
    recorded = [data.get("fingerprint") for data in (facts, facts.get("test")) if isinstance(data, dict)]
    reader = source if isinstance(source, Reader) else opened(source, *load_read_options(run, recipe, others=True))
    return reader.as_recorded([name for name in recorded if isinstance(name, str)])


def is_data_of(run: Run, reader: Reader) -> bool:
    """Whether these are the training data of a run, also public data whose files were moved or copied, or the same
    simulation repeated: on another machine its values differ by rounding, but the trajectories that were trained on are
    the same.

    Raise ValueError if such a simulation is shorter than that of the run, has its trajectories in another order, or has
    the same seed but other settings (frames, precision): then it is unknown which of its trajectories are unseen.
    """
    facts = run.read_json("data.json")
    if reader.fingerprint == facts.get("fingerprint") or _has_samples(reader, facts):
        return True
    if not reader.header.shares_seed(facts.get("source"), facts.get("seed")):
        return False
    if reader.header.digest != facts.get("header"):
        raise ValueError(
            f"{reader.path} is simulated with seed {reader.header.seed}, like the training data of {run.path}, so "
            "their trajectories may be the same; simulate with another seed."
        )
    needed = 1 + max(max(trajectories, default=0) for trajectories in facts.get("parts", {}).values())
    if len(reader) < needed:
        raise ValueError(
            f"{reader.path} is the simulation that {run.path} was trained on, but has {len(reader)} of its {needed} "
            f"trajectories; simulate all of them (--count {needed}), or use another seed."
        )
    trained = set(facts.get("digests", ()))
    for number in facts.get("parts", {}).get("test", ()):
        if reader.digests[number].hex() in trained:
            raise ValueError(
                f"Trajectory {number} of {reader.path} is a test trajectory of {run.path} by its place, but one of its "
                "training trajectories by its values; use the simulation in its original order."
            )
    return True


def _has_samples(reader: Reader, facts: dict[str, Any]) -> bool:
    """Whether all trajectories of a run are in these data, at the same places, by the samples recorded of its training
    trajectories."""
    samples, parts = facts.get("samples"), facts.get("parts", {})
    if not samples or len(reader) <= max(max(trajectories, default=0) for trajectories in parts.values()):
        return False
    trained, fields = dict.fromkeys((*parts["train"], *parts["validation"])), recorded_fields(reader, facts)
    return all(reader.sample(number, fields) == sample for number, sample in zip(trained, samples, strict=True))


def recorded_fields(reader: Reader, facts: dict[str, Any]) -> tuple[str, ...]:
    """The fields of these data by which a run recorded its training trajectories; all of them, if one is missing."""
    present, recorded = reader.header.layout.fields, tuple(facts.get("fields") or ())
    return recorded if recorded and set(recorded) <= set(present) else present


def refuse_changed_data(run: Run, reader: Reader, separate_test: bool = False, given: bool = False) -> None:
    """Raise ValueError unless these are the training data of the run, or its separate test data, as recorded.

    `given`: whether the user passed their location.
    """
    facts = run.read_json("data.json")
    recorded = (facts["test"] if separate_test else facts).get("fingerprint")
    if reader.fingerprint != recorded:
        role = "test" if separate_test else "training"
        remedy = "use the original" if given else "restore it, or pass the location of the original with --data"
        raise ValueError(
            f"{reader.path} is not the {role} data of {run.path}, has changed since, or is read with other options; "
            f"{remedy}."
        )


def load_read_options(run: Run, recipe: Recipe, others: bool = False) -> tuple[ReadOptions, str | None]:
    """How to read files like the training data of a run, and the kind "arrays" if they are the user's own arrays.

    `others`: files that may be others than those of the run. Metadata that the training files lacked are then read from
    these files, if they have them, to be compared with those that the user specified for the training.
    """
    facts, task = run.read_json("data.json"), recipe.task
    stored = facts.get("reading")
    plain = {"fields": facts.get("fields"), "steady": task.steady, "mask": facts.get("mask", task.mask)}
    plain["defaults"] = facts.get("missing", []) if others else []
    try:
        options = from_plain(ReadOptions, plain | (stored if isinstance(stored, dict) else {}))
    except ValueError as error:
        raise ValueError(f"data.json of {run.path} is invalid: {error}") from None
    return options, "arrays" if facts.get("source") == "arrays" else None


def _data_path(run: Run, location: object) -> Path:
    if not isinstance(location, str):
        raise ValueError(f"data.json of {run.path} has no data path; pass it with --data.")
    path = run.path / location  # data inside the run folder move with it
    if not path.exists():
        raise ValueError(f"The data of {run.path} was not found at {path}; pass its new path with --data.")
    return path


def domain_of(run: Run) -> Domain | None:
    """Units, box, boundaries and time step of the training data of a run; None if not recorded."""
    facts = run.read_json("data.json") if (run.path / "data.json").exists() else {}
    plain = facts.get("domain")
    try:
        known = None if plain is None else from_plain(Domain, plain)
        if known is not None and isinstance(plain, dict) and "axes" not in plain:  # written before axes had names
            known = replace(known, axes=LEGACY_AXES.get(str(facts.get("source")), ()))
        return known
    except ValueError as error:
        raise ValueError(f"The domain in data.json of {run.path} is invalid: {error}") from None


def not_compared(run: Run, path: Path) -> str:
    """Message for a run without a recorded domain: other data cannot be compared with its training data."""
    return (
        f"{run.path} has no record of units, domain size and time step, so {path} was not compared with its training "
        "data"
    )


def refuse_other_domain(run: Run, recipe: Recipe, path: Path, domain: Domain, anyway: bool | None) -> str | None:
    """Raise ValueError if data differ physically from the training data; `anyway`: return the differences instead; None
    if the command has no such option.

    A model with a time embedding knows the time of each frame, so its data may have another time step.
    """
    known = domain_of(run)
    if known is None:
        return None
    if len(known.boundary) != len(domain.boundary):
        raise ValueError(
            f"The axes of {path} are {', '.join(domain.axis_names)}, but those of the training data of {run.path} are "
            f"{', '.join(known.axis_names)}; use matching data."
        )
    differences = "; ".join(known.differences(domain, not recipe.model.options.time_embedding))
    if differences and not anyway:
        raise ValueError(
            f"{path} differs from the training data of {run.path}: {differences}; use matching data"
            f"{'' if anyway is None else ', or pass --anyway'}."
        )
    return differences or None


def write_normalisers(
    run: Run, inputs: Normaliser, targets: Normaliser, fingerprint: str, time_scale: TimeScale | None = None
) -> None:
    """Write the normalisers of a run, with the fingerprint of the data they were fitted on."""
    facts = {"data": fingerprint, "inputs": inputs.to_dict(), "targets": targets.to_dict()}
    run.write_json("normaliser.json", facts if time_scale is None else {**facts, "time": asdict(time_scale)})


def read_normalisers(run: Run, recipe: Recipe) -> tuple[Normaliser, Normaliser]:
    """Read what `write_normalisers` wrote; raise ValueError if it does not match the recipe."""
    facts = run.read_json("normaliser.json")
    try:
        inputs, targets = (Normaliser.from_dict(facts[name]) for name in ("inputs", "targets"))
    except (KeyError, TypeError, AttributeError, RuntimeError, ValueError):
        raise ValueError(f"normaliser.json of {run.path} is incomplete; copy it again or retrain the run.") from None
    task = recipe.task
    stored = [(normaliser.kind, normaliser.fields) for normaliser in (inputs, targets)]
    if stored != [(task.normaliser, task.inputs), (task.normaliser, task.targets)]:
        raise ValueError(
            f"normaliser.json of {run.path} does not match its recipe (different fields or kind); copy the whole "
            "folder again."
        )
    return inputs, targets


def read_time_scale(run: Run, recipe: Recipe) -> TimeScale | None:
    """Read what `write_normalisers` wrote; None for a model without a time embedding."""
    if not recipe.model.options.time_embedding:
        return None
    try:
        return from_plain(TimeScale, run.read_json("normaliser.json")["time"])
    except KeyError:
        raise ValueError(
            f"normaliser.json of {run.path} has no time scale; copy it again or retrain the run."
        ) from None


def save(run: Run, weights: Mapping[str, torch.Tensor], step: int, steps: int, fingerprint: str) -> None:
    """Write the weights, with their step, the total number of steps and the fingerprint of the training data."""
    write_tensors(run.weights, weights, {"step": step, "steps": steps, "data": fingerprint})


def load(path: str | Path, device: torch.device | str = "cpu") -> Forecaster:
    """The forecaster of a run, ready to use: `load("runs/mine").rollout(history, 50)`; no training data is needed.

    A string without a slash may name a pretrained model: `load("darcy")`, see `pretrained.resolve`.

    Args:
        path: a run folder, or the name of a pretrained model.
        device: where the weights go.

    Returns:
        A `Forecaster` in evaluation mode: history `(B, T_in, *grid, q_in)` to the next frames
        `(B, block, *grid, q_out)`, both in physical units.

    Example:
        >>> import torch, sigmasolver
        >>> darcy = sigmasolver.load("darcy")
        >>> darcy(torch.full((1, 1, 32, 32, 1), 7.5)).shape
        torch.Size([1, 1, 32, 32, 1])
    """
    run = Run(resolve(path))
    recipe = load_recipe(run)
    refuse_unregistered(run, recipe.model.name, MODELS)
    if run.resume.exists() and not run.weights.exists():
        raise ValueError(f"{run.path} is not finished; resume with: sigmasolver train --resume {run.path}")
    tensors = dequantise(read_tensors(run.weights, device)[0])
    inputs, targets = read_normalisers(run, recipe)
    if _outline(tensors) != _outline(skeleton(recipe).state_dict()):
        raise ValueError(
            f"The weights of {run.path} do not match the model of its recipe; copy the whole folder again."
        )
    forecaster = build(recipe, inputs, targets, read_time_scale(run, recipe))
    forecaster.model.load_state_dict(tensors)
    return forecaster.to(device).eval()


def _outline(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[tuple[int, ...], bool]]:
    """Shape by name, and whether it is floating-point: int16 weights without their scales must not pass for floats."""
    return {name: (tuple(tensor.shape), tensor.is_floating_point()) for name, tensor in tensors.items()}
