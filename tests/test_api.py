"""The public API: names, lazy loading, examples and errors."""

import doctest
import importlib
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import sigmasolver
from sigmasolver import api
from sigmasolver.models import SolverConfig, variants
from tests.forked import check_output
from tests.registered import forgotten

ROOT = Path(__file__).parents[1]


def waves(folder):
    np.save(folder / "waves.npy", np.zeros((3, 4, 8, 8, 1), np.float32))
    return folder / "waves.npy"


NAMES = {
    "build_model", "diagnose_run", "evaluate_run", "infer_recipe", "list_models", "load", "metrics", "open_dataset",
    "open_windows", "recipe_of", "register_model", "rollout", "simulate_dataset", "train_model", "write_report",
}  # fmt: skip
MOVED = {
    "Options": "models", "Recipe": "recipes", "register_loss": "train.objectives",
    "register_optimiser": "train.optimisers", "register_task": "recipes", "save_pretrained": "model_cards.share",
}  # fmt: skip
"""Names that docs/api.md imports from other modules; `sigmasolver.NAME` still works."""
ADVANCED = {"register_symmetries": "symmetries", "symmetric_rollout": "forecast.symmetric"}
"""Further names in docs/api.md, which are imported from their modules."""
SIZE = ["model.width=16", "model.depth=1", "model.heads=2", "model.slices=4", "train.batch=2", "train.updates=3"]
DATA = ["task.grid=(12,12)", "task.space_stride=1", "task.train=4", "task.test=2"]


@pytest.fixture(scope="module")
def darcy(tmp_path_factory):
    return api.simulate_dataset("darcy", 6, tmp_path_factory.mktemp("data") / "darcy.h5", settings=["grid=12"])


@pytest.fixture
def models():
    """Undo registrations after the test."""
    with forgotten():
        yield


def recipe(*settings, model=None):
    return api.recipe_of("darcy", model, settings=[*SIZE, *DATA, *settings])


def in_new_process(code):
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_public_names():
    assert {*sigmasolver.__all__} == NAMES | {"__version__"}
    assert {*dir(sigmasolver)} >= NAMES
    assert {*api.__all__} < NAMES
    table, _, sections = (ROOT / "docs" / "api.md").read_text().partition("\n## ")
    listed = re.findall(r"`(\w+)[`(]", "\n".join(line.split("|")[1] for line in table.splitlines() if line[:2] == "| "))
    assert {*listed} == NAMES
    others = re.findall(r"^\| `(.+?)[`(]", sections, re.M)
    assert {*others} == {f"sigmasolver.{home}.{name}" for name, home in (MOVED | ADVANCED).items()}


@pytest.mark.parametrize("name", MOVED)
def test_moved_names_are_importable_but_not_listed(name):
    assert getattr(sigmasolver, name) is getattr(importlib.import_module(f"sigmasolver.{MOVED[name]}"), name)
    assert name not in sigmasolver.__all__ and name not in dir(sigmasolver)


def documented(name):
    if name in ADVANCED:
        return getattr(importlib.import_module(f"sigmasolver.{ADVANCED[name]}"), name)
    return getattr(sigmasolver, name)


@pytest.mark.parametrize("name", sorted((NAMES | {*MOVED, *ADVANCED}) - {"metrics", "Options", "Recipe"}))
def test_docstrings_document_arguments_and_return_values(name):
    function = documented(name)
    docstring, signature = inspect.getdoc(function), inspect.signature(function)
    arguments = docstring.partition("Args:\n")[2].partition("\n\n")[0]
    assert re.findall(r"^    (\w+): ", arguments, re.M) == [*signature.parameters]
    assert ("Returns:\n" in docstring) == (signature.return_annotation != "None")


def test_public_names_are_not_shadowed_by_subpackages():
    """Importing a subpackage sets its name in the package, so no public name may equal that of a subpackage."""
    code = "import sigmasolver, sigmasolver.cli, sigmasolver.train.job, sigmasolver.diagnose.run, json\n"
    code += "print(json.dumps({name: type(getattr(sigmasolver, name)).__name__ for name in sigmasolver.__all__}))"
    kinds = json.loads(check_output(code))
    assert {name for name, kind in kinds.items() if kind == "module"} == {"metrics"}
    assert {kind for name, kind in kinds.items() if name not in ("metrics", "__version__")} == {"function"}


def test_api_import_does_not_load_torch():
    code = "import sys, sigmasolver; from sigmasolver import train_model, open_dataset; help(train_model)\n"
    code += "print([name for name in ('torch', 'numpy', 'h5py', 'scipy', 'matplotlib') if name in sys.modules])"
    assert in_new_process(code).splitlines()[-1] == "[]"


def test_build_model_does_not_load_the_compiler():
    """Nor does a model on the meta device, as used by `load` and `count_parameters`."""
    code = "import sys, sigmasolver as s; s.build_model('fno', grid=(8, 8), in_channels=1, out_channels=1, width=16)\n"
    code += "from sigmasolver.models import SolverConfig, count_parameters\n"
    code += "count_parameters('transolver-sigma', SolverConfig((8, 8), 1, 1))\n"
    code += "print({'torch._dynamo', 'sympy'} & set(sys.modules))"
    assert check_output(code) == "set()\n"


def test_unknown_name_raises_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'forcast'"):
        sigmasolver.forcast  # noqa: B018
    assert not hasattr(sigmasolver, "api_") and getattr(sigmasolver, "nothing", None) is None


def test_docstring_examples_run(tmp_path, monkeypatch, models):
    """In the order of api.py, where they build on each other; then those of the other names."""
    monkeypatch.chdir(tmp_path)
    api_order = [name for name, value in vars(api).items() if name in api.__all__ and callable(value)]
    namespace = {"sigmasolver": sigmasolver}
    for name in [*api_order, *sorted(NAMES - {*api_order}), *MOVED, *ADVANCED]:
        example = doctest.DocTestParser().get_doctest(documented(name).__doc__, namespace, name, None, 0)
        assert example.examples, f"{name} has no example"
        output: list[str] = []
        result = doctest.DocTestRunner(verbose=False).run(example, out=output.append, clear_globs=False)
        assert result.failed == 0, "".join(output)
        namespace = example.globs


def test_documentation_examples_run(tmp_path, monkeypatch, models, capsys):
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {}
    for block in re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs" / "api.md").read_text(), re.M | re.S):
        exec(block, namespace)
    errors = dict(line.split() for line in capsys.readouterr().out.splitlines()[1:])
    assert {*errors} == {"transolver-sigma", "persistence"}
    by_rollout = sigmasolver.metrics.relative_l2(namespace["forecast"].frames, namespace["future"])
    assert 0 < float(by_rollout) < 10
    assert (tmp_path / "page.html").stat().st_size > 10_000
    assert {record["model"] for record in namespace["records"]} == {"convolution", "persistence"}


def test_evaluate_run_is_the_mean_metric_over_windows(darcy, tmp_path):
    run = api.train_model(recipe(), darcy, tmp_path / "run")
    windows = api.open_windows(darcy, recipe(), "test")
    history, future = windows.batch(range(len(windows)))
    frames = api.rollout(run.path, history.numpy(), 1).frames
    assert torch.equal(frames, api.rollout(sigmasolver.load(run.path), history, 1).frames)
    expected = sigmasolver.metrics.relative_l2(frames, future).mean()
    records = api.evaluate_run(run)
    values = [row["value"] for row in records if row["metric"] == "relative_l2" and row["model"] == "transolver-sigma"]
    assert values == pytest.approx([float(expected)], rel=1e-12)
    assert api.evaluate_run(str(run.path)) == records  # stored records, not computed again


def test_evaluate_run_uses_a_dataset_as_it_was_opened(tmp_path):
    """The same values with the fields, or the axes, in another order give the same errors."""
    values = np.random.default_rng(0).normal(size=(9, 8, 8, 6, 2)).astype(np.float32)
    values[..., 1] = 3 * values[..., 1] + 5
    for name, array in {"train": values[:6], "ab": values[6:], "ba": values[6:, ..., ::-1],
                        "yx": values[6:].transpose(0, 1, 3, 2, 4)}.items():  # fmt: skip
        np.save(tmp_path / f"{name}.npy", array)

    def opened(name, fields=("a", "b"), boundary="periodic", dt=0.5, axes=None):
        return api.open_dataset(tmp_path / f"{name}.npy", fields=fields, boundary=boundary, dt=dt, axes=axes)

    sizes = ["model.width=8", "model.depth=1", "model.heads=2", "model.slices=2", "model.modes=2", "train.updates=2"]
    data = opened("train")
    run = api.train_model(api.infer_recipe(data, settings=[*sizes, "task.history=2", "task.horizon=3"]), data,
                          tmp_path / "run")  # fmt: skip
    expected = api.evaluate_run(run, opened("ab"))
    errors = {
        row["field"]: row["value"] for row in expected if (row["metric"], row["model"]) == ("rmse", "persistence")
    }
    assert errors["b"] > 2.5 * errors["a"]
    assert api.evaluate_run(run, tmp_path / "ab.npy") == expected
    for reader in (opened("ba", fields="b,a"), opened("yx", axes="count,time,y,x,field")):
        records = api.evaluate_run(run, reader)
        assert [(row["metric"], row["field"], row["lead"]) for row in records] == [
            (row["metric"], row["field"], row["lead"]) for row in expected
        ]
        np.testing.assert_allclose(*([row["value"] or 0 for row in rows] for rows in (records, expected)), rtol=1e-5)
    (maps,) = api.diagnose_run(run, "maps", windows=1, data=opened("yx", axes="count,time,y,x,field")).values()
    np.testing.assert_allclose(maps.arrays["given"][0], values[6, 1], rtol=1e-3, atol=1e-6)
    with pytest.raises(ValueError, match=r"ab.npy differs from the training data of .* is wall, not periodic"):
        api.evaluate_run(run, opened("ab", boundary="wall"))
    with pytest.raises(ValueError, match=r"its frames are 7 apart, not 0\.5"):
        api.evaluate_run(run, opened("ab", dt=7.0))
    with pytest.raises(ValueError, match=r"train.npy is not the training data of .* is read with other options"):
        api.evaluate_run(run, opened("train", dt=7.0))


def test_lists_of_names_may_be_strings(darcy, tmp_path):
    np.save(tmp_path / "own.npy", np.random.default_rng(0).normal(size=(4, 6, 5, 7, 2)))
    listed = {"fields": ["u", "v"], "axes": ["count", "time", "y", "x", "field"], "boundary": ["wall", "open"],
              "units": ["m", "s"]}  # fmt: skip
    typed = {name: ",".join(values) for name, values in listed.items()}
    layouts = [api.open_dataset(tmp_path / "own.npy", **options).header.layout for options in (listed, typed)]
    assert (
        layouts[1].fields == ("u", "v") and layouts[1].units == ("m", "s") and layouts[1].boundary == ("wall", "open")
    )
    assert [len(axis) for axis in layouts[1].coordinates] == [len(axis) for axis in layouts[0].coordinates] == [7, 5]
    assert api.recipe_of("darcy", settings="model.width=48").model.width == 48
    run = api.train_model(recipe(), darcy, tmp_path / "run")
    api.evaluate_run(run)
    assert list(api.diagnose_run(run, "maps")) == ["maps"]
    assert list(api.diagnose_run(run, "maps,corrections")) == ["maps", "corrections"]
    assert api.write_report(str(run.path), tmp_path / "page.html").stat().st_size > 10_000


def test_open_dataset_imports_arrays_exactly(tmp_path):
    values = np.random.default_rng(0).normal(size=(4, 5, 6, 7, 2)).astype(np.float32)
    np.save(tmp_path / "own.npy", values)
    with api.open_dataset(tmp_path / "own.npy", tmp_path / "own.h5", fields=["u", "v"]) as dataset:
        assert np.array_equal(dataset[:], values) and dataset.header.layout.fields == ("u", "v")
        assert api.infer_recipe(dataset).task.inputs == ("u", "v")


def test_open_windows_works_with_a_data_loader(darcy):
    windows = api.open_windows(darcy, recipe())
    (history, future), *_ = torch.utils.data.DataLoader(windows, batch_size=4)
    assert all(
        torch.equal(loaded, expected)
        for loaded, expected in zip((history, future), windows.batch(range(4)), strict=True)
    )


class Scaled(nn.Module):
    """y = a x + b with two parameters."""

    def __init__(self, config):
        super().__init__()
        self.factor, self.offset = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.zeros(config.out_channels))

    def forward(self, x):
        return self.factor * x + self.offset


def test_register_model_builds_trains_loads_and_lists(darcy, tmp_path, models):
    sigmasolver.register_model("scaled", Scaled)
    assert sigmasolver.list_models()[-1] == "scaled"
    x = torch.randn(2, 12, 12, 1)
    model = sigmasolver.build_model("scaled", grid=(12, 12), in_channels=1, out_channels=1)
    assert torch.equal(model(x), 0.5 * x)
    run = api.train_model(recipe(model="scaled"), darcy, tmp_path / "run")
    loaded = sigmasolver.load(run.path).model
    assert isinstance(loaded, Scaled) and loaded.factor.item() != 0.5
    assert "scaled" in {row["model"] for row in api.evaluate_run(run)}
    del variants.MODELS["scaled"]
    for use in (lambda: sigmasolver.load(run.path), lambda: api.rollout(run, x[:, None], 1)):
        with pytest.raises(ValueError, match=r'trained with the model "scaled", which is not registered; register it'):
            use()


def test_command_reports_an_unregistered_model(darcy, tmp_path, models, call):
    sigmasolver.register_model("scaled", Scaled)
    run = api.train_model(recipe(model="scaled"), darcy, tmp_path / "run")
    del variants.MODELS["scaled"]
    for command in (("evaluate", run.path), ("train", "--resume", run.path)):
        code, _, error = call(*command)
        assert code == 2 and "sigmasolver.register_model first" in error and error.count("\n") == 1


def test_open_dataset_options_for_arrays(tmp_path):
    values = np.random.default_rng(0).normal(size=(6, 5, 8, 6, 2)).astype(np.float32)
    np.save(tmp_path / "a.npy", values.transpose(4, 3, 2, 1, 0))
    options = {"fields": ["u", "v"], "axes": ["field", "y", "x", "time", "count"], "boundary": ["periodic", "wall"]}
    options |= {"dt": 0.5, "units": ["m/s", "m/s"]}
    with api.open_dataset(tmp_path / "a.npy", **options) as data:
        layout = data.header.layout
        assert (layout.boundary, layout.units, layout.times[1]) == (("periodic", "wall"), ("m/s", "m/s"), 0.5)
        np.testing.assert_array_equal(data[:], values)
        sizes = ["model.width=8", "model.depth=1", "model.heads=2", "model.slices=2", "model.modes=2"]
        sizes += ["task.history=2", "task.block=1", "task.horizon=2", "train.updates=2"]
        inferred = api.infer_recipe(data, settings=sizes)
        assert inferred.model.options.padding == ("circular", "zeros")
        run = api.train_model(inferred, data, tmp_path / "run")
    assert not list((tmp_path / "run").glob("*.h5"))
    rows = api.evaluate_run(run)
    with api.open_dataset(tmp_path / "a.npy", tmp_path / "a.h5", **options) as store:
        np.testing.assert_array_equal(store[:], values)
        assert store.header.layout.boundary == ("periodic", "wall")
        again = api.evaluate_run(api.train_model(inferred, store, tmp_path / "again"))
    for in_place, imported in zip(rows, again, strict=True):
        assert in_place["value"] == imported["value"], "same results in place and imported"


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda: sigmasolver.register_model("fno", Scaled), 'The model "fno" already exists'),
        (lambda: sigmasolver.register_model("my model", Scaled), '"my model" is not a valid name for a model'),
        (lambda: sigmasolver.register_model("", Scaled), "is not a valid name for a model"),
        (lambda: sigmasolver.register_model("mine", 3), "must be a function of a SolverConfig, not int"),
        (lambda: sigmasolver.build_model("scaled", grid=(8,), in_channels=1, out_channels=1), "Unknown model"),
    ],
)
def test_register_model_errors(use, message, models):
    before = sigmasolver.list_models()
    with pytest.raises(ValueError, match=message):
        use()
    assert sigmasolver.list_models() == before


def test_build_model_refuses_a_builder_without_module(models):
    sigmasolver.register_model("broken", SolverConfig.__str__)
    with pytest.raises(ValueError, match=r'The builder of "broken" returned str; it must return an nn\.Module'):
        sigmasolver.build_model("broken", grid=(8,), in_channels=1, out_channels=1)


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda data, folder: api.open_dataset(folder / "none.npy"), "File or folder not found"),
        (lambda data, folder: api.open_dataset(ROOT / "README.md"), "is not an HDF5 file"),
        (lambda data, folder: api.open_dataset(ROOT / "docs"), "not in a supported format"),
        (lambda data, folder: api.open_dataset(data, folder / "copy.h5"), "is a store and needs no import"),
        (lambda data, folder: api.open_dataset(data, boundary="wall"), "is a store and needs no import"),
        (lambda data, folder: api.open_dataset(waves(folder), axes=["count", "x"]), "no array with axes count, x"),
        (lambda data, folder: api.open_dataset(waves(folder), boundary="soft"), "choose from periodic, wall, open"),
        (lambda data, folder: api.open_dataset(waves(folder), skip_bad=True), "with out="),
        (lambda data, folder: api.open_windows(data, recipe(), "tests"), 'Unknown split "tests"'),
        (lambda data, folder: api.open_windows(data, recipe(), "validation"), "The validation split of .* is empty"),
        (lambda data, folder: api.train_model("darcie", data, folder / "run"), 'Unknown recipe "darcie"'),
        (lambda data, folder: api.train_model(recipe(), data, folder / "run", "gpu"), 'Unknown device "gpu"'),
        (
            lambda data, folder: api.simulate_dataset("darcy", 1, folder / "x.h5", settings=["gird=9"]),
            "Unknown setting",
        ),
        (lambda data, folder: api.write_report([], folder / "page.html"), "at least one run"),
        (lambda data, folder: api.evaluate_run(folder / "none"), "none"),
    ],
)
def test_api_errors_are_one_sentence_and_write_nothing(darcy, tmp_path, use, message):
    with pytest.raises(ValueError, match=message) as error:
        use(darcy, tmp_path)
    assert "\n" not in str(error.value) and not [entry for entry in tmp_path.iterdir() if entry.name != "waves.npy"]
