"""DRIFT-Net: sizes, the spectral branch against sums over all waves, what it commutes with, padding, the hierarchy."""

import itertools
import math

import numpy as np
import pytest
import torch

from sigmasolver.models import Options, SolverConfig, build_model
from sigmasolver.models.baselines.drift_net import (
    ConvNeXt,
    Layer,
    Merge,
    SpectralBranch,
    Unmerge,
    drift_net,
    low_box,
    radial_bands,
)
from sigmasolver.models.variants import BASELINES, build_solver, count_parameters
from tests.models.baselines import reference

CPU = torch.device("cpu")
GRIDS = [(8,), (7,), (6, 4), (3, 8), (1, 2), (4, 3, 6)]
FORMS = pytest.mark.parametrize("released", [False, True])
NS2D, KF2D = SolverConfig((64, 64), 10, 1), SolverConfig((128, 128), 10, 4)


def field(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def shaken(module):
    """In float64, every parameter well off its start."""
    with torch.no_grad():
        for parameter in module.double().parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    return module


# --- sizes


@pytest.mark.parametrize(("config", "megabytes"), [(NS2D, 76.230184), (KF2D, 76.258192)])
def test_the_default_is_the_official_t_but_for_parameters_that_never_act(config, megabytes):
    """The released code has one more norm in each of 32 layers, two maps of the target in each decoder stage, and two
    cuts per layer behind a rounding; a complex number counts as two."""
    with torch.device("meta"):
        model = drift_net(config)
    assert [block.spectral.weight.shape[0] for block in model.blocks[::4]] == [48, 96, 192, 384, 384, 192, 96, 48]
    assert sum(block.spectral.weight.numel() // 2 for block in model.blocks) == 1_566_720
    norms, maps, cuts = 8 * 2 * (48 + 96 + 192 + 384), 2 * (48 + 96 + 192 + 384) * (config.out_channels + 1), 64
    assert 4 * (count_parameters("drift-net", config) + norms + maps + cuts) / 1e6 == megabytes
    assert count_parameters("drift-net-released", config) == count_parameters("drift-net", config)


@pytest.mark.parametrize("grid", [(40,), (32, 20), (16, 16, 12)])
def test_counts_by_hand_in_every_dimension(grid):
    d, c, layers = len(grid), 18, 3
    config = SolverConfig(grid, 4, 3, width=48, depth=6, heads=4)
    total = (4**d * 4 + 1) * c + 2 * c + 4**d * 3 * c + 3 + 3 * 3 * 5**d
    for w in (c, 2 * c, 4 * c, 8 * c):
        gate = 6 * 128 + 128 + 128 * 6 + 6
        mlp = 8 * w * w + 5 * w
        layer = 2 * w * w + gate + 3**d * w + w * w + w + 2 * w + mlp + 2 * w
        total += 2 * layers * layer
        if w < 8 * c:
            merge, unmerge = 2**d * w * 2 * w + 4 * w, 2 * w * 2**d * w + 2 * w + w * w
            total += merge + unmerge + 2 * ((7**d + 1) * w + 2 * w + mlp + w)
    assert count_parameters("drift-net", config) == total


# --- the spectrum


@FORMS
@pytest.mark.parametrize("grid", GRIDS)
def test_low_and_high_part_are_a_partition(grid, released):
    branch = SpectralBranch(2, released)
    X = torch.fft.rfftn(field(2, *grid, 2), dim=tuple(range(1, len(grid) + 1)))
    low, high = branch.split(X, grid)
    assert torch.equal(low + high, X) and not ((low != 0) & (high != 0)).any()
    mean, members = radial_bands(grid, released, torch.float64, CPU)
    assert (members.sum(dim=0) == 1).all() and ((members == 0) | (members == 1)).all()
    filled = members.sum(dim=1) > 0
    torch.testing.assert_close(mean.sum(dim=1), filled.double(), rtol=0, atol=1e-14)
    assert filled[0] and (math.prod(grid) < 5 or filled[-1]), "from the mean to the corner"


@pytest.mark.parametrize("grid", [*GRIDS, (16, 16), (32, 12)])
def test_the_box_and_the_bands_are_those_of_the_frequencies(grid):
    """|k| on every axis, from numpy's frequencies; a wave and its mirror image are in the same box and band."""
    waves = [np.abs(np.fft.fftfreq(n, 1 / n)) for n in grid[:-1]] + [np.fft.rfftfreq(grid[-1], 1 / grid[-1])]
    k = np.stack(np.meshgrid(*waves, indexing="ij"))
    ends = np.array([n // 2 for n in grid]).reshape(-1, *(1,) * len(grid))
    cut = np.maximum(1, np.floor(0.5621765 * (ends + 1)))
    np.testing.assert_array_equal(low_box(grid, False, CPU).numpy(), (k < cut).all(axis=0))
    radius = np.sqrt(((k / np.maximum(ends, 1)) ** 2).sum(axis=0))
    ring = 6 * radius / max(radius.max(), 1e-8)
    band = radial_bands(grid, False, torch.float64, CPU)[1].argmax(dim=0).reshape(k.shape[1:]).numpy()
    assert (band <= ring + 1e-6).all() and (ring <= band + 1 + 1e-6).all()


def test_the_released_box_and_bands_go_by_array_index():
    """16 tokens: rows 0 to 7 and columns 0 to 4 are low; the row of the wave -1 is in a high band."""
    expected = torch.zeros(16, 9, dtype=torch.bool)
    expected[:8, :5] = True
    assert torch.equal(low_box((16, 16), True, CPU), expected)
    released, signed = (radial_bands((16, 16), form, torch.float64, CPU)[1].argmax(0).reshape(16, 9) for form in (1, 0))
    assert released[15, 0] == 4 and signed[15, 0] == signed[1, 0] == 0


def slow_branch(branch, H):
    """One sample (*grid, C): sums over all points and over all waves of the half spectrum."""
    grid, C, released = H.shape[:-1], H.shape[-1], branch.released
    state = reference.Weights(branch.state_dict())
    W, points = state["weight"][..., 0] + 1j * state["weight"][..., 1], list(np.ndindex(*grid))
    lengths = [n if released else n // 2 + 1 for n in grid[:-1]] + [grid[-1] // 2 + 1]

    def phase(index, point):
        return np.exp(2j * np.pi * sum(i * p / n for i, p, n in zip(index, point, grid, strict=True)))

    waves = {}
    for index in itertools.product(*map(range, (*grid[:-1], grid[-1] // 2 + 1))):
        X = sum(H[point] * np.conj(phase(index, point)) for point in points) / len(points)
        k = index if released else [min(i, n - i) for i, n in zip(index, grid, strict=True)]
        low = all(one < max(1, int(0.5621765 * length)) for one, length in zip(k, lengths, strict=True))
        radius = np.float32(0)
        for one, length in zip(k, lengths, strict=True):
            radius += (np.float32(one) / np.float32(max(length - 1, 1))) ** 2
        waves[index] = X, low, np.sqrt(radius)
    largest = max(radius for *_, radius in waves.values()) + np.float32(1e-8)
    band = {index: min(int(radius / largest * np.float32(6)), 5) for index, (*_, radius) in waves.items()}

    m = np.zeros((C, 6))
    for q in set(band.values()):
        m[:, q] = np.mean([np.abs(waves[index][0]) for index in band if band[index] == q], axis=0)
    inner = np.maximum(reference.affine(m, state / "gate.0"), 0)
    alpha = 1 / (1 + np.exp(-reference.affine(inner, state / "gate.2")))

    out = np.zeros(H.shape)
    for index, (X, low, _) in waves.items():
        a = alpha[:, band[index]]
        Y = a * (X @ W) if low else (1 - a) * X
        twice = 1 if 2 * index[-1] % grid[-1] == 0 else 2
        for point in points:
            out[point] += twice * (Y * phase(index, point)).real
    return out


@FORMS
@pytest.mark.parametrize("grid", GRIDS)
def test_the_spectral_branch_equals_sums_over_all_waves(grid, released):
    branch, H = shaken(SpectralBranch(3, released)), field(2, *grid, 3)
    with torch.no_grad():
        fast = branch(H).numpy()
    np.testing.assert_allclose(fast, [slow_branch(branch, one.numpy()) for one in H], rtol=0, atol=1e-12)


@FORMS
@pytest.mark.parametrize("grid", [(8,), (6, 7), (4, 3, 6)])
def test_the_spectral_branch_commutes_with_shifts_along_every_axis(grid, released):
    branch, H = shaken(SpectralBranch(3, released)), field(1, *grid, 3)
    for axis in range(1, len(grid) + 1):
        torch.testing.assert_close(branch(H.roll(2, axis)), branch(H).roll(2, axis), rtol=0, atol=1e-13)


def mirrored(H, axis):
    """x -> -x on a circle: point 0 stays."""
    return H.flip(axis).roll(1, axis)


def test_a_wave_and_its_mirror_image_are_treated_alike_but_not_in_the_released_form():
    H = field(1, 8, 6, 3)

    def defect(released):
        branch = shaken(SpectralBranch(3, released))
        return (branch(mirrored(H, 1)) - mirrored(branch(H), 1)).abs().max()

    assert defect(False) < 1e-13 and defect(True) > 1e-2


def test_with_a_real_mixing_the_axes_are_alike_but_not_in_the_released_form():
    """Means on a half spectrum know which half it is, so alpha is held here, one number for each band."""
    H = field(1, 8, 8, 3)

    def defect(released):
        branch = shaken(SpectralBranch(3, released))
        with torch.no_grad():
            branch.weight[..., 1] = 0
            branch.gate[2].weight.zero_()
        return (branch(H.transpose(1, 2)) - branch(H).transpose(1, 2)).abs().max()

    assert defect(False) < 1e-13 and defect(True) > 1e-2


def test_a_constant_is_mixed_and_a_high_wave_is_damped():
    """Both against the gate's own formula: |X| of a constant a is a, of a cosine of size a it is a / 2 twice."""
    branch, a = shaken(SpectralBranch(2)), torch.tensor([1.5, -0.4], dtype=torch.float64)
    first, _, last, _ = branch.gate

    def alpha(band, mean):
        m = torch.zeros(2, 6, dtype=torch.float64)
        m[:, band] = mean
        return torch.sigmoid(torch.relu(m @ first.weight.T + first.bias) @ last.weight.T + last.bias)[:, band]

    members = radial_bands((8, 8), False, torch.float64, CPU)[1].reshape(6, 8, 5)
    constant = alpha(0, a.abs() / members[0].sum()) * (a @ branch.weight[..., 0])
    torch.testing.assert_close(branch(a.expand(1, 8, 8, 2)), constant.expand(1, 8, 8, 2), rtol=0, atol=1e-14)

    x = torch.arange(8, dtype=torch.float64) * 2 * math.pi / 8
    wave = torch.cos(3 * x[:, None] + 0 * x)[..., None] * a
    band = int(members[:, 3, 0].argmax())
    damped = (1 - alpha(band, a.abs() / members[band].sum())) * wave
    torch.testing.assert_close(branch(wave[None])[0], damped, rtol=0, atol=1e-14)


@pytest.mark.parametrize("grid", [(16,), (8, 6), (4, 6, 8)])
def test_with_an_open_and_a_shut_gate_it_is_a_low_pass_and_its_complement(grid):
    branch, H = SpectralBranch(2).double(), field(1, *grid, 2)
    with torch.no_grad():
        branch.weight.copy_(torch.stack((torch.eye(2), torch.zeros(2, 2)), dim=-1))
        branch.gate[2].weight.zero_()
        parts = []
        for logit in (50.0, -50.0):
            branch.gate[2].bias.fill_(logit)
            parts.append(branch(H))
        low, high = parts
        torch.testing.assert_close(low + high, H, rtol=0, atol=1e-14)
        torch.testing.assert_close(branch(low), 0 * low, rtol=0, atol=1e-14)
        assert low.abs().max() > 0.1 and high.abs().max() > 0.1
        torch.testing.assert_close(
            low.mean(dim=tuple(range(1, len(grid) + 1))), H.mean(dim=tuple(range(1, len(grid) + 1)))
        )


def test_the_branch_computes_in_float32_whatever_comes():
    branch, H = shaken(SpectralBranch(4)).float(), torch.randn(1, 8, 8, 4)
    exact = branch(H)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(branch(H), exact)
        assert branch(H.bfloat16()).dtype == torch.bfloat16


# --- the hierarchy


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_merging_and_unmerging_know_their_neighbours_alone(axes):
    """A token's change reaches its parent, or its 2^d children, and nobody else."""
    H, token, parent = field(1, *(4,) * axes, 4), (0, *(3,) * axes), (0, *(1,) * axes)
    changed = H.clone()
    changed[token] += 1
    merge, unmerge = shaken(Merge(4, axes)), shaken(Unmerge(4, axes))
    moved = (merge(changed) - merge(H)).abs().amax(dim=-1) > 1e-9
    assert moved.shape == (1, *(2,) * axes) and moved[parent] and moved.sum() == 1
    moved = (unmerge(changed) - unmerge(H)).abs().amax(dim=-1) > 1e-9
    assert moved.shape == (1, *(8,) * axes) and moved.sum() == 2**axes
    assert moved[(0, *(slice(6, 8),) * axes)].all()


def test_unmerging_mirrors_merging():
    """Two maps that only hand on what each neighbour has, in the order that both use."""
    merge, unmerge = Merge(2, 1).double(), Unmerge(4, 1).double()
    H = field(1, 6, 2)
    with torch.no_grad():
        merge.reduce.weight.copy_(torch.eye(4))
        unmerge.expand.weight.copy_(torch.eye(4))
        unmerge.mix.weight.copy_(torch.eye(2))
    normalised = torch.nn.functional.layer_norm(H, (2,))
    torch.testing.assert_close(unmerge(merge(H)).sign(), normalised.sign())


def test_a_layer_and_a_skip_start_near_the_identity_where_they_should():
    """The norm stands behind the branch: a layer moves each token by a vector of deviation one, twice; a skip by
    nothing that counts."""
    layer, skip, H = Layer(8, 2).double(), ConvNeXt(8, 2).double(), field(1, 4, 4, 8)
    moves = []
    layer.spectral_norm.register_forward_hook(lambda _, __, out: moves.append(out))
    layer.mlp_norm.register_forward_hook(lambda _, __, out: moves.append(out))
    torch.testing.assert_close(layer(H), H + moves[0] + moves[1], rtol=0, atol=1e-14)
    assert all(move.mean(dim=-1).abs().max() < 1e-12 for move in moves)
    assert 0 < (skip(H) - H).abs().max() < 1e-5


@pytest.mark.parametrize("grid", [(33,), (40, 33), (32, 5), (3, 4, 33)])
def test_padding_adds_zeros_at_the_high_end_and_is_cut_off_exactly(grid):
    """The same as the field with the zeros written out; the last kernel, which comes after the cut, sees its edge."""
    model = build_model("drift-net", grid=grid, in_channels=2, out_channels=1, width=8, depth=2, heads=2)
    model, x = shaken(model), field(1, *grid, 2)
    whole = torch.zeros(1, *(-(-n // 32) * 32 for n in grid), 2, dtype=torch.float64)
    inside = (slice(None), *(slice(n) for n in grid))
    whole[inside] = x
    away = (slice(None), *(slice(n if n % 32 == 0 else max(n - 2, 0)) for n in grid))
    torch.testing.assert_close(model(x)[away], model(whole)[away], rtol=0, atol=1e-12)
    assert model(x).shape == (1, *grid, 1)


def test_a_change_anywhere_reaches_everywhere():
    """The spectrum is global: one point in a corner moves every point of the answer."""
    model, x = shaken(drift_net(SolverConfig((64, 32), 1, 1, width=16, depth=2, heads=2))), field(1, 64, 32, 1)
    changed = x.clone()
    changed[0, 0, 0] += 1
    assert ((model(changed) - model(x)).abs() > 0).all()


def test_a_compiled_layer_equals_an_eager_one():
    """In one graph; the whole model is exported with all others in `test_registry`."""
    layer, H = shaken(Layer(4, 2)), field(2, 6, 4, 4)
    torch.testing.assert_close(torch.compile(layer, backend="eager", fullgraph=True)(H), layer(H), rtol=0, atol=1e-13)


def test_gradients_equal_finite_differences():
    layer = shaken(Layer(2, 2))
    keys, values = zip(*layer.named_parameters(), strict=True)

    def call(H, *parameters):
        return torch.func.functional_call(layer, dict(zip(keys, parameters, strict=True)), (H,))

    assert torch.autograd.gradcheck(call, (field(1, 4, 6, 2).requires_grad_(), *values), fast_mode=True)


def test_weights_start_as_published():
    torch.manual_seed(3)
    model = drift_net(SolverConfig((64, 64), 2, 1, width=128, depth=1))
    layer = model.blocks[3]
    for weight in (layer.spectral.weight, layer.pointwise.weight, layer.mlp[0].weight, layer.local.weight):
        assert weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert model.embed.weight.std().item() == pytest.approx(0.02, rel=0.1) and model.embed.bias.abs().max() == 0
    assert (model.skips[0][0].scale == 1e-6).all() and model.skips[0][0].local.bias.abs().max() == 0
    assert (layer.spectral_norm.weight == 1).all() and layer.spectral.gate[2].bias.abs().max() == 0


def test_evaluation_is_deterministic_and_sizes_scale(small_model):
    model, x = small_model("drift-net"), field(1, 12, 9, 2)
    assert torch.equal(model(x), model(x))
    counts = [count_parameters("drift-net", SolverConfig((64, 64), 1, 1, width=width)) for width in (16, 32, 64, 128)]
    assert counts == sorted(set(counts))


def test_a_time_is_refused():
    config = SolverConfig((64, 64), 1, 1, options=Options(time_embedding=True))
    with pytest.raises(ValueError, match=r"^drift-net has no time embedding; set .* or choose another model\.$"):
        build_solver("drift-net", config)
    model = BASELINES["drift-net"](SolverConfig((8, 8), 1, 1, width=8, depth=1, heads=2))
    with pytest.raises(ValueError, match=r"^This solver has no time embedding; omit `time`"):
        model(torch.zeros(1, 8, 8, 1), torch.zeros(1))
