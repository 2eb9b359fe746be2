"""Training cost by the protocol of the paper (app:efficiency-measurements).

No trained run is needed: each recipe of the suite `efficiency` is timed with random weights in several independent
processes, one recipe after another on the same device, in an order that rotates from round to round. A process runs 20
warm-up updates and then times one epoch between two device synchronisations. This includes reading the windows from
their file, the transfer to the device, clearing gradients, forward and backward passes and AdamW, but not validation,
checkpoints and logging. Execution is eager, in float32 without TF32 and without cuDNN benchmarking. Mean and sample
standard deviation are over the processes; a process may time part of an epoch, and the rows say how many updates.

Peak memory is the maximum held by tensors during an update: parameters, gradients, optimiser states, activations,
buffers and the batch. If no data are given, a temporary store of random trajectories is read.

Rows are those of the diagnostic `efficiency`, in one run folder per recipe, so tables and figures read both the same
way. Every process also appends a row of its own, so an interrupted measurement can be resumed.
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
from sigmasolver.diagnose.efficiency import WARM_UP, Updates, add_epochs, add_storage, peak_bytes, time_rounds
from sigmasolver.diagnose.records import read_findings, rows_file, write_findings
from sigmasolver.diagnose.subject import Findings
from sigmasolver.forecast.checkpoint import begin, build
from sigmasolver.models import build_solver, on_meta_device
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
WRITE_BATCH = 32
"""Random trajectories per write."""
FIT_TRAJECTORIES = 2
"""Trajectories the normaliser is fitted on: its values do not affect the cost."""


@dataclass(frozen=True)
class Protocol:
    """Options of a measurement."""

    rounds: int = 3
    """Independent processes per recipe."""
    seconds: float | None = None
    """Timed seconds per process; None: a full epoch."""

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise ValueError(f"The number of processes must be at least 1, got {self.rounds}.")
        if self.seconds is not None and not 0 < self.seconds < math.inf:
            raise ValueError(
                f"The number of seconds must be positive, got {self.seconds}; omit it to measure whole epochs."
            )


@dataclass(frozen=True)
class Timing:
    """Result of one process."""

    update_seconds: float
    timed: int
    """Number of timed updates."""
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
    """Measure these recipes and write the rows into one folder per name in `out`; existing timings are reused.

    `data`: a folder with one store per task (ns2d.h5, ...). `tick` gets the number of processes done and their total.
    """
    protocol, environment = protocol or Protocol(), provenance(device)
    storage = {name: _storage(recipe) for name, recipe in recipes.items()}
    runs = {name: Run(out / name) for name in recipes}
    for name, run in runs.items():
        if (run.path / "recipe.json").exists():  # reject the folder of another recipe before timing anything
            begin(run, recipes[name])
    sources = {name: _source(name, recipe, protocol, device, environment, data) for name, recipe in recipes.items()}
    timings = {name: _stored_timings(runs[name], source)[: protocol.rounds] for name, source in sources.items()}
    names = list(recipes)
    with TemporaryDirectory() as scratch:
        for round_number in range(protocol.rounds):
            first = round_number % len(names)
            for name in (*names[first:], *names[:first]):
                if round_number >= len(timings[name]):
                    recipe, path = _store(recipes[name], data, Path(scratch))
                    timing = _in_a_process(name, recipe, path, device, protocol.seconds)
                    begin(runs[name], recipes[name])
                    append_row(_process_rows(runs[name]), {**sources[name], **environment, **asdict(timing)})
                    timings[name].append(timing)
                if tick is not None:
                    tick(sum(map(len, timings.values())), protocol.rounds * len(names))
    for name, run in runs.items():
        if read_findings(run, NAME, sources[name]) is None:
            _add_timings(storage[name], timings[name])
            write_findings(run, NAME, storage[name], {**sources[name], **environment})
    return {name: read_findings(run, NAME) or Findings() for name, run in runs.items()}


def _process_rows(run: Run) -> Path:
    """Path of the rows of the single processes."""
    return rows_file(run, f"{NAME}_processes")


def _stored_timings(run: Run, source: Mapping[str, Any]) -> list[Timing]:
    """Stored timings of this measurement, whatever number of rounds was requested."""
    names, required = [field.name for field in fields(Timing)], {k: v for k, v in source.items() if k != "rounds"}
    rows = [row for row in read_rows(_process_rows(run)) if required.items() <= row.items()]
    return [Timing(**{name: row[name] for name in names}) for row in rows]


def _source(
    name: str,
    recipe: Recipe,
    protocol: Protocol,
    device: torch.device,
    environment: Mapping[str, str],
    data: Path | None,
) -> dict[str, Any]:
    """Facts that identify a measurement."""
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
        "machine": environment["machine"],
        "torch": environment["torch"],
        "operations": "plain" if why_plain(torch.zeros(1, device=device)) else "fused",
        **asdict(protocol),
    }


def _store(recipe: Recipe, data: Path | None, scratch: Path) -> tuple[Recipe, Path]:
    """The recipe and its store; random trajectories are written with strides already applied."""
    if data is not None:
        return recipe, data / f"{recipe.task.name}.h5"
    task = replace(recipe.task, space_stride=1, time_stride=1)
    path = scratch / f"{task.name}.h5"
    if not path.exists():
        source = Noise(task, task.train + task.validation + task.test, frames_of(recipe)[0])
        with Writer(path, source.header, len(source)) as writer:
            for indices in torch.arange(len(source)).split(WRITE_BATCH):
                writer.append(torch.stack([source[int(index)] for index in indices]).numpy())
    return replace(recipe, task=task), path


def _storage(recipe: Recipe) -> Findings:
    """Storage of the model; building it also validates its sizes."""
    findings, task = Findings(), recipe.task
    with on_meta_device():
        add_storage(findings, build_solver(recipe.model.name, recipe.model.config(task)), task.grid)
    return findings


def _add_timings(findings: Findings, timings: Sequence[Timing]) -> None:
    per_epoch = timings[0].per_epoch
    findings.add("peak_megabytes", max(timing.peak for timing in timings) / 1e6)
    add_epochs(
        findings, [timing.update_seconds for timing in timings], per_epoch, min(timing.timed for timing in timings)
    )


def time_epoch(recipe: Recipe, path: Path, device: torch.device, seconds: float | None = None) -> Timing:
    """Run in each process: build the model, measure peak memory, warm up, time."""
    torch.backends.cudnn.benchmark = False
    with open_store(path) as store:
        parts, spec = recipe.split_of(store), recipe.training_window_spec()
        windows = Windows(store, parts.train, spec)
        refuse_other_grid(windows, recipe)
        forecaster = build(recipe, *fit(recipe.task.normaliser, Windows(store, parts.train[:FIT_TRAJECTORIES], spec)))
        updates = Updates(recipe, forecaster, windows, device, recipe.train.lr, 1)
        peak = peak_bytes(updates, windows)
        for _ in range(WARM_UP):
            updates.step()
        timed, (seconds_per_update,) = time_rounds(updates.step, updates.per_epoch, device, rounds=1, limit=seconds)
    return Timing(seconds_per_update, timed, updates.per_epoch, peak)


def _in_a_process(name: str, recipe: Recipe, path: Path, device: torch.device, seconds: float | None) -> Timing:
    request = {
        "recipe": recipe.to_plain(),
        "path": str(path),
        "device": str(device),
        "seconds": seconds,
        "plugins": [str(plugin) for plugin in loaded_plugins()],
    }
    root = str(Path(__file__).parents[2])  # import the package of the parent process
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    completed = subprocess.run(
        [sys.executable, "-m", "sigmasolver.diagnose.workload"],
        input=json.dumps(request),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )
    if completed.returncode:
        last_line = completed.stderr.strip().splitlines()[-1:]
        if last_line and last_line[0].startswith("ValueError: "):
            raise ValueError(f"{name}: {last_line[0].removeprefix('ValueError: ')}")
        raise RuntimeError(
            f"The process that timed {name} exited with code {completed.returncode}:\n{completed.stderr}"
        )
    return Timing(**json.loads(completed.stdout.splitlines()[-1]))


def _main() -> None:
    """Read the request from stdin and write the timing to stdout, both as JSON."""
    keep_freed_memory()
    request = json.load(sys.stdin)
    for plugin in request["plugins"]:
        load_plugin(Path(plugin))
    device = torch.device(request["device"])
    timing = time_epoch(Recipe.from_plain(request["recipe"]), Path(request["path"]), device, request["seconds"])
    sys.stdout.write(json.dumps(asdict(timing)) + "\n")


if __name__ == "__main__":
    _main()
