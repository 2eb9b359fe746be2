"""What every model promises, the family and all baselines alike: a new row of the registry is tested here unasked."""

import copy
import zlib
from fnmatch import fnmatch
from functools import cache

import pytest
import torch

from sigmasolver.models import build_model, list_models
from sigmasolver.models.layers import draws_noise
from sigmasolver.models.variants import VARIANTS
from sigmasolver.runs import read_tensors, write_tensors
from tests.models.baselines.test_registry import ONE_OF_EACH

SIZES = {"in_channels": 4, "out_channels": 2, "width": 16, "heads": 2, "slices": 5, "modes": 3}
GRIDS = {2: (13, 10), 3: (9, 7, 6)}
"""Odd, even and never square."""
LARGER: dict[str, dict[int, tuple[int, ...]]] = {"unet": {2: (49, 36)}}
"""Models that need more points, by name and number of axes: InstanceNorm over the few points of the deepest level of a
small grid magnifies rounding."""
MISSING: dict[str, tuple[int, ...]] = {"eddyformer-2d": (3,)}
"""Models that are not for a number of axes: 25 nodes an element, at least two elements an axis."""
SILENT: dict[str, tuple[str, ...]] = {}
"""Trainable parameters without influence on the answer, by model: patterns of their names. Each needs a reason."""
NORMALISED_OVER_THE_BATCH = ("unet-batchnorm",)
"""Models whose samples see each other in training."""
TWO = [name for name in list_models() if 2 not in MISSING.get(name, ())]
CASES = [(name, axes) for name in list_models() for axes in GRIDS if axes not in MISSING.get(name, ())]


def grid_of(name, axes):
    return LARGER.get(name, {}).get(axes, GRIDS[axes])


def fresh(name, axes, seed=0, depth=2):
    torch.manual_seed(seed)
    return build_model(name, grid=grid_of(name, axes), depth=depth, **SIZES).eval()


@cache
def moved(name, axes):
    """In evaluation, every parameter off its starting value, since some start at zero and silence others."""
    model = fresh(name, axes)
    torch.manual_seed(zlib.crc32(name.encode()))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def samples(name, axes, count=3):
    return torch.randn(count, *grid_of(name, axes), SIZES["in_channels"], generator=torch.Generator().manual_seed(7))


def gap(one, other):
    return ((one - other).norm() / other.norm()).item()


@pytest.mark.parametrize(("name", "axes"), CASES)
def test_shape_repeatable_and_every_sample_for_itself(name, axes):
    model, x = moved(name, axes), samples(name, axes)
    with torch.no_grad():
        y, again = model(x), model(x)
        alone = torch.cat([model(one[None]) for one in x])
    assert y.shape == (*x.shape[:-1], SIZES["out_channels"]) and y.dtype == x.dtype
    assert torch.isfinite(y).all() and torch.equal(y, again)
    assert gap(alone, y) < 1e-5
    assert gap(y[:1], y[1:2]) > 1e-3, "the answer must depend on the sample"


@pytest.mark.parametrize("name", [name for name in TWO if name not in NORMALISED_OVER_THE_BATCH])
def test_training_keeps_samples_apart(name):
    """The gradient of one sample's answer with respect to the others is zero."""
    model, x = copy.deepcopy(moved(name, 2)).train(), samples(name, 2).requires_grad_()
    (gradient,) = torch.autograd.grad(model(x)[0].square().sum(), x)
    assert gradient[0].abs().max() > 0 and gradient[1:].abs().max() == 0


@pytest.mark.parametrize("name", TWO)
def test_a_model_that_draws_random_numbers_says_so(name):
    """The trainer ties them to the seed and the step, and must know of them."""
    model, x = copy.deepcopy(moved(name, 2)).train(), samples(name, 2, 2)
    with torch.no_grad():
        assert torch.equal(model(x), model(x)) == (not draws_noise(model))


@pytest.mark.parametrize(("name", "axes"), CASES)
def test_every_parameter_learns(name, axes):
    """From the start all gradients are finite; off the start none is zero."""
    x, silent = samples(name, axes, 2), SILENT.get(name, ())
    for model in (fresh(name, axes), copy.deepcopy(moved(name, axes))):
        y = model.train()(x)
        (y * torch.linspace(-1, 2, y.numel()).reshape(y.shape)).sum().backward()
        gradients = {key: one.grad for key, one in model.named_parameters() if one.requires_grad}
        assert gradients
        for key, gradient in gradients.items():
            assert gradient is not None and torch.isfinite(gradient).all(), key
    dead = {key for key, gradient in gradients.items() if gradient.abs().max() == 0}
    assert dead == {key for key in gradients if any(fnmatch(key, pattern) for pattern in silent)}


@pytest.mark.parametrize(("name", "axes"), CASES)
def test_weights_can_be_stored_and_split(name, axes, tmp_path):
    """Real tensors, parameters with an axis to split along; a round trip through a file gives the same answers."""
    model, x = moved(name, axes), samples(name, axes)
    assert all(one.ndim and not one.is_complex() for one in model.parameters())
    assert not any(one.is_complex() for one in model.buffers())
    write_tensors(tmp_path / "weights.safetensors", model.state_dict(), {})
    other = fresh(name, axes, seed=5)
    with torch.no_grad():
        assert not torch.equal(other(x), model(x))
        other.load_state_dict(read_tensors(tmp_path / "weights.safetensors")[0])
        assert torch.equal(other(x), model(x))


@pytest.mark.parametrize(("name", "axes"), CASES)
def test_bf16_stays_near_float32(name, axes):
    """Eight bits, rounded a few times: within five hundredths of the answer, and not float32 after all."""
    model, x = moved(name, axes), samples(name, axes)
    with torch.no_grad():
        exact = model(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            near = model(x)
    assert torch.isfinite(near).all()
    assert 1e-6 < gap(near.float(), exact) < 0.05


@pytest.mark.parametrize(
    ("name", "axes"),
    [
        case if case[1] == 2 and case[0] in (*VARIANTS, *ONE_OF_EACH) else pytest.param(*case, marks=pytest.mark.slow)
        for case in CASES
    ],
)
def test_the_whole_model_is_one_graph(name, axes):
    """torch.compile without the code generator, which is slow on a CPU: no break, and the same answer in float64."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = build_model(name, grid=GRIDS[axes], depth=1, **SIZES).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        x = torch.randn(2, *GRIDS[axes], SIZES["in_channels"], dtype=torch.float64)
        traced = torch.compile(model, backend="eager", fullgraph=True)(x)
        assert gap(traced, model(x)) < 1e-11
