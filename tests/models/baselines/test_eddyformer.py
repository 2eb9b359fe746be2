"""EddyFormer: published sizes, exact interpolation and quadrature, attention element by element, periodic boxes."""

import itertools
import math

import numpy as np
import pytest
import torch

from sigmasolver.models import Options, SolverConfig, build_solver, count_parameters
from sigmasolver.models.baselines.eddyformer import (
    Constants,
    ElementAttention,
    ElementConvolution,
    Elements,
    constants,
    convolution_basis,
    eddyformer,
    element_points,
    neighbours,
    resample,
    resampling,
    to_grid,
    to_nodes,
)

FLOAT64_CPU = (torch.float64, torch.device("cpu"))
SMALL = Elements(nodes=5, coarse=3)


def field(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def config(grid, **sizes):
    return SolverConfig(grid, **({"in_channels": 2, "out_channels": 3, "width": 8, "depth": 1, "heads": 2} | sizes))


def perturbed(module):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return module.double().eval()


def nodes(m):
    return np.array([(1 - math.cos(math.pi * j / (m - 1))) / 2 for j in range(m)])


def test_eddyformer_counts_equal_the_released_code():
    plane = SolverConfig((256, 256), 3, 1, width=32, depth=10)
    assert count_parameters("eddyformer-2d", plane) == 3_499_235
    assert count_parameters("eddyformer-3d", SolverConfig((96,) * 3, 3, 3, width=32, depth=4, heads=4)) == 2_269_065


def test_elements_mesh():
    assert Elements(nodes=25, density=1.5).mesh((256, 256)) == (16, 16)
    assert Elements(nodes=13).mesh((96, 96, 96)) == (8, 8, 8)
    assert Elements().mesh((128, 64, 85)) == (16, 8, 11)
    assert Elements().mesh((2, 3)) == (2, 2)


# --- interpolation


def powers(x, degree):
    return torch.stack([x**power for power in range(degree + 1)])


@pytest.mark.parametrize(("m", "target"), [(9, 5), (5, 9), (6, 6), (7, 2), (2, 7), (4, 3), (25, 5)])
def test_resampling_is_exact_for_resolved_polynomials(m, target):
    old, new = (torch.from_numpy(nodes(n)) for n in (m, target))
    degree = min(m, target) - 1
    matrix = resampling(m, target, *FLOAT64_CPU)
    torch.testing.assert_close(powers(old, degree) @ matrix.T, powers(new, degree), rtol=0, atol=1e-12)
    values = field(m)
    torch.testing.assert_close((matrix @ values)[[0, -1]], values[[0, -1]], rtol=0, atol=1e-13)


def test_resample_acts_on_every_axis_of_every_element():
    x = field(2, 3 * 5, 2 * 5, 4)
    matrix, resampled = resampling(5, 3, *FLOAT64_CPU), resample(x, resampling(5, 3, *FLOAT64_CPU))
    assert resampled.shape == (2, 9, 6, 4)
    for e, f in itertools.product(range(3), range(2)):
        cell = x[:, 5 * e : 5 * e + 5, 5 * f : 5 * f + 5]
        expected = torch.einsum("ij,kl,bjlc->bikc", matrix, matrix, cell)
        torch.testing.assert_close(resampled[:, 3 * e : 3 * e + 3, 3 * f : 3 * f + 3], expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("points", [12, 13])
def test_to_nodes_is_exact_for_trigonometric_polynomials(points):
    matrix, x = to_nodes(points, 3, 6, True, *FLOAT64_CPU), element_points(3, 6, *FLOAT64_CPU)
    grid = torch.arange(points, dtype=torch.float64) / points
    for k in range((points - 1) // 2 + 1):
        for wave in (torch.cos, torch.sin):
            expected = wave(2 * math.pi * k * x)
            torch.testing.assert_close(matrix @ wave(2 * math.pi * k * grid), expected, rtol=0, atol=1e-12)


def test_to_nodes_of_an_open_axis_is_exact_for_lines():
    matrix, x = to_nodes(7, 3, 6, False, *FLOAT64_CPU), element_points(3, 6, *FLOAT64_CPU)
    grid = torch.linspace(0, 1, 7, dtype=torch.float64)
    torch.testing.assert_close(matrix @ (2 - 3 * grid), 2 - 3 * x, rtol=0, atol=1e-12)
    kink = (grid - 0.5).abs()
    torch.testing.assert_close(matrix @ kink, (x - 0.5).abs(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("periodic", [True, False])
@pytest.mark.parametrize("points", [9, 12, 31])
def test_to_grid_is_exact_for_element_polynomials(points, periodic):
    """A different polynomial in each element; a point between two elements belongs to the right one."""
    mesh, m = 3, 5
    coefficients, local = np.random.default_rng(0).standard_normal((mesh, m)), nodes(m)
    values = np.concatenate([np.polyval(polynomial, local) for polynomial in coefficients])
    result = (to_grid(points, mesh, m, periodic, *FLOAT64_CPU) @ torch.from_numpy(values)).numpy()
    last = points if periodic else points - 1
    for i in range(points):
        element = min(i * mesh // last, mesh - 1)
        assert result[i] == pytest.approx(np.polyval(coefficients[element], i * mesh / last - element), abs=1e-12)


# --- convolution


def kernel(y, weight):
    """g(y), inputs x outputs, from its definition as a Fourier series of period two elements."""
    count = len(weight)
    highest = count // 2
    real, imaginary = weight[: highest + 1], np.zeros_like(weight[: highest + 1])
    for offset, frequency in enumerate(range(count - highest - 1, 0, -1)):
        imaginary[frequency] = weight[highest + 1 + offset]
    total = real[0].copy()
    for k in range(1, highest + 1):
        angle = math.pi * k * y
        total += (1 if k == highest else 2) * (real[k] * math.cos(angle) - imaginary[k] * math.sin(angle))
    return total


def quadrature(m, low, high):
    """Weights that integrate every polynomial of degree m - 1 through the nodes from low to high."""
    powers = np.arange(m)
    moments = (high ** (powers + 1) - low ** (powers + 1)) / (powers + 1)
    return np.linalg.solve(nodes(m)[None] ** powers[:, None], moments)


def convolved(x, weight, mesh, m):
    """(mesh m, inputs) -> (mesh m, outputs) along one axis, node by node."""
    out = np.zeros((mesh * m, weight.shape[-1]))
    local = nodes(m)
    for e, i, shift in itertools.product(range(mesh), range(m), (-1, 0, 1)):
        low, high = (min(max(local[i] + side - shift, 0), 1) for side in (-1, 1))
        w = quadrature(m, low, high)
        for j in range(m):
            f = x[(e + shift) % mesh * m + j]
            out[e * m + i] += w[j] * f @ kernel(local[i] - local[j] - shift, weight)
    return out


@pytest.mark.parametrize("mesh", [2, 3])
@pytest.mark.parametrize("m", [3, 4, 6])
def test_element_convolution_equals_its_quadrature(mesh, m):
    module = perturbed(ElementConvolution(1, m, 2, 3))
    x = field(1, mesh * m, 2)
    with torch.no_grad():
        fast = module(x, convolution_basis(m, 2 * (m - 1), *FLOAT64_CPU))[0].numpy()
    slow = convolved(x[0].numpy(), module.weights[0].detach().numpy(), mesh, m)
    np.testing.assert_allclose(fast, slow, rtol=0, atol=1e-11)


def test_element_convolution_is_the_sum_over_axes():
    module, m = perturbed(ElementConvolution(2, 4, 2, 3)), 4
    x, basis = field(1, 2 * m, 3 * m, 2), convolution_basis(4, 6, *FLOAT64_CPU)
    first, second = (weight.detach().numpy() for weight in module.weights)
    rows = np.stack([convolved(x[0, :, j].numpy(), first, 2, m) for j in range(3 * m)], axis=1)
    columns = np.stack([convolved(x[0, i].numpy(), second, 3, m) for i in range(2 * m)], axis=0)
    with torch.no_grad():
        np.testing.assert_allclose(module(x, basis)[0].numpy(), rows + columns, rtol=0, atol=1e-11)


def test_element_convolution_of_a_constant():
    """The kernel's integral over its period, two elements, is twice the first coefficient, at every node."""
    m = 16
    module = perturbed(ElementConvolution(1, m, 1, 1))
    with torch.no_grad():
        module.weights[0][5:] = 0  # frequencies that the quadrature resolves
        out = module(torch.ones(1, 3 * m, 1).double(), convolution_basis(m, 2 * (m - 1), *FLOAT64_CPU))
    torch.testing.assert_close(out, (2 * module.weights[0][0, 0, 0]).expand_as(out), rtol=0, atol=1e-8)


def test_element_convolution_of_a_wave_is_its_coefficient():
    """Period two elements on a mesh of four: the integral of 2 r cos(pi (x - y)) cos(pi y) over it is 2 r cos(pi x)."""
    m, mesh = 16, 4
    module = ElementConvolution(1, m, 1, 1).double()
    x = mesh * element_points(mesh, m, *FLOAT64_CPU)
    with torch.no_grad():
        module.weights[0].zero_()[1] = 0.7
        out = module(torch.cos(math.pi * x)[None, :, None], convolution_basis(m, 2 * (m - 1), *FLOAT64_CPU))
    torch.testing.assert_close(out[0, :, 0], 1.4 * torch.cos(math.pi * x), rtol=0, atol=1e-8)


# --- attention


def attended(module, L, reach):
    """(*nodes, C) -> (*nodes, C), element by element and node by node."""
    mesh, m, d, D = module.mesh, module.m, len(module.mesh), module.head_width
    elements, inside = (list(itertools.product(*(range(n) for n in shape))) for shape in (mesh, (m,) * d))
    basis = convolution_basis(m, 2 * (m - 1), *FLOAT64_CPU)
    parts = {"q": [], "k": [], "v": []}
    for axis in range(d):
        y = module.convolution.along(L[None], axis, basis)[0].unflatten(-1, (3, module.heads, D)).numpy()
        scale, bias = module.scale[axis].numpy(), module.bias[axis].numpy()
        for part, name in enumerate(parts):
            out = np.zeros((len(elements), len(inside), module.heads, D))
            for e, p in np.ndindex(len(elements), len(inside)):
                out[e, p] = y[(*(a * m + b for a, b in zip(elements[e], inside[p], strict=True)), part)]
            if name != "v":
                out = out + bias[part]
                mean = out.mean((1, 3), keepdims=True)
                out = (out - mean) / np.sqrt(((out - mean) ** 2).mean((1, 3), keepdims=True) + 1e-6)
                out = out * scale[part].reshape(len(inside), 1, D)
                for e, p, k in np.ndindex(len(elements), len(inside), D // 2):
                    x = 2 * math.pi * (elements[e][axis] + nodes(m)[inside[p][axis]]) / mesh[axis]
                    f, g = out[e, p, :, k] + 1, out[e, p, :, k + D // 2].copy()
                    out[e, p, :, k] = f * math.cos(k * x) - g * math.sin(k * x)
                    out[e, p, :, k + D // 2] = f * math.sin(k * x) + g * math.cos(k * x)
            parts[name].append(out)
    q, k, v = (np.concatenate(parts[name], -1) for name in parts)
    result = torch.zeros(*L.shape[:-1], module.heads * d * D, dtype=torch.float64)
    for e, p in np.ndindex(len(elements), len(inside)):
        heads = []
        for h in range(module.heads):
            near = [o for o in range(len(elements)) if reach is None or is_near(elements[e], elements[o], mesh, reach)]
            scores = np.exp([q[e, p, h] @ k[o, p, h] / math.sqrt(d * D) for o in near])
            heads.append(sum(s * v[o, p, h] for s, o in zip(scores / scores.sum(), near, strict=True)))
        node = tuple(a * m + b for a, b in zip(elements[e], inside[p], strict=True))
        result[node] = torch.from_numpy(np.concatenate(heads))
    return module.project(result)


def is_near(element, other, mesh, reach):
    return all(min(abs(a - b), n - abs(a - b)) < reach for a, b, n in zip(element, other, mesh, strict=True))


@pytest.mark.parametrize(("grid", "reach"), [((20,), None), ((20,), 2), ((12, 8), 2), ((12, 8), None)])
def test_element_attention_equals_its_definition(grid, reach):
    elements = Elements(nodes=5, coarse=3, reach=reach)
    sizes = config(grid)
    module, common = perturbed(ElementAttention(sizes, elements)), constants(sizes, elements, *FLOAT64_CPU)
    L = field(*(3 * n for n in elements.mesh(grid)), 8)
    with torch.no_grad():
        expected = attended(module, L, reach)
        torch.testing.assert_close(module(L[None], common)[0], expected, rtol=0, atol=1e-11)


def test_eddyformer_forward_mode_ad_equals_finite_differences():
    """scaled_dot_product_attention has no forward-mode AD, which the gain diagnostics need."""
    model, x, v = perturbed(eddyformer(config((12, 8)), SMALL)), field(1, 12, 8, 2), field(1, 12, 8, 2)
    _, slope = torch.func.jvp(model, (x,), (v,))
    with torch.no_grad():
        secant = (model(x + 1e-6 * v) - model(x - 1e-6 * v)) / 2e-6
    torch.testing.assert_close(slope, secant, rtol=1e-6, atol=1e-7)


def test_neighbours_wrap_around():
    near = neighbours((5,), 2, torch.device("cpu"))
    assert [bool(flag) for flag in near[0]] == [True, True, False, False, True]
    assert neighbours((4, 4), 3, torch.device("cpu")).all()


# --- the complete model


def test_eddyformer_is_equivariant_to_shifts_by_elements():
    """In a periodic box: rotated queries and keys depend only on the distance of two elements."""
    model = perturbed(eddyformer(config((12, 8)), SMALL))
    x, elements = field(1, 12, 8, 2), model.mesh
    assert elements == (3, 2)
    shift = (4, 4)
    with torch.no_grad():
        torch.testing.assert_close(model(x.roll(shift, (1, 2))), model(x).roll(shift, (1, 2)), rtol=0, atol=1e-11)
        difference = model(x.roll((1, 0), (1, 2))) - model(x).roll((1, 0), (1, 2))
    assert difference.abs().max() > 1e-3, "points of an element are not equivalent"


def test_eddyformer_is_grid_independent_for_resolved_fields():
    model = perturbed(eddyformer(config((12, 12)), SMALL))

    def sample(n):
        x = 2 * math.pi * torch.arange(n, dtype=torch.float64) / n
        X, Y = torch.meshgrid(x, x, indexing="ij")
        return model(torch.stack((torch.sin(3 * X) * torch.cos(Y), torch.cos(X + 2 * Y)), -1)[None])

    with torch.no_grad():
        torch.testing.assert_close(sample(36)[:, ::3, ::3], sample(12), rtol=0, atol=1e-11)
        torch.testing.assert_close(sample(39)[:, ::3, ::3], sample(13), rtol=0, atol=1e-11)


def test_padding_option_sets_periodic_axes():
    assert eddyformer(config((12, 8))).periodic == (True, True)
    open_ends = config((12, 8), options=Options(padding=("zeros", "circular")))
    assert eddyformer(open_ends).periodic == (False, True)
    torch.manual_seed(0)
    periodic, bounded = perturbed(eddyformer(config((12, 8)), SMALL)), perturbed(eddyformer(open_ends, SMALL))
    bounded.load_state_dict(periodic.state_dict())
    x = field(1, 12, 8, 2)
    assert (periodic(x) - bounded(x)).abs().max() > 1e-3


def test_eddyformer_initialisation_is_that_of_the_released_code():
    torch.manual_seed(2)
    model = eddyformer(SolverConfig((64, 64), 10, 1, width=64, depth=1))
    layer = model.blocks[0]
    assert layer.convolution.weights[0].std().item() == pytest.approx(1e-7, rel=0.02)
    assert layer.attention.convolution.weights[1].std().item() == pytest.approx(1e-7, rel=0.02)
    assert (layer.eps == 1e-7).all() and (model.eps == 1e-7).all()
    assert (layer.attention.scale == 1).all() and (layer.attention.bias == 0).all()
    assert layer.map[2].weight.std().item() == pytest.approx(256**-0.5, rel=0.02)
    assert layer.map[0].bias.abs().max() == 0
    assert layer.map[0].weight.abs().max() <= 2 / 0.8796 / 8 + 1e-6
    assert layer.map[1].approximate == "tanh"


def test_eddyformer_geometry_stays_float32_under_autocast():
    model, seen = eddyformer(config((12, 8)), SMALL), []
    geometry = constants(model.config, SMALL, torch.float32, torch.device("cpu"))
    assert isinstance(geometry, Constants) and geometry.fine.dtype == geometry.turns[0].dtype == torch.float32
    model.blocks[0].register_forward_pre_hook(lambda _, inputs: seen.extend(inputs[0]))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(torch.randn(1, 12, 8, 2)).dtype == torch.float32
    assert seen[0].dtype == seen[1].dtype == seen[2].down.dtype == torch.float32


def test_eddyformer_rejects_invalid_grids():
    model = build_solver("eddyformer", config((12, 8)))
    with pytest.raises(ValueError, match=r"axis 1 has 1 point\(s\); give every axis at least 2\."):
        model(torch.zeros(1, 12, 1, 2))
    with pytest.raises(ValueError, match=r"expected \(batch, 2 grid axes, 2 channels\)\."):
        model(torch.zeros(1, 12, 2))
