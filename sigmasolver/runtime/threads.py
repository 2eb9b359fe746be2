"""How many OpenMP threads compute, and how they wait for each other: decided before torch is loaded.

By default a waiting thread spins, which keeps its core from the very thread it waits for when other programs want the
cores too: on a busy machine an update then takes ten times as long (`benchmarks/threads.py`). A thread that sleeps
instead changes no number. How many threads there are does change the last digits of sums, so that is left to torch
(one per core that this process may use), unless a container's quota allows less.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

__all__ = ["choose_threads", "cpu_quota", "describe_threads"]

WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""Settings of OpenMP, of GNU's library for it, and of Intel's; any of them is the user's choice."""
CGROUPS, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def choose_threads() -> None:
    """Set OpenMP's environment where the user has not; without effect once torch is loaded."""
    if not any(name in os.environ for name in WAITING):
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    quota = cpu_quota()
    if "OMP_NUM_THREADS" not in os.environ and quota is not None and quota < _usable():
        os.environ["OMP_NUM_THREADS"] = str(quota)


def describe_threads() -> str:
    """One line for the user; loads torch."""
    import torch

    count, quota = torch.get_num_threads(), cpu_quota()
    limit = "" if quota is None else f", limited to {quota} by a quota"
    waiting = next(
        (f"{name}={os.environ[name]}" for name in WAITING if name in os.environ), "default OpenMP wait policy"
    )
    return f"{count} thread{'s' * (count > 1)} on {_usable()} cores{limit} ({waiting})"


def cpu_quota(cgroups: Path = CGROUPS, own: Path = OWN) -> int | None:
    """CPUs that the control groups of this process allow, rounded up; None: no limit. Understands both versions."""
    limits = []
    for line in own.read_text().splitlines() if own.exists() else ():
        _, controllers, group = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = cgroups / controllers if controllers else cgroups
        folder = root / group.lstrip("/")
        # A limit of a parent holds as well; inside a container the path may be that of the host and lead nowhere.
        for place in (folder, *folder.parents):
            if not place.is_relative_to(root):
                break
            limits += [limit] if (limit := _limit(place)) is not None else []
    return max(1, math.ceil(min(limits))) if limits else None


def _limit(place: Path) -> float | None:
    try:
        if (place / "cpu.max").exists():
            quota, period = (place / "cpu.max").read_text().split()
        else:
            quota, period = ((place / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
        return None if quota in ("max", "-1") else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):  # no such controller here, or none that can be read
        return None


def _usable() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
