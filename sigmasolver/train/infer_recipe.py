"""Infer a recipe for a user's own data from what the user set and from the data, and describe any recipe in text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from sigmasolver.data.constant import constant_fields, stated_constant
from sigmasolver.data.domain import time_steps, unevenly_spaced
from sigmasolver.data.header import Header
from sigmasolver.data.layout import shape_text
from sigmasolver.data.reader import Reader
from sigmasolver.data.split import Split, WindowLists
from sigmasolver.models import Options
from sigmasolver.recipes import ModelRecipe, Recipe, TrainRecipe
from sigmasolver.settings import suggest
from sigmasolver.tasks import Task, velocity_in

__all__ = ["UserChoices", "describe_recipe", "infer_from_data", "infer_recipe"]

LARGE = {1: 4096, 2: 256**2, 3: 64**3}
"""Number of points above which a grid is subsampled, by its number of axes."""
MIN_POINTS = 16
"""Points that subsampling must leave on the shortest axis."""


@dataclass(frozen=True)
class UserChoices:
    """Options set by the user; None means to infer the value."""

    name: str
    fields: tuple[str, ...] | None = None
    targets: tuple[str, ...] | None = None
    history: int | None = None
    block: int | None = None
    horizon: int | None = None
    model: str = "transolver-sigma"
    seed: int = 42
    vectors: tuple[tuple[str, ...], ...] | None = None
    mask: str | None = None
    test: int | None = None
    """Number of test trajectories."""
    constant: tuple[str, ...] = ()
    """Fields detected as constant in time, besides those that the data declare; not targets by default."""
    steady: bool | None = None
    """Whether the data have no time, as stated by the user."""


def infer_from_data(data: Reader, choices: UserChoices, gpu: bool) -> Recipe:
    """The recipe for a user's data; unless the user names the targets, fields that are constant in time are detected.

    Raises ValueError if the data contradict a choice.
    """
    if choices.steady and (frames := len(data.header.layout.times)) > 1:
        raise ValueError(
            f"{data.path} has {frames} frames and is not steady; omit --steady, or import its source again."
        )
    if choices.test is not None and data.published_split is not None:
        raise ValueError(f"{data.path} defines its own test split; omit --test and --test-data.")
    if choices.targets is None:
        choices = replace(choices, constant=constant_fields(data, choices.fields))
    return infer_recipe(data.header, len(data), choices, gpu)[0]


def infer_recipe(header: Header, count: int, choices: UserChoices, gpu: bool) -> tuple[Recipe, list[str]]:
    """Return the recipe and its description."""
    mask = choices.mask or header.parameters.get("mask")
    inputs, targets, steady = _fields(header, choices, mask)
    stride = _space_stride(header)
    train, test = _split(count, choices.test, steady)
    history, block, horizon = _steady_frames(choices) if steady else _frames(len(header.layout.times), choices)
    vectors = _vectors(header, targets) if choices.vectors is None else choices.vectors
    grid = tuple(-(-points // stride) for points in header.grid)
    task = Task(
        choices.name, inputs, targets, grid, history, block, horizon, train, test, "channel",
        space_stride=stride, steady=steady, vectors=vectors, mask=mask,
    )  # fmt: skip
    model = _model(header, grid, choices.model, gpu)
    starts = 1 if steady else len(header.layout.times) - history - block + 1
    validation = max(1, round(0.1 * train)) if train > 1 else 0
    batch = min(8, (train - validation) * starts)
    updates, precision = (20_000, "tf32") if gpu else (1_000, "float32")
    training = TrainRecipe(
        updates=updates,
        batch=batch,
        clip=1.0,
        validation=0.1 if validation else 0.0,
        precision=precision,
        seed=choices.seed,
    )
    recipe = Recipe(task, model, training)
    return recipe, describe_recipe(recipe, header, recipe.split(count))


def describe_recipe(recipe: Recipe, header: Header, parts: Split | WindowLists) -> list[str]:
    """Describe a training by this recipe on these data, one line per choice."""
    task, model, train = recipe.task, recipe.model, recipe.train
    return [
        _describe_fields(task),
        _describe_axes(task, header),
        f"grid: {shape_text(task.grid)}, "
        + (f"stride {task.space_stride} along each axis of the stored grid" if task.space_stride > 1 else "as stored"),
        _describe_split(parts),
        "frames: one, with inputs and targets in the same frame"
        if task.steady
        else f"frames: {task.history} given, {task.block} predicted per call, {task.horizon} evaluated "
        f"(of {-(-len(header.layout.times) // task.time_stride)})",
        f"model: {model.name}, width {model.width}, depth {model.depth}, {model.slices} slices, {_modes(model)} modes, "
        f"padding {_padding_text(model)}",
        _describe_training(train, task, header),
    ]


def _describe_fields(task: Task) -> str:
    other_inputs = [name for name in task.inputs if name not in task.targets]
    other_names = ", ".join(other_inputs) or "none"
    text = f"fields: {', '.join(task.targets)} {'from' if task.steady else 'forecast, other inputs:'} {other_names}"
    for group, members in task.groups.items():
        if len(members) > 1:
            label = "" if group.startswith("(") else f" ({group})"
            text += f"; {', '.join(task.targets[member] for member in members)} count as one vector{label}"
    return text if task.mask is None else f"{text}; only points where {task.mask} is 0 count"


def _describe_axes(task: Task, header: Header) -> str:
    layout = header.layout
    boundaries = ", ".join(f"{axis} {kind}" for axis, kind in zip(layout.axis_names, layout.boundary, strict=True))
    steps = time_steps(header.layout.times[:: task.time_stride])
    spacing = unevenly_spaced(steps) or (f"{sum(steps) / 2:g} apart" if steps else "")
    return f"axes: {boundaries}; frames {spacing}" if spacing else f"axes: {boundaries}"


def _describe_split(split: Split | WindowLists) -> str:
    """One line on how trajectories or windows are split; validation trajectories count as training data."""
    if isinstance(split, WindowLists):
        counts = ", ".join(f"{len(split.windows(part))} {part}" for part in ("train", "validation", "test"))
        return f"split: windows listed by the data set, {counts}"
    for_training, validation, test = len(split.train) + len(split.validation), len(split.validation), len(split.test)
    in_order = sorted((*split.train, *split.validation)) == list(range(for_training))
    text = f"split: {'the first ' if in_order else ''}{for_training} trajectories for training, "
    text += f"{'the last ' if in_order and test else ''}{test or 'none'} for testing"
    return f"{text}; {validation} of the training trajectories for validation"


def _modes(model: ModelRecipe) -> str:
    return str(model.modes) if isinstance(model.modes, int) else shape_text(model.modes)


def _padding_text(model: ModelRecipe) -> str:
    padding = model.options.padding or "zeros"
    return padding if isinstance(padding, str) else ", ".join(padding)


def _describe_training(train: TrainRecipe, task: Task, header: Header) -> str:
    steps = f"{train.epochs:,} epochs" if train.updates is None else f"{train.updates:,} steps"
    clip = "" if train.clip is None else f", gradients clipped at {train.clip:g}"
    return (
        f"training: {steps} of {train.batch} windows in {train.precision}, {train.optimiser}, "
        f"learning rate {train.lr:g}, "
        f"loss {train.loss}, normaliser {_describe_normaliser(task, header)}{clip}, seed {train.seed}"
    )


def _describe_normaliser(task: Task, header: Header) -> str:
    """Return its kind, or how it is fitted if the data set lacks the published statistics."""
    if task.normaliser not in ("published", "numerical") or "statistics" in header.parameters:
        return task.normaliser
    branch = "numerical " if task.normaliser == "numerical" else ""
    lacking = " (mean_std.pt not found)" if header.source == "realpdebench" else ""
    return f"fitted on the {branch}training windows{lacking}"


def _fields(header: Header, choices: UserChoices, mask: str | None) -> tuple[tuple[str, ...], tuple[str, ...], bool]:
    known = header.layout.fields
    fields = choices.fields or known
    for name in (*fields, *(choices.targets or ()), *((mask,) if mask else ())):
        if name not in known:
            raise ValueError(f'Unknown field "{name}"; {suggest(name, known)}')
    if mask is not None:
        fields = (*(name for name in fields if name != mask), mask)
    constant = {mask, *stated_constant(header), *choices.constant}  # constant fields are not forecast
    targets = choices.targets or tuple(name for name in fields if name not in constant) or fields
    input_only = tuple(name for name in fields if name not in targets)
    steady = len(header.layout.times) == 1
    if steady and not set(input_only) - {mask}:
        raise ValueError(
            f"The data have one frame, so some fields must be predicted from others; set them with --targets "
            f"(the fields are {', '.join(known)})."
        )
    return (input_only if steady else (*targets, *input_only)), targets, steady


def _vectors(header: Header, targets: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """Return the velocity, recognised by the usual names of its components, if they share a unit."""
    velocity = velocity_in(targets)
    units = dict(zip(header.layout.fields, header.layout.units, strict=True))
    return (velocity,) if velocity and len({units[name] for name in velocity}) == 1 else ()


def _space_stride(header: Header) -> int:
    """Return the smallest stride that makes the grid small enough, or the largest that keeps periodic axes periodic."""
    periodic = [n for n, boundary in zip(header.grid, header.layout.boundary, strict=True) if boundary == "periodic"]
    valid = [
        stride
        for stride in range(1, max(1, min(header.grid) // MIN_POINTS) + 1)
        if not any(n % stride for n in periodic)
    ]
    grids = {stride: [-(-n // stride) for n in header.grid] for stride in valid}
    return next((stride for stride in valid if prod(grids[stride]) <= LARGE[len(header.grid)]), valid[-1])


def _split(count: int, requested: int | None, steady: bool) -> tuple[int, int]:
    if requested is not None and not 0 <= requested < count:
        raise ValueError(
            f"--test is {requested} with {count} trajectories; it must be at least 0 and leave one for training."
        )
    if requested is None and count < 2:
        text = "there is only one" if count else "there are none yet"
        what, remedy = ("cases", "add some") if steady else ("trajectories", "split a long one in time")
        raise ValueError(f"Training and testing need at least two {what}, but {text}; {remedy}.")
    test = max(1, round(0.15 * count)) if requested is None else requested
    return count - test, test


def _steady_frames(choices: UserChoices) -> tuple[int, int, int]:
    for name in ("history", "block", "horizon"):
        if getattr(choices, name) not in (None, 1):
            raise ValueError(f"--{name} is {getattr(choices, name)}, but the data have one frame; omit --{name}.")
    return 1, 1, 1


def _frames(frames: int, choices: UserChoices) -> tuple[int, int, int]:
    """Return history, block and horizon that fit into this number of frames."""
    history = max(1, min(10, frames // 4)) if choices.history is None else choices.history
    remaining = frames - history
    if remaining < 1:
        raise ValueError(f"A history of {history} leaves no frames to forecast out of {frames}; shorten it.")
    longest = remaining if choices.horizon is None else choices.horizon
    block = max(1, min(4, remaining // 4, longest)) if choices.block is None else choices.block
    horizon = max(block, min(remaining, 10 * block)) if choices.horizon is None else choices.horizon
    if horizon > remaining:
        raise ValueError(
            f"A history of {history} and a horizon of {horizon} need {history + horizon} frames, but a trajectory has "
            f"{frames}; shorten one of them."
        )
    return history, block, horizon


def _model(header: Header, grid: Sequence[int], name: str, gpu: bool) -> ModelRecipe:
    boundaries = header.layout.boundary
    padding = tuple(
        "circular" if kind == "periodic" and n >= 3 else "zeros" for kind, n in zip(boundaries, grid, strict=True)
    )
    options = Options(padding=padding)
    modes = max(1, min(8, min(grid) // 4))
    if gpu:
        return ModelRecipe(name, modes=modes, options=options)
    return ModelRecipe(name, width=32, depth=3, heads=4, slices=16, modes=modes, options=options)  # small, for a CPU
