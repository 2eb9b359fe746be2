"""Run the rows of a suite in order within a time limit: finished rows are skipped, interrupted ones resumed.

A row needs only its run folder to resume on another machine: missing data is simulated again from its seed, and checked
against the fingerprint in the run folder.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from sigmasolver.data.formats import download_instructions, find_download
from sigmasolver.data.store import open_store
from sigmasolver.diagnose.run import diagnose_run
from sigmasolver.evaluate import Request, evaluate_run, records_of_test_part
from sigmasolver.experiments.ledger import DIAGNOSTICS, paper_sample
from sigmasolver.forecast.checkpoint import begin
from sigmasolver.recipes import Recipe
from sigmasolver.runs import Run, read_facts
from sigmasolver.runtime.interrupts import Termination
from sigmasolver.simulate import SIMULATORS, simulator_of
from sigmasolver.simulate.generate import generate, header_of
from sigmasolver.tasks import REALM
from sigmasolver.train.engine import Execution
from sigmasolver.train.job import train_run
from sigmasolver.train.loop import Progress

__all__ = [
    "Deadline",
    "OutOfTimeError",
    "diagnose_row",
    "ensure_store",
    "fraction_done",
    "is_done",
    "run_row",
    "store_is_ready",
]

_REALM = frozenset(task.name for task in REALM)


class OutOfTimeError(Exception):
    """The time limit was reached, or SIGTERM received; all progress is saved. The message says what was interrupted."""


class Deadline:
    """Work stops at its next safe point once the `minutes` are over or SIGTERM was received."""

    def __init__(self, minutes: float | None = None) -> None:
        if minutes is not None and not 0 < minutes < math.inf:
            raise ValueError(f"The time limit in minutes must be positive, got {minutes}.")
        self.end = math.inf if minutes is None else time.monotonic() + 60 * minutes

    def passed(self) -> bool:
        return Termination.requested or time.monotonic() >= self.end

    def check(self, what: str) -> None:
        """Raise OutOfTimeError if passed; for progress callbacks of work that can be interrupted without loss."""
        if self.passed():
            raise OutOfTimeError(what)


def is_done(run: Run, recipe: Recipe, windows: int | None = None, seed: int | None = None) -> bool:
    """Whether a run is trained with this recipe and its final weights are evaluated on the full test split, or on
    `windows` of its windows.

    Raises ValueError if the folder has another recipe, or was trained on simulated data of another seed than `seed`.
    """
    if not run.finished:
        return False
    begin(run, recipe)
    evaluated = bool(records_of_test_part(run, recipe, windows))
    data, task = run.read_json("data.json") if evaluated else {}, recipe.task.name
    simulated = task in SIMULATORS and data.get("source") == simulator_of(task).name
    if simulated and None not in (seed, data.get("seed")) and data["seed"] != seed:
        raise ValueError(
            f"{run.path} was trained with data seed {data['seed']}, not {seed}; pass that seed, or choose another "
            "folder."
        )
    return evaluated


def fraction_done(run: Run) -> float:
    """The fraction of its updates that a run has completed."""
    if run.finished:
        return 1.0
    if not run.resume.exists():
        return 0.0
    facts = read_facts(run.resume)
    return float(facts["step"] / facts["steps"])


def ensure_store(
    recipe: Recipe,
    folder: Path,
    recipes: Iterable[Recipe],
    seed: int | None,
    execution: Execution,
    progress: Callable[[int, int, float], None] | None = None,
) -> Path:
    """The store of the recipe's task in `folder`; with a `seed`, simulated (or completed) if missing.

    It has enough trajectories for the largest of all `recipes` of that task, so that they share one test split.
    Imported data and downloads that are read in place are used as they are. `progress` may raise OutOfTimeError.
    """
    task, world = recipe.task.name, execution.world
    path, count = _required_store(recipe, folder, recipes, seed)
    if count is None or seed is None:
        return path
    stopped = False
    # A complete store is only read, so that several suites can share it.
    if world.first and not _is_complete(path, task, seed, count):
        try:
            generate(simulator_of(task), count, seed, path, world.device, progress=progress)
        except OutOfTimeError:
            stopped = True
    if world.agreed(stopped):  # all processes stop together
        raise OutOfTimeError(f"simulating {task}")
    return path


def store_is_ready(recipe: Recipe, folder: Path, recipes: Iterable[Recipe], seed: int | None) -> bool:
    """Whether `ensure_store` has nothing to simulate; raises the same errors."""
    path, count = _required_store(recipe, folder, recipes, seed)
    return count is None or seed is None or _is_complete(path, recipe.task.name, seed, count)


def _required_store(
    recipe: Recipe, folder: Path, recipes: Iterable[Recipe], seed: int | None
) -> tuple[Path, int | None]:
    """The store of the recipe's task and the number of trajectories to simulate; None: use it as it is."""
    task = recipe.task.name
    path = folder / f"{task}.h5"
    if path.exists() and (seed is None or not _is_simulated(path, task)):
        return path, None
    download = find_download(task, folder)
    if download is not None:
        return download, None
    instruction = download_instructions(task, folder)
    if instruction is not None:
        raise ValueError(instruction)
    if seed is None:
        raise ValueError(f"Store {path} not found; put it there, or simulate it with --data-seed.")
    if task not in SIMULATORS:
        raise ValueError(f"{task} has no simulator; put its data at {path}.")
    tasks = [other.task for other in recipes if other.task.name == task]
    return path, max(other.train + other.validation + other.test for other in tasks)


def _is_simulated(path: Path, task: str) -> bool:
    with open_store(path) as store:
        return task in SIMULATORS and store.header.source == simulator_of(task).name


def _is_complete(path: Path, task: str, seed: int, count: int) -> bool:
    if not path.exists():
        return False
    with open_store(path) as store:
        same = store.header.difference(header_of(simulator_of(task), seed)) is None
        if same and len(store) > count:
            raise ValueError(
                f"{path} has {len(store)} trajectories, but this suite uses {count}, so the test split would differ; "
                "pass another folder with --data."
            )
        return same and len(store) == store.count == count


def run_row(
    recipe: Recipe,
    store: Path,
    run: Run,
    execution: Execution,
    deadline: Deadline,
    watch: Callable[[Progress], None] | None = None,
    windows: int | None = None,
    diagnose: bool = False,
) -> None:
    """Train one row, diagnose it on request, and evaluate it on `windows` windows (None: all). Saves the state and
    raises OutOfTimeError once the deadline has passed."""

    def tick(done: int, total: int) -> None:
        # Only a single process may abort an evaluation; several would deadlock.
        if execution.world.size == 1:
            deadline.check("evaluating")

    train_run(recipe, store, run, execution, watch, deadline.passed)
    if not run.finished:
        raise OutOfTimeError("training")
    if diagnose:
        diagnose_row(recipe, store, run, execution, deadline)
    # The REALM table has the errors of all splits; test comes last, because its records mark the row as done.
    for part in ("train", "validation", "test") if recipe.task.name in _REALM else ("test",):
        evaluate_run(run, Request(split=part, windows=windows), store, execution.world, tick)


def diagnose_row(recipe: Recipe, store: Path, run: Run, execution: Execution, deadline: Deadline) -> None:
    """Write the diagnoses of which the paper states the sample, as far as they apply to the task and the model."""

    def tick(name: str, *_: Any) -> None:
        deadline.check(f"diagnosing {name}")

    stopped = ""
    try:
        for name in DIAGNOSTICS if execution.world.first else ():
            request = paper_sample(name, recipe)
            if request is not None:
                diagnose_run(run, [name], request, execution.world.device, tick, path=store)
    except OutOfTimeError as error:
        stopped = str(error)
    if execution.world.agreed(bool(stopped)):
        raise OutOfTimeError(stopped or "diagnosing")
