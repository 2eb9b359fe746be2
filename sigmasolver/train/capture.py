"""One training step as a CUDA graph: warmed up, rehearsed, captured, replayed.

What runs before the capture is learned from: which forms of the weights the fused twins read, so that one kernel makes
them all (`ops.fused.tables`), and whether gradients of weights may be made in a stream of their own
(`ops.fused.lanes`). In the graph AdamW is one kernel too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch
from torch import nn

from sigmasolver.ops.fused.lanes import Lanes
from sigmasolver.ops.fused.tables import Moments, Prepared
from sigmasolver.ops.graphs import capture

__all__ = ["WARM_UP", "Capture"]

WARM_UP = 3
"""Steps that run before one is captured: libraries choose their kernels and workspaces in them."""


class Update(Protocol):
    """A step whose forward and backward pass run inside `passes` and whose weights change by `step`."""

    def __call__(self, passes: AbstractContextManager[None], step: Callable[[], object]) -> None: ...


class Capture:
    """Call it for one step after another; the first ones run in the stream `side`, and the captured one is of it.

    With `lanes`, kernels that do not wait for each other run side by side; those of `side` go first if it has priority.
    """

    def __init__(
        self, update: Update, model: nn.Module, optimiser: torch.optim.AdamW, side: torch.cuda.Stream, lanes: bool
    ) -> None:
        self._update, self._model, self._optimiser, self._side = update, model, optimiser, side
        self._lanes = Lanes() if lanes else None
        self._forms = Prepared(model.parameters())
        self._moments: Moments | None = None
        self._warmed = 0
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        if self._warmed < WARM_UP:
            self._warmed += 1
            self._side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._side):
                self._update(self._rehearsal(), self._optimiser.step)
            torch.cuda.current_stream().wait_stream(self._side)
            return
        if self._graph is None:
            self._graph = self._captured()
        self._graph.replay()

    def _captured(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        self._forms.fill()
        self._moments = Moments(self._optimiser) if Moments.serves(self._optimiser) else None
        self._optimiser.zero_grad(set_to_none=True)
        with capture(graph, self._side):
            self._update(self._passes(), self._optimiser.step if self._moments is None else self._moments.step)
        if self._moments is not None:
            self._moments.fill()
        return graph

    @contextmanager
    def _rehearsal(self) -> Iterator[None]:
        lanes = nullcontext() if self._lanes is None else self._lanes.rehearse(list(self._model.parameters()))
        with self._forms.learn(), lanes:
            yield

    @contextmanager
    def _passes(self) -> Iterator[None]:
        lanes = self._lanes.open() if self._lanes is not None and self._lanes.sound else nullcontext()
        with self._forms.use(), lanes:
            yield
