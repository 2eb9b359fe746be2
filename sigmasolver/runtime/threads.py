"""Number and wait policy of OpenMP threads, chosen before torch is loaded.

By default a waiting thread spins, which on an oversubscribed machine blocks the core that the thread it waits for
needs: an update then takes ten times as long (`benchmarks/threads.py`). Sleeping instead does not change the results.
The number of threads does change the round-off of sums, so it is left to torch (one per usable core), unless the CPU
quota of a container is lower.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

__all__ = ["choose_threads", "cpu_quota", "describe_threads"]

WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""Wait policy variables of OpenMP, GNU libgomp and Intel's runtime; a value set by the user is kept."""
CGROUPS, PROC_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def choose_threads() -> None:
    """Set OpenMP environment variables that the user has not set; no effect once torch is loaded."""
    if not any(name in os.environ for name in WAITING):
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    quota = cpu_quota()
    if "OMP_NUM_THREADS" not in os.environ and quota is not None and quota < _usable_cores():
        os.environ["OMP_NUM_THREADS"] = str(quota)


def describe_threads() -> str:
    """Describe the threads in one line; imports torch."""
    import torch

    count, quota = torch.get_num_threads(), cpu_quota()
    limit = "" if quota is None else f", limited to {quota} by a quota"
    waiting = next(
        (f"{name}={os.environ[name]}" for name in WAITING if name in os.environ), "default OpenMP wait policy"
    )
    return f"{count} thread{'s' * (count > 1)} on {_usable_cores()} cores{limit} ({waiting})"


def cpu_quota(cgroups: Path = CGROUPS, proc_cgroup: Path = PROC_CGROUP) -> int | None:
    """CPU quota of this process's cgroups (v1 or v2), rounded up; None if unlimited."""
    limits = []
    for line in proc_cgroup.read_text().splitlines() if proc_cgroup.exists() else ():
        _, controllers, group = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = cgroups / controllers if controllers else cgroups
        folder = root / group.lstrip("/")
        # Parent limits apply too. Inside a container the path may be that of the host and not exist.
        for group_folder in (folder, *folder.parents):
            if not group_folder.is_relative_to(root):
                break
            limits += [limit] if (limit := _cpu_limit(group_folder)) is not None else []
    return max(1, math.ceil(min(limits))) if limits else None


def _cpu_limit(folder: Path) -> float | None:
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
        return None if quota in ("max", "-1") else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):  # controller missing or unreadable
        return None


def _usable_cores() -> int:
    """Number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
