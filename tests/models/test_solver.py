"""Complete models: independence of samples, gradients, precision, compilation, export, storage, other grids."""

import itertools
import math

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from sigmasolver.models import Options, build_model
from sigmasolver.models.layers import DepthwiseConvolution
from sigmasolver.models.spectral import SpectralOperator
from sigmasolver.models.variants import VARIANTS
from sigmasolver.ops.fourier import axis_fourier_rfft

FRAME = (
    *VARIANTS,
    "transolver",
    "transolver-srpa",
    "transolver-keep",
    "linearno",
    "linearno-plain",
    "ffno",
    "transolver-plus",
    "transolver-plus-linear",
)
"""Models that are a `Solver`, on one, two and three axes; for all models see baselines/test_every_model.py."""


def field(*shape):
    return torch.randn(*shape, dtype=torch.float64)


@pytest.mark.parametrize("name", FRAME)
@pytest.mark.parametrize("grid", [(14,), (7, 8), (5, 4, 6)])
def test_solver_gradients_are_finite_and_nonzero_in_every_dimension(small_model, name, grid):
    model = small_model(name, grid)
    x = field(2, *grid, 2).requires_grad_()
    y = model(x)
    assert y.shape == (2, *grid, 3)
    y.square().sum().backward()
    for key, parameter in model.named_parameters():
        if not parameter.requires_grad:  # the stored basis of hpm-frozen
            continue
        assert parameter.grad is not None, key
        assert torch.isfinite(parameter.grad).all(), key
        assert parameter.grad.abs().max() > 0, key
    assert torch.isfinite(x.grad).all() and x.grad.abs().amax(dim=tuple(range(1, x.ndim))).min() > 0


@pytest.mark.parametrize("name", FRAME)
def test_solver_output_depends_on_every_block(small_model, name):
    model, x = small_model(name), field(1, 12, 9, 2)
    full = model(x)
    for index in range(len(model.blocks)):
        block, model.blocks[index] = model.blocks[index], nn.Identity()
        assert (model(x) - full).abs().max() > 1e-3
        model.blocks[index] = block
    assert torch.equal(model(x), full)


@pytest.mark.parametrize("name", [name for name in FRAME if name != "transolver-sigma"])
def test_rows_are_different_functions_of_the_same_input(small_model, name):
    sigma, other = small_model(), small_model(name)
    shared = {k: v for k, v in sigma.state_dict().items() if other.state_dict().get(k, v).shape == v.shape}
    other.load_state_dict(shared, strict=False)
    x = field(1, 12, 9, 2)
    assert (other(x) - sigma(x)).abs().max() > 1e-5


def test_solver_samples_are_independent(small_model):
    model, x = small_model(), field(3, 12, 9, 2)
    separate = torch.cat([model(sample[None]) for sample in x])
    torch.testing.assert_close(model(x), separate, rtol=0, atol=1e-13)


def test_spectral_operator_dft_and_rfft_agree(small_model):
    model, x = small_model(), field(2, 12, 9, 2)
    dft = model(x)
    for module in model.modules():
        if isinstance(module, SpectralOperator):
            module.operator = axis_fourier_rfft
    torch.testing.assert_close(model(x), dft, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 0.1)])
def test_solver_in_float32_and_bf16_is_close_to_float64(small_model, dtype, bound):
    model, x = small_model(), field(2, 12, 9, 2)
    exact = model(x)
    rounded = model.to(dtype)(x.to(dtype)).double()
    assert (rounded - exact).norm() / exact.norm() < bound


def test_solver_under_autocast_is_close_to_float32(small_model):
    model, x = small_model().float(), field(2, 12, 9, 2).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        near = model(x)
    assert (near.float() - model(x)).norm() / model(x).norm() < 0.1


def test_compiled_solver_equals_eager(small_model):
    model, x = small_model(depth=1), field(2, 12, 9, 2)
    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True)
        torch.testing.assert_close(compiled(x), model(x), rtol=0, atol=1e-12)


def test_traced_gradients_equal_eager(small_model):
    """The forward and backward graphs of `torch.compile`, without Inductor, which is slow on a CPU."""
    model, x = small_model(), field(2, 12, 9, 2)
    parameters = list(model.parameters())
    traced = torch.compile(model, fullgraph=True, backend="aot_eager")
    for compiled, eager in zip(
        torch.autograd.grad(traced(x).square().sum(), parameters),
        torch.autograd.grad(model(x).square().sum(), parameters),
        strict=True,
    ):
        torch.testing.assert_close(compiled, eager, rtol=1e-10, atol=1e-11)


def test_exported_solver_equals_eager_for_any_batch_size(small_model):
    model, x = small_model(), field(2, 12, 9, 2)
    program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    more = field(5, 12, 9, 2)
    torch.testing.assert_close(program.module()(more), model(more), rtol=0, atol=1e-13)


@pytest.mark.parametrize("name", FRAME)
def test_safetensors_round_trip_is_exact(small_model, name, tmp_path):
    model, x = small_model(name), field(1, 12, 9, 2)
    state = model.state_dict()
    buffers = {key for key, _ in model.named_buffers()} if name == "unet-batchnorm" else set()
    assert set(state) == {key for key, _ in model.named_parameters()} | buffers, "nothing but parameters is stored"
    assert not any(tensor.is_complex() for tensor in state.values())
    save_file(state, tmp_path / "weights.safetensors")
    other = small_model(name)
    assert not torch.equal(other(x), model(x))
    other.load_state_dict(load_file(tmp_path / "weights.safetensors"))
    assert torch.equal(other(x), model(x))


def test_hooks_see_the_slices_and_change_nothing(small_model):
    model, x = small_model(), field(1, 12, 9, 2)
    before, seen = model(x), {}
    for name, module in model.named_modules():
        if name.endswith(("routing", "update", "update.attention")):
            module.register_forward_hook(lambda _, inputs, out, name=name: seen.__setitem__(name, (inputs[0], out)))
    assert torch.equal(model(x), before)
    prefix = "blocks.1.stages.0.branches.1.operator"
    gamma = model.get_parameter(f"{prefix}.update.gamma")
    (Z, updated), (_, delta) = seen[f"{prefix}.update"], seen[f"{prefix}.update.attention"]
    assert Z.shape == (1, 2, 5, 4) and seen[f"{prefix}.routing"][1].shape == (1, 2, 108, 5)
    assert torch.equal(updated, Z + gamma * delta)


def test_solver_runs_on_other_grids_with_the_same_number_of_axes(small_model):
    model = small_model()
    for grid in ((24, 18), (5, 31), (2, 3)):
        assert torch.isfinite(model(field(1, *grid, 2))).all()


def test_circular_padding_makes_the_solver_shift_equivariant(small_model):
    """Without positions; with zero padding it is not."""

    def defect(padding):
        model = small_model(options=Options(padding=padding))
        zero_position_weights(model)
        x = field(1, 12, 9, 2)
        return (model(x.roll((5, 2), (1, 2))) - model(x).roll((5, 2), (1, 2))).abs().max()

    assert defect(("circular", "circular")) < 1e-12
    assert defect(None) > 1e-3


def periodic_sample(n):
    x = torch.arange(n, dtype=torch.float64) * (2 * math.pi / n)
    X, Y = torch.meshgrid(x, x, indexing="ij")
    return torch.stack((torch.sin(X) + torch.cos(Y), torch.cos(X + Y)), -1)[None] / 2


def grid_difference(model, n):
    """Relative difference, at common points, of the outputs for a smooth field on n x n and 2n x 2n points."""
    coarse, fine = model(periodic_sample(n)), model(periodic_sample(2 * n))[:, ::2, ::2]
    return ((fine - coarse).norm() / fine.norm()).item()


def zero_position_weights(model):
    with torch.no_grad():
        model.lift[0].weight[:, :64].zero_()


def zero_neighbour_weights(model):
    """Zero every depthwise kernel except its centre."""
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, DepthwiseConvolution):
                centre = module.weight.shape[-1] // 2
                value = module.weight[..., centre, centre].clone()
                module.weight.zero_()
                module.weight[..., centre, centre] = value


@pytest.mark.parametrize(("positions", "order"), [(False, (0.8, 1.2)), (True, (0.4, 1.2))])
def test_grid_difference_converges_with_the_spacing(small_model, positions, order):
    """Kernels span a fixed number of points: first order in the spacing. Positions run from 0 to 1 and jump at the
    boundary of a periodic field, which affects two points next to it: order one half in the mean square."""
    model = small_model(grid=(8, 8), options=Options(padding=("circular", "circular")))
    if not positions:
        zero_position_weights(model)
    differences = [grid_difference(model, n) for n in (32, 64, 128)]
    for coarse, fine in itertools.pairwise(differences):
        assert order[0] < math.log2(coarse / fine) < order[1], differences


def test_grid_difference_vanishes_without_neighbours_and_positions(small_model):
    """What remains is the quadrature of smooth periodic functions, and epsilon relative to the mass of a slice."""
    model = small_model(grid=(8, 8), options=Options(padding=("circular", "circular")))
    zero_position_weights(model)
    zero_neighbour_weights(model)
    assert grid_difference(model, 32) < 1e-6


def test_initialisation_is_as_stated():
    torch.manual_seed(3)
    model = build_model("transolver-sigma", grid=(16, 16), in_channels=1, out_channels=1, width=128, depth=2)
    physical = model.blocks[0].stages[0].branches[1].operator
    spectral = model.blocks[0].stages[0].branches[0].operator
    for weight in (
        model.lift[0].weight,
        model.blocks[0].mixing.parts[0].gate_up.weight,
        physical.project.weight,
        *spectral.weights,
    ):
        assert weight.mean().abs() < 2e-3 and weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert physical.routing.project.weight.std().item() == pytest.approx(0.02, rel=0.2)
    for bias in (
        model.lift[0].bias,
        physical.project.bias,
        physical.routing.project.bias,
        model.readout.bias,
    ):
        assert bias.abs().max() == 0
    for convolution, inputs in ((model.blocks[0].context, 9), (physical.routing_path[0], 25)):
        assert 0.9 < convolution.weight.abs().max() * math.sqrt(inputs) <= 1
        assert convolution.weight.std().item() * math.sqrt(3 * inputs) == pytest.approx(1, rel=0.1)
    pointwise = physical.feature_path[1]
    assert pointwise.weight.std().item() * math.sqrt(3 * 64) == pytest.approx(1, rel=0.1)
    assert pointwise.bias.abs().max() > 0
    assert (physical.routing.temperature == 0.5).all()
    assert (physical.update.gamma == 0).all()
    assert (model.norm.weight == 1).all() and (model.norm.bias == 0).all() and model.norm.eps == 1e-5
    assert model.offset.min() >= 0 and model.offset.max() < 1 / 128 and model.offset.std() > 1e-3


def test_seed_fixes_the_initial_weights():
    def build():
        torch.manual_seed(7)
        return build_model("physolver", grid=(8, 8), in_channels=1, out_channels=1, width=16, heads=2, depth=1)

    for a, b in zip(build().parameters(), build().parameters(), strict=True):
        assert torch.equal(a, b)


def test_time_and_coordinate_options(small_model):
    model = small_model(options=Options(time_embedding=True, positions="coordinates"))
    assert model.lift[0].in_features == 2 + 2
    x = field(2, 12, 9, 2)
    early, late = model(x, torch.tensor([0.0, 1.0])), model(x, torch.tensor([0.0, 2.0]))
    torch.testing.assert_close(early[0], late[0], rtol=0, atol=1e-13)
    assert (early[1] - late[1]).abs().max() > 1e-6


def test_solver_accepts_an_empty_batch(small_model):
    assert small_model()(field(0, 12, 9, 2)).shape == (0, 12, 9, 3)


def test_solver_forward_mode_ad_equals_finite_differences(small_model):
    model, x, v = small_model(), field(1, 12, 9, 2), field(1, 12, 9, 2)
    _, slope = torch.func.jvp(model, (x,), (v,))
    h = 1e-6
    torch.testing.assert_close(slope, (model(x + h * v) - model(x - h * v)) / (2 * h), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("part", ["lift", "lift.0", "blocks.0.norm", "blocks.0.mixing", "readout"])
def test_backward_hooks_fire(small_model, part):
    model, seen = small_model(), []
    model.get_submodule(part).register_full_backward_hook(lambda *_: seen.append(True))
    model(field(1, 12, 9, 2).requires_grad_()).sum().backward()
    assert seen


def test_padding_as_a_string_applies_to_every_axis(small_model):
    for name in ("transolver-sigma", "unet", "eddyformer"):
        single, per_axis = (
            small_model(name, (8, 8), options=Options(padding=padding)) for padding in ("zeros", ("zeros",) * 2)
        )
        per_axis.load_state_dict(single.state_dict())
        x = torch.randn(1, 8, 8, single.config.in_channels, dtype=torch.float64)
        assert torch.equal(single(x), per_axis(x)), name
