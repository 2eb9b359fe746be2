"""Start-up time of a training on a GPU: kernels compiled in parallel, or one by one as they are launched.

    python benchmarks/cold_start.py --out results/cold_start.jsonl
    python benchmarks/cold_start.py kf2d --repeats 3

Every measurement runs in its own process, first with an empty Triton cache (a temporary folder), then with the cache it
has filled. Forms: `parallel` is the package default (`ops/precompile.py`), `serial` sets SIGMASOLVER_PRECOMPILE=0.
Seconds are measured from building the trainer to the end of the first and of the fiftieth update (`precompile` is
included in the first), and from the start of the process (imports, model, random windows) to the fiftieth. Ratios are
serial / parallel, medians within one run of both.
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


def measure_start(task: str, precision: str, settings: list[str], device: str) -> dict[str, object]:
    """Measure in this process: seconds of each phase, and the number of kernels compiled or loaded."""
    process_start = time.time()
    import torch
    from noise import Subject

    from sigmasolver.ops import precompile
    from sigmasolver.runtime.parallel import World
    from sigmasolver.train import capture
    from sigmasolver.train.dry_run import DryRun
    from sigmasolver.train.engine import Execution

    target = torch.device(device)
    engine = "graph" if target.type == "cuda" else "eager"
    totals = {"kernels": 0.0, "precompile": 0.0}

    def timed_precompile(*args: object) -> object:
        start = time.perf_counter()
        kernels = precompile.precompile(*args)  # type: ignore[arg-type]
        totals["kernels"] += len(kernels)
        totals["precompile"] += time.perf_counter() - start
        return kernels

    vars(capture)["precompile"] = timed_precompile
    recipe = Subject(task, settings=settings).recipe(precision)
    if target.type == "cuda":
        torch.zeros(1, device=target)  # create the CUDA context, which every program waits for
    imports = time.time() - process_start
    start = time.perf_counter()
    update = DryRun(recipe, Execution(World(device=target), engine))
    update()
    first_loss, last_loss = update.loss.item(), 0.0
    first_update = time.perf_counter() - start
    for _ in range(UPDATES - 1):
        update()
    last_loss = update.loss.item()
    all_updates = time.perf_counter() - start
    since_start = time.time() - float(os.environ["SIGMASOLVER_STARTED"])
    return {
        "first": first_update,
        "all": all_updates,
        "imports": imports,
        "since_start": since_start,
        **totals,
        "losses": [first_loss, last_loss],
    }


def measure_in_process(args: argparse.Namespace, task: str, form: str, cache: str) -> dict[str, object]:
    """Measure in a new process."""
    command = [sys.executable, __file__, "--measure", task, "--precision", args.precision, "--device", args.device]
    command += [word for setting in args.settings for word in ("--set", setting)]
    environment = {**os.environ, "TRITON_CACHE_DIR": cache, "SIGMASOLVER_PRECOMPILE": FORMS[form]}
    environment["SIGMASOLVER_STARTED"] = str(time.time())
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if result.returncode:
        raise SystemExit(f"{task}, {form}: {result.stderr.strip()[-2000:]}")
    facts: dict[str, object] = json.loads(result.stdout.splitlines()[-1])
    return facts


def run(args: argparse.Namespace, task: str) -> list[dict[str, object]]:
    """Rows of one task by cache and form, with interleaved forms."""
    times: dict[tuple[str, str], list[dict[str, object]]] = {}
    for _ in range(args.repeats):
        for form in args.forms.split(","):
            with tempfile.TemporaryDirectory() as cache:
                for state in ("empty", "full"):
                    times.setdefault((state, form), []).append(measure_in_process(args, task, form, cache))
    losses = {json.dumps(sample["losses"]) for samples in times.values() for sample in samples}
    rows: list[dict[str, object]] = []
    for (state, form), samples in sorted(times.items()):
        row: dict[str, object] = {"benchmark": "cold_start", "task": task, "precision": args.precision}
        row |= {"cache": state, "form": form, "kernels": samples[0]["kernels"], "same_losses": len(losses) == 1}
        row |= {name: statistics.median(float(str(sample[name])) for sample in samples) for name in SECONDS}
        rows.append(row)
    for row in rows:
        for other in (r for r in rows if r["cache"] == row["cache"] and r["form"] == "serial"):
            row["ratio"] = float(str(other["all"])) / float(str(row["all"]))
        speedup = f" {row['ratio']:6.2f}x" if "ratio" in row else ""
        print(
            f"{task:8} {args.precision}  {row['cache']:5} cache  {row['form']:8}  first update {row['first']:6.2f} s  "
            f"{UPDATES} updates {row['all']:6.2f} s{speedup}  precompile {row['precompile']:6.2f} s  "
            f"imports {row['imports']:6.2f} s  since the start {row['since_start']:6.2f} s"
            f"{'' if row['same_losses'] else '  losses differ'}",
            flush=True,
        )
    return rows


def build_parser() -> argparse.ArgumentParser:
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
    args = build_parser().parse_args()
    if args.measure:
        print(json.dumps(measure_start(args.tasks[0], args.precision, args.settings, args.device)))
        return
    import torch
    from measure import append_rows
    from noise import SEED

    from sigmasolver.runs import provenance

    source = {"seed": SEED, "repeats": args.repeats, "cores": os.cpu_count(), "settings": args.settings}
    source |= provenance(torch.device(args.device))
    if args.device == "cuda":
        source["triton"] = __import__("triton").__version__
    for task in args.tasks:
        rows = run(args, task)
        if args.out:
            append_rows(args.out, [{**row, **source} for row in rows])


if __name__ == "__main__":
    main()
