"""Base class of simulators: a frozen set of physical and numerical parameters that yields trajectories.

A trajectory depends only on (simulator, parameters, seed, index). Its random numbers are drawn on the CPU from its own
generator, in float64, so that an index gives the same initial state whatever the batch, the order, the number of
trajectories requested, or the device that integrates them.

On a GPU a batch is computed in one call. On a CPU, transforms, matrix products and complex products round differently
for different batch sizes and alignments: `map_samples`, `run_slices` and `run_each` give every sample its own call on
one core, so that it is bitwise identical in any batch. Samples are distributed over the cores, because threads inside
transforms this small mostly wait for each other, and stall when another process needs a core.
"""

from __future__ import annotations

import operator
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import torch

from sigmasolver.data.layout import Layout
from sigmasolver.sampling import hashed_seed

__all__ = ["PRECISIONS", "Simulator", "Tick", "generator", "map_samples", "run_each", "run_slices"]

PRECISIONS = {"float32": torch.float32, "float64": torch.float64}
"""Precisions of the integration; trajectories are float32 in any case."""

Tick = Callable[[float], None]
"""Progress callback, called with the fraction of the current batch that is done (0 to 1)."""


class Simulator(ABC):
    """Abstract base; subclasses are frozen dataclasses of their parameters, with the paper's values as defaults."""

    name: ClassVar[str]

    @property
    @abstractmethod
    def layout(self) -> Layout:
        """Names, units, boundaries, coordinates and times of the data that `simulate` returns."""

    @abstractmethod
    def simulate(
        self, seed: int, indices: Sequence[int], device: torch.device | str = "cpu", tick: Tick | None = None
    ) -> torch.Tensor:
        """Simulate these trajectories as a batch: float32 `(len(indices), frames, *grid, fields)` on `device`."""

    @abstractmethod
    def batch_size(self, device: torch.device | str = "cpu") -> int:
        """Number of trajectories per call of `simulate` on this device, for memory and speed."""


def generator(name: str, seed: int, index: int) -> torch.Generator:
    """Return the CPU generator of one trajectory, seeded by a hash: adjacent seeds and indices are unrelated."""
    # operator.index rejects floats and slices, whose text would silently name another trajectory.
    return torch.Generator("cpu").manual_seed(hashed_seed(f"{name}/{operator.index(seed)}/{operator.index(index)}"))


def run_each(count: int, work: Callable[[int, Tick], None], tick: Tick | None = None) -> None:
    """Run work(0, tock) ... work(count - 1, tock), each on one core, as many in parallel as torch has threads.

    `work` reports its own progress by calling `tock` with a fraction, which also raises once another call has
    failed or been interrupted. `tick` gets the overall fraction from the worker threads, one call at a time.
    """
    threads = torch.get_num_threads()
    lock, failed, done = threading.Lock(), threading.Event(), [0.0] * count

    def job(index: int) -> None:
        def tock(fraction: float) -> None:
            if failed.is_set():
                raise RuntimeError("stopped because the batch failed")
            with lock:
                done[index] = fraction
                if tick is not None:
                    tick(sum(done) / count)

        work(index, tock)
        tock(1.0)

    pool = ThreadPoolExecutor(min(threads, max(1, count)), initializer=torch.set_num_threads, initargs=(1,))
    try:
        for result in [pool.submit(job, index) for index in range(count)]:
            result.result()
    except BaseException:
        failed.set()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        torch.set_num_threads(threads)


def run_slices(count: int, device: torch.device, work: Callable[[slice, Tick], None], tick: Tick | None = None) -> None:
    """Call work(part, tock) for slices that cover 0 ... count - 1: a single one on a GPU, one per sample on a CPU."""
    if count == 0:
        raise ValueError("No trajectories requested; give at least one index.")
    if device.type == "cpu":
        run_each(count, lambda index, tock: work(slice(index, index + 1), tock), tick)
    else:
        work(slice(0, count), tick or (lambda fraction: None))


def map_samples(
    function: Callable[[torch.Tensor, Tick], torch.Tensor], batch: torch.Tensor, tick: Tick | None = None
) -> torch.Tensor:
    """Return function(batch, tick), where `function` maps `(B, ...)` to `(B, ...)` sample by sample."""
    results: dict[int, torch.Tensor] = {}

    def work(part: slice, tock: Tick) -> None:
        # Copied, because the alignment of a sample within its batch affects how a kernel rounds.
        results[part.start] = function(batch[part].clone() if batch.device.type == "cpu" else batch, tock)

    run_slices(len(batch), batch.device, work, tick)
    return torch.cat([results[start] for start in sorted(results)])
