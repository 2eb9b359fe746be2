"""The only training loop: AdamW over one cycle, killed at any moment and continued to the same weights.

Which windows a step sees and how fast it learns are functions of the seed and the step, so a run resumes from one file
that holds weights, optimiser, random numbers and the step. On a CPU the weights that come out are bit for bit those
of an uninterrupted run. Losses stay on the device and are read every `look` steps.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial

import torch

from sigmasolver.data.windows import Windows
from sigmasolver.forecast import Forecaster
from sigmasolver.recipes import Recipe
from sigmasolver.runs import Run, append_row, read_tensors, write_tensors
from sigmasolver.tasks import field_groups
from sigmasolver.train.objectives import Price, direct, pushforward, teacher_forced
from sigmasolver.train.schedule import OneCycle
from sigmasolver.trained import save

__all__ = ["Progress", "order", "train"]


@dataclass(frozen=True)
class Progress:
    """How far a run is, each time its losses are read."""

    step: int
    steps: int
    loss: float
    """Mean since the last look."""


@lru_cache(maxsize=2)
def order(seed: int, epoch: int, count: int) -> torch.Tensor:
    """The windows 0 ... count - 1 in the order of this epoch."""
    digest = hashlib.sha256(f"order/{seed}/{epoch}".encode()).digest()
    return torch.randperm(count, generator=torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1))


def train(
    recipe: Recipe,
    windows: Windows,
    forecaster: Forecaster,
    run: Run,
    fingerprint: str,
    look: int = 50,
    watch: Callable[[Progress], None] | None = None,
) -> None:
    """Train `forecaster` on these windows and leave the run folder behind; continues a run that was stopped.

    `fingerprint` names the data. Every `look` steps the losses are read, a row is logged and the state is saved.
    """
    plan, model = recipe.train, forecaster.model
    run.start(recipe.to_plain())
    batch = min(plan.batch, len(windows))
    per_epoch = len(windows) // batch
    steps = plan.epochs * per_epoch
    cycle = OneCycle(plan.peak, steps, plan.warmup, plan.start_divisor, plan.final_divisor)
    price = Price(field_groups(recipe.task.targets), plan.derivative)
    objectives: dict[str, Callable[..., torch.Tensor]] = {
        "direct": direct,
        "teacher_forced": teacher_forced,
        "pushforward": partial(pushforward, calls=plan.calls),
    }
    objective = objectives[plan.objective]
    optimiser = torch.optim.AdamW(model.parameters(), lr=plan.peak, weight_decay=plan.weight_decay)
    device = next(model.parameters()).device
    first = _restore(run, model, optimiser) if run.resume.exists() else 0
    losses: list[torch.Tensor] = []

    def members(step: int) -> torch.Tensor:
        epoch, inside = divmod(step, per_epoch)
        return order(plan.seed, epoch, len(windows))[inside * batch : (inside + 1) * batch]

    # TF32 is torch's own global switch; bf16 runs its float32 remainder in TF32 too.
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = plan.precision != "float32"
    model.train()
    began, start = time.monotonic(), first
    for step in range(first, steps):
        history, future = (part.to(device) for part in windows.batch(members(step)))
        for group in optimiser.param_groups:
            group["lr"] = float(cycle.rate(step))
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=plan.precision == "bf16"):
            loss = objective(forecaster, history, future, price)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        if plan.clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), plan.clip)
        optimiser.step()
        losses.append(loss.detach())
        if (step + 1) % look == 0 or step + 1 == steps:
            mean = _read_losses(losses, step, members)
            rate = (step + 1 - start) / (time.monotonic() - began)
            _keep(run, model, optimiser, step + 1)  # before the row: a kill between them never repeats a row
            append_row(run.log, {"step": step + 1, "epoch": step // per_epoch, "loss": mean, "steps_per_second": rate})
            losses.clear()
            if watch is not None:
                watch(Progress(step + 1, steps, mean))
    model.eval()
    save(run, forecaster, steps, fingerprint)


def _read_losses(losses: list[torch.Tensor], last: int, members: Callable[[int], torch.Tensor]) -> float:
    """The mean of the losses up to step `last`; one that is not finite ends the run before it is saved."""
    values = torch.stack(losses)
    finite = torch.isfinite(values)
    if not bool(finite.all()):
        step = last - len(losses) + 1 + int((~finite).int().argmax())
        raise ValueError(
            f"The loss of step {step} is not finite, in the windows {members(step).tolist()}; look for NaN in them, "
            "lower the peak learning rate or set clip, and go on from the state that was kept."
        )
    return float(values.mean())


def _keep(run: Run, model: torch.nn.Module, optimiser: torch.optim.Optimizer, step: int) -> None:
    """Everything the next step depends on, in one file."""
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    for index, state in optimiser.state_dict()["state"].items():
        tensors |= {f"optimiser.{index}.{key}": torch.as_tensor(value) for key, value in state.items()}
    tensors["random"] = torch.get_rng_state()
    if torch.cuda.is_available():
        tensors["random_cuda"] = torch.cuda.get_rng_state()
    write_tensors(run.resume, tensors, {"step": step})


def _restore(run: Run, model: torch.nn.Module, optimiser: torch.optim.Optimizer) -> int:
    tensors, facts = read_tensors(run.resume)
    model.load_state_dict({name[6:]: t for name, t in tensors.items() if name.startswith("model.")})
    state: dict[int, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        if name.startswith("optimiser."):
            _, index, key = name.split(".")
            state.setdefault(int(index), {})[key] = tensor
    optimiser.load_state_dict({"state": state, "param_groups": optimiser.state_dict()["param_groups"]})
    torch.set_rng_state(tensors["random"])
    if "random_cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["random_cuda"])
    return int(facts["step"])
