"""Layers, slices, spectral operator and block: what each part must and must not do."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from sigmasolver.models.block import Block, BlockSpec, Branch, Stage
from sigmasolver.models.config import Options, SolverConfig
from sigmasolver.models.layers import Mixing, TimeEmbedding, coordinates, distances
from sigmasolver.models.slices import PhysicalOperator, SliceUpdate
from sigmasolver.models.spectral import SpectralOperator
from sigmasolver.models.variants import VARIANTS

CPU = torch.device("cpu")
CONFIG = SolverConfig((6, 5), 1, 1, width=16, heads=2, slices=4, modes=2)


def shaken(module):
    module = module.double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return module.eval()


def test_coordinates_include_both_ends():
    grid = coordinates((3, 5), torch.float64, CPU)
    assert grid.shape == (3, 5, 2)
    assert grid[0, 0].tolist() == [0, 0] and grid[-1, -1].tolist() == [1, 1] and grid[1, 1].tolist() == [0.5, 0.25]


@pytest.mark.parametrize("grid", [(4,), (4, 3), (3, 4, 2)])
def test_distances_are_euclidean_to_every_lattice_point(grid):
    reference = 3
    table = distances(grid, reference, torch.float64, CPU)
    points = coordinates(grid, torch.float64, CPU).reshape(-1, len(grid))
    lattice = coordinates((reference,) * len(grid), torch.float64, CPU).reshape(-1, len(grid))
    expected = torch.cdist(points, lattice, compute_mode="donot_use_mm_for_euclid_dist")
    torch.testing.assert_close(table.reshape(expected.shape), expected, rtol=0, atol=1e-15)


def test_routing_rows_sum_to_one_and_temperature_is_clipped():
    operator = shaken(PhysicalOperator(8, 2, 5, ("zeros", "zeros")))
    seen = []
    operator.routing.register_forward_hook(lambda _, inputs, P: seen.append((inputs[0], P)))
    Y = torch.randn(2, 6, 5, 8, dtype=torch.float64)
    operator(Y)
    torch.testing.assert_close(seen[0][1].sum(-1), torch.ones(2, 2, 30, dtype=torch.float64), rtol=0, atol=1e-14)
    for wild, clipped in ((-3.0, 0.1), (0.02, 0.1), (40.0, 5.0)):
        with torch.no_grad():
            operator.routing.temperature.fill_(wild)
        extreme = operator.routing(seen[0][0])
        with torch.no_grad():
            operator.routing.temperature.fill_(clipped)
        assert torch.equal(extreme, operator.routing(seen[0][0]))


def test_the_three_updates_are_the_papers_formulas():
    Z = torch.randn(2, 3, 5, 4, dtype=torch.float64)
    residual = shaken(SliceUpdate("residual", 4))
    vanilla = SliceUpdate("replace", 4).double()
    vanilla.load_state_dict({k: v for k, v in residual.state_dict().items() if k != "gamma"})
    attention = residual.attention
    Wq, Wk, Wv = attention.query.weight.T, attention.key.weight.T, attention.value.weight.T
    A = torch.softmax((Z @ Wq) @ (Z @ Wk).mT / 4**0.5, -1)
    torch.testing.assert_close(attention.weights(Z), A, rtol=0, atol=1e-14)
    torch.testing.assert_close(vanilla(Z), A @ Z @ Wv, rtol=0, atol=1e-14)
    torch.testing.assert_close(residual(Z), Z + residual.gamma * (A @ Z @ Wv), rtol=0, atol=1e-14)
    assert torch.equal(SliceUpdate("keep", 4)(Z), Z)
    assert not list(SliceUpdate("keep", 4).parameters())


def test_gamma_zero_is_the_keep_update_bit_for_bit():
    operator = shaken(PhysicalOperator(8, 2, 5, ("zeros", "zeros")))
    keep = PhysicalOperator(8, 2, 5, ("zeros", "zeros"), update="keep").double()
    keep.load_state_dict({k: v for k, v in operator.state_dict().items() if not k.startswith("update.")})
    Y = torch.randn(2, 6, 5, 8, dtype=torch.float64)
    assert not torch.equal(operator(Y), keep(Y))
    with torch.no_grad():
        operator.update.gamma.zero_()
    assert torch.equal(operator(Y), keep(Y))


@pytest.mark.parametrize("grid", [(9,), (6, 5), (3, 4, 5)])
def test_physical_operator_equals_its_equations_point_by_point(grid):
    """eq:physical-slicing to eq:srpa-deslicing, head by head, with the convolutions taken from torch itself."""
    axes, C, H, M = len(grid), 8, 2, 5
    operator = shaken(PhysicalOperator(C, H, M, ("zeros",) * axes))
    Y = torch.randn(1, *grid, C, dtype=torch.float64)

    def path(sequence):
        depthwise, pointwise = sequence
        convolution = getattr(nn, f"Conv{axes}d")(C, C, 5, padding=2, groups=C).double()
        convolution.load_state_dict({"weight": depthwise.weight, "bias": depthwise.bias})
        flat = convolution(Y.movedim(-1, 1)).movedim(1, -1).reshape(-1, C)
        return flat @ pointwise.weight.T + pointwise.bias

    R, F = path(operator.routing_path), path(operator.feature_path)
    heads = []
    for r in range(H):
        own = slice(r * C // H, (r + 1) * C // H)
        project, tau = operator.routing.project, operator.routing.temperature[r].clamp(0.1, 5)
        P = torch.softmax((R[:, own] @ project.weight.T + project.bias) / tau, -1)
        Z = torch.diag(1 / (P.sum(0) + 1e-5)) @ P.T @ F[:, own]
        heads.append(P @ operator.update(Z[None, None])[0, 0])
    expected = torch.cat(heads, -1) @ operator.project.weight.T + operator.project.bias
    torch.testing.assert_close(operator(Y).reshape(-1, C), expected, rtol=0, atol=1e-12)


def test_spectral_operator_is_linear_and_has_no_complex_parameter():
    operator = shaken(SpectralOperator(4, (3, 2)))
    U, V = torch.randn(2, 1, 6, 5, 4, dtype=torch.float64)
    torch.testing.assert_close(operator(U - 2 * V), operator(U) - 2 * operator(V), rtol=0, atol=1e-13)
    assert not any(p.is_complex() for p in operator.parameters())
    assert [tuple(p.shape) for p in operator.parameters()] == [(3, 4, 4, 2), (2, 4, 4, 2)]


def test_spectral_channels_come_first():
    H = torch.randn(1, 6, 5, 16, dtype=torch.float64)
    for name, untouched in (("no-physical", slice(8, 16)), ("no-spectral", slice(0, 8))):
        stage = shaken(Block(VARIANTS[name], CONFIG)).stages[0]
        same = (stage(H) == H).flatten(0, -2).all(0)
        assert same.tolist() == [untouched.start <= c < untouched.stop for c in range(16)], name


def test_block_equals_the_papers_three_lines():
    """eq:block-context, eq:block-private, eq:block-recompose."""
    block = shaken(Block(BlockSpec(), CONFIG))
    H = torch.randn(2, 6, 5, 16, dtype=torch.float64)
    bar = H + block.context(H)
    spectral, physical = block.stages[0].branches
    half_s, half_p = bar[..., :8], bar[..., 8:]
    cat = torch.cat(
        (
            half_s + spectral.operator(spectral.norm(half_s)),
            half_p + physical.operator(physical.norm(half_p)),
        ),
        -1,
    )
    torch.testing.assert_close(block(H), cat + block.mixing(block.norm(cat)), rtol=0, atol=1e-14)
    assert isinstance(spectral.operator, SpectralOperator) and isinstance(physical.operator, PhysicalOperator)


def test_sequential_rows_run_their_stages_in_order():
    H = torch.randn(1, 6, 5, 16, dtype=torch.float64)
    first, second = (
        shaken(Block(VARIANTS[name], CONFIG)) for name in ("physical-then-spectral", "spectral-then-physical")
    )
    swapped = copy.deepcopy(first)
    swapped.stages = nn.ModuleList(reversed(list(first.stages)))
    second.load_state_dict(swapped.state_dict())
    torch.testing.assert_close(second(H), swapped(H), rtol=0, atol=0)
    assert (first(H) - second(H)).abs().max() > 1e-3


def test_grouped_mixing_has_a_block_diagonal_jacobian_and_joint_does_not():
    x = torch.randn(16, dtype=torch.float64)
    for groups, apart in ((2, True), (1, False)):
        mixing = shaken(Mixing(16, 2, groups))
        jacobian = torch.autograd.functional.jacobian(mixing, x)
        across = torch.cat((jacobian[:8, 8:], jacobian[8:, :8]))
        assert (across.abs().max() == 0) == apart
        assert jacobian[:8, :8].abs().min() > 0


def test_one_group_is_the_joint_mixing():
    joint = shaken(Mixing(12, 2, 1))
    x = torch.randn(3, 12, dtype=torch.float64)
    assert torch.equal(joint(x), joint.parts[0](x))


def test_time_embedding_tells_times_apart_in_low_precision():
    embedding = TimeEmbedding(16).bfloat16()
    near, far = embedding(torch.tensor([1000.0, 1001.0]))
    assert (near - far).abs().max() > 0


def test_time_embedding_is_an_mlp_of_sines_of_every_scalar():
    """Written out in float64: angles t ω_k with ω from 1 down to 1e-4, scalar after scalar."""
    embedding, numbers = shaken(TimeEmbedding(8, scalars=2)), torch.tensor([[3.0, -0.7], [250.0, 1.9]]).double()
    frequencies = torch.tensor([1e4 ** -(k / 4) for k in range(4)], dtype=torch.float64)
    angles = [numbers[:, [scalar]] * frequencies for scalar in range(2)]
    features = torch.cat([part for angle in angles for part in (angle.cos(), angle.sin())], dim=1)
    first, second = embedding.mlp[0], embedding.mlp[2]
    hidden = torch.nn.functional.silu(features @ first.weight.T + first.bias)
    torch.testing.assert_close(embedding(numbers), hidden @ second.weight.T + second.bias, rtol=1e-12, atol=1e-14)
    alone = shaken(TimeEmbedding(8))
    assert torch.equal(alone(numbers[:, 0]), alone(numbers[:, :1]))


def test_dropout_acts_in_training_only():
    operator = PhysicalOperator(8, 2, 5, ("zeros", "zeros"), dropout=0.5)
    Y = torch.randn(1, 6, 5, 8)
    plain = PhysicalOperator(8, 2, 5, ("zeros", "zeros"))
    plain.load_state_dict(operator.state_dict())
    assert torch.equal(operator.eval()(Y), plain(Y))
    assert not torch.equal(operator.train()(Y), plain(Y))
    # After the softmax too: with the output's dropout off, the attention's alone must be felt.
    operator.dropout.p = 0.0
    with torch.no_grad():
        operator.update.gamma.fill_(1.0)
        plain.update.gamma.fill_(1.0)
    assert not torch.equal(operator(Y), plain(Y))


def test_options_reach_the_parts():
    options = Options(expansion=3, dropout=0.25, padding=("circular", "zeros"))
    block = Block(BlockSpec(), replace(CONFIG, options=options))
    physical = block.stages[0].branches[1].operator
    assert block.mixing.parts[0].down.in_features == 32
    assert physical.dropout.p == physical.update.attention.dropout.p == 0.25
    assert block.context.padding == physical.routing_path[0].padding == ("circular", "zeros")


@pytest.mark.parametrize("name", ["transolver-sigma", "spectral-then-physical", "grouped-mixing", "no-physical"])
def test_hooks_fire_on_every_part_and_change_nothing(name):
    """All but the containers and the wholes whose additions are made elsewhere."""
    block = shaken(Block(VARIANTS[name], CONFIG))
    H = torch.randn(2, 6, 5, 16, dtype=torch.float64)
    expected = block(H)
    silent = (nn.ModuleList, nn.ParameterList, nn.Identity, Stage, Branch)
    for part, module in block.named_modules():
        if isinstance(module, silent) or part.endswith(("gate_up", "down", "routing.project")):
            continue  # the last three are only read for their weights
        seen = []
        hook = module.register_forward_hook(lambda *_, seen=seen: seen.append(True))
        torch.testing.assert_close(block(H), expected, rtol=0, atol=1e-13)
        hook.remove()
        assert seen, part
