"""A stream in two parts: as exact as one in float32 forward, with gradients in the type of its first part.

On a GPU the kernels run for real; elsewhere through Triton's interpreter, which cuts bf16 off instead of rounding it.
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
"""In the norm: sixteen bits of the fraction, and eight, several times."""


@pytest.fixture(autouse=True)
def fused_everywhere(monkeypatch):
    monkeypatch.setattr(dispatch, "interpreted", DEVICE == "cpu")


def halves(x):
    """A stream in two parts that bf16 alone cannot hold."""
    main = x.to(LOW_PRECISION)
    return Stream(main, (x - main.float()).to(LOW_PRECISION))


def error(found, expected):
    return float((found.detach().cpu().double() - expected.detach()).norm() / expected.detach().norm().clamp(min=1e-3))


def agree(twin, plain, x, weights):
    """`twin(Stream, *weights)` against `plain(H, *weights)` in float64, H moving with the main part."""
    main, low = (one.to(DEVICE) for one in halves(x))
    main.requires_grad_()
    given = [one.to(DEVICE).requires_grad_() for one in weights]
    exact = merged(Stream(main, low)).detach().cpu().double().requires_grad_()
    wide = [one.detach().cpu().double().requires_grad_() for one in given]
    stream, others = twin(Stream(main, low), *given)
    wanted, *beside = plain(exact, *wide)
    assert isinstance(stream, Stream) and not stream.low.requires_grad
    assert stream.main.dtype == stream.low.dtype == LOW_PRECISION
    assert error(stream.main, wanted) > 10 * EXACT > 10 * error(merged(stream), wanted)
    for one, two in zip(others, beside, strict=True):
        assert error(one, two) < EXACT
    shares = [torch.randn(one.shape, dtype=torch.float64) for one in (wanted, *beside)]
    ours = sum(
        (one * share.to(DEVICE).to(one)).sum() for one, share in zip((stream.main, *others), shares, strict=True)
    )
    theirs = sum((one * share).sum() for one, share in zip((wanted, *beside), shares, strict=True))
    pairs = zip(torch.autograd.grad(ours, (main, *given)), torch.autograd.grad(theirs, (exact, *wide)), strict=True)
    for place, (one, two) in enumerate(pairs):
        assert error(one, two) < NEAR, place


@pytest.mark.parametrize(
    ("grid", "C", "padding", "groups"),
    [((7, 6), 10, ("zeros", "circular"), 2), ((9,), 6, ("circular",), 1), ((3, 4, 5), 16, ("zeros",) * 3, 2)],
)
def test_context(grid, C, padding, groups):
    """The convolution sees the first part alone, so its kernel is small here; the residual is whole."""
    torch.manual_seed(0)
    norm = (C // groups,)
    weights = [torch.randn(C, 1, *(3,) * len(grid)) * 2**-9, *(torch.randn(s) for s in ((C,), *(norm,) * 2 * groups))]

    def twin(H, w, b, *norms):
        pairs = list(zip(norms[::2], norms[1::2], strict=True))
        return add_context(H, (w, b), padding, pairs, EPS)

    def plain(H, w, b, *norms):
        out = H + plain_convolution(H, w, b, padding)
        pairs = zip(out.chunk(groups, -1), norms[::2], norms[1::2], strict=True)
        return out, *(F.layer_norm(share, norm, *pair, EPS) for share, *pair in pairs)

    agree(twin, plain, torch.randn(2, *grid, C), weights)


@pytest.mark.parametrize("branches", [0, 1, 2])
@pytest.mark.parametrize("held", [True, False], ids=["in one kernel", "by the library"])
@pytest.mark.parametrize("kept", [True, False])
def test_mixing(branches, held, kept, monkeypatch):
    torch.manual_seed(1)
    monkeypatch.setattr(tuning, "MAX_FUSED_MATMUL_CHANNELS", 128 if held else 0)
    monkeypatch.setattr(tuning, "MAX_SAVED_BYTES", 10**8 if kept else 0)
    N, C, inner = 70, 12, 9
    shapes = [(C,), (C,), (2 * inner, C), (2 * inner,), (C, inner), (C,), *((N, C // max(1, branches)),) * branches]

    def twin(H, w, b, win, b_in, wout, bout, *parts):
        return add_mixing(H, parts, (w, b), (win, b_in), (wout, bout), EPS), ()

    def plain(H, w, b, win, b_in, wout, bout, *parts):
        x = H + torch.cat(parts, -1) if parts else H
        gate, up = F.linear(F.layer_norm(x, (C,), w, b, EPS), win, b_in).chunk(2, -1)
        return (x + F.linear(F.silu(gate) * up, wout, bout),)

    agree(twin, plain, torch.randn(N, C), [torch.randn(shape) for shape in shapes])


@triton.jit
def _split(x, main, low, N: tl.constexpr):
    place = tl.arange(0, N)
    store_stream(main, low, place, tl.load(x + place), place < N, TWO_PARTS=True)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy's, where the interpreter runs
def test_what_no_stream_can_hold_is_never_a_number():
    """Both parts together: infinities, what rounds to one, and NaNs, also with all bits set, as a GPU makes them."""
    bad = [0x7F800000, 0x7F7FFFFF, 0x7FC00000, 0x7FFFFFFF, 0x7F800001]
    x = torch.tensor([*bad, *(bits - 2**31 for bits in bad), 0, 0x3F800000, 0x3F808000, 0x3F80FFFF, 1, 0x7F000000])
    x = x.to(torch.int32).view(torch.float32).to(DEVICE)
    stream = Stream(*torch.zeros(2, len(x), dtype=LOW_PRECISION, device=DEVICE))
    _split[(1,)](x, *stream, N=len(x))
    found = merged(stream)
    assert not found[: 2 * len(bad)].isfinite().any()
    torch.testing.assert_close(found[2 * len(bad) :], x[2 * len(bad) :], rtol=2**-16, atol=1e-40)


@pytest.mark.parametrize("fields", [2, 9], ids=["fused", "plain"])
def test_readout(fields):
    torch.manual_seed(2)
    C, x = 20, torch.randn(3, 11, 20)
    weights = [torch.randn(C), torch.randn(C), torch.randn(fields, C), torch.randn(fields)]
    main, low = (one.to(DEVICE) for one in halves(x))
    given = [one.to(DEVICE).requires_grad_() for one in (main, *weights)]
    wide = [one.double().requires_grad_() for one in (merged(Stream(main, low)).cpu(), *weights)]
    found = readout(Stream(given[0], low), norm(given[1], given[2], EPS), linear(given[3], given[4]))
    wanted = F.layer_norm(wide[0], (C,), wide[1], wide[2], EPS) @ wide[3].T + wide[4]
    assert found.dtype == torch.float32 and error(found, wanted) < EXACT
    share = torch.randn(wanted.shape, dtype=torch.float64)
    ours = torch.autograd.grad((found * share.to(found)).sum(), given)
    theirs = torch.autograd.grad((wanted * share).sum(), wide)
    assert ours[0].dtype == LOW_PRECISION
    assert max(error(one, two) for one, two in zip(ours, theirs, strict=True)) < NEAR


def test_lift():
    torch.manual_seed(3)
    x, points = torch.randn(2, 7, 5, 3), torch.rand(7, 5, 4)
    weights = [torch.randn(16, 7), torch.randn(16), torch.randn(8, 16), torch.randn(8), torch.rand(8)]

    given = [one.to(DEVICE).requires_grad_() for one in weights]
    wide = [one.double().requires_grad_() for one in weights]
    w1, b1, w2, b2, offset = given
    stream = lift(x.to(DEVICE), points.to(DEVICE), (w1, b1), (w2, b2), offset, two_parts=True)
    w1, b1, w2, b2, offset = wide
    both = torch.cat((points.expand(2, 7, 5, 4), x), -1).double()
    wanted = F.linear(F.gelu(F.linear(both, w1, b1)), w2, b2) + offset
    main, low = stream
    assert low.dtype == main.dtype == LOW_PRECISION and not low.requires_grad
    assert error(main, wanted) > 10 * EXACT > 10 * error(merged(stream), wanted)
    share = torch.randn(wanted.shape, dtype=torch.float64)
    ours = torch.autograd.grad((main * share.to(main)).sum(), given)
    theirs = torch.autograd.grad((wanted * share).sum(), wide)
    assert max(error(one, two) for one, two in zip(ours, theirs, strict=True)) < NEAR


def blocks_of(name="transolver-sigma", grid=(5, 6), depth=2, **options):
    torch.manual_seed(4)
    return solver(grid, name, depth=depth, **options)


def answer(model, x):
    """Of a model, and the gradients of its weights."""
    y = model(x)
    return y, *torch.autograd.grad((y * torch.linspace(-1, 1, y.numel()).view(y.shape).to(y)).sum(), model.parameters())


@pytest.fixture
def forced(monkeypatch):
    """Splits without autocast, as the interpreter multiplies bf16 wrongly; fused in float32 too."""
    monkeypatch.setattr(dispatch, "interpreted", True)
    monkeypatch.setattr(dispatch, "_why_one_tensor", lambda x, blocks: None)


@pytest.mark.usefixtures("forced", "short_loops")
@pytest.mark.parametrize("name", VARIANTS)
def test_every_form_of_the_block_takes_it(name):
    """Also those that merge it on the way. One block takes it from the lift and gives it to the readout; that it passes
    between blocks, and with several samples, shows in the paper's own form."""
    several = 2 if name == "transolver-sigma" else 1  # each costs the interpreter as much again
    model, x = blocks_of(name, depth=several), torch.randn(several, 5, 6, 3, device=DEVICE)
    exact = copy.deepcopy(model).double()
    found, expected = answer(model, x), answer(exact, x.double())
    assert ("stream", "two parts") in dispatch.explain(lambda: model(x))
    together = (torch.cat([one.flatten().cpu() for one in each[1:]]) for each in (found, expected))
    assert error(found[0], expected[0].cpu()) < NEAR
    assert error(*together) < 2 * NEAR


@pytest.mark.usefixtures("forced", "short_loops")
def test_run_again_for_the_gradients_it_is_the_same():
    model, x = blocks_of(), torch.randn(1, 5, 6, 3, device=DEVICE)
    kept = answer(model, x)
    recompute(model, draws=False)
    for one, two in zip(kept, answer(model, x), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=0)


def test_the_stream_is_split_under_autocast_alone_and_merged_for_a_hook():
    model, x, seen = blocks_of(), torch.randn(1, 5, 6, 3, device=DEVICE), []

    def why(model):
        return dispatch._why_one_tensor(x, model.blocks)

    assert why(model) == "autocast to bf16 is off"
    with torch.autocast(DEVICE, torch.bfloat16):
        assert why(model) is None
        assert why(blocks_of("transolver")) == "Sequential takes one tensor"
        hook = model.blocks[1].register_forward_hook(lambda module, given, out: seen.append((*given, out)))
        assert why(model) == "a forward hook is registered on block 1"
        with dispatch.plain():
            model(x)
        hook.remove()
        assert why(model) is None
    assert [one.dtype for one in seen[0]] == [torch.float32] * 2


@gpu
def test_under_autocast_the_answer_is_as_near_as_that_of_a_stream_in_float32(monkeypatch):
    model, x = blocks_of(grid=(8, 9)), torch.randn(4, 8, 9, 3, device=DEVICE)
    exact = answer(copy.deepcopy(model).double(), x.double())
    with torch.autocast(DEVICE, torch.bfloat16):
        split = answer(model, x)
        monkeypatch.setattr(dispatch, "_why_one_tensor", lambda x, blocks: "the test wants one")
        single = answer(model, x)
    assert error(split[0], exact[0].cpu()) < 1.5 * error(single[0], exact[0].cpu())
    for one, two, three in zip(*(by_size(each[1:]) for each in (split, single, exact)), strict=True):
        assert error(one, three.cpu()) < NEAR + 1.5 * error(two, three.cpu())


def by_size(gradients):
    """Those of vectors and matrices, and all scalars as one vector: the error of one scalar alone is chance."""
    scalars = [one for one in gradients if one.numel() == 1]
    return [*(one for one in gradients if one.numel() > 1), torch.cat([one.flatten() for one in scalars])]
