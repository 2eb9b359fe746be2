"""The fused readout against the plain definition in float64, alone and inside a solver.

Without a GPU the kernels run in Triton's interpreter.
"""

import copy

import pytest
import torch
import torch.nn.functional as F

from sigmasolver.ops import dispatch
from sigmasolver.ops.readout import readout

pytest.importorskip("triton")
from sigmasolver.ops.fused import readout as fused_readout
from sigmasolver.ops.fused import tuning
from tests.ops.device import DEVICE
from tests.ops.small import linear, norm, solver

EPS = 1e-5


@pytest.fixture(autouse=True)
def fused_everywhere(monkeypatch):
    monkeypatch.setattr(dispatch, "interpreted", DEVICE == "cpu")


@pytest.fixture
def fused_calls(monkeypatch):
    """A list with one entry per call of the fused readout."""
    calls, fused = [], fused_readout.readout
    monkeypatch.setattr(fused_readout, "readout", lambda *args: calls.append(1) or fused(*args))
    return calls


def definition(H, w, v, W, b):
    return F.layer_norm(H, H.shape[-1:], w, v, EPS) @ W.T + b


def results(form, inputs, weights):
    """The output and all gradients."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    out = form(*leaves)
    return [out.detach(), *torch.autograd.grad((out * weights.to(out)).sum(), leaves)]


def error(points, C, fields):
    """The largest error of the output and all gradients against float64, in the norm."""
    torch.manual_seed(3)
    H = torch.randn(*points, C) * 3 + 1
    inputs = [H, torch.randn(C), torch.randn(C), torch.randn(fields, C), torch.randn(fields)]
    weights = torch.randn(*points, fields, dtype=torch.float64)
    expected = results(definition, [tensor.double() for tensor in inputs], weights)
    actual = results(
        lambda H, w, v, W, b: readout(H, norm(w, v, EPS), linear(W, b)), [x.to(DEVICE) for x in inputs], weights
    )
    pairs = zip(actual, expected, strict=True)
    return max(float((x.cpu().double() - exact).norm() / exact.norm().clamp(min=1e-3)) for x, exact in pairs)


@pytest.mark.parametrize("C", [5, 16, 33, 128, 256])
@pytest.mark.parametrize(("points", "fields"), [((1,), 1), ((3, 11), 2), ((2, 5, 7), 8), ((1, 3, 4, 5), 3)])
def test_readout_parity(points, C, fields, fused_calls):
    assert error(points, C, fields) < 2e-5
    assert fused_calls


def test_readout_parity_with_several_tiles_per_program(monkeypatch, fused_calls):
    monkeypatch.setattr(tuning, "READOUT_PROGRAMS", 2)
    assert error((3, 71), 30, 2) < 2e-5
    assert fused_calls


def test_readout_falls_back_to_plain_for_many_fields_and_wide_streams(fused_calls):
    assert error((2, 5), 16, 9) < 2e-5
    assert error((2, 5), 257, 1) < 2e-5
    assert not fused_calls


def test_readout_of_constant_channels():
    """The variance is zero, so that the denominator is sqrt(eps)."""
    H = torch.full((4, 8), 2.0)
    w, v, W, b = torch.rand(8), torch.rand(8), torch.rand(3, 8), torch.rand(3)
    parameters = [tensor.to(DEVICE) for tensor in (w, v, W, b)]
    output = readout(H.to(DEVICE), norm(*parameters[:2], EPS), linear(*parameters[2:]))
    torch.testing.assert_close(output.cpu(), definition(H, w, v, W, b))


def test_readout_parity_inside_a_solver(fused_calls):
    torch.manual_seed(4)
    model = solver((11,))
    exact = copy.deepcopy(model).double()
    x = torch.randn(2, 11, 3, device=DEVICE)
    output, expected = model(x), exact(x.double())
    assert len(fused_calls) == 1  # float64 takes the plain path
    torch.testing.assert_close(output.double(), expected, rtol=1e-4, atol=1e-5)
    output.square().sum().backward()
    expected.square().sum().backward()
    for parameter, reference in zip(
        (*model.norm.parameters(), *model.readout.parameters()),
        (*exact.norm.parameters(), *exact.readout.parameters()),
        strict=True,
    ):
        torch.testing.assert_close(parameter.grad.double(), reference.grad, rtol=1e-3, atol=1e-4)


def test_readout_hook_sees_the_norm(fused_calls):
    model, seen = solver((11,)), []
    model.norm.register_forward_hook(lambda *_: seen.append(True))
    model(torch.randn(1, 11, 3, device=DEVICE))
    assert seen and not fused_calls
