"""The fused twins against the plain definitions in float64: forward and every gradient, shapes of no special kind.

On a GPU the kernels run for real; elsewhere through Triton's interpreter (which multiplies bf16 wrongly, so bf16 is
tested on a GPU only).
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from sigmasolver.models import Options, build_model
from sigmasolver.ops import fused
from sigmasolver.ops.convolution import _plain as plain_convolution
from sigmasolver.ops.slices import deslice, routing, slice_states

pytest.importorskip("triton")
from sigmasolver.ops.fused.convolution import depthwise, depthwise_pair
from sigmasolver.ops.fused.linear import linear
from sigmasolver.ops.fused.rows import column_sums, layer_norm, silu_product
from sigmasolver.ops.fused.slices import deslice_points, slice_points

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
gpu = pytest.mark.skipif(not GPU, reason="needs a GPU")
quick = settings(deadline=None, max_examples=8, derandomize=True)


@pytest.fixture
def fused_everywhere(monkeypatch):
    monkeypatch.setattr(fused, "interpreted", not GPU)


def agree(twin, plain, inputs, dtype=torch.float32, tolerance=1e-5):
    """Outputs and gradients of `twin` in `dtype` against those of `plain` in float64, in the norm."""
    torch.backends.cuda.matmul.allow_tf32 = False
    narrow = [one.to(DEVICE, dtype).requires_grad_() for one in inputs]
    wide = [one.detach().cpu().double().requires_grad_() for one in narrow]
    found, expected = twin(*narrow), plain(*wide)
    found, expected = ((one,) if isinstance(one, torch.Tensor) else one for one in (found, expected))
    weights = [torch.randn(one.shape, dtype=torch.float64) for one in expected]
    total = sum((one.float() * w.to(DEVICE).float()).sum() for one, w in zip(found, weights, strict=True))
    exact = sum((one * w).sum() for one, w in zip(expected, weights, strict=True))
    pairs = [*zip(found, expected, strict=True)]
    pairs += zip(torch.autograd.grad(total, narrow), torch.autograd.grad(exact, wide), strict=True)
    for place, (one, two) in enumerate(pairs):
        error = (one.cpu().double() - two).norm() / two.norm().clamp(min=1e-3)
        assert error < tolerance, (place, float(error))


def sliced(R, Fe, W, b, tau, lift):
    """Slice, a nonlinear update, deslice: plainly, on (B, N, C)."""
    B, N, C = R.shape
    H = len(tau)
    P, features = (
        routing(R.view(B, N, H, C // H).transpose(1, 2), W, b, tau),
        Fe.view(B, N, H, C // H).transpose(1, 2),
    )
    Z = slice_states(P, features)
    return Z, deslice(P, torch.tanh(Z) + lift * Z).transpose(1, 2).reshape(B, N, C)


def sliced_fused(R, Fe, W, b, tau, lift):
    Z = slice_points(R, Fe, W, b, tau)
    return Z, deslice_points(R, W, b, tau, torch.tanh(Z) + lift.to(Z.dtype) * Z)


def slice_inputs(B, N, H, D, M):
    C = H * D
    shapes = ((B, N, C), (B, N, C), (D, M), (M,))
    return [*(torch.randn(shape) for shape in shapes), torch.rand(H) + 0.2, torch.randn(1)]


@quick
@given(
    B=st.integers(1, 2), N=st.integers(1, 300), H=st.integers(1, 3), D=st.integers(1, 20), M=st.integers(1, 40),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_slices(B, N, H, D, M, seed):
    torch.manual_seed(seed)
    agree(sliced_fused, sliced, slice_inputs(B, N, H, D, M), tolerance=2e-4)


def test_slices_over_several_chunks():
    """More points than one program takes, so partial sums are summed."""
    agree(sliced_fused, sliced, slice_inputs(1, 4500, 1, 4, 6), tolerance=2e-4)


@pytest.mark.parametrize(
    ("grid", "C", "kernel", "padding"),
    [
        ((13,), 3, 5, ("circular",)),
        ((7, 6), 5, 5, ("zeros", "zeros")),
        ((5, 6), 9, 3, ("circular", "zeros")),
        ((6, 5), 2, 1, ("zeros", "circular")),
        ((3, 4, 3), 3, 3, ("zeros", "circular", "zeros")),
        ((3, 3, 5), 1, 5, ("zeros", "zeros", "circular")),
    ],
)
def test_convolutions(grid, C, kernel, padding):
    weight = (C, 1, *(kernel,) * len(grid))
    inputs = [torch.randn(shape) for shape in ((2, *grid, C), weight, (C,), weight, (C,))]

    def twin(x, w, b, w2, b2):
        return *depthwise_pair(x, (w, b), (w2, b2), padding), depthwise(x, w, b, padding, residual=True)

    def plain(x, w, b, w2, b2):
        first = plain_convolution(x, w, b, padding)
        return first, plain_convolution(x, w2, b2, padding), x + first

    agree(twin, plain, inputs)


def test_weight_gradients_over_several_chunks():
    inputs = [torch.randn(shape) for shape in ((1, 40, 30, 3), (3, 1, 3, 3), (3,))]
    agree(
        lambda x, w, b: depthwise(x, w, b, ("zeros", "circular")),
        lambda x, w, b: plain_convolution(x, w, b, ("zeros", "circular")),
        inputs,
    )


@quick
@given(N=st.integers(1, 80), C=st.integers(6, 40), seed=st.integers(0, 99), half=st.booleans())
def test_rows(N, C, seed, half):
    torch.manual_seed(seed)
    first = C // 2 if half else 0
    x, w, b, m = torch.randn(N, C), torch.randn(C - first), torch.randn(C - first), torch.randn(7, C - first)

    def twin(x, w, b, m, c):
        y = layer_norm(x[None, :, first:], w, b, 1e-5)
        return y, linear(y, m, c), silu_product(torch.cat((y, 2 * y), -1))

    def plain(x, w, b, m, c):
        y = F.layer_norm(x[None, :, first:], (C - first,), w, b, 1e-5)
        return y, F.linear(y, m, c), F.silu(y) * 2 * y

    agree(twin, plain, [x, w, b, m, torch.randn(7)], tolerance=1e-4)


@quick
@given(N=st.integers(1, 600), C=st.integers(1, 150))
def test_column_sums(N, C):
    x = torch.randn(N, C)
    torch.testing.assert_close(column_sums(x.to(DEVICE)).cpu().double(), x.double().sum(0), rtol=1e-5, atol=1e-4)


@pytest.mark.usefixtures("fused_everywhere")
@pytest.mark.parametrize(("name", "grid"), [("transolver-sigma", (9, 8)), ("transolver-sigma", (3, 4, 3)),
                                            ("physolver", (11,)), ("transolver", (6, 7))])  # fmt: skip
def test_whole_models(name, grid):
    options = Options(padding=("circular", *("zeros",) * (len(grid) - 1)))
    model = build_model(
        name, grid=grid, in_channels=2, out_channels=1, width=24, depth=2, heads=2, slices=5, modes=2, options=options
    ).to(DEVICE)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    exact = copy.deepcopy(model).double()
    x, v = torch.randn(2, *grid, 2, device=DEVICE), torch.randn(2, *grid, 1, device=DEVICE)
    y, gradients = model(x), None
    gradients = torch.cat([g.flatten() for g in torch.autograd.grad((y * v).sum(), model.parameters())])
    with fused.plain():
        expected = exact(x.double())
        wanted = torch.cat([g.flatten() for g in torch.autograd.grad((expected * v).sum(), exact.parameters())])
    assert (y - expected).norm() < 1e-5 * expected.norm()
    assert (gradients - wanted).norm() < 1e-5 * wanted.norm()


@pytest.mark.usefixtures("fused_everywhere")
def test_one_setting_switches_them_off_and_a_watcher_of_the_routing_sees_it(monkeypatch):
    model = build_model("physolver", grid=(7,), in_channels=1, out_channels=1, width=8, depth=1, heads=1, slices=3)
    model = model.to(DEVICE)
    x = torch.randn(1, 7, 1, device=DEVICE)
    assert fused.usable(x)
    with fused.plain():
        assert not fused.usable(x)
        plain = model(x)
    torch.testing.assert_close(model(x), plain, rtol=1e-4, atol=1e-5)
    seen = []
    hook = model.blocks[0].stages[0].branches[0].operator.routing.register_forward_hook(lambda m, i, o: seen.append(o))
    watched = model(x)
    hook.remove()
    torch.testing.assert_close(seen[0].sum(-1), torch.ones_like(seen[0].sum(-1)))
    torch.testing.assert_close(watched, plain, rtol=1e-4, atol=1e-5)


def test_tracers_and_forward_mode_see_plain_operations(fused_everywhere):
    with torch.autograd.forward_ad.dual_level():
        assert not fused.usable(torch.zeros(1, device=DEVICE))
    torch.func.vmap(lambda x: pytest.fail("fused") if fused.usable(x) else x)(torch.zeros(2, device=DEVICE))
    assert not fused.usable(torch.zeros(1, dtype=torch.float64, device=DEVICE))


@gpu
@pytest.mark.parametrize("shape", [(2, 300, 3, 8, 20), (1, 5000, 8, 16, 32), (1, 77, 1, 24, 40)])
def test_slices_in_bf16_are_no_worse_than_plain_ones(shape):
    inputs = slice_inputs(*shape)
    fused_errors, plain_errors = (errors_of(form, inputs) for form in (sliced_fused, sliced))
    assert sum(fused_errors) <= 1.5 * sum(plain_errors) + 0.02, (fused_errors, plain_errors)


def errors_of(form, inputs):
    """Of outputs and gradients in bf16 against float64, in the norm."""
    torch.manual_seed(1)
    found = []
    for dtype in (torch.bfloat16, torch.float64):
        given = [one.to(torch.bfloat16).to(DEVICE, dtype).requires_grad_() for one in inputs]
        Z, O = form(*given) if dtype is torch.bfloat16 else sliced(*given)
        total = Z.float().square().sum() + O.float().square().sum()
        found.append([Z, O, *torch.autograd.grad(total, given)])
    return [float((one.double() - two).norm() / two.norm().clamp(min=1)) for one, two in zip(*found, strict=True)]


@gpu
def test_the_same_input_gives_the_same_bits():
    x = [one.to(DEVICE).requires_grad_() for one in slice_inputs(2, 9000, 4, 8, 20)]
    first, second = (torch.autograd.grad(sliced_fused(*x)[1].square().sum(), x) for _ in range(2))
    assert all(torch.equal(one, two) for one, two in zip(first, second, strict=True))
