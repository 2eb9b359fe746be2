"""Fused operations against their plain definitions in float64: outputs and all gradients, for irregular shapes.

Without a GPU the kernels run in Triton's interpreter, which multiplies bf16 wrongly, so bf16 is tested on a GPU only.
"""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from sigmasolver.models import Options, build_model
from sigmasolver.ops import dispatch
from sigmasolver.ops.convolution import _plain as plain_convolution
from sigmasolver.ops.fourier import axis_fourier as plain_fourier
from sigmasolver.ops.modules import SliceMap
from sigmasolver.ops.slices import attention_matrix, deslice, routing, slice_states

pytest.importorskip("triton")
from sigmasolver.models.slices import UPDATES
from sigmasolver.ops.fused import linear as fused_linear
from sigmasolver.ops.fused import mixing as fused_mixing
from sigmasolver.ops.fused import slices as fused_slices
from sigmasolver.ops.fused import tuning
from sigmasolver.ops.fused.context import add_context
from sigmasolver.ops.fused.convolution import depthwise, depthwise_pair
from sigmasolver.ops.fused.fourier import axis_fourier
from sigmasolver.ops.fused.layer_norm import layer_norm
from sigmasolver.ops.fused.linear import linear, map_gradients
from sigmasolver.ops.fused.mixing import add_mixing
from sigmasolver.ops.fused.reductions import column_sums
from sigmasolver.ops.fused.slices import slice_attention
from sigmasolver.ops.fused.swiglu import silu_product
from tests.ops.device import DEVICE, GPU, gpu

quick = settings(deadline=None, max_examples=8, derandomize=True, phases=(Phase.generate,))


@pytest.fixture
def fused_everywhere(monkeypatch):
    monkeypatch.setattr(dispatch, "interpreted", not GPU)


def assert_parity(fused, plain, inputs, dtype=torch.float32, tolerance=1e-5):
    """Compare outputs and gradients of `fused` in `dtype` with those of `plain` in float64, in the norm."""
    torch.backends.cuda.matmul.allow_tf32 = False
    narrow = [x.to(DEVICE, dtype).requires_grad_() for x in inputs]
    wide = [x.detach().cpu().double().requires_grad_() for x in narrow]
    outputs, expected = fused(*narrow), plain(*wide)
    outputs, expected = ((y,) if isinstance(y, torch.Tensor) else y for y in (outputs, expected))
    weights = [torch.randn(y.shape, dtype=torch.float64) for y in expected]
    total = sum((y.float() * w.to(DEVICE).float()).sum() for y, w in zip(outputs, weights, strict=True))
    exact = sum((y * w).sum() for y, w in zip(expected, weights, strict=True))
    pairs = [*zip(outputs, expected, strict=True)]
    pairs += zip(torch.autograd.grad(total, narrow), torch.autograd.grad(exact, wide), strict=True)
    for index, (actual, reference) in enumerate(pairs):
        error = (actual.cpu().double() - reference).norm() / reference.norm().clamp(min=1e-3)
        assert error < tolerance, (index, float(error))


LIMITS = 0.3, 1.1
"""Range of the temperatures, which are drawn between 0.2 and 1.2, so that some are clipped."""


def plain_slice_attention(kind, R, Fe, W, b, tau, Wq, Wk, Wv, gamma, Wo, bo):
    """Slice, update, deslice and project with plain operations on (B, N, C)."""
    B, N, C = R.shape
    H, tau = len(tau), tau.clamp(*LIMITS)
    P, features = (
        routing(R.view(B, N, H, C // H).transpose(1, 2), W.mT, b, tau),
        Fe.view(B, N, H, C // H).transpose(1, 2),
    )
    Z = slice_states(P, features)
    delta = attention_matrix(Z @ Wq.mT, Z @ Wk.mT) @ (Z @ Wv.mT)
    new = {"residual": Z + gamma * delta, "replace": delta, "keep": Z}[kind]
    # Every kind uses all arguments, so that each has a gradient.
    unused = {"residual": 0, "replace": gamma.sum(), "keep": sum(w.sum() for w in (Wq, Wk, Wv, gamma))}[kind]
    return F.linear(deslice(P, new).transpose(1, 2).reshape(B, N, C), Wo, bo) + unused


def fused_slice_attention(kind, R, Fe, W, b, tau, Wq, Wk, Wv, gamma, Wo, bo):
    attention = {"residual": (Wq, Wk, Wv, gamma), "replace": (Wq, Wk, Wv), "keep": ()}[kind]
    unused = {"residual": 0, "replace": gamma.sum(), "keep": sum(w.sum() for w in (Wq, Wk, Wv, gamma))}[kind]
    return slice_attention(R, Fe, SliceMap(W, b, tau, LIMITS), attention, (Wo, bo)) + unused


def slice_inputs(B, N, H, D, M):
    C = H * D
    shapes = ((B, N, C), (B, N, C), (M, D), (M,))
    maps = ((D, D), (D, D), (D, D), (1,), (C, C), (C,))
    return [*(torch.randn(s) for s in shapes), torch.rand(H) + 0.2, *(torch.randn(s) / s[-1] ** 0.5 for s in maps)]


def assert_slice_parity(kind, *sizes, tolerance=2e-4):
    assert_parity(
        partial(fused_slice_attention, kind),
        partial(plain_slice_attention, kind),
        slice_inputs(*sizes),
        tolerance=tolerance,
    )


@quick
@given(
    kind=st.sampled_from(UPDATES), B=st.integers(1, 2), N=st.integers(1, 200), H=st.integers(1, 3),
    D=st.integers(1, 20), M=st.integers(1, 40), seed=st.integers(0, 99),
)  # fmt: skip
def test_slice_attention_parity(kind, B, N, H, D, M, seed):
    torch.manual_seed(seed)
    assert_slice_parity(kind, B, N, H, D, M)


def test_slice_attention_parity_over_several_chunks(monkeypatch):
    """More points than one program handles, so that partial sums are reduced."""
    torch.manual_seed(0)
    monkeypatch.setattr(tuning, "MAX_SLICE_CHUNK", 64)
    assert_slice_parity("residual", 2, 300, 1, 4, 6)
    assert_slice_parity("residual", 2, 300, 4, 8, 9)


@pytest.mark.parametrize("slices, width", [(120, 13), (60, 28), (30, 50)])
def test_slice_attention_parity_of_large_heads(slices, width):
    """With one head the gradient of the temperature is a single number, in which terms cancel: plain float32 too is off
    by up to 1e-4."""
    torch.manual_seed(0)
    assert_slice_parity("residual", 1, 70, 1, width, slices, tolerance=1e-3)


def test_slice_attention_falls_back_to_plain_for_many_slices(fused_everywhere, monkeypatch):
    calls = []
    monkeypatch.setattr(fused_slices, "slice_attention", lambda *args: calls.append(args) or slice_attention(*args))
    for slices, fused_calls in ((5, 1), (129, 0)):
        torch.manual_seed(0)
        model = build_model(
            "transolver-sigma", grid=(6, 5), in_channels=2, out_channels=1, width=16, depth=1, heads=2, slices=slices,
            modes=2,
        ).to(DEVICE)  # fmt: skip
        x = torch.randn(1, 6, 5, 2, device=DEVICE)
        calls.clear()
        output = model(x)
        assert len(calls) == fused_calls
        with dispatch.plain():
            torch.testing.assert_close(output, model(x), rtol=1e-4, atol=1e-5)


@quick
@given(
    grid=st.lists(st.integers(2, 9), min_size=1, max_size=3), C=st.integers(1, 20), O=st.integers(1, 20),
    modes=st.integers(1, 6), seed=st.integers(0, 99),
)  # fmt: skip
def test_axis_fourier_parity(grid, C, O, modes, seed):
    """Includes modes beyond those of the grid, whose weights have gradient zero."""
    torch.manual_seed(seed)
    inputs = [torch.randn(2, *grid, C), *(torch.randn(modes, C, O, 2) for _ in grid)]

    def plain(V, *weights):
        return plain_fourier(V, list(weights))

    assert_parity(lambda V, *weights: axis_fourier(V, list(weights)), plain, inputs)


def test_axis_fourier_parity_over_several_chunks(monkeypatch):
    monkeypatch.setattr(tuning, "MODE_CHUNK", 32)
    inputs = [torch.randn(2, 40, 70, 3), torch.randn(4, 3, 3, 2), torch.randn(3, 3, 3, 2)]
    assert_parity(lambda V, *w: axis_fourier(V, list(w)), lambda V, *w: plain_fourier(V, list(w)), inputs)


@quick
@given(N=st.integers(1, 200), half=st.integers(1, 20), inner=st.integers(1, 50), branches=st.integers(0, 2),
       one_kernel=st.booleans(), saved=st.booleans(), seed=st.integers(0, 99))  # fmt: skip
def test_mixing_parity(N, half, inner, branches, one_kernel, saved, seed):
    """Both forms of the forward pass: in one kernel, and with cuBLAS products; y saved and recomputed."""
    torch.manual_seed(seed)
    saved_bytes = tuning.MAX_SAVED_BYTES
    tuning.MAX_FUSED_MATMUL_CHANNELS, tuning.MAX_SAVED_BYTES = 128 if one_kernel else 0, saved_bytes if saved else 0
    forward, calls = fused_mixing._Launcher.forward, []
    fused_mixing._Launcher.forward = lambda *args: calls.append(args) or forward(*args)
    C = 2 * half
    shapes = [(N, C), (C,), (C,), (2 * inner, C), (2 * inner,), (C, inner), (C,)]
    inputs = [torch.randn(shape) for shape in (*shapes, *((N, C // max(1, branches)),) * branches)]

    def fused(H, w, b, win, b_in, wout, bout, *parts):
        return add_mixing(H, parts, (w, b), (win, b_in), (wout, bout), 1e-5)

    def plain(H, w, b, win, b_in, wout, bout, *parts):
        x = H + torch.cat(parts, -1) if parts else H
        gate, up = F.linear(F.layer_norm(x, (C,), w, b), win, b_in).chunk(2, -1)
        return x + F.linear(F.silu(gate) * up, wout, bout)

    try:
        decisions = dispatch.explain(lambda: assert_parity(fused, plain, inputs, tolerance=1e-4))
    finally:
        tuning.MAX_FUSED_MATMUL_CHANNELS, tuning.MAX_SAVED_BYTES = 128, saved_bytes
        fused_mixing._Launcher.forward = forward
    assert bool(calls) == one_kernel, "the intended form ran"
    decision = "inside the kernel" if one_kernel else f"cuBLAS: width {C} is above 0"
    assert decisions == [("mixing products", decision), ("mixing products, backward", decision)]


@pytest.mark.parametrize(
    ("grid", "C", "padding", "groups"),
    [
        ((7, 6), 10, ("zeros", "circular"), 2),
        ((9,), 6, ("circular",), 1),
        ((3, 4, 5), 4, ("zeros", "circular", "zeros"), 2),
        ((2, 13), 192, ("zeros", "circular"), 1),
    ],
)
def test_context_parity(grid, C, padding, groups):
    norm = (C // groups,)
    inputs = [torch.randn(s) for s in ((2, *grid, C), (C, 1, *(3,) * len(grid)), (C,), *(norm,) * (2 * groups))]

    def fused(H, w, b, *norms):
        pairs = list(zip(norms[::2], norms[1::2], strict=True))
        out, normed = add_context(H, (w, b), padding, pairs, 1e-5)
        return out, *normed

    def plain(H, w, b, *norms):
        out = H + plain_convolution(H, w, b, padding)
        pairs = zip(out.chunk(groups, -1), norms[::2], norms[1::2], strict=True)
        return out, *(F.layer_norm(group, norm, weight, bias) for group, weight, bias in pairs)

    assert_parity(fused, plain, inputs)


@pytest.mark.parametrize(
    ("batch", "grid", "C", "kernel", "padding"),
    [
        (2, (13,), 3, 5, ("circular",)),
        (2, (7, 6), 5, 5, ("zeros", "zeros")),
        (2, (5, 6), 9, 3, ("circular", "zeros")),
        (2, (6, 5), 2, 1, ("zeros", "circular")),
        (2, (3, 4, 3), 3, 3, ("zeros", "circular", "zeros")),
        (1, (2, 3, 5), 1, 5, ("zeros", "zeros", "circular")),
    ],
)
def test_depthwise_parity(batch, grid, C, kernel, padding, request):
    if len(grid) == 3:
        request.getfixturevalue("short_loops")  # same loop as on two axes, but for 25 rows of taps
    weight = (C, 1, *(kernel,) * len(grid))
    inputs = [torch.randn(shape) for shape in ((batch, *grid, C), weight, (C,), weight, (C,))]

    def fused(x, w, b, w2, b2):
        return *depthwise_pair(x, (w, b), (w2, b2), padding), depthwise(x, w, b, padding, residual=True)

    def plain(x, w, b, w2, b2):
        first = plain_convolution(x, w, b, padding)
        return first, plain_convolution(x, w2, b2, padding), x + first

    assert_parity(fused, plain, inputs)


def test_depthwise_parity_over_several_chunks():
    inputs = [torch.randn(shape) for shape in ((1, 40, 30, 3), (3, 1, 3, 3), (3,))]
    assert_parity(
        lambda x, w, b: depthwise(x, w, b, ("zeros", "circular")),
        lambda x, w, b: plain_convolution(x, w, b, ("zeros", "circular")),
        inputs,
    )


@quick
@given(N=st.integers(1, 80), C=st.integers(6, 40), seed=st.integers(0, 99), half=st.booleans())
def test_layer_norm_linear_and_silu_product_parity(N, C, seed, half):
    torch.manual_seed(seed)
    first = C // 2 if half else 0
    x, w, b, m = torch.randn(N, C), torch.randn(C - first), torch.randn(C - first), torch.randn(7, C - first)

    def fused(x, w, b, m, c):
        y = layer_norm(x[None, :, first:], w, b, 1e-5)
        return y, linear(y, m, c), silu_product(torch.cat((y, 2 * y), -1))

    def plain(x, w, b, m, c):
        y = F.layer_norm(x[None, :, first:], (C - first,), w, b, 1e-5)
        return y, F.linear(y, m, c), F.silu(y) * 2 * y

    assert_parity(fused, plain, [x, w, b, m, torch.randn(7)], tolerance=1e-4)


@pytest.mark.parametrize(("N", "O", "C"), [(1, 1, 1), (70, 20, 33), (200, 64, 5), (130, 9, 130)])
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=gpu)])
def test_map_gradients_parity(N, O, C, dtype, monkeypatch):
    """One pass over several chunks with strided rows, and the fallback for too many channels."""
    torch.backends.cuda.matmul.allow_tf32 = False
    monkeypatch.setattr(tuning, "MAX_LINEAR_BYTES", 4)
    monkeypatch.setattr(fused_linear, "multiprocessors", lambda x: 1)
    dy, x = torch.randn(N, O + 3, device=DEVICE).to(dtype)[:, 3:], torch.randn(N, C, device=DEVICE).to(dtype)
    expected = dy.cpu().double().T @ x.cpu().double(), dy.cpu().double().sum(0)
    gradients: list[torch.Tensor] = []
    decision = f"cuBLAS: width {C} is above 128" if C > 128 else "one kernel"
    assert dispatch.explain(lambda: gradients.extend(map_gradients(dy, x))) == [("linear backward", decision)]
    for gradient, reference in zip(gradients, expected, strict=True):
        assert gradient.dtype == torch.float32
        torch.testing.assert_close(gradient.cpu().double(), reference, rtol=1e-4, atol=1e-4)


@quick
@given(N=st.integers(1, 600), C=st.integers(1, 150))
def test_column_sums_parity(N, C):
    x = torch.randn(N, C)
    torch.testing.assert_close(column_sums(x.to(DEVICE)).cpu().double(), x.double().sum(0), rtol=1e-5, atol=1e-4)


@pytest.mark.usefixtures("fused_everywhere", "short_loops")
@pytest.mark.parametrize(("name", "batch", "depth", "grid"), [
    ("transolver-sigma", 2, 2, (7, 6)), ("transolver-sigma", 1, 1, (3, 4, 3)), ("physolver", 2, 2, (11,)),
    ("transolver", 2, 1, (6, 7)),
])  # fmt: skip
def test_model_parity(name, batch, depth, grid):
    options = Options(padding=("circular", *("zeros",) * (len(grid) - 1)))
    model = build_model(
        name, grid=grid, in_channels=2, out_channels=1, width=24, depth=depth, heads=2, slices=5, modes=2,
        options=options,
    ).to(DEVICE)  # fmt: skip
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    exact = copy.deepcopy(model).double()
    x, v = torch.randn(batch, *grid, 2, device=DEVICE), torch.randn(batch, *grid, 1, device=DEVICE)
    y, gradients = model(x), None
    gradients = torch.cat([g.flatten() for g in torch.autograd.grad((y * v).sum(), model.parameters())])
    with dispatch.plain():
        expected = exact(x.double())
        reference = torch.cat([g.flatten() for g in torch.autograd.grad((expected * v).sum(), exact.parameters())])
    assert (y - expected).norm() < 1e-5 * expected.norm()
    assert (gradients - reference).norm() < 1e-5 * reference.norm()


@pytest.mark.usefixtures("fused_everywhere")
@pytest.mark.parametrize("name", ["transolver-sigma", "transolver"])
def test_compile_traces_plain_operations_without_graph_breaks(name):
    """Also where fused kernels are available: the check for them must not break the graph."""
    torch.compiler.reset()
    model = build_model(
        name, grid=(9, 8), in_channels=2, out_channels=1, width=24, depth=1, heads=2, slices=5, modes=2
    ).to(DEVICE)
    x = torch.randn(2, 9, 8, 2, device=DEVICE)
    assert dispatch.why_plain(x) is None
    with dispatch.plain():
        expected = model(x)
    traced = torch.compile(model, fullgraph=True, backend="eager")(x)
    torch.testing.assert_close(traced, expected, rtol=0, atol=0)


@pytest.mark.usefixtures("fused_everywhere")
def test_plain_disables_fused_kernels_and_a_hook_sees_the_routing(monkeypatch):
    model = build_model("physolver", grid=(7,), in_channels=1, out_channels=1, width=8, depth=1, heads=1, slices=3)
    model = model.to(DEVICE)
    x = torch.randn(1, 7, 1, device=DEVICE)
    assert dispatch.why_plain(x) is None
    with dispatch.plain():
        assert dispatch.why_plain(x) == "fused kernels are disabled"
        plain = model(x)
    torch.testing.assert_close(model(x), plain, rtol=1e-4, atol=1e-5)
    seen = []
    hook = model.blocks[0].stages[0].branches[0].operator.routing.register_forward_hook(lambda m, i, o: seen.append(o))
    watched = model(x)
    hook.remove()
    torch.testing.assert_close(seen[0].sum(-1), torch.ones_like(seen[0].sum(-1)))
    torch.testing.assert_close(watched, plain, rtol=1e-4, atol=1e-5)


def test_why_plain_under_function_transforms_and_forward_mode(fused_everywhere):
    with torch.autograd.forward_ad.dual_level():
        assert "forward-mode" in dispatch.why_plain(torch.zeros(1, device=DEVICE))
    torch.func.vmap(lambda x: x if dispatch.why_plain(x) else pytest.fail("fused"))(torch.zeros(2, device=DEVICE))
    assert dispatch.why_plain(torch.zeros(1, dtype=torch.float64, device=DEVICE)) == "the tensor is torch.float64"


@gpu
@pytest.mark.parametrize("shape", [(2, 300, 3, 8, 20), (1, 5000, 8, 16, 32), (1, 77, 1, 24, 40)])
def test_slice_attention_in_bf16_is_as_accurate_as_plain(shape):
    inputs = slice_inputs(*shape)
    fused_errors, os_errors_as_value_errors = (
        errors_of(partial(form, "residual"), inputs) for form in (fused_slice_attention, plain_slice_attention)
    )
    assert sum(fused_errors) <= 1.5 * sum(os_errors_as_value_errors) + 0.02, (fused_errors, os_errors_as_value_errors)


def errors_of(form, inputs):
    """Errors of outputs and gradients in bf16 against float64, in the norm."""
    torch.manual_seed(1)
    results = []
    for dtype in (torch.bfloat16, torch.float64):
        leaves = [x.to(torch.bfloat16).to(DEVICE, dtype).requires_grad_() for x in inputs]
        o = form(*leaves) if dtype is torch.bfloat16 else plain_slice_attention("residual", *leaves)
        results.append([o, *torch.autograd.grad(o.float().square().sum(), leaves)])
    return [float((x.double() - exact).norm() / exact.norm().clamp(min=1)) for x, exact in zip(*results, strict=True)]


@gpu
def test_slice_attention_is_bitwise_reproducible():
    x = [tensor.to(DEVICE).requires_grad_() for tensor in slice_inputs(2, 9000, 4, 8, 20)]
    first, second = (torch.autograd.grad(fused_slice_attention("residual", *x).square().sum(), x) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
