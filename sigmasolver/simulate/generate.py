"""Trajectories of a simulator, written to a store (`generate`) or simulated on access (`Stream`).

Trajectory i depends only on (simulator, parameters, seed, i), so both give the same float32 values, and an
interrupted generation continues where its store ends.
"""

from __future__ import annotations

import dataclasses
import json
import operator
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count as endless
from pathlib import Path
from typing import TypeAlias

import torch

from sigmasolver.data.header import Header, canonical
from sigmasolver.data.layout import Layout
from sigmasolver.data.store import Writer
from sigmasolver.simulate.simulator import Simulator, Tick

__all__ = ["Generated", "Progress", "Stream", "generate", "header_of"]

Progress: TypeAlias = Callable[[int, int, float], None]
"""Called with the number of trajectories done, their total number, and the fraction done of the current batch."""


@dataclass(frozen=True)
class Generated:
    """Result of a generation."""

    path: Path
    count: int
    present: int
    """Number of trajectories that existed before."""
    fingerprint: str


def generate(
    simulator: Simulator,
    count: int,
    seed: int,
    path: str | Path,
    device: torch.device | str = "cpu",
    dtype: str = "float32",
    progress: Progress | None = None,
) -> Generated:
    """Simulate trajectories 0 to `count` - 1 of this seed into the store at `path`, continuing an unfinished one.

    One batch is written while the next is simulated. Batches start at multiples of the batch size even when a
    store is continued, so that results are reproducible on a device whose round-off depends on the batch.
    """
    header, size = header_of(simulator, seed, dtype), simulator.batch_size(device)
    with Writer(path, header, count) as writer, ThreadPoolExecutor(1) as pool:
        present = writer.whole
        writing: Future[None] | None = None
        done = present
        for start in range(present - present % size, count, size) if present < count else ():
            if progress is not None:
                progress(done, count, 0.0)
            indices = range(start, min(start + size, count))
            batch = _simulate_batch(simulator, seed, indices, device, _batch_tick(progress, done, count))
            new = batch[done - start :].cpu().numpy()
            if writing is not None:
                writing.result()
            writing = pool.submit(writer.append, new)
            done = indices[-1] + 1
        if writing is not None:
            writing.result()
        if progress is not None:
            progress(count, count, 0.0)
        return Generated(Path(path), count, present, writer.fingerprint)


class Stream:
    """The trajectories of a seed, simulated on access: by index, in batches, or by iteration.

    Endless without `count`, otherwise a sequence of that length.
    """

    def __init__(
        self, simulator: Simulator, seed: int, device: torch.device | str = "cpu", count: int | None = None
    ) -> None:
        if count is not None and count < 1:
            raise ValueError(f"count is {count}; it must be at least 1, or None for an endless stream.")
        self.simulator, self.seed, self.device, self.count = simulator, seed, device, count
        self.header: Header = header_of(simulator, seed)

    @property
    def layout(self) -> Layout:
        return self.header.layout

    @property
    def batch_size(self) -> int:
        """Number of trajectories simulated together."""
        return self.simulator.batch_size(self.device)

    def __len__(self) -> int:
        if self.count is None:
            raise TypeError("an endless stream has no length")
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        """One trajectory, float32 `(frames, *grid, fields)` on the stream's device."""
        return self.batch([index])[0]

    def batch(self, indices: Sequence[int]) -> torch.Tensor:
        """Simulate these trajectories as one batch, `(len(indices), frames, *grid, fields)`."""
        indices = [operator.index(index) for index in indices]
        if self.count is not None:
            indices = [range(self.count)[index] for index in indices]
        elif min(indices, default=0) < 0:
            raise IndexError("an endless stream has no last trajectory to count back from")
        return _simulate_batch(self.simulator, self.seed, indices, self.device, None)

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Yield trajectories 0, 1, 2, … one by one, simulated a batch at a time."""
        size = self.batch_size
        for start in endless(0, size) if self.count is None else range(0, self.count, size):
            stop = start + size if self.count is None else min(start + size, self.count)
            yield from self.batch(range(start, stop))


def _simulate_batch(
    simulator: Simulator, seed: int, indices: Sequence[int], device: torch.device | str, tick: Tick | None
) -> torch.Tensor:
    batch = simulator.simulate(seed, indices, device, tick)
    finite = torch.isfinite(batch).flatten(1).all(1)
    if not bool(finite.all()):
        index = indices[int(finite.int().argmin())]
        raise ValueError(f"Trajectory {index} of {simulator.name} diverged to non-finite values; use a smaller step.")
    return batch


def _batch_tick(progress: Progress | None, done: int, count: int) -> Tick | None:
    return None if progress is None else lambda fraction: progress(done, count, fraction)


def header_of(simulator: Simulator, seed: int, dtype: str = "float32") -> Header:
    """Return the header of this simulator's data for this seed; the parameters are its dataclass fields."""
    if not dataclasses.is_dataclass(simulator):
        raise TypeError(f"{type(simulator).__name__} must be a frozen dataclass, so that its parameters can be stored")
    parameters = json.loads(canonical(dataclasses.asdict(simulator)))
    return Header(simulator.layout, simulator.name, parameters, seed, dtype)
