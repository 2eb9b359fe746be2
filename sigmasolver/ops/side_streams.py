"""Side streams of a captured step, so that small kernels run beside large ones.

    main        the residual stream and the physical branch, forward and backward
    branch      the first branch, the spectral one, until both are joined
    gradients   two in turn: gradients of weights, which only the optimiser waits for

A kernel that occupies a part of a GPU, or ends raggedly, leaves room for a sum of partial sums or a thin product.
Outside `SideStreams.open` everything runs in one stream, in the order in which it is written. The numbers are the same:
only what does not depend on each other overlaps.

Memory is allocated per stream, and what a stream frees it may allocate again at once. So tensors that another stream
still reads are kept until the stream that they belong to has waited for it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch

from sigmasolver.ops.fused import Slot

__all__ = ["SideStreams", "on_side_stream", "run_concurrently"]

T = TypeVar("T")

MOST_KEPT, MOST_READ = 2**28, 2**25
"""Bytes that one stream keeps for gradients of weights made in another, and that a concurrent branch reads: more would
only fill the memory, as large kernels leave no room for others anyway."""


class SideStreams:
    """The streams of a capture; `open` them around a forward pass, and the backward pass where there is one.

    A gradient made in a side stream must reach the optimiser as it is: a copy or an addition on the way would run too
    early. `rehearse` finds out in a pass that runs in one stream; afterwards `sound` says whether every gradient
    arrived.
    """

    def __init__(self) -> None:
        self.sound = False
        # Addresses, and storages, which keep an address from being given to another tensor. Holding on to the tensor
        # itself would have it copied.
        self._made: list[tuple[int, torch.UntypedStorage]] | None = None
        self._gradients: deque[torch.cuda.Stream] = deque()
        self._branch: torch.cuda.Stream | None = None
        self._kept: dict[int, deque[tuple[torch.cuda.Event, Sequence[torch.Tensor], int]]] = {}

    @contextmanager
    def rehearse(self, parameters: Sequence[torch.Tensor]) -> Iterator[None]:
        """Inside: a pass with fresh gradients, in one stream, observed."""
        self._made = []
        try:
            with _active.holding(self):
                yield
            arrived = Counter(one.grad.data_ptr() for one in parameters if one.grad is not None)
            made = Counter(address for address, _ in self._made)
            # A hook on a gradient may read it before it is there.
            hooked = any(one._backward_hooks or one._post_accumulate_grad_hooks for one in parameters)
            self.sound = not hooked and all(arrived[address] == number == 1 for address, number in made.items())
        finally:
            self._made = None

    @contextmanager
    def open(self) -> Iterator[None]:
        """Inside: all streams. At the end the current one has waited for the others."""
        self._gradients = self._gradients or deque(torch.cuda.Stream() for _ in range(2))
        self._branch = self._branch or torch.cuda.Stream()
        own = torch.cuda.current_stream()
        for stream in (*self._gradients, self._branch):
            stream.wait_stream(own)
        try:
            with _active.holding(self):
                yield
            for stream in (*self._gradients, self._branch):
                own.wait_stream(stream)
        finally:
            self._kept.clear()

    def make(self, work: Callable[[], Sequence[torch.Tensor]], reads: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        if self._made is not None:
            made = work()
            self._made += [(one.data_ptr(), one.untyped_storage()) for one in made]
            return made
        if not torch.cuda.is_current_stream_capturing():  # another thread
            return work()
        own, other = torch.cuda.current_stream(), self._gradients[0]
        self._gradients.rotate()
        other.wait_stream(own)
        with torch.cuda.stream(other):
            made = work()
        kept = self._kept.setdefault(own.stream_id, deque())
        kept.append((other.record_event(), reads, sum(one.nbytes for one in reads)))
        while sum(size for _, _, size in kept) > MOST_KEPT:
            own.wait_event(kept[0][0])
            kept.popleft()
        return made

    def fork(self, first: Callable[[], T], second: Callable[[], T], read: torch.Tensor) -> tuple[T, T]:
        if self._branch is None or self._made is not None or not torch.cuda.is_current_stream_capturing():
            return first(), second()
        own = torch.cuda.current_stream()
        self._branch.wait_stream(own)
        read.record_stream(self._branch)  # it may be saved for the backward pass, which forks too
        with torch.cuda.stream(self._branch):
            one = first()
        other = second()
        own.wait_stream(self._branch)
        return one, other


_active: Slot[SideStreams] = Slot()


def on_side_stream(work: Callable[[], Sequence[torch.Tensor]], *reads: torch.Tensor) -> Sequence[torch.Tensor]:
    """The gradients of parameters that `work` makes of `reads`, which must be all that it reads but for parameters."""
    streams = _active.now
    return work() if streams is None else streams.make(work, reads)


def run_concurrently(first: Callable[[], T], second: Callable[[], T], read: torch.Tensor) -> tuple[T, T]:
    """Two branches, the first of which reads `read` and nothing else that was made since."""
    # A compiled network must not depend on what is open.
    streams = None if torch.compiler.is_compiling() else _active.now
    return (first(), second()) if streams is None or read.nbytes >= MOST_READ else streams.fork(first, second, read)
