"""A forecaster made fast: float32, TF32 or bf16, and on a GPU the whole map replayed as one CUDA graph.

    block of frames = boundary( denormalise( model( normalise(history), conditions, time ) ) )

The first call of a shape runs the map a few times and then captures it; every later call copies its history to where
the graph reads, replays it and hands out a copy of what the graph wrote. So nothing waits for the host, and a block
stays as it is when the next one is made. A CPU has no graphs: there the map runs as it is, in the asked precision.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from sigmasolver.forecast import Forecaster
from sigmasolver.models.solver import GridModel
from sigmasolver.ops.fused.weight_cache import WeightCache
from sigmasolver.ops.graphs import capture
from sigmasolver.ops.precision import matmul_precision
from sigmasolver.ops.precompile import precompile
from sigmasolver.ops.side_streams import SideStreams

__all__ = ["PRECISIONS", "Replay", "check_precision"]

PRECISIONS = ("float32", "tf32", "bf16")
WARM_UP = 2
"""Calls that run before one is captured: libraries choose their kernels and workspaces in them."""
KEPT = 8
"""Graphs that are kept; one more drops the oldest."""


def check_precision(precision: str) -> None:
    """Refuse what is not a row of `PRECISIONS`."""
    if precision not in PRECISIONS:
        raise ValueError(f'Unknown precision "{precision}"; choose from {", ".join(PRECISIONS)}.')


@dataclass(frozen=True)
class _Captured:
    """A graph, the memory that it reads and the memory that it writes, and the layouts in which it reads weights."""

    graph: torch.cuda.CUDAGraph
    history: torch.Tensor
    conditions: dict[str, torch.Tensor]
    time: torch.Tensor | None
    frames: torch.Tensor
    weights: WeightCache


class Replay(Forecaster):
    """The map of `forecaster` in `precision`, called and rolled out like it, without gradients.

    Weights and normalisers are shared with it. A graph reads the weights where they lie: new values written there
    count from the next call on, and weights that were moved or replaced make a new graph, as a new shape does. A
    sub-module that is replaced needs a new `Replay`. Where `eager` names a reason, nothing is captured.
    """

    def __init__(self, forecaster: Forecaster, precision: str = "float32") -> None:
        check_precision(precision)
        super().__init__(
            forecaster.model,
            forecaster.inputs,
            forecaster.targets,
            forecaster.block,
            forecaster.boundary,
            forecaster.conditions,
            forecaster.history,
            forecaster.time_scale,
            forecaster.embedded,
            forecaster.mask,
        )
        self.precision = precision
        self._parts = tuple(forecaster.model.modules())
        self._looks = any(isinstance(part, GridModel) and part.config.options.check_input for part in self._parts)
        self._graphs: dict[object, _Captured] = {}
        self._pool: Any = None
        self._streams = SideStreams()  # one: memory is kept for the stream that it was taken for

    def eager(self, history: torch.Tensor) -> str | None:
        """Why a call is run operation by operation; None: it is replayed."""
        if not history.is_cuda:
            return "CUDA graphs require a GPU"
        if self._looks:
            return "the model checks every input (check_input), which a graph cannot do"
        if any(part._forward_hooks or part._forward_pre_hooks for part in self._parts):
            return "the model has forward hooks, which a graph would skip"
        return None

    def forward(
        self,
        history: torch.Tensor,
        conditions: Mapping[str, torch.Tensor] | None = None,
        time: torch.Tensor | None = None,
    ) -> torch.Tensor:
        given = conditions or {}
        time = None if self.time_scale is None else time
        tensors = (history, *given.values()) if time is None else (history, *given.values(), time)
        if torch.is_grad_enabled() and any(one.requires_grad for one in tensors):
            raise ValueError("Replay does not support gradients; call the underlying forecaster instead.")
        if self.precision == "tf32" and not history.is_cuda:
            raise ValueError("TF32 requires a GPU; choose float32 or bf16 on a CPU.")
        # What is kept for later calls must not be born in inference mode.
        with torch.inference_mode(False), torch.no_grad():
            if self.eager(history) is not None:
                return self._map(history, given, time)
            with torch.cuda.device(history.device):
                return self._replayed(history, given, time)

    def _map(self, history: torch.Tensor, given: Mapping[str, torch.Tensor], time: torch.Tensor | None) -> torch.Tensor:
        # A cache of cast weights would outlive a change of the weights in a graph.
        with (
            matmul_precision(self.precision),
            torch.autocast(
                history.device.type, dtype=torch.bfloat16, enabled=self.precision == "bf16", cache_enabled=False
            ),
        ):
            return super().forward(history, given, time)

    def _replayed(
        self, history: torch.Tensor, given: Mapping[str, torch.Tensor], time: torch.Tensor | None
    ) -> torch.Tensor:
        # Wrong conditions or times are another key, so they meet the forecaster's own checks.
        names = tuple((name, values.shape) for name, values in sorted(given.items()))
        shape = None if time is None else time.shape
        key = (history.shape, history.dtype, history.device, names, shape, self._bound())
        captured = self._graphs.get(key)
        if captured is None:
            captured = self._capture(history, given, time)
            if len(self._graphs) >= KEPT:
                self._graphs.pop(next(iter(self._graphs)))
            self._graphs[key] = captured
        captured.history.copy_(history)
        for name, values in given.items():
            captured.conditions[name].copy_(values)
        if captured.time is not None and time is not None:
            captured.time.copy_(time)
        captured.graph.replay()
        return captured.frames.clone()

    def _bound(self) -> tuple[object, ...]:
        """What a graph is bound to beside shapes: where the weights lie, and whether the model trains."""
        held = (group for part in self._parts for group in (part._parameters, part._buffers) if group)
        return self.model.training, *(one.data_ptr() for group in held for one in group.values() if one is not None)

    def _capture(
        self, history: torch.Tensor, given: Mapping[str, torch.Tensor], time: torch.Tensor | None
    ) -> _Captured:
        static = history.clone(memory_format=torch.contiguous_format)
        conditions = {name: values.to(history, copy=True) for name, values in given.items()}
        held = None if time is None else time.to(history.device, torch.float64, copy=True)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        weights = WeightCache(self.model.parameters())

        def launch_all() -> None:
            with weights.learn():
                self._map(static, conditions, held)
            weights.fill()
            weights.launch()

        with torch.cuda.stream(side), weights.learn():
            precompile(launch_all, self.model, side)
            for _ in range(WARM_UP):
                self._map(static, conditions, held)
        torch.cuda.current_stream().wait_stream(side)
        # Blocks are copied out before another graph runs, so all graphs may work in the same memory.
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        weights.fill()
        with capture(graph, pool=self._pool), weights.use(), self._streams.open():
            frames = self._map(static, conditions, held)
        return _Captured(graph, static, conditions, held, frames, weights)
