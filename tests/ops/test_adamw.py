"""AdamW in one kernel against torch's own in float64. On a GPU for real, elsewhere through Triton's interpreter."""

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


def give_gradients(given, step):
    """Of very different size, so that eps counts for some and not for others."""
    torch.manual_seed(step)
    for one in given:
        one.grad = (torch.randn(one.shape) * 10.0 ** -torch.randint(0, 9, (1,))).to(one)


def adamw(given):
    return torch.optim.AdamW(given, lr=torch.tensor(2**-7, device=DEVICE), weight_decay=0.1, fused=True)


def test_steps_as_adamw_does_in_float64(monkeypatch):
    """The states begin with a step of torch's own without gradients: on a GPU it rounds its factors to float32, which
    puts 1e-5 of a gradient's square into the second moment."""
    monkeypatch.setattr(adamw_module, "PIECE", 256)  # several programs for a tensor, and a last one that is not full
    narrow, wide = parameters(), parameters(torch.float64)
    ours, exact = adamw(narrow), adamw(wide)
    for step in range(12):
        give_gradients(narrow, step)
        if step == 0:
            for one in narrow:
                one.grad.zero_()
        for one, other in zip(narrow, wide, strict=True):
            other.grad = one.grad.double()
        exact.step()
        if step == 0:
            ours.step()
            continue
        assert FusedAdamW.serves(ours)
        fused = FusedAdamW(ours)
        fused._gradients = [one.grad for one in narrow]
        fused.fill()
        before = [one.detach().clone() for one in narrow]
        fused.step()
        assert all((one != old).any() for one, old in zip(narrow, before, strict=True))
    for one, other in zip(narrow, wide, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=2e-6, atol=2e-6)
        assert int(ours.state[one]["step"]) == 12
        for name in ("exp_avg", "exp_avg_sq"):
            expected = exact.state[other][name]
            error = (ours.state[one][name].double() - expected).abs().max() / expected.abs().max()
            assert error < 2e-6, (name, float(error))


def test_serves_only_what_it_reads():
    given = parameters()
    ours = adamw(given)
    assert not FusedAdamW.serves(ours)  # no step yet, so no moments
    give_gradients(given, 0)
    ours.step()
    assert FusedAdamW.serves(ours)
    with dispatch.plain():
        assert not FusedAdamW.serves(ours)
    wide = parameters(torch.float64)
    other = adamw(wide)
    give_gradients(wide, 0)
    other.step()
    assert not FusedAdamW.serves(other)
    given[0].grad = None
    assert not FusedAdamW.serves(ours)
