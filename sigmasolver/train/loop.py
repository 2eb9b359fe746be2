"""The training loop: a run can be killed at any moment and resumes to the same weights.

The windows, the learning rate and the random numbers of a step are functions of the seed and the step, so a run resumes
from one file with the weights, the optimiser state, the weight average and the step. On a CPU the final weights are
bitwise identical to those of an uninterrupted run. Losses stay on the device and are read every `look` steps.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from sigmasolver.data.mask import zero_in_solid
from sigmasolver.data.normalise import Normaliser
from sigmasolver.data.windows import Windows, spread_evenly
from sigmasolver.evaluate import metrics
from sigmasolver.forecast import Forecaster, rollout
from sigmasolver.forecast.checkpoint import begin, save
from sigmasolver.recipes import Recipe
from sigmasolver.runs import Run, append_row, read_tensors, replace_rows, write_tensors
from sigmasolver.runtime.parallel import World
from sigmasolver.sampling import hashed_seed
from sigmasolver.train.engine import Execution, Stepper, full
from sigmasolver.train.optimisers import OneCycle, set_rate

__all__ = ["Data", "Progress", "StepPlan", "order", "train", "validate"]

MAX_STEPS = 10**9
"""Already years of training; the learning rates of more steps would not fit into memory."""
MAX_VALIDATION_WINDOWS = 256
"""Maximum number of windows in a validation, evenly spread over all."""


@dataclass(frozen=True)
class Data:
    """Training and validation windows of a run."""

    training: Windows
    validation: Windows | None
    fingerprint: str


@dataclass(frozen=True)
class Progress:
    """Progress of a run, reported each time its losses are read."""

    step: int
    steps: int
    loss: float
    """Mean since the last report."""
    error: float | None
    """Validation error at the latest check, see `validate`."""
    rate: float
    """The learning rate of the last step."""
    steps_per_second: float


@lru_cache(maxsize=2)
def order(seed: int, epoch: int, trajectories: int, per_trajectory: int, one_start: bool = False) -> torch.Tensor:
    """Return the shuffled windows of this epoch: all of them, or one random start per trajectory."""
    generator = torch.Generator().manual_seed(hashed_seed(f"order/{seed}/{epoch}"))
    if not one_start:
        return torch.randperm(trajectories * per_trajectory, generator=generator)
    first = torch.randperm(trajectories, generator=generator) * per_trajectory
    return first + torch.randint(per_trajectory, (trajectories,), generator=generator)


class StepPlan:
    """The steps of a run: their number, the windows of each, and the steps after which to validate."""

    def __init__(self, recipe: Recipe, windows: Windows) -> None:
        train = recipe.train
        # Windows listed by the data set are not ordered by trajectory and start.
        per_trajectory = windows.windows_per_trajectory
        regular = per_trajectory is not None
        self.train, self.per_trajectory = train, 1 if per_trajectory is None else per_trajectory
        self.trajectories = len(windows.trajectories) if regular else len(windows)
        if train.one_start and not regular:
            raise ValueError(
                "train.one_start takes one window of each trajectory, but this data set lists its windows "
                "explicitly; set train.one_start=false, or task.split=trajectories."
            )
        count = self.trajectories if train.one_start else len(windows)
        if train.batch > count:
            raise ValueError(f"train.batch is {train.batch}, but an epoch has only {count} windows; lower train.batch.")
        self.per_epoch = count // train.batch
        self.steps = train.updates if train.updates is not None else train.epochs * self.per_epoch
        if self.steps > MAX_STEPS:
            raise ValueError(
                f"The training has {self.steps:,} steps, but the maximum is {MAX_STEPS:,}; lower train.updates or "
                "train.epochs."
            )
        checks = min(train.checks, self.steps)  # at most one after every step
        self.checks = {round(k * self.steps / checks) for k in range(1, checks + 1)}

    def members(self, step: int) -> torch.Tensor:
        """Return the window indices of this step (counted from 0)."""
        epoch, inside = divmod(step, self.per_epoch)
        windows = order(self.train.seed, epoch, self.trajectories, self.per_trajectory, self.train.one_start)
        members = windows[inside * self.train.batch : (inside + 1) * self.train.batch]
        if self.train.shared_start:  # the random start of the first window
            members = members - members % self.per_trajectory + members[0] % self.per_trajectory
        return members

    def rates(self) -> torch.Tensor:
        train = self.train
        cycle = OneCycle(train.lr, self.steps, train.warmup, train.start_divisor, train.final_divisor)
        return cycle.rate(torch.arange(self.steps))


def train(
    recipe: Recipe,
    data: Data,
    forecaster: Forecaster,
    run: Run,
    execution: Execution | None = None,
    watch: Callable[[Progress], None] | None = None,
    look: int = 50,
    keep_seconds: float = 30.0,
    stop: Callable[[], bool] | None = None,
) -> None:
    """Train `forecaster` and write the run folder; a stopped run is resumed.

    Every `look` steps the losses are read and a row is logged; the state is saved at the first such step after every
    `keep_seconds`, and at the end. Once `stop()` returns True, the state is saved and the loop returns unfinished.
    """
    execution = Execution() if execution is None else execution
    world = execution.world
    if world.first:
        begin(run, recipe)
    world.wait()
    plan = StepPlan(recipe, data.training)
    stepper = Stepper(recipe, forecaster, data.training, plan.members, plan.rates(), execution)
    state = _State(run, stepper, plan.steps, world)
    forecaster.model.train()
    losses: list[torch.Tensor] = []
    began, start = time.monotonic(), state.step
    saved = reported = began
    for step in range(state.step, plan.steps):
        stepper.run(step)
        losses.append(stepper.loss.clone())
        done = step + 1
        # Save in time even if steps are slow; with several processes this would need a collective at every step.
        stopping = stop is not None and stop()
        overdue = world.size == 1 and (stopping or time.monotonic() - reported > keep_seconds > 0)
        if done % look and not overdue and done not in plan.checks and done != plan.steps:
            continue
        reported = time.monotonic()
        mean = _read_losses(torch.stack(losses), step, plan, world)
        losses.clear()
        row: dict[str, Any] = {"step": done, "epoch": step // plan.per_epoch, "loss": mean}
        row["rate"] = float(stepper.rates[step])
        row["seconds"] = time.monotonic() - began
        row["steps_per_second"] = (done - start) / row["seconds"]
        improved = False
        if done in plan.checks and data.validation is not None:
            row["error"] = state.error = validate(
                stepper.forecaster if execution.shard else forecaster.around(stepper.kept),
                data.validation,
                execution,
                recipe.train.check,
            )
            improved = not state.error >= state.best
            forecaster.model.train()
        if world.first:
            append_row(run.log, row)  # before the state: rows beyond the saved state are dropped on resume
        if improved and recipe.train.keep == "best":  # before the state, which refers to these weights
            state.best = row["error"]
            _save(run, forecaster.around(stepper.kept), done, plan.steps, data.fingerprint, world)
        if world.agreed(stopping or done == plan.steps or time.monotonic() - saved >= keep_seconds):
            state.keep(done)
            saved = time.monotonic()
        if world.first and watch is not None:
            watch(Progress(done, plan.steps, mean, state.error, row["rate"], row["steps_per_second"]))
        if done < plan.steps and stop is not None and world.agreed(stopping):
            return
    # After log and state, because weights of the last step mark the run as finished.
    if recipe.train.keep == "final" or not run.weights.exists():
        _save(run, forecaster.around(stepper.kept), plan.steps, plan.steps, data.fingerprint, world)
    world.wait()  # until rank 0 has written what the other ranks will read
    forecaster.model.eval()
    if stepper.average is not None:
        forecaster.model.load_state_dict(stepper.average.state_dict())


def validate(forecaster: Forecaster, windows: Windows, execution: Execution, check: str = "relative_l2") -> float:
    """Return the mean relative L2 error of free rollouts over the full horizon, averaged over fields, on at most
    MAX_VALIDATION_WINDOWS windows; or the RMSE (`TrainRecipe.check`) on all windows, since outliers dominate it.

    If mass fractions are transformed, errors are those of normalised fields, because traces of a species would outweigh
    everything else; fields whose truth is constant are left out, because they have no relative error.
    """
    world = execution.world
    chosen = spread_evenly(len(windows), None if check == "rmse" else MAX_VALIDATION_WINDOWS)
    # Every call of a sharded model is a collective, so each process evaluates all windows.
    indices = chosen if execution.shard else world.share(chosen)
    forecaster.model.eval()
    errors = []
    for batch in indices.split(max(1, 64 // windows.spec.horizon)) if len(indices) else ():  # a process may have none
        history, future = (tensor.to(world.device) for tensor in windows.batch(batch))
        with torch.no_grad():
            frames = rollout(forecaster, history, windows.spec.horizon, times=windows.frame_times(batch)).frames
        fluid = forecaster.fluid_points(history)
        if fluid is not None:
            frames, future = zero_in_solid(frames, fluid), zero_in_solid(future, fluid)
        measure = _energies if check == "rmse" else _relative_errors
        errors.append(measure(forecaster.targets, frames, future))
    empty = torch.zeros((0, 2) if check == "rmse" else (0,), dtype=torch.float64, device=world.device)
    local = torch.cat(errors) if errors else empty
    gathered = local if execution.shard else world.gather(local, len(chosen))
    if check == "rmse":
        error, truth = gathered.sum(0)
        return float((error / truth).sqrt())
    return float(gathered.mean())


def _energies(normaliser: Normaliser, predicted: torch.Tensor, true: torch.Tensor) -> torch.Tensor:
    """Sums of squares of the error and of the truth, for an RMSE over windows: (B, 2); see `validate`."""
    if normaliser.transforms:
        predicted, true = normaliser.encode_forecast(predicted), normaliser.encode(true)
    predicted, true = torch.nan_to_num(predicted.double(), nan=torch.inf), true.double()
    return torch.stack([frames.square().flatten(1).sum(1) for frames in (predicted - true, true)], dim=1)


def _relative_errors(normaliser: Normaliser, predicted: torch.Tensor, true: torch.Tensor) -> torch.Tensor:
    """Relative L2 error of each window: (B,); see `validate`."""
    if not normaliser.transforms:
        return metrics.relative_l2(predicted, true).mean(1)
    encoded = normaliser.encode(true)
    varies = ~metrics.is_constant(encoded).all(1)  # false for a species below the floor everywhere
    errors = metrics.relative_l2(normaliser.encode_forecast(predicted), encoded)
    return torch.where(varies, errors, 0.0).sum(1) / varies.sum(1)


def _save(run: Run, forecaster: Forecaster, step: int, steps: int, fingerprint: str, world: World) -> None:
    weights = {name: full(tensor) for name, tensor in forecaster.model.state_dict().items()}
    if world.first:
        save(run, weights, step, steps, fingerprint)


def _read_losses(losses: torch.Tensor, last: int, plan: StepPlan, world: World) -> float:
    """Return the mean of the losses up to step `last`; raise ValueError if one is not finite, before it is logged."""
    values = world.mean(losses)
    finite = torch.isfinite(values)
    if not bool(finite.all()):
        step = last - len(losses) + 1 + int((~finite).int().argmax())
        raise ValueError(
            f"The loss of step {step + 1} is not finite, in windows {plan.members(step).tolist()}; check them for "
            "NaN and for a field that is zero throughout a window (then set train.loss=squared), or lower train.lr "
            "or set train.clip, and train in a new folder."
        )
    return float(values.mean())


class _State:
    """Everything the next step depends on, saved in one file and restored from it if it exists."""

    def __init__(self, run: Run, stepper: Stepper, steps: int, world: World) -> None:
        self.run, self.stepper, self.steps, self.world = run, stepper, steps, world
        self.step, self.best, self.error = 0, math.inf, None
        if run.resume.exists():
            self._restore()
        rows = [row for row in run.read_log() if row["step"] <= self.step]
        self.error = next((row["error"] for row in reversed(rows) if "error" in row), None)
        if world.first and run.log.exists():
            replace_rows(run.log, rows)  # rows logged after the state was saved will be computed again
        world.wait()

    step: int
    best: float
    error: float | None

    def keep(self, step: int) -> None:
        stepper = self.stepper
        tensors = {f"model.{name}": full(tensor) for name, tensor in stepper.model.state_dict().items()}
        numbers: dict[str, int | float | bool] = {}
        for index, state in stepper.optimiser.state_dict()["state"].items():
            for key, value in state.items():
                name = f"{index}.{key}"
                if isinstance(value, torch.Tensor):
                    tensors[f"optimiser.{name}"] = full(value)
                elif isinstance(value, int | float):
                    numbers[name] = value
                else:
                    raise ValueError(
                        f"The optimiser {stepper.recipe.train.optimiser} keeps {key} as {type(value).__name__}, which "
                        "cannot be restored on resume; keep only tensors and numbers in its state."
                    )
        if stepper.average is not None:
            tensors |= {f"average.{name}": tensor for name, tensor in stepper.average.state_dict().items()}
        if self.world.first:
            best = None if math.isinf(self.best) else self.best
            facts = {"step": step, "steps": self.steps, "best": best}
            write_tensors(self.run.resume, tensors, {**facts, "numbers": numbers} if numbers else facts)

    def _restore(self) -> None:
        stepper = self.stepper
        tensors, facts = read_tensors(self.run.resume)
        if facts["steps"] != self.steps:
            raise ValueError(
                f"{self.run.path} was started with {facts['steps']} steps, but its data and recipe now give "
                f"{self.steps}; resume with the same data, or choose another folder."
            )
        numbers = facts.get("numbers", {})
        if not self._complete(tensors, numbers) or not isinstance(facts["best"], float | int | None):
            raise ValueError(
                f"{self.run.resume} is not a complete state of this model; copy it again, or restart the run."
            )
        _load(stepper.model, _with_prefix(tensors, "model."))
        if stepper.average is not None:
            _load(stepper.average, _with_prefix(tensors, "average."))
        states: dict[int, dict[str, Any]] = {}
        for name, tensor in _with_prefix(tensors, "optimiser.").items():
            index, _, key = name.partition(".")
            like = stepper.trainable[int(index)]
            sharded = tensor.shape == like.shape and tensor.ndim > 0
            states.setdefault(int(index), {})[key] = _shard_like(tensor, like) if sharded else tensor
        for name, number in numbers.items():
            index, _, key = name.partition(".")
            states.setdefault(int(index), {})[key] = number
        groups = stepper.optimiser.state_dict()["param_groups"]
        stepper.optimiser.load_state_dict({"state": states, "param_groups": groups})
        # Loading replaced the tensor of the learning rate, but a captured step reads the original one.
        set_rate(stepper.optimiser, stepper.rate)
        self.step = int(facts["step"])
        self.best = math.inf if facts["best"] is None else facts["best"]

    def _complete(self, tensors: dict[str, torch.Tensor], numbers: object) -> bool:
        """Whether the tensors of model, average and optimiser are complete, by name and shape."""
        stepper = self.stepper
        shapes = {str(index): parameter.shape for index, parameter in enumerate(stepper.trainable)}
        is_adamw = stepper.recipe.train.optimiser == "adamw"  # other optimisers may have state of any shape, or none
        states: dict[str, set[str]] = {}
        for name, tensor in _with_prefix(tensors, "optimiser.").items():
            index, _, key = name.partition(".")
            if index not in shapes or (is_adamw and tensor.shape not in (torch.Size(()), shapes[index])):
                return False
            states.setdefault(index, set()).add(key)
        consistent = not is_adamw or len(set(map(frozenset, states.values()))) == 1
        if not isinstance(numbers, dict) or any(
            name.partition(".")[0] not in shapes or not isinstance(number, int | float)
            for name, number in numbers.items()
        ):
            return False
        average_fits = stepper.average is None or _fits(stepper.average, _with_prefix(tensors, "average."))
        return consistent and average_fits and _fits(stepper.model, _with_prefix(tensors, "model."))


def _with_prefix(tensors: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _fits(model: nn.Module, weights: dict[str, torch.Tensor]) -> bool:
    return {name: t.shape for name, t in model.state_dict().items()} == {name: t.shape for name, t in weights.items()}


def _load(model: nn.Module, weights: dict[str, torch.Tensor]) -> None:
    current = model.state_dict()
    model.load_state_dict({name: _shard_like(tensor, current[name]) for name, tensor in weights.items()})


def _shard_like(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Shard the tensor among the processes like `like`."""
    mesh = getattr(like, "device_mesh", None)
    if mesh is None:
        return tensor
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(like, DTensor)
    return distribute_tensor(tensor.to(like.device), mesh, like.placements)
