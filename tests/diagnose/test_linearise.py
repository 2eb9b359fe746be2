"""Products with a Jacobian and its transpose in float64, against explicit Jacobians and forward mode."""

import pytest
import torch
import torch.nn.functional as F

from sigmasolver.diagnose.gains import history_update
from sigmasolver.diagnose.linearise import Linearised
from sigmasolver.models import list_models
from tests.diagnose.subjects import perturb, subject_in_3d, subject_of


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def check(function, point):
    """Compare J v and Jᵀ u with the explicit Jacobian from reverse mode."""
    linearised = Linearised(function, point)
    with torch.no_grad():
        image = function(point)
    J = torch.autograd.functional.jacobian(function, point).reshape(image.numel(), point.numel())
    assert J.abs().max() > 0
    for seed in (1, 2):
        v, u = draw(*point.shape, seed=seed), draw(*image.shape, seed=seed)
        torch.testing.assert_close((linearised @ v).flatten(), J @ v.flatten(), rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(linearised.transposed(u).flatten(), J.mT @ u.flatten(), rtol=1e-10, atol=1e-12)


CONVOLUTIONS = {
    "line": (F.conv1d, (2, 4, 9), (4, 1, 3), {"padding": 1, "groups": 4}),
    "plane, depthwise": (F.conv2d, (2, 3, 6, 5), (3, 1, 5, 3), {"padding": [2, 1], "groups": 3}),
    "plane, dense, strided": (F.conv2d, (2, 3, 6, 7), (4, 3, 3, 3), {"stride": 2, "padding": (1, 0)}),
    "plane, dilated": (F.conv2d, (2, 4, 6, 7), (6, 2, 2, 3), {"dilation": (2, 1), "groups": 2}),
    "volume": (F.conv3d, (1, 2, 4, 3, 5), (2, 1, 3, 3, 3), {"padding": 1, "groups": 2}),
    "padding by name": (F.conv2d, (1, 2, 4, 5), (2, 1, 3, 3), {"padding": "same", "groups": 2}),
    "one sample without a batch": (F.conv2d, (2, 4, 5), (2, 1, 3, 3), {"padding": 1, "groups": 2}),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize("biased", [True, False])
def test_linearised_convolutions(name, biased):
    convolve, shape, kernel, options = CONVOLUTIONS[name]
    weight = torch.nn.Parameter(draw(*kernel))
    bias = torch.nn.Parameter(draw(kernel[0], seed=3)) if biased else None
    check(lambda x: convolve(x.tanh(), weight, bias, **options).square(), draw(*shape))


def test_linearised_convolution_with_input_dependent_weight():
    fixed = torch.nn.Parameter(draw(3, 1, 3, 3))
    check(lambda x: F.conv2d(x, fixed * x.mean(), padding=1, groups=3), draw(2, 3, 4, 5))


@pytest.mark.parametrize("shape", [(5,), (3, 5)])
@pytest.mark.parametrize("affine", [True, False])
def test_linearised_layer_norms(shape, affine):
    weight, bias = (torch.nn.Parameter(draw(*shape, seed=seed)) if affine else None for seed in (3, 4))
    check(lambda x: F.layer_norm(x, shape, weight, bias, 0.1).tanh(), draw(2, 3, 5))
    check(lambda x: F.layer_norm(x, list(shape), weight=weight, bias=bias).square(), draw(2, 3, 5))


def test_linearised_layer_norm_with_input_dependent_weight():
    check(lambda x: F.layer_norm(x, (5,), 1 + x[0, 0], x[1, 1]), draw(2, 3, 5))


@pytest.mark.usefixtures("few_frequencies")
@pytest.mark.parametrize("name", list_models())
def test_linearised_models_match_forward_mode(name):
    _check_against_forward_mode(subject_of(name, dtype=torch.float64))


def test_linearised_model_in_3d_matches_forward_mode():
    subject = subject_in_3d()
    subject.forecaster.double()
    perturb(subject.forecaster, 0.05)
    _check_against_forward_mode(subject)


def _check_against_forward_mode(subject):
    _, history, _ = next(subject.batches())
    q = len(subject.fields)
    update, state = history_update(subject.forecaster, history[..., q:]), history[..., :q]
    linearised, v, u = Linearised(update, state), torch.randn_like(state), torch.randn_like(state)
    with torch.no_grad():
        expected = torch.func.jvp(update, (state,), (v,))[1]
    torch.testing.assert_close(linearised @ v, expected, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close((linearised.transposed(u) * v).sum(), (u * expected).sum(), rtol=1e-9, atol=1e-9)
