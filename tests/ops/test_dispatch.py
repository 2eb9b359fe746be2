"""The choice between plain and fused operations, and its reason. No kernel is launched."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

from sigmasolver.models import Options, build_model
from sigmasolver.models.solver import Solver
from sigmasolver.ops import dispatch
from sigmasolver.ops.attention import attention
from sigmasolver.ops.convolution import depthwise_convolution
from sigmasolver.ops.dispatch import explain, why_plain
from sigmasolver.ops.lift import lift
from sigmasolver.ops.precision import matmul_precision
from sigmasolver.ops.stream import LOW_PRECISION, Stream, merged, split, stream_of
from sigmasolver.ops.swiglu import swiglu
from tests.ops.device import gpu

SIZES = {"grid": (6, 5), "in_channels": 1, "out_channels": 1, "depth": 1, "heads": 2, "slices": 4, "modes": 2}


@pytest.fixture
def interpreted(monkeypatch):
    monkeypatch.setattr(dispatch, "interpreted", True)
    monkeypatch.setattr(dispatch, "_installed", lambda: True)


def test_explain_on_a_cpu_lists_plain_definitions():
    decisions = explain(lambda: build_model("transolver-sigma", width=16, **SIZES)(torch.zeros(1, 6, 5, 1)))
    assert {operation for operation, _ in decisions} >= {"lift", "context", "fourier", "slices", "mixing", "readout"}
    assert ("inner width", "unpadded: the tensor is not on a GPU") in decisions
    plain = {decision for operation, decision in decisions if operation != "inner width"}
    assert plain == {"plain: the tensor is not on a GPU"}
    assert dispatch._decisions is None


def test_why_plain_gives_each_reason(interpreted):
    x, norm = torch.zeros(2, 3), nn.LayerNorm(3)
    parts = {"the norm": norm}
    assert why_plain(x, parts=parts, products=True, limits=[("width", 256, 256)], unless={"no": False}) is None
    assert why_plain(x, limits=[("width", 512, 256)]) == "width 512 is above 256"
    assert why_plain(x, unless={"dropout is active": True}) == "dropout is active"
    assert why_plain(x.double()) == "the tensor is torch.float64"
    assert why_plain(x[:0]) == "the tensor is empty"
    assert why_plain(torch.empty(1, device="meta").expand(2, 2**31)) == "a sample has 2^31 or more numbers"
    hook = norm.register_forward_pre_hook(lambda *_: None)
    assert why_plain(x, parts=parts) == "a forward hook is registered on the norm"
    hook.remove()
    norm.register_full_backward_hook(lambda *_: None)
    assert why_plain(x, parts=parts) == "a backward hook is registered on the norm"
    with dispatch.plain():
        assert why_plain(x) == "fused kernels are disabled"
    assert why_plain(x) is None


def test_matrix_units_need_tf32_for_float32_products():
    x = torch.zeros(2, 3)
    with matmul_precision("tf32"):
        assert dispatch._matrix_units(x)
    with matmul_precision("float32"):
        assert not dispatch._matrix_units(x) and dispatch._matrix_units(x.bfloat16())
        with torch.autocast("cpu", torch.bfloat16):
            assert dispatch._matrix_units(x)


@pytest.mark.parametrize("name", ["vit", "eddyformer"])
def test_attention_uses_torch_except_inside_a_function_transform(name):
    """Compiled into one graph too, with the decisions of the eager model except for their reasons."""
    model, x = build_model(name, width=16, **SIZES | {"grid": (8, 8)}), torch.zeros(1, 8, 8, 1)
    eager = explain(lambda: model(x))
    assert eager.count(("attention", "scaled_dot_product_attention")) == 1
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    traced = explain(lambda: compiled(x))
    assert [operation for operation, _ in traced] == [operation for operation, _ in eager]
    assert traced.count(("attention", "scaled_dot_product_attention")) == 1
    inside = explain(lambda: torch.func.jvp(model, (x,), (x,)))
    assert [decision for operation, decision in inside if operation == "attention"] == [
        "explicit products: forward-mode differentiation or a function transform is active"
    ]


def test_attention_in_forward_mode_is_the_derivative_of_torchs_function():
    torch.manual_seed(0)
    primals, tangents = (tuple(torch.randn(2, 3, 5, 4, dtype=torch.float64) for _ in range(3)) for _ in range(2))
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(*pair) for pair in zip(primals, tangents, strict=True)]
        ((_, decision),) = explain(lambda: attention(*duals))
        assert decision.startswith("explicit products: forward-mode")
        value, derivative = forward_ad.unpack_dual(attention(*duals))
    torch.testing.assert_close(value, attention(*primals))
    ahead, behind = (
        attention(*(x + step * t for x, t in zip(primals, tangents, strict=True))) for step in (1e-5, -1e-5)
    )
    torch.testing.assert_close(derivative, (ahead - behind) / 2e-5, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize(
    ("device", "inner", "decision"),
    [
        ("cpu", 21, "unpadded: the tensor is not on a GPU"),
        ("cuda", 21, "padded"),
        ("cuda", 32, "unpadded: 32 is a multiple of 16"),
    ],
)
def test_swiglu_pads_the_inner_width_on_a_gpu(device, inner, decision):
    with FakeTensorMode():
        shapes = ((5, 6), (2 * inner, 6), (2 * inner,), (6, inner), (6,))
        decisions = explain(lambda: swiglu(*(torch.empty(shape, device=device) for shape in shapes)))
    assert decisions[0] == ("inner width", decision)


def test_explain_lists_the_convolution_backward():
    def backward_decisions(grid=(3, 4, 3)):
        x, weight = torch.zeros(1, *grid, 2), torch.zeros(2, 1, *(3,) * len(grid))
        decisions = explain(lambda: depthwise_convolution(x, weight, torch.zeros(2), ("zeros",) * len(grid)))
        assert decisions[0] == ("convolution", "plain: the tensor is not on a GPU")
        return decisions[1:]

    assert backward_decisions() == [("convolution backward", "plane by plane")]
    with torch.no_grad():
        assert backward_decisions() == [("convolution backward", "torch's own: gradients are switched off")]
    assert backward_decisions((3, 4)) == []
    x, weight, bias = torch.zeros(2, 1, 3, 4, 3, 2), torch.zeros(2, 1, 3, 3, 3), torch.zeros(2)
    traced = explain(lambda: torch.func.vmap(lambda x: depthwise_convolution(x, weight, bias, ("zeros",) * 3))(x))
    assert traced[1] == ("convolution backward", f"torch's own: {dispatch.TRACED}")


@gpu
def test_explain_lists_the_convolution_backward_on_a_gpu():
    x, weight, bias = (torch.zeros(shape, device="cuda") for shape in ((1, 3, 4, 3, 2), (2, 1, 3, 3, 3), (2,)))
    with dispatch.plain():
        decisions = explain(lambda: depthwise_convolution(x, weight, bias, ("zeros",) * 3))
    assert decisions[1] == ("convolution backward", "torch's own: the tensor is on a GPU")


def test_why_plain_does_not_compute_limits_during_tracing():
    def limits():
        pytest.fail("computed")
        yield "width", 1, 1

    torch.func.vmap(lambda x: x if why_plain(x, limits=limits()) else None)(torch.zeros(2, 3))


def test_stream_split_and_merge_round_trip():
    H = torch.randn(3, 4)
    main = H.to(LOW_PRECISION)
    stream = Stream(main, (H - main.float()).to(LOW_PRECISION))
    assert merged(H) is H and split(H) == (H, None) and stream_of(H, None) is H
    assert stream_of(*split(stream)) == stream
    torch.testing.assert_close(merged(stream), H, rtol=2**-15, atol=0)


def test_solver_keeps_the_stream_in_one_tensor_for_other_blocks():
    class Doubled(nn.Module):
        def __init__(self, config):
            super().__init__()

        def forward(self, H):
            assert isinstance(H, torch.Tensor)
            return 2 * H

    config = build_model("transolver-sigma", width=16, **SIZES).config
    model, x = Solver(Doubled, config), torch.randn(1, 6, 5, 1)
    H = 2 * lift(x, model.points(x), model.lift, model.offset)
    torch.testing.assert_close(model(x), model.readout(model.norm(H)), rtol=0, atol=0)
    with torch.autocast("cpu", torch.bfloat16):
        assert dispatch._why_one_tensor(x, model.blocks) == "Doubled takes one tensor"
        assert model(x).dtype == torch.float32


@pytest.mark.parametrize("part, name", [("norm", "the norm"), ("mixing.parts.0", "the mixing")])
def test_why_plain_names_the_hooked_part_of_the_mixing(part, name, monkeypatch):
    model = build_model("transolver-sigma", width=16, **SIZES, options=Options())
    model.blocks[0].get_submodule(part).register_forward_hook(lambda *_: None)
    block = model.blocks[0]
    monkeypatch.setattr(dispatch, "interpreted", True)
    monkeypatch.setattr(dispatch, "_installed", lambda: True)
    reason = why_plain(torch.zeros(1, 16), parts={"the norm": block.norm, "the mixing": block.mixing})
    assert reason == f"a forward hook is registered on {name}"
