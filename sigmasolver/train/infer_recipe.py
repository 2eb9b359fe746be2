"""A recipe for a user's own data: what is left open is inferred from the data. And any recipe in words: the plan that a
training follows once everything is set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from sigmasolver.data.constant import stated_constant
from sigmasolver.data.domain import time_steps, unevenly_spaced
from sigmasolver.data.header import Header
from sigmasolver.data.layout import shape_text
from sigmasolver.data.split import Split, WindowLists
from sigmasolver.models import Options
from sigmasolver.recipes import ModelRecipe, Recipe, TrainRecipe
from sigmasolver.settings import suggest
from sigmasolver.tasks import Task, velocity_in

__all__ = ["UserChoices", "describe_recipe", "infer_recipe"]

LARGE = {1: 4096, 2: 256**2, 3: 64**3}
"""Points above which a grid is thinned, by its number of axes."""
FEW = 16
"""Points of the shortest axis below which nothing is thinned away."""


@dataclass(frozen=True)
class UserChoices:
    """What the user set; None: infer it."""

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
    """How many trajectories test."""
    constant: tuple[str, ...] = ()
    """Fields that were found to be constant in time, beside those that the data state: given, unless targets are
    named."""


def infer_recipe(header: Header, count: int, choices: UserChoices, gpu: bool) -> tuple[Recipe, list[str]]:
    """The recipe, and it in words."""
    mask = choices.mask or header.parameters.get("mask")
    inputs, targets, steady = _fields(header, choices, mask)
    stride = _space_stride(header)
    train, test = _split(count, choices.test)
    history, block, horizon = _one_frame(choices) if steady else _frames(len(header.layout.times), choices)
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
    """What a training by this recipe on these data does, one line for each choice."""
    task, model, train = recipe.task, recipe.model, recipe.train
    return [
        _field_words(task),
        _axes_words(task, header),
        f"grid: {shape_text(task.grid)}, "
        + (f"stride {task.space_stride} along each axis of the stored grid" if task.space_stride > 1 else "as stored"),
        _split_words(parts),
        "frames: one, with inputs and targets in the same frame"
        if task.steady
        else f"frames: {task.history} given, {task.block} predicted per call, {task.horizon} evaluated "
        f"(of {-(-len(header.layout.times) // task.time_stride)})",
        f"model: {model.name}, width {model.width}, depth {model.depth}, {model.slices} slices, {_modes(model)} modes, "
        f"padding {_padding(model)}",
        _training_words(train, task, header),
    ]


def _field_words(task: Task) -> str:
    given = [name for name in task.inputs if name not in task.targets]
    kept = ", ".join(given) or "none"
    words = f"fields: {', '.join(task.targets)} {'from' if task.steady else 'forecast, other inputs:'} {kept}"
    for group, members in task.groups.items():
        if len(members) > 1:
            named = "" if group.startswith("(") else f" ({group})"
            words += f"; {', '.join(task.targets[one] for one in members)} count as one vector{named}"
    return words if task.mask is None else f"{words}; only points where {task.mask} is 0 count"


def _axes_words(task: Task, header: Header) -> str:
    layout = header.layout
    ends = ", ".join(f"{axis} {end}" for axis, end in zip(layout.axis_names, layout.boundary, strict=True))
    steps = time_steps(header.layout.times[:: task.time_stride])
    apart = unevenly_spaced(steps) or (f"{sum(steps) / 2:g} apart" if steps else "")
    return f"axes: {ends}; frames {apart}" if apart else f"axes: {ends}"


def _split_words(parts: Split | WindowLists) -> str:
    if isinstance(parts, WindowLists):
        counts = ", ".join(f"{len(parts.windows(part))} {part}" for part in ("train", "validation", "test"))
        return f"split: windows listed by the data set, {counts}"
    train, validation, test = len(parts.train) + len(parts.validation), len(parts.validation), len(parts.test)
    first = sorted((*parts.train, *parts.validation)) == list(range(train))
    words = f"split: {'the first ' if first else ''}{train} trajectories for training, "
    words += f"{'the last ' if first and test else ''}{test or 'none'} for testing"
    return f"{words}; {validation} of the training trajectories for validation"


def _modes(model: ModelRecipe) -> str:
    return str(model.modes) if isinstance(model.modes, int) else shape_text(model.modes)


def _padding(model: ModelRecipe) -> str:
    padding = model.options.padding or "zeros"
    return padding if isinstance(padding, str) else ", ".join(padding)


def _training_words(train: TrainRecipe, task: Task, header: Header) -> str:
    steps = f"{train.epochs:,} epochs" if train.updates is None else f"{train.updates:,} steps"
    clip = "" if train.clip is None else f", gradients clipped at {train.clip:g}"
    return (
        f"training: {steps} of {train.batch} windows in {train.precision}, {train.optimiser}, "
        f"learning rate {train.lr:g}, "
        f"loss {train.loss}, normaliser {_normaliser(task, header)}{clip}, seed {train.seed}"
    )


def _normaliser(task: Task, header: Header) -> str:
    """Its kind, and where it comes from if the data set lacks the statistics that the kind is named after."""
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
    constant = {mask, *stated_constant(header), *choices.constant}  # what does not change is not forecast
    targets = choices.targets or tuple(name for name in fields if name not in constant) or fields
    given = tuple(name for name in fields if name not in targets)
    steady = len(header.layout.times) == 1
    if steady and not set(given) - {mask}:
        raise ValueError(
            f"The data have one frame, so some fields must be predicted from others; set them with --targets "
            f"(the fields are {', '.join(known)})."
        )
    return (given if steady else (*targets, *given)), targets, steady


def _vectors(header: Header, targets: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """A velocity by the usual names of its components, where they have one unit."""
    found = velocity_in(targets)
    units = dict(zip(header.layout.fields, header.layout.units, strict=True))
    return (found,) if found and len({units[name] for name in found}) == 1 else ()


def _space_stride(header: Header) -> int:
    """The least that makes the grid small enough, or else the most that leaves periodic axes periodic."""
    periodic = [n for n, end in zip(header.grid, header.layout.boundary, strict=True) if end == "periodic"]
    able = [stride for stride in range(1, max(1, min(header.grid) // FEW) + 1) if not any(n % stride for n in periodic)]
    grids = {stride: [-(-n // stride) for n in header.grid] for stride in able}
    return next((one for one in able if prod(grids[one]) <= LARGE[len(header.grid)]), able[-1])


def _split(count: int, asked: int | None) -> tuple[int, int]:
    if asked is not None and not 0 <= asked < count:
        raise ValueError(
            f"--test is {asked} with {count} trajectories; it must be at least 0 and leave one for training."
        )
    if asked is None and count < 2:
        there = "there is only one" if count else "there are none yet"
        raise ValueError(f"Training and testing need at least two trajectories, but {there}; split a long one in time.")
    test = max(1, round(0.15 * count)) if asked is None else asked
    return count - test, test


def _one_frame(choices: UserChoices) -> tuple[int, int, int]:
    for name in ("history", "block", "horizon"):
        if getattr(choices, name) not in (None, 1):
            raise ValueError(f"--{name} is {getattr(choices, name)}, but the data have one frame; omit --{name}.")
    return 1, 1, 1


def _frames(frames: int, choices: UserChoices) -> tuple[int, int, int]:
    """History, block and horizon that fit into so many frames."""
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
    ends = header.layout.boundary
    padding = tuple("circular" if end == "periodic" and n >= 3 else "zeros" for end, n in zip(ends, grid, strict=True))
    options = Options(padding=padding)
    modes = max(1, min(8, min(grid) // 4))
    if gpu:
        return ModelRecipe(name, modes=modes, options=options)
    return ModelRecipe(name, width=32, depth=3, heads=4, slices=16, modes=modes, options=options)  # small, for a CPU
