"""DRIFT-Net: sizes, the spectral branch against explicit sums, symmetries, padding, the hierarchy."""

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


def perturbed(module):
    """In float64, with every parameter far from its initial value."""
    with torch.no_grad():
        for parameter in module.double().parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    return module


# --- sizes


@pytest.mark.parametrize(("config", "megabytes"), [(NS2D, 76.230184), (KF2D, 76.258192)])
def test_drift_net_default_is_the_released_size_t_without_unused_parameters(config, megabytes):
    """The released code has another norm in each of 32 layers, two maps of the target in each decoder stage, and two
    cuts per layer without gradient; a complex number counts as two."""
    with torch.device("meta"):
        model = drift_net(config)
    assert [block.spectral.weight.shape[0] for block in model.blocks[::4]] == [48, 96, 192, 384, 384, 192, 96, 48]
    assert sum(block.spectral.weight.numel() // 2 for block in model.blocks) == 1_566_720
    norms, maps, cuts = 8 * 2 * (48 + 96 + 192 + 384), 2 * (48 + 96 + 192 + 384) * (config.out_channels + 1), 64
    assert 4 * (count_parameters("drift-net", config) + norms + maps + cuts) / 1e6 == megabytes
    assert count_parameters("drift-net-released", config) == count_parameters("drift-net", config)


@pytest.mark.parametrize("grid", [(40,), (32, 20), (16, 16, 12)])
def test_drift_net_count_in_every_dimension(grid):
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
def test_spectral_branch_split_is_a_partition(grid, released):
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
def test_low_box_and_radial_bands_depend_on_frequency(grid):
    """|k| on every axis, from np.fft.fftfreq; a wave and its mirror image are in the same box and band."""
    waves = [np.abs(np.fft.fftfreq(n, 1 / n)) for n in grid[:-1]] + [np.fft.rfftfreq(grid[-1], 1 / grid[-1])]
    k = np.stack(np.meshgrid(*waves, indexing="ij"))
    ends = np.array([n // 2 for n in grid]).reshape(-1, *(1,) * len(grid))
    cut = np.maximum(1, np.floor(0.5621765 * (ends + 1)))
    np.testing.assert_array_equal(low_box(grid, False, CPU).numpy(), (k < cut).all(axis=0))
    radius = np.sqrt(((k / np.maximum(ends, 1)) ** 2).sum(axis=0))
    ring = 6 * radius / max(radius.max(), 1e-8)
    band = radial_bands(grid, False, torch.float64, CPU)[1].argmax(dim=0).reshape(k.shape[1:]).numpy()
    assert (band <= ring + 1e-6).all() and (ring <= band + 1 + 1e-6).all()


def test_released_low_box_and_radial_bands_depend_on_array_index():
    """16 tokens: rows 0 to 7 and columns 0 to 4 are low; the row of k = -1 is in a high band."""
    expected = torch.zeros(16, 9, dtype=torch.bool)
    expected[:8, :5] = True
    assert torch.equal(low_box((16, 16), True, CPU), expected)
    released, signed = (radial_bands((16, 16), form, torch.float64, CPU)[1].argmax(0).reshape(16, 9) for form in (1, 0))
    assert released[15, 0] == 4 and signed[15, 0] == signed[1, 0] == 0


def reference_branch(branch, H):
    """One sample (*grid, C): explicit sums over all points and over all modes of the half spectrum."""
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
        low = all(wave < max(1, int(0.5621765 * length)) for wave, length in zip(k, lengths, strict=True))
        radius = np.float32(0)
        for wave, length in zip(k, lengths, strict=True):
            radius += (np.float32(wave) / np.float32(max(length - 1, 1))) ** 2
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
        multiplicity = 1 if 2 * index[-1] % grid[-1] == 0 else 2
        for point in points:
            out[point] += multiplicity * (Y * phase(index, point)).real
    return out


@FORMS
@pytest.mark.parametrize("grid", GRIDS)
def test_spectral_branch_equals_the_reference(grid, released):
    branch, H = perturbed(SpectralBranch(3, released)), field(2, *grid, 3)
    with torch.no_grad():
        fast = branch(H).numpy()
    np.testing.assert_allclose(fast, [reference_branch(branch, sample.numpy()) for sample in H], rtol=0, atol=1e-12)


@FORMS
@pytest.mark.parametrize("grid", [(8,), (6, 7), (4, 3, 6)])
def test_spectral_branch_is_shift_equivariant(grid, released):
    branch, H = perturbed(SpectralBranch(3, released)), field(1, *grid, 3)
    for axis in range(1, len(grid) + 1):
        torch.testing.assert_close(branch(H.roll(2, axis)), branch(H).roll(2, axis), rtol=0, atol=1e-13)


def mirrored(H, axis):
    """x -> -x on a periodic axis: point 0 stays."""
    return H.flip(axis).roll(1, axis)


def test_spectral_branch_is_reflection_equivariant_unless_released():
    H = field(1, 8, 6, 3)

    def defect(released):
        branch = perturbed(SpectralBranch(3, released))
        return (branch(mirrored(H, 1)) - mirrored(branch(H), 1)).abs().max()

    assert defect(False) < 1e-13 and defect(True) > 1e-2


def test_spectral_branch_with_real_weights_is_transpose_equivariant_unless_released():
    """Means over a half spectrum depend on which half it is, so alpha is constant here, one value per band."""
    H = field(1, 8, 8, 3)

    def defect(released):
        branch = perturbed(SpectralBranch(3, released))
        with torch.no_grad():
            branch.weight[..., 1] = 0
            branch.gate[2].weight.zero_()
        return (branch(H.transpose(1, 2)) - branch(H).transpose(1, 2)).abs().max()

    assert defect(False) < 1e-13 and defect(True) > 1e-2


def test_spectral_branch_mixes_a_constant_and_damps_a_high_frequency():
    """Both against the formula of the gate: |X| of a constant a is a, of a cosine of amplitude a it is a / 2, twice."""
    branch, a = perturbed(SpectralBranch(2)), torch.tensor([1.5, -0.4], dtype=torch.float64)
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
def test_spectral_branch_with_a_saturated_gate_is_a_low_or_high_pass(grid):
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


def test_spectral_branch_computes_in_float32_under_autocast():
    branch, H = perturbed(SpectralBranch(4)).float(), torch.randn(1, 8, 8, 4)
    exact = branch(H)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(branch(H), exact)
        assert branch(H.bfloat16()).dtype == torch.bfloat16


# --- the hierarchy


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_merge_and_unmerge_are_local(axes):
    """A change of a token affects its parent, or its 2^d children, and no others."""
    H, token, parent = field(1, *(4,) * axes, 4), (0, *(3,) * axes), (0, *(1,) * axes)
    changed = H.clone()
    changed[token] += 1
    merge, unmerge = perturbed(Merge(4, axes)), perturbed(Unmerge(4, axes))
    moved = (merge(changed) - merge(H)).abs().amax(dim=-1) > 1e-9
    assert moved.shape == (1, *(2,) * axes) and moved[parent] and moved.sum() == 1
    moved = (unmerge(changed) - unmerge(H)).abs().amax(dim=-1) > 1e-9
    assert moved.shape == (1, *(8,) * axes) and moved.sum() == 2**axes
    assert moved[(0, *(slice(6, 8),) * axes)].all()


def test_unmerge_inverts_the_token_order_of_merge():
    """With identity maps, so that both only reorder the neighbours."""
    merge, unmerge = Merge(2, 1).double(), Unmerge(4, 1).double()
    H = field(1, 6, 2)
    with torch.no_grad():
        merge.reduce.weight.copy_(torch.eye(4))
        unmerge.expand.weight.copy_(torch.eye(4))
        unmerge.mix.weight.copy_(torch.eye(2))
    normalised = torch.nn.functional.layer_norm(H, (2,))
    torch.testing.assert_close(unmerge(merge(H)).sign(), normalised.sign())


def test_layer_and_skip_at_initialisation():
    """Post-norm: a layer adds two vectors of unit variance to each token; a skip is close to the identity."""
    layer, skip, H = Layer(8, 2).double(), ConvNeXt(8, 2).double(), field(1, 4, 4, 8)
    updates = []
    layer.spectral_norm.register_forward_hook(lambda _, __, out: updates.append(out))
    layer.mlp_norm.register_forward_hook(lambda _, __, out: updates.append(out))
    torch.testing.assert_close(layer(H), H + updates[0] + updates[1], rtol=0, atol=1e-14)
    assert all(update.mean(dim=-1).abs().max() < 1e-12 for update in updates)
    assert 0 < (skip(H) - H).abs().max() < 1e-5


@pytest.mark.parametrize("grid", [(33,), (40, 33), (32, 5), (3, 4, 33)])
def test_drift_net_padding_equals_explicit_zeros(grid):
    """The same as for the zero-padded field, away from the edge, which the last convolution, after the crop, sees."""
    model = build_model("drift-net", grid=grid, in_channels=2, out_channels=1, width=8, depth=2, heads=2)
    model, x = perturbed(model), field(1, *grid, 2)
    full = torch.zeros(1, *(-(-n // 32) * 32 for n in grid), 2, dtype=torch.float64)
    inside = (slice(None), *(slice(n) for n in grid))
    full[inside] = x
    away = (slice(None), *(slice(n if n % 32 == 0 else max(n - 2, 0)) for n in grid))
    torch.testing.assert_close(model(x)[away], model(full)[away], rtol=0, atol=1e-12)
    assert model(x).shape == (1, *grid, 1)


def test_drift_net_receptive_field_is_global():
    """A change at one corner changes every point of the output."""
    model, x = perturbed(drift_net(SolverConfig((64, 32), 1, 1, width=16, depth=2, heads=2))), field(1, 64, 32, 1)
    changed = x.clone()
    changed[0, 0, 0] += 1
    assert ((model(changed) - model(x)).abs() > 0).all()


def test_compiled_layer_equals_eager():
    """In one graph; `test_registry` exports the complete model."""
    layer, H = perturbed(Layer(4, 2)), field(2, 6, 4, 4)
    torch.testing.assert_close(torch.compile(layer, backend="eager", fullgraph=True)(H), layer(H), rtol=0, atol=1e-13)


def test_layer_gradients_equal_finite_differences():
    layer = perturbed(Layer(2, 2))
    keys, values = zip(*layer.named_parameters(), strict=True)

    def call(H, *parameters):
        return torch.func.functional_call(layer, dict(zip(keys, parameters, strict=True)), (H,))

    assert torch.autograd.gradcheck(call, (field(1, 4, 6, 2).requires_grad_(), *values), fast_mode=True)


def test_drift_net_initialisation_is_as_published():
    torch.manual_seed(3)
    model = drift_net(SolverConfig((64, 64), 2, 1, width=128, depth=1))
    layer = model.blocks[3]
    for weight in (layer.spectral.weight, layer.pointwise.weight, layer.mlp[0].weight, layer.local.weight):
        assert weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert model.embed.weight.std().item() == pytest.approx(0.02, rel=0.1) and model.embed.bias.abs().max() == 0
    assert (model.skips[0][0].scale == 1e-6).all() and model.skips[0][0].local.bias.abs().max() == 0
    assert (layer.spectral_norm.weight == 1).all() and layer.spectral.gate[2].bias.abs().max() == 0


def test_drift_net_is_deterministic_and_grows_with_width(small_model):
    model, x = small_model("drift-net"), field(1, 12, 9, 2)
    assert torch.equal(model(x), model(x))
    counts = [count_parameters("drift-net", SolverConfig((64, 64), 1, 1, width=width)) for width in (16, 32, 64, 128)]
    assert counts == sorted(set(counts))


def test_drift_net_rejects_time():
    config = SolverConfig((64, 64), 1, 1, options=Options(time_embedding=True))
    with pytest.raises(ValueError, match=r"^drift-net has no time embedding; set .* or choose another model\.$"):
        build_solver("drift-net", config)
    model = BASELINES["drift-net"](SolverConfig((8, 8), 1, 1, width=8, depth=1, heads=2))
    with pytest.raises(ValueError, match=r"^This solver has no time embedding; omit `time`"):
        model(torch.zeros(1, 8, 8, 1), torch.zeros(1))
