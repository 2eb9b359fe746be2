"""The cycle equals torch's own scheduler at every step, for numbers and for tensors."""

import pytest
import torch

from sigmasolver.train.schedule import OneCycle


@pytest.mark.parametrize("steps", [10, 137, 1000])
@pytest.mark.parametrize(
    ("warmup", "start_divisor", "final_divisor"), [(0.3, 25.0, 1e4), (0.2, 1e4, 1e5), (0.5, 10.0, 1.0)]
)
def test_equals_torchs_scheduler(steps, warmup, start_divisor, final_divisor):
    optimiser = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    reference = torch.optim.lr_scheduler.OneCycleLR(
        optimiser,
        max_lr=1e-3,
        total_steps=steps,
        pct_start=warmup,
        div_factor=start_divisor,
        final_div_factor=final_divisor,
    )
    cycle = OneCycle(1e-3, steps, warmup, start_divisor, final_divisor)
    expected = []
    for _ in range(steps):
        expected.append(reference.get_last_lr()[0])
        optimiser.step()
        if len(expected) < steps:
            reference.step()
    torch.testing.assert_close(
        cycle.rate(torch.arange(steps)), torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0
    )
    assert cycle.rate(steps // 2).item() == pytest.approx(expected[steps // 2])


def test_rises_to_the_peak_and_falls_to_the_end():
    cycle = OneCycle(2.0, 100)
    rates = cycle.rate(torch.arange(100))
    assert rates.argmax() == 29 and rates.max() == 2.0
    assert rates[0] == pytest.approx(2.0 / 25) and rates[-1] == pytest.approx(2.0 / 25 / 1e4)
    assert (rates[:30].diff() > 0).all() and (rates[29:].diff() < 0).all()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"steps": 0}, "at least one"),
        ({"max_lr": 0.0}, "must be positive"),
        ({"warmup": 1.5}, "from 0 to 1"),
        ({"final_divisor": 0.5}, "at least 1"),
    ],
)
def test_mistakes_are_one_sentence(change, says):
    with pytest.raises(ValueError, match=says):
        OneCycle(**{"max_lr": 1e-3, "steps": 10, **change})
