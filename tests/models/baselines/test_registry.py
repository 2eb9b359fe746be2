"""The registry of baselines: names, `modes`, precision, other grids, error messages, no cross-imports."""

import ast
import itertools
import re
from pathlib import Path

import pytest
import torch

from sigmasolver.models import Options, SolverConfig, baselines, build_model, build_solver, list_models
from sigmasolver.models.variants import BASELINES, VARIANTS

SHARED = {"attention_solver", "physics_attention"}
SPECTRAL = {"ffno", "ffno-markov", "fno", "fno-original"}
BY_CELLS = {"unet", "unet-batchnorm", "vit", "drift-net", "drift-net-released"}
"""Their levels and patches are fixed numbers of points, so a finer grid is a different problem."""
OWN_REFINEMENT = ("factformer", "eddyformer")
"""FactFormer adds random features that a coarse grid does not resolve, EddyFormer assumes a periodic box: see their own
tests."""
ONE_OF_EACH = [name for name in BASELINES if name.partition("-")[0] == name or name in ("drift-net", "transolver-plus")]
"""One model per paper: the others change a setting, and tracing them covers the same operations."""
PERIODIC = Options(padding=("circular", "circular"))


def build(name="transolver", grid=(8, 8), modes=2, **sizes):
    sizes = {"in_channels": 1, "out_channels": 1, "width": 16, "depth": 1, "heads": 2, "slices": 4} | sizes
    return build_model(name, grid=grid, modes=modes, **sizes)


def test_list_models_is_unique_and_starts_with_the_variants():
    assert list_models() == (*VARIANTS, *BASELINES)
    assert set(BASELINES) >= {"transolver", "transolver-srpa", "transolver-keep", "linearno", "ffno"}
    assert not set(VARIANTS) & set(BASELINES)


@pytest.mark.parametrize("name", list_models())
def test_modes_matter_iff_there_is_a_spectral_operator(name):
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
def test_build_model_and_build_solver_give_the_same_weights(name):
    torch.manual_seed(1)
    model = build(name)
    torch.manual_seed(1)
    same = build_solver(name, SolverConfig((8, 8), 1, 1, width=16, depth=1, heads=2, slices=4, modes=2))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), same.parameters(), strict=True))


@pytest.mark.filterwarnings("ignore:var_mean:UserWarning")  # the variance of an empty batch
@pytest.mark.parametrize("name", list(BASELINES))
def test_baseline_samples_are_independent_and_an_empty_batch_works(small_model, name):
    model, x = small_model(name), torch.randn(3, 12, 9, 2, dtype=torch.float64)
    torch.testing.assert_close(model(x), torch.cat([model(sample[None]) for sample in x]), rtol=1e-13, atol=1e-13)
    assert model(x[:0]).shape == (0, 12, 9, 3)


@pytest.mark.parametrize(
    "name", [name for name in BASELINES if name not in BY_CELLS and not name.startswith(OWN_REFINEMENT)]
)
def test_baseline_output_converges_on_finer_grids(small_model, name):
    """Kernels span a fixed number of points and slice sums are quadratures: the error decreases with the spacing.

    FNO pads a non-periodic axis by a number of points, not by a length. After a Radon transform, for which the edge of
    the grid is a jump, the error decreases more slowly."""
    model = small_model(name, (8, 8), options=PERIODIC if name.startswith("fno") else None)

    def sample(n):
        x = torch.linspace(0, 1, n, dtype=torch.float64)
        X, Y = torch.meshgrid(x, x, indexing="ij")
        return model(torch.stack((torch.sin(3 * X) * Y, torch.cos(2 * X + Y)), -1)[None])

    outputs = [sample(n) for n in (17, 33, 65)]
    errors = [(b[:, ::2, ::2] - a).norm() / a.norm() for a, b in itertools.pairwise(outputs)]
    ratio = 0.9 if name.startswith("rno") else 0.75
    assert errors[1] < ratio * errors[0] < 0.15


@pytest.mark.parametrize("name", list(BASELINES))
def test_baselines_in_lower_precision_are_close_to_float64(small_model, name):
    # On a small grid the deepest level has two points, of which InstanceNorm keeps only the sign.
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
def test_exported_baseline_equals_eager_for_any_batch_size(small_model, name):
    model, x = small_model(name, depth=1), torch.randn(2, 12, 9, 2, dtype=torch.float64)
    program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    more = torch.randn(5, 12, 9, 2, dtype=torch.float64)
    torch.testing.assert_close(program.module()(more), model(more), rtol=0, atol=1e-13)


@pytest.mark.parametrize("name", list(BASELINES))
def test_baseline_errors_are_one_sentence(name):
    errors = [
        (lambda: build(name, heads=3), "width 16 is not divisible by 2 x heads = 6"),
        (lambda: build(name, slices=0), "slices is 0"),
        (lambda: build(name, grid=(8, 1)), "axis 1 has 1 point(s)"),
        (lambda: build(name, grid=(4, 4, 4, 4)), "has 4 axes"),
        (lambda: build(name, grid=(8, 2), options=Options(padding=("zeros", "circular"))), "circular padding"),
        (lambda: build(name)(torch.zeros(1, 8, 8, 2)), "Input has 2 channels"),
        (lambda: build(name)(torch.zeros(8, 8, 1)), "Input has shape (8, 8, 1)"),
        (lambda: build(name + "x"), f"did you mean {name}"),
    ]
    for call, expected in errors:
        with pytest.raises(ValueError, match=re.escape(expected)) as caught:
            call()
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
