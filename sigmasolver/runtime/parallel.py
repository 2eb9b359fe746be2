"""Distributed execution: the rank of this process, its share of the work, and collectives.

`torchrun --nproc-per-node N -m sigmasolver ...` starts N processes and sets the rank of each in its environment;
without it there is a single process and every collective is a no-op. Processes may also be started by hand, with RANK,
WORLD_SIZE, MASTER_ADDR and MASTER_PORT set for each. When one ends early, the others exit with an error message.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol, Self, TypeVar

import torch
import torch.distributed as dist

from sigmasolver.runtime.interrupts import LostProcessError

__all__ = ["World", "device_of", "join", "local_process_count"]


class Sliceable(Protocol):
    """A list or tensor: a slice has its type."""

    def __getitem__(self, index: slice, /) -> Self: ...


S = TypeVar("S", bound=Sliceable)
ARRIVAL = timedelta(minutes=10)
"""How long a process waits at the rendezvous for the others to start."""
COLLECTIVE_TIMEOUT = timedelta(hours=6)
"""Timeout of a collective: rank 0 may import data and fit a normaliser for a long time."""


def device_of(text: str) -> torch.device:
    """Parse a device name; "auto" is a GPU if available."""
    if text == "auto":
        text = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(text)
    except RuntimeError:
        raise ValueError(f'Unknown device "{text}"; use cpu, cuda or cuda:1.') from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("torch found no GPU; use the device cpu.")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f'Unsupported device "{text}"; use cpu or cuda.')
    return device


@dataclass(frozen=True)
class World:
    """Rank and device of this process, and collectives over all processes."""

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which writes files and prints."""
        return self.rank == 0

    def share(self, items: S) -> S:
        """This process's share of a list or tensor that every process has: every `size`-th item."""
        return items[self.rank :: self.size]

    def gather(self, rows: torch.Tensor, count: int) -> torch.Tensor:
        """Gather the rows that each process computed from its share; all `count` rows in the original order."""
        if self.size == 1:
            return rows
        longest = -(-count // self.size)
        padded = rows.new_zeros((longest, *rows.shape[1:]), device=self.device)
        padded[: len(rows)] = rows.to(self.device)
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(parts, padded)
        return torch.stack(parts, dim=1).flatten(0, 1)[:count].to(rows.device)

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """Mean over the processes."""
        if self.size == 1:
            return values
        total = values.clone()
        dist.all_reduce(total)
        return total / self.size

    def agreed(self, flag: bool) -> bool:
        """Broadcast the decision of rank 0: clocks differ, and all processes must act alike."""
        if self.size == 1:
            return flag
        decision = torch.tensor([int(flag)], device=self.device)
        dist.broadcast(decision, src=0)
        return bool(decision.item())

    def wait(self) -> None:
        """Block until every process has reached this call."""
        if self.size > 1:
            dist.barrier()


@contextmanager
def join(device: torch.device) -> Iterator[World]:
    """Join the process group of torchrun, or yield a world of one process; each local rank uses its own GPU."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        yield World(device=device)
        return
    size = _env_int("WORLD_SIZE", minimum=1)
    rank, local_rank = (_env_int(name, minimum=0) for name in ("RANK", "LOCAL_RANK"))
    if rank >= size:
        raise ValueError(f"RANK {rank} is out of range for WORLD_SIZE {size}; let torchrun set them, or unset both.")
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ValueError(f"RANK is set but {missing[0]} is not; let torchrun set them, or unset RANK.")
    if device.type == "cuda":
        if local_rank >= torch.cuda.device_count():
            raise ValueError(
                f"No GPU left for local process {local_rank}: this machine has {torch.cuda.device_count()}; start one "
                "process per GPU."
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    try:
        _init_process_group(rank, size, "nccl" if device.type == "cuda" else "gloo")
        yield World(rank, size, device)
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        raise LostProcessError(
            f"Process {rank} of {size} lost contact with another process; check the output of that process, then "
            "restart all of them: saved state is kept."
        ) from error
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _init_process_group(rank: int, size: int, backend: str) -> None:
    try:
        dist.init_process_group(backend, timeout=ARRIVAL)
        dist.distributed_c10d._set_pg_timeout(COLLECTIVE_TIMEOUT)
    except (RuntimeError, ValueError) as error:
        raise ValueError(
            f"Process {rank} could not join the process group of WORLD_SIZE {size} at "
            f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}; start all processes within "
            f"{ARRIVAL.total_seconds() / 60:g} minutes, each with a unique RANK and a reachable address and free "
            "port."
        ) from error


def local_process_count() -> int:
    """Number of processes on this machine."""
    return _env_int("LOCAL_WORLD_SIZE", minimum=1)


def _env_int(name: str, minimum: int) -> int:
    """Parse an integer environment variable; defaults to `minimum`."""
    text = os.environ.get(name, str(minimum)).strip()
    if not text.isdecimal() or len(text) > 9 or int(text) < minimum:
        raise ValueError(
            f'{name} must be an integer of at least {minimum}, got "{text[:20]}"; let torchrun set it, or unset it.'
        )
    return int(text)
