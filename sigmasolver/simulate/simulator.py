"""What every simulator is: a frozen set of physical and numerical parameters that yields trajectories.

A trajectory depends on (simulator, parameters, seed, index) and on nothing else. Its randomness is drawn on the
CPU from a generator of its own, in float64, so that the same index gives the same initial state whatever the batch,
the order, the number of trajectories asked for, or the device that integrates them.

On a GPU a batch is computed as a whole. On a CPU, transforms, matrix products and complex products round differently
for different batch sizes and alignments: `tiled` and its like give every sample a call of its own on one core, so that
it is the same to the last bit in any batch. The cores share the samples: threads inside transforms this small mostly
wait for each other, and stall when something else wants a core.
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
from sigmasolver.seeds import hashed_seed

__all__ = ["PRECISIONS", "Simulator", "Tick", "each", "generator", "spread", "tiled"]

PRECISIONS = {"float32": torch.float32, "float64": torch.float64}
"""What a simulator may integrate in; trajectories are float32 either way."""

Tick = Callable[[float], None]
"""Called now and then with the fraction of the present batch that is done (0 to 1)."""


class Simulator(ABC):
    """Abstract; each subclass is a frozen dataclass whose fields are the parameters, paper's values as defaults."""

    name: ClassVar[str]

    @property
    @abstractmethod
    def layout(self) -> Layout:
        """Names, units, boundaries, coordinates and times of what `simulate` returns."""

    @abstractmethod
    def simulate(
        self, seed: int, indices: Sequence[int], device: torch.device | str = "cpu", tick: Tick | None = None
    ) -> torch.Tensor:
        """The trajectories of these indices, one batch: float32 `(len(indices), frames, *grid, fields)` on `device`."""

    @abstractmethod
    def batch_size(self, device: torch.device | str = "cpu") -> int:
        """How many trajectories one call of `simulate` should hold on this device (memory and speed)."""


def generator(name: str, seed: int, index: int) -> torch.Generator:
    """The CPU generator of one trajectory: a hash, so that neighbouring seeds and indices are unrelated."""
    # operator.index: a float or a slice has a text too, and would silently name another trajectory.
    return torch.Generator("cpu").manual_seed(hashed_seed(f"{name}/{operator.index(seed)}/{operator.index(index)}"))


def each(count: int, work: Callable[[int, Tick], None], tick: Tick | None = None) -> None:
    """work(0, tock) ... work(count - 1, tock), each on one core, as many at a time as torch has threads.

    A work reports its own progress by calling `tock` with a fraction; there it also stops once the whole has
    failed or been interrupted. `tick` gets the overall fraction, one call at a time, from the worker threads.
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


def spread(count: int, device: torch.device, work: Callable[[slice, Tick], None], tick: Tick | None = None) -> None:
    """work(part, tock) for parts that cover 0 ... count - 1: all at once on a GPU, one by one on a CPU."""
    if count == 0:
        raise ValueError("No trajectories requested; give at least one index.")
    if device.type == "cpu":
        each(count, lambda index, tock: work(slice(index, index + 1), tock), tick)
    else:
        work(slice(0, count), tick or (lambda fraction: None))


def tiled(
    function: Callable[[torch.Tensor, Tick], torch.Tensor], batch: torch.Tensor, tick: Tick | None = None
) -> torch.Tensor:
    """function(batch, tick), where `function` maps `(B, ...)` to `(B, ...)` sample by sample."""
    results: dict[int, torch.Tensor] = {}

    def work(part: slice, tock: Tick) -> None:
        # A copy: the address of a sample within its batch decides how a kernel aligns, and so how it rounds.
        results[part.start] = function(batch[part].clone() if batch.device.type == "cpu" else batch, tock)

    spread(len(batch), batch.device, work, tick)
    return torch.cat([results[start] for start in sorted(results)])
