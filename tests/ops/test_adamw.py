"""AdamW in one kernel against torch's own in float64. Without a GPU the kernel runs in Triton's interpreter."""

import pytest
import torch

from sigmasolver.ops import dispatch

pytest.importorskip("triton")
from sigmasolver.ops.fused import adamw as adamw_module
from sigmasolver.ops.fused.adamw import FusedAdamW
from tests.ops.device import DEVICE
from tests.ops.test_weight_cache import parameters


@pytest.fixture(autouse=True)
def fused_everywhere(monkeypatch):
    monkeypatch.setattr(dispatch, "interpreted", DEVICE == "cpu")


def set_gradients(tensors, step):
    """Set gradients of very different magnitudes, so that eps matters for some and not for others."""
    torch.manual_seed(step)
    for tensor in tensors:
        tensor.grad = (torch.randn(tensor.shape) * 10.0 ** -torch.randint(0, 9, (1,))).to(tensor)


def adamw(tensors):
    return torch.optim.AdamW(tensors, lr=torch.tensor(2**-7, device=DEVICE), weight_decay=0.1, fused=True)


def test_fused_adamw_matches_torch_in_float64(monkeypatch):
    """A step of torch's own with zero gradients creates the states: on a GPU it rounds its factors to float32, which
    changes the second moment by 1e-5 of the squared gradient."""
    monkeypatch.setattr(adamw_module, "PIECE", 256)  # several programs for a tensor, the last one only partly full
    narrow, wide = parameters(), parameters(torch.float64)
    ours, exact = adamw(narrow), adamw(wide)
    for step in range(12):
        set_gradients(narrow, step)
        if step == 0:
            for parameter in narrow:
                parameter.grad.zero_()
        for parameter, reference in zip(narrow, wide, strict=True):
            reference.grad = parameter.grad.double()
        exact.step()
        if step == 0:
            ours.step()
            continue
        assert FusedAdamW.supports(ours)
        fused = FusedAdamW(ours)
        fused._gradients = [parameter.grad for parameter in narrow]
        fused.fill()
        before = [parameter.detach().clone() for parameter in narrow]
        fused.step()
        assert all((parameter != old).any() for parameter, old in zip(narrow, before, strict=True))
    for parameter, reference in zip(narrow, wide, strict=True):
        torch.testing.assert_close(parameter.double(), reference, rtol=2e-6, atol=2e-6)
        assert int(ours.state[parameter]["step"]) == 12
        for name in ("exp_avg", "exp_avg_sq"):
            expected = exact.state[reference][name]
            error = (ours.state[parameter][name].double() - expected).abs().max() / expected.abs().max()
            assert error < 2e-6, (name, float(error))


def test_fused_adamw_serves_supported_tensors_only():
    float32_parameters = parameters()
    ours = adamw(float32_parameters)
    assert not FusedAdamW.supports(ours)  # no step yet, so no moments
    set_gradients(float32_parameters, 0)
    ours.step()
    assert FusedAdamW.supports(ours)
    with dispatch.plain():
        assert not FusedAdamW.supports(ours)
    wide = parameters(torch.float64)
    unsupported = adamw(wide)
    set_gradients(wide, 0)
    unsupported.step()
    assert not FusedAdamW.supports(unsupported)
    float32_parameters[0].grad = None
    assert not FusedAdamW.supports(ours)
