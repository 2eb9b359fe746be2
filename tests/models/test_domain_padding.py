"""`domain_padding`: zero padding of non-periodic axes before Fourier transforms, so that their ends do not wrap."""

import pytest
import torch

from sigmasolver.models import Options, SolverConfig, build_model, build_solver
from sigmasolver.models.layers import extended
from sigmasolver.models.spectral import SpectralOperator

SIZES = {"in_channels": 2, "out_channels": 1, "width": 8, "depth": 2, "heads": 2, "slices": 3, "modes": 3}
FOURIER = ("transolver-sigma", "specsolver", "fno", "fno-original", "ffno", "ffno-markov")


def operator_of(kernel: torch.Tensor, points: int, padding: float) -> SpectralOperator:
    """A one-channel operator on one axis whose weights are the transform of a kernel."""
    length = extended((points,), (padding,))[0]
    operator = SpectralOperator(1, (length // 2 + 1,), (padding,)).double()
    spectrum = torch.fft.rfft(torch.nn.functional.pad(kernel, (0, length - len(kernel))))
    with torch.no_grad():
        operator.weights[0].copy_(torch.view_as_real(spectrum)[:, None, None])
    return operator


@pytest.mark.parametrize(("points", "padding", "reach"), [(12, 1.0, 12), (12, 0.5, 7), (9, 1 / 3, 4)])
def test_domain_padding_makes_the_convolution_linear_not_circular(points, padding, reach):
    kernel, field = torch.randn(reach, dtype=torch.float64), torch.randn(points, dtype=torch.float64)
    expected = torch.stack([sum(kernel[j] * field[i - j] for j in range(min(i + 1, reach))) for i in range(points)])
    result = operator_of(kernel, points, padding)(field[None, :, None])[0, :, 0]
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-12)
    wrapped = operator_of(kernel, points, 0.0)(field[None, :, None])[0, :, 0]
    rolled = sum(kernel[j] * field.roll(j) for j in range(reach))
    torch.testing.assert_close(wrapped, rolled, rtol=0, atol=1e-12)
    assert (wrapped - expected).abs().max() > 0.1


def test_domain_padding_removes_the_jump_at_the_ends():
    """The backward difference of a line is its slope at every point but the first; circular, it has a jump there."""
    n = 16
    line, kernel = torch.linspace(1, 2, n, dtype=torch.float64), torch.tensor([1.0, -1.0], dtype=torch.float64)
    for padding, first in ((0.25, 1.0), (0.0, -1.0)):
        slope = operator_of(kernel, n, padding)(line[None, :, None])[0, :, 0]
        torch.testing.assert_close(slope[1:], torch.full((n - 1,), 1 / (n - 1), dtype=torch.float64))
        torch.testing.assert_close(slope[0], torch.tensor(first, dtype=torch.float64))


def test_domain_padding_skips_periodic_axes():
    config = SolverConfig(
        (8, 6), 1, 1, width=8, depth=1, heads=2, options=Options(padding=("circular", "zeros"), domain_padding=0.5)
    )
    assert config.domain_padding == (0.0, 0.5)
    operator = SpectralOperator(3, (3, 2), config.domain_padding).double()
    V = torch.randn(2, 8, 6, 3, dtype=torch.float64)
    torch.testing.assert_close(operator(V.roll(3, 1)), operator(V).roll(3, 1), rtol=0, atol=1e-13)
    assert (operator(V.roll(3, 2)) - operator(V).roll(3, 2)).abs().max() > 1e-3


def model_and_output(name, grid, **options):
    torch.manual_seed(3)
    model = build_model(name, grid=grid, options=Options(**options), **SIZES)
    x = torch.randn(2, *grid, 2, generator=torch.Generator().manual_seed(0))
    return model, model(x)


@pytest.mark.parametrize("name", FOURIER)
@pytest.mark.parametrize("padding", ["zeros", "circular"])
def test_domain_padding_without_effect_is_bitwise_identical(name, padding):
    ends = (padding,) * 2
    fraction = 0.0 if padding == "zeros" else 0.5
    (plain, before), (model, after) = (
        model_and_output(name, (8, 7), padding=ends, **extra) for extra in ({}, {"domain_padding": fraction})
    )
    assert torch.equal(before, after)
    assert [n for n, _ in plain.named_parameters()] == [n for n, _ in model.named_parameters()]


@pytest.mark.parametrize("name", FOURIER)
@pytest.mark.parametrize("grid", [(9,), (8, 7), (6, 5, 6)])
def test_domain_padding_keeps_grid_and_parameters_and_has_gradients(name, grid):
    (plain, before), (model, after) = (model_and_output(name, grid, domain_padding=fraction) for fraction in (0.0, 0.5))
    assert before.shape == after.shape == (2, *grid, 1) and not torch.equal(before, after)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), model.parameters(), strict=True))
    after.square().sum().backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())


def test_extended_adds_the_same_fraction_on_every_grid():
    assert extended((16, 64, 256), (0.25,) * 3) == [20, 80, 320] and extended((5, 5), (0.0, 0.3)) == [5, 7]


def test_domain_padding_errors():
    for value, message in ((-0.1, "at least 0"), ((0.5, 3.0), "at most 2")):
        with pytest.raises(ValueError, match=message):
            Options(domain_padding=value)
    with pytest.raises(ValueError, match="domain_padding has 1 entries for 2 axes"):
        SolverConfig((8, 8), 1, 1, options=Options(domain_padding=(0.5,)))
    for name in ("physolver", "unet", "vit"):
        with pytest.raises(
            ValueError, match=f"{name} has no Fourier transform to pad; set model.options.domain_padding=0."
        ):
            build_solver(
                name,
                SolverConfig(
                    (8, 8), 2, 1, width=8, depth=1, heads=2, slices=3, modes=3, options=Options(domain_padding=0.5)
                ),
            )
