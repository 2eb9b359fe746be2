"""Prefetch batches in a thread, into pinned memory if they go to a GPU."""

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

    Copies to a GPU are non-blocking, from pinned memory.
    """
    target = torch.device(device)

    def read(indices: torch.Tensor) -> Pair:
        history, future = windows.batch(indices)
        return (history.pin_memory(), future.pin_memory()) if target.type == "cuda" else (history, future)

    pending: deque[Future[Pair]] = deque()
    with ThreadPoolExecutor(max_workers=1) as reader:  # one worker: the source is read in order through one handle
        try:
            for indices in batches:
                pending.append(reader.submit(read, indices))
                if len(pending) > ahead:
                    yield _to_device(pending.popleft().result(), target)
            while pending:
                yield _to_device(pending.popleft().result(), target)
        finally:
            for future in pending:
                future.cancel()


def _to_device(pair: Pair, device: torch.device) -> Pair:
    history, future = pair
    return history.to(device, non_blocking=True), future.to(device, non_blocking=True)
