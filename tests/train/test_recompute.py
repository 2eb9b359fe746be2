"""Blocks recomputed in the backward pass give bitwise identical gradients and store less."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import sigmasolver
from sigmasolver.models import Options, build_model
from sigmasolver.models.layers import draws_noise
from sigmasolver.recipes import ModelRecipe, Recipe, TrainRecipe, changed
from sigmasolver.runs import Run, read_tensors
from sigmasolver.runtime.parallel import World
from sigmasolver.simulate.generate import generate
from sigmasolver.simulate.vorticity import DEMO
from sigmasolver.tasks import Task
from sigmasolver.train.capture import WARM_UP
from sigmasolver.train.dry_run import DryRun
from sigmasolver.train.engine import ENGINES, Execution, recompute
from sigmasolver.train.job import train_run
from tests.train.saved import saved_bytes

ROOT = Path(sigmasolver.__file__).parents[1]
FLOW = replace(DEMO, grid=32, stored=16, step=1 / 64, burn_in=1.0, frames=8)
TASK = Task("tiny", ("vorticity",), ("vorticity",), (16, 16), 2, 1, 3, 6, 2, "channel")
MODEL = ModelRecipe(width=16, depth=2, heads=2, slices=4, modes=3)
RECIPE = Recipe(TASK, MODEL, TrainRecipe(updates=6, batch=4, seed=3, clip=1.0, checks=1))
MODELS = (
    "transolver-sigma",
    "specsolver",
    "physical-then-spectral",
    "grouped-mixing",
    "transolver",
    "linearno",
    "ffno",
    "drift-net",
    "transolver-plus",
    "rno",
    "factformer",
    "eddyformer",
)


def model_of(name, depth=2, dropout=0.0, grid=(12, 10), dtype=torch.float32):
    torch.manual_seed(0)
    sizes = {"width": 16, "depth": depth, "heads": 2, "slices": 4, "modes": 3}
    model = build_model(name, grid=grid, in_channels=2, out_channels=1, **sizes, options=Options(dropout=dropout))
    with torch.no_grad():  # with the initial gamma of zero, attention would have no effect
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.rand_like(parameter))
    return model.to(dtype).train()


def plain_and_recomputed(name, dropout=0.0, dtype=torch.float32):
    """Return a model and a copy of it with recomputed blocks."""
    plain = model_of(name, dropout=dropout, dtype=dtype)
    recomputing = copy.deepcopy(plain)
    recompute(recomputing, dropout > 0 or draws_noise(recomputing))
    return plain, recomputing


def gradients(model, autocast=False):
    dtype = next(model.parameters()).dtype
    x = torch.randn(2, 12, 10, 2, generator=torch.Generator().manual_seed(1), dtype=dtype)
    torch.manual_seed(2)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        model(x).square().mean().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}


def activation_bytes(model):
    """Bytes that a forward pass saves for its backward pass, each storage once, without the parameters."""
    return saved_bytes(lambda: model(torch.randn(2, 12, 10, 2)), model.parameters())


def equal(first, second):
    return set(first) == set(second) and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", MODELS)
def test_recompute_gradients_are_bitwise_identical(name, dtype):
    plain, recomputing = plain_and_recomputed(name, dtype=dtype)
    expected = gradients(plain)
    assert equal(expected, gradients(recomputing)) and all(bool(gradient.any()) for gradient in expected.values())
    assert list(plain.state_dict()) == list(recomputing.state_dict())


@pytest.mark.parametrize("name", ["transolver-sigma", "transolver", "linearno"])
def test_recompute_repeats_dropout(name):
    plain, recomputing = plain_and_recomputed(name, dropout=0.3)
    assert equal(gradients(plain), gradients(recomputing))
    without = gradients(model_of(name))
    assert not equal(gradients(plain), without), "dropout must have an effect"


def test_recompute_bf16_gradients_are_bitwise_identical():
    plain, recomputing = plain_and_recomputed("transolver-sigma")
    assert equal(gradients(plain, autocast=True), gradients(recomputing, autocast=True))


def test_recompute_stores_only_block_inputs():
    """Each block stores only its input, 2 x 12 x 10 points of 16 channels in four bytes; far more without recompute."""
    stream = 2 * 12 * 10 * 16 * 4
    models = {(depth, flag): model_of("transolver-sigma", depth) for depth in (2, 6) for flag in (False, True)}
    for (_, flag), model in models.items():
        if flag:
            recompute(model, False)
    bytes_of = {key: activation_bytes(model) for key, model in models.items()}
    assert bytes_of[6, True] - bytes_of[2, True] == 4 * stream
    assert bytes_of[6, False] - bytes_of[2, False] > 10 * 4 * stream


def test_recompute_is_off_without_gradients_and_idempotent():
    plain, recomputing = plain_and_recomputed("transolver-sigma")
    calls = []
    recomputing.blocks[0].norm.register_forward_hook(lambda *_: calls.append(1))
    x = torch.randn(1, 12, 10, 2)
    with torch.no_grad():
        assert torch.equal(plain(x), recomputing(x)) and len(calls) == 1
    recompute(recomputing, False)
    calls.clear()
    recomputing(x).sum().backward()
    assert len(calls) == 2


def test_recompute_copy_uses_its_own_weights():
    _, recomputing = plain_and_recomputed("transolver-sigma")
    other = copy.deepcopy(recomputing)
    with torch.no_grad():
        for parameter in other.blocks.parameters():
            parameter.zero_()
    x = torch.randn(1, 12, 10, 2)
    assert not torch.equal(recomputing(x), other(x))


@pytest.mark.parametrize(
    "settings",
    [(), ("train.objective=pushforward", "train.calls=2", "train.ema=0.9"), ("model.options.dropout=0.2",)],
)
def test_recompute_training_gives_identical_weights(settings, tmp_path):
    generate(FLOW, 8, 0, tmp_path / "flow.h5")
    recipe = changed(RECIPE, settings)
    for name, flag in (("plain", "false"), ("recomputed", "true")):
        train_run(changed(recipe, [f"train.recompute={flag}"]), tmp_path / "flow.h5", Run(tmp_path / name))
    assert equal(*(read_tensors(Run(tmp_path / name).weights)[0] for name in ("plain", "recomputed")))


def test_recompute_rejects_a_model_without_blocks():
    with pytest.raises(ValueError, match=r"^This model has no blocks to recompute; set train.recompute=false.$"):
        recompute(nn.Linear(2, 2), False)


def losses(engine, device, *settings):
    recipe = changed(RECIPE, settings)
    step = DryRun(recipe, Execution(World(device=torch.device(device)), engine))
    history = []
    for _ in range(2 * WARM_UP):
        step()
        history.append(step.loss.clone())
    return torch.stack(history).cpu()


@pytest.mark.slow
def test_recompute_compiled_parity_on_a_cpu():
    """Against the compiled network without recompute, because it draws other dropout masks than the eager one."""
    settings = ("model.depth=1", "model.options.dropout=0.2")
    recomputed = losses("compiled", "cpu", "train.recompute=true", *settings)
    torch.testing.assert_close(recomputed, losses("compiled", "cpu", *settings), rtol=1e-5, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_recompute_parity_in_every_engine_on_a_gpu(engine, precision):
    settings = (f"train.precision={precision}",)
    recomputed = losses(engine, "cuda", "train.recompute=true", *settings)
    tolerance = 1e-5 if engine in ("eager", "graph") and precision == "float32" else 1e-2
    torch.testing.assert_close(recomputed, losses(engine, "cuda", *settings), rtol=tolerance, atol=0)


@pytest.mark.gpu
def test_recompute_with_dropout_is_rejected_by_the_graph_engine():
    with pytest.raises(ValueError, match="cannot reproduce dropout or noise"):
        losses("graph", "cuda", "train.recompute=true", "model.options.dropout=0.1")
    settings = ("model.options.dropout=0.1",)
    recomputed = losses("eager", "cuda", "train.recompute=true", *settings)
    torch.testing.assert_close(recomputed, losses("eager", "cuda", *settings), rtol=1e-5, atol=0)
