"""U-Net: parity with a reference, padding and cropping, the two norms, initialisation."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch import nn

from sigmasolver.models import Options, SolverConfig, build_model
from sigmasolver.models.baselines.unet import DoubleConvolution, InstanceNorm, UNet, interpolated, pooled, unet
from sigmasolver.train.engine import recompute
from tests.models.baselines import reference

NAMES = ("unet", "unet-batchnorm")


def field(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def small(name="unet", grid=(20, 33), padding=None):
    """With perturbed parameters and running statistics."""
    model = build_model(
        name, grid=grid, in_channels=2, out_channels=3, width=4, heads=2, options=Options(padding=padding)
    ).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith(("running_mean", "running_var")):
                buffer.add_(torch.rand_like(buffer))
    return model.eval()


def convolved(x, weight, padding):
    """(*grid, C): the sum of 3^d shifted copies, each times its matrix."""
    axes = x.ndim - 1
    for axis, end in enumerate(padding):
        widths = [(1, 1) if a == axis else (0, 0) for a in range(x.ndim)]
        x = np.pad(x, widths, mode="wrap" if end == "circular" else "constant")
    out = 0
    for cell in itertools.product(range(3), repeat=axes):
        window = tuple(slice(c, c + n - 2) for c, n in zip(cell, x.shape[:-1], strict=True))
        out = out + x[window] @ weight[(..., *cell)].T
    return out


def normalised(x, w, batch):
    axes = tuple(range(x.ndim - 1))
    mean, variance = (w["running_mean"], w["running_var"]) if batch else (x.mean(axes), x.var(axes))
    return (x - mean) / np.sqrt(variance + 1e-5) * w["weight"] + w["bias"]


def double(x, w, padding, batch):
    for step in (0, 1):
        x = convolved(x, w[f"convolutions.{step}.weight"], padding)
        x = np.maximum(normalised(x, w / f"norms.{step}", batch), 0)
    return x


def halved(x):
    for axis in range(x.ndim - 1):
        x = np.maximum(x.take(range(0, x.shape[axis], 2), axis), x.take(range(1, x.shape[axis], 2), axis))
    return x


def doubled(x):
    """Point j of 2n is at position j (n - 1)/(2n - 1) of n."""
    for axis in range(x.ndim - 1):
        n = x.shape[axis]
        positions = np.arange(2 * n) * (n - 1) / (2 * n - 1)
        along = np.moveaxis(x, axis, -1)
        lines = [np.interp(positions, np.arange(n), line) for line in along.reshape(-1, n)]
        x = np.moveaxis(np.array(lines).reshape(*along.shape[:-1], 2 * n), -1, axis)
    return x


def padded_grid(grid):
    sizes = [n + -n % 16 for n in grid]
    return sizes if max(sizes) > 16 else [*sizes[:-1], 32]


def reference_model(model, x):
    config, w, grid = model.config, reference.Weights(model.state_dict()), x.shape[:-1]
    settings = config.padding, model.norm == "batch"
    H = reference.perceptron(np.concatenate((reference.positions(grid, config), x), -1), w / "lift")
    H = np.pad(H, [(0, m - n) for m, n in zip(padded_grid(grid), grid, strict=True)] + [(0, 0)])
    skips = [double(H, w / "levels.0", *settings)]
    for level in range(1, 5):
        skips.append(double(halved(skips[-1]), w / f"levels.{level}", *settings))
    H = skips.pop()
    for level in range(5, 9):
        H = double(np.concatenate((skips.pop(), doubled(H)), -1), w / f"levels.{level}", *settings)
    H = reference.affine(H, w / "project")[tuple(slice(n) for n in grid)]
    return reference.perceptron(H, w / "head")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("grid", "padding"),
    [((40,), None), ((20, 33), None), ((32, 16), ("circular", "zeros")), ((5, 7), None), ((9, 16, 17), None)],
)
def test_unet_equals_the_reference(name, grid, padding):
    """With padding on all axes, on some, on none; also if the deepest level needs a second point."""
    model, x = small(name, grid, padding), field(1, *grid, 2)
    with torch.no_grad():
        fast, slow = model(x)[0].numpy(), reference_model(model, x[0].numpy())
    np.testing.assert_allclose(fast, slow, rtol=0, atol=1e-10 * np.abs(slow).max())


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_unet_pooling_and_interpolation(axes):
    H = field(2, *(4, 6, 2)[:axes], 3)
    for fast, slow in ((pooled, halved), (interpolated, doubled)):
        for sample, out in zip(H.numpy(), fast(H).numpy(), strict=True):
            np.testing.assert_allclose(out, slow(sample), rtol=0, atol=1e-14)


@pytest.mark.parametrize("grid", [(32, 48), (17, 48), (32, 40), (31, 33), (3, 2), (16, 16)])
def test_unet_pads_to_a_multiple_of_16_and_crops(grid):
    """The levels get the smallest multiple of 16 on every axis, zero-padded at the high end."""
    model, seen = small(grid=(32, 32)), []
    model.levels[0].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        assert model(field(1, *grid, 2)).shape == (1, *grid, 3)
    assert list(seen[0].shape[1:-1]) == padded_grid(grid)
    inside = seen[0][:, : grid[0], : grid[1]]
    assert (seen[0] != 0).sum() == inside.numel() and (inside != 0).all()


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_instance_norm_equals_torch_and_is_accurate_in_float32(axes):
    """In float32 on channels-last memory, with a nonzero mean."""
    norm, expected = (
        InstanceNorm(4),
        (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)[axes - 1](4, affine=True),
    )
    with torch.no_grad():
        for parameter, copied in zip(norm.parameters(), expected.parameters(), strict=True):
            copied.copy_(parameter.add_(torch.rand(4)))
    x = (3 + torch.randn(2, *(48, 40, 5)[:axes], 4)).movedim(-1, 1)
    single, exact = norm(x).double(), expected.double()(x.double())
    torch.testing.assert_close(norm.double()(x.double()), exact, rtol=0, atol=1e-12)
    assert (single - exact).norm() / exact.norm() < 1e-6


def test_unet_samples_interact_in_training_with_batch_norm_only():
    x = field(3, 20, 33, 2)
    for name, independent in (("unet", True), ("unet-batchnorm", False)):
        model = small(name).train()
        difference = (model(x) - torch.cat([model(sample[None]) for sample in x])).abs().max()
        assert (difference < 1e-10) == independent, name


def test_unet_batchnorm_uses_running_statistics_in_eval_mode():
    model, x = small("unet-batchnorm"), field(2, 32, 32, 2)
    before = model(x)
    model.train()(x)
    after = model.eval()(x)
    assert (after - before).abs().max() > 1e-6 and torch.equal(model(x), after)


def test_unet_recompute_is_exact_and_rejected_with_batch_norm():
    plain, recomputed = small().train(), small().train()
    recomputed.load_state_dict(plain.state_dict())
    recompute(recomputed, draws=False)
    x = field(1, 20, 33, 2)
    for model in (plain, recomputed):
        model(x).square().sum().backward()
    for expected, parameter in zip(plain.parameters(), recomputed.parameters(), strict=True):
        assert torch.equal(expected.grad, parameter.grad)
    with pytest.raises(ValueError, match=r"no blocks to recompute; set train\.recompute=false"):
        recompute(small("unet-batchnorm"), draws=False)


def test_unet_output_depends_on_every_level():
    model, x = small(), field(1, 32, 32, 2)
    full = model(x)
    for level in model.levels:
        weight = level.convolutions[1].weight
        with torch.no_grad():
            original, changed = weight.clone(), weight + 0.5 * torch.randn_like(weight)
            weight.copy_(changed)
            assert (model(x) - full).abs().max() > 1e-4
            weight.copy_(original)
    assert torch.equal(model(x), full)


def test_unet_initialisation_is_torchs_default():
    torch.manual_seed(3)
    level = DoubleConvolution(16, 16, 32, ("zeros", "zeros"), "instance")
    for convolution in level.convolutions:
        bound = 1 / math.sqrt(16 * 9)
        assert convolution.bias is None and 0.99 * bound < convolution.weight.abs().max() <= bound
    assert all((norm.weight == 1).all() and (norm.bias == 0).all() and norm.eps == 1e-5 for norm in level.norms)


def test_unet_rejects_an_unknown_norm():
    assert isinstance(unet(SolverConfig((8, 8), 1, 1, width=4, heads=2), "batch"), UNet)
    with pytest.raises(ValueError, match='norm is "group"; choose from instance, batch'):
        unet(SolverConfig((8, 8), 1, 1, width=4, heads=2), "group")
