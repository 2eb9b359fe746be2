"""Execution of one training step: eager, compiled, or captured as a CUDA graph; in one process or several.

    eager            plain PyTorch
    compiled         the network goes through torch.compile
    graph            the full step (network, backward pass, optimiser, weight average) is a replayed CUDA graph
    compiled-graph   both

All engines do the same arithmetic in the same order of steps; a compiled network, and the weight update in a graph,
may round differently. A step has no host sync: batches are gathered on the GPU, where learning rates and losses stay
until the losses are read.

Several processes split a batch evenly. With DistributedDataParallel each has a full replica of the model; with `shard`
(FSDP2) parameters, gradients and optimiser states are sharded among them.

With `train.accumulate` every frame of teacher forcing has its own forward and backward pass, and gradients accumulate
before the optimiser step. DistributedDataParallel averages them in the last pass only; FSDP2 in every pass, because it
keeps no full gradients.

With `train.recompute` a block stores only its input and is recomputed in the backward pass.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from sigmasolver.data.normalise import Normaliser
from sigmasolver.data.prefetch import prefetch
from sigmasolver.data.windows import Pair, Windows
from sigmasolver.forecast import Forecaster
from sigmasolver.models.layers import draws_noise
from sigmasolver.ops.precision import matmul_precision
from sigmasolver.plugins import declared
from sigmasolver.recipes import Recipe
from sigmasolver.runtime.parallel import World
from sigmasolver.sampling import hashed_seed
from sigmasolver.symmetries import symmetries_of
from sigmasolver.train.capture import Capture
from sigmasolver.train.objectives import Loss, build_loss, direct, frame_by_frame, pushforward, teacher_forced
from sigmasolver.train.optimisers import build_optimiser, reads_tensor, set_rate, trainable_parameters

__all__ = ["ENGINES", "Execution", "Stepper", "blocks_of", "blocks_to_recompute", "full", "recompute"]

ENGINES = ("eager", "compiled", "graph", "compiled-graph")


@dataclass(frozen=True)
class Execution:
    """Device, processes and engine of a run; none of them changes what is learned."""

    world: World = field(default_factory=World)
    engine: str = "eager"
    shard: bool = False

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise ValueError(f'Unknown engine "{self.engine}"; choose from {", ".join(ENGINES)}.')
        if self.captured and self.world.device.type != "cuda":
            raise ValueError(f'The engine "{self.engine}" needs a GPU; use eager or compiled on a CPU.')
        if self.captured and self.world.size > 1:
            raise ValueError(f'The engine "{self.engine}" runs in one process; use eager or compiled with torchrun.')
        if self.shard and self.world.size == 1:
            raise ValueError("--shard needs several processes; start them with torchrun.")

    @property
    def captured(self) -> bool:
        return self.engine.endswith("graph")

    @property
    def compiled(self) -> bool:
        return self.engine.startswith("compiled")


def full(tensor: torch.Tensor) -> torch.Tensor:
    """Return the full tensor, gathered if it is sharded (a collective: every process must call it)."""
    gather: Callable[[], torch.Tensor] | None = getattr(tensor, "full_tensor", None)
    return tensor.detach() if gather is None else gather().detach()


class Stepper:
    """A network, its optimiser and its training steps.

    `rates` holds the learning rate of every step; `members(step)` gives the window indices of the global batch.
    """

    def __init__(
        self,
        recipe: Recipe,
        forecaster: Forecaster,
        windows: Windows,
        members: Callable[[int], torch.Tensor],
        rates: torch.Tensor,
        execution: Execution,
    ) -> None:
        self.recipe, self.windows, self.members, self.execution = recipe, windows, members, execution
        self.device = execution.world.device
        train = recipe.train
        if train.batch % execution.world.size:
            raise ValueError(
                f"train.batch={train.batch} is not divisible by {execution.world.size} processes; set it to a multiple."
            )
        self.model = forecaster.model
        self.average = copy.deepcopy(self.model).requires_grad_(False) if train.ema is not None else None
        draws = recipe.model.options.dropout > 0 or draws_noise(self.model)
        if train.recompute and draws and execution.captured:
            raise ValueError(
                f'The engine "{execution.engine}" cannot reproduce dropout or noise, as train.recompute '
                "requires; use eager or compiled, or set train.recompute=false."
            )
        if train.recompute:
            recompute(self.model, draws)
        self.forecaster = forecaster.around(self._wrapped_model())
        self.rates = rates.to(self.device, torch.float32)
        self.rate = torch.zeros((), device=self.device)
        self.loss = torch.zeros((), device=self.device)
        # A parameter without a gradient would disable the fused AdamW of a captured step.
        self.trainable = trainable_parameters(self.model, recipe.model.name)
        self.optimiser = build_optimiser(self.trainable, train, self.rate)
        self._host_rates = None if reads_tensor(self.optimiser) else rates.tolist()
        if self._host_rates is not None and execution.captured:
            raise ValueError(
                f'The engine "{execution.engine}" needs an optimiser with capturable=True, but {train.optimiser} is '
                "not one; use --engine eager or compiled."
            )
        for normaliser in (forecaster.inputs, forecaster.targets):
            normaliser.prepare(self.device)
        self.criterion = build_loss(recipe, forecaster.targets)
        self.random = train.noise > 0 or draws
        self._batches: Iterator[Pair] | None = None
        self._inputs: Any = None
        self._times: torch.Tensor | None = None
        self._symmetries = symmetries_of(recipe.task).on(windows.grid) if train.augment else None
        self._transforms: torch.Tensor | None = None
        self._captures: dict[int, Capture] = {}
        # Shared by all captures, because the allocator reuses freed blocks only within a stream.
        # The main stream of a captured step has priority over its side streams, which depend on it.
        self._side = torch.cuda.Stream(priority=-1) if execution.captured else None

    def _wrapped_model(self) -> nn.Module:
        execution, model = self.execution, self.model
        if execution.shard:
            if self.average is not None:
                raise ValueError("Sharded weights cannot be averaged; set train.ema=none.")
            from torch.distributed.fsdp import fully_shard

            for block in blocks_of(model):
                fully_shard(block)
            fully_shard(model)
        inner: Any = torch.compile(model) if execution.compiled else model
        if execution.world.size > 1 and not execution.shard:
            ids = [self.device.index] if self.device.type == "cuda" else None
            return DistributedDataParallel(inner, device_ids=ids)
        return inner

    @property
    def kept(self) -> nn.Module:
        """The model whose weights are saved: the average if there is one."""
        return self.model if self.average is None else self.average

    def run(self, step: int) -> None:
        """Run step `step` (counted from 0) and leave its loss in `self.loss`. Steps must be run in order."""
        if self.random:
            self._seed(step)
        self.rate.copy_(self.rates[step])
        if self._host_rates is not None:
            set_rate(self.optimiser, self._host_rates[step])
        self._fetch(step)
        calls = self.recipe.train.calls_at(step)
        with matmul_precision(self.recipe.train.precision):  # with bf16, the remaining float32 products use TF32
            if not self.execution.captured:
                self._update(calls)
            else:
                if calls not in self._captures:
                    self._captures[calls] = self._capture(calls)
                self._captures[calls]()

    def _capture(self, calls: int) -> Capture:
        assert self._side is not None
        # Compiled networks, recomputed blocks and accumulated gradients run on a single stream.
        train = self.recipe.train
        side_streams = not self.execution.compiled and not train.recompute and not train.accumulate
        # A dry pass skips kernels, so its values are arbitrary; a user-defined loss might fail on them.
        dry = (
            partial(self._forward_backward, calls)
            if isinstance(self.criterion, Loss) and not self.execution.compiled
            else None
        )
        return Capture(partial(self._update, calls), dry, self.model, self.optimiser, self._side, side_streams)

    def _seed(self, step: int) -> None:
        """Make noise and dropout depend only on seed, step and rank, so that a run can resume at any step."""
        text = f"step/{self.recipe.train.seed}/{step}/{self.execution.world.rank}"
        torch.manual_seed(hashed_seed(text))

    def _fetch(self, step: int) -> None:
        """Set `self._inputs` to the batch of this step: indices if the windows are on the device, otherwise frames.

        A captured step always reads the same memory, so new values are copied into it.
        """
        share = self.execution.world.share
        if self.forecaster.time_scale is not None:
            self._times = self._on_device(self.windows.frame_times(share(self.members(step))), self._times)
        if self._symmetries is not None:
            generator = torch.Generator().manual_seed(hashed_seed(f"augment/{self.recipe.train.seed}/{step}"))
            rows = self._symmetries.random(self.recipe.train.batch, generator)
            self._transforms = self._on_device(share(rows), self._transforms)
        if self.windows.on_device is not None:
            indices = share(self.members(step))
            pinned = indices.clone().pin_memory() if self.device.type == "cuda" else indices
            new: Any = pinned.to(self.device, non_blocking=True)
        else:
            if self._batches is None:
                shares = (share(self.members(s)) for s in range(step, len(self.rates)))
                self._batches = prefetch(self.windows, shares, self.device)
            new = next(self._batches)
        if not self.execution.captured or self._inputs is None:
            self._inputs = new
        elif isinstance(new, torch.Tensor):
            self._inputs.copy_(new)
        else:
            for buffer, values in zip(self._inputs, new, strict=True):
                buffer.copy_(values)

    def _on_device(self, values: torch.Tensor, buffer: torch.Tensor | None) -> torch.Tensor:
        """The values on the device; in the memory of `buffer` if a captured step reads them there."""
        new = (values.pin_memory() if self.device.type == "cuda" else values).to(self.device, non_blocking=True)
        return new if buffer is None or not self.execution.captured else buffer.copy_(new)

    def _update(
        self, calls: int, passes: AbstractContextManager[None] | None = None, step: Callable[[], object] | None = None
    ) -> None:
        """Run one step: forward and backward pass inside the context `passes`, then `step` updates the weights."""
        train = self.recipe.train
        losses = self._forward_backward(calls, passes or nullcontext())
        if train.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), train.clip)
        (step or self.optimiser.step)()
        if self.average is not None and train.ema is not None:
            with torch.no_grad():
                torch._foreach_lerp_(list(self.average.parameters()), list(self.model.parameters()), 1 - train.ema)
                for average, current in zip(self.average.buffers(), self.model.buffers(), strict=True):
                    average.copy_(current)  # running statistics are averages already, and counters have none
        self.loss.copy_(losses[0] if len(losses) == 1 else torch.stack(losses).sum())

    def _forward_backward(self, calls: int, passes: AbstractContextManager[None]) -> list[torch.Tensor]:
        """Run forward and backward pass of one step inside `passes`; return its losses, leave gradients in `.grad`."""
        train = self.recipe.train
        resident = self.windows.on_device is not None
        history, future = self.windows.batch(self._inputs) if resident else self._inputs
        if self._symmetries is not None and self._transforms is not None:
            inputs, targets = self.forecaster.inputs.fields, self.forecaster.targets.fields
            history = self._symmetries.apply(history, inputs, self._transforms)
            future = self._symmetries.apply(future, targets, self._transforms)
        if train.noise:
            history = _with_noise(history, self.forecaster.inputs, train.noise, self.recipe.task.mask_channel)
        parts = [(history, future, self._times)]
        if train.accumulate:
            parts = list(frame_by_frame(history, future, self._times))
        objectives: dict[str, Callable[..., torch.Tensor]] = {
            "direct": direct,
            "teacher_forced": direct if train.accumulate else teacher_forced,
            "pushforward": partial(pushforward, calls=calls),
        }
        # The autocast cache would hand a captured step the casted weights of an earlier one.
        cache_weights = not self.execution.captured
        autocast = torch.autocast(
            self.device.type, dtype=torch.bfloat16, enabled=train.precision == "bf16", cache_enabled=cache_weights
        )
        losses: list[torch.Tensor] = []
        with passes:
            for *part, times in parts:
                with self._gradient_sync(last=len(losses) + 1 == len(parts)):
                    with autocast:
                        loss = objectives[train.objective](self.forecaster, *part, self.criterion, times=times)
                    if not loss.requires_grad:
                        raise ValueError(
                            f'The loss "{train.loss}" of the model "{self.recipe.model.name}" has no gradient; compute '
                            "both with differentiable torch operations, without detach() or no_grad()."
                        )
                    if not losses:
                        self.optimiser.zero_grad(set_to_none=True)
                    loss.backward()
                losses.append(loss.detach())
        return losses

    def _gradient_sync(self, last: bool) -> AbstractContextManager[None]:
        """Context of a forward and backward pass: DDP averages the accumulated gradients in the last one only."""
        model = self.forecaster.model
        return model.no_sync() if isinstance(model, DistributedDataParallel) and not last else nullcontext()


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The blocks of a model; a user's model need not have any."""
    return list(declared(model, "blocks") or ())


def blocks_to_recompute(model: nn.Module) -> list[nn.Module]:
    """Return the blocks that can be recomputed one by one, or raise ValueError."""
    blocks = blocks_of(model)
    if not blocks:
        raise ValueError("This model has no blocks to recompute; set train.recompute=false.")
    return blocks


def recompute(model: nn.Module, draws: bool) -> None:
    """Make every block store only its input and be recomputed in the backward pass; with `draws`, the state of the
    random generator is restored, so that dropout and noise are the same.

    The block's `forward` is replaced rather than the block, which keeps the names of the weights and the type of the
    block: torch's `checkpoint_wrapper` is a module around it.
    """
    for block in blocks_to_recompute(model):
        # Taken from the class, so that training the same model again does not wrap it twice.
        block.forward = partial(_forward_checkpointed, MethodType(type(block).forward, block), draws)


def _forward_checkpointed(forward: Callable[..., Any], draws: bool, *inputs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*inputs)
    # Saving the generator's state would break graph capture, so do it only if something is drawn.
    return checkpoint(forward, *inputs, use_reentrant=False, preserve_rng_state=draws)


def _with_noise(history: torch.Tensor, normaliser: Normaliser, deviation: float, mask: int | None) -> torch.Tensor:
    encoded = normaliser.encode(history)
    noisy = normaliser.decode(encoded + deviation * torch.randn_like(encoded))
    if mask is None:
        return noisy
    before, clean, after = noisy[..., :mask], history[..., mask : mask + 1], noisy[..., mask + 1 :]
    return torch.cat((before, clean, after), dim=-1)  # the mask gets no noise
