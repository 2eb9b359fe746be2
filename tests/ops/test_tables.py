"""One kernel for all parameters: their forms, and AdamW. On a GPU for real, elsewhere through Triton's interpreter."""

from contextlib import nullcontext

import pytest
import torch

from sigmasolver.ops import fused

pytest.importorskip("triton")
from sigmasolver.ops.fused import tables
from sigmasolver.ops.fused.tables import Form, Moments, Prepared, form_of, narrowed
from tests.ops.device import DEVICE, GPU

SHAPES = ((3, 5), (2500,), (1,), (40, 70), (7, 1, 3, 3))


@pytest.fixture(autouse=True)
def fused_everywhere(monkeypatch):
    monkeypatch.setattr(fused, "interpreted", DEVICE == "cpu")


def parameters(dtype=torch.float32):
    torch.manual_seed(1)
    return [torch.nn.Parameter(torch.randn(shape).to(DEVICE, dtype)) for shape in SHAPES]


def give_gradients(given, step):
    """Of very different size, so that eps counts for some and not for others."""
    torch.manual_seed(step)
    for one in given:
        one.grad = (torch.randn(one.shape) * 10.0 ** -torch.randint(0, 9, (1,))).to(one)


def adamw(given):
    return torch.optim.AdamW(given, lr=torch.tensor(2**-7, device=DEVICE), weight_decay=0.1, fused=True)


def test_moments_step_as_adamw_does_in_float64(monkeypatch):
    """The states begin with a step of torch's own without gradients: on a GPU it rounds its factors to float32, which
    puts 1e-5 of a gradient's square into the second moment."""
    monkeypatch.setattr(tables, "PIECE", 256)  # several programs for a tensor, and a last one that is not full
    narrow, wide = parameters(), parameters(torch.float64)
    ours, exact = adamw(narrow), adamw(wide)
    for step in range(12):
        give_gradients(narrow, step)
        if step == 0:
            for one in narrow:
                one.grad.zero_()
        for one, other in zip(narrow, wide, strict=True):
            other.grad = one.grad.double()
        exact.step()
        if step == 0:
            ours.step()
            continue
        assert Moments.serves(ours)
        moments = Moments(ours)
        moments._given = [one.grad for one in narrow]
        moments.fill()
        before = [one.detach().clone() for one in narrow]
        moments.step()
        assert all((one != old).any() for one, old in zip(narrow, before, strict=True))
    for one, other in zip(narrow, wide, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=2e-6, atol=2e-6)
        assert int(ours.state[one]["step"]) == 12
        for name in ("exp_avg", "exp_avg_sq"):
            expected = exact.state[other][name]
            error = (ours.state[one][name].double() - expected).abs().max() / expected.abs().max()
            assert error < 2e-6, (name, float(error))


def test_moments_serve_only_what_they_read():
    given = parameters()
    ours = adamw(given)
    assert not Moments.serves(ours)  # no step yet, so no moments
    give_gradients(given, 0)
    ours.step()
    assert Moments.serves(ours)
    with fused.plain():
        assert not Moments.serves(ours)
    wide = parameters(torch.float64)
    other = adamw(wide)
    give_gradients(wide, 0)
    other.step()
    assert not Moments.serves(other)
    given[0].grad = None
    assert not Moments.serves(ours)


FORMS = [
    Form((3, 5), (3, 5), (5, 1), torch.bfloat16),
    Form((2500,), (1, 2500), (2500, 1), torch.bfloat16),
    Form((2, 1300), (2, 1250), (1300, 1), torch.float32),
    Form((80, 40), (40, 70), (1, 40), torch.bfloat16),
    Form((9, 7), (7, 9), (1, 7), torch.float32),
]


def asked(given):
    first, second, _, third, fourth = given
    return [form_of(one, form) for one, form in zip((first, second, second, third, fourth), FORMS, strict=True)]


def test_forms_made_at_once_are_those_made_one_by_one():
    given = parameters()
    ready = Prepared(given)
    with ready.learn():
        alone = asked(given)
    assert torch.equal(alone[3][:70], given[3].detach().T.bfloat16()) and not alone[3][70:].any()
    assert torch.equal(alone[2][:, :1250].flatten(), given[1]) and not alone[2][:, 1250:].any()
    ready.fill()
    with torch.no_grad():
        for one in given:
            one.mul_(1.7).add_(0.3)  # what counts are the values at the time of `use`
    expected = [form.clone() for form in asked(given)]
    graph = torch.cuda.CUDAGraph() if GPU else None
    # On a GPU forms are there for the step that is captured, and for nobody else.
    with torch.cuda.graph(graph, capture_error_mode="thread_local") if graph else nullcontext(), ready.use():
        found = asked(given)
        again = asked(given)
    if graph:
        graph.replay()
    for one, two, three in zip(found, expected, again, strict=True):
        rounded = one.dtype == torch.bfloat16 and DEVICE == "cpu"  # the interpreter cuts off instead
        torch.testing.assert_close(one, two, rtol=2**-7 if rounded else 0, atol=0)
        assert one.data_ptr() == three.data_ptr()  # nothing is made twice


def test_what_was_not_learned_or_is_no_parameter_is_made_on_the_spot():
    given = parameters()
    ready, stranger = Prepared(given), torch.randn(3, 5, device=DEVICE)
    with ready.learn():
        narrowed(stranger, torch.bfloat16)
    ready.fill()
    with ready.use():
        for one in (stranger, given[0]):
            assert torch.equal(narrowed(one, torch.bfloat16), one.detach().bfloat16())
            assert narrowed(one, torch.float32) is one


def test_a_turned_view_of_a_parameter_is_not_taken_for_it():
    weight = torch.nn.Parameter(torch.randn(4, 4, device=DEVICE))
    ready = Prepared([weight])
    with ready.learn():
        narrowed(weight, torch.bfloat16)
    ready.fill()
    with ready.use():
        assert torch.equal(narrowed(weight.T, torch.bfloat16), weight.detach().T.bfloat16())


def test_forms_are_not_used_before_their_table_is_written():
    given = parameters()
    ready = Prepared(given)
    with ready.learn():
        narrowed(given[0], torch.bfloat16)
    with pytest.raises(ValueError, match="fill"), ready.use():
        pass
