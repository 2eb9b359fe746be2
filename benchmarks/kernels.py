"""Profile of one update: its kernels by name, with launches, milliseconds and share.

    python benchmarks/kernels.py kf2d --device cuda --out results/kernels.jsonl
    python benchmarks/kernels.py darcy --form plain --precision bf16 --top 20
    python benchmarks/kernels.py kf2d --form single

On a GPU every kernel and copy of replayed updates is recorded (the forms are those of benchmarks/step.py; the kernels
of a graph appear individually). Kernels of a fused graph run concurrently, so each looks slower than it is;
`--form single` runs them one at a time. On a CPU the operators of an eager update are recorded, by self time.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from measure import append_rows
from noise import SEED, Subject
from step import FORMS, engine_step
from torch.profiler import ProfilerActivity, profile

from sigmasolver.runs import provenance
from sigmasolver.train.capture import WARM_UP

ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
MAX_NAME_LENGTH = 100


@dataclass(frozen=True)
class Entry:
    """One kernel or operator: launches and milliseconds per update."""

    name: str
    launches: float
    milliseconds: float


def profile_update(update: Callable[[], object], count: int, device: torch.device) -> tuple[list[Entry], float]:
    """The entries by decreasing time, and the wall time of an update in milliseconds without the profiler."""
    on_gpu = device.type == "cuda"

    def time_updates() -> float:
        start = time.perf_counter()
        for _ in range(count):
            update()
        if on_gpu:
            torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - start) / count

    for _ in range(WARM_UP + 2):
        update()
    if on_gpu:
        torch.cuda.synchronize()
    wall = time_updates()
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiler:
        time_updates()
    totals = _kernels(profiler) if on_gpu else _operators(profiler)
    if not totals:
        raise ValueError("The profiler recorded nothing; this torch was built without it or may not see the GPU.")
    entries = [Entry(name, launches / count, milliseconds / count) for name, (launches, milliseconds) in totals.items()]
    return sorted(entries, key=lambda entry: -entry.milliseconds), wall


def _kernels(profiler: profile) -> dict[str, tuple[int, float]]:
    """Launches and milliseconds by name, from the trace: only there are kernels distinct from the enclosing ranges."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return _sum_by_name((event["name"], event["dur"] / 1e3) for event in events if event.get("cat") in ON_DEVICE)


def _operators(profiler: profile) -> dict[str, tuple[int, float]]:
    return {event.key: (event.count, event.self_cpu_time_total / 1e3) for event in profiler.key_averages()}


def _sum_by_name(events: Iterable[tuple[str, float]]) -> dict[str, tuple[int, float]]:
    totals: dict[str, tuple[int, float]] = {}
    for name, milliseconds in events:
        launches, total = totals.get(name, (0, 0.0))
        totals[name] = (launches + 1, total + milliseconds)
    return totals


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", default=["darcy", "ns2d", "kf2d", "smoke3d"])
    parser.add_argument("--device", default="cuda", type=torch.device)
    parser.add_argument("--model", default="transolver-sigma")
    parser.add_argument("--form", default="fused", choices=[name for name in FORMS if name != "reference"])
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--updates", default=5, type=int, help="recorded ones")
    parser.add_argument("--top", default=30, type=int, help="printed ones; all are written")
    parser.add_argument("--set", action="append", default=[], dest="settings", metavar="NAME=VALUE")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    form, source = FORMS[args.form], {"seed": SEED, "settings": args.settings, **provenance(args.device)}
    for task in args.tasks:
        recipe = Subject(task, args.model, tuple(args.settings)).recipe(args.precision)
        with form.operations():
            update, _ = engine_step(form, recipe, args.device)
            entries, wall = profile_update(update, args.updates, args.device)
        busy, launches = sum(entry.milliseconds for entry in entries), sum(entry.launches for entry in entries)
        head = f"{task}, {args.model}, {form.label}, {args.precision}"
        print(f"{head}: {wall:.2f} ms, {busy:.2f} ms in {launches:.0f} launches of {len(entries)} kinds")
        for entry in entries[: args.top]:
            share = f"{entry.milliseconds / busy:6.1%}"
            print(
                f"{entry.milliseconds:9.3f} ms {share} {entry.launches:7.0f}  {entry.name[:MAX_NAME_LENGTH]}",
                flush=True,
            )
        row = {"benchmark": "kernels", "task": task, "model": args.model, "form": form.label}
        row |= {"precision": args.precision}
        rows = [Entry("all", launches, busy), *entries]
        if args.out:
            table = [
                {
                    "kernel": e.name,
                    "launches": e.launches,
                    "milliseconds": e.milliseconds,
                    "share": e.milliseconds / busy,
                }
                for e in rows
            ]
            append_rows(args.out, [{**row, **numbers, "update_milliseconds": wall, **source} for numbers in table])
        del update
        if args.device.type == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
