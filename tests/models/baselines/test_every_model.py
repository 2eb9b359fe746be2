"""Properties of every registered model; a new model in the registry is tested automatically."""

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
"""Odd and even, never square."""
LARGER: dict[str, dict[int, tuple[int, ...]]] = {"unet": {2: (49, 36), 3: (17, 20, 9)}}
"""Models that need more points, by name and number of axes: InstanceNorm over the few points of the deepest level of a
small grid amplifies round-off."""
ONE_BLOCK = (("eddyformer-3d", 3), ("eddyformer-2d", 2))
"""Models with many nodes per element, for speed; `eddyformer` has two of the same blocks."""
MISSING: dict[str, tuple[int, ...]] = {"eddyformer-2d": (3,)}
"""Numbers of axes that a model does not support: 25 nodes per element, at least two elements per axis."""
SILENT: dict[str, tuple[str, ...]] = {}
"""Trainable parameters that do not affect the output, by model: patterns of their names. Each needs a reason."""
NORMALISED_OVER_THE_BATCH = ("unet-batchnorm",)
"""Models whose samples interact in training mode."""
SAME_CODE = ("specsolver", "no-spectral", "physical-then-spectral")
"""Variants that run the same lines of `Block` as another one (physolver, no-physical, spectral-then-physical)."""
TWO = [name for name in list_models() if 2 not in MISSING.get(name, ())]
CASES = [(name, axes) for name in list_models() for axes in GRIDS if axes not in MISSING.get(name, ())]


def grid_of(name, axes):
    return LARGER.get(name, {}).get(axes, GRIDS[axes])


def initialised(name, axes, seed=0):
    torch.manual_seed(seed)
    depth = 1 if (name, axes) in ONE_BLOCK else 2
    return build_model(name, grid=grid_of(name, axes), depth=depth, **SIZES).eval()


@cache
def perturbed(name, axes):
    """In eval mode, with perturbed parameters, since some are initialised to zero and disable others."""
    model = initialised(name, axes)
    torch.manual_seed(zlib.crc32(name.encode()))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def samples(name, axes, count=3):
    return torch.randn(count, *grid_of(name, axes), SIZES["in_channels"], generator=torch.Generator().manual_seed(7))


def relative_error(y, expected):
    return ((y - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize(("name", "axes"), CASES)
def test_output_shape_determinism_and_independence_of_samples(name, axes):
    model, x = perturbed(name, axes), samples(name, axes)
    with torch.no_grad():
        y, again = model(x), model(x)
        separate = torch.cat([model(sample[None]) for sample in x])
    assert y.shape == (*x.shape[:-1], SIZES["out_channels"]) and y.dtype == x.dtype
    assert torch.isfinite(y).all() and torch.equal(y, again)
    assert relative_error(separate, y) < 1e-5
    assert relative_error(y[:1], y[1:2]) > 1e-3, "the output must depend on the sample"


@pytest.mark.parametrize("name", [name for name in TWO if name not in NORMALISED_OVER_THE_BATCH])
def test_samples_are_independent_in_training_mode(name):
    """The gradient of one sample's output with respect to the others is zero."""
    model, x = copy.deepcopy(perturbed(name, 2)).train(), samples(name, 2).requires_grad_()
    (gradient,) = torch.autograd.grad(model(x)[0].square().sum(), x)
    assert gradient[0].abs().max() > 0 and gradient[1:].abs().max() == 0


@pytest.mark.parametrize("name", TWO)
def test_draws_noise_is_true_iff_the_model_is_random(name):
    """The trainer must know, in order to seed random draws by step."""
    model, x = copy.deepcopy(perturbed(name, 2)).train(), samples(name, 2, 2)
    with torch.no_grad():
        assert torch.equal(model(x), model(x)) == (not draws_noise(model))


@pytest.mark.parametrize(("name", "axes"), CASES)
def test_every_parameter_has_a_gradient(name, axes):
    """At initialisation all gradients are finite; with perturbed parameters none is zero."""
    x, silent = samples(name, axes, 2), SILENT.get(name, ())
    for model in (initialised(name, axes), copy.deepcopy(perturbed(name, axes))):
        y = model.train()(x)
        (y * torch.linspace(-1, 2, y.numel()).reshape(y.shape)).sum().backward()
        gradients = {key: p.grad for key, p in model.named_parameters() if p.requires_grad}
        assert gradients
        for key, gradient in gradients.items():
            assert gradient is not None and torch.isfinite(gradient).all(), key
    unused = {key for key, gradient in gradients.items() if gradient.abs().max() == 0}
    assert unused == {key for key in gradients if any(fnmatch(key, pattern) for pattern in silent)}


@pytest.mark.parametrize(("name", "axes"), CASES)
def test_weights_are_real_shardable_and_round_trip(name, axes, tmp_path):
    """Real tensors, parameters with an axis to shard; the same outputs after a round-trip through a file."""
    model, x = perturbed(name, axes), samples(name, axes)
    assert all(p.ndim and not p.is_complex() for p in model.parameters())
    assert not any(buffer.is_complex() for buffer in model.buffers())
    write_tensors(tmp_path / "weights.safetensors", model.state_dict(), {})
    other = initialised(name, axes, seed=5)
    with torch.no_grad():
        assert not torch.equal(other(x), model(x))
        other.load_state_dict(read_tensors(tmp_path / "weights.safetensors")[0])
        assert torch.equal(other(x), model(x))


@pytest.mark.parametrize(("name", "axes"), CASES)
def test_bf16_autocast_is_close_to_float32(name, axes):
    """Within five percent, and not computed in float32 throughout."""
    model, x = perturbed(name, axes), samples(name, axes)
    with torch.no_grad():
        exact = model(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            rounded = model(x)
    assert torch.isfinite(rounded).all()
    assert 1e-6 < relative_error(rounded.float(), exact) < 0.05


@pytest.mark.parametrize(
    ("name", "axes"),
    [
        (name, axes)
        if axes == 2 and name in (*VARIANTS, *ONE_OF_EACH) and name not in SAME_CODE
        else pytest.param(name, axes, marks=pytest.mark.slow)
        for name, axes in CASES
    ],
)
def test_model_compiles_without_graph_breaks(name, axes):
    """torch.compile without Inductor, which is slow on a CPU; the same output in float64."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = build_model(name, grid=GRIDS[axes], depth=1, **SIZES).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        x = torch.randn(2, *GRIDS[axes], SIZES["in_channels"], dtype=torch.float64)
        traced = torch.compile(model, backend="eager", fullgraph=True)(x)
        assert relative_error(traced, model(x)) < 1e-11
