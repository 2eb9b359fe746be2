"""AdamW: to the bit torch's, without loading torch's compiler."""

import subprocess
import sys
from pathlib import Path

import torch

from sigmasolver.train.optimisers import AdamW


def trained(form):
    """Weights and the state after a few steps, a stop and a few more."""
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(5, 3)), torch.nn.Parameter(torch.randn(3))]

    def steps(optimiser):
        for _ in range(4):
            optimiser.zero_grad(set_to_none=True)
            (torch.randn(2, 5) @ weights[0] + weights[1]).square().sum().backward()
            optimiser.step()
        return optimiser.state_dict()

    state = steps(form(weights, lr=torch.tensor(0.01), weight_decay=0.1, fused=True))
    resumed = form(weights, lr=torch.tensor(0.01), weight_decay=0.1, fused=True)
    resumed.load_state_dict(state)
    return [*weights, *(one for each in steps(resumed)["state"].values() for one in each.values())]


def test_adamw_equals_torch_adamw_to_the_bit():
    for one, two in zip(trained(AdamW), trained(torch.optim.AdamW), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=0)


def test_weights_move_without_a_graph_of_the_step():
    weight = torch.nn.Parameter(torch.ones(2))
    optimiser = AdamW([weight], lr=0.1)
    loss = optimiser.step(lambda: (weight.sum().backward(), weight.sum())[1])
    assert loss.requires_grad and weight.is_leaf and weight.grad_fn is None and (weight < 1).all()


def test_training_does_not_load_the_compiler(tmp_path):
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
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[2])
