"""Layouts of all parameters, written by one kernel. Without a GPU the kernel runs in Triton's interpreter."""

from contextlib import nullcontext

import pytest
import torch

from sigmasolver.ops import dispatch

pytest.importorskip("triton")
from sigmasolver.ops.fused.weight_cache import WeightCache, WeightLayout, arrange, cast_weight
from tests.ops.device import DEVICE, GPU

SHAPES = ((3, 5), (2500,), (1,), (40, 70), (7, 1, 3, 3))


@pytest.fixture(autouse=True)
def fused_everywhere(monkeypatch):
    monkeypatch.setattr(dispatch, "interpreted", DEVICE == "cpu")


def parameters(dtype=torch.float32):
    torch.manual_seed(1)
    return [torch.nn.Parameter(torch.randn(shape).to(DEVICE, dtype)) for shape in SHAPES]


LAYOUTS = [
    WeightLayout((3, 5), (3, 5), (5, 1), torch.bfloat16),
    WeightLayout((2500,), (1, 2500), (2500, 1), torch.bfloat16),
    WeightLayout((2, 1300), (2, 1250), (1300, 1), torch.float32),
    WeightLayout((80, 40), (40, 70), (1, 40), torch.bfloat16),
    WeightLayout((9, 7), (7, 9), (1, 7), torch.float32),
]


def arranged(tensors):
    first, second, _, third, fourth = tensors
    return [arrange(w, layout) for w, layout in zip((first, second, second, third, fourth), LAYOUTS, strict=True)]


def test_weight_cache_layouts_equal_single_copies():
    weights = parameters()
    cache = WeightCache(weights)
    with cache.learn():
        copied = arranged(weights)
    assert torch.equal(copied[3][:70], weights[3].detach().T.bfloat16()) and not copied[3][70:].any()
    assert torch.equal(copied[2][:, :1250].flatten(), weights[1]) and not copied[2][:, 1250:].any()
    cache.fill()
    with torch.no_grad():
        for weight in weights:
            weight.mul_(1.7).add_(0.3)  # the layouts have the values at the time of `use`
    expected = [tensor.clone() for tensor in arranged(weights)]
    graph = torch.cuda.CUDAGraph() if GPU else None
    # On a GPU only the captured step may use the cached layouts.
    with torch.cuda.graph(graph, capture_error_mode="thread_local") if graph else nullcontext(), cache.use():
        cached = arranged(weights)
        again = arranged(weights)
    if graph:
        graph.replay()
    for tensor, reference, repeated in zip(cached, expected, again, strict=True):
        truncated = tensor.dtype == torch.bfloat16 and DEVICE == "cpu"  # the interpreter does not round to bf16
        torch.testing.assert_close(tensor, reference, rtol=2**-7 if truncated else 0, atol=0)
        assert tensor.data_ptr() == repeated.data_ptr()  # nothing is written twice


def test_weight_cache_copies_unknown_layouts_and_non_parameters():
    weights = parameters()
    cache, foreign = WeightCache(weights), torch.randn(3, 5, device=DEVICE)
    with cache.learn():
        cast_weight(foreign, torch.bfloat16)
    cache.fill()
    with cache.use():
        for tensor in (foreign, weights[0]):
            assert torch.equal(cast_weight(tensor, torch.bfloat16), tensor.detach().bfloat16())
            assert cast_weight(tensor, torch.float32) is tensor


def test_weight_cache_ignores_a_transposed_view_of_a_parameter():
    weight = torch.nn.Parameter(torch.randn(4, 4, device=DEVICE))
    cache = WeightCache([weight])
    with cache.learn():
        cast_weight(weight, torch.bfloat16)
    cache.fill()
    with cache.use():
        assert torch.equal(cast_weight(weight.T, torch.bfloat16), weight.detach().T.bfloat16())


def test_weight_cache_rejects_use_before_fill():
    weights = parameters()
    cache = WeightCache(weights)
    with cache.learn():
        cast_weight(weights[0], torch.bfloat16)
    with pytest.raises(ValueError, match="fill"), cache.use():
        pass
