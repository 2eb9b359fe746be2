"""The forecaster and its autoregressive rollout.

    block of frames = boundary( denormalise( model( normalise(history), conditions, time ) ) )

History and forecast are in physical units, `(B, frames, *grid, fields)`; the network sees normalised values only. Time
is folded into channels, frame by frame. A rollout feeds every predicted block back: the last T_in frames of history and
forecast are the next history. The boundary operator acts in physical units before the feedback, so the next normalised
history satisfies it too. Input fields beyond the targets are given, not predicted: they stay fixed. If one of them is
the mask of a solid, the solid keeps the values of the last input frame, or zero in a steady task.

Letters: B batch, T frames, q fields.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from torch import nn

from sigmasolver.data.mask import fluid_of
from sigmasolver.data.normalise import Normaliser, TimeScale
from sigmasolver.settings import lookup
from sigmasolver.tasks import VELOCITY

if TYPE_CHECKING:
    import xarray

    from sigmasolver.data.layout import Layout

__all__ = ["BOUNDARIES", "Forecaster", "Rollout", "feed_back", "native", "refuse_boundary_without_effect", "rollout"]

T = TypeVar("T")
Boundary = Callable[[torch.Tensor, tuple[str, ...]], torch.Tensor]


def lower_walls(frames: torch.Tensor, fields: tuple[str, ...]) -> torch.Tensor:
    """Velocity through a lower wall is zero: component c at the first index of axis c (lower-face storage)."""
    frames = frames.clone()
    for axis, name in enumerate(VELOCITY):
        if name in fields:
            frames[..., fields.index(name)].select(axis + 2, 0).zero_()
    return frames


BOUNDARIES: dict[str, Boundary] = {"lower-walls": lower_walls}


def refuse_boundary_without_effect(boundary: str, fields: tuple[str, ...]) -> None:
    """Raise ValueError if the boundary operator changes none of these fields."""
    lookup(BOUNDARIES, boundary, "boundary operator")
    if not set(fields) & set(VELOCITY):
        raise ValueError(
            f"The boundary operator {boundary} acts on {', '.join(VELOCITY)}, which are not among the targets "
            f"{', '.join(fields)}; rename the components of velocity, or set task.boundary=none."
        )


class Forecaster(nn.Module):
    """history `(B, T_in, *grid, q_in)` -> the next `block` frames `(B, block, *grid, q_out)`, in physical units.

    `conditions` are names of scalars that are constant along a trajectory (Reynolds number, viscosity, time step); each
    call passes them by name, one value per sample, and each becomes a constant channel after the history. `history` is
    T_in, which `rollout` checks.

    With a `time_scale` each call passes the physical time of the last input frame, one per sample, to the embedding of
    the model; without one the time is ignored. `embedded` names input fields whose mean over the points, in normalised
    units, is appended to the time. `mask` names the input field that is 1 in a solid and 0 in the fluid.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Normaliser,
        targets: Normaliser,
        block: int,
        boundary: str | None = None,
        conditions: tuple[str, ...] = (),
        history: int | None = None,
        time_scale: TimeScale | None = None,
        embedded: tuple[str, ...] = (),
        mask: str | None = None,
    ) -> None:
        super().__init__()
        self.mask = mask
        self.history = history
        self.time_scale, self.embedded = time_scale, embedded
        self.model, self.inputs, self.targets, self.block = model, inputs, targets, block
        self.boundary, self.conditions = boundary, conditions
        if boundary is not None:
            lookup(BOUNDARIES, boundary, "boundary operator")

    def around(self, model: nn.Module) -> Forecaster:
        """The same map with another network, such as a compiled or distributed version of this one."""
        return Forecaster(
            model,
            self.inputs,
            self.targets,
            self.block,
            self.boundary,
            self.conditions,
            self.history,
            self.time_scale,
            self.embedded,
            self.mask,
        )

    def rollout(
        self,
        history: torch.Tensor | np.ndarray,
        steps: int,
        conditions: Mapping[str, torch.Tensor] | None = None,
        time: torch.Tensor | np.ndarray | float | None = None,
    ) -> Rollout:
        """A free forecast of `steps` frames after `history` (B, T_in, *grid, q_in), without gradients.

        If the history is longer than the model needs, its last frames are used. `time` is the time of the last input
        frame, one number or one per sample, with the frame spacing of training; or (B, steps), the times of the last
        input frame and of the frames after it.
        """
        weight = next(self.model.parameters(), torch.zeros(()))
        frames = torch.as_tensor(native(history)).to(weight.device, weight.dtype)
        if self.history is not None and frames.ndim > 1:
            if frames.shape[1] < self.history:
                raise ValueError(f"Expected a history of at least {self.history} frames, got {frames.shape[1]}.")
            frames = frames[:, -self.history :]
        times = None if time is None else torch.as_tensor(native(time), dtype=torch.float64)
        if times is not None and times.ndim < 2 and self.time_scale is not None:
            ahead = self.time_scale.unit * torch.arange(steps, dtype=torch.float64, device=times.device)
            times = (times if times.ndim else times.expand(len(frames)))[:, None] + ahead
        with torch.no_grad():
            return rollout(self, frames, steps, conditions=conditions, times=times)

    def forward(
        self,
        history: torch.Tensor,
        conditions: Mapping[str, torch.Tensor] | None = None,
        time: torch.Tensor | None = None,
    ) -> torch.Tensor:
        encoded = self.inputs.encode(history)
        channels = _fold(encoded)
        if self.conditions or conditions:
            channels = torch.cat((channels, self._condition_channels(channels, conditions or {})), dim=-1)
        scalars = self._scalars(encoded, time)
        # Under autocast the model returns bf16, whose eight bits would be lost when adding a mean of many deviations.
        output = (self.model(channels) if scalars is None else self.model(channels, scalars)).to(channels.dtype)
        if output.shape[:-1] != channels.shape[:-1]:
            raise ValueError(
                f"The model returned shape {tuple(output.shape)} for input shape {tuple(channels.shape)}; it must "
                "preserve batch and grid."
            )
        frames = self.targets.decode(_unfold(output, self.block))
        frames = frames if self.boundary is None else BOUNDARIES[self.boundary](frames, self.targets.fields)
        return frames if self.mask is None else self._keep_solid(frames, history, self.mask)

    def fluid_points(self, history: torch.Tensor) -> torch.Tensor | None:
        """(B, 1, *grid, 1) bool, True at fluid points; None if all points are fluid, as they are without a mask."""
        if self.mask is None:
            return None
        fluid = fluid_of(history, self.inputs.fields.index(self.mask))
        return None if bool(fluid.all()) else fluid

    def _keep_solid(self, frames: torch.Tensor, history: torch.Tensor, mask: str) -> torch.Tensor:
        fluid, targets = fluid_of(history, self.inputs.fields.index(mask)), self.targets.fields
        fed_back = self.inputs.fields[: len(targets)] == targets
        solid_values = history[:, -1:, ..., : len(targets)] if fed_back else torch.zeros_like(frames)
        return torch.where(fluid, frames, solid_values)

    def _scalars(self, encoded: torch.Tensor, time: torch.Tensor | None) -> torch.Tensor | None:
        """(B, n): the time, then the embedded fields; None if the model takes neither."""
        scalars = [encoded[:, -1, ..., self.inputs.fields.index(name)].flatten(1).mean(1) for name in self.embedded]
        if self.time_scale is not None:
            if time is None or time.shape != encoded.shape[:1]:
                actual = "none" if time is None else f"a shape of {tuple(time.shape)}"
                raise ValueError(
                    "This model requires the time of the last input frame: pass `time` with one number for each of "
                    f"{len(encoded)} samples, got {actual}."
                )
            scalars.insert(0, self.time_scale.encode(time).to(encoded))
        return torch.stack(scalars, dim=-1) if scalars else None

    def _condition_channels(self, like: torch.Tensor, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
        if set(given) != set(self.conditions):
            expected = ", ".join(self.conditions) or "none"
            raise ValueError(f"Expected the conditions {expected}, got {', '.join(given) or 'none'}.")
        for name in self.conditions:
            if given[name].shape != like.shape[:1]:
                raise ValueError(
                    f"The condition {name} must have one number for each of {like.shape[0]} samples, got shape "
                    f"{tuple(given[name].shape)}."
                )
        values = torch.stack([given[name].to(like) for name in self.conditions], dim=-1)
        return values.reshape(len(values), *(1,) * (like.ndim - 2), -1).expand(*like.shape[:-1], -1)


def native(values: T) -> T | np.ndarray:
    """A NumPy array in a memory layout that torch accepts: without negative strides, in the byte order of the machine;
    other values unchanged."""
    if not isinstance(values, np.ndarray):
        return values
    return np.asarray(values, dtype=values.dtype.newbyteorder("="), order="C")


def _fold(frames: torch.Tensor) -> torch.Tensor:
    """(B, T, *grid, q) -> (B, *grid, T q): all fields of the first frame, then of the second, ..."""
    return frames.movedim(1, -2).flatten(-2)


def _unfold(channels: torch.Tensor, frames: int) -> torch.Tensor:
    """The inverse of `_fold`."""
    if channels.shape[-1] % frames:
        raise ValueError(
            f"The model returned {channels.shape[-1]} channels, which is not a multiple of {frames} frames."
        )
    unfolded: torch.Tensor = channels.unflatten(-1, (frames, -1))
    return unfolded.movedim(-2, 1)


@dataclass(frozen=True)
class Rollout:
    """Result of a rollout."""

    frames: torch.Tensor
    """(B, horizon, *grid, q); NaN after the block in which the forecast of a sample became non-finite."""
    stopped: int | None
    """The first lead (counted from 1) that is non-finite in some sample, or None."""
    fields: tuple[str, ...] = ()
    """Names of the fields along the last axis."""

    def to_xarray(self, layout: Layout | None = None) -> xarray.Dataset:
        """One variable per field, on (trajectory, lead, x, y, z); needs the extra `data`.

        `layout` is that of the data on the same grid (`open_dataset(...).header.layout`): its coordinates, units and
        boundaries are copied.
        """
        from sigmasolver.data.formats.xarray_dataset import forecast_as_dataset

        return forecast_as_dataset(self.frames.float().cpu().numpy(), self.fields, layout)

    def __str__(self) -> str:
        horizon = self.frames.shape[1]
        if self.stopped is None:
            return f"all {horizon} frames are finite"
        bad = int((~torch.isfinite(self.frames[:, -1]).flatten(1).all(1)).sum())
        return f"{bad} of {len(self.frames)} forecasts became non-finite, the first at lead {self.stopped} of {horizon}"


def rollout(
    forecaster: Forecaster,
    history: torch.Tensor,
    horizon: int,
    truth: torch.Tensor | None = None,
    conditions: Mapping[str, torch.Tensor] | None = None,
    times: torch.Tensor | None = None,
) -> Rollout:
    """Forecast `horizon` frames after `history`.

    Without `truth` the forecast is free: every block is fed back. With the true frames `(B, horizon, *grid, q)` it is
    teacher-forced: every block starts from the true history, shared by all its frames. On a GPU there is no host sync
    before the end. `times` (B, horizon) or longer are the physical times of the last input frame and of the frames
    after it; only a model with a time embedding uses them.
    """
    if horizon < 1:
        raise ValueError(f"The number of frames must be at least 1, got {horizon}.")
    if truth is not None and truth.shape[1] < horizon:
        raise ValueError(
            f"There are only {truth.shape[1]} true frames for a horizon of {horizon}; use a shorter horizon."
        )
    if conditions is not None:
        conditions = {name: values.to(history.device) for name, values in conditions.items()}
    if forecaster.time_scale is None:
        times = None
    elif times is not None:
        calls = -(-horizon // forecaster.block)
        if times.ndim != 2 or len(times) != len(history) or times.shape[1] <= (calls - 1) * forecaster.block:
            raise ValueError(
                f"Expected times of shape {(len(history), horizon)}, starting with the last input frame, got "
                f"{tuple(times.shape)}."
            )
        times = times.to(history.device)
    frames: list[torch.Tensor] = []
    non_finite = torch.zeros(len(history), dtype=torch.bool, device=history.device)
    for block in _blocks(forecaster, history, horizon, truth, conditions, times):
        # Values after a non-finite one are meaningless, even if they happen to be finite again.
        frames.append(block.masked_fill(_broadcast_flags(non_finite, block), torch.nan))
        non_finite = non_finite | ~torch.isfinite(block).flatten(1).all(1)
        # Checking on a GPU is a host sync, so only a CPU stops early.
        if non_finite.device.type == "cpu" and bool(non_finite.all()):
            break
    predicted = torch.cat(frames, dim=1)
    missing = horizon - predicted.shape[1]
    if missing:
        gap = predicted.new_full((predicted.shape[0], missing, *predicted.shape[2:]), torch.nan)
        predicted = torch.cat((predicted, gap), dim=1)
    finite = torch.isfinite(predicted).flatten(2).all(-1).all(0).tolist()
    return Rollout(predicted, None if all(finite) else finite.index(False) + 1, forecaster.targets.fields)


def _broadcast_flags(flags: torch.Tensor, frames: torch.Tensor) -> torch.Tensor:
    return flags.view(-1, *(1,) * (frames.ndim - 1))


def _blocks(
    forecaster: Forecaster,
    history: torch.Tensor,
    horizon: int,
    truth: torch.Tensor | None,
    conditions: Mapping[str, torch.Tensor] | None,
    times: torch.Tensor | None,
) -> Iterator[torch.Tensor]:
    for start in range(0, horizon, forecaster.block):
        block = forecaster(history, conditions, None if times is None else times[:, start])
        yield block[:, : horizon - start]
        if start + forecaster.block >= horizon:
            return
        targets = forecaster.targets.fields
        if forecaster.inputs.fields[: len(targets)] != targets:
            raise ValueError(
                f"A forecast of ({', '.join(targets)}) cannot be fed back into a history of "
                f"({', '.join(forecaster.inputs.fields)}); forecast one block of {forecaster.block} frames."
            )
        fed = block if truth is None else truth[:, start : start + forecaster.block]
        history = feed_back(history, fed)


def feed_back(history: torch.Tensor, frames: torch.Tensor) -> torch.Tensor:
    """The history after `frames`: same length, with the given (not predicted) fields carried over."""
    fields = frames.shape[-1]
    if history.shape[-1] > fields:
        given = history[:, -1:, ..., fields:].expand(-1, frames.shape[1], *history.shape[2:-1], -1)
        frames = torch.cat((frames, given), dim=-1)
    return torch.cat((history, frames), dim=1)[:, -history.shape[1] :]
