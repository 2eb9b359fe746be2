"""Layers, slice attention, spectral operator and block."""

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sigmasolver.models import build_model
from sigmasolver.models.baselines.linearno import LinearAttention
from sigmasolver.models.block import Block, BlockSpec, Branch, Mixing
from sigmasolver.models.config import Options, SolverConfig
from sigmasolver.models.layers import TimeEmbedding, coordinates, distances
from sigmasolver.models.slices import PhysicalOperator, SliceUpdate
from sigmasolver.models.spectral import SpectralOperator
from sigmasolver.models.variants import VARIANTS
from sigmasolver.ops.mixing import joined
from sigmasolver.ops.slices import slice_states

CPU = torch.device("cpu")
CONFIG = SolverConfig((6, 5), 1, 1, width=16, heads=2, slices=4, modes=2)


def perturbed(module):
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
    operator = perturbed(PhysicalOperator(8, 2, 5, ("zeros", "zeros")))
    seen = []
    operator.routing.register_forward_hook(lambda _, inputs, P: seen.append((inputs[0], P)))
    Y = torch.randn(2, 6, 5, 8, dtype=torch.float64)
    operator(Y)
    torch.testing.assert_close(seen[0][1].sum(-1), torch.ones(2, 2, 30, dtype=torch.float64), rtol=0, atol=1e-14)
    for raw, clipped in ((-3.0, 0.1), (0.02, 0.1), (40.0, 5.0)):
        with torch.no_grad():
            operator.routing.temperature.fill_(raw)
        extreme = operator.routing(seen[0][0])
        with torch.no_grad():
            operator.routing.temperature.fill_(clipped)
        assert torch.equal(extreme, operator.routing(seen[0][0]))


def test_the_three_updates_are_the_papers_formulas():
    Z = torch.randn(2, 3, 5, 4, dtype=torch.float64)
    residual = perturbed(SliceUpdate("residual", 4))
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
    operator = perturbed(PhysicalOperator(8, 2, 5, ("zeros", "zeros")))
    keep = PhysicalOperator(8, 2, 5, ("zeros", "zeros"), update="keep").double()
    keep.load_state_dict({k: v for k, v in operator.state_dict().items() if not k.startswith("update.")})
    Y = torch.randn(2, 6, 5, 8, dtype=torch.float64)
    assert not torch.equal(operator(Y), keep(Y))
    with torch.no_grad():
        operator.update.gamma.zero_()
    assert torch.equal(operator(Y), keep(Y))


@pytest.mark.parametrize("grid", [(9,), (6, 5), (3, 4, 5)])
def test_physical_operator_equals_its_equations_point_by_point(grid):
    """eq:physical-slicing to eq:srpa-deslicing, head by head, with torch's own convolutions."""
    axes, C, H, M = len(grid), 8, 2, 5
    operator = perturbed(PhysicalOperator(C, H, M, ("zeros",) * axes))
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
    operator = perturbed(SpectralOperator(4, (3, 2)))
    U, V = torch.randn(2, 1, 6, 5, 4, dtype=torch.float64)
    torch.testing.assert_close(operator(U - 2 * V), operator(U) - 2 * operator(V), rtol=0, atol=1e-13)
    assert not any(p.is_complex() for p in operator.parameters())
    assert [tuple(p.shape) for p in operator.parameters()] == [(3, 4, 4, 2), (2, 4, 4, 2)]


def test_spectral_channels_come_first():
    H = torch.randn(1, 6, 5, 16, dtype=torch.float64)
    for name, untouched in (("no-physical", slice(8, 16)), ("no-spectral", slice(0, 8))):
        stage = perturbed(Block(VARIANTS[name], CONFIG)).stages[0]
        shares = [norm(share) for norm, share in zip(stage.norms, H.chunk(2, dim=-1), strict=True)]
        same = (joined(H, stage(shares)) == H).flatten(0, -2).all(0)
        assert same.tolist() == [untouched.start <= c < untouched.stop for c in range(16)], name


def test_block_equals_the_papers_equations():
    """eq:block-context, eq:block-private, eq:block-recompose."""
    block = perturbed(Block(BlockSpec(), CONFIG))
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


def reference_norm(norm, h):
    """LayerNorm over the last axis, written out."""
    centred = h - h.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight + norm.bias


def reference_filter(operator, V):
    """eq:spectral-axis-transform to eq:spectral-aggregation, axis by axis with torch.fft."""
    total = torch.zeros_like(V)
    for axis, weight in enumerate(operator.weights, start=1):
        points = V.shape[axis]
        spectrum = torch.fft.rfft(V.movedim(axis, -2), dim=-2, norm="ortho")  # (..., modes, C)
        modes = min(len(weight), points // 2 + 1)
        filtered = torch.zeros_like(spectrum)
        for k in range(modes):
            filtered[..., k, :] = spectrum[..., k, :] @ torch.view_as_complex(weight[k].contiguous())
        total = total + torch.fft.irfft(filtered, n=points, dim=-2, norm="ortho").movedim(-2, axis)
    return total


def reference_halves(block, H):
    """eq:block-private for a block without context; norms and spectral operator written out."""
    spectral, physical = block.stages[0].branches
    first, second = H[..., :8], H[..., 8:]
    return (
        first + reference_filter(spectral.operator, reference_norm(spectral.norm, first)),
        second + physical.operator(reference_norm(physical.norm, second)),
    )


def test_block_halves_are_independent():
    """eq:block-private, in the block itself: without context, and with a recomposition that adds zero."""
    block = perturbed(Block(BlockSpec(context=False), CONFIG))
    with torch.no_grad():
        for parameter in block.mixing.parts[0].down.parameters():
            parameter.zero_()
    H = torch.randn(2, 6, 5, 16, dtype=torch.float64)
    before = block(H)
    torch.testing.assert_close(before, torch.cat(reference_halves(block, H), -1), rtol=0, atol=1e-13)
    halves = slice(0, 8), slice(8, 16)
    for own, other, branch in zip(halves, reversed(halves), block.stages[0].branches, strict=True):
        changed = H.clone()
        changed[..., other] = torch.randn_like(changed[..., other])
        assert torch.equal(block(changed)[..., own], before[..., own])
        assert (block(changed)[..., other] - before[..., other]).abs().amax((0, 1, 2)).min() > 1e-3
        for name, parameter in branch.named_parameters():
            original = parameter.detach().clone()
            with torch.no_grad():
                parameter.add_(torch.randn_like(parameter))
                after = block(H)
                parameter.copy_(original)
            assert torch.equal(after[..., other], before[..., other]), name
            assert (after[..., own] - before[..., own]).abs().max() > 1e-9, name
    # Residual: an operator with zero output leaves its half unchanged.
    with torch.no_grad():
        for weight in block.stages[0].branches[0].operator.weights:
            weight.zero_()
        for parameter in block.stages[0].branches[1].operator.project.parameters():
            parameter.zero_()
    assert torch.equal(block(H), H)


def test_block_recomposition_is_a_residual_swiglu_of_all_channels():
    """eq:block-recompose with eq:swiglu-implementation, written out."""
    block = perturbed(Block(BlockSpec(context=False), CONFIG))
    H = torch.randn(2, 6, 5, 16, dtype=torch.float64)
    spectral, physical = reference_halves(block, H)
    part = block.mixing.parts[0]
    (Wg, Wu), (bg, bu) = part.gate_up.weight.chunk(2), part.gate_up.bias.chunk(2)

    def recomposed(cat):
        normed = reference_norm(block.norm, cat)
        gate, up = normed @ Wg.T + bg, normed @ Wu.T + bu
        return cat + (gate * torch.sigmoid(gate) * up) @ part.down.weight.T + part.down.bias

    torch.testing.assert_close(block(H), recomposed(torch.cat((spectral, physical), -1)), rtol=0, atol=1e-13)
    assert (block(H) - recomposed(torch.cat((physical, spectral), -1))).abs().max() > 0.1
    # Norm and gate act on all channels: each output channel depends on every channel of the other half at its point.
    cat = torch.cat((spectral, physical), -1)[0, 0, 0].detach()
    jacobian = torch.autograd.functional.jacobian(recomposed, cat)
    assert min(jacobian[:8, 8:].abs().min(), jacobian[8:, :8].abs().min()) > 1e-6


def test_linearno_is_linear_attention_with_a_global_context():
    """fig:srpa-comparison b: LinearNO computes a context K^T V from all points, which each point reads, without
    attention between slices; a and c are the replace and residual updates of the slice states."""
    attention = perturbed(LinearAttention(CONFIG, local=False))
    Y = torch.randn(1, 6, 5, 16, dtype=torch.float64)
    U = attention.embed(Y).reshape(30, 16)
    outputs, kernels = [], []
    for head in U.chunk(2, -1):
        queries, keys = head @ attention.query.weight.T, head @ attention.key.weight.T
        Q, K = queries.exp() / queries.exp().sum(1, keepdim=True), keys.exp() / keys.exp().sum(0)
        V = head @ attention.value.weight.T
        context = sum(torch.outer(K[n], V[n]) for n in range(30))  # (slices, head width), of all points
        outputs.append(torch.stack([Q[n] @ context for n in range(30)]))
        kernels.append(Q @ K.T)
        torch.testing.assert_close(kernels[-1] @ V, outputs[-1], rtol=0, atol=1e-13)  # linear in V
    expected = torch.cat(outputs, -1) @ attention.project.weight.T + attention.project.bias
    torch.testing.assert_close(attention(Y).reshape(30, 16), expected, rtol=0, atol=1e-13)
    for kernel in kernels:
        assert kernel.min() > 0  # global: every point attends to every other
        torch.testing.assert_close(kernel.sum(1), torch.ones(30, dtype=torch.float64), rtol=0, atol=1e-13)
        assert torch.linalg.matrix_rank(kernel) <= CONFIG.slices < 30
    small = {
        "grid": (6, 5),
        "in_channels": 1,
        "out_channels": 1,
        "width": 16,
        "heads": 2,
        "slices": 4,
        "modes": 2,
        "depth": 1,
    }
    updates = {
        name: [part.kind for part in build_model(name, **small).modules() if isinstance(part, SliceUpdate)]
        for name in ("transolver", "linearno-plain", "transolver-sigma")
    }
    assert updates == {"transolver": ["replace"], "linearno-plain": [], "transolver-sigma": ["residual"]}


def test_sequential_variants_run_their_stages_in_order():
    H = torch.randn(1, 6, 5, 16, dtype=torch.float64)
    first, second = (
        perturbed(Block(VARIANTS[name], CONFIG)) for name in ("physical-then-spectral", "spectral-then-physical")
    )
    swapped = copy.deepcopy(first)
    swapped.stages = nn.ModuleList(reversed(list(first.stages)))
    second.load_state_dict(swapped.state_dict())
    torch.testing.assert_close(second(H), swapped(H), rtol=0, atol=0)
    assert (first(H) - second(H)).abs().max() > 1e-3


def test_grouped_mixing_has_a_block_diagonal_jacobian_and_joint_does_not():
    x = torch.randn(16, dtype=torch.float64)
    for groups, block_diagonal in ((2, True), (1, False)):
        mixing = perturbed(Mixing(16, 2, groups))
        jacobian = torch.autograd.functional.jacobian(mixing, x)
        off_diagonal = torch.cat((jacobian[:8, 8:], jacobian[8:, :8]))
        assert (off_diagonal.abs().max() == 0) == block_diagonal
        assert jacobian[:8, :8].abs().min() > 0


def test_mixing_with_one_group_is_joint():
    joint = perturbed(Mixing(12, 2, 1))
    x = torch.randn(3, 12, dtype=torch.float64)
    assert torch.equal(joint(x), joint.parts[0](x))


def test_time_embedding_distinguishes_times_in_bf16():
    embedding = TimeEmbedding(16).bfloat16()
    near, far = embedding(torch.tensor([1000.0, 1001.0]))
    assert (near - far).abs().max() > 0


def test_time_embedding_is_an_mlp_of_sines_of_every_scalar():
    """Written out in float64: angles t ω_k with ω from 1 down to 1e-4, scalar after scalar."""
    embedding, scalars = perturbed(TimeEmbedding(8, scalars=2)), torch.tensor([[3.0, -0.7], [250.0, 1.9]]).double()
    frequencies = torch.tensor([1e4 ** -(k / 4) for k in range(4)], dtype=torch.float64)
    angles = [scalars[:, [scalar]] * frequencies for scalar in range(2)]
    features = torch.cat([part for angle in angles for part in (angle.cos(), angle.sin())], dim=1)
    first, second = embedding.mlp[0], embedding.mlp[2]
    hidden = torch.nn.functional.silu(features @ first.weight.T + first.bias)
    torch.testing.assert_close(embedding(scalars), hidden @ second.weight.T + second.bias, rtol=1e-12, atol=1e-14)
    single = perturbed(TimeEmbedding(8))
    assert torch.equal(single(scalars[:, 0]), single(scalars[:, :1]))


def test_dropout_acts_in_training_only():
    operator = PhysicalOperator(8, 2, 5, ("zeros", "zeros"), dropout=0.5)
    Y = torch.randn(1, 6, 5, 8)
    plain = PhysicalOperator(8, 2, 5, ("zeros", "zeros"))
    plain.load_state_dict(operator.state_dict())
    assert torch.equal(operator.eval()(Y), plain(Y))
    assert not torch.equal(operator.train()(Y), plain(Y))
    # Also after the softmax: with the output dropout off, the attention dropout alone changes the result.
    operator.dropout.p = 0.0
    with torch.no_grad():
        operator.update.gamma.fill_(1.0)
        plain.update.gamma.fill_(1.0)
    assert not torch.equal(operator(Y), plain(Y))


def test_options_reach_the_submodules():
    options = Options(expansion=3, dropout=0.25, padding=("circular", "zeros"))
    block = Block(BlockSpec(), replace(CONFIG, options=options))
    physical = block.stages[0].branches[1].operator
    assert block.mixing.parts[0].down.in_features == 32
    assert physical.dropout.p == physical.update.attention.dropout.p == 0.25
    assert block.context.padding == physical.routing_path[0].padding == ("circular", "zeros")


@pytest.mark.parametrize("name", ["transolver-sigma", "spectral-then-physical", "grouped-mixing", "no-physical"])
def test_forward_hooks_fire_on_every_submodule(name):
    """All but containers and branches, and without changing the result."""
    block = perturbed(Block(VARIANTS[name], CONFIG))
    H = torch.randn(2, 6, 5, 16, dtype=torch.float64)
    expected = block(H)
    bypassed = (nn.ModuleList, nn.ParameterList, Branch)
    for key, module in block.named_modules():
        if isinstance(module, bypassed) or key.endswith(("gate_up", "down", "routing.project")):
            continue  # only the weights of these three are used
        seen = []
        hook = module.register_forward_hook(lambda *_, seen=seen: seen.append(True))
        torch.testing.assert_close(block(H), expected, rtol=0, atol=1e-13)
        hook.remove()
        assert seen, key


# --- app:method-implementation, sentence by sentence, on a built model

SIZES = {"grid": (7, 6), "in_channels": 2, "out_channels": 3, "width": 24, "depth": 2, "heads": 3, "slices": 5}


def appendix_model(**options):
    return perturbed(build_model("transolver-sigma", **SIZES, modes=3, options=Options(**options)))


def first_block_input(model, *inputs):
    """The input of the first block."""
    seen = []
    hook = model.blocks[0].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model(*inputs)
    hook.remove()
    return seen[0]


def test_appendix_input_encoding():
    """Fields and positions concatenated, a pointwise MLP, a channel offset for all points; time if enabled."""
    model, x = appendix_model(), torch.randn(2, 7, 6, 2, dtype=torch.float64)
    first, gelu, second = model.lift
    positions = distances((7, 6), 8, torch.float64, CPU).expand(2, 7, 6, 64)
    joined = torch.cat((positions, x), -1)
    hidden = joined @ first.weight.T + first.bias
    lifted = gelu(hidden) @ second.weight.T + second.bias + model.offset
    torch.testing.assert_close(first_block_input(model, x), lifted, rtol=0, atol=1e-12)
    assert isinstance(gelu, nn.GELU) and model.offset.shape == (24,) and model.offset.requires_grad
    assert model.time is None
    timed, time = appendix_model(time_embedding=True), torch.tensor([0.5, 2.0], dtype=torch.float64)
    timed.load_state_dict(model.state_dict(), strict=False)
    added = first_block_input(timed, x, time) - lifted
    torch.testing.assert_close(added, timed.time(time)[:, None, None].expand_as(added), rtol=0, atol=1e-12)


def test_appendix_context_and_recomposition():
    """CPE: depthwise, kernel three, padding one. SwiGLU: three maps with bias of inner width floor(2 rho C/3)."""
    H = torch.randn(2, 7, 6, 24, dtype=torch.float64)
    for block in appendix_model().blocks:
        cpe = block.context
        assert cpe.weight.shape == (24, 1, 3, 3)
        plain = F.conv2d(H.movedim(-1, 1), cpe.weight, cpe.bias, padding=1, groups=24).movedim(1, -1)
        torch.testing.assert_close(cpe(H), plain, rtol=0, atol=1e-13)
        assert plain.shape == H.shape
        assert [type(branch.operator) for branch in block.stages[0].branches] == [SpectralOperator, PhysicalOperator]
    for expansion, inner in ((1, 16), (2, 32), (4, 64)):
        (part,) = appendix_model(expansion=expansion).blocks[0].mixing.parts
        assert inner == 2 * expansion * 24 // 3
        assert part.gate_up.weight.shape == (2 * inner, 24) and part.gate_up.bias.shape == (2 * inner,)
        assert part.down.weight.shape == (24, inner) and part.down.bias.shape == (24,)
    assert Mixing(16, 2, 1).parts[0].down.in_features == 21  # rounded down


def test_appendix_srpa():
    with pytest.raises(ValueError, match="not divisible by 2 x heads"):
        build_model("transolver-sigma", **{**SIZES, "heads": 8}, modes=3)
    fresh, model = build_model("transolver-sigma", **SIZES, modes=3), appendix_model()
    physical = model.blocks[0].stages[0].branches[1].operator
    C, head_width = 12, 4  # C/2, and that over three heads
    Y = torch.randn(1, 7, 6, C, dtype=torch.float64)
    seen = {}
    for name in ("routing", "update"):
        getattr(physical, name).register_forward_hook(lambda _, args, out, name=name: seen.update({name: args[0]}))
    physical(Y)
    paths = physical.routing_path, physical.feature_path
    outputs = []
    for depthwise, pointwise in paths:
        assert depthwise.weight.shape == (C, 1, 5, 5) and pointwise.weight.shape == (C, C)
        local = F.conv2d(Y.movedim(-1, 1), depthwise.weight, depthwise.bias, padding=2, groups=C).movedim(1, -1)
        outputs.append((local @ pointwise.weight.T + pointwise.bias).reshape(42, C))
    assert not torch.equal(paths[0][0].weight, paths[1][0].weight)  # separate weights
    # Project all channels, then split into heads.
    heads = [part.reshape(42, 3, head_width).transpose(0, 1) for part in outputs]
    torch.testing.assert_close(seen["routing"][0], heads[0], rtol=0, atol=1e-13)
    route, attention = physical.routing, physical.update.attention
    assert route.project.weight.shape == (5, head_width) and route.project.bias.shape == (5,)  # shared by all heads
    for layer in (attention.query, attention.key, attention.value):
        assert layer.weight.shape == (head_width, head_width) and layer.bias is None
    assert physical.project.bias.shape == (C,)
    # One temperature per head, clipped to [0.1, 5], initialised to 0.5.
    for block in fresh.blocks:
        operator = block.stages[0].branches[1].operator
        assert operator.routing.temperature.tolist() == [0.5] * 3
        assert (
            operator.update.gamma.tolist() == [0.0] and operator.dropout.p == operator.update.attention.dropout.p == 0
        )
    with torch.no_grad():
        route.temperature.copy_(torch.tensor([-1.0, 0.7, 9.0], dtype=torch.float64))
    P = route(seen["routing"])[0]
    for head, tau in enumerate((0.1, 0.7, 5.0)):
        scores = (heads[0][head] @ route.project.weight.T + route.project.bias) / tau
        torch.testing.assert_close(P[head], torch.softmax(scores, -1), rtol=0, atol=1e-13)
    # epsilon 1e-5 is added to the mass of a slice, also if that vanishes.
    thin = torch.full((1, 1, 42, 5), 1e-9, dtype=torch.float64)
    torch.testing.assert_close(
        slice_states(thin, heads[1][None, :1]),
        (1e-9 * heads[1][0].sum(0) / (42e-9 + 1e-5)).expand(1, 1, 5, head_width),
    )
    # gamma: one scalar for all inputs, heads and channels of a block, of any sign and magnitude.
    Z = seen["update"]
    for value in (-40.0, 0.3):
        with torch.no_grad():
            physical.update.gamma.fill_(value)
        torch.testing.assert_close(physical.update(Z), Z + value * attention(Z), rtol=0, atol=1e-12)
    assert sum(p.numel() for p in SliceUpdate("residual", 4).parameters()) == 1 + sum(
        p.numel() for p in SliceUpdate("replace", 4).parameters()
    )


def test_appendix_spectral_operator():
    """Every axis transforms the same input, keeps the lowest available modes, mixes channels by one complex matrix per
    mode at every position, and restores its length; the axes are summed. d K matrices, against K^d."""
    model = appendix_model()
    operator = model.blocks[0].stages[0].branches[0].operator
    assert [tuple(weight.shape) for weight in operator.weights] == [(3, 12, 12, 2)] * 2  # `modes` applies to both axes
    assert sum(weight.numel() for weight in operator.parameters()) == 2 * 2 * 12**2 * 3
    for grid in ((7, 6), (12, 9), (3, 4), (2, 31)):  # 3 and 2 points have two modes
        V = torch.randn(2, *grid, 12, dtype=torch.float64)
        torch.testing.assert_close(operator(V), reference_filter(operator, V), rtol=0, atol=1e-12)
    seen = []
    operator.register_forward_hook(lambda _, args, __: seen.append(args[0]))
    branch, H = model.blocks[0].stages[0].branches[0], torch.randn(1, 7, 6, 12, dtype=torch.float64)
    branch(H)
    torch.testing.assert_close(seen[0], reference_norm(branch.norm, H), rtol=0, atol=1e-13)  # the normalised half


def test_appendix_readout():
    """After the blocks, a layer norm and a linear map (sec:method-decomposition)."""
    model, x, seen = appendix_model(), torch.randn(1, 7, 6, 2, dtype=torch.float64), []
    model.blocks[-1].register_forward_hook(lambda _, __, out: seen.append(out))
    out = model(x)
    expected = reference_norm(model.norm, seen[0]) @ model.readout.weight.T + model.readout.bias
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
