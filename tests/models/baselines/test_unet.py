"""U-Net: the model against a slow definition, its zeros and their removal, its two norms, how it starts."""

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
    """Shaken, as if it had seen some batches."""
    model = build_model(
        name, grid=grid, in_channels=2, out_channels=3, width=4, heads=2, options=Options(padding=padding)
    ).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        for name, seen in model.named_buffers():
            if name.endswith(("running_mean", "running_var")):
                seen.add_(torch.rand_like(seen))
    return model.eval()


def convolved(x, weight, padding):
    """(*grid, C): nine or so shifted copies, each through its own matrix."""
    axes = x.ndim - 1
    for axis, end in enumerate(padding):
        ends = [(1, 1) if a == axis else (0, 0) for a in range(x.ndim)]
        x = np.pad(x, ends, mode="wrap" if end == "circular" else "constant")
    out = 0
    for cell in itertools.product(range(3), repeat=axes):
        window = tuple(slice(c, c + n - 2) for c, n in zip(cell, x.shape[:-1], strict=True))
        out = out + x[window] @ weight[(..., *cell)].T
    return out


def normalised(x, w, batch):
    over = tuple(range(x.ndim - 1))
    mean, variance = (w["running_mean"], w["running_var"]) if batch else (x.mean(over), x.var(over))
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
    """Point j of 2n lies at j (n - 1)/(2n - 1) of n."""
    for axis in range(x.ndim - 1):
        n = x.shape[axis]
        places = np.arange(2 * n) * (n - 1) / (2 * n - 1)
        along = np.moveaxis(x, axis, -1)
        lines = [np.interp(places, np.arange(n), line) for line in along.reshape(-1, n)]
        x = np.moveaxis(np.array(lines).reshape(*along.shape[:-1], 2 * n), -1, axis)
    return x


def room(grid):
    larger = [n + -n % 16 for n in grid]
    return larger if max(larger) > 16 else [*larger[:-1], 32]


def slow(model, x):
    config, w, grid = model.config, reference.Weights(model.state_dict()), x.shape[:-1]
    how = config.padding, model.norm == "batch"
    H = reference.perceptron(np.concatenate((reference.positions(grid, config), x), -1), w / "lift")
    H = np.pad(H, [(0, m - n) for m, n in zip(room(grid), grid, strict=True)] + [(0, 0)])
    skips = [double(H, w / "levels.0", *how)]
    for level in range(1, 5):
        skips.append(double(halved(skips[-1]), w / f"levels.{level}", *how))
    H = skips.pop()
    for level in range(5, 9):
        H = double(np.concatenate((skips.pop(), doubled(H)), -1), w / f"levels.{level}", *how)
    H = reference.affine(H, w / "project")[tuple(slice(n) for n in grid)]
    return reference.perceptron(H, w / "head")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("grid", "padding"),
    [((40,), None), ((20, 33), None), ((32, 16), ("circular", "zeros")), ((5, 7), None), ((9, 16, 17), None)],
)
def test_the_model_is_its_slow_definition(name, grid, padding):
    """With zeros on all axes, on some, on none; also where the deepest level needs a second point."""
    model, x = small(name, grid, padding), field(1, *grid, 2)
    with torch.no_grad():
        fast, plain = model(x)[0].numpy(), slow(model, x[0].numpy())
    np.testing.assert_allclose(fast, plain, rtol=0, atol=1e-10 * np.abs(plain).max())


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_pooling_and_interpolation(axes):
    H = field(2, *(4, 6, 2)[:axes], 3)
    for mine, written in ((pooled, halved), (interpolated, doubled)):
        for sample, out in zip(H.numpy(), mine(H).numpy(), strict=True):
            np.testing.assert_allclose(out, written(sample), rtol=0, atol=1e-14)


@pytest.mark.parametrize("grid", [(32, 48), (17, 48), (32, 40), (31, 33), (3, 2), (16, 16)])
def test_what_is_padded_is_cropped_again(grid):
    """The body sees the least multiple of 16 on every axis; an axis that needs no zeros is cropped to itself."""
    model, seen = small(grid=(32, 32)), []
    model.levels[0].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        assert model(field(1, *grid, 2)).shape == (1, *grid, 3)
    assert list(seen[0].shape[1:-1]) == room(grid)
    inside = seen[0][:, : grid[0], : grid[1]]
    assert (seen[0] != 0).sum() == inside.numel() and (inside != 0).all()


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_instance_norm_is_torchs_own_and_keeps_its_digits(axes):
    """Also in float32, for channels that are last in memory and have a mean of their own."""
    mine, theirs = InstanceNorm(4), (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)[axes - 1](4, affine=True)
    with torch.no_grad():
        for one, other in zip(mine.parameters(), theirs.parameters(), strict=True):
            other.copy_(one.add_(torch.rand(4)))
    x = (3 + torch.randn(2, *(48, 40, 5)[:axes], 4)).movedim(-1, 1)
    single, exact = mine(x).double(), theirs.double()(x.double())
    torch.testing.assert_close(mine.double()(x.double()), exact, rtol=0, atol=1e-12)
    assert (single - exact).norm() / exact.norm() < 1e-6


def test_in_training_samples_meet_in_a_batch_norm_alone():
    x = field(3, 20, 33, 2)
    for name, apart in (("unet", True), ("unet-batchnorm", False)):
        model = small(name).train()
        difference = (model(x) - torch.cat([model(one[None]) for one in x])).abs().max()
        assert (difference < 1e-10) == apart, name


def test_a_batch_norm_forecasts_by_what_it_has_seen():
    model, x = small("unet-batchnorm"), field(2, 32, 32, 2)
    before = model(x)
    model.train()(x)
    after = model.eval()(x)
    assert (after - before).abs().max() > 1e-6 and torch.equal(model(x), after)


def test_levels_run_again_for_their_gradients_unless_they_count_batches():
    plain, again = small().train(), small().train()
    again.load_state_dict(plain.state_dict())
    recompute(again, draws=False)
    x = field(1, 20, 33, 2)
    for model in (plain, again):
        model(x).square().sum().backward()
    for one, other in zip(plain.parameters(), again.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    with pytest.raises(ValueError, match=r"no blocks to recompute; set train\.recompute=false"):
        recompute(small("unet-batchnorm"), draws=False)


def test_every_level_changes_the_output():
    model, x = small(), field(1, 32, 32, 2)
    whole = model(x)
    for level in model.levels:
        weight = level.convolutions[1].weight
        with torch.no_grad():
            kept, moved = weight.clone(), weight + 0.5 * torch.randn_like(weight)
            weight.copy_(moved)
            assert (model(x) - whole).abs().max() > 1e-4
            weight.copy_(kept)
    assert torch.equal(model(x), whole)


def test_unet_starts_as_torchs_layers_do():
    torch.manual_seed(3)
    level = DoubleConvolution(16, 16, 32, ("zeros", "zeros"), "instance")
    for convolution in level.convolutions:
        bound = 1 / math.sqrt(16 * 9)
        assert convolution.bias is None and 0.99 * bound < convolution.weight.abs().max() <= bound
    assert all((norm.weight == 1).all() and (norm.bias == 0).all() and norm.eps == 1e-5 for norm in level.norms)


def test_an_unknown_norm_is_refused():
    assert isinstance(unet(SolverConfig((8, 8), 1, 1, width=4, heads=2), "batch"), UNet)
    with pytest.raises(ValueError, match='norm is "group"; choose from instance, batch'):
        unet(SolverConfig((8, 8), 1, 1, width=4, heads=2), "group")
