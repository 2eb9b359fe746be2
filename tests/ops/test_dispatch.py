"""The choice between plain and fused, and the reason that is given for it. Nothing is launched."""

import pytest
import torch
from torch import nn

from sigmasolver.models import Options, build_model
from sigmasolver.models.solver import Solver
from sigmasolver.ops import dispatch
from sigmasolver.ops.dispatch import explain, why_plain
from sigmasolver.ops.lift import lift
from sigmasolver.ops.precision import matmul_precision
from sigmasolver.ops.stream import LOW_PRECISION, Stream, merged, split, stream_of

SIZES = {"grid": (6, 5), "in_channels": 1, "out_channels": 1, "depth": 1, "heads": 2, "slices": 4, "modes": 2}


@pytest.fixture
def interpreted(monkeypatch):
    monkeypatch.setattr(dispatch, "interpreted", True)
    monkeypatch.setattr(dispatch, "_installed", lambda: True)


def test_a_cpu_takes_the_plain_definition():
    decisions = explain(lambda: build_model("transolver-sigma", width=16, **SIZES)(torch.zeros(1, 6, 5, 1)))
    assert {operation for operation, _ in decisions} >= {"lift", "context", "fourier", "slices", "mixing", "readout"}
    assert {decision for _, decision in decisions} == {"plain: the tensor is not on a GPU"}
    assert dispatch._recorded is None


def test_every_reason_is_a_sentence_about_what_was_asked(interpreted):
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
        assert why_plain(x) == "fused kernels are switched off"
    assert why_plain(x) is None


def test_products_in_float32_need_tf32():
    x = torch.zeros(2, 3)
    with matmul_precision("tf32"):
        assert dispatch._matrix_units(x)
    with matmul_precision("float32"):
        assert not dispatch._matrix_units(x) and dispatch._matrix_units(x.bfloat16())
        with torch.autocast("cpu", torch.bfloat16):
            assert dispatch._matrix_units(x)


def test_limits_are_not_computed_for_a_tracer():
    def limits():
        pytest.fail("computed")
        yield "width", 1, 1

    torch.func.vmap(lambda x: x if why_plain(x, limits=limits()) else None)(torch.zeros(2, 3))


def test_a_stream_in_two_parts_is_put_together_again():
    H = torch.randn(3, 4)
    main = H.to(LOW_PRECISION)
    stream = Stream(main, (H - main.float()).to(LOW_PRECISION))
    assert merged(H) is H and split(H) == (H, None) and stream_of(H, None) is H
    assert stream_of(*split(stream)) == stream
    torch.testing.assert_close(merged(stream), H, rtol=2**-15, atol=0)


def test_a_block_on_one_tensor_works_in_the_solver_and_keeps_the_stream_in_one():
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
def test_a_hook_on_a_part_of_the_mixing_is_named(part, name, monkeypatch):
    model = build_model("transolver-sigma", width=16, **SIZES, options=Options())
    model.blocks[0].get_submodule(part).register_forward_hook(lambda *_: None)
    block = model.blocks[0]
    monkeypatch.setattr(dispatch, "interpreted", True)
    monkeypatch.setattr(dispatch, "_installed", lambda: True)
    reason = why_plain(torch.zeros(1, 16), parts={"the norm": block.norm, "the mixing": block.mixing})
    assert reason == f"a forward hook is registered on {name}"
