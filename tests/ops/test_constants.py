"""Grid constants are computed once, outlive inference mode, and are never cached during tracing."""

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from sigmasolver.ops.constants import MAX_CACHED, grid_constant


def counting_constant():
    calls = []

    @grid_constant
    def ones(n: int) -> torch.Tensor:
        calls.append(n)
        return torch.ones(n)

    return ones, calls


def test_grid_constant_is_computed_once_and_evicts_the_oldest():
    ones, calls = counting_constant()
    assert ones(3) is ones(3) and calls == [3]
    for n in range(10, 10 + MAX_CACHED):
        ones(n)
    ones(3)
    assert calls.count(3) == 2


def test_grid_constant_first_used_in_inference_mode_can_train():
    ones, _ = counting_constant()
    with torch.inference_mode():
        ones(4)
    weight = torch.ones(4, requires_grad=True)
    (weight * ones(4)).sum().backward()
    assert weight.grad is not None and weight.grad.tolist() == [1.0] * 4


def test_grid_constant_does_not_cache_fake_tensors():
    ones, _ = counting_constant()
    with FakeTensorMode():
        assert isinstance(ones(5), FakeTensor)
    assert type(ones(5)) is torch.Tensor


def test_grid_constant_does_not_cache_function_transform_wrappers():
    ones, _ = counting_constant()
    torch.func.jvp(lambda x: x * ones(6), (torch.ones(6),), (torch.ones(6),))
    assert ones(6).data_ptr()
