"""Losses, and training objectives: the loss of one batch as a function of forecaster, history and future.

    direct          one call from the true history, with the loss over the full block
    teacher_forced  one call per future frame, each from the true history before it, folded into one batched call;
                    `frame_by_frame` gives the same loss frame by frame, for gradient accumulation
    pushforward     a rollout without gradient, then one call with gradient from its forecasts

Fields are in physical units, `(B, frames, *grid, q)`. The loss of a batch is the mean over its samples. With a mask,
points in the solid do not count.
`times` (B, 1 + frames) are those of the last history frame and of the future frames, for a model with a time input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from sigmasolver.data.mask import count_fluid, fluid_of, zero_in_solid
from sigmasolver.data.normalise import Normaliser
from sigmasolver.evaluate.metrics import component_mean, ratio_of_norms
from sigmasolver.forecast import feed_back
from sigmasolver.plugins import Registry
from sigmasolver.recipes import Recipe

__all__ = [
    "LOSSES",
    "Criterion",
    "Loss",
    "build_loss",
    "direct",
    "frame_by_frame",
    "pushforward",
    "register_loss",
    "relative_l2",
    "teacher_forced",
]

Criterion = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""(prediction, truth, history) -> (B,)."""

Forecast = Callable[..., torch.Tensor]
"""history -> frames; called with time=, one number per sample, if `times` are given."""


def relative_l2(prediction: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    """||prediction - truth|| / ||truth|| over frames and points, per sample and field: (B, q).

    Differentiable counterpart of `metrics.relative_l2`, in the dtype of the model.
    """
    return ratio_of_norms(prediction, truth, range(1, truth.ndim - 1))


@dataclass(frozen=True)
class Loss:
    """(prediction, truth) -> (B,): relative L2, averaged within each group of fields and summed over the groups.

    With a `normaliser` it is the mean squared error of normalised fields instead (RealPDEBench, REALM), or with
    `absolute` their mean absolute error.
    `derivative` is the weight of the relative L2 of the central differences along every axis (Darcy: 0.1). For it the
    outermost points of the prediction are set to zero, and both fields are zero-padded beyond the boundary, as in the
    public loss.
    `mask` is the index of a mask among the fields of a history: norms and means are over the fluid points only, and
    differences see zeros in the solid, as beyond the boundary.
    """

    groups: tuple[tuple[int, ...], ...] = ((0,),)
    derivative: float = 0.0
    normaliser: Normaliser | None = None
    absolute: bool = False
    mask: int | None = None

    def __call__(
        self, prediction: torch.Tensor, truth: torch.Tensor, history: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the loss of each sample; `history` (B, T_in, *grid, q_in) contains the mask, if there is one."""
        fluid = None
        if self.mask is not None:
            if history is None:
                raise ValueError("This loss has a mask; pass the history, which contains it.")
            fluid = fluid_of(history, self.mask)
            prediction, truth = zero_in_solid(prediction, fluid), zero_in_solid(truth, fluid)
        loss = self._sum_over_groups(self._errors(prediction, truth, fluid))
        if self.derivative:
            interior = _zero_boundary(prediction)
            for axis in range(2, truth.ndim - 1):
                slopes = relative_l2(_difference(interior, axis), _difference(truth, axis))
                loss = loss + self.derivative * self._sum_over_groups(slopes)
        return loss

    def _errors(self, prediction: torch.Tensor, truth: torch.Tensor, fluid: torch.Tensor | None) -> torch.Tensor:
        if self.normaliser is None:
            return relative_l2(prediction, truth)
        difference = self.normaliser.encode_forecast(prediction) - self.normaliser.encode(truth)
        errors = (difference.abs() if self.absolute else difference.square()).flatten(1, -2).mean(1)
        # Errors are zero in the solid; rescale the mean over all points to that over the fluid points.
        return errors if fluid is None else errors * (fluid[0].numel() / count_fluid(fluid).to(errors))[:, None]

    def _sum_over_groups(self, errors: torch.Tensor) -> torch.Tensor:
        return torch.stack([component_mean(errors, group) for group in self.groups]).sum(0)


LossBuilder = Callable[[Recipe, Normaliser], Callable[..., torch.Tensor]]
"""Builder of a loss from a recipe and the normaliser of the targets."""


def _build_relative_loss(recipe: Recipe, normaliser: Normaliser) -> Loss:
    task = recipe.task
    return Loss(tuple(task.groups.values()), recipe.train.derivative, mask=task.mask_channel)


def _build_squared_loss(recipe: Recipe, normaliser: Normaliser) -> Loss:
    return replace(_build_relative_loss(recipe, normaliser), normaliser=normaliser)


def _build_absolute_loss(recipe: Recipe, normaliser: Normaliser) -> Loss:
    return replace(_build_squared_loss(recipe, normaliser), absolute=True)


def _check_builder(name: str, builder: Any) -> LossBuilder:
    if not callable(builder):
        raise ValueError(
            f'The builder of "{name}" must be a function of a recipe and a normaliser, not {type(builder).__name__}.'
        )
    return builder


LOSSES: Registry[LossBuilder] = Registry(
    "loss",
    {"relative_l2": _build_relative_loss, "squared": _build_squared_loss, "absolute": _build_absolute_loss},
    "sigmasolver.losses",
    _check_builder,
    "sigmasolver.train.objectives.register_loss",
)


def register_loss(name: str, builder: LossBuilder) -> None:
    """Register a loss of your own by name, for use as `train.loss` in recipes.

    Args:
        name: letters, digits, dots, hyphens and underscores; it must not be taken.
        builder: takes the recipe and the normaliser of the targets, and returns a function of prediction and truth,
            both `(B, frames, *grid, q)` in physical units, that returns one number per sample, `(B,)`. If the task has
            a mask, both are zero in the solid.

    Example:
        >>> import sigmasolver
        >>> from sigmasolver.train.objectives import register_loss
        >>> def largest(recipe, normaliser):
        ...     def loss(prediction, truth):
        ...         return (normaliser.encode(prediction) - normaliser.encode(truth)).abs().flatten(1).amax(1)
        ...     return loss
        >>> register_loss("largest", largest)
        >>> sigmasolver.recipe_of("darcy", settings=["train.loss=largest"]).train.loss
        'largest'
    """
    LOSSES.register(name, builder)


def build_loss(recipe: Recipe, normaliser: Normaliser) -> Criterion:
    """Build the loss of a recipe; a registered loss is checked to return one number per sample."""
    name = recipe.train.loss
    loss = LOSSES.find(name)(recipe, normaliser)
    if isinstance(loss, Loss):
        return loss
    if not callable(loss):
        raise ValueError(f'The builder of the loss "{name}" returned {type(loss).__name__}; it must return a function.')

    mask = recipe.task.mask_channel

    def checked_loss(
        prediction: torch.Tensor, truth: torch.Tensor, history: torch.Tensor | None = None
    ) -> torch.Tensor:
        if mask is not None and history is not None:
            fluid = fluid_of(history, mask)
            prediction, truth = zero_in_solid(prediction, fluid), zero_in_solid(truth, fluid)
        values = loss(prediction, truth)
        if not isinstance(values, torch.Tensor) or values.shape != truth.shape[:1]:
            returned = f"the shape {tuple(values.shape)}" if isinstance(values, torch.Tensor) else type(values).__name__
            raise ValueError(
                f'The loss "{name}" returned {returned}; it must return one number for each of {len(truth)} samples.'
            )
        return values

    return checked_loss


def _zero_boundary(frames: torch.Tensor) -> torch.Tensor:
    mask = torch.ones(frames.shape[2:-1], dtype=frames.dtype, device=frames.device)
    for axis, points in enumerate(mask.shape):
        for edge in (0, points - 1):
            mask.select(axis, edge).zero_()
    return frames * mask[..., None]


def _difference(frames: torch.Tensor, axis: int) -> torch.Tensor:
    """x[i+1] - x[i-1] with zero padding; the grid spacing cancels in a ratio."""
    zero = torch.zeros_like(frames.narrow(axis, 0, 1))
    ahead = torch.cat((frames.narrow(axis, 1, frames.shape[axis] - 1), zero), axis)
    behind = torch.cat((zero, frames.narrow(axis, 0, frames.shape[axis] - 1)), axis)
    return ahead - behind


def _call(forecast: Forecast, history: torch.Tensor, time: torch.Tensor | None) -> torch.Tensor:
    return forecast(history) if time is None else forecast(history, time=time)


def direct(
    forecast: Forecast,
    history: torch.Tensor,
    future: torch.Tensor,
    loss: Criterion,
    times: torch.Tensor | None = None,
) -> torch.Tensor:
    """One call, with the loss over the frames it predicts."""
    prediction = _call(forecast, history, None if times is None else times[:, 0])
    return loss(prediction, future[:, : prediction.shape[1]], history).mean()


def teacher_forced(
    forecast: Forecast,
    history: torch.Tensor,
    future: torch.Tensor,
    loss: Criterion,
    times: torch.Tensor | None = None,
) -> torch.Tensor:
    """The sum over future frames of single-frame losses, each predicted from the true frames before it.

    No frame depends on the prediction of another, so they are folded into the batch: the same gradient as frame by
    frame, in one call.
    """
    horizon = future.shape[1]
    windows = torch.stack([window for window, *_ in frame_by_frame(history, future)], dim=1).flatten(0, 1)
    prediction = _call(forecast, windows, None if times is None else times[:, :horizon].flatten())
    if prediction.shape[1] != 1:
        raise ValueError(
            f"Teacher forcing trains on single frames, but the model predicts {prediction.shape[1]} "
            "per call; use direct."
        )
    return loss(prediction, future.flatten(0, 1)[:, None], windows).unflatten(0, (-1, horizon)).sum(1).mean()


def frame_by_frame(
    history: torch.Tensor, future: torch.Tensor, times: torch.Tensor | None = None
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]:
    """Yield for each future frame the true history before it, the frame, and the times from there on: their `direct`
    losses sum to the teacher-forced loss, so gradients can be accumulated frame by frame."""
    length, horizon = history.shape[1], future.shape[1]
    constant = history[:, -1:, ..., future.shape[-1] :].expand(-1, horizon, *history.shape[2:-1], -1)
    frames = torch.cat((history, torch.cat((future, constant), dim=-1)), dim=1)
    for t in range(horizon):
        yield frames[:, t : t + length], future[:, t : t + 1], None if times is None else times[:, t:]


def pushforward(
    forecast: Forecast,
    history: torch.Tensor,
    future: torch.Tensor,
    loss: Criterion,
    calls: int,
    times: torch.Tensor | None = None,
) -> torch.Tensor:
    """`calls` autoregressive calls, of which only the last has a loss and a gradient."""
    block = 0
    with torch.no_grad():
        for call in range(calls - 1):
            prediction = _call(forecast, history, None if times is None else times[:, call * block])
            block = prediction.shape[1]
            history = feed_back(history, prediction)
    start = (calls - 1) * block
    if calls < 1 or start >= future.shape[1]:
        raise ValueError(f"{calls} calls of {block} frames need more than the {future.shape[1]} future frames given.")
    return direct(forecast, history, future[:, start:], loss, None if times is None else times[:, start:])
