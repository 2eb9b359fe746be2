"""The `sigmasolver train` command for inspected data, ready to run as printed."""

from __future__ import annotations

import shlex

from sigmasolver.data.constant import stated_constant
from sigmasolver.data.domain import time_steps, unevenly_spaced
from sigmasolver.data.formats.realpdebench import SCENARIOS
from sigmasolver.data.header import Header
from sigmasolver.data.inspect import Summary
from sigmasolver.data.split import WindowLists
from sigmasolver.recipes import Recipe, changed, recipe_of
from sigmasolver.tasks import REALM, TASKS, Task

__all__ = ["train_command"]

MAX_STRIDE = 8
"""Largest spatial stride tried to subsample the stored grid to that of a task."""


def train_command(summary: Summary) -> str | None:
    """Return the command that trains on these data, or None if too few trajectories are finite.

    It names the task of their format, or the first task they fit, with the `--set` options that a partial or smaller
    data set needs; otherwise it is the command for a user's own data.
    """
    header, path = summary.header, summary.path
    if summary.bad and summary.whole - summary.bad < 2:
        return None
    fitting = (recipe_of(task.name) for task in TASKS.values() if _fits(task, header, summary.whole))
    recipe, settings = next(fitting, None), list[str]()
    format_task = _task_of_format(header)
    if format_task is not None:
        recipe = recipe_of(format_task.name)
        required = _required_settings(recipe, summary)
        recipe, settings = (None, []) if required is None else (recipe, required)
    arguments = ["sigmasolver", "train", *([] if recipe is None else [recipe.task.name]), "--data", str(path)]
    arguments += ["--out", f"runs/{path.resolve().stem if recipe is None else recipe.task.name}"]
    if recipe is None and len(header.layout.times) == 1:
        constant = header.parameters.get("constant", header.layout.fields[:-1])
        targets = [name for name in header.layout.fields if name not in constant]
        arguments += ["--targets", ",".join(targets or header.layout.fields[-1:])]
    if summary.bad:
        arguments.append("--skip-bad")
    if unevenly_spaced(time_steps(header.layout.times)) is not None:
        settings.append("model.options.time_embedding=true")
    return shlex.join([*arguments, *(argument for setting in settings for argument in ("--set", setting))])


def _task_of_format(header: Header) -> Task | None:
    """Return the task of the file format, whatever the size of the data."""
    if header.source == "realpdebench":
        constant_fields = stated_constant(header)
        return next((TASKS[name.replace("_", "-")] for name, has in SCENARIOS.items() if has == constant_fields), None)
    if header.source == "realm":  # the fields of one task may be a subset of another's
        fitting = [task for task in REALM if set(task.targets) <= set(header.layout.fields)]
        return max(fitting, key=lambda task: len(task.targets), default=None)
    return None


def _fits(task: Task, header: Header, count: int) -> bool:
    layout = header.layout
    frames = 1 if task.steady else (task.history + task.horizon - 1) * task.time_stride + 1
    return (
        {*task.inputs, *task.targets} <= set(layout.fields)
        and _subsampled_grid(header, task.space_stride) == task.grid
        and len(layout.times) >= frames
        and (len(layout.times) == 1) == task.steady
        and count >= task.train + task.validation + task.test
    )


def _subsampled_grid(header: Header, stride: int) -> tuple[int, ...]:
    return tuple(-(-points // stride) for points in header.grid)


def _required_settings(recipe: Recipe, summary: Summary) -> list[str] | None:
    """Return the settings with which the recipe of a published data set runs on these files (a part of it, its other
    branch or a stand-in), or None if there are too few frames or trajectories."""
    task, header, settings = recipe.task, summary.header, list[str]()
    strides = [stride for stride in range(1, MAX_STRIDE + 1) if _subsampled_grid(header, stride) == task.grid]
    if strides and task.space_stride not in strides:
        settings.append(f"task.space_stride={strides[0]}")
    elif not strides:
        settings.append(f"task.grid={_subsampled_grid(header, task.space_stride)}")
    frames = -(-len(header.layout.times) // task.time_stride)
    ahead = recipe.training_window_spec().horizon
    if frames < task.history + max(task.block, ahead):
        return None
    if frames < task.history + task.horizon:
        settings.append(f"task.horizon={frames - task.history}")
    published = header.parameters.get("windows") if task.split == "published" else None
    if published is None and summary.published_split is None:
        needed = task.train + task.validation + task.test
        if summary.whole < needed:
            test = max(1, round(summary.whole * task.test / needed))
            if summary.whole <= test + task.validation:
                return None
            settings += [f"task.train={summary.whole - task.validation - test}", f"task.test={test}"]
    recipe = changed(recipe, settings)
    max_modes = min(recipe.task.grid) // 2
    if max_modes < 1:
        return None
    if isinstance(recipe.model.modes, int) and recipe.model.modes > max_modes + 1:
        settings.append(f"model.modes={max_modes}")
    windows = _windows_per_epoch(recipe, summary)
    if windows < 1:
        return None
    if recipe.train.batch > windows:
        settings.append(f"train.batch={windows}")
    return settings


def _windows_per_epoch(recipe: Recipe, summary: Summary) -> int:
    """Number of windows per epoch."""
    task, header = recipe.task, summary.header
    lists = WindowLists.from_plain(header.parameters.get("windows")) if task.split == "published" else None
    if lists is not None:
        return len(lists.windows("train"))
    published = summary.published_split
    trajectories = len((recipe.split(summary.whole) if published is None else published).train)
    spec = recipe.training_window_spec()
    frames = -(-len(header.layout.times) // task.time_stride)
    available = (frames - spec.history - spec.horizon) // spec.stride + 1
    return trajectories * (1 if recipe.train.one_start else min(available, spec.windows_per_trajectory or available))
