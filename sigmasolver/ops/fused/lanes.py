"""More streams of a captured step, so that small kernels run beside large ones.

    main     stream and physical branch, forward and backward
    beside   the first branch, the spectral one, which meets the other where both are joined
    aside    two in turn: gradients of weights, which nothing waits for but the optimiser

A kernel that occupies a part of a GPU, or ends raggedly, leaves room; a sum of partial sums, or a thin product, fits
into it. Outside `Lanes.open` everything runs in one stream, in the order in which it is written. The numbers are the
same: only what does not depend on each other overlaps.

Memory is handed out per stream, and what a stream frees it may hand out again at once. So tensors that another stream
still reads are held until the stream that they belong to has waited for it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch

from sigmasolver.ops.fused import Slot

__all__ = ["Lanes", "aside", "together"]

T = TypeVar("T")

HELD, BESIDE = 2**28, 2**25
"""Bytes that wait in one stream for the gradients of weights made of them, and of what a branch reads that runs beside
another one: more would only fill the memory, as large kernels leave no room for others anyway."""


class Lanes:
    """The streams of a capture; `open` them around a forward pass, and the backward pass where there is one.

    A gradient made aside must reach the optimiser as it is: were it copied or added to on the way, that would happen
    too early. `rehearse` finds out in a pass that runs in one stream; afterwards `sound` says whether every gradient
    arrived.
    """

    def __init__(self) -> None:
        self.sound = False
        # Places, and storages, which keep a place from being taken by another tensor. Holding on to the tensor itself
        # would have it copied.
        self._made: list[tuple[int, torch.UntypedStorage]] | None = None
        self._aside: deque[torch.cuda.Stream] = deque()
        self._beside: torch.cuda.Stream | None = None
        self._held: dict[int, deque[tuple[torch.cuda.Event, Sequence[torch.Tensor], int]]] = {}

    @contextmanager
    def rehearse(self, parameters: Sequence[torch.Tensor]) -> Iterator[None]:
        """Inside: a pass with fresh gradients, in one stream, watched."""
        self._made = []
        try:
            with _open.holding(self):
                yield
            arrived = Counter(one.grad.data_ptr() for one in parameters if one.grad is not None)
            made = Counter(place for place, _ in self._made)
            # Whoever hooks in on a gradient may read it before it is there.
            hooked = any(one._backward_hooks or one._post_accumulate_grad_hooks for one in parameters)
            self.sound = not hooked and all(arrived[place] == number == 1 for place, number in made.items())
        finally:
            self._made = None

    @contextmanager
    def open(self) -> Iterator[None]:
        """Inside: all streams. At the end the current one has waited for the others."""
        self._aside = self._aside or deque(torch.cuda.Stream() for _ in range(2))
        self._beside = self._beside or torch.cuda.Stream()
        own = torch.cuda.current_stream()
        for stream in (*self._aside, self._beside):
            stream.wait_stream(own)
        try:
            with _open.holding(self):
                yield
            for stream in (*self._aside, self._beside):
                own.wait_stream(stream)
        finally:
            self._held.clear()

    def make(self, work: Callable[[], Sequence[torch.Tensor]], reads: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        if self._made is not None:
            made = work()
            self._made += [(one.data_ptr(), one.untyped_storage()) for one in made]
            return made
        if not torch.cuda.is_current_stream_capturing():  # another thread
            return work()
        own, other = torch.cuda.current_stream(), self._aside[0]
        self._aside.rotate()
        other.wait_stream(own)
        with torch.cuda.stream(other):
            made = work()
        held = self._held.setdefault(own.stream_id, deque())
        held.append((other.record_event(), reads, sum(one.nbytes for one in reads)))
        while sum(size for _, _, size in held) > HELD:
            own.wait_event(held[0][0])
            held.popleft()
        return made

    def branches(self, first: Callable[[], T], second: Callable[[], T], read: torch.Tensor) -> tuple[T, T]:
        if self._beside is None or self._made is not None or not torch.cuda.is_current_stream_capturing():
            return first(), second()
        own = torch.cuda.current_stream()
        self._beside.wait_stream(own)
        read.record_stream(self._beside)  # it may be kept for the backward pass, which runs beside too
        with torch.cuda.stream(self._beside):
            one = first()
        other = second()
        own.wait_stream(self._beside)
        return one, other


_open: Slot[Lanes] = Slot()


def aside(work: Callable[[], Sequence[torch.Tensor]], *reads: torch.Tensor) -> Sequence[torch.Tensor]:
    """The gradients of parameters that `work` makes of `reads`, which must be all that it reads but for parameters."""
    lanes = _open.now
    return work() if lanes is None else lanes.make(work, reads)


def together(first: Callable[[], T], second: Callable[[], T], read: torch.Tensor) -> tuple[T, T]:
    """Two branches, the first of which reads `read` and nothing else that was made since."""
    # A compiled network must not depend on what is open.
    lanes = None if torch.compiler.is_compiling() else _open.now
    return (first(), second()) if lanes is None or read.nbytes >= BESIDE else lanes.branches(first, second, read)
