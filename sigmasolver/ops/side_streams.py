"""Side streams of a captured step, on which small kernels overlap with large ones.

    main        the residual stream and the physical branch, forward and backward
    branch      the first branch, the spectral one, until both are joined
    gradients   two streams, used alternately: weight gradients, which only the optimiser waits for

A kernel that fills only part of a GPU, or has a long tail, leaves room for a reduction of partial sums or a thin matrix
product. Outside `SideStreams.open` everything runs on one stream, in program order. The results are the same: only
independent work overlaps.

Memory is allocated per stream, and a stream may reuse at once what it has freed. Tensors that another stream still
reads are therefore retained until the stream that owns them has waited for the reader.
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

MAX_RETAINED_BYTES, MAX_BRANCH_BYTES = 2**28, 2**25
"""Bytes that a stream retains for weight gradients computed on another, and bytes that a concurrent branch reads: more
would only cost memory, as large kernels leave no room for others anyway."""


class SideStreams:
    """The streams of a capture; `open` them around the forward pass, and the backward pass if there is one.

    A gradient computed on a side stream must reach the optimiser untouched: a copy or an addition on the way would run
    too early. `verify` checks this in a pass on a single stream; afterwards `verified` says whether every gradient
    arrived untouched.
    """

    def __init__(self) -> None:
        self.verified = False
        # Addresses, with the storages, so that no address is reused. A reference to the tensor itself would make
        # autograd copy the gradient instead of stealing it.
        self._observed: list[tuple[int, torch.UntypedStorage]] | None = None
        self._gradients: deque[torch.cuda.Stream] = deque()
        self._branch: torch.cuda.Stream | None = None
        self._retained: dict[int, deque[tuple[torch.cuda.Event, Sequence[torch.Tensor], int]]] = {}

    @contextmanager
    def verify(self, parameters: Sequence[torch.Tensor]) -> Iterator[None]:
        """Observe a pass with fresh gradients, on a single stream."""
        self._observed = []
        try:
            with _active.activate(self):
                yield
            arrived = Counter(parameter.grad.data_ptr() for parameter in parameters if parameter.grad is not None)
            computed = Counter(address for address, _ in self._observed)
            # A hook might read a gradient before the side stream has written it.
            hooked = any(p._backward_hooks or p._post_accumulate_grad_hooks for p in parameters)
            self.verified = not hooked and all(arrived[address] == count == 1 for address, count in computed.items())
        finally:
            self._observed = None

    @contextmanager
    def open(self) -> Iterator[None]:
        """Use all streams inside the block; at its end the current stream waits for the others."""
        self._gradients = self._gradients or deque(torch.cuda.Stream() for _ in range(2))
        self._branch = self._branch or torch.cuda.Stream()
        current = torch.cuda.current_stream()
        for stream in (*self._gradients, self._branch):
            stream.wait_stream(current)
        try:
            with _active.activate(self):
                yield
            for stream in (*self._gradients, self._branch):
                current.wait_stream(stream)
        finally:
            self._retained.clear()

    def compute_gradients(
        self, work: Callable[[], Sequence[torch.Tensor]], reads: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        if self._observed is not None:
            gradients = work()
            self._observed += [(gradient.data_ptr(), gradient.untyped_storage()) for gradient in gradients]
            return gradients
        if not torch.cuda.is_current_stream_capturing():  # another thread
            return work()
        current, side = torch.cuda.current_stream(), self._gradients[0]
        self._gradients.rotate()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            gradients = work()
        retained = self._retained.setdefault(current.stream_id, deque())
        retained.append((side.record_event(), reads, sum(tensor.nbytes for tensor in reads)))
        while sum(size for _, _, size in retained) > MAX_RETAINED_BYTES:
            current.wait_event(retained[0][0])
            retained.popleft()
        return gradients

    def fork(self, first: Callable[[], T], second: Callable[[], T], read: torch.Tensor) -> tuple[T, T]:
        if self._branch is None or self._observed is not None or not torch.cuda.is_current_stream_capturing():
            return first(), second()
        current = torch.cuda.current_stream()
        self._branch.wait_stream(current)
        read.record_stream(self._branch)  # it may be saved for backward, which forks too
        with torch.cuda.stream(self._branch):
            first_result = first()
        second_result = second()
        current.wait_stream(self._branch)
        return first_result, second_result


_active: Slot[SideStreams] = Slot()


def on_side_stream(work: Callable[[], Sequence[torch.Tensor]], *reads: torch.Tensor) -> Sequence[torch.Tensor]:
    """Run `work`, which returns parameter gradients; `reads` must be all the tensors it reads apart from parameters."""
    streams = _active.current
    return work() if streams is None else streams.compute_gradients(work, reads)


def run_concurrently(first: Callable[[], T], second: Callable[[], T], read: torch.Tensor) -> tuple[T, T]:
    """Run two branches, concurrently if side streams are open. `first` must read no other recent tensor than `read`."""
    # A compiled model must not depend on whether streams are open.
    streams = None if torch.compiler.is_compiling() else _active.current
    return (
        (first(), second()) if streams is None or read.nbytes >= MAX_BRANCH_BYTES else streams.fork(first, second, read)
    )
