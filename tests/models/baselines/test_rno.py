"""RNO: the Radon transform against analytic integrals and rotated images, its inverse, and the Radon blocks."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from sigmasolver.models import Options, SolverConfig, build_model, count_parameters
from sigmasolver.models.baselines.rno import ANGLES, RadonBlock, back_projection, detectors, over_angles, radon, rno

DOUBLE, CPU = torch.float64, torch.device("cpu")
DARCY = SolverConfig((85, 85), 1, 1, slices=64, options=Options(expansion=1))
NS2D = SolverConfig((64, 64), 10, 1, width=256, options=Options(expansion=1))


def field(*shape):
    return torch.randn(*shape, dtype=DOUBLE)


def points(plane):
    """Coordinates relative to the centre, in units of the longer side."""
    return torch.meshgrid(
        *((torch.arange(n, dtype=DOUBLE) - (n - 1) / 2) / (max(plane) - 1) for n in plane), indexing="ij"
    )


def bumps(plane):
    """Two Gaussians, one of them oblique; negligible at the edge."""
    x, y = points(plane)
    isotropic = torch.exp(-((x - 0.1).square() + (y + 0.05).square()) / (2 * 0.09**2))
    oblique = torch.exp(-((x + y + 0.05).square() + 3 * (x - y - 0.1).square()) / (2 * 0.12**2))
    return isotropic + 0.5 * oblique


def sinogram(image, angles=ANGLES):
    plane = tuple(image.shape)
    return (radon(plane, angles, DOUBLE, CPU) @ image.flatten()).reshape(angles, detectors(plane))


def reconstruction(image, angles):
    plane = tuple(image.shape)
    return (back_projection(plane, angles, DOUBLE, CPU) @ sinogram(image, angles).flatten()).reshape(plane)


def perturbed_block(axes, angles=ANGLES):
    block = RadonBlock(axes, angles).double()
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return block


# --- the transform and its inverse


@pytest.mark.parametrize("plane", [(48, 48), (41, 60)])
def test_radon_of_a_gaussian_equals_the_analytic_integral(plane):
    """exp(-|p - c|^2 / 2 w^2) integrates to sqrt(2 pi) w exp(-(s - c . n)^2 / 2 w^2), up to O(spacing^2)."""
    w, centre = 0.08, (0.07, -0.04)
    x, y = points(plane)
    image = torch.exp(-((x - centre[0]).square() + (y - centre[1]).square()) / (2 * w**2))
    theta = torch.arange(ANGLES, dtype=DOUBLE)[:, None] * (math.pi / ANGLES)
    s = (torch.arange(detectors(plane), dtype=DOUBLE) - (detectors(plane) - 1) / 2) / (max(plane) - 1)
    middle = centre[0] * theta.cos() + centre[1] * theta.sin()
    exact = math.sqrt(2 * math.pi) * w * torch.exp(-(s - middle).square() / (2 * w**2))
    assert (sinogram(image) - exact).abs().max() < 0.025 * exact.max()


@pytest.mark.parametrize("plane", [(9, 9), (8, 8), (13, 6)])
def test_radon_equals_sums_of_images_rotated_by_grid_sample(plane):
    image, count = field(*plane), detectors(plane)
    extent = torch.arange(count + 8, dtype=DOUBLE) - (count + 7) / 2  # beyond every corner
    for a, row in enumerate(sinogram(image, 7)):
        cos, sin = math.cos(math.pi * a / 7), math.sin(math.pi * a / 7)
        s, t = torch.meshgrid(extent[4:-4], extent, indexing="ij")
        u, v = s * cos - t * sin, s * sin + t * cos
        sampling = torch.stack(
            (v / ((plane[1] - 1) / 2), u / ((plane[0] - 1) / 2)), -1
        )  # grid_sample takes the last axis first
        rotated = F.grid_sample(image[None, None], sampling[None], padding_mode="zeros", align_corners=True)
        torch.testing.assert_close(row, rotated[0, 0].sum(-1) / (max(plane) - 1), rtol=0, atol=1e-12)


def test_radon_of_a_rotated_image():
    """S(theta + pi/2) of an image is S(theta) of the image rotated by -pi/2; after half a turn, s is reversed."""
    image = field(10, 10)
    rotated = sinogram(image.rot90(-1, (0, 1)), 8)
    torch.testing.assert_close(rotated[:4], sinogram(image, 8)[4:], rtol=0, atol=1e-12)
    torch.testing.assert_close(rotated[4:], sinogram(image, 8)[:4].flip(-1), rtol=0, atol=1e-12)


@pytest.mark.parametrize("plane", [(64, 64), (64, 40)])
def test_back_projection_converges_with_the_number_of_angles(plane):
    image = bumps((64, 64))[:, (64 - plane[1]) // 2 :][:, : plane[1]]
    errors = [((reconstruction(image, angles) - image).norm() / image.norm()).item() for angles in (4, 8, 16, 32)]
    assert errors[0] > 3 * errors[1] > 9 * errors[2] and errors[3] <= errors[2]
    assert errors[3] < 0.02


def test_back_projection_converges_on_finer_grids():
    images = [bumps((n, n)) for n in (13, 25, 49)]
    errors = [((reconstruction(image, 32) - image).norm() / image.norm()).item() for image in images]
    assert errors[1] < errors[0] / 2 and errors[2] < errors[1] / 2


def test_back_projection_filter_is_a_ramp():
    """The response to a wave across the lines of a single angle is |k|, below the Nyquist frequency."""
    plane = (129, 129)
    count, middle = detectors(plane), plane[0] // 2
    back = back_projection(plane, 1, DOUBLE, CPU).reshape(*plane, count)[middle - 8 : middle + 8, middle]
    position = torch.arange(count, dtype=DOUBLE)
    for frequency in (0.1, 0.2, 0.3):
        wave = torch.cos(2 * math.pi * frequency * position)
        inside = wave[(count - 17) // 2 : (count - 17) // 2 + 16]
        response = back @ wave / (math.pi * (plane[0] - 1))
        torch.testing.assert_close(response, frequency * inside, rtol=0, atol=0.004)


def test_detectors_cover_the_diagonal_and_align_with_points():
    for plane in ((2, 2), (5, 9), (64, 64), (85, 85), (60, 7)):
        assert detectors(plane) >= math.hypot(*plane) and (detectors(plane) - max(plane)) % 2 == 0
    # Along an axis there is no interpolation: the lines are the columns.
    image = field(9, 9)
    torch.testing.assert_close(sinogram(image, 4)[0, 2:11], image.sum(1) / 8, rtol=0, atol=1e-12)


# --- the block


def reference_block(block, image):
    """One channel on one plane, line by line."""
    S, (first, _, last) = sinogram(image, block.angles), block.weights[0]
    A = block.angles
    hidden = torch.zeros(A, S.shape[1], first.out_channels, dtype=DOUBLE)
    P = torch.zeros_like(S)
    for a in range(A):
        stencil = torch.stack([S[(a + j - 1) % A] for j in range(3)], -1)
        hidden[a] = F.gelu(stencil @ first.weight[:, 0, :, 0].T + first.bias)
    for a in range(A):
        P[a] = sum(hidden[(a + j - 1) % A] @ last.weight[0, :, j, 0] for j in range(3)) + last.bias
    back = back_projection(tuple(image.shape), A, DOUBLE, CPU)
    return image + (back @ (P * S).flatten()).reshape(image.shape)


def test_radon_block_equals_the_reference_per_channel():
    block, x = perturbed_block(2, 6), field(2, 7, 5, 3)
    with torch.no_grad():
        y = block(x)
        for sample, channel in ((0, 0), (1, 2)):
            expected = reference_block(block, x[sample, ..., channel])
            torch.testing.assert_close(y[sample, ..., channel], expected, rtol=0, atol=1e-12)


def test_radon_block_with_constant_weights_is_linear_with_adjoint_gradient():
    """With P = 1 the block is x + FBP(R x); <v, J u> = <J^T v, u> for its matrices."""
    block, u, v = RadonBlock(2, 9).double(), field(1, 6, 8, 1).requires_grad_(), field(1, 6, 8, 1)
    with torch.no_grad():
        block.weights[0][2].bias.fill_(1)
    y = block(u)
    expected = u + reconstruction(u.detach()[0, ..., 0], 9)[None, ..., None]
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(block(3 * u), 3 * y, rtol=0, atol=1e-12)
    (gradient,) = torch.autograd.grad((y * v).sum(), u)
    R, back = radon((6, 8), 9, DOUBLE, CPU), back_projection((6, 8), 9, DOUBLE, CPU)
    torch.testing.assert_close(gradient.flatten(), v.flatten() + R.T @ (back.T @ v.flatten()), rtol=0, atol=1e-12)


def test_over_angles_equals_torch_circular_convolution():
    """As a product with a circulant matrix."""
    for layer in perturbed_block(2, 8).weights[0][::2]:
        S = field(layer.in_channels, 8, 5)
        result = over_angles(layer, S)
        torch.testing.assert_close(result, layer(S[None])[0], rtol=0, atol=1e-13)
        for shift in (1, 3):
            torch.testing.assert_close(over_angles(layer, S.roll(shift, 1)), result.roll(shift, 1), rtol=0, atol=1e-13)
        torch.testing.assert_close(over_angles(layer, S[..., [2]]), result[..., [2]], rtol=0, atol=1e-13)


def test_radon_block_in_3d_acts_on_each_pair_of_axes_in_turn():
    block, x = perturbed_block(3, 5), field(1, 4, 6, 5, 2)
    expected = x
    for axis, weights in zip((3, 2, 1), block.weights, strict=True):  # the axis missing from a pair
        plane_block = RadonBlock(2, 5).double()
        plane_block.weights[0] = weights
        expected = torch.stack([plane_block(plane) for plane in expected.unbind(axis)], axis)
    torch.testing.assert_close(block(x), expected, rtol=0, atol=1e-12)


def test_radon_block_is_float32_under_autocast_and_close_in_bf16():
    x = field(1, 12, 9, 4).float()
    block = perturbed_block(2, 6).float()
    exact = block(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(block(x), exact, rtol=0, atol=0)
    rounded = block.bfloat16()(x.bfloat16())
    assert rounded.dtype == torch.bfloat16 and (rounded.float() - exact).norm() < 0.02 * exact.norm()


# --- the model


@pytest.mark.parametrize(("config", "blocks"), [(DARCY, 4), (NS2D, 2)])
def test_rno_count(config, blocks):
    """Transolver's, and 57 per Radon block: 3 x 8 + 8 and 8 x 3 + 1. Published: 2.83 M for Darcy."""
    name = {4: "rno", 2: "rno-two-blocks"}[blocks]
    assert count_parameters(name, config) == count_parameters("transolver", config) + blocks * (24 + 8 + 24 + 1)


def test_rno_count_equals_the_published_sizes():
    count = count_parameters("rno", DARCY)
    assert count == 2_826_945 + 228 and round(count / 1e6, 2) == 2.83
    deep = [count_parameters("rno", replace(DARCY, depth=depth)) / 1e6 for depth in (16, 24, 32, 40)]
    assert [float(f"{millions:.3g}") for millions in deep] == [5.6, 8.38, 11.2, 13.9]
    volume = SolverConfig((20, 20, 20), 1, 1)
    assert count_parameters("rno", volume) == count_parameters("transolver", volume) + 4 * 3 * 57


def test_initial_rno_equals_transolver_bit_for_bit():
    def build(name):
        torch.manual_seed(4)
        return build_model(name, grid=(9, 7), in_channels=2, out_channels=1, width=16, depth=2, heads=2, slices=4)

    model, backbone, x = build("rno"), build("transolver"), torch.randn(2, 9, 7, 2)
    for key, value in backbone.state_dict().items():
        assert torch.equal(model.state_dict()[key], value)
    assert torch.equal(model(x), backbone(x))
    model(x).square().sum().backward()
    for block in model.blocks[2:]:
        first, _, last = block.weights[0]
        assert last.bias.grad.abs() > 0 and last.weight.grad.abs().max() > 0 and first.weight.grad.abs().max() == 0


def test_rno_errors():
    config = SolverConfig((8, 8), 1, 1, width=16, heads=2)
    for call, message in (
        (lambda: rno(replace(config, grid=(8,))), "has one axis, but RNO needs at least two"),
        (lambda: rno(config, radon_blocks=0), "got 0 Radon blocks"),
        (lambda: rno(config, angles=2), "blocks of 2 angles"),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            call()
        assert str(caught.value).endswith(".") and "\n" not in str(caught.value)
