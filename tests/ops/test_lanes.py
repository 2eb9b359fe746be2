"""Streams beside each other: when gradients of weights may be made in one of their own."""

import pytest
import torch

from sigmasolver.models import build_model
from sigmasolver.ops import fused
from sigmasolver.ops.fused import lanes
from sigmasolver.ops.fused.lanes import Lanes

pytest.importorskip("triton")
from sigmasolver.ops.fused.linear import linear
from tests.ops.device import DEVICE, GPU, gpu


@pytest.fixture(autouse=True)
def fused_everywhere(monkeypatch):
    monkeypatch.setattr(fused, "interpreted", not GPU)


def layer():
    weight, bias = torch.randn(4, 3, device=DEVICE), torch.randn(4, device=DEVICE)
    return torch.nn.Parameter(weight), torch.nn.Parameter(bias)


def rehearsed(map_of, *given):
    found = Lanes()
    x = torch.randn(7, 3, device=DEVICE)
    with found.rehearse(given):
        map_of(x).square().sum().backward()
    return found.sound


def test_gradients_that_reach_their_parameters_untouched_are_found_sound():
    weight, bias = layer()
    assert rehearsed(lambda x: linear(x, weight, bias), weight, bias)


def test_a_parameter_that_is_used_twice_is_not():
    weight, bias = layer()
    assert not rehearsed(lambda x: linear(x, weight, bias) + linear(2 * x, weight, bias), weight, bias)


def test_nor_is_one_whose_gradient_goes_on():
    weight, bias = layer()
    assert not rehearsed(lambda x: linear(x, 3 * weight, bias), weight, bias)


def test_nor_one_that_has_a_gradient_already():
    weight, bias = layer()
    weight.grad = torch.zeros_like(weight)
    assert not rehearsed(lambda x: linear(x, weight, bias), weight, bias)


def test_nor_one_that_somebody_hooks_in_on():
    weight, bias = layer()
    weight.register_hook(lambda gradient: gradient.mul_(0.5))
    assert not rehearsed(lambda x: linear(x, weight, bias), weight, bias)


@pytest.mark.parametrize("name", ["transolver-sigma", "physolver", "specsolver", "transolver"])
def test_whole_models_are_sound(name):
    model = build_model(name, grid=(6, 5), in_channels=2, out_channels=1, width=16, depth=1, heads=2, slices=4, modes=2)
    model.to(DEVICE)
    found = Lanes()
    # On a GPU in bf16: float32 products are left to the library, whose filled-up weights are no parameters.
    with found.rehearse(list(model.parameters())), torch.autocast(DEVICE, torch.bfloat16, enabled=GPU):
        model(torch.randn(1, 6, 5, 2, device=DEVICE)).square().sum().backward()
        assert found._made  # something was made aside at all
    assert found.sound


def test_outside_everything_runs_in_the_order_in_which_it_is_written():
    order = []
    made = lanes.aside(lambda: order.append("aside") or (torch.ones(1),))
    lanes.together(lambda: order.append("first"), lambda: order.append("second"), made[0])
    assert order == ["aside", "first", "second"]


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

    found = Lanes()
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
