"""A split stream: as accurate as float32 in the forward pass, with gradients in the dtype of its main part.

Without a GPU the kernels run in Triton's interpreter, which truncates to bf16 instead of rounding.
"""

import copy

import pytest
import torch
import torch.nn.functional as F

from sigmasolver.models.variants import VARIANTS
from sigmasolver.ops import dispatch
from sigmasolver.ops.convolution import _plain as plain_convolution
from sigmasolver.ops.readout import readout
from sigmasolver.ops.stream import LOW_PRECISION, Stream, merged
from sigmasolver.train.engine import recompute

pytest.importorskip("triton")
import triton
import triton.language as tl

from sigmasolver.ops.fused import tuning
from sigmasolver.ops.fused.context import add_context
from sigmasolver.ops.fused.lift import lift
from sigmasolver.ops.fused.mixing import add_mixing
from sigmasolver.ops.fused.stream import store_stream
from tests.ops.device import DEVICE, gpu
from tests.ops.small import linear, norm, solver

EPS = 1e-5
EXACT, NEAR = 1e-4, 2e-2
"""Tolerances in the norm: a few times the round-off of a 16-bit mantissa, and of an 8-bit one."""


@pytest.fixture(autouse=True)
def fused_everywhere(monkeypatch):
    monkeypatch.setattr(dispatch, "interpreted", DEVICE == "cpu")


def split_in_two(x):
    """Split x into main and low part."""
    main = x.to(LOW_PRECISION)
    return Stream(main, (x - main.float()).to(LOW_PRECISION))


def error(actual, expected, scale=1e-3):
    """The relative error in the norm; expected values smaller than `scale` are compared on that scale."""
    difference = actual.detach().cpu().double() - expected.detach()
    return float(difference.norm() / expected.detach().norm().clamp(min=scale))


def assert_parity(fused, plain, x, weights):
    """Compare `fused(Stream, *weights)` with `plain(H, *weights)` in float64; the gradient of H is that of `main`."""
    main, low = (part.to(DEVICE) for part in split_in_two(x))
    main.requires_grad_()
    narrow = [weight.to(DEVICE).requires_grad_() for weight in weights]
    exact = merged(Stream(main, low)).detach().cpu().double().requires_grad_()
    wide = [weight.detach().cpu().double().requires_grad_() for weight in narrow]
    stream, extras = fused(Stream(main, low), *narrow)
    expected, *expected_extras = plain(exact, *wide)
    assert isinstance(stream, Stream) and not stream.low.requires_grad
    assert stream.main.dtype == stream.low.dtype == LOW_PRECISION
    assert error(stream.main, expected) > 10 * EXACT > 10 * error(merged(stream), expected)
    for actual, reference in zip(extras, expected_extras, strict=True):
        assert error(actual, reference) < EXACT
    cotangents = [torch.randn(y.shape, dtype=torch.float64) for y in (expected, *expected_extras)]
    ours = sum((y * v.to(DEVICE).to(y)).sum() for y, v in zip((stream.main, *extras), cotangents, strict=True))
    theirs = sum((y * v).sum() for y, v in zip((expected, *expected_extras), cotangents, strict=True))
    pairs = zip(torch.autograd.grad(ours, (main, *narrow)), torch.autograd.grad(theirs, (exact, *wide)), strict=True)
    for index, (actual, reference) in enumerate(pairs):
        assert error(actual, reference) < NEAR, index


@pytest.mark.parametrize(
    ("grid", "C", "padding", "groups"),
    [((7, 6), 10, ("zeros", "circular"), 2), ((9,), 6, ("circular",), 1), ((3, 4, 5), 16, ("zeros",) * 3, 2)],
)
def test_context_with_a_split_stream(grid, C, padding, groups):
    """The convolution reads the main part only, so its kernel is small here; the residual reads both parts."""
    torch.manual_seed(0)
    norm = (C // groups,)
    weights = [torch.randn(C, 1, *(3,) * len(grid)) * 2**-9, *(torch.randn(s) for s in ((C,), *(norm,) * 2 * groups))]

    def fused(H, w, b, *norms):
        pairs = list(zip(norms[::2], norms[1::2], strict=True))
        return add_context(H, (w, b), padding, pairs, EPS)

    def plain(H, w, b, *norms):
        out = H + plain_convolution(H, w, b, padding)
        pairs = zip(out.chunk(groups, -1), norms[::2], norms[1::2], strict=True)
        return out, *(F.layer_norm(group, norm, *pair, EPS) for group, *pair in pairs)

    assert_parity(fused, plain, torch.randn(2, *grid, C), weights)


@pytest.mark.parametrize("branches", [0, 1, 2])
@pytest.mark.parametrize("one_kernel", [True, False], ids=["one kernel", "cuBLAS"])
@pytest.mark.parametrize("saved", [True, False])
def test_mixing_with_a_split_stream(branches, one_kernel, saved, monkeypatch):
    torch.manual_seed(1)
    monkeypatch.setattr(tuning, "MAX_FUSED_MATMUL_CHANNELS", 128 if one_kernel else 0)
    monkeypatch.setattr(tuning, "MAX_SAVED_BYTES", 10**8 if saved else 0)
    N, C, inner = 70, 12, 9
    shapes = [(C,), (C,), (2 * inner, C), (2 * inner,), (C, inner), (C,), *((N, C // max(1, branches)),) * branches]

    def fused(H, w, b, win, b_in, wout, bout, *parts):
        return add_mixing(H, parts, (w, b), (win, b_in), (wout, bout), EPS), ()

    def plain(H, w, b, win, b_in, wout, bout, *parts):
        x = H + torch.cat(parts, -1) if parts else H
        gate, up = F.linear(F.layer_norm(x, (C,), w, b, EPS), win, b_in).chunk(2, -1)
        return (x + F.linear(F.silu(gate) * up, wout, bout),)

    assert_parity(fused, plain, torch.randn(N, C), [torch.randn(shape) for shape in shapes])


@triton.jit
def _split(x, main, low, N: tl.constexpr):
    offsets = tl.arange(0, N)
    store_stream(main, low, offsets, tl.load(x + offsets), offsets < N, TWO_PARTS=True)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NumPy's, in the interpreter
def test_store_stream_keeps_non_finite_values_non_finite():
    """Sum of both parts, for infinities, values that round to them, and NaNs, even with all bits set as on a GPU."""
    bad = [0x7F800000, 0x7F7FFFFF, 0x7FC00000, 0x7FFFFFFF, 0x7F800001]
    x = torch.tensor([*bad, *(bits - 2**31 for bits in bad), 0, 0x3F800000, 0x3F808000, 0x3F80FFFF, 1, 0x7F000000])
    x = x.to(torch.int32).view(torch.float32).to(DEVICE)
    stream = Stream(*torch.zeros(2, len(x), dtype=LOW_PRECISION, device=DEVICE))
    _split[(1,)](x, *stream, N=len(x))
    result = merged(stream)
    assert not result[: 2 * len(bad)].isfinite().any()
    torch.testing.assert_close(result[2 * len(bad) :], x[2 * len(bad) :], rtol=2**-16, atol=1e-40)


@pytest.mark.parametrize("fields", [2, 9], ids=["fused", "plain"])
def test_readout_of_a_split_stream(fields):
    torch.manual_seed(2)
    C, x = 20, torch.randn(3, 11, 20)
    weights = [torch.randn(C), torch.randn(C), torch.randn(fields, C), torch.randn(fields)]
    main, low = (part.to(DEVICE) for part in split_in_two(x))
    narrow = [tensor.to(DEVICE).requires_grad_() for tensor in (main, *weights)]
    wide = [tensor.double().requires_grad_() for tensor in (merged(Stream(main, low)).cpu(), *weights)]
    output = readout(Stream(narrow[0], low), norm(narrow[1], narrow[2], EPS), linear(narrow[3], narrow[4]))
    expected = F.layer_norm(wide[0], (C,), wide[1], wide[2], EPS) @ wide[3].T + wide[4]
    assert output.dtype == torch.float32 and error(output, expected) < EXACT
    v = torch.randn(expected.shape, dtype=torch.float64)
    ours = torch.autograd.grad((output * v.to(output)).sum(), narrow)
    theirs = torch.autograd.grad((expected * v).sum(), wide)
    assert ours[0].dtype == LOW_PRECISION
    assert max(error(a, b) for a, b in zip(ours, theirs, strict=True)) < NEAR


def test_lift_to_a_split_stream():
    torch.manual_seed(3)
    x, points = torch.randn(2, 7, 5, 3), torch.rand(7, 5, 4)
    weights = [torch.randn(16, 7), torch.randn(16), torch.randn(8, 16), torch.randn(8), torch.rand(8)]

    narrow = [weight.to(DEVICE).requires_grad_() for weight in weights]
    wide = [weight.double().requires_grad_() for weight in weights]
    w1, b1, w2, b2, offset = narrow
    stream = lift(x.to(DEVICE), points.to(DEVICE), (w1, b1), (w2, b2), offset, two_parts=True)
    w1, b1, w2, b2, offset = wide
    inputs = torch.cat((points.expand(2, 7, 5, 4), x), -1).double()
    expected = F.linear(F.gelu(F.linear(inputs, w1, b1)), w2, b2) + offset
    main, low = stream
    assert low.dtype == main.dtype == LOW_PRECISION and not low.requires_grad
    assert error(main, expected) > 10 * EXACT > 10 * error(merged(stream), expected)
    v = torch.randn(expected.shape, dtype=torch.float64)
    ours = torch.autograd.grad((main * v.to(main)).sum(), narrow)
    theirs = torch.autograd.grad((expected * v).sum(), wide)
    assert max(error(a, b) for a, b in zip(ours, theirs, strict=True)) < NEAR


def seeded_solver(name="transolver-sigma", grid=(5, 6), depth=2, **options):
    torch.manual_seed(4)
    return solver(grid, name, depth=depth, **options)


def output_and_gradients(model, x):
    """The output of a model, and the gradients of its weights."""
    y = model(x)
    return y, *torch.autograd.grad((y * torch.linspace(-1, 1, y.numel()).view(y.shape).to(y)).sum(), model.parameters())


@pytest.fixture
def always_split(monkeypatch):
    """Split the stream without autocast, as the interpreter multiplies bf16 wrongly; allow fused kernels in float32."""
    monkeypatch.setattr(dispatch, "interpreted", True)
    monkeypatch.setattr(dispatch, "_why_one_tensor", lambda x, blocks: None)


@pytest.mark.usefixtures("always_split", "short_loops")
@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_accepts_a_split_stream(name):
    """Includes variants that merge it on the way. One block takes it from the lift and passes it to the readout;
    several blocks and samples are tested for the model of the paper."""
    count = 2 if name == "transolver-sigma" else 1  # the cost in the interpreter is proportional to it
    model, x = seeded_solver(name, depth=count), torch.randn(count, 5, 6, 3, device=DEVICE)
    exact = copy.deepcopy(model).double()
    results, expected = output_and_gradients(model, x), output_and_gradients(exact, x.double())
    assert ("stream", "two parts") in dispatch.explain(lambda: model(x))
    gradients = (torch.cat([tensor.flatten().cpu() for tensor in tensors[1:]]) for tensors in (results, expected))
    assert error(results[0], expected[0].cpu()) < NEAR
    assert error(*gradients) < 2 * NEAR


@pytest.mark.usefixtures("always_split", "short_loops")
def test_recompute_with_a_split_stream_is_bitwise_equal():
    model, x = seeded_solver(), torch.randn(1, 5, 6, 3, device=DEVICE)
    stored = output_and_gradients(model, x)
    recompute(model, draws=False)
    for a, b in zip(stored, output_and_gradients(model, x), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_stream_is_split_only_under_autocast_and_merged_for_a_hook():
    model, x, seen = seeded_solver(), torch.randn(1, 5, 6, 3, device=DEVICE), []

    def why(model):
        return dispatch._why_one_tensor(x, model.blocks)

    assert why(model) == "autocast to bf16 is off"
    with torch.autocast(DEVICE, torch.bfloat16):
        assert why(model) is None
        assert why(seeded_solver("transolver")) == "Sequential takes one tensor"
        hook = model.blocks[1].register_forward_hook(lambda module, args, out: seen.append((*args, out)))
        assert why(model) == "a forward hook is registered on block 1"
        with dispatch.plain():
            model(x)
        hook.remove()
        assert why(model) is None
    assert [tensor.dtype for tensor in seen[0]] == [torch.float32] * 2


@gpu
def test_split_stream_is_as_accurate_as_float32_under_autocast(monkeypatch):
    model, x = seeded_solver(grid=(8, 9)), torch.randn(4, 8, 9, 3, device=DEVICE)
    exact = output_and_gradients(copy.deepcopy(model).double(), x.double())
    with torch.autocast(DEVICE, torch.bfloat16):
        split = output_and_gradients(model, x)
        monkeypatch.setattr(dispatch, "_why_one_tensor", lambda x, blocks: "the test wants one")
        single = output_and_gradients(model, x)
    assert error(split[0], exact[0].cpu()) < 1.5 * error(single[0], exact[0].cpu())
    # The bias before the routing nearly cancels in the softmax: below this scale its gradient is round-off in both.
    scale = 1e-4 * float(torch.cat([gradient.flatten() for gradient in exact[1:]]).norm())
    for a, b, reference in zip(*(join_scalars(tensors[1:]) for tensors in (split, single, exact)), strict=True):
        assert error(a, reference.cpu(), scale) < NEAR + 1.5 * error(b, reference.cpu(), scale)


def join_scalars(gradients):
    """Gradients of vectors and matrices, then all scalars as one vector: the error of a single scalar is random."""
    scalars = [gradient for gradient in gradients if gradient.numel() == 1]
    return [*(gradient for gradient in gradients if gradient.numel() > 1), torch.cat([s.flatten() for s in scalars])]
