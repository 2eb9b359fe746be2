"""A simulator's trajectories, kept (`generate` fills a store) or made when asked for (`Stream`).

Trajectory i depends on (simulator, parameters, seed, i) only, so both give the same float32 values, and a
generation that was interrupted continues where its store ends.
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
"""Called with the trajectories done, the trajectories wanted, and the fraction done of the present batch."""


@dataclass(frozen=True)
class Generated:
    """What a generation did."""

    path: Path
    count: int
    present: int
    """How many of the trajectories were there before."""
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
    """Trajectories 0 to `count` - 1 of this seed into the store at `path`, continuing what is already there.

    One batch is written while the next is simulated. Batches begin at multiples of the batch size also when a
    store is continued, so that a device whose rounding depends on the batch repeats itself.
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
            batch = _batch(simulator, seed, indices, device, _ticker(progress, done, count))
            fresh = batch[done - start :].cpu().numpy()
            if writing is not None:
                writing.result()
            writing = pool.submit(writer.append, fresh)
            done = indices[-1] + 1
        if writing is not None:
            writing.result()
        if progress is not None:
            progress(count, count, 0.0)
        return Generated(Path(path), count, present, writer.fingerprint)


class Stream:
    """The trajectories of a seed, simulated when asked for: by index, in batches, or one after another.

    Endless without `count`; with it a sequence of that length.
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
        """How many trajectories are made together."""
        return self.simulator.batch_size(self.device)

    def __len__(self) -> int:
        if self.count is None:
            raise TypeError("an endless stream has no length")
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        """One trajectory, float32 `(frames, *grid, fields)` on the stream's device."""
        return self.batch([index])[0]

    def batch(self, indices: Sequence[int]) -> torch.Tensor:
        """These trajectories together, `(len(indices), frames, *grid, fields)`."""
        indices = [operator.index(index) for index in indices]
        if self.count is not None:
            indices = [range(self.count)[index] for index in indices]
        elif min(indices, default=0) < 0:
            raise IndexError("an endless stream has no last trajectory to count back from")
        return _batch(self.simulator, self.seed, indices, self.device, None)

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Trajectories 0, 1, 2, … one by one, simulated a batch at a time."""
        size = self.batch_size
        for start in endless(0, size) if self.count is None else range(0, self.count, size):
            stop = start + size if self.count is None else min(start + size, self.count)
            yield from self.batch(range(start, stop))


def _batch(
    simulator: Simulator, seed: int, indices: Sequence[int], device: torch.device | str, tick: Tick | None
) -> torch.Tensor:
    batch = simulator.simulate(seed, indices, device, tick)
    finite = torch.isfinite(batch).flatten(1).all(1)
    if not bool(finite.all()):
        index = indices[int(finite.int().argmin())]
        raise ValueError(f"Trajectory {index} of {simulator.name} diverged to non-finite values; use a smaller step.")
    return batch


def _ticker(progress: Progress | None, done: int, count: int) -> Tick | None:
    return None if progress is None else lambda fraction: progress(done, count, fraction)


def header_of(simulator: Simulator, seed: int, dtype: str = "float32") -> Header:
    """The header of what this simulator makes from this seed; its parameters are its dataclass fields."""
    if not dataclasses.is_dataclass(simulator):
        raise TypeError(f"{type(simulator).__name__} must be a frozen dataclass, so that its parameters can be stored")
    parameters = json.loads(canonical(dataclasses.asdict(simulator)))
    return Header(simulator.layout, simulator.name, parameters, seed, dtype)
