"""Error messages of models: one plain sentence each."""

import math
import re

import pytest
import torch

from sigmasolver.models import Options, SolverConfig, build_model, build_solver, count_parameters, matched_width
from sigmasolver.models.block import BlockSpec


def build(name="transolver-sigma", grid=(8, 8), width=16, heads=2, modes=2, options=None, slices=4, channels=1):
    return build_model(
        name,
        grid=grid,
        in_channels=channels,
        out_channels=1,
        width=width,
        depth=1,
        heads=heads,
        slices=slices,
        modes=modes,
        options=options,
    )


def is_one_sentence(message):
    """A short line that ends with a full stop or a question mark."""
    return "\n" not in message and message.endswith((".", "?")) and len(message) < 240


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"width": 20, "heads": 4}, "width 20 is not divisible by 2 x heads = 8"),
        ({"modes": 0}, "modes is 0"),
        ({"modes": (2, 0)}, "modes is (2, 0)"),
        ({"modes": (2, 2, 2)}, "modes has 3 entries for 2 axes"),
        ({"modes": 6}, "too small for modes=6: axis 0 with 8 points has 5 modes"),
        ({"grid": (8, 1), "modes": 1}, "axis 1 has 1 point(s)"),
        ({"grid": (4, 4, 4, 4)}, "has 4 axes"),
        ({"grid": ()}, "has 0 axes"),
        ({"slices": 0}, "slices is 0"),
        ({"channels": 0}, "in_channels is 0"),
        (
            {"grid": (8, 2), "options": Options(padding=("zeros", "circular"))},
            "too small for circular padding",
        ),
        ({"options": Options(padding=("zeros",))}, "padding has 1 entries for 2 axes"),
        ({"width": 32.0}, "width must be an integer, not 32.0"),
        ({"channels": True}, "in_channels must be an integer"),
        ({"grid": 16}, "grid must be a list of values"),
        ({"options": {}}, "options must be of type Options"),
        ({"name": "transolver-sigm"}, "did you mean transolver-sigma"),
        ({"name": "physical"}, "physolver"),
        ({"name": "?"}, "slice-keep"),
    ],
)
def test_build_model_rejects_invalid_sizes_and_names(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        build(**arguments)
    assert is_one_sentence(str(caught.value))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("expansion", 0),
        ("positions", "polar"),
        ("lattice", 1),
        ("padding", ("zeros", "mirror")),
        ("dropout", 1.0),
        ("dropout", -0.1),
    ],
)
def test_options_reject_invalid_values(field, value):
    with pytest.raises(ValueError, match=field) as caught:
        Options(**{field: value})
    assert is_one_sentence(str(caught.value))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stages", ()),
        ("stages", (("spectral", "physical", "pass"),)),
        ("stages", (("fourier",),)),
        ("mixing", "none"),
        ("update", "average"),
    ],
)
def test_block_spec_rejects_invalid_values(field, value):
    with pytest.raises(ValueError) as caught:
        BlockSpec(**{field: value})
    assert is_one_sentence(str(caught.value))


def test_grouped_mixing_requires_two_groups():
    with pytest.raises(ValueError, match="grouped"):
        BlockSpec(stages=(("physical",),), mixing="grouped")


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((1, 8, 8, 2), "Input has 2 channels in its last axis; expected 1."),
        ((8, 8, 1), "Input has shape (8, 8, 1)"),
        ((1, 8, 1, 1), "axis 1 has 1 point(s)"),
    ],
)
def test_forward_rejects_invalid_shapes(shape, message):
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        build()(torch.zeros(shape))
    assert is_one_sentence(str(caught.value))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_check_input_rejects_non_finite_values(bad):
    x = torch.zeros(2, 8, 8, 1)
    x[1, 3, 4, 0] = bad
    model = build(options=Options(check_input=True))
    with pytest.raises(ValueError, match=re.escape("sample 1, channel 0, at grid point (3, 4)")) as caught:
        model(x)
    assert is_one_sentence(str(caught.value))
    assert torch.isfinite(model(torch.zeros(2, 8, 8, 1))).all()
    assert not torch.isfinite(build()(x)).all()


def test_time_is_required_iff_embedded():
    x, time = torch.zeros(2, 8, 8, 1), torch.zeros(2)
    with pytest.raises(ValueError, match="pass `time`"):
        build(options=Options(time_embedding=True))(x)
    with pytest.raises(ValueError, match="no time embedding"):
        build()(x, time)
    with pytest.raises(ValueError, match="one number for each of 2 samples"):
        build(options=Options(time_embedding=True))(x, time[:1])
    with pytest.raises(ValueError, match="pass `time`, 3 numbers per sample"):
        _with_conditions(2)(x)
    with pytest.raises(ValueError, match="expected 3 numbers for each of 2 samples"):
        _with_conditions(2)(x, time)
    assert _with_conditions(2)(x, torch.zeros(2, 3)).shape == x.shape


def _with_conditions(count):
    sizes = SolverConfig(
        (8, 8), 1, 1, count, width=16, depth=1, heads=2, slices=4, modes=2, options=Options(time_embedding=True)
    )
    return build_solver("transolver-sigma", sizes)


def test_forward_rejects_input_of_another_dtype():
    with pytest.raises(ValueError, match=r"Input has dtype torch.float64, but this solver has torch.float32"):
        build()(torch.zeros(1, 8, 8, 1, dtype=torch.float64))


def test_build_model_accepts_lists_for_tuples():
    model = build(grid=[8, 8], modes=[2, 3], options=Options(padding=["circular", "zeros"]))
    assert (
        model.config.grid == (8, 8) and model.config.modes == (2, 3) and model.config.padding == ("circular", "zeros")
    )


def test_matched_width_rejects_unreachable_targets():
    with pytest.raises(ValueError, match="is out of range"):
        matched_width("physolver", SolverConfig((16, 16), 1, 1, width=16, heads=2), target=10**9)
    with pytest.raises(ValueError, match="did you mean physolver"):
        count_parameters("physolvr", SolverConfig((16, 16), 1, 1))
