"""A fast forecaster: float32, TF32 or bf16, and on a GPU the full map replayed as one CUDA graph.

    block of frames = boundary( denormalise( model( normalise(history), conditions, time ) ) )

The first call with a shape runs the map a few times to warm up and then captures it; every later call copies its
history into the static input of the graph, replays it and returns a copy of the static output. So there is no host
sync, and the next call does not overwrite a returned block. A CPU has no graphs: the map runs eagerly in the requested
precision.
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
from sigmasolver.ops.precision import matmul_precision, refuse_tf32_without_gpu
from sigmasolver.ops.precompile import precompile
from sigmasolver.ops.side_streams import SideStreams

__all__ = ["PRECISIONS", "Replay", "check_precision"]

PRECISIONS = ("float32", "tf32", "bf16")
WARM_UP = 2
"""Warm-up calls before the capture: libraries select their kernels and allocate workspaces in them."""
MAX_GRAPHS = 8
"""Maximum number of cached graphs; the oldest is evicted."""


def check_precision(precision: str) -> None:
    """Raise ValueError for a precision not in `PRECISIONS`."""
    if precision not in PRECISIONS:
        raise ValueError(f'Unknown precision "{precision}"; choose from {", ".join(PRECISIONS)}.')


@dataclass(frozen=True)
class _Captured:
    """A captured graph with its static inputs, its static output and its cache of weight layouts."""

    graph: torch.cuda.CUDAGraph
    history: torch.Tensor
    conditions: dict[str, torch.Tensor]
    time: torch.Tensor | None
    frames: torch.Tensor
    weights: WeightCache


class Replay(Forecaster):
    """The map of `forecaster` in `precision`, called and rolled out like it, without gradients.

    Weights and normalisers are shared with it. A graph reads the weights in place: values updated in place take effect
    at the next call, and weights that were moved or replaced trigger a new capture, as does a new shape. After
    replacing a sub-module create a new `Replay`. If `eager` returns a reason, nothing is captured.
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
        self._submodules = tuple(forecaster.model.modules())
        self._checks_input = any(
            isinstance(module, GridModel) and module.config.options.check_input for module in self._submodules
        )
        self._graphs: dict[object, _Captured] = {}
        self._pool: Any = None
        self._streams = SideStreams()  # reused: the allocator caches memory per stream

    def eager(self, history: torch.Tensor) -> str | None:
        """Why a call runs eagerly; None if it is replayed."""
        if not history.is_cuda:
            return "CUDA graphs require a GPU"
        if self._checks_input:
            return "the model checks every input (check_input), which a graph cannot do"
        if any(module._forward_hooks or module._forward_pre_hooks for module in self._submodules):
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
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            raise ValueError("Replay does not support gradients; call the underlying forecaster instead.")
        refuse_tf32_without_gpu(self.precision, history.device)
        # Tensors cached for later calls must not be created in inference mode.
        with torch.inference_mode(False), torch.no_grad():
            if self.eager(history) is not None:
                return self._map(history, given, time)
            with torch.cuda.device(history.device):
                return self._replay(history, given, time)

    def _map(self, history: torch.Tensor, given: Mapping[str, torch.Tensor], time: torch.Tensor | None) -> torch.Tensor:
        # In a graph, autocast's cache of cast weights would become stale when the weights change.
        with (
            matmul_precision(self.precision),
            torch.autocast(
                history.device.type, dtype=torch.bfloat16, enabled=self.precision == "bf16", cache_enabled=False
            ),
        ):
            return super().forward(history, given, time)

    def _replay(
        self, history: torch.Tensor, given: Mapping[str, torch.Tensor], time: torch.Tensor | None
    ) -> torch.Tensor:
        # Invalid conditions or times have a different key, so they reach the checks of the forecaster.
        names = tuple((name, values.shape) for name, values in sorted(given.items()))
        shape = None if time is None else time.shape
        key = (history.shape, history.dtype, history.device, names, shape, self._weights_key())
        captured = self._graphs.get(key)
        if captured is None:
            captured = self._capture(history, given, time)
            if len(self._graphs) >= MAX_GRAPHS:
                self._graphs.pop(next(iter(self._graphs)))
            self._graphs[key] = captured
        captured.history.copy_(history)
        for name, values in given.items():
            captured.conditions[name].copy_(values)
        if captured.time is not None and time is not None:
            captured.time.copy_(time)
        captured.graph.replay()
        return captured.frames.clone()

    def _weights_key(self) -> tuple[object, ...]:
        """What a graph depends on besides shapes: the addresses of the weights and the training mode."""
        groups = (group for module in self._submodules for group in (module._parameters, module._buffers) if group)
        return self.model.training, *(
            tensor.data_ptr() for group in groups for tensor in group.values() if tensor is not None
        )

    def _capture(
        self, history: torch.Tensor, given: Mapping[str, torch.Tensor], time: torch.Tensor | None
    ) -> _Captured:
        static_history = history.clone(memory_format=torch.contiguous_format)
        conditions = {name: values.to(history, copy=True) for name, values in given.items()}
        static_time = None if time is None else time.to(history.device, torch.float64, copy=True)
        side_stream = torch.cuda.Stream()
        side_stream.wait_stream(torch.cuda.current_stream())
        weights = WeightCache(self.model.parameters())

        def launch_all() -> None:
            with weights.learn():
                self._map(static_history, conditions, static_time)
            weights.fill()
            weights.launch()

        with torch.cuda.stream(side_stream), weights.learn():
            precompile(launch_all, self.model, side_stream)
            for _ in range(WARM_UP):
                self._map(static_history, conditions, static_time)
        torch.cuda.current_stream().wait_stream(side_stream)
        # Outputs are copied before another graph runs, so all graphs can share a memory pool.
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        weights.fill()
        with capture(graph, pool=self._pool), weights.use(), self._streams.open():
            frames = self._map(static_history, conditions, static_time)
        return _Captured(graph, static_history, conditions, static_time, frames, weights)
