"""One training step as a CUDA graph: compiled, warmed up, rehearsed, captured, replayed.

Before the first step its kernels are compiled in parallel (`ops.precompile`). The steps before the capture show which
layouts of the weights the fused kernels read, so that one kernel makes them all (`ops.fused.weight_cache`), and whether
gradients of weights may be made in side streams (`ops.side_streams`). In the graph AdamW is one kernel too
(`ops.fused.adamw`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Protocol

import torch
from torch import nn

from sigmasolver.ops.fused.adamw import FusedAdamW
from sigmasolver.ops.fused.weight_cache import WeightCache
from sigmasolver.ops.graphs import capture
from sigmasolver.ops.precompile import precompile
from sigmasolver.ops.side_streams import SideStreams
from sigmasolver.train.optimisers import AdamW

__all__ = ["WARM_UP", "Capture"]

WARM_UP = 3
"""Steps that run before one is captured: libraries choose their kernels and workspaces in them."""


class Update(Protocol):
    """A step whose forward and backward pass run inside `passes` and whose weights change by `step`."""

    def __call__(self, passes: AbstractContextManager[None], step: Callable[[], object]) -> None: ...


class Capture:
    """Call it for one step after another; the first ones run in the stream `side`, and the captured one is of it.

    `dry` is a forward and backward pass inside its argument, which finds the kernels to compile; None: each is compiled
    when it is first launched. With `side_streams`, kernels that do not depend on each other run concurrently; those of
    `side` go first if it has priority.
    """

    def __init__(
        self,
        update: Update,
        dry: Callable[[AbstractContextManager[None]], object] | None,
        model: nn.Module,
        optimiser: torch.optim.Optimizer,
        side: torch.cuda.Stream,
        side_streams: bool,
    ) -> None:
        self._update, self._dry = update, dry
        self._model, self._optimiser, self._side = model, optimiser, side
        self._streams = SideStreams() if side_streams else None
        self._weights = WeightCache(model.parameters())
        self._adamw: FusedAdamW | None = None
        self._warmed = 0
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        if self._warmed < WARM_UP:
            self._side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._side):
                if self._warmed == 0 and self._dry is not None:
                    precompile(partial(launch_all, self._dry, self._model, self._optimiser), self._model, self._side)
                self._warmed += 1
                self._update(self._rehearsal(), self._optimiser.step)
            torch.cuda.current_stream().wait_stream(self._side)
            return
        if self._graph is None:
            self._graph = self._captured()
        self._graph.replay()

    def _captured(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        self._weights.fill()
        adamw = _adamw(self._optimiser)
        self._adamw = FusedAdamW(adamw) if adamw is not None and FusedAdamW.serves(adamw) else None
        self._optimiser.zero_grad(set_to_none=True)
        with capture(graph, self._side):
            self._update(self._passes(), self._optimiser.step if self._adamw is None else self._adamw.step)
        if self._adamw is not None:
            self._adamw.fill()
        return graph

    @contextmanager
    def _rehearsal(self) -> Iterator[None]:
        side_streams = (
            nullcontext() if self._streams is None else self._streams.rehearse(list(self._model.parameters()))
        )
        with self._weights.learn(), side_streams:
            yield

    @contextmanager
    def _passes(self) -> Iterator[None]:
        streams = self._streams.open() if self._streams is not None and self._streams.sound else nullcontext()
        with self._weights.use(), streams:
            yield


def launch_all(
    dry: Callable[[AbstractContextManager[None]], object], model: nn.Module, optimiser: torch.optim.Optimizer
) -> None:
    """Ask for every kernel of a captured step: those of the passes, and those that are in the graph alone."""
    weights = WeightCache(model.parameters())
    dry(weights.learn())
    weights.fill()
    weights.launch()
    adamw = _adamw(optimiser)
    if adamw is not None and FusedAdamW.will_serve(adamw):
        FusedAdamW(adamw).launch()


def _adamw(optimiser: torch.optim.Optimizer) -> torch.optim.AdamW | None:
    known = type(optimiser) in (AdamW, torch.optim.AdamW)  # another subclass may do otherwise
    return optimiser if isinstance(optimiser, torch.optim.AdamW) and known else None
