"""What training costs, measured as the paper does it (app:efficiency-measurements).

A measurement needs no trained run: each recipe of the suite `efficiency` is timed with random weights in several
independent processes, one recipe after another on the same device, in an order that changes from round to round. A
process makes 20 updates of warm-up and then times one epoch between two synchronisations. Timed are reading the windows
from their file, the transfer to the device, clearing gradients, forward and backward passes and AdamW; validation,
saving and logging are not. Eager, float32 without TF32 and without cuDNN's benchmarking. Mean and sample standard
deviation are over the processes; a process may time a part of its epoch, and the rows tell how many updates.

Peak memory is the most that tensors held in an update: parameters, gradients, optimiser states, activations, buffers
and the batch. Without data of the user's own a temporary store of random trajectories is read.

Rows are those of the diagnostic `efficiency`, in a run folder for each recipe, so tables and figures read them alike.
Beside them every process leaves a row, so a measurement that was stopped goes on.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from sigmasolver.data.normalise import fit
from sigmasolver.data.store import Writer, open_store
from sigmasolver.data.windows import Windows
from sigmasolver.diagnose.efficiency import WARM_UP, Updates, add_epochs, add_storage, peak_bytes, rounds_of
from sigmasolver.diagnose.records import read_findings, rows_file, write_findings
from sigmasolver.diagnose.subject import Findings
from sigmasolver.forecast.checkpoint import begin, build
from sigmasolver.models import build_solver, without_numbers
from sigmasolver.ops.dispatch import why_plain
from sigmasolver.ops.memory import keep_freed_memory
from sigmasolver.plugins import load_plugin, loaded_plugins
from sigmasolver.recipes import Recipe
from sigmasolver.runs import Run, append_row, provenance, read_rows
from sigmasolver.train.dry_run import Noise, frames_of
from sigmasolver.train.job import refuse_other_grid
from sigmasolver.version import __version__

__all__ = ["Protocol", "Timing", "measure", "time_epoch"]

NAME = "efficiency"
AT_ONCE = 32
"""Random trajectories that are written together."""
FITTED = 2
"""Trajectories that a normaliser is fitted on: its values do not change the cost."""


@dataclass(frozen=True)
class Protocol:
    """How a measurement is made."""

    rounds: int = 3
    """Independent processes for each recipe."""
    seconds: float | None = None
    """How long a process times; None: a whole epoch."""

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise ValueError(f"The number of processes must be at least 1, got {self.rounds}.")
        if self.seconds is not None and not 0 < self.seconds < math.inf:
            raise ValueError(
                f"The number of seconds must be positive, got {self.seconds}; omit it to measure whole epochs."
            )


@dataclass(frozen=True)
class Timing:
    """What one process measured."""

    update_seconds: float
    timed: int
    """Updates."""
    per_epoch: int
    peak: float
    """Bytes."""


def measure(
    recipes: Mapping[str, Recipe],
    out: Path,
    device: torch.device,
    protocol: Protocol | None = None,
    data: Path | None = None,
    tick: Callable[[int, int], None] | None = None,
) -> dict[str, Findings]:
    """Measure these recipes and write rows into a folder of each name in `out`; what is there is not done again.

    `data`: a folder with one store for each task (ns2d.h5, ...). `tick` is told how many processes are done, and of
    how many.
    """
    protocol, where = protocol or Protocol(), provenance(device)
    storage = {name: _storage(recipe) for name, recipe in recipes.items()}
    runs = {name: Run(out / name) for name in recipes}
    for name, run in runs.items():
        if (run.path / "recipe.json").exists():  # the folder of another recipe is refused before anything is timed
            begin(run, recipes[name])
    sources = {name: _source(name, recipe, protocol, device, where, data) for name, recipe in recipes.items()}
    timings = {name: _known(runs[name], source)[: protocol.rounds] for name, source in sources.items()}
    names = list(recipes)
    with TemporaryDirectory() as scratch:
        for number in range(protocol.rounds):
            first = number % len(names)
            for name in (*names[first:], *names[:first]):
                if number >= len(timings[name]):
                    recipe, path = _store(recipes[name], data, Path(scratch))
                    timing = _in_a_process(name, recipe, path, device, protocol.seconds)
                    begin(runs[name], recipes[name])
                    append_row(_processes(runs[name]), {**sources[name], **where, **asdict(timing)})
                    timings[name].append(timing)
                if tick is not None:
                    tick(sum(map(len, timings.values())), protocol.rounds * len(names))
    for name, run in runs.items():
        if read_findings(run, NAME, sources[name]) is None:
            _add_timings(storage[name], timings[name])
            write_findings(run, NAME, storage[name], {**sources[name], **where})
    return {name: read_findings(run, NAME) or Findings() for name, run in runs.items()}


def _processes(run: Run) -> Path:
    """Where a row of each process lies."""
    return rows_file(run, f"{NAME}_processes")


def _known(run: Run, source: Mapping[str, Any]) -> list[Timing]:
    """What processes of this measurement have found already, also where fewer or more rounds were asked for."""
    names, wanted = [one.name for one in fields(Timing)], {k: v for k, v in source.items() if k != "rounds"}
    rows = [row for row in read_rows(_processes(run)) if wanted.items() <= row.items()]
    return [Timing(**{name: row[name] for name in names}) for row in rows]


def _source(
    name: str, recipe: Recipe, protocol: Protocol, device: torch.device, where: Mapping[str, str], data: Path | None
) -> dict[str, Any]:
    """What tells one measurement from another."""
    fingerprint = "noise"
    if data is not None:
        with open_store(data / f"{recipe.task.name}.h5") as store:
            fingerprint = store.fingerprint
    return {
        "task": recipe.task.name,
        "run": name,
        "model": recipe.model.name,
        "seed": recipe.train.seed,
        "package": __version__,
        "precision": recipe.train.precision,
        "data": fingerprint,
        "part": "train",
        "grid": list(recipe.task.grid),
        "batch": recipe.train.batch,
        "machine": where["machine"],
        "torch": where["torch"],
        "operations": "plain" if why_plain(torch.zeros(1, device=device)) else "fused",
        **asdict(protocol),
    }


def _store(recipe: Recipe, data: Path | None, scratch: Path) -> tuple[Recipe, Path]:
    """The store that is read, and the recipe for it: random trajectories are as large as thinned ones."""
    if data is not None:
        return recipe, data / f"{recipe.task.name}.h5"
    task = replace(recipe.task, space_stride=1, time_stride=1)
    path = scratch / f"{task.name}.h5"
    if not path.exists():
        source = Noise(task, task.train + task.validation + task.test, frames_of(recipe)[0])
        with Writer(path, source.header, len(source)) as writer:
            for some in torch.arange(len(source)).split(AT_ONCE):
                writer.append(torch.stack([source[int(index)] for index in some]).numpy())
    return replace(recipe, task=task), path


def _storage(recipe: Recipe) -> Findings:
    """What the model stores; a mistake in its sizes shows here."""
    findings, task = Findings(), recipe.task
    with without_numbers():
        add_storage(findings, build_solver(recipe.model.name, recipe.model.config(task)), task.grid)
    return findings


def _add_timings(findings: Findings, timings: Sequence[Timing]) -> None:
    per_epoch = timings[0].per_epoch
    findings.add("peak_megabytes", max(one.peak for one in timings) / 1e6)
    add_epochs(findings, [one.update_seconds for one in timings], per_epoch, min(one.timed for one in timings))


def time_epoch(recipe: Recipe, path: Path, device: torch.device, seconds: float | None = None) -> Timing:
    """What one process does: build, find the peak, warm up, time."""
    torch.backends.cudnn.benchmark = False
    with open_store(path) as store:
        parts, spec = recipe.split_of(store), recipe.training_windows()
        windows = Windows(store, parts.train, spec)
        refuse_other_grid(windows, recipe)
        forecaster = build(recipe, *fit(recipe.task.normaliser, Windows(store, parts.train[:FITTED], spec)))
        updates = Updates(recipe, forecaster, windows, device, recipe.train.lr, 1)
        peak = peak_bytes(updates, windows)
        for _ in range(WARM_UP):
            updates.make()
        timed, (taken,) = rounds_of(updates.make, updates.per_epoch, device, rounds=1, limit=seconds)
    return Timing(taken, timed, updates.per_epoch, peak)


def _in_a_process(name: str, recipe: Recipe, path: Path, device: torch.device, seconds: float | None) -> Timing:
    asked = {
        "recipe": recipe.to_plain(),
        "path": str(path),
        "device": str(device),
        "seconds": seconds,
        "plugins": [str(plugin) for plugin in loaded_plugins()],
    }
    root = str(Path(__file__).parents[2])  # the very package that asks
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-m", "sigmasolver.diagnose.workload"],
        input=json.dumps(asked),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:]
        if last and last[0].startswith("ValueError: "):
            raise ValueError(f"{name}: {last[0].removeprefix('ValueError: ')}")
        raise RuntimeError(f"The process that timed {name} exited with code {done.returncode}:\n{done.stderr}")
    return Timing(**json.loads(done.stdout.splitlines()[-1]))


def _main() -> None:
    """What to time in, what was found out, both as JSON."""
    keep_freed_memory()
    asked = json.load(sys.stdin)
    for plugin in asked["plugins"]:
        load_plugin(Path(plugin))
    device = torch.device(asked["device"])
    timing = time_epoch(Recipe.from_plain(asked["recipe"]), Path(asked["path"]), device, asked["seconds"])
    sys.stdout.write(json.dumps(asdict(timing)) + "\n")


if __name__ == "__main__":
    _main()
