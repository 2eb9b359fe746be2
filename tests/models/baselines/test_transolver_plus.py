"""Transolver++: parity with a reference, noise, temperatures, and the sizes of both forms."""

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from sigmasolver.models import Options, SolverConfig, count_parameters
from sigmasolver.models.baselines.transolver_plus import EideticAttention, GumbelRouting, transolver_plus
from sigmasolver.ops.softmax import gumbel
from tests.models.baselines import reference

CONFIG = SolverConfig((6, 5), 2, 3, width=16, depth=2, heads=2, slices=4, modes=1)
NS2D, KF2D = SolverConfig((64, 64), 10, 1, width=256), SolverConfig((128, 128), 10, 4)
DARCY = SolverConfig((85, 85), 1, 1, slices=64, options=Options(expansion=1))
FORMS = {"transolver-plus": True, "transolver-plus-linear": False}


def field(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def expected_count(config, local):
    """Lift, offset, final norm and readout; per block two norms, an MLP and the attention."""
    C, h, M, e, d = config.width, config.heads, config.slices, config.width // config.heads, config.axes
    inner, positions = config.options.expansion * C, config.lattice**config.axes
    lift = (positions + config.in_channels) * 2 * C + 2 * C + 2 * C * C + C
    outside = lift + C + 2 * C + C * config.out_channels + config.out_channels
    embed = C * C * (3**d if local else 1) + C
    temperature = e * M + M + M + 1 + h
    attention = embed + temperature + (e * M + M) + 3 * e * e + (C * C + C)
    return outside + config.depth * (4 * C + C * inner + inner + inner * C + C + attention)


@pytest.mark.parametrize(
    ("name", "config", "count", "millions"),
    [
        ("transolver-plus", NS2D, 7_571_017, 7.57),
        ("transolver-plus", KF2D, 1_912_396, 1.91),
        ("transolver-plus", DARCY, 1_655_497, 1.66),
        ("transolver-plus-linear", NS2D, 3_376_713, 3.38),
        ("transolver-plus", SolverConfig((60, 60, 60), 40, 8), 4_279_888, 4.28),
    ],
)
def test_transolver_plus_count(name, config, count, millions):
    assert count_parameters(name, config) == expected_count(config, FORMS[name]) == count
    assert round(count / 1e6, 2) == millions


def reference_block(local):
    """Point by point, without noise."""

    def attention(Y, w, config):
        X = reference.convolution(Y, w / "embed", config.padding) if local else reference.affine(Y, w / "embed")
        M, outputs = config.slices, []
        first, last = w / "routing.cooling.0", w / "routing.cooling.2"
        for x, beta in zip(reference.heads_of(X, config), w["routing.temperature"], strict=True):
            t = reference.gelu(reference.affine(reference.gelu(reference.affine(x, first)), last)) + beta
            s = reference.affine(x, w / "routing.project")
            P = np.array([reference.softmax(s[n] / max(t[n, 0], 0.01)) for n in range(len(x))])
            Z = np.array([sum(P[n, m] * x[n] for n in range(len(x))) / (sum(P[:, m]) + 1e-5) for m in range(M)])
            outputs.append(P @ reference.updated(Z, w / "update", "replace"))
        return reference.affine(np.concatenate(outputs, -1), w / "project").reshape(Y.shape)

    return reference.attention_block(attention)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("grid", [(9,), (4, 5), (3, 2, 4)])
def test_transolver_plus_in_eval_mode_equals_the_reference(small_model, name, grid):
    model, x = small_model(name, grid), field(1, *grid, 2)
    with torch.no_grad():  # one head below the lowest temperature
        for block in model.blocks:
            block.attention.operator.routing.temperature.copy_(torch.tensor([-0.3, 0.8]))
        fast = model(x)[0].numpy()
    expected = reference.solver(model, x[0].numpy(), reference_block(FORMS[name]))
    np.testing.assert_allclose(fast, expected, rtol=0, atol=1e-11)


def test_transolver_plus_gradients_equal_finite_differences(small_model):
    model = small_model("transolver-plus", (8, 8), depth=1)
    keys, values = zip(*model.named_parameters(), strict=True)

    def call(x, *parameters):
        return torch.func.functional_call(model, dict(zip(keys, parameters, strict=True)), (x,))

    x = field(1, 3, 4, 2).requires_grad_()
    assert torch.autograd.gradcheck(call, (x, *values), fast_mode=True)


# --- temperature


def test_gumbel_routing_temperatures_are_per_point_and_clamped():
    routing, X = GumbelRouting(8, 2, 5, "training").double().eval(), 30 * field(3, 2, 40, 8)
    with torch.no_grad():
        for parameter in routing.cooling.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
        routing.temperature.copy_(torch.tensor([-0.1, 0.5]))
        t = routing.temperatures(X)
    assert t.shape == (3, 2, 40, 1) and t.min() == 0.01
    assert (t[:, 0] == 0.01).any() and t.std() > 0.01
    assert (t[:, 1] >= 0.5 - 0.17).all(), "GELU is never below -0.17"


def test_gumbel_routing_is_uniform_when_hot_and_sharp_when_cold():
    routing, X = GumbelRouting(8, 1, 5, "training").double().eval(), field(1, 1, 200, 8)
    with torch.no_grad():
        routing.project.weight.normal_()
        routing.temperature.fill_(100.0)
        uniform = routing(X)
        routing.temperature.fill_(-5.0)
        sharp = routing(X)
    torch.testing.assert_close(uniform, torch.full_like(uniform, 1 / 5), rtol=0, atol=0.05)
    best = routing.project(X).argmax(-1)
    assert torch.equal(sharp.argmax(-1), best) and sharp.amax(-1).mean() > 0.99


# --- noise


def test_gumbel_distribution():
    """Mean 0.5772, variance pi^2 / 6, and the cumulative distribution function exp(-exp(-g))."""
    draws = gumbel(torch.rand(200_000, dtype=torch.float64)).sort().values
    assert draws.mean().item() == pytest.approx(0.57722, abs=0.015)
    assert draws.var().item() == pytest.approx(math.pi**2 / 6, rel=0.02)
    ranks = (torch.arange(len(draws), dtype=torch.float64) + 0.5) / len(draws)
    assert (torch.exp(-torch.exp(-draws)) - ranks).abs().max() < 2 / math.sqrt(len(draws))
    ends = gumbel(torch.tensor([0.0, 1.0]))
    assert torch.isfinite(ends).all() and ends[0] < -2.9 and ends[1] > 15


def test_gumbel_routing_in_training_samples_the_softmax():
    """The argmax of logits plus Gumbel noise is slice m with probability softmax(s)_m, at any temperature."""
    routing = GumbelRouting(4, 1, 3, "training").train()
    with torch.no_grad():
        routing.project.weight.zero_()
        routing.project.bias.copy_(torch.tensor([0.0, 1.0, -0.5]))
        slices = routing(torch.zeros(1, 1, 60_000, 4)).argmax(-1).flatten()
    shares = torch.bincount(slices, minlength=3) / len(slices)
    torch.testing.assert_close(shares, routing.project.bias.softmax(0), rtol=0, atol=0.01)


def test_gumbel_noise_is_off_in_eval_mode_unless_always():
    forms = ("training", "always")
    attentions = {noise: EideticAttention(CONFIG, local=False, noise=noise).double() for noise in forms}
    attentions["always"].load_state_dict(attentions["training"].state_dict())
    Y = field(2, 6, 5, 16)
    noiseless = attentions["training"].eval()(Y)
    assert torch.equal(attentions["training"](Y), noiseless)
    torch.manual_seed(1)
    noisy = attentions["training"].train()(Y)
    torch.manual_seed(1)
    released = attentions["always"].eval()(Y)
    assert torch.equal(noisy, released) and not torch.equal(noisy, noiseless)
    assert not torch.equal(attentions["always"](Y), released)


def test_eidetic_attention_with_one_slice_is_the_mean():
    """P = 1 whatever the noise and temperature: every point gets the mean of X times W_v."""
    config = replace(CONFIG, slices=1)
    attention, Y = EideticAttention(config).double().train(), field(1, 6, 5, 16)
    mean = attention.embed(Y).sum(dim=(1, 2)) / (30 + 1e-5)
    mean = (mean.reshape(2, 8) @ attention.update.attention.value.weight.T).reshape(1, 16)
    expected = (mean @ attention.project.weight.T + attention.project.bias).expand(6, 5, 16)
    torch.testing.assert_close(attention(Y)[0], expected, rtol=0, atol=1e-13)


def test_transolver_plus_initialisation_is_as_published():
    torch.manual_seed(3)
    attention = EideticAttention(SolverConfig((16, 16), 1, 1, width=128, heads=2))
    routing = attention.routing
    for layer in (routing.project, routing.cooling[0], attention.project, attention.update.attention.query):
        assert layer.weight.std().item() == pytest.approx(0.02, rel=0.06)
    for layer in (routing.project, routing.cooling[0], routing.cooling[2], attention.project):
        assert layer.bias.abs().max() == 0
    assert (routing.temperature == 0.5).all()
    assert attention.embed.weight.abs().max() <= 1 / math.sqrt(128 * 9)


def test_transolver_plus_dropout_and_errors():
    dropped = EideticAttention(replace(CONFIG, options=Options(dropout=0.5)), local=False).double()
    assert (dropped(field(1, 6, 5, 16)) == 0).double().mean().item() == pytest.approx(0.5, abs=0.15)
    with pytest.raises(ValueError, match=r'noise is "never"; choose from training, always\.'):
        partial(transolver_plus, noise="never")(CONFIG)
