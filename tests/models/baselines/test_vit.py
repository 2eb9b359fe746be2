"""ViT: parity with a reference, patches and their order, positions on other grids, derivatives, initialisation."""

import itertools
import math

import numpy as np
import pytest
import torch

from sigmasolver.models import Options, SolverConfig, build_model
from sigmasolver.models.baselines.vit import SelfAttention, from_patches, to_patches, vit
from sigmasolver.ops.attention import attention
from tests.models.baselines import reference

GRIDS = [(16,), (12, 9), (8, 5, 4)]


def field(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def self_attention(Y, w, config):
    """(N, C), head by head and token by token."""
    outputs = []
    q, k, v = (Y @ w[f"{name}.weight"].T for name in ("query", "key", "value"))
    for Q, K, V in zip(*(np.split(tensor, config.heads, -1) for tensor in (q, k, v)), strict=True):
        outputs.append([reference.softmax(K @ row / math.sqrt(len(row))) @ V for row in Q])
    return reference.affine(np.concatenate(outputs, -1), w / "project")


def reference_model(model, x):
    """One sample (*grid, C_in) on the grid of the config."""
    config, w, grid = model.config, reference.Weights(model.state_dict()), x.shape[:-1]
    x = np.pad(x, [(0, -n % 4) for n in grid] + [(0, 0)])
    cells = list(np.ndindex(*(n // 4 for n in x.shape[:-1])))
    windows = [tuple(slice(4 * c, 4 * c + 4) for c in cell) for cell in cells]
    T = np.array([reference.affine(x[window].ravel(), w / "embed") for window in windows])
    T = T + np.array([w["positions"][cell] for cell in cells])
    for index in range(config.depth):
        block = w / f"blocks.{index}"
        norm, operator = block / "attention.norm", block / "attention.operator"
        T = T + self_attention(reference.layer_norm(T, norm), operator, config)
        T = T + reference.perceptron(reference.layer_norm(T, block / "mlp.norm"), block / "mlp.operator")
    rows = reference.affine(reference.layer_norm(T, w / "norm"), w / "readout")
    out = np.zeros((*x.shape[:-1], config.out_channels))
    for window, row in zip(windows, rows, strict=True):
        out[window] = row.reshape(out[window].shape)
    return out[tuple(slice(n) for n in grid)]


@pytest.mark.parametrize("grid", [*GRIDS, (3, 2)])
def test_vit_equals_the_reference(small_model, grid):
    model, x = small_model("vit", grid), field(1, *grid, 2)
    with torch.no_grad():
        np.testing.assert_allclose(model(x)[0].numpy(), reference_model(model, x[0].numpy()), rtol=0, atol=1e-11)


@pytest.mark.parametrize("grid", [(8,), (8, 12), (4, 8, 12)])
def test_to_patches_and_from_patches_round_trip(grid):
    x = field(2, *grid, 3)
    T = to_patches(x, 4)
    assert T.shape == (2, *(n // 4 for n in grid), 4 ** len(grid) * 3)
    for cell in itertools.product(*(range(n // 4) for n in grid)):
        block = x[(slice(None), *(slice(4 * c, 4 * c + 4) for c in cell))]
        assert torch.equal(T[(slice(None), *cell)], block.reshape(2, -1))
    assert torch.equal(from_patches(T, 4), x)


@pytest.mark.parametrize("grid", [(16,), (12, 8), (8, 4, 8)])
def test_vit_without_positions_is_permutation_equivariant(small_model, grid):
    model, x = small_model("vit", grid), field(1, *grid, 2)
    axes, tokens = len(grid), [n // 4 for n in grid]
    order = torch.randperm(math.prod(tokens))

    def shuffled(y):
        patches = to_patches(y, 4)
        return from_patches(patches.flatten(1, axes)[:, order].reshape(patches.shape), 4)

    assert (model(shuffled(x)) - shuffled(model(x))).abs().max() > 1e-3
    with torch.no_grad():
        model.positions.zero_()
    torch.testing.assert_close(model(shuffled(x)), shuffled(model(x)), rtol=0, atol=1e-12)


def test_vit_positions_are_interpolated_on_another_grid(small_model):
    """Embeddings that are linear along an axis stay linear between the outermost patch centres."""
    model = small_model("vit", (16, 8))
    assert model.positions.shape == (4, 2, 16) and model._position_embedding((4, 2)) is model.positions
    with torch.no_grad():
        model.positions.copy_(torch.arange(4.0)[:, None, None].expand(4, 2, 16))
    embedding = model._position_embedding((8, 5))
    centres = (torch.arange(8, dtype=torch.float64) + 0.5) / 2 - 0.5
    torch.testing.assert_close(embedding[:, 3, 7], centres.clamp(0, 3), rtol=0, atol=1e-13)
    x = field(1, 29, 20, 2)
    assert model(x).shape == (1, 29, 20, 3)
    model.positions.grad = None
    model(x).sum().backward()
    assert (model.positions.grad.abs().amax(-1) > 0).all()


def test_attention_under_jvp_equals_the_definition():
    Q, K, V = field(3, 2, 2, 7, 4)
    plain = attention(Q, K, V)
    expected = torch.softmax(Q @ K.mT / 2, -1) @ V
    torch.testing.assert_close(plain, expected, rtol=0, atol=1e-14)
    direction = field(*Q.shape)
    value, slope = torch.func.jvp(lambda q: attention(q, K, V), (Q,), (direction,))
    torch.testing.assert_close(value, plain, rtol=0, atol=1e-14)
    h = 1e-6
    ahead, behind = (attention(Q + step * direction, K, V) for step in (h, -h))
    torch.testing.assert_close(slope, (ahead - behind) / (2 * h), rtol=1e-6, atol=1e-8)


def reference_attention(Q, K, V, mask):
    scores = Q @ K.mT * Q.shape[-1] ** -0.5
    return torch.softmax(scores if mask is None else scores.masked_fill(~mask, -torch.inf), dim=-1) @ V


@pytest.mark.parametrize("outer", [(3,), (3, 2)])
@pytest.mark.parametrize("masked", [False, True])
def test_masked_attention_on_several_leading_axes(outer, masked):
    """Bitwise equal to scaled_dot_product_attention on 4-d tensors; under transforms, equal to the definition."""
    Q, K, V = (tensor.requires_grad_() for tensor in field(3, *outer, 2, 7, 4))
    mask = torch.rand(7, 7) < 0.5 if masked else None
    if mask is not None:
        mask |= torch.eye(7, dtype=torch.bool)
    direction = field(*Q.shape)

    def fused(q, k, v):
        flat = [tensor.reshape(-1, 2, 7, 4) for tensor in (q, k, v)]
        return torch.nn.functional.scaled_dot_product_attention(*flat, attn_mask=mask).reshape(q.shape)

    def ours(q, k, v):
        return attention(q, k, v, mask_NN=mask)

    for gradient, expected in zip(
        *(torch.autograd.grad(f(Q, K, V).square().sum(), (Q, K, V)) for f in (ours, fused)), strict=True
    ):
        assert torch.equal(gradient, expected)
    assert torch.equal(ours(Q, K, V), fused(Q, K, V))
    torch.testing.assert_close(ours(Q, K, V), reference_attention(Q, K, V, mask), rtol=0, atol=1e-14)
    derivatives = [
        torch.func.jvp(lambda q, call=call: call(q, K, V), (Q,), (direction,))
        for call in (ours, lambda q, k, v: reference_attention(q, k, v, mask))
    ]
    assert all(torch.equal(result, expected) for result, expected in zip(*derivatives, strict=True))
    batched = torch.func.vmap(lambda q: ours(q, K, V))(torch.stack((Q, direction)))
    torch.testing.assert_close(batched[1], ours(direction, K, V), rtol=0, atol=1e-14)


def test_self_attention_with_equal_keys_is_the_mean():
    layer, Y = SelfAttention(SolverConfig((8, 8), 1, 1, width=8, heads=2)).double(), field(1, 3, 2, 8)
    with torch.no_grad():
        layer.key.weight.zero_()
    mean = layer.project(layer.value(Y).mean(dim=(1, 2), keepdim=True))
    torch.testing.assert_close(layer(Y), mean.expand(1, 3, 2, 8), rtol=0, atol=1e-13)


def test_vit_dropout_acts_in_training_only(small_model):
    model, plain = small_model("vit", options=Options(dropout=0.5)), small_model("vit")
    plain.load_state_dict(model.state_dict())
    x = field(1, 12, 9, 2)
    assert torch.equal(model(x), plain(x))
    assert not torch.equal(model.train()(x), plain(x))
    for block in model.blocks:  # also inside the attention, not only after it
        block.attention.operator.dropout.forward = lambda y: y
    assert not torch.equal(model(x), plain(x))


def test_vit_initialisation_is_that_of_transolver_sigma():
    torch.manual_seed(3)
    model = build_model("vit", grid=(64, 64), in_channels=4, out_channels=2, width=128, depth=1)
    operator, mlp = model.blocks[0].attention.operator, model.blocks[0].mlp.operator
    for weight in (model.positions, model.embed.weight, operator.query.weight, mlp[0].weight, model.readout.weight):
        assert weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert operator.query.bias is operator.key.bias is operator.value.bias is None
    assert operator.project.bias.abs().max() == mlp[2].bias.abs().max() == 0 and mlp[0].out_features == 512


def test_vit_with_another_patch_size():
    model = vit(SolverConfig((9, 6), 2, 1, width=8, heads=2, depth=1), patch=3)
    assert model.positions.shape == (3, 2, 8) and model(torch.randn(1, 9, 6, 2)).shape == (1, 9, 6, 1)
