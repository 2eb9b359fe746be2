"""Commands that die between any two writes, renames and syncs, each in a fork of this process, and start again.

A command is run once to the end in a copy of a prepared folder: the reference. It is then killed at its first, second,
… moment in further copies. Whatever a kill leaves under its own name must be as it was before, or complete; the same
command must then succeed and leave the reference's files.
"""

from __future__ import annotations

import io
import json
import os
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
TINY = [word for one in (*MODEL, "train.updates=3", "train.batch=2") for word in ("--set", one)]
OWN = ["--fields", "u", "--history", "2", "--block", "1", "--horizon", "3"]
TASK = ("task.grid=(8,8)", "task.history=2", "task.horizon=3", "task.block=1", "task.train=4", "task.test=2")
SUITE = [word for one in (*TASK, "task.space_stride=1", "task.time_stride=1") for word in ("--set", one)]
ROW = "ns2d-transolver-sigma-42"
QUICK = ("--seconds", "0.01", "--out", "runs", "--device", "cpu")
TRAIN = ("train", "--data", "my.npy", *OWN, *TINY, "--device", "cpu")
BEST = ("--set", "train.keep=best", "--set", "train.validation=0.3")
START = ["forecast", "run", "--input", "start.npy", "--steps", "2", "--device", "cpu", "--out"]


@dataclass(frozen=True)
class Case:
    """A command, and whether its numbers are timings that no second run repeats."""

    words: tuple[str, ...]
    timed: bool = False
    spared: str | None = None
    """A file that may be missing in the end: the state of a run whose last weights were its best was of no more use."""


CASES = {
    "simulate": Case(("simulate", "demo", "--count", "2", "--out", "new.h5", *SMALL, "--device", "cpu")),
    "simulate more": Case(("simulate", "demo", "--count", "3", "--out", "flow.h5", *SMALL, "--device", "cpu")),
    "import-data": Case(("import-data", "my.npy", "--fields", "u", "--out", "mine.h5")),
    "train": Case((*TRAIN, "--out", "new")),
    "train best": Case((*TRAIN, *BEST, "--out", "new"), spared="new/resume.safetensors"),
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
    "suite": Case(("suite", "main", "--only", ROW, "--data", ".", "--out", "runs", *SUITE, *TINY, "--device", "cpu")),
    "measure": Case(
        ("measure", "--only", "ns2d-*-sigma", "--data", ".", "--rounds", "1", *QUICK, *SUITE, *TINY[:-4]),
        timed=True,
    ),
    "ledger": Case(("ledger", "paper", "--file", "ledger.jsonl", "--page", "results.md")),
    "demo": Case(("demo", "--out", "demo")),
}
VOLATILE = ("steps_per_second", "seconds", "date")
"""Entries of rows that another second or day changes."""


FRESH = ("forecast", "save-pretrained", "make-fixture", "export")
"""Commands that refuse to write what is there."""


def prepare(folder: Path, shown: bool) -> None:
    """Data, a store to be grown, a run half-way and a trained one; evaluated and diagnosed where that is `shown`."""
    folder.mkdir(parents=True)
    t, x, y = np.meshgrid(np.arange(8), np.arange(8), np.arange(8), indexing="ij")
    waves = np.stack([np.sin(np.pi * (x + y - t) / 4 + one) for one in range(6)]).astype(np.float32)
    np.save(folder / "my.npy", waves)
    np.save(folder / "start.npy", waves[0, :2])
    axis = np.arange(8.0)
    layout = Layout(("vorticity",), ("1",), ("periodic",) * 2, (axis, axis), axis)
    write_store(folder / "ns2d.h5", Header(layout, "test", {}), waves[..., None])
    device = ["--device", "cpu"]
    for words in (
        [*TRAIN, "--out", "run"],
        [*TRAIN, "--out", "half", "--minutes", "1e-9"],
        ["simulate", "demo", "--count", "1", "--out", "flow.h5", *SMALL, *device],
        *([["evaluate", "run", *device], ["diagnose", "run", "--only", "decomposition", *device]] if shown else []),
        *([["train", "ns2d", "--data", "ns2d.h5", *SUITE, *TINY, "--out", "paper", *device]] if shown else []),
        *([["evaluate", "paper", *device]] if shown else []),
    ):
        status, said = fork(folder, words)
        assert status == 0, said


def fork(folder: Path, words: tuple[str, ...] | list[str], moment: int = 0) -> tuple[int, str]:
    """Run a command in a fork of this process, killed at this moment (0: never); its status, and what it said."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.chdir(folder)
        os.dup2(write, 1)
        os.dup2(write, 2)
        sys.stdout, sys.stderr = (io.TextIOWrapper(open(1 + k, "wb", closefd=False)) for k in range(2))  # noqa: SIM115
        sys.argv = ["sigmasolver", *words]
        os.environ["SIGMASOLVER_COMMIT"] = "none"
        demo.Size.__init__.__defaults__ = (6, 2, 3)  # flows, unseen ones and updates
        die_at(moment)
        code = 1
        try:
            from sigmasolver.cli import main

            main()
        except SystemExit as leaving:
            code = int(leaving.code or 0)
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
        said = pipe.read()
    return os.waitpid(child, 0)[1], said


SYSTEM = {"write", "pwrite", "fsync", "replace", "rename", "unlink", "remove", "ftruncate", "truncate", "mkdir"}
FILE = {"write", "writelines", "flush", "truncate", "close"}


def die_at(moment: int) -> None:
    """Have this process killed before its `moment`-th call that changes the disk, so after the one before."""
    die_at.count = 0  # type: ignore[attr-defined]
    if moment == 0:
        return

    def look(frame: FrameType, event: str, call: Any) -> None:
        if event == "c_call" and changes_files(call):
            die_at.count += 1  # type: ignore[attr-defined]
            if die_at.count == moment:  # type: ignore[attr-defined]
                os.kill(os.getpid(), signal.SIGKILL)

    threading.setprofile(look)
    sys.setprofile(look)


def changes_files(call: Any) -> bool:
    name, owner = getattr(call, "__name__", ""), getattr(call, "__self__", None)
    if getattr(owner, "__name__", "") == "posix":
        return name in SYSTEM
    if name not in FILE or not isinstance(owner, io.BufferedRandom | io.BufferedWriter | io.FileIO):
        return False
    return not owner.closed and owner.writable() and owner.fileno() > 2


def contents(folder: Path, timed: bool) -> dict[str, Any]:
    """The files of a folder, without what changes with the hour or the place; locks are none."""
    found: dict[str, Any] = {}
    for path in sorted(one for one in folder.rglob("*") if one.is_file() and one.suffix != ".lock"):
        data, name = path.read_bytes().replace(os.fsencode(folder), b""), str(path.relative_to(folder))
        if timed and path.suffix == ".jsonl":
            found[name] = data.count(b"\n")
        elif path.suffix == ".jsonl":
            rows = (json.loads(line) for line in data.splitlines() if line.endswith(b"}"))
            found[name] = [{key: value for key, value in row.items() if key not in VOLATILE} for row in rows]
        else:
            found[name] = data
    return found


def wrong_after_the_kill(folder: Path, before: dict[str, Any], wanted: dict[str, Any], timed: bool) -> list[str]:
    """Files with a name of their own that are neither as they were nor complete; stores, logs and trainings go on."""
    wrong = []
    for name, held in contents(folder, timed).items():
        if ".partial" in name or any(held == one.get(name, None) for one in (before, wanted)):
            continue
        if name.endswith(".h5"):
            try:
                with open_store(folder / name) as store:
                    if all(store.verify(index) for index in range(len(store))):
                        continue
            except StoreError as error:
                wrong.append(f"{name}: {error}")
        elif name.endswith("weights.safetensors"):
            tensors, facts = read_tensors(folder / name)
            if tensors and facts["step"] < facts["steps"]:  # the best so far
                continue
        elif name.endswith(".jsonl") and name in wanted:
            whole = held <= wanted[name] if timed else held == wanted[name][: len(held)]
            if whole:
                continue
        wrong.append(name)
    return wrong


def main(folder: str, names: list[str], points: int) -> None:
    """Kill each of these commands at so many moments, evenly spread (0: at all); print what went wrong, as JSON."""
    # What a command imports, once and for all forks.
    import matplotlib.backends.backend_agg
    import matplotlib.backends.backend_pdf
    import matplotlib.backends.backend_svg  # noqa: F401
    import torch._dynamo  # noqa: F401

    root = Path(folder).resolve()
    prepare(root / "base", shown=not {"figure", "report", "ledger"}.isdisjoint(names))
    for name in names:
        sys.stdout.write(json.dumps({"case": name, **_trial(root, CASES[name], points)}) + "\n")
        sys.stdout.flush()


def _trial(root: Path, case: Case, points: int) -> dict[str, Any]:
    before, reference = contents(root / "base", case.timed), root / "reference"
    shutil.copytree(root / "base", reference)
    status, said = fork(reference, case.words, -1)
    if status:
        return {"moments": 0, "wrong": [said]}
    moments, wanted = int(said.split()[-1]), contents(reference, case.timed)
    wrong, killed = [], 0
    for moment in sorted(set(np.linspace(1, moments, min(points or moments, moments)).round().astype(int).tolist())):
        work = root / "work"
        shutil.copytree(root / "base", work)
        status, said = fork(work, case.words, moment)
        killed += status == signal.SIGKILL
        found = wrong_after_the_kill(work, before, wanted, case.timed)
        again, said = fork(work, case.words)
        # What is there already is not made again.
        if again and not (case.words[0] in FRESH and ("already exists" in said or "not an empty folder" in said)):
            found.append(said)
        after = contents(work, case.timed)
        if case.spared is not None:
            after = {case.spared: wanted[case.spared], **after}
        found += [f"{one} differs" for one in wanted.keys() | after.keys() if wanted.get(one) != after.get(one)]
        wrong += [f"moment {moment}: {one}" for one in found]
        shutil.rmtree(work)
    shutil.rmtree(reference)
    return {"moments": moments, "killed": killed, "wrong": wrong}


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2].split(","), int(sys.argv[3]))
