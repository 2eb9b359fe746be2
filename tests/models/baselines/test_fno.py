"""FNO: its filter against the DFT written out, the model against a slow definition, shifts, zeros, precision, start."""

import itertools

import numpy as np
import pytest
import torch

from sigmasolver.models import Options, SolverConfig, build_model
from sigmasolver.models.baselines.fno import FourierConvolution, FourierLayer, fno
from sigmasolver.ops.fourier import grid_fourier, signed_basis
from tests.models.baselines import reference

NAMES = ("fno", "fno-original")
GRIDS = [(16,), (10, 9), (7, 6, 8)]


def field(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def kept_modes(grid, shape):
    """Every mode that a weight (of these first axes) and the grid both have, with its place in the weight."""
    ranges = [[k for k in range(-rows // 2, rows // 2) if -(n // 2) <= k < (n + 1) // 2]
              for n, rows in zip(grid[:-1], shape[:-1], strict=True)]  # fmt: skip
    for mode in itertools.product(*ranges, range(min(shape[-1], grid[-1] // 2 + 1))):
        yield mode, tuple(k % rows for k, rows in zip(mode, shape, strict=True))


def written_filter(V, weight):
    """One sample (*grid, C): the sum over modes of exponentials, one after another; a mode of the last axis that is not
    its own mirror image counts twice, and of each the real part."""
    grid, out = V.shape[:-1], np.zeros((*V.shape[:-1], weight.shape[-2]))
    points = np.meshgrid(*(np.arange(n) / n for n in grid), indexing="ij")
    for mode, place in kept_modes(grid, weight.shape[: len(grid)]):
        wave = np.exp(2j * np.pi * sum(k * x for k, x in zip(mode, points, strict=True)))[..., None]
        amplitude = (V * wave.conj()).reshape(-1, V.shape[-1]).mean(0) @ (weight[place] @ np.array([1, 1j]))
        out += (1 if 2 * mode[-1] % grid[-1] == 0 else 2) * (wave * amplitude).real
    return out


def by_fft(V, weight):
    """The same through NumPy's FFT over all axes."""
    grid, axes = V.shape[:-1], tuple(range(V.ndim - 1))
    spectrum = np.fft.rfftn(V, axes=axes)
    filtered = np.zeros((*spectrum.shape[:-1], weight.shape[-2]), complex)
    for mode, place in kept_modes(grid, weight.shape[: len(grid)]):
        filtered[mode] = spectrum[mode] @ (weight[place] @ np.array([1, 1j]))
    return np.fft.irfftn(filtered, s=grid, axes=axes)


def drawn_weight(modes, inputs=3, outputs=2):
    return field(*(2 * K for K in modes[:-1]), modes[-1], inputs, outputs, 2)


@pytest.mark.parametrize("definition", [written_filter, by_fft])
@pytest.mark.parametrize(
    ("grid", "modes"),
    [((9,), (3,)), ((8,), (5,)), ((8, 7), (3, 2)), ((6, 6), (3, 4)), ((5, 4), (4, 5)), ((5, 6, 4), (2, 3, 2))],
)
def test_the_filter_is_its_definition(definition, grid, modes):
    """Odd and even axes; all modes that there are; more modes than there are."""
    V, weight = field(2, *grid, 3), drawn_weight(modes)
    fast = grid_fourier(V, weight).numpy()
    for sample, one in zip(V.numpy(), fast, strict=True):
        np.testing.assert_allclose(one, definition(sample, weight.numpy()), rtol=0, atol=1e-12)


def test_rows_of_the_signed_basis_are_orthonormal():
    for points, positive, negative in ((9, 3, 3), (8, 4, 4), (5, 3, 2)):
        basis = signed_basis(points, positive, negative, torch.float64, torch.device("cpu"))
        torch.testing.assert_close(basis @ basis.mT, torch.eye(2 * (positive + negative)).double(), rtol=0, atol=1e-14)


def test_the_filter_and_its_gradients_through_autograd():
    V, weight = field(1, 6, 5, 2).requires_grad_(), drawn_weight((2, 2), 2, 2).requires_grad_()
    assert torch.autograd.gradcheck(grid_fourier, (V, weight))


def slow(model, x):
    """One sample (*grid, C_in) with the weights of a model."""
    config, w, grid = model.config, reference.Weights(model.state_dict()), x.shape[:-1]
    if model.original:
        points = np.stack(np.meshgrid(*(np.linspace(0, 1, n) for n in grid), indexing="ij"), -1)
        H = reference.affine(np.concatenate((points, x), -1), w / "lift")
    else:
        H = reference.perceptron(np.concatenate((reference.positions(grid, config), x), -1), w / "lift")
    zeros = [
        0 if end == "circular" else 9 if model.original else -n % 16
        for n, end in zip(grid, config.padding, strict=True)
    ]
    H = np.pad(H, [(0, cells) for cells in zeros] + [(0, 0)])
    for index in range(config.depth):
        layer = w / f"blocks.{index}"
        H = by_fft(H, layer["convolution.weight"]) + reference.affine(H, layer / "pointwise")
        H = reference.gelu(H) if index < config.depth - 1 else H
    return reference.perceptron(H[tuple(slice(n) for n in grid)], w / "head")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("grid", "padding"),
    [((9,), None), ((16, 5), None), ((6, 7), ("circular", "zeros")), ((4, 5, 6), ("circular",) * 3)],
)
def test_the_model_is_its_slow_definition(small_model, name, grid, padding):
    model = small_model(name, (8,) * len(grid), options=Options(padding=padding))
    x = field(1, *grid, 2)
    with torch.no_grad():
        np.testing.assert_allclose(model(x)[0].numpy(), slow(model, x[0].numpy()), rtol=0, atol=1e-11)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("grid", GRIDS)
def test_without_positions_and_zeros_it_commutes_with_shifts(small_model, name, grid):
    axes, rolled = len(grid), tuple(range(1, len(grid) + 1))

    def defect(padding):
        model, x, steps = (
            small_model(name, grid, options=Options(padding=padding)),
            field(1, *grid, 2),
            (5, 2, 3)[:axes],
        )
        with torch.no_grad():
            model.get_parameter("lift.weight" if name == "fno-original" else "lift.0.weight")[:, :-2].zero_()
        return (model(x.roll(steps, rolled)) - model(x).roll(steps, rolled)).abs().max()

    assert defect(("circular",) * axes) < 1e-12
    assert (defect(None) > 1e-4) == (name == "fno-original" or grid != (16,))  # 16 points need no zeros


def test_a_wave_leaves_with_its_own_matrix():
    """cos(2 pi (3 x - 2 y)) is the pair of modes (3, -2) and (-3, 2): the second has its place in the weight."""
    layer = FourierConvolution(1, (4, 3)).double()
    x, y = (torch.arange(n, dtype=torch.float64) / n for n in (12, 10))
    angle = 2 * torch.pi * (3 * x[:, None] - 2 * y)
    real, imaginary = layer.weight.detach()[-3, 2, 0, 0]
    # The stored mode is (-3, 2), whose wave is exp(-i angle).
    expected = real * angle.cos() + imaginary * angle.sin()
    torch.testing.assert_close(layer(angle.cos()[None, ..., None])[0, ..., 0], expected, rtol=0, atol=1e-13)
    assert layer((2 * angle).cos()[None, ..., None]).abs().max() < 1e-13  # (6, -4) is cut off


def test_the_filter_stays_in_float32_under_autocast():
    layer, H = FourierLayer(8, (3, 3)), torch.randn(1, 12, 9, 8)
    alone = layer.convolution(H)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(layer.convolution(H), alone)
        assert layer.pointwise(H).dtype == torch.bfloat16 and layer(H).dtype == torch.float32


def test_the_last_layer_is_not_bent(small_model):
    """Without a head's GELU in the way: its input is the last layer's output itself."""
    model, x, seen = small_model("fno"), field(1, 12, 9, 2), {}
    model.blocks[-1].register_forward_hook(lambda _, __, out: seen.update(layer=out))
    model.head.register_forward_hook(lambda _, args, __: seen.update(head=args[0]))
    model(x)
    assert seen["layer"].shape == (1, 16, 16, 16) and torch.equal(seen["head"], seen["layer"][:, :12, :9])
    assert seen["head"].min() < -0.2  # less than any value of GELU


def test_fno_starts_as_published():
    torch.manual_seed(3)
    model = build_model("fno", grid=(16, 16), in_channels=1, out_channels=1, width=32, depth=2, modes=4)
    first, second = (block.convolution.weight * 32**2 for block in model.blocks)
    assert first.shape == (8, 4, 32, 32, 2) and not torch.equal(first, second)
    assert 0 <= first.min() < 1e-3 and 0.999 < first.max() < 1
    assert first.mean().item() == pytest.approx(0.5, abs=0.01)
    for layer in (model.lift[0], model.blocks[0].pointwise, model.head[0]):
        bound = layer.in_features**-0.5
        assert 0.9 * bound < layer.weight.abs().max() <= bound and 0 < layer.bias.abs().max() <= bound


def test_a_grid_without_the_modes_is_refused_in_one_sentence():
    for original in (False, True):
        with pytest.raises(
            ValueError, match=r"Grid \(16, 8\) is too small for modes=6: axis 1 with 8 points has 5 modes"
        ):
            fno(SolverConfig((16, 8), 1, 1, width=8, heads=2, modes=6), original)
