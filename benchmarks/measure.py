"""Shared by all benchmarks: interleaved timing, and appending rows to a results file."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

__all__ = ["append_rows", "compare"]


def compare(candidates: Mapping[str, Callable[[], object]], device: torch.device, repeats: int) -> dict[str, float]:
    """Median seconds of each candidate, interleaved so that slow phases of the machine affect all of them."""

    def seconds_of(call: Callable[[], object]) -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    for call in candidates.values():
        seconds_of(call)
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(repeats):
        for name, call in candidates.items():
            times[name].append(seconds_of(call))
    return {name: statistics.median(values) for name, values in times.items()}


def append_rows(path: Path, rows: list[dict[str, object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
