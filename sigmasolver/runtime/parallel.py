"""Several processes as one: who this process is, what its share of the work is, and how results come together.

`torchrun --nproc-per-node N -m sigmasolver ...` starts N processes and tells each its rank through the environment;
without it there is one process and nothing here does anything. Processes may also be started by hand, with RANK,
WORLD_SIZE, MASTER_ADDR and MASTER_PORT set for each. When one of them ends early, so do the others, with a sentence.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from sigmasolver.runtime.interrupts import LostProcessError

__all__ = ["World", "device_of", "join", "processes_here"]

T = TypeVar("T")
ARRIVAL = timedelta(minutes=10)
"""How long a process waits for the others to be started."""
PATIENCE = timedelta(hours=6)
"""How long it waits for one that works: the first may import and fit for a long time."""


def device_of(text: str) -> torch.device:
    """The device of this name; "auto": a GPU where there is one."""
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
    """This process among its equals."""

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def first(self) -> bool:
        """Whether this process writes files and talks to the user."""
        return self.rank == 0

    def share(self, items: T) -> T:
        """What this process takes of a list or tensor that every process holds: every `size`-th item."""
        return items[self.rank :: self.size]  # type: ignore[index]

    def gather(self, rows: torch.Tensor, count: int) -> torch.Tensor:
        """All `count` rows in the order of the list, from the rows that each process made of its share."""
        if self.size == 1:
            return rows
        longest = -(-count // self.size)
        padded = rows.new_zeros((longest, *rows.shape[1:]), device=self.device)
        padded[: len(rows)] = rows.to(self.device)
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(parts, padded)
        return torch.stack(parts, dim=1).flatten(0, 1)[:count].to(rows.device)

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """The mean over the processes."""
        if self.size == 1:
            return values
        total = values.clone()
        dist.all_reduce(total)
        return total / self.size

    def agreed(self, flag: bool) -> bool:
        """What the first process says; clocks differ, and all must do the same."""
        if self.size == 1:
            return flag
        said = torch.tensor([int(flag)], device=self.device)
        dist.broadcast(said, src=0)
        return bool(said.item())

    def wait(self) -> None:
        """Until every process is here."""
        if self.size > 1:
            dist.barrier()


@contextmanager
def join(device: torch.device) -> Iterator[World]:
    """Be one of the processes that torchrun started, or alone; a GPU without a number is that of the local rank."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        yield World(device=device)
        return
    size = _number("WORLD_SIZE", least=1)
    rank, local = (_number(name, least=0) for name in ("RANK", "LOCAL_RANK"))
    if rank >= size:
        raise ValueError(f"RANK {rank} is out of range for WORLD_SIZE {size}; let torchrun set them, or unset both.")
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ValueError(f"RANK is set but {missing[0]} is not; let torchrun set them, or unset RANK.")
    if device.type == "cuda":
        if local >= torch.cuda.device_count():
            raise ValueError(
                f"No GPU left for local process {local}: this machine has {torch.cuda.device_count()}; start one "
                "process per GPU."
            )
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    try:
        _meet(rank, size, "nccl" if device.type == "cuda" else "gloo")
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


def _meet(rank: int, size: int, backend: str) -> None:
    try:
        dist.init_process_group(backend, timeout=ARRIVAL)
        dist.distributed_c10d._set_pg_timeout(PATIENCE)
    except (RuntimeError, ValueError) as error:
        raise ValueError(
            f"Process {rank} could not join the process group of WORLD_SIZE {size} at "
            f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}; start all processes within "
            f"{ARRIVAL.total_seconds() / 60:g} minutes, each with a unique RANK and a reachable address and free "
            "port."
        ) from error


def processes_here() -> int:
    """How many of the processes share this machine."""
    return _number("LOCAL_WORLD_SIZE", least=1)


def _number(name: str, least: int) -> int:
    """A whole number of the environment; the least where it is not set."""
    text = os.environ.get(name, str(least)).strip()
    if not text.isdecimal() or len(text) > 9 or int(text) < least:
        raise ValueError(
            f'{name} must be an integer of at least {least}, got "{text[:20]}"; let torchrun set it, or unset it.'
        )
    return int(text)
