"""Where the time of one update goes: its kernels by name, with launches, milliseconds and share.

    python benchmarks/kernels.py kf2d --device cuda --out results/kernels.jsonl
    python benchmarks/kernels.py darcy --form plain --precision bf16 --top 20
    python benchmarks/kernels.py kf2d --form single

On a GPU every kernel and copy of replayed updates is recorded (the forms are those of benchmarks/step.py; a graph's
kernels are seen one by one). Kernels of a fused graph run beside each other, which makes each look slower than it is;
`--form single` shows them alone. On a CPU the operators of an eager update are, each without those it calls.
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
SHOWN = 100


@dataclass(frozen=True)
class Entry:
    """One kernel or operator: launches and milliseconds of an update."""

    name: str
    launches: float
    milliseconds: float


def recorded(update: Callable[[], object], count: int, device: torch.device) -> tuple[list[Entry], float]:
    """The entries, longest first, and the milliseconds of an update from start to end without the recorder."""
    on_gpu = device.type == "cuda"

    def many() -> float:
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
    whole = many()
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiler:
        many()
    totals = _kernels(profiler) if on_gpu else _operators(profiler)
    if not totals:
        raise ValueError("The profiler recorded nothing; this torch was built without it or may not see the GPU.")
    entries = [Entry(name, number / count, spent / count) for name, (number, spent) in totals.items()]
    return sorted(entries, key=lambda entry: -entry.milliseconds), whole


def _kernels(profiler: profile) -> dict[str, tuple[int, float]]:
    """Launches and milliseconds by name, from the trace: it alone tells kernels from the ranges around them."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return _summed((event["name"], event["dur"] / 1e3) for event in events if event.get("cat") in ON_DEVICE)


def _operators(profiler: profile) -> dict[str, tuple[int, float]]:
    return {event.key: (event.count, event.self_cpu_time_total / 1e3) for event in profiler.key_averages()}


def _summed(events: Iterable[tuple[str, float]]) -> dict[str, tuple[int, float]]:
    totals: dict[str, tuple[int, float]] = {}
    for name, spent in events:
        number, before = totals.get(name, (0, 0.0))
        totals[name] = (number + 1, before + spent)
    return totals


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("tasks", nargs="*", default=["darcy", "ns2d", "kf2d", "smoke3d"])
    words.add_argument("--device", default="cuda", type=torch.device)
    words.add_argument("--model", default="transolver-sigma")
    words.add_argument("--form", default="fused", choices=[name for name in FORMS if name != "reference"])
    words.add_argument("--precision", default="bf16")
    words.add_argument("--updates", default=5, type=int, help="recorded ones")
    words.add_argument("--top", default=30, type=int, help="printed ones; all are written")
    words.add_argument("--set", action="append", default=[], dest="settings", metavar="NAME=VALUE")
    words.add_argument("--out", type=Path)
    given = words.parse_args()
    form, source = FORMS[given.form], {"seed": SEED, "settings": given.settings, **provenance(given.device)}
    for task in given.tasks:
        recipe = Subject(task, given.model, tuple(given.settings)).recipe(given.precision)
        with form.operations():
            update, _ = engine_step(form, recipe, given.device)
            entries, whole = recorded(update, given.updates, given.device)
        busy, launches = sum(entry.milliseconds for entry in entries), sum(entry.launches for entry in entries)
        head = f"{task}, {given.model}, {form.label}, {given.precision}"
        print(f"{head}: {whole:.2f} ms, {busy:.2f} ms in {launches:.0f} launches of {len(entries)} kinds")
        for entry in entries[: given.top]:
            share = f"{entry.milliseconds / busy:6.1%}"
            print(f"{entry.milliseconds:9.3f} ms {share} {entry.launches:7.0f}  {entry.name[:SHOWN]}", flush=True)
        row = {"benchmark": "kernels", "task": task, "model": given.model, "form": form.label}
        row |= {"precision": given.precision}
        rows = [Entry("all", launches, busy), *entries]
        if given.out:
            numbers = [
                {
                    "kernel": e.name,
                    "launches": e.launches,
                    "milliseconds": e.milliseconds,
                    "share": e.milliseconds / busy,
                }
                for e in rows
            ]
            append_rows(given.out, [{**row, **one, "update_milliseconds": whole, **source} for one in numbers])
        del update
        if given.device.type == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
