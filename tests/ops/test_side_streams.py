"""Side streams: when weight gradients may be computed on one."""

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


def is_sound(function, *parameters):
    streams = SideStreams()
    x = torch.randn(7, 3, device=DEVICE)
    with streams.verify(parameters):
        function(x).square().sum().backward()
    return streams.verified


def test_rehearse_accepts_gradients_that_arrive_untouched():
    weight, bias = layer()
    assert is_sound(lambda x: linear(x, weight, bias), weight, bias)


def test_rehearse_rejects_a_parameter_used_twice():
    weight, bias = layer()
    assert not is_sound(lambda x: linear(x, weight, bias) + linear(2 * x, weight, bias), weight, bias)


def test_rehearse_rejects_a_gradient_that_is_passed_on():
    weight, bias = layer()
    assert not is_sound(lambda x: linear(x, 3 * weight, bias), weight, bias)


def test_rehearse_rejects_an_existing_gradient():
    weight, bias = layer()
    weight.grad = torch.zeros_like(weight)
    assert not is_sound(lambda x: linear(x, weight, bias), weight, bias)


def test_rehearse_rejects_a_hooked_parameter():
    weight, bias = layer()
    weight.register_hook(lambda gradient: gradient.mul_(0.5))
    assert not is_sound(lambda x: linear(x, weight, bias), weight, bias)


@pytest.mark.parametrize("name", ["transolver-sigma", "physolver", "specsolver", "transolver"])
def test_rehearse_accepts_models(name):
    model = build_model(name, grid=(6, 5), in_channels=2, out_channels=1, width=16, depth=1, heads=2, slices=4, modes=2)
    model.to(DEVICE)
    streams = SideStreams()
    # In bf16 on a GPU: float32 products are left to cuBLAS, whose padded weights are not parameters.
    with streams.verify(list(model.parameters())), torch.autocast(DEVICE, torch.bfloat16, enabled=GPU):
        model(torch.randn(1, 6, 5, 2, device=DEVICE)).square().sum().backward()
        assert streams._observed  # something would run on a side stream
    assert streams.verified


def test_without_side_streams_work_runs_in_program_order():
    order = []
    gradients = side_streams.on_side_stream(lambda: order.append("gradients") or (torch.ones(1),))
    side_streams.run_concurrently(lambda: order.append("first"), lambda: order.append("second"), gradients[0])
    assert order == ["gradients", "first", "second"]


@gpu
def test_side_streams_match_a_single_stream_bitwise():
    """Large enough for kernels to overlap, and repeated: memory reused too early would show."""
    model = build_model("transolver-sigma", grid=(64, 64), in_channels=2, out_channels=1, width=64, depth=4).cuda()
    x = torch.randn(4, 64, 64, 2, device="cuda")

    def gradients(context):
        model.zero_grad(set_to_none=True)
        with context, torch.autocast("cuda", torch.bfloat16):
            loss = model(x).square().sum()
            loss.backward()
        return [parameter.grad for parameter in model.parameters()]

    streams = SideStreams()
    expected = [gradient.clone() for gradient in gradients(streams.verify(list(model.parameters())))]
    assert streams.verified
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gradients(streams.open())
    for _ in range(20):
        for gradient in captured:
            gradient.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(captured, expected, strict=True))
