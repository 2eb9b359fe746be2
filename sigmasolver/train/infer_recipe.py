"""A recipe for a user's own data: what is left open is inferred from the data, and every choice is reported."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from sigmasolver.data.header import Header
from sigmasolver.models import Options
from sigmasolver.recipes import ModelRecipe, Recipe, TrainRecipe
from sigmasolver.settings import suggest
from sigmasolver.tasks import Task

__all__ = ["UserChoices", "infer_recipe"]

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


def infer_recipe(header: Header, count: int, choices: UserChoices, gpu: bool) -> tuple[Recipe, list[str]]:
    """The recipe, and one line for each choice."""
    notes: list[str] = []
    inputs, targets, steady = _fields(header, choices, notes)
    stride = _space_stride(header, notes)
    train, test = _split(count, notes)
    history, block, horizon = (
        _one_frame(choices, notes) if steady else _frames(len(header.layout.times), choices, notes)
    )
    grid = tuple(-(-points // stride) for points in header.grid)
    task = Task(
        choices.name, inputs, targets, grid, history, block, horizon, train, test, "channel",
        space_stride=stride, steady=steady,
    )  # fmt: skip
    model = _model(header, grid, choices.model, gpu, notes)
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
    notes.append(
        f"training: {updates:,} steps of {batch} windows in {precision}, every field less its mean and over its "
        f"deviation, gradients clipped at 1; {validation} of the training trajectories validate"
    )
    return Recipe(task, model, training), notes


def _fields(header: Header, choices: UserChoices, notes: list[str]) -> tuple[tuple[str, ...], tuple[str, ...], bool]:
    known = header.layout.fields
    fields = choices.fields or known
    for name in (*fields, *(choices.targets or ())):
        if name not in known:
            raise ValueError(f'There is no field "{name}" in the data; {suggest(name, known)}')
    constant = header.parameters.get("constant", ())  # what a data set says does not change is not forecast
    targets = choices.targets or tuple(name for name in fields if name not in constant) or fields
    given = tuple(name for name in fields if name not in targets)
    steady = len(header.layout.times) == 1
    if steady and not given:
        raise ValueError(
            f"The data have one frame, so some fields must be predicted from others; name them with --targets "
            f"(the fields are {', '.join(known)})."
        )
    kept = ", ".join(given) or "nothing else"
    notes.append(f"fields: {', '.join(targets)} {'from' if steady else 'forecast, given'} {kept}")
    return (given if steady else (*targets, *given)), targets, steady


def _space_stride(header: Header, notes: list[str]) -> int:
    """The least that makes the grid small enough, or else the most that leaves periodic axes periodic."""
    periodic = [n for n, end in zip(header.grid, header.layout.boundary, strict=True) if end == "periodic"]
    able = [stride for stride in range(1, max(1, min(header.grid) // FEW) + 1) if not any(n % stride for n in periodic)]
    grids = {stride: [-(-n // stride) for n in header.grid] for stride in able}
    stride = next((one for one in able if prod(grids[one]) <= LARGE[len(header.grid)]), able[-1])
    kept = f"1 of {stride} points along each axis of the stored one" if stride > 1 else "as stored"
    notes.append(f"grid: {' × '.join(map(str, grids[stride]))}, {kept}")
    return stride


def _split(count: int, notes: list[str]) -> tuple[int, int]:
    if count < 2:
        there = "there is only one" if count else "there is none yet"
        raise ValueError(f"One trajectory must train and another test, but {there}; cut a long one along time.")
    test = max(1, round(0.15 * count))
    notes.append(f"split: the first {count - test} trajectories train, the last {test} test")
    return count - test, test


def _one_frame(choices: UserChoices, notes: list[str]) -> tuple[int, int, int]:
    for name in ("history", "block", "horizon"):
        if getattr(choices, name) not in (None, 1):
            raise ValueError(
                f"A {name} of {getattr(choices, name)} was asked for, but the data have one frame; omit --{name}."
            )
    notes.append("frames: one, with its targets in the same frame")
    return 1, 1, 1


def _frames(frames: int, choices: UserChoices, notes: list[str]) -> tuple[int, int, int]:
    """History, block and horizon that fit into so many frames."""
    history = max(1, min(10, frames // 4)) if choices.history is None else choices.history
    remaining = frames - history
    if remaining < 1:
        raise ValueError(f"A history of {history} leaves nothing of {frames} frames to forecast; shorten it.")
    longest = remaining if choices.horizon is None else choices.horizon
    block = max(1, min(4, remaining // 4, longest)) if choices.block is None else choices.block
    horizon = max(block, min(remaining, 10 * block)) if choices.horizon is None else choices.horizon
    if horizon > remaining:
        raise ValueError(
            f"A history of {history} and a horizon of {horizon} need {history + horizon} frames, but a trajectory has "
            f"{frames}; shorten one of them."
        )
    notes.append(f"frames: {history} given, {block} predicted a call, {horizon} evaluated (of {frames})")
    return history, block, horizon


def _model(header: Header, grid: Sequence[int], name: str, gpu: bool, notes: list[str]) -> ModelRecipe:
    ends = header.layout.boundary
    padding = tuple("circular" if end == "periodic" and n >= 3 else "zeros" for end, n in zip(ends, grid, strict=True))
    options = Options(padding=padding)
    modes = max(1, min(8, min(grid) // 4))
    recipe = (
        ModelRecipe(name, modes=modes, options=options)
        if gpu
        else ModelRecipe(name, width=32, depth=3, heads=4, slices=16, modes=modes, options=options)
    )
    notes.append(
        f"model: {name}, width {recipe.width}, depth {recipe.depth}, {recipe.slices} slices, {modes} modes, padding "
        f"{', '.join(padding)}" + ("" if gpu else " (small, for a CPU)")
    )
    return recipe
