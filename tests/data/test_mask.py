"""Solid masks: statistics, losses and metrics use only fluid points, and a solid keeps its values."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from sigmasolver.data.header import Header
from sigmasolver.data.layout import Layout
from sigmasolver.data.mask import check_mask
from sigmasolver.data.normalise import Normaliser, fit
from sigmasolver.data.store import write_store
from sigmasolver.data.windows import Windows, WindowSpec
from sigmasolver.evaluate import Request, evaluate_run, measure
from sigmasolver.forecast import Forecaster, rollout
from sigmasolver.forecast.checkpoint import load
from sigmasolver.recipes import changed
from sigmasolver.runs import Run, read_tensors
from sigmasolver.runtime.parallel import World
from sigmasolver.tasks import Task
from sigmasolver.train.engine import _with_noise
from sigmasolver.train.infer_recipe import UserChoices, infer_recipe
from sigmasolver.train.job import train_run
from sigmasolver.train.objectives import Loss, direct, pushforward, teacher_forced

GRID, FIELDS = (6, 5), ("u", "v")
TINY = ["model.width=16", "model.depth=1", "model.heads=2", "model.slices=4", "model.modes=2", "train.updates=3"]


class Memory:
    """An in-memory source of trajectories with a mask field."""

    def __init__(self, values: np.ndarray) -> None:
        names, axes = (*FIELDS, "solid"), tuple(np.arange(n, dtype=float) for n in GRID)
        times = np.arange(values.shape[1], dtype=float)
        self.values = values
        self.header = Header(Layout(names, ("1",) * 3, ("wall",) * 2, axes, times), "test", {})

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> np.ndarray:
        return self.values[index]


def flows(solids: bool, count: int = 4, frames: int = 7) -> np.ndarray:
    """Random u and v, large in the solid, whose position differs between trajectories."""
    rng = np.random.default_rng(1)
    values = rng.normal(size=(count, frames, *GRID, 3)).astype(np.float32)
    values[..., 2] = (rng.random((count, 1, *GRID)) < 0.4) * solids
    inside = values[..., 2] == 1
    values[..., :2][inside] = values[:, :1, ..., :2].repeat(frames, 1)[inside] * 100
    return values


class Blur(nn.Module):
    """A stand-in for a network that mixes neighbours and channels."""

    def __init__(self, outputs: int = 2) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.1, 0.9, outputs, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = (x.sum(-1) + 0.3 * x[..., 0].roll(1, 1)).sin()
        return mixed[..., None] * self.weight.to(x)


def plain(fields=FIELDS) -> Normaliser:
    q = len(fields)
    return Normaliser("none", tuple(fields), torch.zeros(q, dtype=torch.float64), torch.ones(q, dtype=torch.float64))


def forecaster(mask="solid") -> Forecaster:
    return Forecaster(Blur(), plain((*FIELDS, "solid")), plain(), 1, mask=mask)


def pair(solids=True, horizon=3):
    values = torch.from_numpy(flows(solids)).double()
    return values[:, :2], values[:, 2 : 2 + horizon, ..., :2]


def by_hand(predicted, true, solid, function) -> torch.Tensor:
    """`function` of the predicted and true fluid values of each sample and field: (B, q)."""
    rows = []
    for b in range(len(true)):
        fluid = [(i, j) for i in range(GRID[0]) for j in range(GRID[1]) if solid[b, i, j] == 0]
        rows.append(
            [
                function(
                    *(
                        [tensor[b, t, i, j, q].item() for t in range(true.shape[1]) for i, j in fluid]
                        for tensor in (predicted, true)
                    )
                )
                for q in range(true.shape[-1])
            ]
        )
    return torch.tensor(rows, dtype=torch.float64)


def relative(p, y):
    return math.sqrt(math.fsum((a - b) ** 2 for a, b in zip(p, y, strict=True)) / math.fsum(b * b for b in y))


def mean_square(p, y):
    return math.fsum((a - b) ** 2 for a, b in zip(p, y, strict=True)) / len(y)


# --- the loss


@pytest.mark.parametrize(("normaliser", "definition"), [(None, relative), (plain(), mean_square)])
def test_masked_loss_equals_plain_loss_over_the_fluid(normaliser, definition):
    history, future = pair()
    predicted = torch.randn_like(future)
    loss = Loss(((0,), (1,)), normaliser=normaliser, mask=2)(predicted, future, history)
    expected = by_hand(predicted, future, history[:, 0, ..., 2], definition).sum(1)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("loss", [{}, {"normaliser": plain()}, {"derivative": 0.3}])
def test_masked_loss_ignores_solid_values_and_their_gradients(loss):
    history, future = pair()
    solid = history[:, :1, ..., 2:] == 1
    predicted = torch.randn_like(future).requires_grad_()
    criterion = Loss(((0, 1),), mask=2, **loss)
    value = criterion(predicted, future, history)
    value.sum().backward()
    assert not predicted.grad[solid.expand_as(predicted)].any() and predicted.grad.any()
    other = criterion(torch.where(solid, torch.full_like(predicted, 1e9), predicted), future * (1 + solid), history)
    assert torch.equal(value, other)


@pytest.mark.parametrize("objective", [direct, teacher_forced, lambda *a: pushforward(*a, calls=2)])
@pytest.mark.parametrize("loss", [{}, {"normaliser": plain()}, {"derivative": 0.3}])
def test_mask_without_solid_does_not_change_a_training_step(objective, loss):
    history, future = pair(solids=False)
    results = []
    for mask in (None, "solid"):
        model = forecaster(mask)
        value = objective(model, history, future, Loss(((0, 1),), mask=None if mask is None else 2, **loss))
        value.backward()
        results.append((value, model.model.weight.grad))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


def test_teacher_forcing_with_mask_equals_direct_steps():
    """Teacher forcing is the sum of direct steps from the true frames."""
    (history, future), model, loss = pair(), forecaster(), Loss(((0, 1),), mask=2)
    total = teacher_forced(model, history, future, loss)
    frames, single = history, []
    for t in range(future.shape[1]):
        single.append(direct(model, frames, future[:, t : t + 1], loss))
        true = torch.cat((future[:, t : t + 1], history[:, :1, ..., 2:]), dim=-1)
        frames = torch.cat((frames[:, 1:], true), dim=1)
    torch.testing.assert_close(total, torch.stack(single).sum(), rtol=1e-12, atol=0)


# --- statistics and forecasts


@pytest.mark.parametrize("kind", ["channel", "scalar", "temporal", "trajectory", "none"])
def test_fit_with_mask_uses_only_the_fluid(kind):
    values = flows(True)
    spec = WindowSpec((*FIELDS, "solid"), FIELDS, 2, 1)
    normaliser, _ = fit(kind, Windows(Memory(values), range(4), spec), "solid")
    if kind == "channel":
        fluid = values.astype(np.float64)[values[..., 2] == 0]
        np.testing.assert_allclose(normaliser.mean[:2], fluid.mean(0)[:2], rtol=1e-12)
        np.testing.assert_allclose(normaliser.scale[:2], fluid.std(0)[:2], rtol=1e-12)
    wild = values.copy()
    wild[..., :2][values[..., 2] == 1] *= 7
    other, _ = fit(kind, Windows(Memory(wild), range(4), spec), "solid")
    assert torch.equal(normaliser.mean, other.mean) and torch.equal(normaliser.scale, other.scale)
    assert (normaliser.mean[2], normaliser.scale[2]) == (0, 1), "the mask is not normalised"
    clear = Windows(Memory(flows(False)), range(4), spec)
    for masked, unmasked in zip(fit(kind, clear, "solid"), fit(kind, clear), strict=True):
        assert torch.equal(masked.mean, unmasked.mean) and torch.equal(masked.scale, unmasked.scale)


def test_rollout_with_mask_keeps_the_solid_values_of_the_history():
    history, _ = pair()
    frames = rollout(forecaster(), history, 5).frames
    solid = (history[:, :1, ..., 2:] == 1).expand_as(frames)
    assert torch.equal(frames[solid], history[:, -1:, ..., :2].expand_as(frames)[solid]) and solid.any()
    free = rollout(forecaster(None), history, 1).frames
    assert torch.equal(frames[:, :1][~solid[:, :1]], free[~solid[:, :1]])


def test_steady_forecast_with_mask_is_zero_in_the_solid():
    history, _ = pair()
    model = Forecaster(Blur(1), plain((*FIELDS, "solid")), plain(("p",)), 1, mask="solid")
    frames = model(history[:, -1:])
    solid = history[:, -1:, ..., 2:] == 1
    assert not frames[solid].any() and frames[~solid].all()


def test_noise_does_not_change_the_mask():
    history, _ = pair()
    noisy = _with_noise(history, plain((*FIELDS, "solid")), 0.5, 2)
    assert torch.equal(noisy[..., 2], history[..., 2]) and (noisy[..., :2] != history[..., :2]).all()


# --- metrics


def test_masked_metrics_equal_plain_metrics_over_the_fluid():
    windows = Windows(
        Memory(flows(True)), range(4), WindowSpec((*FIELDS, "solid"), FIELDS, 2, 3, windows_per_trajectory=1)
    )
    forecast, persistence = measure(forecaster(), windows, Request(batch=3), World())
    history, future = windows.batch(range(4))
    frames = rollout(forecaster(), history, 3).frames
    solid = history[:, 0, ..., 2]
    for measures, predicted in ((forecast, frames), (persistence, history[:, -1:, ..., :2].expand_as(future))):
        expected = by_hand(predicted, future, solid, relative)
        torch.testing.assert_close(measures["relative_l2"], expected, rtol=1e-12, atol=0)
        squared = by_hand(predicted, future, solid, mean_square)
        torch.testing.assert_close(measures["squared"].mean(1), squared, rtol=1e-12, atol=0)
        last = by_hand(predicted[:, -1:], future[:, -1:], solid, lambda p, y: float(np.corrcoef(p, y)[0, 1]))
        torch.testing.assert_close(measures["correlation_lead"][:, -1], last, rtol=1e-9, atol=1e-12)


def test_mask_without_solid_does_not_change_metrics():
    windows = Windows(Memory(flows(False)), range(4), WindowSpec((*FIELDS, "solid"), FIELDS, 2, 3))
    with_mask, without = (measure(forecaster(mask), windows, Request(), World()) for mask in ("solid", None))
    for masked, unmasked in zip(with_mask, without, strict=True):
        assert masked.keys() == unmasked.keys() and all(torch.equal(masked[name], unmasked[name]) for name in masked)


# --- full trainings


def store(path, values):
    memory = Memory(values)
    write_store(path, memory.header, values)
    return path, memory.header


def trained(folder, values, settings=(), mask="solid"):
    path, header = store(folder / "flows.h5", values)
    recipe, _ = infer_recipe(header, len(values), UserChoices("flows", targets=FIELDS, history=2, mask=mask), False)
    recipe = changed(recipe, [*TINY, "task.horizon=2", "task.block=1", *settings])
    train_run(recipe, path, Run(folder / "run"))
    return Run(folder / "run"), recipe


@pytest.mark.parametrize("settings", [[], ["train.loss=squared", "train.recompute=true"]])
def test_mask_without_solid_does_not_change_a_training(tmp_path, settings):
    rows, weights = [], []
    for mask in ("solid", None):
        (tmp_path / str(mask)).mkdir()
        run, recipe = trained(tmp_path / str(mask), flows(False, 6), settings, mask)
        assert recipe.task.mask == mask and recipe.task.inputs == ("u", "v", "solid")
        weights.append(read_tensors(run.weights)[0])
        rows.append(
            [(row["model"], row["metric"], row["field"], row["lead"], row["value"]) for row in evaluate_run(run)]
        )
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert rows[0] == rows[1]


def test_mask_is_restored_from_a_run(tmp_path):
    values = flows(True, 6)
    values[..., :2][values[..., 2] == 1] = 0
    run, _ = trained(tmp_path, values)
    frames = load(run.path).rollout(values[:2, :2], 4).frames
    assert not frames[torch.from_numpy(values[:2, :1, ..., 2:] == 1).expand_as(frames)].any()
    records = {
        (row["model"], row["field"]): row["value"] for row in evaluate_run(run) if row["metric"] == "relative_l2"
    }
    assert all(value > 0 for value in records.values())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda mask: mask.fill_(0.5), "must contain only 0"),
        (lambda mask: mask[3, 0, 0].sub_(1).abs_(), "changes in time"),
        (lambda mask: mask.fill_(1), "no fluid"),
    ],
)
def test_check_mask_errors(change, message):
    values = torch.from_numpy(flows(True)[0])
    change(values[..., 2])
    with pytest.raises(ValueError, match=message) as caught:
        check_mask(values, 2, "solid", 3)
    assert "\n" not in str(caught.value) and str(caught.value).endswith(".")


def test_task_mask_must_be_an_input_that_is_not_predicted():
    with pytest.raises(ValueError, match="mask u of flow must be an input that is not predicted; choose from none"):
        Task("flow", ("u",), ("u",), (8,), 1, 1, 1, 1, 1, "channel", mask="u")
    with pytest.raises(ValueError, match="which a solid does not have"):
        Task("flow", ("u", "s"), ("u",), (8,), 1, 1, 1, 1, 1, "pixel", mask="s")
