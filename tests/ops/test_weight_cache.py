"""Layouts of all parameters made by one kernel. On a GPU for real, elsewhere through Triton's interpreter."""

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


def asked(given):
    first, second, _, third, fourth = given
    return [arrange(one, layout) for one, layout in zip((first, second, second, third, fourth), LAYOUTS, strict=True)]


def test_layouts_made_at_once_are_those_made_one_by_one():
    given = parameters()
    cache = WeightCache(given)
    with cache.learn():
        alone = asked(given)
    assert torch.equal(alone[3][:70], given[3].detach().T.bfloat16()) and not alone[3][70:].any()
    assert torch.equal(alone[2][:, :1250].flatten(), given[1]) and not alone[2][:, 1250:].any()
    cache.fill()
    with torch.no_grad():
        for one in given:
            one.mul_(1.7).add_(0.3)  # what counts are the values at the time of `use`
    expected = [one.clone() for one in asked(given)]
    graph = torch.cuda.CUDAGraph() if GPU else None
    # On a GPU layouts are there for the step that is captured, and for nobody else.
    with torch.cuda.graph(graph, capture_error_mode="thread_local") if graph else nullcontext(), cache.use():
        found = asked(given)
        again = asked(given)
    if graph:
        graph.replay()
    for one, two, three in zip(found, expected, again, strict=True):
        rounded = one.dtype == torch.bfloat16 and DEVICE == "cpu"  # the interpreter cuts off instead
        torch.testing.assert_close(one, two, rtol=2**-7 if rounded else 0, atol=0)
        assert one.data_ptr() == three.data_ptr()  # nothing is made twice


def test_what_was_not_learned_or_is_no_parameter_is_copied():
    given = parameters()
    cache, stranger = WeightCache(given), torch.randn(3, 5, device=DEVICE)
    with cache.learn():
        cast_weight(stranger, torch.bfloat16)
    cache.fill()
    with cache.use():
        for one in (stranger, given[0]):
            assert torch.equal(cast_weight(one, torch.bfloat16), one.detach().bfloat16())
            assert cast_weight(one, torch.float32) is one


def test_transposed_view_of_a_parameter_is_not_taken_for_it():
    weight = torch.nn.Parameter(torch.randn(4, 4, device=DEVICE))
    cache = WeightCache([weight])
    with cache.learn():
        cast_weight(weight, torch.bfloat16)
    cache.fill()
    with cache.use():
        assert torch.equal(cast_weight(weight.T, torch.bfloat16), weight.detach().T.bfloat16())


def test_layouts_are_not_used_before_their_table_is_written():
    given = parameters()
    cache = WeightCache(given)
    with cache.learn():
        cast_weight(given[0], torch.bfloat16)
    with pytest.raises(ValueError, match="fill"), cache.use():
        pass
