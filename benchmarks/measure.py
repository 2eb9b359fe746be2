"""What every benchmark shares: interleaved timing, and rows that say where a number came from."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

__all__ = ["append_rows", "compare", "provenance"]


def compare(candidates: Mapping[str, Callable[[], object]], device: torch.device, repeats: int) -> dict[str, float]:
    """Median seconds of each candidate, run in turn so that a slow moment of the machine hits all of them."""

    def once(call: Callable[[], object]) -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    for call in candidates.values():
        once(call)
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(repeats):
        for name, call in candidates.items():
            times[name].append(once(call))
    return {name: statistics.median(values) for name, values in times.items()}


def provenance(device: torch.device) -> dict[str, object]:
    """Machine, library and commit (from git, or from SIGMASOLVER_COMMIT where there is no checkout)."""
    git = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True)
    gpu = device.type == "cuda"
    return {
        "commit": git.stdout.strip() or os.environ.get("SIGMASOLVER_COMMIT") or "unknown",
        "machine": torch.cuda.get_device_name() if gpu else f"{_processor()}, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def append_rows(path: Path, rows: list[dict[str, object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
