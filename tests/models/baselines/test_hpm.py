"""HPM: sizes, cosines as eigenfunctions, the mixer against a reference, the stored basis."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from sigmasolver.models import Options, SolverConfig, build_model
from sigmasolver.models.baselines.hpm import SpectralMixer, cosines, hpm, lowest_frequencies, row_normalised_cosines
from sigmasolver.models.variants import BASELINES
from tests.models.baselines import reference

CPU = torch.device("cpu")
GRIDS = [(9,), (7, 5), (4, 5, 3)]
DARCY, NS2D, KF2D = (
    SolverConfig((85, 85), 1, 1),
    SolverConfig((64, 64), 10, 1, width=256),
    SolverConfig((128, 128), 10, 4),
)


def field(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def sizes(name, config):
    """The number of trainable parameters, and the megabytes of all parameters."""
    with torch.device("meta"):
        parameters = list(BASELINES[name](config).parameters())
    return sum(p.numel() for p in parameters if p.requires_grad), 4 * sum(p.numel() for p in parameters) / 1e6


@pytest.mark.parametrize(
    ("config", "published"),
    [
        (replace(DARCY, options=Options(expansion=1)), 2_864_321),
        (replace(NS2D, options=Options(expansion=1)), 11_306_817),
        (NS2D, 12_357_441),
        (KF2D, 3_130_180),
        (replace(KF2D, depth=4), 1_591_588),
    ],
)
def test_hpm_trainable_parameters_equal_the_public_code(config, published):
    assert sizes("hpm", config) == (published, 4 * published / 1e6)
    assert sizes("hpm-frozen", config)[0] == published


@pytest.mark.parametrize(
    ("config", "megabytes", "frozen"),
    [(NS2D, 66.21, 16.78), (KF2D, 79.63, 67.11), (replace(KF2D, depth=4), 39.92, 33.55)],
)
def test_hpm_frozen_bytes_equal_the_efficiency_table(config, megabytes, frozen):
    """The paper states 39.92 MB, 33.55 of them frozen, for its KF2D model of four blocks."""
    learned, total = sizes("hpm-frozen", config)
    assert round(total, 2) == megabytes and round(total - 4 * learned / 1e6, 2) == frozen


@pytest.mark.parametrize("grid", [*GRIDS, (2, 40), (3, 3, 30), (12, 12)])
def test_lowest_frequencies_equal_a_full_sort(grid):
    ordered = sorted(itertools.product(*map(range, grid)), key=lambda p: (sum(np.square(p)), p))
    for count in (1, 2, 5, len(ordered) // 2, len(ordered)):
        assert lowest_frequencies(grid, count) == ordered[:count]


@pytest.mark.parametrize("grid", GRIDS)
def test_cosines_are_orthonormal_under_the_trapezoidal_rule(grid):
    weight = np.ones(1)
    for n in grid:
        ends = np.full(n, 1 / (n - 1))
        ends[[0, -1]] /= 2
        weight = np.multiply.outer(weight, ends)
    B, w = cosines(grid, math.prod(grid), CPU).reshape(-1, math.prod(grid)).numpy(), weight.reshape(-1)
    np.testing.assert_allclose(B.T @ (w[:, None] * B), np.eye(len(w)), rtol=0, atol=1e-13)


@pytest.mark.parametrize("grid", GRIDS)
def test_cosines_are_eigenfunctions_of_the_neumann_laplacian(grid):
    """Second differences with reflection at both ends give 2 (cos(pi p / (n - 1)) - 1) for every axis."""
    count = math.prod(grid)
    B, p = cosines(grid, count, CPU).numpy(), np.array(lowest_frequencies(grid, count))
    laplacian, eigenvalue = np.zeros_like(B), np.zeros(count)
    for axis, n in enumerate(grid):
        mirrored = np.pad(B, [(int(a == axis),) * 2 for a in range(B.ndim)], mode="reflect")
        laplacian += np.diff(mirrored, n=2, axis=axis)
        eigenvalue += 2 * (np.cos(np.pi * p[:, axis] / (n - 1)) - 1)
    np.testing.assert_allclose(laplacian, eigenvalue * B, rtol=0, atol=1e-12)


def test_row_normalised_cosines_are_cached_and_not_stored(small_model):
    first, again = (row_normalised_cosines((12, 9), 5, torch.float64, CPU) for _ in range(2))
    assert first is again and first.shape == (108, 5)
    torch.testing.assert_close(first.norm(dim=1), torch.ones(108).double(), rtol=0, atol=1e-14)
    model = small_model("hpm")
    assert not any("basis" in key for key in model.state_dict()) and not list(model.buffers())


def reference_mixer(Y, w, config):
    """Head by head, frequency by frequency; explicit cosines for every point."""
    grid, count = Y.shape[:-1], len(w["gate.project.bias"])
    order = sorted(itertools.product(*map(range, grid)), key=lambda p: (sum(np.square(p)), p))[:count]
    rows = []
    for point in np.ndindex(*grid):
        row = [
            math.prod(
                math.cos(math.pi * p * i / (n - 1)) * (1 if p in (0, n - 1) else math.sqrt(2))
                for p, i, n in zip(index, point, grid, strict=True)
            )
            for index in order
        ]
        rows.append(np.array(row) / math.sqrt(sum(v * v for v in row)))
    Phi, outputs = np.array(rows), []
    gates = reference.heads_of(reference.convolution(Y, w / "gate_path", config.padding), config)
    features = reference.heads_of(reference.convolution(Y, w / "feature_path", config.padding), config)
    for R, F, tau in zip(gates, features, w["gate.temperature"], strict=True):
        logits = reference.affine(R, w / "gate.project") / min(max(tau, 0.1), 5)
        E = np.array([reference.softmax(point) for point in logits]) * Phi
        S = np.array([sum(E[n, f] * F[n] for n in range(len(F))) for f in range(count)])
        S = (S - S.mean()) / math.sqrt(((S - S.mean()) ** 2).mean() + 1e-5) * w["norm.weight"] + w["norm.bias"]
        outputs.append(np.array([sum(E[n, f] * (S[f] @ w["mix"]) for f in range(count)) for n in range(len(F))]))
    return reference.affine(np.concatenate(outputs, -1), w / "project").reshape(Y.shape)


def assert_parity(model, grid):
    x = field(1, *grid, 2)
    with torch.no_grad():
        fast = model(x)[0].numpy()
    slow = reference.solver(model, x[0].numpy(), reference.attention_block(reference_mixer))
    np.testing.assert_allclose(fast, slow, rtol=0, atol=1e-11)


@pytest.mark.parametrize("grid", [(9,), (4, 5), (3, 2, 4)])
def test_hpm_parity_in_every_dimension(small_model, grid):
    assert_parity(small_model("hpm", (8,) * len(grid)), grid)


def test_hpm_parity_with_other_options(small_model):
    """Coordinates, one circular axis, another expansion, temperatures out of range on both sides."""
    options = Options(expansion=3, positions="coordinates", padding=("circular", "zeros"))
    model = small_model("hpm", (8, 8), options=options)
    with torch.no_grad():
        for block in model.blocks:
            block.attention.operator.gate.temperature.copy_(torch.tensor([-0.3, 7.0]))
    assert_parity(model, (5, 3))


def test_hpm_gradients_equal_finite_differences(small_model):
    model = small_model("hpm", (3, 4), depth=1)
    keys, values = zip(*model.named_parameters(), strict=True)

    def call(x, *parameters):
        return torch.func.functional_call(model, dict(zip(keys, parameters, strict=True)), (x,))

    assert torch.autograd.gradcheck(call, (field(1, 3, 4, 2).requires_grad_(), *values), fast_mode=True)


def test_stored_basis_equals_the_shared_one_and_is_frozen():
    torch.manual_seed(4)
    config = SolverConfig((6, 5), 1, 1, width=16, depth=2, heads=2)
    shared, stored = (hpm(config, frequencies=7, stored=stored).double() for stored in (False, True))
    missing = stored.load_state_dict(shared.state_dict(), strict=False).missing_keys
    assert missing == [f"blocks.{index}.attention.operator.basis" for index in range(2)]
    exact = row_normalised_cosines((6, 5), 7, torch.float64, CPU)
    for block in stored.blocks:
        basis = block.attention.operator.basis
        torch.testing.assert_close(basis, exact.float().double(), rtol=0, atol=0)
        basis.copy_(exact)
    x = field(2, 6, 5, 1)
    assert torch.equal(shared(x), stored(x))
    other = field(1, 8, 9, 1)
    assert torch.equal(shared(other), stored(other)), "another grid has its own basis"
    stored(x).square().sum().backward()
    assert all(block.attention.operator.basis.grad is None for block in stored.blocks)


def test_spectral_mixer_is_invariant_to_the_scale_of_features():
    """The norm over frequencies and channels removes any factor, such as the number of points."""
    mixer = SpectralMixer(SolverConfig((6, 5), 1, 1, width=8, heads=2), frequencies=6).double()
    Y, outputs = field(1, 6, 5, 8), []
    for factor in (1e4, 1e6):
        with torch.no_grad():
            mixer.feature_path.weight.copy_(factor * torch.ones(8, 8, 3, 3).tril())
            mixer.feature_path.bias.zero_()
        outputs.append(mixer(Y))
    torch.testing.assert_close(*outputs, rtol=1e-6, atol=1e-6)


def test_compiled_hpm_equals_eager(small_model):
    model, x = small_model("hpm"), field(2, 12, 9, 2)
    torch.testing.assert_close(torch.compile(model, backend="eager", fullgraph=True)(x), model(x), rtol=0, atol=1e-13)


def test_hpm_output_depends_on_time():
    model = build_model("hpm", grid=(6, 5), in_channels=1, out_channels=1, options=Options(time_embedding=True))
    x, times = torch.randn(1, 6, 5, 1).expand(2, -1, -1, -1), torch.tensor([0.0, 3.0])
    early, late = model(x, times)
    assert not torch.equal(early, late)


def test_hpm_initialisation_is_as_published():
    torch.manual_seed(3)
    mixer = SpectralMixer(SolverConfig((16, 16), 1, 1), frequencies=128)
    assert mixer.gate.project.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert mixer.gate.project.bias.abs().max() == 0 and (mixer.gate.temperature == 0.5).all()
    assert 0.95 / 4 < mixer.mix.abs().max() <= 1 / 4 and mixer.mix.std().item() == pytest.approx(0.25 / 3**0.5, rel=0.1)
    assert mixer.norm.weight.shape == (128, 16) and (mixer.norm.weight == 1).all() and (mixer.norm.bias == 0).all()


def test_hpm_dropout_acts_in_training_only(small_model):
    model, plain = small_model("hpm", options=Options(dropout=0.5)), small_model("hpm")
    plain.load_state_dict(model.state_dict())
    x = field(1, 12, 9, 2)
    assert torch.equal(model(x), plain(x)) and torch.equal(model(x), model(x))
    assert not torch.equal(model.train()(x), plain(x))


def test_hpm_rejects_grids_with_fewer_points_than_frequencies():
    with pytest.raises(ValueError, match=r"^Grid \(10, 12\) has 120 points, but HPM has 128 frequencies; use a grid"):
        BASELINES["hpm"](replace(DARCY, grid=(10, 12)))
    model = hpm(SolverConfig((4, 4), 1, 1, width=8, heads=2, depth=1), frequencies=16)
    with pytest.raises(ValueError, match=r"^Grid \(3, 5\) has 15 points, but HPM has 16 frequencies; .*\.$"):
        model(torch.zeros(1, 3, 5, 1))
