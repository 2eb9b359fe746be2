"""The baselines as rows: names, modes that do not matter, precision, other grids, plain errors, no cross-imports."""

import ast
import itertools
import re
from pathlib import Path

import pytest
import torch

from sigmasolver.models import Options, SolverConfig, baselines, build_model, build_solver, list_models
from sigmasolver.models.variants import BASELINES, VARIANTS

SHARED = {"frame", "physics_attention"}
SPECTRAL = {"ffno", "ffno-markov", "fno", "fno-original"}
BY_CELLS = {"unet", "unet-batchnorm", "vit", "drift-net", "drift-net-released"}
"""Their levels and patches are numbers of points, so a finer grid is another problem."""
OWN_REFINEMENT = ("factformer", "eddyformer")
"""FactFormer adds random features that a coarse grid does not resolve, EddyFormer takes the box to be periodic: their
own tests tell what holds for them."""
ONE_OF_EACH = [name for name in BASELINES if name.partition("-")[0] == name or name in ("drift-net", "transolver-plus")]
"""One row of each paper: the others change a setting, and tracing them meets the same operations."""
PERIODIC = Options(padding=("circular", "circular"))


def build(name="transolver", grid=(8, 8), modes=2, **sizes):
    sizes = {"in_channels": 1, "out_channels": 1, "width": 16, "depth": 1, "heads": 2, "slices": 4} | sizes
    return build_model(name, grid=grid, modes=modes, **sizes)


def test_every_model_is_listed_once_the_family_first():
    assert list_models() == (*VARIANTS, *BASELINES)
    assert set(BASELINES) >= {"transolver", "transolver-srpa", "transolver-keep", "linearno", "ffno"}
    assert not set(VARIANTS) & set(BASELINES)


@pytest.mark.parametrize("name", list_models())
def test_modes_matter_exactly_where_there_is_a_spectral_operator(name):
    few, many = (
        {key: tuple(tensor.shape) for key, tensor in build(name, modes=modes).state_dict().items()} for modes in (2, 3)
    )
    spectral = any("spectral" in stage for stage in VARIANTS[name].stages) if name in VARIANTS else name in SPECTRAL
    assert (few != many) == spectral
    if spectral:
        with pytest.raises(ValueError, match="too small for modes=40"):
            build(name, modes=40)
    else:
        assert torch.isfinite(build(name, grid=(2, 3), modes=40)(torch.zeros(1, 2, 3, 1))).all()


@pytest.mark.parametrize("name", list(BASELINES))
def test_the_same_weights_from_a_value_of_sizes(name):
    torch.manual_seed(1)
    model = build(name)
    torch.manual_seed(1)
    same = build_solver(name, SolverConfig((8, 8), 1, 1, width=16, depth=1, heads=2, slices=4, modes=2))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), same.parameters(), strict=True))


@pytest.mark.filterwarnings("ignore:var_mean:UserWarning")  # torch has no variance of no samples
@pytest.mark.parametrize("name", list(BASELINES))
def test_samples_do_not_see_each_other_and_none_is_fine(small_model, name):
    model, x = small_model(name), torch.randn(3, 12, 9, 2, dtype=torch.float64)
    torch.testing.assert_close(model(x), torch.cat([model(one[None]) for one in x]), rtol=1e-13, atol=1e-13)
    assert model(x[:0]).shape == (0, 12, 9, 3)


@pytest.mark.parametrize(
    "name", [one for one in BASELINES if one not in BY_CELLS and not one.startswith(OWN_REFINEMENT)]
)
def test_a_smooth_field_gives_nearly_the_same_answer_on_a_finer_grid(small_model, name):
    """Kernels reach a fixed number of points and the slice sums are quadratures: the gap falls with the spacing.

    The FNO adds a number of points, not a length, to an axis that does not wrap. Behind a Radon transform, to which the
    edge of the grid is a jump, the gap falls more slowly."""
    model = small_model(name, (8, 8), options=PERIODIC if name.startswith("fno") else None)

    def sample(n):
        x = torch.linspace(0, 1, n, dtype=torch.float64)
        X, Y = torch.meshgrid(x, x, indexing="ij")
        return model(torch.stack((torch.sin(3 * X) * Y, torch.cos(2 * X + Y)), -1)[None])

    answers = [sample(n) for n in (17, 33, 65)]
    gaps = [(b[:, ::2, ::2] - a).norm() / a.norm() for a, b in itertools.pairwise(answers)]
    falls = 0.9 if name.startswith("rno") else 0.75
    assert gaps[1] < falls * gaps[0] < 0.15


@pytest.mark.parametrize("name", list(BASELINES))
def test_lower_precision_stays_near(small_model, name):
    # The deepest level of a small grid is two points, whose sign is all that an InstanceNorm lets through.
    grid = (64, 48) if name == "unet" else (12, 9)
    model, x = small_model(name), torch.randn(2, *grid, 2, dtype=torch.float64)
    exact = model(x)

    def error(y):
        return ((y.double() - exact).norm() / exact.norm()).item()

    single = model.float()
    assert error(single(x.float())) < 1e-5
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = single(x.float())
    assert 1e-5 < error(mixed) < 0.05
    assert error(model.bfloat16()(x.bfloat16())) < 0.1


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ONE_OF_EACH else pytest.mark.slow)
        for name in BASELINES
        if not name.startswith("eddyformer-")
    ],
)
def test_export_equals_eager_for_any_batch(small_model, name):
    model, x = small_model(name, depth=1), torch.randn(2, 12, 9, 2, dtype=torch.float64)
    program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    more = torch.randn(5, 12, 9, 2, dtype=torch.float64)
    torch.testing.assert_close(program.module()(more), model(more), rtol=0, atol=1e-13)


@pytest.mark.parametrize("name", list(BASELINES))
def test_mistakes_are_one_plain_sentence(name):
    mistakes = [
        (lambda: build(name, heads=3), "width 16 is not divisible by 2 x heads = 6"),
        (lambda: build(name, slices=0), "slices is 0"),
        (lambda: build(name, grid=(8, 1)), "axis 1 has 1 point(s)"),
        (lambda: build(name, grid=(4, 4, 4, 4)), "has 4 axes"),
        (lambda: build(name, grid=(8, 2), options=Options(padding=("zeros", "circular"))), "circular padding"),
        (lambda: build(name)(torch.zeros(1, 8, 8, 2)), "Input has 2 channels"),
        (lambda: build(name)(torch.zeros(8, 8, 1)), "Input has shape (8, 8, 1)"),
        (lambda: build(name + "x"), f"did you mean {name}"),
    ]
    for mistake, says in mistakes:
        with pytest.raises(ValueError, match=re.escape(says)) as caught:
            mistake()
        message = str(caught.value)
        assert "\n" not in message and message.endswith((".", "?")) and len(message) < 240


def test_no_baseline_imports_another():
    folder = Path(baselines.__file__).parent
    papers = {path.stem for path in folder.glob("*.py")} - {"__init__"} - SHARED
    assert papers >= {"transolver", "linearno", "ffno"}
    for path in folder.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            assert not {name.rpartition(".")[2] for name in names} & papers, path.name
