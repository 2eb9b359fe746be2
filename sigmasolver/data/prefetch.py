"""Batches read ahead of time by a thread, into page-locked memory where they are bound for a GPU."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from sigmasolver.data.windows import Pair, Windows

__all__ = ["prefetch"]


def prefetch(
    windows: Windows, batches: Iterable[torch.Tensor], device: torch.device | str, ahead: int = 2
) -> Iterator[Pair]:
    """The windows of each batch of indices, in order, on `device`; up to `ahead` batches are read in advance.

    Copies to a GPU come from page-locked memory and the host does not wait for them.
    """
    target = torch.device(device)

    def read(indices: torch.Tensor) -> Pair:
        history, future = windows.batch(indices)
        return (history.pin_memory(), future.pin_memory()) if target.type == "cuda" else (history, future)

    waiting: deque[Future[Pair]] = deque()
    with ThreadPoolExecutor(max_workers=1) as reader:  # one: the source is read in order, by one handle
        try:
            for indices in batches:
                waiting.append(reader.submit(read, indices))
                if len(waiting) > ahead:
                    yield _moved(waiting.popleft().result(), target)
            while waiting:
                yield _moved(waiting.popleft().result(), target)
        finally:
            for future in waiting:
                future.cancel()


def _moved(pair: Pair, device: torch.device) -> Pair:
    history, future = pair
    return history.to(device, non_blocking=True), future.to(device, non_blocking=True)
