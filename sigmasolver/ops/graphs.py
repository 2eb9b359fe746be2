"""Capture of CUDA graphs."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["capture", "no_garbage_collection"]


@contextmanager
def capture(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream | None = None, pool: Any = None) -> Iterator[None]:
    """Record the work of this thread into `graph`; other threads (data readers, NCCL) may use the GPU meanwhile."""
    with (
        no_garbage_collection(),
        torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
    ):
        yield


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Collect garbage now and not inside: an old graph destroyed during a capture invalidates the new one."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
