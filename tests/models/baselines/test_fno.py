"""FNO: spectral convolution and model against references, shifts, padding, precision, initialisation."""

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
    """Every mode that both the weight (of this leading shape) and the grid have, with its index in the weight."""
    ranges = [[k for k in range(-rows // 2, rows // 2) if -(n // 2) <= k < (n + 1) // 2]
              for n, rows in zip(grid[:-1], shape[:-1], strict=True)]  # fmt: skip
    for mode in itertools.product(*ranges, range(min(shape[-1], grid[-1] // 2 + 1))):
        yield mode, tuple(k % rows for k, rows in zip(mode, shape, strict=True))


def explicit_filter(V, weight):
    """One sample (*grid, C): the real part of an explicit sum of exponentials; a mode that is not self-conjugate on the
    last axis counts twice."""
    grid, out = V.shape[:-1], np.zeros((*V.shape[:-1], weight.shape[-2]))
    points = np.meshgrid(*(np.arange(n) / n for n in grid), indexing="ij")
    for mode, index in kept_modes(grid, weight.shape[: len(grid)]):
        wave = np.exp(2j * np.pi * sum(k * x for k, x in zip(mode, points, strict=True)))[..., None]
        amplitude = (V * wave.conj()).reshape(-1, V.shape[-1]).mean(0) @ (weight[index] @ np.array([1, 1j]))
        out += (1 if 2 * mode[-1] % grid[-1] == 0 else 2) * (wave * amplitude).real
    return out


def fft_filter(V, weight):
    """The same with NumPy's FFT over all axes."""
    grid, axes = V.shape[:-1], tuple(range(V.ndim - 1))
    spectrum = np.fft.rfftn(V, axes=axes)
    filtered = np.zeros((*spectrum.shape[:-1], weight.shape[-2]), complex)
    for mode, index in kept_modes(grid, weight.shape[: len(grid)]):
        filtered[mode] = spectrum[mode] @ (weight[index] @ np.array([1, 1j]))
    return np.fft.irfftn(filtered, s=grid, axes=axes)


def random_weight(modes, inputs=3, outputs=2):
    return field(*(2 * K for K in modes[:-1]), modes[-1], inputs, outputs, 2)


@pytest.mark.parametrize("definition", [explicit_filter, fft_filter])
@pytest.mark.parametrize(
    ("grid", "modes"),
    [((9,), (3,)), ((8,), (5,)), ((8, 7), (3, 2)), ((6, 6), (3, 4)), ((5, 4), (4, 5)), ((5, 6, 4), (2, 3, 2))],
)
def test_grid_fourier_equals_the_reference(definition, grid, modes):
    """Odd and even axes; all modes of the grid; more modes than the grid has."""
    V, weight = field(2, *grid, 3), random_weight(modes)
    fast = grid_fourier(V, weight).numpy()
    for sample, output in zip(V.numpy(), fast, strict=True):
        np.testing.assert_allclose(output, definition(sample, weight.numpy()), rtol=0, atol=1e-12)


def test_signed_basis_rows_are_orthonormal():
    for points, positive, negative in ((9, 3, 3), (8, 4, 4), (5, 3, 2)):
        basis = signed_basis(points, positive, negative, torch.float64, torch.device("cpu"))
        torch.testing.assert_close(basis @ basis.mT, torch.eye(2 * (positive + negative)).double(), rtol=0, atol=1e-14)


def test_grid_fourier_gradcheck():
    V, weight = field(1, 6, 5, 2).requires_grad_(), random_weight((2, 2), 2, 2).requires_grad_()
    assert torch.autograd.gradcheck(grid_fourier, (V, weight))


def reference_model(model, x):
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
        H = fft_filter(H, layer["convolution.weight"]) + reference.affine(H, layer / "pointwise")
        H = reference.gelu(H) if index < config.depth - 1 else H
    return reference.perceptron(H[tuple(slice(n) for n in grid)], w / "head")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("grid", "padding"),
    [((9,), None), ((16, 5), None), ((6, 7), ("circular", "zeros")), ((4, 5, 6), ("circular",) * 3)],
)
def test_fno_equals_the_reference(small_model, name, grid, padding):
    model = small_model(name, (8,) * len(grid), options=Options(padding=padding))
    x = field(1, *grid, 2)
    with torch.no_grad():
        np.testing.assert_allclose(model(x)[0].numpy(), reference_model(model, x[0].numpy()), rtol=0, atol=1e-11)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("grid", GRIDS)
def test_fno_without_positions_and_padding_is_shift_equivariant(small_model, name, grid):
    axes, dims = len(grid), tuple(range(1, len(grid) + 1))

    def defect(padding):
        model, x, steps = (
            small_model(name, grid, options=Options(padding=padding)),
            field(1, *grid, 2),
            (5, 2, 3)[:axes],
        )
        with torch.no_grad():
            model.get_parameter("lift.weight" if name == "fno-original" else "lift.0.weight")[:, :-2].zero_()
        return (model(x.roll(steps, dims)) - model(x).roll(steps, dims)).abs().max()

    assert defect(("circular",) * axes) < 1e-12
    assert (defect(None) > 1e-4) == (name == "fno-original" or grid != (16,))  # 16 points need no padding


def test_fourier_convolution_of_a_wave_uses_the_weight_of_its_mode():
    """cos(2 pi (3 x - 2 y)) is the pair of modes (3, -2) and (-3, 2), the second of which is stored in the weight."""
    layer = FourierConvolution(1, (4, 3)).double()
    x, y = (torch.arange(n, dtype=torch.float64) / n for n in (12, 10))
    angle = 2 * torch.pi * (3 * x[:, None] - 2 * y)
    real, imaginary = layer.weight.detach()[-3, 2, 0, 0]
    # The stored mode is (-3, 2), whose wave is exp(-i angle).
    expected = real * angle.cos() + imaginary * angle.sin()
    torch.testing.assert_close(layer(angle.cos()[None, ..., None])[0, ..., 0], expected, rtol=0, atol=1e-13)
    assert layer((2 * angle).cos()[None, ..., None]).abs().max() < 1e-13  # (6, -4) is cut off


def test_fourier_convolution_stays_float32_under_autocast():
    layer, H = FourierLayer(8, (3, 3)), torch.randn(1, 12, 9, 8)
    exact = layer.convolution(H)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(layer.convolution(H), exact)
        assert layer.pointwise(H).dtype == torch.bfloat16 and layer(H).dtype == torch.float32


def test_fno_last_layer_has_no_activation(small_model):
    """The input of the head is the output of the last layer."""
    model, x, seen = small_model("fno"), field(1, 12, 9, 2), {}
    model.blocks[-1].register_forward_hook(lambda _, __, out: seen.update(layer=out))
    model.head.register_forward_hook(lambda _, args, __: seen.update(head=args[0]))
    model(x)
    assert seen["layer"].shape == (1, 16, 16, 16) and torch.equal(seen["head"], seen["layer"][:, :12, :9])
    assert seen["head"].min() < -0.2  # below the minimum of GELU


def test_fno_initialisation_is_as_published():
    torch.manual_seed(3)
    model = build_model("fno", grid=(16, 16), in_channels=1, out_channels=1, width=32, depth=2, modes=4)
    first, second = (block.convolution.weight * 32**2 for block in model.blocks)
    assert first.shape == (8, 4, 32, 32, 2) and not torch.equal(first, second)
    assert 0 <= first.min() < 1e-3 and 0.999 < first.max() < 1
    assert first.mean().item() == pytest.approx(0.5, abs=0.01)
    for layer in (model.lift[0], model.blocks[0].pointwise, model.head[0]):
        bound = layer.in_features**-0.5
        assert 0.9 * bound < layer.weight.abs().max() <= bound and 0 < layer.bias.abs().max() <= bound


def test_fno_rejects_a_grid_with_too_few_modes():
    for original in (False, True):
        with pytest.raises(
            ValueError, match=r"Grid \(16, 8\) is too small for modes=6: axis 1 with 8 points has 5 modes"
        ):
            fno(SolverConfig((16, 8), 1, 1, width=8, heads=2, modes=6), original)
