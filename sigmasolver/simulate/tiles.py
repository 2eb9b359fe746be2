"""How a batched computation is laid out on a device: whole on a GPU, one sample at a time on a CPU.

On a CPU, transforms, matrix products and complex products round differently for different batch sizes and
alignments. Giving every sample a call of its own on one core makes it the same to the last bit in any batch.
The cores share the samples: threads inside transforms this small mostly wait for each other, and stall when
something else wants a core.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from sigmasolver.simulate.simulator import Tick

__all__ = ["each", "spread", "tiled"]


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
        raise ValueError("No trajectories were asked for; give at least one index.")
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
