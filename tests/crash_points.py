"""Crash tests: kill commands between any two writes, renames and syncs, each in a fork of this process, and rerun them.

A command is run to completion in a copy of a prepared folder: the reference. It is then killed at its first, second, …
moment in further copies. Every file that a kill leaves under its final name must be unchanged or complete; the same
command must then succeed and produce the files of the reference.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from sigmasolver.cli import demo_flow as demo
from sigmasolver.data.header import Header
from sigmasolver.data.layout import Layout
from sigmasolver.data.store import StoreError, open_store, write_store
from sigmasolver.runs import read_tensors

SMALL = ["--set", "grid=32", "--set", "stored=16", "--set", "step=0.03125", "--set", "frames=3"]
MODEL = ("model.width=16", "model.depth=1", "model.heads=2", "model.slices=4", "model.modes=2")
TINY = [word for setting in (*MODEL, "train.updates=3", "train.batch=2") for word in ("--set", setting)]
OWN = ["--fields", "u", "--history", "2", "--block", "1", "--horizon", "3"]
TASK = ("task.grid=(8,8)", "task.history=2", "task.horizon=3", "task.block=1", "task.train=4", "task.test=2")
SUITE = [word for setting in (*TASK, "task.space_stride=1", "task.time_stride=1") for word in ("--set", setting)]
ROW = "ns2d-transolver-sigma-42"
RECORDED = ("--diagnose", "--ledger", "ledger.jsonl", "--device", "cpu")
QUICK = ("--seconds", "0.01", "--out", "runs", "--device", "cpu")
TRAIN = ("train", "--data", "my.npy", *OWN, *TINY, "--device", "cpu")
BEST = ("--set", "train.keep=best", "--set", "train.validation=0.3")
START = ["forecast", "run", "--input", "start.npy", "--steps", "2", "--device", "cpu", "--out"]


@dataclass(frozen=True)
class Case:
    """A command, and whether it records timings that are not reproducible."""

    arguments: tuple[str, ...]
    timed: bool = False
    optional_file: str | None = None
    """A file that may be missing at the end: the resume state of a run whose final weights are its best."""


CASES = {
    "simulate": Case(("simulate", "demo", "--count", "2", "--out", "new.h5", *SMALL, "--device", "cpu")),
    "simulate more": Case(("simulate", "demo", "--count", "3", "--out", "flow.h5", *SMALL, "--device", "cpu")),
    "import-data": Case(("import-data", "my.npy", "--fields", "u", "--out", "mine.h5")),
    "train": Case((*TRAIN, "--out", "new")),
    "train best": Case((*TRAIN, *BEST, "--out", "new"), optional_file="new/resume.safetensors"),
    "train more": Case(("train", "--resume", "half", "--device", "cpu")),
    "evaluate": Case(("evaluate", "run", "--horizon", "2", "--device", "cpu")),
    "diagnose": Case(("diagnose", "run", "--only", "maps", "--device", "cpu")),
    "forecast h5": Case((*START, "out.h5")),
    "forecast npy": Case((*START, "out.npy")),
    "forecast npz": Case((*START, "out.npz")),
    "forecast nc": Case((*START, "out.nc")),
    "forecast zarr": Case((*START, "out.zarr")),
    "save-pretrained": Case(("save-pretrained", "run", "--out", "shared")),
    "make-fixture": Case(("make-fixture", "arrays", "--out", "fixture")),
    "export": Case(("export", "run", "--to", "torch-export", "--out", "step.pt2")),
    "inspect": Case(("inspect", "flow.h5", "--plot", "flow.png")),
    "figure": Case(("figure", "decomposition", "run", "--out", "figures")),
    "report": Case(("report", "run", "--out", "page.html")),
    "suite": Case(("suite", "main", "--only", ROW, "--data", ".", "--out", "runs", *SUITE, *TINY, *RECORDED)),
    "measure": Case(
        ("measure", "--only", "ns2d-*-sigma", "--data", ".", "--rounds", "1", *QUICK, *SUITE, *TINY[:-4]),
        timed=True,
    ),
    "ledger": Case(("ledger", "paper", "--file", "ledger.jsonl", "--page", "results.md")),
    "demo": Case(("demo", "--out", "demo")),
}
VOLATILE = ("steps_per_second", "seconds", "date")
"""Entries of rows that change from run to run."""
MEASURED_TIME = re.compile(rb"[\d.]+ (ms|s)\b")
"""In the page of the demo, next to each error."""


NO_OVERWRITE = ("forecast", "save-pretrained", "make-fixture", "export")
"""Commands that refuse to overwrite their output."""


def prepare(folder: Path, evaluated: bool) -> None:
    """Create data, a store, a run stopped half-way and a trained one, evaluated and diagnosed if `evaluated`."""
    folder.mkdir(parents=True)
    t, x, y = np.meshgrid(np.arange(8), np.arange(8), np.arange(8), indexing="ij")
    waves = np.stack([np.sin(np.pi * (x + y - t) / 4 + phase) for phase in range(6)]).astype(np.float32)
    np.save(folder / "my.npy", waves)
    np.save(folder / "start.npy", waves[0, :2])
    axis = np.arange(8.0)
    layout = Layout(("vorticity",), ("1",), ("periodic",) * 2, (axis, axis), axis)
    write_store(folder / "ns2d.h5", Header(layout, "test", {}), waves[..., None])
    device = ["--device", "cpu"]
    for arguments in (
        [*TRAIN, "--out", "run"],
        [*TRAIN, "--out", "half", "--minutes", "1e-9"],
        ["simulate", "demo", "--count", "1", "--out", "flow.h5", *SMALL, *device],
        *([["evaluate", "run", *device], ["diagnose", "run", "--only", "decomposition", *device]] if evaluated else []),
        *([["train", "ns2d", "--data", "ns2d.h5", *SUITE, *TINY, "--out", "paper", *device]] if evaluated else []),
        *([["evaluate", "paper", *device]] if evaluated else []),
    ):
        status, output = fork(folder, arguments)
        assert status == 0, output


def fork(folder: Path, arguments: tuple[str, ...] | list[str], moment: int = 0) -> tuple[int, str]:
    """Run a command in a fork of this process, killed at this moment (0: never); returns its status and output."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.chdir(folder)
        os.dup2(write, 1)
        os.dup2(write, 2)
        sys.stdout, sys.stderr = (io.TextIOWrapper(open(1 + k, "wb", closefd=False)) for k in range(2))  # noqa: SIM115
        sys.argv = ["sigmasolver", *arguments]
        os.environ["SIGMASOLVER_COMMIT"] = "none"
        demo.Size.__init__.__defaults__ = ("darcy", 6, 2, 3)  # pretrained model, flows, test flows and updates
        die_at(moment)
        code = 1
        try:
            from sigmasolver.cli import main

            main()
        except SystemExit as exited:
            code = int(exited.code or 0)
        except BaseException as error:
            sys.stderr.write(repr(error))
        finally:
            sys.setprofile(None)
            if moment < 0:
                sys.stderr.write(f"\nmoments {die_at.count}")  # type: ignore[attr-defined]
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    os.close(write)
    with open(read, errors="replace") as pipe:
        output = pipe.read()
    return os.waitpid(child, 0)[1], output


SYSTEM_CALLS = {"write", "pwrite", "fsync", "replace", "rename", "unlink", "remove", "ftruncate", "truncate", "mkdir"}
FILE_METHODS = {"write", "writelines", "flush", "truncate", "close"}


def die_at(moment: int) -> None:
    """Kill this process before its `moment`-th call that modifies files."""
    die_at.count = 0  # type: ignore[attr-defined]
    if moment == 0:
        return

    def profile(frame: FrameType, event: str, call: Any) -> None:
        if event == "c_call" and changes_files(call):
            die_at.count += 1  # type: ignore[attr-defined]
            if die_at.count == moment:  # type: ignore[attr-defined]
                os.kill(os.getpid(), signal.SIGKILL)

    threading.setprofile(profile)
    sys.setprofile(profile)


def changes_files(call: Any) -> bool:
    name, owner = getattr(call, "__name__", ""), getattr(call, "__self__", None)
    if getattr(owner, "__name__", "") == "posix":
        return name in SYSTEM_CALLS
    if name not in FILE_METHODS or not isinstance(owner, io.BufferedRandom | io.BufferedWriter | io.FileIO):
        return False
    return not owner.closed and owner.writable() and owner.fileno() > 2


def contents(folder: Path, timed: bool) -> dict[str, Any]:
    """Contents of the files in a folder, without timestamps, absolute paths and locks."""
    files: dict[str, Any] = {}
    for path in sorted(entry for entry in folder.rglob("*") if entry.is_file() and entry.suffix != ".lock"):
        data, name = path.read_bytes().replace(os.fsencode(folder), b""), str(path.relative_to(folder))
        if timed and path.suffix == ".jsonl":
            files[name] = data.count(b"\n")
        elif path.suffix == ".jsonl":
            rows = (json.loads(line) for line in data.splitlines() if line.endswith(b"}"))
            files[name] = [{key: value for key, value in row.items() if key not in VOLATILE} for row in rows]
        else:
            files[name] = MEASURED_TIME.sub(b"a time", data) if path.suffix == ".html" else data
    return files


def invalid_files(folder: Path, before: dict[str, Any], expected: dict[str, Any], timed: bool) -> list[str]:
    """Files with a final name that are neither unchanged nor complete; stores, logs and checkpoints may be partial."""
    invalid = []
    for name, content in contents(folder, timed).items():
        if ".partial" in name or any(content == state.get(name, None) for state in (before, expected)):
            continue
        if name.endswith(".h5"):
            try:
                with open_store(folder / name) as store:
                    if all(store.verify(index) for index in range(len(store))):
                        continue
            except StoreError as error:
                invalid.append(f"{name}: {error}")
        elif name.endswith("weights.safetensors"):
            tensors, facts = read_tensors(folder / name)
            if tensors and facts["step"] < facts["steps"]:  # the best weights so far
                continue
        elif name.endswith(".jsonl") and name in expected:
            is_prefix = content <= expected[name] if timed else content == expected[name][: len(content)]
            if is_prefix:
                continue
        invalid.append(name)
    return invalid


def main(folder: str, names: list[str], points: int) -> None:
    """Kill each of these commands at `points` evenly spaced moments (0: all); print the failures as JSON."""
    # Imported once, for all forks.
    import matplotlib.backends.backend_agg
    import matplotlib.backends.backend_pdf
    import matplotlib.backends.backend_svg  # noqa: F401
    import torch._dynamo  # noqa: F401

    root = Path(folder).resolve()
    prepare(root / "base", evaluated=not {"figure", "report", "ledger"}.isdisjoint(names))
    for name in names:
        sys.stdout.write(json.dumps({"case": name, **_trial(root, CASES[name], points)}) + "\n")
        sys.stdout.flush()


def _trial(root: Path, case: Case, points: int) -> dict[str, Any]:
    before, reference = contents(root / "base", case.timed), root / "reference"
    shutil.copytree(root / "base", reference)
    status, output = fork(reference, case.arguments, -1)
    if status:
        return {"moments": 0, "wrong": [output]}
    moments, expected = int(output.split()[-1]), contents(reference, case.timed)
    failures, killed = [], 0
    for moment in sorted(set(np.linspace(1, moments, min(points or moments, moments)).round().astype(int).tolist())):
        work = root / "work"
        shutil.copytree(root / "base", work)
        status, output = fork(work, case.arguments, moment)
        killed += status == signal.SIGKILL
        problems = invalid_files(work, before, expected, case.timed)
        rerun_status, output = fork(work, case.arguments)
        # A command that does not overwrite may find its output complete.
        if rerun_status and not (
            case.arguments[0] in NO_OVERWRITE and ("already exists" in output or "not an empty folder" in output)
        ):
            problems.append(output)
        after = contents(work, case.timed)
        if case.optional_file is not None:
            after = {case.optional_file: expected[case.optional_file], **after}
        problems += [
            f"{name} differs" for name in expected.keys() | after.keys() if expected.get(name) != after.get(name)
        ]
        failures += [f"moment {moment}: {problem}" for problem in problems]
        shutil.rmtree(work)
    shutil.rmtree(reference)
    return {"moments": moments, "killed": killed, "wrong": failures}


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2].split(","), int(sys.argv[3]))
