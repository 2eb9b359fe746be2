"""Blocks that run again in the backward pass give the same gradients to the last bit, and store less."""

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
from sigmasolver.train.dry_run import Rehearsal
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
    made = build_model(name, grid=grid, in_channels=2, out_channels=1, **sizes, options=Options(dropout=dropout))
    with torch.no_grad():  # a gamma of zero, as at the start, would hide the attention
        for parameter in made.parameters():
            parameter.add_(0.1 * torch.rand_like(parameter))
    return made.to(dtype).train()


def both(name, dropout=0.0, dtype=torch.float32):
    """A model and its twin whose blocks run again."""
    plain = model_of(name, dropout=dropout, dtype=dtype)
    twin = copy.deepcopy(plain)
    recompute(twin, dropout > 0 or draws_noise(twin))
    return plain, twin


def gradients(model, autocast=False):
    dtype = next(model.parameters()).dtype
    x = torch.randn(2, 12, 10, 2, generator=torch.Generator().manual_seed(1), dtype=dtype)
    torch.manual_seed(2)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        model(x).square().mean().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}


def stored(model):
    """Bytes that a forward pass keeps for its backward pass, each storage once, without the parameters."""
    return saved_bytes(lambda: model(torch.randn(2, 12, 10, 2)), model.parameters())


def equal(first, second):
    return set(first) == set(second) and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_the_same_to_the_last_bit(name, dtype):
    plain, twin = both(name, dtype=dtype)
    found = gradients(plain)
    assert equal(found, gradients(twin)) and all(bool(one.any()) for one in found.values())
    assert list(plain.state_dict()) == list(twin.state_dict())


@pytest.mark.parametrize("name", ["transolver-sigma", "transolver", "linearno"])
def test_dropout_is_drawn_again_as_it_was(name):
    plain, twin = both(name, dropout=0.3)
    assert equal(gradients(plain), gradients(twin))
    without = gradients(model_of(name))
    assert not equal(gradients(plain), without), "dropout does something"


def test_bf16_is_the_same_too():
    plain, twin = both("transolver-sigma")
    assert equal(gradients(plain, autocast=True), gradients(twin, autocast=True))


def test_only_the_stream_between_blocks_is_stored():
    """Another block costs its input, 2 x 12 x 10 points of 16 channels in four bytes, and many times that without."""
    stream = 2 * 12 * 10 * 16 * 4
    models = {(depth, again): model_of("transolver-sigma", depth) for depth in (2, 6) for again in (False, True)}
    for (_, again), model in models.items():
        if again:
            recompute(model, False)
    bytes_of = {key: stored(model) for key, model in models.items()}
    assert bytes_of[6, True] - bytes_of[2, True] == 4 * stream
    assert bytes_of[6, False] - bytes_of[2, False] > 10 * 4 * stream


def test_without_gradients_nothing_changes_and_twice_is_once():
    plain, twin = both("transolver-sigma")
    calls = []
    twin.blocks[0].norm.register_forward_hook(lambda *_: calls.append(1))
    x = torch.randn(1, 12, 10, 2)
    with torch.no_grad():
        assert torch.equal(plain(x), twin(x)) and len(calls) == 1
    recompute(twin, False)
    calls.clear()
    twin(x).sum().backward()
    assert len(calls) == 2


def test_a_copy_has_weights_of_its_own():
    _, twin = both("transolver-sigma")
    other = copy.deepcopy(twin)
    with torch.no_grad():
        for parameter in other.blocks.parameters():
            parameter.zero_()
    x = torch.randn(1, 12, 10, 2)
    assert not torch.equal(twin(x), other(x))


@pytest.mark.parametrize(
    "settings",
    [(), ("train.objective=pushforward", "train.calls=2", "train.ema=0.9"), ("model.options.dropout=0.2",)],
)
def test_a_whole_training_ends_in_the_same_weights(settings, tmp_path):
    generate(FLOW, 8, 0, tmp_path / "flow.h5")
    recipe = changed(RECIPE, settings)
    for name, again in (("plain", "false"), ("again", "true")):
        train_run(changed(recipe, [f"train.recompute={again}"]), tmp_path / "flow.h5", Run(tmp_path / name))
    assert equal(*(read_tensors(Run(tmp_path / name).weights)[0] for name in ("plain", "again")))


def test_mistakes_are_one_sentence():
    with pytest.raises(ValueError, match=r"^This model has no blocks to recompute; set train.recompute=false.$"):
        recompute(nn.Linear(2, 2), False)


def losses(engine, device, *settings):
    recipe = changed(RECIPE, settings)
    step = Rehearsal(recipe, Execution(World(device=torch.device(device)), engine))
    found = []
    for _ in range(2 * WARM_UP):
        step()
        found.append(step.loss.clone())
    return torch.stack(found).cpu()


@pytest.mark.slow
def test_a_compiled_network_learns_the_same_on_a_cpu():
    """Compared with itself: it draws its dropout in a way of its own."""
    settings = ("model.depth=1", "model.options.dropout=0.2")
    again = losses("compiled", "cpu", "train.recompute=true", *settings)
    torch.testing.assert_close(again, losses("compiled", "cpu", *settings), rtol=1e-5, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_every_engine_learns_the_same_on_a_gpu(engine, precision):
    settings = (f"train.precision={precision}",)
    again = losses(engine, "cuda", "train.recompute=true", *settings)
    tolerance = 1e-5 if engine in ("eager", "graph") and precision == "float32" else 1e-2
    torch.testing.assert_close(again, losses(engine, "cuda", *settings), rtol=tolerance, atol=0)


@pytest.mark.gpu
def test_a_captured_step_refuses_dropout_that_must_be_drawn_twice():
    with pytest.raises(ValueError, match="cannot reproduce dropout or noise"):
        losses("graph", "cuda", "train.recompute=true", "model.options.dropout=0.1")
    settings = ("model.options.dropout=0.1",)
    again = losses("eager", "cuda", "train.recompute=true", *settings)
    torch.testing.assert_close(again, losses("eager", "cuda", *settings), rtol=1e-5, atol=0)
