"""Transolver and its other two slice updates: relations between them, symmetries and initialisation."""

import math

import pytest
import torch

from sigmasolver.models import Options, SolverConfig, build_model
from sigmasolver.models.baselines.physics_attention import PhysicsAttention
from sigmasolver.models.baselines.transolver import transolver
from sigmasolver.models.layers import Convolution

CONFIG = SolverConfig((6, 5), 1, 1, width=16, heads=2, slices=4, modes=1)
UPDATES = ("transolver", "transolver-srpa", "transolver-keep")


def field(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def attentions(model):
    return [module for module in model.modules() if isinstance(module, PhysicsAttention)]


def test_transolver_srpa_with_gamma_zero_is_keep_bit_for_bit(small_model):
    residual, keep = small_model("transolver-srpa"), small_model("transolver-keep")
    keep.load_state_dict({k: v for k, v in residual.state_dict().items() if ".update." not in k})
    x = field(2, 12, 9, 2)
    assert (residual(x) - keep(x)).abs().max() > 1e-3
    with torch.no_grad():
        for attention in attentions(residual):
            attention.update.gamma.zero_()
    assert torch.equal(residual(x), keep(x))


def test_initial_transolver_srpa_is_keep_with_nonzero_gradient():
    def build(name):
        torch.manual_seed(5)
        return build_model(name, grid=(6, 5), in_channels=1, out_channels=1, width=16, depth=1, heads=2).double()

    residual, keep = build("transolver-srpa"), build("transolver-keep")
    keep.load_state_dict({k: v for k, v in residual.state_dict().items() if ".update." not in k})
    x = field(1, 6, 5, 1)
    assert torch.equal(residual(x), keep(x))
    residual(x).square().sum().backward()
    assert attentions(residual)[0].update.gamma.grad.abs().item() > 0


def test_srpa_update_is_keep_plus_gamma_replace(small_model):
    """For the slices of one block: residual(gamma) = keep + gamma replace."""
    residual = attentions(small_model("transolver-srpa"))[0]
    keep, replaced = (PhysicsAttention(CONFIG, kind).update.double() for kind in ("keep", "replace"))
    replaced.load_state_dict({k: v for k, v in residual.update.state_dict().items() if k != "gamma"})
    Z = field(2, 2, 5, 8)
    for gamma in (-1.5, 0.3, 2.0):
        with torch.no_grad():
            residual.update.gamma.fill_(gamma)
        torch.testing.assert_close(residual.update(Z), keep(Z) + gamma * replaced(Z), rtol=0, atol=1e-14)


@pytest.mark.parametrize("name", UPDATES)
def test_transolver_is_invariant_to_the_order_of_slices(small_model, name):
    model, x = small_model(name), field(2, 12, 9, 2)
    before, order = model(x), torch.tensor([3, 0, 4, 1, 2])
    with torch.no_grad():
        for attention in attentions(model):
            project = attention.routing.project
            project.weight.copy_(project.weight[order])
            project.bias.copy_(project.bias[order])
    torch.testing.assert_close(model(x), before, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", UPDATES)
def test_transolver_with_circular_padding_is_shift_equivariant(small_model, name):
    def defect(padding):
        model, x = small_model(name, options=Options(padding=padding)), field(1, 12, 9, 2)
        with torch.no_grad():
            model.lift[0].weight[:, :64].zero_()
        return (model(x.roll((5, 2), (1, 2))) - model(x).roll((5, 2), (1, 2))).abs().max()

    assert defect(("circular", "circular")) < 1e-12
    assert defect(None) > 1e-4


@pytest.mark.parametrize("kind", ["keep", "replace"])
def test_physics_attention_with_one_slice_is_the_mean(kind):
    """With one slice P = 1 and A = 1: keep returns the mean, replace the mean times W_v, both up to the 1e-5."""
    attention = PhysicsAttention(SolverConfig((6, 5), 1, 1, width=8, heads=2, slices=1, modes=1), kind).double()
    Y = field(1, 6, 5, 8)
    mean = attention.feature_path(Y).sum(dim=(1, 2)) / (30 + 1e-5)
    if kind == "replace":
        mean = (mean.reshape(2, 4) @ attention.update.attention.value.weight.T).reshape(1, 8)
    expected = (mean @ attention.project.weight.T + attention.project.bias).expand(6, 5, 8)
    torch.testing.assert_close(attention(Y)[0], expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("padding", [("zeros",), ("circular", "zeros"), ("zeros", "circular", "circular")])
def test_convolution_impulse_response_is_the_kernel(padding):
    """The response to an impulse at a corner is the flipped kernel; it wraps around on circular axes only."""
    axes = len(padding)
    convolution, x = Convolution(3, 3, padding).double(), torch.zeros(1, *(5,) * axes, 3, dtype=torch.float64)
    x[(0, *(0,) * axes, 1)] = 1
    response = convolution(x) - convolution.bias
    expected = torch.zeros_like(x)
    for cell in torch.cartesian_prod(*(torch.arange(3),) * axes).reshape(-1, axes).tolist():
        neighbour = [1 - c for c in cell]
        if all(end == "circular" or t >= 0 for t, end in zip(neighbour, padding, strict=True)):
            expected[(0, *(t % 5 for t in neighbour))] = convolution.weight[(slice(None), 1, *cell)].detach()
    torch.testing.assert_close(response, expected, rtol=0, atol=1e-14)


def test_transolver_initialisation_is_as_published():
    torch.manual_seed(3)
    model = build_model("transolver-srpa", grid=(16, 16), in_channels=1, out_channels=1, width=128, depth=1)
    attention, mlp = model.blocks[0].attention.operator, model.blocks[0].mlp.operator
    slices = attention.update.attention
    for layer in (model.lift[0], mlp[0], mlp[2], attention.project):
        assert layer.weight.std().item() == pytest.approx(0.02, rel=0.05) and layer.weight.mean().abs() < 1e-3
    for layer in (attention.routing.project, slices.query, slices.key, slices.value):
        assert layer.weight.std().item() == pytest.approx(0.02, rel=0.2)
    for layer in (model.lift[0], mlp[0], mlp[2], attention.project, attention.routing.project, model.readout):
        assert layer.bias.abs().max() == 0
    assert slices.query.bias is slices.key.bias is slices.value.bias is None
    for path in (attention.routing_path, attention.feature_path):
        bound = 1 / math.sqrt(128 * 9)
        assert 0.99 * bound < path.weight.abs().max() <= bound and 0.9 * bound < path.bias.abs().max() <= bound
        assert path.weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.02)
    assert (attention.routing.temperature == 0.5).all() and (attention.update.gamma == 0).all()
    assert all((norm.weight == 1).all() and (norm.bias == 0).all() for norm in (model.norm, model.blocks[0].mlp.norm))


def test_transolver_dropout_acts_in_training_only(small_model):
    model, plain = small_model("transolver", options=Options(dropout=0.5)), small_model("transolver")
    plain.load_state_dict(model.state_dict())
    x = field(1, 12, 9, 2)
    assert torch.equal(model(x), plain(x))
    assert not torch.equal(model.train()(x), plain(x))


def test_transolver_rejects_an_unknown_update():
    with pytest.raises(ValueError, match='update is "average"; choose from residual, replace, keep'):
        transolver(CONFIG, "average")
