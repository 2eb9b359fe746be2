"""One training step as a CUDA graph: precompile, warm up, capture, replay.

Before the first step its kernels are compiled in parallel (`ops.precompile`). The warm-up steps record which layouts of
the weights the fused kernels read, so that one kernel writes them all (`ops.fused.weight_cache`), and whether weight
gradients may be computed on side streams (`ops.side_streams`). In the graph AdamW is a single kernel as well
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
from sigmasolver.train.adamw import AdamW

__all__ = ["WARM_UP", "Capture"]

WARM_UP = 3
"""Warm-up steps before the capture, in which libraries choose their kernels and allocate workspaces."""


class Update(Protocol):
    """A training step: forward and backward pass run inside the context `passes`, `step` updates the weights."""

    def __call__(self, passes: AbstractContextManager[None], step: Callable[[], object]) -> None: ...


class Capture:
    """Run one training step per call: WARM_UP eager steps on the stream `side`, then replays of a graph captured on it.

    `dry` runs a forward and backward pass inside the context it is given, to collect the kernels to precompile; with
    None each kernel is compiled at its first launch. With `side_streams`, independent kernels run concurrently; those
    on `side` are scheduled first if it has a higher priority.
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
        self._warm_up_steps = 0
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        if self._warm_up_steps < WARM_UP:
            self._side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._side):
                if self._warm_up_steps == 0 and self._dry is not None:
                    precompile(partial(launch_all, self._dry, self._model, self._optimiser), self._model, self._side)
                self._warm_up_steps += 1
                self._update(self._recording(), self._optimiser.step)
            torch.cuda.current_stream().wait_stream(self._side)
            return
        if self._graph is None:
            self._graph = self._capture_graph()
        self._graph.replay()

    def _capture_graph(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        self._weights.fill()
        adamw = _as_adamw(self._optimiser)
        self._adamw = FusedAdamW(adamw) if adamw is not None and FusedAdamW.supports(adamw) else None
        self._optimiser.zero_grad(set_to_none=True)
        with capture(graph, self._side):
            self._update(self._cached_passes(), self._optimiser.step if self._adamw is None else self._adamw.step)
        if self._adamw is not None:
            self._adamw.fill()
        return graph

    @contextmanager
    def _recording(self) -> Iterator[None]:
        side_streams = nullcontext() if self._streams is None else self._streams.verify(list(self._model.parameters()))
        with self._weights.learn(), side_streams:
            yield

    @contextmanager
    def _cached_passes(self) -> Iterator[None]:
        streams = self._streams.open() if self._streams is not None and self._streams.verified else nullcontext()
        with self._weights.use(), streams:
            yield


def launch_all(
    dry: Callable[[AbstractContextManager[None]], object], model: nn.Module, optimiser: torch.optim.Optimizer
) -> None:
    """Launch every kernel of a captured step: those of `dry`, and those that occur only in the graph."""
    weights = WeightCache(model.parameters())
    dry(weights.learn())
    weights.fill()
    weights.launch()
    adamw = _as_adamw(optimiser)
    if adamw is not None and FusedAdamW.will_support(adamw):
        FusedAdamW(adamw).launch()


def _as_adamw(optimiser: torch.optim.Optimizer) -> torch.optim.AdamW | None:
    exact = type(optimiser) in (AdamW, torch.optim.AdamW)  # a subclass may override the update
    return optimiser if isinstance(optimiser, torch.optim.AdamW) and exact else None
