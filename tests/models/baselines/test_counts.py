"""Parameter counts of the baselines: exactly those of the public codes, and closed-form expressions."""

from dataclasses import replace

import pytest

from sigmasolver.models import Options, SolverConfig, count_parameters, matched_width

SINGLE = Options(expansion=1)
DARCY, NS2D = SolverConfig((85, 85), 1, 1), SolverConfig((64, 64), 10, 1, width=256)
IT3D = SolverConfig((60, 60, 60), 40, 8)


@pytest.mark.parametrize(
    ("config", "published"),
    [
        (replace(DARCY, slices=64, options=SINGLE), 2_826_945),
        (replace(NS2D, options=SINGLE), 11_232_321),
        (NS2D, 12_282_945),
        (DARCY, 3_085_761),
        (SolverConfig((128, 128), 10, 4), 3_088_452),
        (IT3D, 7_815_240),
        (replace(IT3D, options=Options(lattice=8)), 7_929_928),
        *(
            (replace(DARCY, depth=depth, slices=64, options=SINGLE), count)
            for depth, count in ((16, 5_603_585), (24, 8_380_225), (32, 11_156_865), (40, 13_933_505))
        ),
    ],
)
def test_transolver_count(config, published):
    assert count_parameters("transolver", config) == published


def test_linearno_count():
    darcy = replace(DARCY, slices=64, options=Options(expansion=1, positions="coordinates"))
    assert count_parameters("linearno", darcy) == 1_766_145
    assert count_parameters("linearno-plain", replace(NS2D, options=Options(lattice=10))) == 3_377_921


@pytest.mark.parametrize(
    ("grid", "fields", "width", "depth", "modes", "published"),
    [((128, 128), 12, 128, 4, 32, 8_936_460), ((256, 128), 39, 256, 6, 48, 78_702_631)],
)
def test_ffno_blocks(grid, fields, width, depth, modes, published):
    """The two sizes of the reacting-flow benchmark; its lift (fields and coordinates) and head are added here."""
    config = SolverConfig(grid, fields, fields, width=width, depth=depth, modes=modes)
    blocks = count_parameters("ffno", replace(config, depth=2 * depth)) - count_parameters("ffno", config)
    lift, head = (fields + 2 + 1) * width, (width + 1) * 128 + (128 + 1) * fields
    assert lift + blocks + head == published


def test_fno_original_count():
    """The authors' Darcy and Navier-Stokes scripts, a complex weight counted as two reals."""
    darcy = SolverConfig((85, 85), 1, 1, width=32, depth=4, modes=12)
    assert count_parameters("fno-original", darcy) == 2_368_001
    ns2d = SolverConfig((64, 64), 10, 1, width=20, depth=4, heads=2, modes=12)
    assert count_parameters("fno-original", ns2d) == 926_357


def test_ffno_markov_count():
    config = SolverConfig((64, 64), 1, 1, width=64, depth=24, modes=16)
    assert count_parameters("ffno-markov", config) == 1_072_834


@pytest.mark.parametrize(
    ("config", "width", "millions"),
    [
        (DARCY, 32, "4.34"),
        (DARCY, 64, "17.3"),
        (DARCY, 128, "69.3"),
        (NS2D, 256, "277"),
        (IT3D, 32, "13"),
        (IT3D, 64, "51.9"),
    ],
)
def test_unet_count(config, width, millions):
    for name in ("unet", "unet-batchnorm"):
        assert f"{count_parameters(name, replace(config, width=width)) / 1e6:.3g}" == millions


def test_vit_count():
    assert f"{count_parameters('vit', NS2D) / 1e6:.2g}" == "6.4"
    assert f"{count_parameters('vit', SolverConfig((128, 128), 10, 4)) / 1e6:.3g}" == "1.74"


def lift_and_readout_count(config):
    """Everything but the blocks."""
    C = config.width
    encoder = (config.lattice**config.axes + config.in_channels + 1) * 2 * C + 2 * C * C + C + C
    return encoder + 2 * C + (C + 1) * config.out_channels


@pytest.mark.parametrize("grid", [(32,), (32, 20), (16, 16, 12)])
def test_solver_baseline_counts_in_every_dimension(grid):
    config = SolverConfig(grid, 4, 3, width=48, depth=3, heads=4, slices=7, options=Options(expansion=3))
    C, h, M, e, kernel = 48, 4, 7, 12, 3 ** len(grid)
    convolution, square = C * C * kernel + C, C * C + C
    norms_and_mlp = 4 * C + 2 * 3 * C * C + 3 * C + C
    attention = {
        "transolver": 2 * convolution + (e + 1) * M + h + 3 * e * e + square,
        "linearno": convolution + 2 * e * M + e * e + 2 * h + 2 * square,
        "linearno-plain": square + 2 * e * M + e * e + square,
    }
    for name, count in attention.items():
        assert count_parameters(name, config) == lift_and_readout_count(config) + 3 * (norms_and_mlp + count)
    ffno = len(grid) * 4 * C * C * 2 + 8 * C * C + 4 * C + C + 2 * C
    assert count_parameters("ffno", config) == lift_and_readout_count(config) + 3 * ffno


@pytest.mark.parametrize("grid", [(32,), (32, 21), (16, 16, 12)])
def test_other_baseline_counts_in_every_dimension(grid):
    config = SolverConfig(grid, 4, 3, width=48, depth=3, heads=4, modes=5)
    C, d, kernel, square = 48, len(grid), 3 ** len(grid), 48 * 48 + 48
    lift, head = (64 + 4 + 1) * 2 * C + 2 * C * C + C, square + (C + 1) * 3
    fourier = 3 * (2 ** (d - 1) * 5**d * C * C * 2 + square)
    assert count_parameters("fno", config) == lift + fourier + head
    assert count_parameters("fno-original", config) == (d + 4 + 1) * C + fourier + (C + 1) * 128 + (128 + 1) * 3
    normalised = [(d + 4, C), *[(C, 4 * C), (4 * C, C)] * 3, (C, 128), (128, 3)]
    shared = d * 5 * C * C * 2
    assert count_parameters("ffno-markov", config) == shared + sum((a + 2) * b for a, b in normalised)
    doubles = [(1, 1, 1), (1, 2, 2), (2, 4, 4), (4, 8, 8), (8, 8, 8), (16, 8, 4), (8, 4, 2), (4, 2, 1), (2, 1, 1)]
    levels = sum(C * C * kernel * b * (a + c) + 2 * C * (b + c) for a, b, c in doubles)
    assert count_parameters("unet", config) == lift + levels + square + head
    tokens = 8 if d == 1 else 8 * 6 if d == 2 else 4 * 4 * 3
    blocks = 3 * (12 * C * C + C + 5 * C + 4 * C)
    ends = (4**d * 4 + 1) * C + 2 * C + (C + 1) * 4**d * 3
    assert count_parameters("vit", config) == ends + tokens * C + blocks


def test_slice_update_count():
    vanilla, head_width = count_parameters("transolver", DARCY), 16
    assert count_parameters("transolver-srpa", DARCY) == vanilla + 8
    assert count_parameters("transolver-keep", DARCY) == vanilla - 8 * 3 * head_width**2


@pytest.mark.parametrize("name", ["transolver", "linearno", "linearno-plain", "ffno"])
def test_matched_width_of_baselines_is_the_closest(name):
    target, width = count_parameters("transolver-sigma", DARCY), matched_width(name, DARCY)

    def error(w):
        return abs(count_parameters(name, replace(DARCY, width=w)) - target)

    assert width < DARCY.width or name == "linearno-plain"
    assert error(width) <= error(width - 16) and error(width) <= error(width + 16)
    assert error(width) / target < 0.2
