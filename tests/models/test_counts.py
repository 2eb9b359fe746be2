"""Parameter counts: those published in the paper, and a closed-form expression."""

import pytest
from torch import nn

from sigmasolver.models import (
    SolverConfig,
    build_solver,
    count_parameters,
    list_models,
    matched_width,
    on_meta_device,
)
from sigmasolver.models.variants import VARIANTS


def expected_count(config):
    """The published formula: p channels per half, e per head, f inside the SwiGLU."""
    C, h, M, rho, d = config.width, config.heads, config.slices, config.options.expansion, config.axes
    p, f = C // 2, 2 * rho * C // 3
    e = p // h
    context = (3**d + 1) * C
    norms = 2 * p + 2 * p + 2 * C
    spectral = sum(2 * K * p * p for K in config.modes_per_axis)
    paths = 2 * ((5**d + 1) * p + p * p + p)
    slices = e * M + M + h + 3 * e * e + 1 + p * p + p
    swiglu = 2 * (C * f + f) + f * C + C
    encoder = (config.lattice**d + config.in_channels) * 2 * C + 2 * C + 2 * C * C + C + C
    head = 2 * C + C * config.out_channels + config.out_channels
    return encoder + config.depth * (context + norms + spectral + paths + slices + swiglu) + head


def test_count_parameters_darcy():
    assert count_parameters("transolver-sigma", SolverConfig((85, 85), 1, 1)) == 1_245_289


@pytest.mark.parametrize("points", [85, 106, 141, 211, 421])
def test_the_grid_does_not_change_the_count(points):
    assert count_parameters("transolver-sigma", SolverConfig((points, points), 1, 1)) == 1_245_289


def test_ns2d_storage():
    parameters = count_parameters("transolver-sigma", SolverConfig((64, 64), 10, 1, width=256))
    assert parameters == 4_859_289
    assert f"{4 * parameters / 1e6:.2f}" == "19.44"


@pytest.mark.parametrize(
    ("width", "published"),
    [(32, 125_161), (64, 462_937), (128, 1_776_489), (192, 3_946_377), (256, 6_964_889)],
)
def test_width_scaling_row(width, published):
    config = SolverConfig((211, 211), 1, 1, width=width, slices=128, modes=8)
    assert count_parameters("transolver-sigma", config) == published


@pytest.mark.parametrize("grid", [(32,), (32, 20), (16, 16, 12)])
def test_count_parameters_equals_the_formula_in_every_dimension(grid):
    config = SolverConfig(grid, 4, 3, width=48, depth=3, heads=4, slices=7, modes=5)
    assert count_parameters("transolver-sigma", config) == expected_count(config)


def test_position_storage_of_the_efficiency_table():
    """The paper's 4.19 MB positional buffer is 128 x 128 points times 64 distances in float32."""
    config = SolverConfig((128, 128), 10, 4, modes=8)
    assert f"{128 * 128 * config.lattice**config.axes * 4 / 1e6:.2f}" == "4.19"


def test_parameters_that_each_variant_adds_or_removes():
    config = SolverConfig((85, 85), 1, 1)
    count = {name: count_parameters(name, config) for name in VARIANTS}
    sigma, blocks, C, p, e = count["transolver-sigma"], 8, 128, 64, 8
    assert sigma - count["no-context"] == blocks * 10 * C
    assert sigma - count["slice-replace"] == blocks
    assert sigma - count["slice-keep"] == blocks * (3 * e * e + 1)
    assert sigma - count["no-physical"] == blocks * (
        2 * (26 * p + p * p + p) + e * 32 + 32 + 8 + 3 * e * e + 1 + p * p + p + 2 * p
    )
    assert sigma - count["no-spectral"] == blocks * (2 * 2 * 4 * p * p + 2 * p)
    assert count["physical-then-spectral"] == count["spectral-then-physical"]
    assert len(VARIANTS) == 11


@pytest.mark.parametrize("name", ["physolver", "specsolver", "spectral-then-physical"])
def test_matched_width_is_the_closest(name):
    config = SolverConfig((85, 85), 1, 1)
    target = count_parameters("transolver-sigma", config)
    width = matched_width(name, config)

    def error(w):
        return abs(count_parameters(name, SolverConfig((85, 85), 1, 1, width=w)) - target)

    assert error(width) <= error(width - 16) and error(width) <= error(width + 16)
    assert error(width) / target < 0.2
    assert matched_width("transolver-sigma", config) == config.width


@pytest.mark.parametrize("name", list_models())
def test_without_numbers_keeps_names_shapes_and_dtypes(name):
    config = SolverConfig((16, 16), 2, 3, width=16, depth=2, heads=2, slices=4, modes=3)
    real = build_solver(name, config)
    with on_meta_device():
        empty = build_solver(name, config)
    assert all(tensor.is_meta for tensor in empty.state_dict().values())
    for tensors in (nn.Module.state_dict, nn.Module.named_parameters, nn.Module.named_buffers):
        meta, expected = (
            [(key, tensor.shape, tensor.dtype, tensor.requires_grad) for key, tensor in dict(tensors(model)).items()]
            for model in (empty, real)
        )
        assert meta == expected
