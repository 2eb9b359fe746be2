"""AdamW is bitwise torch's, without importing torch's compiler; the learning rate cycle is torch's OneCycleLR."""

import pytest
import torch

from sigmasolver.train.adamw import AdamW
from sigmasolver.train.optimisers import OneCycle
from tests.forked import check_output


def trained(optimiser_class):
    """Return weights and optimiser state after a few steps, a resume and a few more steps."""
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(5, 3)), torch.nn.Parameter(torch.randn(3))]

    def steps(optimiser):
        for _ in range(4):
            optimiser.zero_grad(set_to_none=True)
            (torch.randn(2, 5) @ weights[0] + weights[1]).square().sum().backward()
            optimiser.step()
        return optimiser.state_dict()

    state = steps(optimiser_class(weights, lr=torch.tensor(0.01), weight_decay=0.1, fused=True))
    resumed = optimiser_class(weights, lr=torch.tensor(0.01), weight_decay=0.1, fused=True)
    resumed.load_state_dict(state)
    return [*weights, *(tensor for state in steps(resumed)["state"].values() for tensor in state.values())]


def test_adamw_is_bitwise_equal_to_torch():
    for actual, expected in zip(trained(AdamW), trained(torch.optim.AdamW), strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_adamw_step_builds_no_autograd_graph():
    weight = torch.nn.Parameter(torch.ones(2))
    optimiser = AdamW([weight], lr=0.1)
    loss = optimiser.step(lambda: (weight.sum().backward(), weight.sum())[1])
    assert loss.requires_grad and weight.is_leaf and weight.grad_fn is None and (weight < 1).all()


def test_training_does_not_import_the_compiler(tmp_path):
    program = f"""
import sys
from sigmasolver.recipes import changed, recipe_of
from sigmasolver.runs import Run
from sigmasolver.simulate.generate import generate
from sigmasolver.train.job import train_run
from tests.data.waves import Waves

store = generate(Waves(grid=8, frames=20), 4, 5, {str(tmp_path / "waves.h5")!r}).path
fields = ("task.inputs=('height',)", "task.targets=('height',)", "task.grid=(8,8)", "task.train=2", "task.test=2")
small = ("model.modes=3", "model.width=16", "model.depth=1", "model.heads=2", "model.slices=4", "train.updates=2")
train_run(changed(recipe_of("ns2d"), [*fields, *small]), store, Run({str(tmp_path / "run")!r}))
assert "torch._dynamo" not in sys.modules
"""
    check_output(program)


# --- the learning rate


@pytest.mark.parametrize("steps", [10, 137, 1000])
@pytest.mark.parametrize(
    ("warmup", "start_divisor", "final_divisor"), [(0.3, 25.0, 1e4), (0.2, 1e4, 1e5), (0.5, 10.0, 1.0)]
)
def test_one_cycle_equals_torch_one_cycle_lr(steps, warmup, start_divisor, final_divisor):
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


def test_one_cycle_rises_to_the_maximum_and_then_falls():
    cycle = OneCycle(2.0, 100)
    rates = cycle.rate(torch.arange(100))
    assert rates.argmax() == 29 and rates.max() == 2.0
    assert rates[0] == pytest.approx(2.0 / 25) and rates[-1] == pytest.approx(2.0 / 25 / 1e4)
    assert (rates[:30].diff() > 0).all() and (rates[29:].diff() < 0).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 0}, "at least 1"),
        ({"max_lr": 0.0}, "must be positive"),
        ({"warmup": 1.5}, "from 0 to 1"),
        ({"final_divisor": 0.5}, "at least 1"),
    ],
)
def test_one_cycle_rejects_invalid_settings(change, message):
    with pytest.raises(ValueError, match=message):
        OneCycle(**{"max_lr": 1e-3, "steps": 10, **change})
