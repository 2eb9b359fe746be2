"""The only training loop: AdamW over one cycle, killed at any moment and continued to the same weights.

Which windows a step sees, how fast it learns and what is random in it are functions of the seed and the step, so a run
resumes from one file that holds weights, optimiser, average and the step. On a CPU the weights that come out are bit
for bit those of an uninterrupted run. Losses stay on the device and are read every `look` steps.
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

from sigmasolver.data.mask import fluid_of, zero_in_solid
from sigmasolver.data.normalise import Normaliser
from sigmasolver.data.windows import Windows, spread_evenly
from sigmasolver.evaluate import metrics
from sigmasolver.forecast import Forecaster, rollout
from sigmasolver.forecast.checkpoint import begin, save
from sigmasolver.recipes import Recipe
from sigmasolver.runs import Run, append_row, read_tensors, replace_rows, write_tensors
from sigmasolver.runtime.parallel import World
from sigmasolver.seeds import hashed_seed
from sigmasolver.train.engine import Execution, Stepper, full
from sigmasolver.train.optimisers import OneCycle, set_rate

__all__ = ["Data", "Progress", "StepPlan", "order", "train", "validate"]

MOST_STEPS = 10**9
"""Years of training; the learning rates of more steps fit no memory."""
CHECKED = 256
"""Windows that one validation looks at, at most: evenly spread over all."""


@dataclass(frozen=True)
class Data:
    """What a run learns from and is checked with."""

    training: Windows
    validation: Windows | None
    fingerprint: str


@dataclass(frozen=True)
class Progress:
    """How far a run is, each time its losses are read."""

    step: int
    steps: int
    loss: float
    """Mean since the last look."""
    error: float | None
    """Of the validation windows at the newest check, see `validate`."""
    rate: float
    """The learning rate of the last step."""
    steps_per_second: float


@lru_cache(maxsize=2)
def order(seed: int, epoch: int, trajectories: int, starts: int, one_start: bool = False) -> torch.Tensor:
    """The windows of this epoch in their order: all of them, or one random start of each trajectory."""
    generator = torch.Generator().manual_seed(hashed_seed(f"order/{seed}/{epoch}"))
    if not one_start:
        return torch.randperm(trajectories * starts, generator=generator)
    first = torch.randperm(trajectories, generator=generator) * starts
    return first + torch.randint(starts, (trajectories,), generator=generator)


class StepPlan:
    """The steps of a run: how many, which windows each sees, and when the run is checked."""

    def __init__(self, recipe: Recipe, windows: Windows) -> None:
        train = recipe.train
        # Listed windows are in no order that their trajectory would tell.
        regular = windows.starts is not None
        self.train, self.starts = train, 1 if windows.starts is None else windows.starts
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
        if self.steps > MOST_STEPS:
            raise ValueError(
                f"The training has {self.steps:,} steps, but the maximum is {MOST_STEPS:,}; lower train.updates or "
                "train.epochs."
            )
        checks = min(train.checks, self.steps)  # more of them than steps is one after every step
        self.checks = {round(k * self.steps / checks) for k in range(1, checks + 1)}

    def members(self, step: int) -> torch.Tensor:
        """The windows of this step (counted from 0)."""
        epoch, inside = divmod(step, self.per_epoch)
        windows = order(self.train.seed, epoch, self.trajectories, self.starts, self.train.one_start)
        members = windows[inside * self.train.batch : (inside + 1) * self.train.batch]
        if self.train.shared_start:  # a random one: that of the first
            members = members - members % self.starts + members[0] % self.starts
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
    """Train `forecaster` and leave the run folder behind; continues a run that was stopped.

    Every `look` steps the losses are read and a row is logged; the state is kept at the first look after every
    `keep_seconds`, and at the end. Once `stop()` is true the state is kept and the loop returns, unfinished.
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
    kept = looked = began
    for step in range(state.step, plan.steps):
        stepper.run(step)
        losses.append(stepper.loss.clone())
        done = step + 1
        # A slow step must not put off the saving; several processes would have to agree at every step, and do not.
        stopping = stop is not None and stop()
        early = world.size == 1 and (stopping or time.monotonic() - looked > keep_seconds > 0)
        if done % look and not early and done not in plan.checks and done != plan.steps:
            continue
        looked = time.monotonic()
        mean = _read_losses(torch.stack(losses), step, plan, world)
        losses.clear()
        row: dict[str, Any] = {"step": done, "epoch": step // plan.per_epoch, "loss": mean}
        row["rate"] = float(stepper.rates[step])
        row["seconds"] = time.monotonic() - began
        row["steps_per_second"] = (done - start) / row["seconds"]
        better = False
        if done in plan.checks and data.validation is not None:
            row["error"] = state.error = validate(
                stepper.forecaster if execution.shard else forecaster.around(stepper.kept),
                data.validation,
                execution,
                recipe.train.check,
            )
            better = not state.error >= state.best
            forecaster.model.train()
        if world.first:
            append_row(run.log, row)  # before the state: what a kill leaves beyond the state is dropped at the resume
        if better and recipe.train.keep == "best":  # before the state, which says that these weights are kept
            state.best = row["error"]
            _save(run, forecaster.around(stepper.kept), done, plan.steps, data.fingerprint, world)
        if world.agreed(stopping or done == plan.steps or time.monotonic() - kept >= keep_seconds):
            state.keep(done)
            kept = time.monotonic()
        if world.first and watch is not None:
            watch(Progress(done, plan.steps, mean, state.error, row["rate"], row["steps_per_second"]))
        if done < plan.steps and stop is not None and world.agreed(stopping):
            return
    # After log and state, because weights of the last step say that the run is finished.
    if recipe.train.keep == "final" or not run.weights.exists():
        _save(run, forecaster.around(stepper.kept), plan.steps, plan.steps, data.fingerprint, world)
    world.wait()  # until the first process has written what the others will read
    forecaster.model.eval()
    if stepper.average is not None:
        forecaster.model.load_state_dict(stepper.average.state_dict())


def validate(forecaster: Forecaster, windows: Windows, execution: Execution, check: str = "relative_l2") -> float:
    """Mean relative L2 over the whole horizon of free rollouts, fields averaged; at most CHECKED windows. Or RMSE, as
    `TrainRecipe.check` says, of all windows, since outliers decide it.

    Where mass fractions are transformed, of normalised fields, because traces of a species would outweigh all others;
    and without fields that are constant in truth, which have no relative error.
    """
    world = execution.world
    chosen = spread_evenly(len(windows), None if check == "rmse" else CHECKED)
    # A split model needs every process in every call, so there each of them does all windows.
    mine = chosen if execution.shard else world.share(chosen)
    forecaster.model.eval()
    errors = []
    for part in mine.split(max(1, 64 // windows.spec.horizon)) if len(mine) else ():  # there may be more processes
        history, future = (one.to(world.device) for one in windows.batch(part))
        with torch.no_grad():
            frames = rollout(forecaster, history, windows.spec.horizon, times=windows.frame_times(part)).frames
        if forecaster.mask is not None:
            fluid = fluid_of(history, forecaster.inputs.fields.index(forecaster.mask))
            frames, future = zero_in_solid(frames, fluid), zero_in_solid(future, fluid)
        measured = _energies if check == "rmse" else _relative_errors
        errors.append(measured(forecaster.targets, frames, future))
    empty = torch.zeros((0, 2) if check == "rmse" else (0,), dtype=torch.float64, device=world.device)
    local = torch.cat(errors) if errors else empty
    gathered = local if execution.shard else world.gather(local, len(chosen))
    if check == "rmse":
        error, truth = gathered.sum(0)
        return float((error / truth).sqrt())
    return float(gathered.mean())


def _energies(normaliser: Normaliser, predicted: torch.Tensor, true: torch.Tensor) -> torch.Tensor:
    """(B, 2): sums of squares of the error and of the truth, for an RMSE over windows; see `validate`."""
    if normaliser.transforms:
        predicted, true = normaliser.encode_forecast(predicted), normaliser.encode(true)
    predicted, true = torch.nan_to_num(predicted.double(), nan=torch.inf), true.double()
    return torch.stack([frames.square().flatten(1).sum(1) for frames in (predicted - true, true)], dim=1)


def _relative_errors(normaliser: Normaliser, predicted: torch.Tensor, true: torch.Tensor) -> torch.Tensor:
    """(B,): see `validate`."""
    if not normaliser.transforms:
        return metrics.relative_l2(predicted, true).mean(1)
    known = normaliser.encode(true)
    varies = ~metrics.is_constant(known).all(1)  # a species below the floor everywhere does not
    errors = metrics.relative_l2(normaliser.encode_forecast(predicted), known)
    return torch.where(varies, errors, 0.0).sum(1) / varies.sum(1)


def _save(run: Run, forecaster: Forecaster, step: int, steps: int, fingerprint: str, world: World) -> None:
    weights = {name: full(tensor) for name, tensor in forecaster.model.state_dict().items()}
    if world.first:
        save(run, weights, step, steps, fingerprint)


def _read_losses(losses: torch.Tensor, last: int, plan: StepPlan, world: World) -> float:
    """The mean of the losses up to step `last`; one that is not finite ends the run before it is kept."""
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
    """Everything the next step depends on, kept in one file and taken from it where there is one."""

    def __init__(self, run: Run, stepper: Stepper, steps: int, world: World) -> None:
        self.run, self.stepper, self.steps, self.world = run, stepper, steps, world
        self.step, self.best, self.error = 0, math.inf, None
        if run.resume.exists():
            self._restore()
        rows = [row for row in run.read_log() if row["step"] <= self.step]
        self.error = next((row["error"] for row in reversed(rows) if "error" in row), None)
        if world.first and run.log.exists():
            replace_rows(run.log, rows)  # what was logged after the state was kept will be recomputed
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
        _load(stepper.model, _part(tensors, "model."))
        if stepper.average is not None:
            _load(stepper.average, _part(tensors, "average."))
        states: dict[int, dict[str, Any]] = {}
        for name, tensor in _part(tensors, "optimiser.").items():
            index, _, key = name.partition(".")
            like = stepper.learning[int(index)]
            split = tensor.shape == like.shape and tensor.ndim > 0
            states.setdefault(int(index), {})[key] = _split_like(tensor, like) if split else tensor
        for name, number in numbers.items():
            index, _, key = name.partition(".")
            states.setdefault(int(index), {})[key] = number
        groups = stepper.optimiser.state_dict()["param_groups"]
        stepper.optimiser.load_state_dict({"state": states, "param_groups": groups})
        # Loading replaced the rate, which a captured step must find where it was.
        set_rate(stepper.optimiser, stepper.rate)
        self.step = int(facts["step"])
        self.best = math.inf if facts["best"] is None else facts["best"]

    def _complete(self, tensors: dict[str, torch.Tensor], numbers: object) -> bool:
        """Whether these are all tensors of the model, of its average and of the optimiser, by name and shape."""
        stepper = self.stepper
        shapes = {str(index): one.shape for index, one in enumerate(stepper.learning)}
        known = stepper.recipe.train.optimiser == "adamw"  # others may keep tensors of any shape, or none
        states: dict[str, set[str]] = {}
        for name, tensor in _part(tensors, "optimiser.").items():
            index, _, key = name.partition(".")
            if index not in shapes or (known and tensor.shape not in (torch.Size(()), shapes[index])):
                return False
            states.setdefault(index, set()).add(key)
        alike = not known or len(set(map(frozenset, states.values()))) == 1
        if not isinstance(numbers, dict) or any(
            name.partition(".")[0] not in shapes or not isinstance(number, int | float)
            for name, number in numbers.items()
        ):
            return False
        averaged = stepper.average is None or _fits(stepper.average, _part(tensors, "average."))
        return alike and averaged and _fits(stepper.model, _part(tensors, "model."))


def _part(tensors: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _fits(model: nn.Module, weights: dict[str, torch.Tensor]) -> bool:
    return {name: t.shape for name, t in model.state_dict().items()} == {name: t.shape for name, t in weights.items()}


def _load(model: nn.Module, weights: dict[str, torch.Tensor]) -> None:
    own = model.state_dict()
    model.load_state_dict({name: _split_like(tensor, own[name]) for name, tensor in weights.items()})


def _split_like(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The tensor split among the processes as `like` is."""
    mesh = getattr(like, "device_mesh", None)
    if mesh is None:
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor.to(like.device), mesh, like.placements)  # type: ignore[attr-defined]
