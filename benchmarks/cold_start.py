"""How long a training on a GPU waits before its updates: kernels compiled in parallel, or one by one as launched.

    python benchmarks/cold_start.py --out results/cold_start.jsonl
    python benchmarks/cold_start.py kf2d --repeats 3

Every measurement is a process of its own, with an empty Triton cache (a temporary folder) and then with the one that it
left. Forms: `parallel` is the package as it is (`ops/precompile.py`), `serial` has SIGMASOLVER_PRECOMPILE=0. Seconds
from building the trainer to the end of the first and of the fiftieth update, of which the first `precompile` takes its
part, and from the start of the process (imports, the model, random windows) to the same fiftieth. Ratios are serial /
parallel, medians within one run that has both.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

FORMS = {"parallel": "1", "serial": "0"}
UPDATES = 50
SECONDS = ("first", "all", "precompile", "imports", "since_start")


def measured(task: str, precision: str, settings: list[str], device: str) -> dict[str, object]:
    """In this process: seconds of the parts of a start, and how many kernels were compiled or loaded."""
    began = time.time()
    import torch
    from noise import Subject

    from sigmasolver.ops import precompile
    from sigmasolver.runtime.parallel import World
    from sigmasolver.train import capture
    from sigmasolver.train.dry_run import Rehearsal
    from sigmasolver.train.engine import Execution

    where = torch.device(device)
    engine = "graph" if where.type == "cuda" else "eager"
    taken = {"kernels": 0.0, "precompile": 0.0}

    def timed(*given: object) -> object:
        start = time.perf_counter()
        kernels = precompile.precompile(*given)  # type: ignore[arg-type]
        taken["kernels"] += len(kernels)
        taken["precompile"] += time.perf_counter() - start
        return kernels

    vars(capture)["precompile"] = timed
    recipe = Subject(task, settings=settings).recipe(precision)
    if where.type == "cuda":
        torch.zeros(1, device=where)  # the context of the GPU, which any program waits for
    imports = time.time() - began
    start = time.perf_counter()
    update = Rehearsal(recipe, Execution(World(device=where), engine))
    update()
    first, loss = update.loss.item(), 0.0
    until_first = time.perf_counter() - start
    for _ in range(UPDATES - 1):
        update()
    loss = update.loss.item()
    whole = time.perf_counter() - start
    since = time.time() - float(os.environ["SIGMASOLVER_STARTED"])
    return {
        "first": until_first,
        "all": whole,
        "imports": imports,
        "since_start": since,
        **taken,
        "losses": [first, loss],
    }


def start(given: argparse.Namespace, task: str, form: str, cache: str) -> dict[str, object]:
    """The same in a new process."""
    command = [sys.executable, __file__, "--measure", task, "--precision", given.precision, "--device", given.device]
    command += [word for setting in given.settings for word in ("--set", setting)]
    environment = {**os.environ, "TRITON_CACHE_DIR": cache, "SIGMASOLVER_PRECOMPILE": FORMS[form]}
    environment["SIGMASOLVER_STARTED"] = str(time.time())
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{task}, {form}: {done.stderr.strip()[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def run(given: argparse.Namespace, task: str) -> list[dict[str, object]]:
    """Rows of one task, by cache and form; forms take turns."""
    times: dict[tuple[str, str], list[dict[str, object]]] = {}
    for _ in range(given.repeats):
        for form in given.forms.split(","):
            with tempfile.TemporaryDirectory() as cache:
                for state in ("empty", "full"):
                    times.setdefault((state, form), []).append(start(given, task, form, cache))
    losses = {json.dumps(one["losses"]) for found in times.values() for one in found}
    rows: list[dict[str, object]] = []
    for (state, form), found in sorted(times.items()):
        row: dict[str, object] = {"benchmark": "cold_start", "task": task, "precision": given.precision}
        row |= {"cache": state, "form": form, "kernels": found[0]["kernels"], "same_losses": len(losses) == 1}
        row |= {name: statistics.median(float(str(one[name])) for one in found) for name in SECONDS}
        rows.append(row)
    for row in rows:
        for other in (one for one in rows if one["cache"] == row["cache"] and one["form"] == "serial"):
            row["ratio"] = float(str(other["all"])) / float(str(row["all"]))
        faster = f" {row['ratio']:6.2f}x" if "ratio" in row else ""
        print(
            f"{task:8} {given.precision}  {row['cache']:5} cache  {row['form']:8}  first update {row['first']:6.2f} s  "
            f"{UPDATES} updates {row['all']:6.2f} s{faster}  precompile {row['precompile']:6.2f} s  "
            f"imports {row['imports']:6.2f} s  since the start {row['since_start']:6.2f} s"
            f"{'' if row['same_losses'] else '  losses differ'}",
            flush=True,
        )
    return rows


def words() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", default=["kf2d", "darcy", "ns2d"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--forms", default=",".join(FORMS), help="which to measure; default: %(default)s")
    parser.add_argument("--set", action="append", default=[], dest="settings", metavar="NAME=VALUE")
    parser.add_argument("--measure", action="store_true", help="one measurement of one task in this process, as JSON")
    parser.add_argument("--out", type=Path)
    return parser


def main() -> None:
    given = words().parse_args()
    if given.measure:
        print(json.dumps(measured(given.tasks[0], given.precision, given.settings, given.device)))
        return
    import torch
    from measure import append_rows
    from noise import SEED

    from sigmasolver.runs import provenance

    source = {"seed": SEED, "repeats": given.repeats, "cores": os.cpu_count(), "settings": given.settings}
    source |= provenance(torch.device(given.device))
    if given.device == "cuda":
        source["triton"] = __import__("triton").__version__
    for task in given.tasks:
        rows = run(given, task)
        if given.out:
            append_rows(given.out, [{**row, **source} for row in rows])


if __name__ == "__main__":
    main()
