"""The fused lift against the plain definition in float64, alone and inside a solver.

Without a GPU the kernels run in Triton's interpreter, which multiplies bf16 wrongly, so bf16 is tested on a GPU only.
"""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sigmasolver.ops import dispatch
from sigmasolver.ops.lift import lift
from sigmasolver.ops.side_streams import SideStreams
from sigmasolver.ops.stream import merged

pytest.importorskip("triton")
from sigmasolver.ops.fused import lift as fused_lift
from tests.ops.device import DEVICE, GPU, gpu
from tests.ops.small import linear, solver


@pytest.fixture(autouse=True)
def exact_products():
    before, torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32, False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.fixture
def fused_everywhere(monkeypatch):
    """Use fused kernels on a GPU too, where exact float32 products would be left to cuBLAS."""
    monkeypatch.setattr(dispatch, "interpreted", True)


@pytest.fixture
def fused_calls(monkeypatch):
    """A list with one entry per call of the fused lift."""
    calls, fused = [], fused_lift.lift
    monkeypatch.setattr(fused_lift, "lift", lambda *args: calls.append(1) or fused(*args))
    return calls


def definition(x, positions, w1, b1, w2, b2, offset):
    inputs = torch.cat((positions.expand(len(x), *positions.shape), x), -1)
    return F.gelu(inputs @ w1.T + b1) @ w2.T + b2 + offset


def lifted(x, positions, w1, b1, w2, b2, offset):
    return lift(x, positions, nn.Sequential(linear(w1, b1), nn.GELU(), linear(w2, b2)), offset)


def inputs_of(B, grid, q, P, I, C):
    """x, positions, both layers, offset; inner channels on both sides of zero, where GELU is nonlinear."""
    maps = torch.randn(I, P + q) * 2 / math.sqrt(P + q), torch.randn(I), torch.randn(C, I) / math.sqrt(I)
    return [torch.randn(B, *grid, q), torch.rand(*grid, P), *maps, torch.randn(C), torch.rand(C)]


def results(form, inputs, weights, frozen=(1,)):
    """The output, and the gradients of all inputs except the frozen ones."""
    for index, tensor in enumerate(inputs):
        tensor.requires_grad_(index not in frozen)
    out = merged(form(*inputs))
    return out.detach(), *torch.autograd.grad(
        (out * weights.to(out)).sum(), [tensor for tensor in inputs if tensor.requires_grad]
    )


def errors(shape, dtype=torch.float32, autocast=False):
    """Errors of the output and all gradients against float64, in the norm."""
    inputs = inputs_of(*shape)
    weights = torch.randn(*inputs[0].shape[:-1], len(inputs[-1]), dtype=torch.float64)
    expected = results(definition, [tensor.to(dtype).double() for tensor in inputs], weights)

    def autocast_lift(x, positions, w1, b1, w2, b2, offset):
        with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
            return lifted(x, positions, w1, b1, w2, b2, offset)

    actual = results(autocast_lift, [tensor.to(DEVICE, dtype, copy=True) for tensor in inputs], weights)
    assert actual[0].dtype == dtype and all(gradient.is_contiguous() for gradient in actual[2:])
    pairs = zip(actual, expected, strict=True)
    return [float((x.cpu().double() - exact).norm() / exact.norm().clamp(min=1e-3)) for x, exact in pairs]


SHAPES = [
    (3, (7,), 1, 2, 12, 6),
    (1, (11, 13), 3, 64, 32, 16),
    (3, (5, 6), 10, 64, 80, 40),
    (1, (3, 4, 5), 17, 3, 32, 16),
    (2, (1,), 2, 1, 1, 1),
    (3, (67,), 33, 2, 33, 17),
]


@pytest.mark.usefixtures("fused_everywhere")
@pytest.mark.parametrize("shape", SHAPES)
def test_lift_parity(shape, fused_calls):
    assert max(errors(shape)) < (2e-4 if GPU else 1e-5)
    assert fused_calls


@pytest.mark.usefixtures("fused_everywhere")
def test_lift_parity_with_several_tiles_per_program(monkeypatch, fused_calls):
    monkeypatch.setattr(fused_lift, "multiprocessors", lambda x: 1)
    assert max(errors((3, (71,), 3, 64, 70, 6))) < (2e-4 if GPU else 1e-5)
    assert fused_calls


@pytest.mark.usefixtures("fused_everywhere")
def test_lift_falls_back_to_plain_for_learned_positions_and_large_sizes(fused_calls):
    inputs = inputs_of(2, (5,), 2, 3, 8, 4)
    weights = torch.randn(2, 5, 4, dtype=torch.float64)
    expected = results(definition, [tensor.double() for tensor in inputs], weights, frozen=())
    actual = results(
        lifted,
        [tensor.to(DEVICE) for tensor in inputs],
        weights,
        frozen=(),
    )
    for tensor, reference in zip(actual, expected, strict=True):
        torch.testing.assert_close(tensor.cpu().double(), reference, rtol=1e-4, atol=1e-5)
    for shape in ((1, (3,), 65, 2, 8, 4), (1, (3,), 2, 2, 8, 257), (1, (3,), 2, 2, 513, 4)):
        assert max(errors(shape)) < 1e-5
    assert not fused_calls


@pytest.mark.usefixtures("fused_everywhere")
@pytest.mark.parametrize("positions", ["distances", "coordinates"])
def test_lift_parity_inside_a_solver(positions, fused_calls):
    model = solver((11,), positions=positions)
    exact = copy.deepcopy(model).double()
    x = torch.randn(2, 11, 3, device=DEVICE)
    y = model(x)
    gradients = torch.autograd.grad(y.square().sum(), list(model.lift.parameters()))
    assert len(fused_calls) == 1
    with dispatch.plain():
        expected = exact(x.double())
        expected_gradients = torch.autograd.grad(expected.square().sum(), list(exact.lift.parameters()))
    assert len(fused_calls) == 1
    for tensor, reference in zip((y, *gradients), (expected, *expected_gradients), strict=True):
        assert (tensor - reference).norm() < (2e-4 if GPU else 1e-5) * reference.norm()


@pytest.mark.usefixtures("fused_everywhere")
def test_lift_hook_sees_the_inner_channels(fused_calls):
    model, seen = solver((9,)), []
    x = torch.randn(2, 9, 3, device=DEVICE)
    fused_output = model(x)
    hook = model.lift[1].register_forward_hook(lambda module, args, out: seen.append((args[0], out)))
    hooked_output = model(x)
    hook.remove()
    assert len(fused_calls) == 1 and len(seen) == 1
    torch.testing.assert_close(F.gelu(seen[0][0]), seen[0][1])
    torch.testing.assert_close(hooked_output, fused_output, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("positions", ["distances", "coordinates"])
def test_plain_lift_equals_its_layers_bitwise(positions):
    model = solver((6, 5), positions=positions)
    x = torch.randn(2, 6, 5, 3, device=DEVICE)
    with dispatch.plain():
        points = model.points(x)
        inputs = torch.cat((points.expand(len(x), *points.shape), x), -1)
        assert torch.equal(lift(x, points, model.lift, model.offset), model.lift(inputs) + model.offset)


@pytest.mark.usefixtures("fused_everywhere")
def test_lift_gradients_reach_parameters_untouched(fused_calls):
    model, streams = solver((6, 5)), SideStreams()
    x = torch.randn(2, 6, 5, 3, device=DEVICE)
    with streams.verify(list(model.parameters())):
        model(x).square().sum().backward()
    assert fused_calls and streams.verified
    addresses = [parameter.grad.data_ptr() for parameter in model.parameters()]
    assert len(set(addresses)) == len(addresses)


@gpu
@pytest.mark.parametrize(
    "shape", [(4, (64, 64), 10, 64, 256, 128), (2, (33, 31), 1, 2, 512, 256), (1, (50,), 40, 64, 48, 24)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lift_in_bf16_is_as_accurate_as_plain(shape, dtype, fused_calls):
    """Under autocast, and with all tensors in bf16."""
    torch.manual_seed(1)
    fused = errors(shape, dtype, autocast=dtype == torch.float32)
    assert len(fused_calls) == 1
    torch.manual_seed(1)
    with dispatch.plain():
        plain = errors(shape, dtype, autocast=dtype == torch.float32)
    assert max(fused) < 0.03
    assert all(a <= 1.5 * b + 0.002 for a, b in zip(fused, plain, strict=True)), (fused, plain)


@gpu
def test_lift_tf32_parity(fused_calls):
    torch.backends.cuda.matmul.allow_tf32 = True
    assert max(errors((2, (40, 30), 3, 64, 512, 256))) < 5e-3
    assert fused_calls
