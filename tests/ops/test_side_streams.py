"""Side streams: when gradients of weights may be made in one."""

import pytest
import torch

from sigmasolver.models import build_model
from sigmasolver.ops import dispatch, side_streams
from sigmasolver.ops.side_streams import SideStreams

pytest.importorskip("triton")
from sigmasolver.ops.fused.linear import linear
from tests.ops.device import DEVICE, GPU, gpu


@pytest.fixture(autouse=True)
def fused_everywhere(monkeypatch):
    monkeypatch.setattr(dispatch, "interpreted", not GPU)


def layer():
    weight, bias = torch.randn(4, 3, device=DEVICE), torch.randn(4, device=DEVICE)
    return torch.nn.Parameter(weight), torch.nn.Parameter(bias)


def rehearsed(map_of, *given):
    found = SideStreams()
    x = torch.randn(7, 3, device=DEVICE)
    with found.rehearse(given):
        map_of(x).square().sum().backward()
    return found.sound


def test_gradients_that_reach_their_parameters_untouched_are_sound():
    weight, bias = layer()
    assert rehearsed(lambda x: linear(x, weight, bias), weight, bias)


def test_parameter_that_is_used_twice_is_unsound():
    weight, bias = layer()
    assert not rehearsed(lambda x: linear(x, weight, bias) + linear(2 * x, weight, bias), weight, bias)


def test_gradient_that_is_passed_on_is_unsound():
    weight, bias = layer()
    assert not rehearsed(lambda x: linear(x, 3 * weight, bias), weight, bias)


def test_parameter_with_a_gradient_is_unsound():
    weight, bias = layer()
    weight.grad = torch.zeros_like(weight)
    assert not rehearsed(lambda x: linear(x, weight, bias), weight, bias)


def test_hooked_parameter_is_unsound():
    weight, bias = layer()
    weight.register_hook(lambda gradient: gradient.mul_(0.5))
    assert not rehearsed(lambda x: linear(x, weight, bias), weight, bias)


@pytest.mark.parametrize("name", ["transolver-sigma", "physolver", "specsolver", "transolver"])
def test_whole_models_are_sound(name):
    model = build_model(name, grid=(6, 5), in_channels=2, out_channels=1, width=16, depth=1, heads=2, slices=4, modes=2)
    model.to(DEVICE)
    found = SideStreams()
    # On a GPU in bf16: float32 products are left to the library, whose padded weights are no parameters.
    with found.rehearse(list(model.parameters())), torch.autocast(DEVICE, torch.bfloat16, enabled=GPU):
        model(torch.randn(1, 6, 5, 2, device=DEVICE)).square().sum().backward()
        assert found._observed  # something was made in a side stream at all
    assert found.sound


def test_outside_everything_runs_in_the_order_in_which_it_is_written():
    order = []
    made = side_streams.on_side_stream(lambda: order.append("gradients") or (torch.ones(1),))
    side_streams.run_concurrently(lambda: order.append("first"), lambda: order.append("second"), made[0])
    assert order == ["gradients", "first", "second"]


@gpu
def test_bits_are_those_of_one_stream():
    """Large enough that kernels overlap, many times over: a tensor given away too early would show."""
    model = build_model("transolver-sigma", grid=(64, 64), in_channels=2, out_channels=1, width=64, depth=4).cuda()
    x = torch.randn(4, 64, 64, 2, device="cuda")

    def gradients(streams):
        model.zero_grad(set_to_none=True)
        with streams, torch.autocast("cuda", torch.bfloat16):
            loss = model(x).square().sum()
            loss.backward()
        return [one.grad for one in model.parameters()]

    found = SideStreams()
    expected = [one.clone() for one in gradients(found.rehearse(list(model.parameters())))]
    assert found.sound
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = gradients(found.open())
    for _ in range(20):
        for one in made:
            one.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(one, two) for one, two in zip(made, expected, strict=True))
