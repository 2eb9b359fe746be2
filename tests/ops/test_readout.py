"""The fused readout against the plain definition in float64, and inside a solver.

On a GPU the kernels run for real; elsewhere through Triton's interpreter.
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
def twins(monkeypatch):
    """The number of calls of the twin so far."""
    calls, twin = [], fused_readout.readout
    monkeypatch.setattr(fused_readout, "readout", lambda *given: calls.append(1) or twin(*given))
    return calls


def definition(H, w, v, W, b):
    return F.layer_norm(H, H.shape[-1:], w, v, EPS) @ W.T + b


def results(form, inputs, weights):
    """Output and all gradients."""
    leaves = [one.detach().requires_grad_() for one in inputs]
    out = form(*leaves)
    return [out.detach(), *torch.autograd.grad((out * weights.to(out)).sum(), leaves)]


def error(points, C, fields):
    """The largest of the output and all gradients against float64, in the norm."""
    torch.manual_seed(3)
    H = torch.randn(*points, C) * 3 + 1
    inputs = [H, torch.randn(C), torch.randn(C), torch.randn(fields, C), torch.randn(fields)]
    weights = torch.randn(*points, fields, dtype=torch.float64)
    expected = results(definition, [one.double() for one in inputs], weights)
    found = results(
        lambda H, w, v, W, b: readout(H, norm(w, v, EPS), linear(W, b)), [one.to(DEVICE) for one in inputs], weights
    )
    pairs = zip(found, expected, strict=True)
    return max(float((one.cpu().double() - two).norm() / two.norm().clamp(min=1e-3)) for one, two in pairs)


@pytest.mark.parametrize("C", [5, 16, 33, 128, 256])
@pytest.mark.parametrize(("points", "fields"), [((1,), 1), ((3, 11), 2), ((2, 5, 7), 8), ((1, 3, 4, 5), 3)])
def test_output_and_gradients(points, C, fields, twins):
    assert error(points, C, fields) < 2e-5
    assert twins


def test_programs_that_take_several_tiles_of_points(monkeypatch, twins):
    monkeypatch.setattr(tuning, "READOUT_PROGRAMS", 2)
    assert error((3, 71), 30, 2) < 2e-5
    assert twins


def test_many_fields_and_wide_streams_take_the_plain_path(twins):
    assert error((2, 5), 16, 9) < 2e-5
    assert error((2, 5), 257, 1) < 2e-5
    assert not twins


def test_channels_that_do_not_differ():
    """The deviation is zero: eps alone stands in the root."""
    H = torch.full((4, 8), 2.0)
    w, v, W, b = torch.rand(8), torch.rand(8), torch.rand(3, 8), torch.rand(3)
    given = [one.to(DEVICE) for one in (w, v, W, b)]
    found = readout(H.to(DEVICE), norm(*given[:2], EPS), linear(*given[2:]))
    torch.testing.assert_close(found.cpu(), definition(H, w, v, W, b))


def test_inside_a_solver(twins):
    torch.manual_seed(4)
    model = solver((11,))
    exact = copy.deepcopy(model).double()
    x = torch.randn(2, 11, 3, device=DEVICE)
    found, expected = model(x), exact(x.double())
    assert len(twins) == 1  # float64 takes the plain path
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)
    found.square().sum().backward()
    expected.square().sum().backward()
    for one, two in zip(
        (*model.norm.parameters(), *model.readout.parameters()),
        (*exact.norm.parameters(), *exact.readout.parameters()),
        strict=True,
    ):
        torch.testing.assert_close(one.grad.double(), two.grad, rtol=1e-3, atol=1e-4)


def test_who_hooks_in_on_a_part_sees_it(twins):
    model, seen = solver((11,)), []
    model.norm.register_forward_hook(lambda *_: seen.append(True))
    model(torch.randn(1, 11, 3, device=DEVICE))
    assert seen and not twins
