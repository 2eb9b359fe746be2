"""FactFormer: published sizes, a reference implementation, rotary positions, latent marching, frozen frequencies."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from sigmasolver.diagnose.efficiency import parameter_bytes
from sigmasolver.models import Options, SolverConfig, build_solver, count_parameters
from sigmasolver.models.baselines.factformer import (
    AxisKernel,
    FactorisedAttention,
    Form,
    FourierFeatures,
    factformer,
    rotate,
    rotation,
    standardise,
    standardise_heads,
)
from sigmasolver.recipes import ModelRecipe
from sigmasolver.tasks import TASKS
from tests.models.baselines.reference import Weights, affine, gelu, layer_norm

NS2D = SolverConfig((64, 64), 10, 1, width=256, in_frames=10)
KF2D = SolverConfig((128, 128), 10, 4, in_frames=10, out_frames=4)
IT3D = SolverConfig((60, 60, 60), 40, 8, depth=4, in_frames=10, out_frames=2)
SMOKE3D = SolverConfig((64, 64, 64), 16, 16, depth=3, in_frames=4, out_frames=4)
SMALL = Form(head_width=6)
ROWS = ("factformer", "factformer-it3d", "factformer-smoke3d", "factformer-darcy")


def field(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def config(grid, **sizes):
    return SolverConfig(grid, **({"in_channels": 4, "out_channels": 6, "width": 16, "depth": 2, "heads": 2} | sizes))


def perturbed(module):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return module.double().eval()


@pytest.mark.parametrize(
    ("name", "sizes", "learned", "stored"),
    [
        ("factformer", NS2D, 16_728_193, 16_730_241),
        ("factformer", KF2D, 6_812_481, 6_813_505),
        ("factformer", replace(KF2D, depth=4), 3_463_489, 3_464_001),
        ("factformer-it3d", IT3D, 5_093_188, 5_093_956),
        ("factformer-smoke3d", SMOKE3D, 4_501_764, 4_502_340),
        ("factformer-darcy", SolverConfig((141, 141), 1, 1, depth=3), 3_749_953, 3_750_337),
    ],
)
def test_factformer_counts_equal_the_released_code(name, sizes, learned, stored):
    """Without and with the frozen frequencies; the timing runs of Transolver-sigma count both."""
    assert count_parameters(name, sizes) == learned
    with torch.device("meta"):
        assert sum(tensor.numel() for tensor in build_solver(name, sizes).state_dict().values()) == stored


def test_factformer_megabytes_equal_the_paper():
    with torch.device("meta"):
        assert f"{parameter_bytes(build_solver('factformer', NS2D)) / 1e6:.2f}" == "66.92"


def test_recipe_passes_the_frames_of_its_task():
    sizes = ModelRecipe(name="factformer").config(TASKS["it3d"])
    assert (sizes.in_frames, sizes.out_frames, sizes.in_fields, sizes.out_fields) == (10, 2, 4, 4)
    with torch.device("meta"):
        assert build_solver("factformer", sizes).answer.steps.shape == (2, 256)


# --- a slow reference implementation


def kernel(z, w, heads, width, points):
    """(H, n, n): rotated queries and keys, point by point."""
    q, k = (np.split(z @ w[f"{name}.weight"].T, heads, axis=-1) for name in ("query", "key"))
    out = np.zeros((heads, len(z), len(z)))
    for h, i, j in np.ndindex(out.shape):
        out[h, i, j] = rotated(q[h][i], points[i], width) @ rotated(k[h][j], points[j], width)
    return out


def rotated(vector, x, width):
    out = np.zeros(width)
    for j in range(width // 2):
        angle, half = 64 * x * 10_000 ** (-2 * j / width), j + width // 2
        out[j] = vector[j] * math.cos(angle) - vector[half] * math.sin(angle)
        out[half] = vector[half] * math.cos(angle) + vector[j] * math.sin(angle)
    return out


def attention(H, w, heads, form):
    """(*grid, C): pooled after the linear maps, as in the paper; kernels applied point by point."""
    Y, grid = layer_norm(H, w / "norm"), H.shape[:-1]
    O = (Y @ w["value.weight"].T).reshape(*grid, heads, -1)
    projected = Y @ w["enter.weight"].T
    for axis, n in enumerate(grid):
        v = w / f"kernels.{axis}"
        pooled = (projected @ v["reduce.weight"].T).mean(tuple(a for a in range(len(grid)) if a != axis))
        gate, up = np.split(affine(layer_norm(pooled, v / "norm"), v / "gate_up"), 2, axis=-1)
        z = affine(gelu(gate) * up, v / "down")
        K = kernel(z, v, heads, form.kernel * form.head_width, np.linspace(0, form.box, n))
        lines = np.moveaxis(O, axis, 0)
        O = np.moveaxis(np.stack([sum(K[:, i, j, None] * lines[j] for j in range(n)) for i in range(n)]), 0, axis)
    for h in range(heads):
        head = O[..., h, :]
        O[..., h, :] = (head - head.mean()) / np.sqrt(head.var(ddof=1) + 1e-8)
    inner = gelu(O.reshape(*grid, -1) @ w["project.0.weight"].T)
    return inner @ w["project.2.weight"].T


@pytest.mark.parametrize("grid", [(7,), (5, 4), (3, 2, 4)])
def test_factorised_attention_equals_the_reference(grid):
    module = perturbed(FactorisedAttention(config(grid), SMALL))
    H = field(2, *grid, 16)
    with torch.no_grad():
        fast = module(H).numpy()
    for sample in range(2):
        slow = attention(H[sample].numpy(), Weights(module.state_dict()), 2, SMALL)
        np.testing.assert_allclose(fast[sample], slow, rtol=0, atol=1e-11)


@pytest.mark.parametrize("grid", [(7,), (5, 4), (3, 2, 4)])
def test_fourier_features_equal_sines_and_cosines_of_the_phase(grid):
    features = FourierFeatures(config(grid), Form())
    axes = [np.linspace(0, 2 * math.pi, n) for n in grid]
    x = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1)
    phase = 2 * math.pi * x @ features.frequencies.double().numpy()
    expected = affine(
        np.concatenate((np.sin(phase), np.cos(phase)), -1), Weights(features.double().state_dict(), "linear.")
    )
    np.testing.assert_allclose(features(grid).detach().numpy(), expected, rtol=0, atol=1e-11)


# --- properties of the layers


def test_rotary_products_depend_on_distance_only():
    table = rotation(9, 2 * math.pi, 0, 12, torch.float64, torch.device("cpu"))
    q, k = field(12), field(12)
    products = rotate(q.expand(9, 12), table) @ rotate(k.expand(9, 12), table).T
    for shift in range(-8, 9):
        diagonal = products.diagonal(shift)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=0, atol=1e-11)
    assert (products[0, 1:] - products[0, 0]).abs().min() > 1e-6
    torch.testing.assert_close(rotate(q.expand(9, 12), table).norm(dim=-1), q.norm().expand(9), rtol=0, atol=1e-12)


def test_rotation_with_a_margin_keeps_the_spacing():
    plain = rotation(9, 8.0, 0, 12, torch.float64, torch.device("cpu"))
    extended = rotation(11, 8.0, 2, 12, torch.float64, torch.device("cpu"))
    torch.testing.assert_close(extended[:, :9], plain, rtol=0, atol=1e-13)


def test_standardise_heads_gives_zero_mean_and_unit_variance():
    out = standardise_heads(3 * field(2, 3, 5, 4, 4) + 7, eps=0)
    assert out.mean((2, 3, 4)).abs().max() < 1e-12
    torch.testing.assert_close(out.std((2, 3, 4)), torch.ones(2, 3).double(), rtol=0, atol=1e-12)
    small = 1e-3 * field(1, 1, 6, 4)
    expected = (small - small.mean()) / (small.var() + 1e-6).sqrt()
    torch.testing.assert_close(standardise_heads(small, eps=1e-6), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("grid", [(7,), (5, 4), (3, 2, 4)])
def test_standardise_equals_torch_group_norm(grid):
    group = perturbed(torch.nn.GroupNorm(3, 12))
    x = field(2, *grid, 12) + torch.arange(12)  # channels of a group with different means
    expected = group(x.movedim(-1, 1)).movedim(1, -1)
    torch.testing.assert_close(standardise(x, 3, 1e-5, group.weight, group.bias), expected, rtol=0, atol=1e-12)
    without_affine = torch.nn.functional.group_norm(x.movedim(-1, 1), 12).movedim(1, -1)
    torch.testing.assert_close(standardise(x, 12, 1e-5), without_affine, rtol=0, atol=1e-12)


@pytest.mark.parametrize("frames", [1, 2, 3])
def test_marching_frames_do_not_depend_on_later_frames(frames):
    """The first frames of a longer prediction equal those of a shorter one with the same weights."""
    torch.manual_seed(1)
    long = perturbed(factformer(config((6, 5), out_frames=3), SMALL))
    short = factformer(config((6, 5), out_frames=frames, out_channels=2 * frames), SMALL).double()
    weights = long.state_dict()
    weights["answer.steps"] = weights["answer.steps"][:frames]
    short.load_state_dict(weights)
    x = field(2, 6, 5, 4)
    torch.testing.assert_close(short(x), long(x)[..., : 2 * frames], rtol=0, atol=1e-12)


def test_lift_by_field_keeps_fields_separate():
    """Before the map over time, channels of a field depend on that field only, with the same weights in every frame."""
    lift = factformer(config((4, 4), in_frames=2), replace(SMALL, by_field=True)).lift.double()
    lift.mix = torch.nn.Identity()
    base, frame = field(1, 4, 4, 4), 1
    other = base.clone()
    other[..., 2 * frame + 1] += 1  # frame 1, field 1
    changed = (lift(other) - lift(base)).abs().amax((0, 1, 2)).unflatten(0, (2, 2, 4)) > 0
    assert changed[1, 1].any() and not changed[0].any() and not changed[1, 0].any()
    same = base[..., :2].repeat(1, 1, 1, 2)
    first, second = lift(same).chunk(2, dim=-1)
    assert torch.equal(first, second)


def test_fourier_frequencies_are_frozen_and_keep_float32():
    model = factformer(config((6, 5)), SMALL)
    initial = model.blocks[0].positions.frequencies.clone()
    for cast in (torch.bfloat16, torch.float64, torch.float32):
        frequencies = model.to(cast).blocks[0].positions.frequencies
        assert frequencies.dtype == torch.float32 and torch.equal(frequencies, initial)
    assert "blocks.0.positions.frequencies" in model.state_dict()
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert frozen == {name for name in model.state_dict() if name.endswith("positions.frequencies")}
    assert initial.std().item() == pytest.approx(8, rel=0.5)


def test_axis_kernel_initialisation():
    layer = AxisKernel(SolverConfig((8, 8), 1, 1, width=128), Form(), heads=8)
    bound = 0.02 * math.sqrt(6 / (128 + 8 * 128))
    for projection in (layer.query, layer.key):
        assert 0.95 * bound < projection.weight.abs().max() <= bound
    assert 0.95 / math.sqrt(128) < layer.reduce.weight.abs().max() <= 1 / math.sqrt(128)


def test_factorised_attention_converges_on_finer_grids():
    module = perturbed(FactorisedAttention(config((8, 8)), replace(SMALL, box=0.1)))
    mixing = field(3, 16)

    def output(n):
        x = torch.linspace(0, 1, n, dtype=torch.float64)
        X, Y = torch.meshgrid(x, x, indexing="ij")
        return module(torch.stack((torch.sin(3 * X) * Y, torch.cos(2 * X + Y), X), -1)[None] @ mixing)

    with torch.no_grad():
        coarse, middle, fine = (output(n) for n in (9, 17, 33))
    errors = [(b[:, ::2, ::2] - a).norm() / a.norm() for a, b in ((coarse, middle), (middle, fine))]
    assert errors[1] < 0.65 * errors[0] < 0.2


def test_factformer_errors():
    with pytest.raises(ValueError, match=r"width 12 is invalid for FactFormer, .* use a multiple of 16\."):
        factformer(config((6, 5), width=12))
    with pytest.raises(ValueError, match=r"half of it is not divisible by 3 fields; use a width such as 18\."):
        build_solver("factformer-it3d", config((6, 5), in_channels=3))
    with pytest.raises(ValueError, match=r"out_frames is 4; it must be at least 1 and divide out_channels = 6\."):
        config((6, 5), out_frames=4)
    with pytest.raises(ValueError, match=r"in_frames is 0; it must be at least 1 and divide in_channels = 4\."):
        config((6, 5), in_frames=0)
    timed = build_solver("factformer", config((6, 5), options=Options(time_embedding=True)))
    with pytest.raises(ValueError, match=r"This solver has a time embedding; pass `time`"):
        timed(torch.zeros(1, 6, 5, 4))
