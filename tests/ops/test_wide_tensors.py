"""Kernels of the baselines against plain definitions in float64: Gumbel softmax, gated basis, periodic padding,
spectral elements.

Without a GPU the kernels run in Triton's interpreter, which multiplies bf16 wrongly, so products in bf16 are tested on
a GPU only.
"""

import copy
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from sigmasolver.models import Options, build_model
from sigmasolver.ops import dispatch
from sigmasolver.ops.dispatch import explain
from sigmasolver.ops.elements import heads_of_elements, windows
from sigmasolver.ops.modules import SliceMap
from sigmasolver.ops.slices import routing, split_heads
from sigmasolver.ops.softmax import gumbel, gumbel_softmax, softmax
from sigmasolver.ops.wrap import wrap

pytest.importorskip("triton")
from sigmasolver.ops.fused import gated_basis, tuning
from tests.ops.device import DEVICE, gpu

LIMITS = 0.3, 1.1
"""Range of the temperatures, which are drawn between 0.2 and 1.2, so that some are clipped."""


@pytest.fixture(autouse=True)
def fused_everywhere(monkeypatch):
    monkeypatch.setattr(dispatch, "interpreted", DEVICE == "cpu")


def assert_parity(fused, plain, inputs, dtype=torch.float32, tolerance=1e-5, last=None):
    """Compare output and gradients of `fused` in `dtype` with those of `plain` in float64, in the norm; `last` is the
    tolerance of the last gradient."""
    narrow = [x.to(DEVICE, dtype).requires_grad_() for x in inputs]
    wide = [x.detach().cpu().double().requires_grad_() for x in narrow]
    output, expected = fused(*narrow), plain(*wide)
    weights = torch.randn(expected.shape, dtype=torch.float64)
    gradients = torch.autograd.grad((output.float() * weights.to(DEVICE).float()).sum(), narrow)
    exact = torch.autograd.grad((expected * weights).sum(), wide)
    for index, (actual, reference) in enumerate(zip((output, *gradients), (expected, *exact), strict=True)):
        error = (actual.cpu().double() - reference).norm() / reference.norm().clamp(min=1e-3)
        assert error < (last if last is not None and index == len(inputs) else tolerance), (index, float(error))


# --- softmax


def test_softmax_keeps_the_dtype_under_autocast():
    logits = torch.randn(3, 7, 20, device=DEVICE).bfloat16()
    with torch.autocast(DEVICE, torch.bfloat16):
        result = softmax(logits)
    assert result.dtype == torch.bfloat16
    exact = torch.softmax(logits.double(), -1)
    assert ((result.double() - exact).abs() / exact).max() < 2**-8, "one rounding, not one per term"


@pytest.mark.parametrize("slices", [1, 5, 32, 100, 128])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 5e-3)])
def test_gumbel_softmax_parity(slices, dtype, tolerance):
    torch.manual_seed(slices)
    u = torch.rand(2, 3, 41, slices, device=DEVICE)
    u[0, 0, 0, 0], u[1, 2, 3, -1] = 0, 1 - 2**-24  # the ends of the distribution
    noise = gumbel(u).double().cpu()  # computed in float32: near u = 1 it depends on the last bit

    def fused(s, t):
        assert explain(lambda: gumbel_softmax(s, u, t)) == [("gumbel", "fused")]
        return gumbel_softmax(s, u, t)

    def plain(s, t):
        return torch.softmax((s + noise) / t, dim=-1)

    assert_parity(fused, plain, [torch.randn(2, 3, 41, slices), torch.rand(2, 3, 41, 1) + 0.05], dtype, tolerance)


def test_gumbel_softmax_falls_back_to_plain_without_noise_and_for_many_slices():
    s, t = torch.randn(1, 1, 3, 129, device=DEVICE), torch.ones(1, 1, 3, 1, device=DEVICE)
    calls = (lambda: gumbel_softmax(s, None, t)), (lambda: gumbel_softmax(s, torch.rand_like(s), t))
    reasons = [explain(call)[0][1] for call in calls]
    assert reasons == ["plain: there is no noise", "plain: number of slices 129 is above 128"]


# --- gates on a basis


def gates(R, W, b, tau, Phi):
    return routing(split_heads(R, len(tau)), W.mT, b, tau.clamp(*LIMITS)) * Phi.double()


def joined(O_BHND):
    return O_BHND.transpose(1, 2).flatten(2)


def assert_gate_parity(B, N, H, D, K, dtype=torch.float32, tolerance=1e-4, temperature_tolerance=None):
    torch.manual_seed(N)
    Phi = torch.randn(N, K)
    maps = torch.randn(K, D), torch.randn(K), torch.rand(H) + 0.2
    R, Fe, Z = torch.randn(B, N, H * D), torch.randn(B, N, H * D), torch.randn(B, H, K, D)
    on_device = Phi.to(DEVICE, dtype)
    for form, operand in (("gather", Fe), ("spread", Z)):

        def fused(R, operand, W, b, tau, form=form):
            return getattr(gated_basis, form)(R, operand, on_device, SliceMap(W, b, tau, LIMITS))

        def plain(R, operand, W, b, tau, form=form):
            E = gates(R, W, b, tau, on_device.cpu())
            return E.mT @ split_heads(operand, H) if form == "gather" else joined(E @ operand)

        assert_parity(fused, plain, [R, operand, *maps], dtype, tolerance, temperature_tolerance)


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1, 1), (2, 37, 3, 5, 20), (1, 70, 2, 16, 128), (2, 65, 1, 33, 17)])
def test_gated_basis_parity(sizes):
    torch.backends.cuda.matmul.allow_tf32 = False
    assert_gate_parity(*sizes)


def test_gated_basis_parity_over_several_chunks(monkeypatch):
    torch.backends.cuda.matmul.allow_tf32 = False
    monkeypatch.setattr(tuning, "MAX_SLICE_CHUNK", 64)
    assert_gate_parity(2, 150, 2, 4, 9)


@gpu
@pytest.mark.parametrize("sizes", [(2, 1000, 4, 16, 128), (1, 333, 2, 32, 100)])
def test_gated_basis_bf16_parity(sizes):
    """In the gradient of a temperature terms cancel, by a factor of 10,000 in the first case: with bf16 logits at most
    one digit is left. `test_gated_basis_parity` requires 1e-4 in float32."""
    assert_gate_parity(*sizes, dtype=torch.bfloat16, tolerance=0.03, temperature_tolerance=0.25)


# --- periodic padding


@pytest.mark.parametrize(
    ("grid", "cells"),
    [((7,), (2,)), ((5, 4), (1, 1)), ((3, 9), (0, 2)), ((4, 6), (3, 0)), ((3, 4, 5), (1, 2, 1)), ((2, 3), (2, 3))],
)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 5e-3)])
def test_wrap_parity(grid, cells, dtype, tolerance):
    torch.manual_seed(0)
    padding = [width for width in reversed(cells) for _ in range(2)]

    def plain(x):
        return F.pad(x.movedim(-1, 1), padding, mode="circular").movedim(1, -1)

    x = torch.randn(2, *grid, 11, device=DEVICE, dtype=dtype)
    assert explain(lambda: wrap(x, cells)) == [("wrap", "fused")]
    assert torch.equal(wrap(x, cells), plain(x)) and wrap(x, cells).is_contiguous()
    assert_parity(partial(wrap, cells=cells), plain, [x], dtype, tolerance)


def test_wrap_rejects_a_grid_that_is_too_small():
    with pytest.raises(RuntimeError, match="wrapping around more than once"):
        wrap(torch.zeros(1, 2, 5, 3, device=DEVICE), (3, 1))


# --- spectral elements

MESHES = [((4,), 3), ((2, 3), 3), ((2, 3, 2), 2)]


@pytest.mark.parametrize(("mesh", "m"), MESHES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 5e-3)])
def test_windows_parity(mesh, m, dtype, tolerance):
    x = torch.randn(2, *(m * n for n in mesh), 5)
    for axis in range(len(mesh)):
        form = partial(windows, axis=axis, m=m)
        assert explain(lambda form=form: form(x.to(DEVICE))) == [("elements", "fused")]
        assert_parity(form, form, [x], dtype, tolerance)  # float64 takes the plain form


@pytest.mark.parametrize(("mesh", "m", "programs"), [((3,), 3, 4096), ((2, 3), 2, 5), ((2, 1, 2), 2, 1)])
def test_heads_of_elements_parity(mesh, m, programs, monkeypatch):
    monkeypatch.setattr(tuning, "HEADS_PROGRAMS", programs)
    torch.manual_seed(0)
    d, B, H, D = len(mesh), 2, 1, 6
    E, P = math.prod(mesh), m**d
    tables = torch.randn(d, 2, E, P, D // 2)
    fields = [torch.randn(B, *(m * n for n in mesh), 3 * H * D) for _ in mesh]

    def form(bias, scale, *fields):
        # Strides as after a convolution along an axis: the nodes of that axis next to the channels.
        moved = [field.movedim(1 + axis, -2).contiguous().movedim(-2, 1 + axis) for axis, field in enumerate(fields)]
        return torch.stack(heads_of_elements(moved, bias, scale, tables.to(bias), mesh, m, 1e-6))

    bias, scale = torch.randn(d, 2, H, D), torch.randn(d, 2, *(m,) * d, D)
    on_device = [tensor.to(DEVICE) for tensor in (bias, scale, *fields)]
    assert explain(lambda: form(*on_device)) == [("elements", "fused")]
    assert_parity(form, form, [bias, scale, *fields], tolerance=1e-5)


def test_heads_of_elements_falls_back_to_plain_for_large_elements():
    def reason(m, D):
        bias, scale = torch.zeros(1, 2, 1, D, device=DEVICE), torch.ones(1, 2, m, D, device=DEVICE)
        field, table = torch.randn(1, 2 * m, 3 * D, device=DEVICE), torch.zeros(2, 2, m, D // 2, device=DEVICE)
        return explain(lambda: heads_of_elements([field], bias, scale, [table], (2,), m, 1e-6))[0][1]

    assert reason(129, 64) == "plain: nodes of an element times head width 8256 is above 8192"
    assert reason(128, 64) == "fused"


# --- inside the models


@pytest.mark.parametrize(
    ("name", "used"),
    [("hpm", {"wrap", "gated_basis"}), ("transolver-plus", {"wrap", "gumbel"}), ("linearno", {"wrap"})],
)
def test_baseline_model_parity(name, used):
    """All gradients, with the same seed for the noise."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(4)
    sizes = {"in_channels": 2, "out_channels": 1, "width": 16, "heads": 2, "slices": 5, "modes": 2, "depth": 1}
    model = build_model(name, grid=(12, 12), options=Options(padding=("circular",) * 2), **sizes).to(DEVICE)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    reference, x = copy.deepcopy(model), torch.randn(1, 12, 12, 2, device=DEVICE)
    torch.manual_seed(9)
    decisions = explain(lambda: model(x).square().sum().backward())
    assert used <= {operation for operation, decision in decisions if decision == "fused"}
    torch.manual_seed(9)
    with dispatch.plain():
        reference(x).square().sum().backward()
    for (key, parameter), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(
            parameter.grad, expected.grad, rtol=2e-3, atol=1e-4 * float(expected.grad.abs().max()) + 1e-6, msg=key
        )
