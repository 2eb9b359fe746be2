"""The fused lift against the plain definition in float64, and inside a solver.

On a GPU the kernels run for real; elsewhere through Triton's interpreter (which multiplies bf16 wrongly, so bf16 is
tested on a GPU only).
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
    """On a GPU too: exact products of float32 would be left to the library."""
    monkeypatch.setattr(dispatch, "interpreted", True)


@pytest.fixture
def twins(monkeypatch):
    """The number of calls of the twin so far."""
    calls, twin = [], fused_lift.lift
    monkeypatch.setattr(fused_lift, "lift", lambda *given: calls.append(1) or twin(*given))
    return calls


def definition(x, positions, w1, b1, w2, b2, offset):
    both = torch.cat((positions.expand(len(x), *positions.shape), x), -1)
    return F.gelu(both @ w1.T + b1) @ w2.T + b2 + offset


def lifted(x, positions, w1, b1, w2, b2, offset):
    return lift(x, positions, nn.Sequential(linear(w1, b1), nn.GELU(), linear(w2, b2)), offset)


def inputs_of(B, grid, q, P, I, C):
    """x, positions, both maps, offset; inner channels on both sides of zero, as far as GELU bends."""
    maps = torch.randn(I, P + q) * 2 / math.sqrt(P + q), torch.randn(I), torch.randn(C, I) / math.sqrt(I)
    return [torch.randn(B, *grid, q), torch.rand(*grid, P), *maps, torch.randn(C), torch.rand(C)]


def results(form, inputs, weights, spared=(1,)):
    """Output and the gradients of all inputs but the spared ones."""
    for place, one in enumerate(inputs):
        one.requires_grad_(place not in spared)
    out = merged(form(*inputs))
    return out.detach(), *torch.autograd.grad(
        (out * weights.to(out)).sum(), [one for one in inputs if one.requires_grad]
    )


def errors(shape, dtype=torch.float32, narrow=False):
    """Of the output and all gradients against float64, in the norm."""
    inputs = inputs_of(*shape)
    weights = torch.randn(*inputs[0].shape[:-1], len(inputs[-1]), dtype=torch.float64)
    expected = results(definition, [one.to(dtype).double() for one in inputs], weights)

    def whole(x, positions, w1, b1, w2, b2, offset):
        with torch.autocast(DEVICE, torch.bfloat16, enabled=narrow):
            return lifted(x, positions, w1, b1, w2, b2, offset)

    found = results(whole, [one.to(DEVICE, dtype, copy=True) for one in inputs], weights)
    assert found[0].dtype == dtype and all(one.is_contiguous() for one in found[2:])
    pairs = zip(found, expected, strict=True)
    return [float((one.cpu().double() - two).norm() / two.norm().clamp(min=1e-3)) for one, two in pairs]


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
def test_output_and_gradients(shape, twins):
    assert max(errors(shape)) < (2e-4 if GPU else 1e-5)
    assert twins


@pytest.mark.usefixtures("fused_everywhere")
def test_programs_that_take_several_tiles_of_points(monkeypatch, twins):
    monkeypatch.setattr(fused_lift, "multiprocessors", lambda x: 1)
    assert max(errors((3, (71,), 3, 64, 70, 6))) < (2e-4 if GPU else 1e-5)
    assert twins


@pytest.mark.usefixtures("fused_everywhere")
def test_positions_that_learn_and_sizes_that_no_program_holds_take_the_plain_path(twins):
    inputs = inputs_of(2, (5,), 2, 3, 8, 4)
    weights = torch.randn(2, 5, 4, dtype=torch.float64)
    expected = results(definition, [one.double() for one in inputs], weights, spared=())
    found = results(
        lifted,
        [one.to(DEVICE) for one in inputs],
        weights,
        spared=(),
    )
    for one, two in zip(found, expected, strict=True):
        torch.testing.assert_close(one.cpu().double(), two, rtol=1e-4, atol=1e-5)
    for shape in ((1, (3,), 65, 2, 8, 4), (1, (3,), 2, 2, 8, 257), (1, (3,), 2, 2, 513, 4)):
        assert max(errors(shape)) < 1e-5
    assert not twins


@pytest.mark.usefixtures("fused_everywhere")
@pytest.mark.parametrize("positions", ["distances", "coordinates"])
def test_inside_a_solver(positions, twins):
    model = solver((11,), positions=positions)
    exact = copy.deepcopy(model).double()
    x = torch.randn(2, 11, 3, device=DEVICE)
    y = model(x)
    found = torch.autograd.grad(y.square().sum(), list(model.lift.parameters()))
    assert len(twins) == 1
    with dispatch.plain():
        expected = exact(x.double())
        wanted = torch.autograd.grad(expected.square().sum(), list(exact.lift.parameters()))
    assert len(twins) == 1
    for one, two in zip((y, *found), (expected, *wanted), strict=True):
        assert (one - two).norm() < (2e-4 if GPU else 1e-5) * two.norm()


@pytest.mark.usefixtures("fused_everywhere")
def test_a_watcher_of_the_lift_sees_it(twins):
    model, seen = solver((9,)), []
    x = torch.randn(2, 9, 3, device=DEVICE)
    alone = model(x)
    hook = model.lift[1].register_forward_hook(lambda module, given, out: seen.append((given[0], out)))
    watched = model(x)
    hook.remove()
    assert len(twins) == 1 and len(seen) == 1
    torch.testing.assert_close(F.gelu(seen[0][0]), seen[0][1])
    torch.testing.assert_close(watched, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("positions", ["distances", "coordinates"])
def test_plainly_a_solver_lifts_as_its_layers_do(positions):
    """To the last bit."""
    model = solver((6, 5), positions=positions)
    x = torch.randn(2, 6, 5, 3, device=DEVICE)
    with dispatch.plain():
        points = model.points(x)
        both = torch.cat((points.expand(len(x), *points.shape), x), -1)
        assert torch.equal(lift(x, points, model.lift, model.offset), model.lift(both) + model.offset)


@pytest.mark.usefixtures("fused_everywhere")
def test_every_gradient_reaches_its_parameter_as_it_is(twins):
    model, streams = solver((6, 5)), SideStreams()
    x = torch.randn(2, 6, 5, 3, device=DEVICE)
    with streams.rehearse(list(model.parameters())):
        model(x).square().sum().backward()
    assert twins and streams.sound
    places = [one.grad.data_ptr() for one in model.parameters()]
    assert len(set(places)) == len(places)


@gpu
@pytest.mark.parametrize(
    "shape", [(4, (64, 64), 10, 64, 256, 128), (2, (33, 31), 1, 2, 512, 256), (1, (50,), 40, 64, 48, 24)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_bf16_it_is_no_worse_than_plain_operations(shape, dtype, twins):
    """Under autocast, and with everything narrow."""
    torch.manual_seed(1)
    found = errors(shape, dtype, narrow=dtype == torch.float32)
    assert len(twins) == 1
    torch.manual_seed(1)
    with dispatch.plain():
        plain = errors(shape, dtype, narrow=dtype == torch.float32)
    assert max(found) < 0.03
    assert all(one <= 1.5 * two + 0.002 for one, two in zip(found, plain, strict=True)), (found, plain)


@gpu
def test_in_tf32(twins):
    torch.backends.cuda.matmul.allow_tf32 = True
    assert max(errors((2, (40, 30), 3, 64, 512, 256))) < 5e-3
    assert twins
