"""Depthwise convolution against an explicit sum over taps, on one to three axes, for both paddings."""

import itertools

import pytest
import torch

from sigmasolver.ops.convolution import depthwise_convolution


def plain(x, weight, bias, padding):
    """out[p, c] = bias[c] + sum_q weight[c, q] x[p + q - radius, c], with indices wrapped or dropped axis by axis."""
    out = bias.expand_as(x).clone()
    grid, kernel = x.shape[1:-1], weight.shape[2:]
    for tap in itertools.product(*(range(k) for k in kernel)):
        shifted = x
        for axis, (t, k, kind) in enumerate(zip(tap, kernel, padding, strict=True), start=1):
            offset = t - k // 2
            shifted = shifted.roll(-offset, dims=axis)
            if kind == "zeros":
                index = torch.arange(grid[axis - 1]) + offset
                inside = ((index >= 0) & (index < grid[axis - 1])).to(x.dtype)
                shifted = shifted * inside.reshape([-1 if a == axis else 1 for a in range(x.ndim)])
        out += shifted * weight[(slice(None), 0, *tap)]
    return out


@pytest.mark.parametrize("grid", [(7,), (6, 5), (4, 3, 5)])
@pytest.mark.parametrize("kernel", [1, 3, 5])
def test_depthwise_convolution_equals_the_sum_over_taps(grid, kernel):
    for padding in itertools.product(("zeros", "circular"), repeat=len(grid)):
        x = torch.randn(2, *grid, 3, dtype=torch.float64)
        weight = torch.randn(3, 1, *(kernel,) * len(grid), dtype=torch.float64)
        bias = torch.randn(3, dtype=torch.float64)
        result = depthwise_convolution(x, weight, bias, padding)
        torch.testing.assert_close(result, plain(x, weight, bias, padding), rtol=0, atol=1e-12)


def test_circular_padding_commutes_with_shifts_and_zero_padding_does_not():
    x = torch.randn(1, 8, 8, 2, dtype=torch.float64)
    weight, bias = torch.randn(2, 1, 5, 5, dtype=torch.float64), torch.randn(2, dtype=torch.float64)

    def defect(padding):
        shifted = depthwise_convolution(x.roll(3, dims=1), weight, bias, padding)
        return (shifted - depthwise_convolution(x, weight, bias, padding).roll(3, dims=1)).abs().max()

    assert defect(("circular", "zeros")) < 1e-13
    assert defect(("zeros", "zeros")) > 1e-2


def test_depthwise_convolution_keeps_channels_separate_and_last():
    x = torch.randn(1, 6, 5, 3)
    weight, bias = torch.randn(3, 1, 3, 3), torch.zeros(3)
    before = depthwise_convolution(x, weight, bias, ("zeros", "zeros"))
    x[..., 1] += 1
    after = depthwise_convolution(x, weight, bias, ("zeros", "zeros"))
    changed = (after != before).flatten(0, -2).any(0)
    assert changed.tolist() == [False, True, False]
    assert after.is_contiguous()


@pytest.mark.parametrize("grid", [(5,), (4, 3), (3, 4, 3)])
@pytest.mark.parametrize("kernel", [3, 5])
def test_depthwise_convolution_gradients_match_the_sum_over_taps(grid, kernel):
    """On a CPU three axes have a custom backward pass, which can be differentiated again."""
    for padding in (("zeros",) * len(grid), ("circular", *("zeros",) * (len(grid) - 1))):
        shapes = ((2, *grid, 2), (2, 1, *(kernel,) * len(grid)), (2,))
        inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
        v = torch.randn(shapes[0], dtype=torch.float64)
        gradients = torch.autograd.grad(depthwise_convolution(*inputs, padding), inputs, v, create_graph=True)
        expected = torch.autograd.grad(plain(*inputs, padding), inputs, v, create_graph=True)
        for gradient, reference in zip(gradients, expected, strict=True):
            torch.testing.assert_close(gradient, reference, rtol=0, atol=1e-11)
        second, exact = (torch.autograd.grad(gs[0].square().sum(), inputs[1])[0] for gs in (gradients, expected))
        torch.testing.assert_close(second, exact, rtol=0, atol=1e-9)


def test_depthwise_convolution_3d_gradients_under_autocast():
    shapes = ((2, 3, 4, 3, 2), (2, 1, 3, 3, 3), (2,))
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    v, padding = torch.randn(shapes[0]), ("zeros", "circular", "zeros")
    expected = torch.autograd.grad(depthwise_convolution(*inputs, padding), inputs, v)
    with torch.autocast("cpu", torch.bfloat16):
        out = depthwise_convolution(*inputs, padding)
    gradients = torch.autograd.grad(out, inputs, v.to(out))
    assert out.dtype == torch.bfloat16
    for gradient, reference in zip(gradients, expected, strict=True):
        assert gradient.dtype == torch.float32
        assert (gradient - reference).norm() < 2e-2 * reference.norm()
