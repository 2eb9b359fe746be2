"""Parity of the `Solver` baselines with their slow reference implementations, and of derivatives with finite
differences."""

import numpy as np
import pytest
import torch

from sigmasolver.models import Options
from tests.models.baselines import reference

ATTENTIONS = {
    "transolver": reference.physics_attention("replace"),
    "transolver-srpa": reference.physics_attention("residual"),
    "transolver-keep": reference.physics_attention("keep"),
    "linearno": reference.linear_attention(local=True),
    "linearno-plain": reference.linear_attention(local=False),
}
BLOCKS = {name: reference.attention_block(attention) for name, attention in ATTENTIONS.items()}
BLOCKS["ffno"] = reference.factorised
NAMES = tuple(BLOCKS)
CONFIG_POINTS = 8
"""Points per axis of the config; the models then run on grids with fewer modes than they have."""


def assert_parity(model, name, grid):
    x = torch.randn(1, *grid, 2, dtype=torch.float64)
    with torch.no_grad():
        fast = model(x)[0].numpy()
    np.testing.assert_allclose(fast, reference.solver(model, x[0].numpy(), BLOCKS[name]), rtol=0, atol=1e-11)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("grid", [(9,), (4, 5), (3, 2, 4)])
def test_solver_baseline_parity_in_every_dimension(small_model, name, grid):
    assert_parity(small_model(name, (CONFIG_POINTS,) * len(grid)), name, grid)


@pytest.mark.parametrize("name", NAMES)
def test_solver_baseline_parity_on_another_grid_with_other_options(small_model, name):
    """Coordinates, one circular axis, another expansion, temperatures out of range on both sides."""
    options = Options(expansion=3, positions="coordinates", padding=("circular", "zeros"))
    model = small_model(name, (8, 8), options=options)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "temperature" in key:
                parameter.copy_(torch.tensor([-0.3, 7.0]))
    assert_parity(model, name, (5, 3))


@pytest.mark.parametrize("name", NAMES)
def test_solver_baseline_gradients_equal_finite_differences(small_model, name):
    model = small_model(name, (CONFIG_POINTS, CONFIG_POINTS), depth=1)
    keys, values = zip(*model.named_parameters(), strict=True)

    def call(x, *parameters):
        return torch.func.functional_call(model, dict(zip(keys, parameters, strict=True)), (x,))

    x = torch.randn(1, 3, 4, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(call, (x, *values), fast_mode=True)


@pytest.mark.parametrize("name", NAMES)
def test_solver_baseline_forward_mode_ad_equals_finite_differences(small_model, name):
    model = small_model(name, (CONFIG_POINTS, CONFIG_POINTS))
    x, v = torch.randn(2, 1, 5, 4, 2, dtype=torch.float64)
    _, slope = torch.func.jvp(model, (x,), (v,))
    h = 1e-6
    torch.testing.assert_close(slope, (model(x + h * v) - model(x - h * v)) / (2 * h), rtol=1e-6, atol=1e-7)
