"""Fuzzing of run folders: mutated recipes, states and records, each read in turn by a process that may crash.

    python -m tests.runs.fuzz FOLDER FIRST STOP     one line per input: "number refused|harmless|traceback ..."

The number of an input determines which file of the run is mutated, and how. FOLDER keeps the runs of the first call.
"""

from __future__ import annotations

import copy
import json
import random
import shutil
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from sigmasolver.cli import _sentence
from sigmasolver.cli.report import _join_runs
from sigmasolver.cli.terminal import print_scores
from sigmasolver.evaluate import Request, evaluate_run, records_of_test_part
from sigmasolver.experiments.ledger import write
from sigmasolver.experiments.queue import fraction_done, is_done
from sigmasolver.forecast.checkpoint import load_recipe
from sigmasolver.forecast.files import forecast_file
from sigmasolver.recipes import ModelRecipe, Recipe, TrainRecipe
from sigmasolver.report.assemble import study_of
from sigmasolver.report.ledger import results_page
from sigmasolver.report.paper_tables import TABLES
from sigmasolver.report.rows import with_unique_names
from sigmasolver.report.tables import comparison, curves
from sigmasolver.runs import Run
from sigmasolver.simulate.generate import generate
from sigmasolver.tasks import Task
from sigmasolver.train.job import resume_run, train_run
from tests.data.fuzz import mutated
from tests.data.waves import Waves

FIELDS = ("height", "slope")
TASK = Task("waves", FIELDS, FIELDS, (6, 6), 1, 1, 2, 4, 2, "channel", space_stride=2)
MODEL = ModelRecipe(width=8, depth=1, heads=2, slices=3, modes=2)
RECIPE = Recipe(TASK, MODEL, TrainRecipe(updates=3, batch=2, checks=1, ema=0.9, seed=1))
DEEP = "[" * 50_000 + "]" * 50_000
EDGE_VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 7, 2**31, 2**53, 2**63 - 1, 2**63, -(2**63) - 1, 10**30, 0.0, -0.5, 0.1, 1e-300,
    1e300, float("inf"), float("-inf"), float("nan"), "", " ", "0", "none", "transolver-sigma", "a\0b", "\ud800",
    "é" * 300, "../..", "/dev/null", [], {}, [[]], [{}], {"a": 1}, [1], [1, 2, 3], ["a"], [0.5, None], [2**70],
)  # fmt: skip
UNPARSABLE = (b"", b"{", b"[]", b"7", b'"', DEEP.encode(), b"9" * 6000, b"\xff\xfe", b"{}", b'{"a": NaN}', b"null")
FILE_NAMES = (
    *("recipe.json",) * 6, *("data.json",) * 3, *("normaliser.json",) * 3, *("records.jsonl",) * 5, *("log.jsonl",) * 2,
    *("weights.safetensors",) * 3, *("resume.safetensors",) * 3, *("ledger.jsonl",) * 2,
)  # fmt: skip


def make(folder: Path) -> None:
    """Create a finished and evaluated run, the same run stopped half-way, and their data."""
    generate(Waves(), 6, 0, folder / "waves.h5")
    train_run(RECIPE, folder / "waves.h5", Run(folder / "half"), stop=lambda: True)
    train_run(RECIPE, folder / "waves.h5", Run(folder / "run"))
    evaluate_run(Run(folder / "run"))
    rows = records_of_test_part(Run(folder / "run"), RECIPE)
    write(folder / "run" / "ledger.jsonl", [{**row, "budget": 0.5, "data_seed": 0} for row in rows])
    shutil.copytree(folder / "run", folder / "whole-run")
    shutil.copytree(folder / "half", folder / "whole-half")


def value_paths(value: Any, prefix: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of all values inside a JSON value, including itself."""
    children = value.items() if isinstance(value, dict) else enumerate(value[:20]) if isinstance(value, list) else ()
    return [prefix, *(path for key, child in children for path in value_paths(child, (*prefix, key)))]


def mutated_json(value: Any, rng: random.Random) -> Any:
    """A JSON value with some entries replaced, deleted, repeated or added."""
    root: Any = [copy.deepcopy(value)]
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        *path, last = rng.choice(value_paths(root)[1:])
        parent = root
        for key in path:
            parent = parent[key]
        choice = rng.random()
        if choice < 0.6 or len(path) == 0:
            parent[last] = copy.deepcopy(rng.choice(EDGE_VALUES))  # a later mutation must not change the table
        elif choice < 0.75:
            del parent[last]
        elif choice < 0.85 and isinstance(parent, dict):
            parent[rng.choice(("more", "", "wïdth", last + "s" if isinstance(last, str) else "x"))] = parent[last]
        elif choice < 0.95 and isinstance(parent[last], list):
            parent[last] = (parent[last] * 3)[: rng.randrange(1, 60)]
        else:
            parent[last] = [parent[last]] if rng.random() < 0.5 else {"value": parent[last]}
    return root[0]


def damaged(name: str, content: bytes, rng: random.Random) -> bytes:
    """The contents of a run file, mutated as bytes, as JSON or in its header."""
    choice = rng.random()
    if choice < 0.25:
        return mutated(content, rng)
    if choice < 0.3:
        return rng.choice(UNPARSABLE)
    if name.endswith(".json"):
        return json.dumps(mutated_json(json.loads(content), rng)).encode()
    if name.endswith(".jsonl"):
        rows = mutated_json([json.loads(line) for line in content.splitlines()], rng)
        lines = rows if isinstance(rows, list) else [rows]
        return b"".join(json.dumps(row).encode() + b"\n" for row in lines)
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    if rng.random() < 0.5:
        facts = mutated_json(json.loads(header["__metadata__"]["facts"]), rng)
        header["__metadata__"]["facts"] = json.dumps(facts)
    else:
        header = mutated_json(header, rng)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + content[8 + size :]


def use_half(folder: Path, number: int) -> None:
    """Use an unfinished run as the commands do."""
    run = Run(folder / "half")
    fraction_done(run)
    resume_run(run, stop=lambda: True)


def use_run(folder: Path, number: int) -> None:
    """Use a finished run as the commands do; the slowest steps only for some inputs."""
    run = Run(folder / "run")
    recipe = load_recipe(run)
    is_done(run, recipe)
    evaluate_run(run, Request(horizon=1))
    forecast_file(run.path, folder / "waves.h5", 1, folder / "out.npy", torch.device("cpu"))
    if number % 4 == 0:
        resume_run(run, stop=lambda: True)


def use_records(folder: Path, number: int) -> None:
    """Use records as the commands do: tables, the page, the ledger."""
    run, screen = Run(folder / "run"), Console(file=None, quiet=True)
    rows, arrays = _join_runs([run.path], (), (), [])
    comparison(with_unique_names(rows))
    curves(rows)
    records_of_test_part(run, RECIPE)
    print_scores(screen, evaluate_run(run))
    for table in list(TABLES.values())[number % 4 :: 4]:
        try:
            table.make(rows)
        except ValueError as error:
            check_refusal(error)
    if number % 16 == 0:
        study_of(rows, arrays, None)


def use_ledger(folder: Path, number: int) -> None:
    results_page(write(folder / "run" / "ledger.jsonl", []), ["waves-42"])


USES: dict[str, tuple[Callable[[Path, int], None], ...]] = {
    "recipe.json": (use_run, use_half, use_records),
    "data.json": (use_run, use_half, use_records),
    "normaliser.json": (use_run, use_half),
    "records.jsonl": (use_records, use_run),
    "log.jsonl": (use_half,),
    "weights.safetensors": (use_run,),
    "resume.safetensors": (use_half,),
    "ledger.jsonl": (use_ledger,),
}
RAW = (
    "could not broadcast", "invalid literal", "Expecting", "index out of", "NoneType", "object has no", "unhashable",
    "not supported between", "not subscriptable", "unexpected keyword", "codec can't", "0x", "<class", "not iterable",
    "zip()", "positional", "tuple", "NaN to", "cannot convert", "math domain", "truth value",
)  # fmt: skip
"""Fragments of raw Python, NumPy and torch errors, which must not reach the user."""


def check_refusal(error: Exception) -> None:
    """Re-raise the error unless the command line reports it as one plain sentence."""
    sentence = _sentence(error)
    if sentence is None or "\n" in sentence or len(sentence) > 1200 or any(word in sentence for word in RAW):
        raise error


def attempt(folder: Path, number: int) -> str:
    """Outcome of an input: `refused` if any use ends with one sentence, `harmless` if all complete."""
    name = FILE_NAMES[number % len(FILE_NAMES)]
    outcome = "harmless"
    for use in USES[name]:
        which = "half" if use is use_half else "run"
        restore(folder, which)
        path = folder / which / name
        path.write_bytes(damaged(name, path.read_bytes(), random.Random(number)))
        try:
            use(folder, number)
        except Exception as error:
            try:
                check_refusal(error)
                outcome = "refused"
            except Exception:
                return f"traceback {name} {use.__name__} " + " | ".join(traceback.format_exc().splitlines()[-7:])
    return outcome


def restore(folder: Path, which: str) -> None:
    """Restore the original run and remove other output."""
    for path in (folder / which, folder / "out.npy"):
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    shutil.copytree(folder / f"whole-{which}", folder / which)


def main() -> None:
    folder, first, stop = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    if not (folder / "whole-half").exists():
        make(folder)
    for number in range(first, stop):
        sys.stdout.write(f"{number} {attempt(folder, number)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
