"""LinearNO: consequences of the softmaxes over slices and over points, and the initialisation."""

import math

import pytest
import torch
from torch import nn

from sigmasolver.models import Options, SolverConfig, build_model
from sigmasolver.models.baselines.linearno import LinearAttention

CONFIG = SolverConfig((6, 5), 1, 1, width=8, heads=2, slices=5, modes=1)


def field(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def perturbed(local):
    attention = LinearAttention(CONFIG, local).double()
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    return attention.eval()


def test_linear_attention_preserves_constants():
    """Rows of Q and columns of K sum to one, so Q K^T preserves constants exactly: no mass, no 1e-5."""
    attention, u = perturbed(local=False), field(8)
    value = torch.cat([head @ attention.value.weight.T for head in attention.embed(u).chunk(2)])
    expected = attention.project(value).expand(6, 5, 8)
    torch.testing.assert_close(attention(u.expand(1, 6, 5, 8))[0], expected, rtol=0, atol=1e-13)


def test_plain_linear_attention_is_permutation_equivariant():
    """And doubling every point changes nothing. Neither holds for the local form."""
    Y = field(1, 30, 8)
    order = torch.randperm(30)
    for local, equivariant in ((False, True), (True, False)):
        attention = perturbed(local)

        def on_grid(points, attention=attention):
            return attention(points.reshape(1, -1, 5, 8)).reshape(points.shape)

        permuted = (on_grid(Y[:, order]) - on_grid(Y)[:, order]).abs().max()
        doubled = (on_grid(Y.repeat_interleave(2, 1))[:, ::2] - on_grid(Y)).abs().max()
        assert (permuted < 1e-12) == equivariant and (doubled < 1e-12) == equivariant


@pytest.mark.parametrize("name", ["linearno", "linearno-plain"])
def test_linearno_is_invariant_to_the_order_of_slices(small_model, name):
    model, x = small_model(name), field(2, 12, 9, 2)
    before, order = model(x), torch.tensor([3, 0, 4, 1, 2])
    attentions = [module for module in model.modules() if isinstance(module, LinearAttention)]
    with torch.no_grad():
        for attention in attentions:
            attention.query.weight.copy_(attention.query.weight[order])
    assert (model(x) - before).abs().max() > 1e-5
    with torch.no_grad():
        for attention in attentions:
            attention.key.weight.copy_(attention.key.weight[order])
    torch.testing.assert_close(model(x), before, rtol=0, atol=1e-12)


def test_linearno_temperatures_are_clipped():
    attention, Y = perturbed(local=True), field(1, 6, 5, 8)
    outputs = []
    for side in (attention.query_temperature, attention.key_temperature):
        original = side.value.detach().clone()
        for raw, clipped in ((-2.0, 0.01), (0.003, 0.01), (30.0, 1.0)):
            with torch.no_grad():
                side.value.fill_(raw)
                extreme = attention(Y)
                side.value.fill_(clipped)
            assert torch.equal(extreme, attention(Y))
        outputs.append(attention(Y))
        with torch.no_grad():
            side.value.copy_(original)
    assert (outputs[0] - outputs[1]).abs().max() > 1e-3


def test_linearno_initialisation_is_as_published():
    torch.manual_seed(3)
    local, plain = (
        build_model(name, grid=(16, 16), in_channels=1, out_channels=1, width=128, depth=1).blocks[0].attention.operator
        for name in ("linearno", "linearno-plain")
    )
    assert local.embed.weight.std().item() == pytest.approx(math.sqrt(2 / (128 * 9)), rel=0.02)
    # Normal, not uniform: the fourth moment is three times the variance squared.
    assert ((local.embed.weight**4).mean() / local.embed.weight.var() ** 2).item() == pytest.approx(3, rel=0.05)
    assert local.embed.bias.abs().max() == 0
    for layer in (plain.embed, plain.project, local.project[0], local.project[2]):
        assert layer.weight.std().item() == pytest.approx(0.02, rel=0.05) and layer.bias.abs().max() == 0
    for attention in (local, plain):
        for layer in (attention.query, attention.key, attention.value):
            assert layer.weight.std().item() == pytest.approx(0.02, rel=0.2) and layer.bias is None
    assert (local.query_temperature.value == 0.5).all() and (local.key_temperature.value == 0.5).all()
    assert isinstance(plain.key_temperature, nn.Identity)


def test_linearno_dropout_acts_in_training_only(small_model):
    model, plain = small_model("linearno", options=Options(dropout=0.5)), small_model("linearno")
    plain.load_state_dict(model.state_dict())
    x = field(1, 12, 9, 2)
    assert torch.equal(model(x), plain(x))
    assert not torch.equal(model.train()(x), plain(x))
