"""Grid constants are made once, outlive inference mode, and are never left behind by a tracer."""

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from sigmasolver.ops.constants import MAX_CACHED, grid_constant


def counted():
    calls = []

    @grid_constant
    def ones(n: int) -> torch.Tensor:
        calls.append(n)
        return torch.ones(n)

    return ones, calls


def test_made_once_per_argument_and_the_oldest_forgotten():
    ones, calls = counted()
    assert ones(3) is ones(3) and calls == [3]
    for n in range(10, 10 + MAX_CACHED):
        ones(n)
    ones(3)
    assert calls.count(3) == 2


def test_first_use_in_inference_mode_still_trains():
    ones, _ = counted()
    with torch.inference_mode():
        ones(4)
    weight = torch.ones(4, requires_grad=True)
    (weight * ones(4)).sum().backward()
    assert weight.grad is not None and weight.grad.tolist() == [1.0] * 4


def test_fake_tensors_are_not_remembered():
    ones, _ = counted()
    with FakeTensorMode():
        assert isinstance(ones(5), FakeTensor)
    assert type(ones(5)) is torch.Tensor


def test_wrappers_of_a_function_transform_are_not_remembered():
    ones, _ = counted()
    torch.func.jvp(lambda x: x * ones(6), (torch.ones(6),), (torch.ones(6),))
    assert ones(6).data_ptr()
