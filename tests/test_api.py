"""The public API: its names, that they load lazily, that every example runs, and what bad input is told."""

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
from tests.registered import forgotten

ROOT = Path(__file__).parents[1]


def waves(folder):
    np.save(folder / "waves.npy", np.zeros((3, 4, 8, 8, 1), np.float32))
    return folder / "waves.npy"


NAMES = {
    "build_model", "diagnose_run", "evaluate_run", "infer_recipe", "list_models", "load", "metrics", "open_dataset",
    "open_windows", "recipe_of", "register_model", "rollout", "simulate_dataset", "train_model", "write_report",
}  # fmt: skip
ELSEWHERE = {
    "Options": "models", "Recipe": "recipes", "register_loss": "train.objectives",
    "register_optimiser": "train.optimisers", "register_task": "recipes", "save_pretrained": "model_cards.share",
}  # fmt: skip
"""What docs/api.md takes from other modules; `sigmasolver.NAME` was their first home and still works."""
SIZE = ["model.width=16", "model.depth=1", "model.heads=2", "model.slices=4", "train.batch=2", "train.updates=3"]
DATA = ["task.grid=(12,12)", "task.space_stride=1", "task.train=4", "task.test=2"]


@pytest.fixture(scope="module")
def darcy(tmp_path_factory):
    return api.simulate_dataset("darcy", 6, tmp_path_factory.mktemp("data") / "darcy.h5", settings=["grid=12"])


@pytest.fixture
def models():
    """What a test registers is forgotten after it."""
    with forgotten():
        yield


def recipe(*settings, model=None):
    return api.recipe_of("darcy", model, settings=[*SIZE, *DATA, *settings])


def in_new_process(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_names():
    assert {*sigmasolver.__all__} == NAMES | {"__version__"}
    assert {*dir(sigmasolver)} >= NAMES
    assert {*api.__all__} < NAMES
    table, _, more = (ROOT / "docs" / "api.md").read_text().partition("\n## ")
    listed = re.findall(r"`(\w+)[`(]", "\n".join(line.split("|")[1] for line in table.splitlines() if line[:2] == "| "))
    assert {*listed} == NAMES
    further = re.findall(r"^\| `(.+?)[`(]", more, re.M)
    assert {*further} == {f"sigmasolver.{home}.{name}" for name, home in ELSEWHERE.items()}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_names_that_moved_are_still_found_but_not_listed(name):
    assert getattr(sigmasolver, name) is getattr(importlib.import_module(f"sigmasolver.{ELSEWHERE[name]}"), name)
    assert name not in sigmasolver.__all__ and name not in dir(sigmasolver)


@pytest.mark.parametrize("name", sorted((NAMES | {*ELSEWHERE}) - {"metrics", "Options", "Recipe"}))
def test_a_docstring_tells_every_argument_and_what_comes_back(name):
    function = getattr(sigmasolver, name)
    told, signature = inspect.getdoc(function), inspect.signature(function)
    arguments = told.partition("Args:\n")[2].partition("\n\n")[0]
    assert re.findall(r"^    (\w+): ", arguments, re.M) == [*signature.parameters]
    assert ("Returns:\n" in told) == (signature.return_annotation != "None")


def test_every_name_is_there_whatever_was_imported_before():
    """A subpackage takes its name in the package when it is imported, so no public name may be that of one."""
    code = "import sigmasolver, sigmasolver.cli, sigmasolver.train.job, sigmasolver.diagnose.run, json\n"
    code += "print(json.dumps({name: type(getattr(sigmasolver, name)).__name__ for name in sigmasolver.__all__}))"
    kinds = json.loads(in_new_process(code))
    assert {name for name, kind in kinds.items() if kind == "module"} == {"metrics"}
    assert {kind for name, kind in kinds.items() if name not in ("metrics", "__version__")} == {"function"}


def test_torch_is_not_loaded_before_it_is_needed():
    code = "import sys, sigmasolver; from sigmasolver import train_model, open_dataset; help(train_model)\n"
    code += "print([name for name in ('torch', 'numpy', 'h5py', 'scipy', 'matplotlib') if name in sys.modules])"
    assert in_new_process(code).splitlines()[-1] == "[]"


def test_building_a_model_does_not_load_the_compiler():
    """Nor does one without numbers, such as `load` begins with and parameters are counted in."""
    code = "import sys, sigmasolver as s; s.build_model('fno', grid=(8, 8), in_channels=1, out_channels=1, width=16)\n"
    code += "from sigmasolver.models import SolverConfig, count_parameters\n"
    code += "count_parameters('transolver-sigma', SolverConfig((8, 8), 1, 1)); print('torch._dynamo' in sys.modules)"
    assert in_new_process(code) == "False\n"


def test_an_unknown_name_is_no_attribute():
    with pytest.raises(AttributeError, match="has no attribute 'forcast'"):
        sigmasolver.forcast  # noqa: B018
    assert not hasattr(sigmasolver, "api_") and getattr(sigmasolver, "nothing", None) is None


def test_the_examples_of_the_docstrings_run(tmp_path, monkeypatch, models):
    """In the order of api.py, which they continue each other in; then those of the other names."""
    monkeypatch.chdir(tmp_path)
    in_order = [name for name, value in vars(api).items() if name in api.__all__ and callable(value)]
    known = {"sigmasolver": sigmasolver}
    for name in [*in_order, *sorted(NAMES - {*in_order}), *ELSEWHERE]:
        example = doctest.DocTestParser().get_doctest(getattr(sigmasolver, name).__doc__, known, name, None, 0)
        assert example.examples, f"{name} has no example"
        said: list[str] = []
        result = doctest.DocTestRunner(verbose=False).run(example, out=said.append, clear_globs=False)
        assert result.failed == 0, "".join(said)
        known = example.globs


def test_the_page_of_the_documentation_runs(tmp_path, monkeypatch, models, capsys):
    monkeypatch.chdir(tmp_path)
    known: dict[str, object] = {}
    for block in re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs" / "api.md").read_text(), re.M | re.S):
        exec(block, known)
    errors = dict(line.split() for line in capsys.readouterr().out.splitlines()[1:])
    assert {*errors} == {"transolver-sigma", "persistence"}
    by_rollout = sigmasolver.metrics.relative_l2(known["forecast"].frames, known["future"])
    assert 0 < float(by_rollout) < 10
    assert (tmp_path / "page.html").stat().st_size > 10_000
    assert {record["model"] for record in known["records"]} == {"convolution", "persistence"}


def test_an_evaluation_is_the_mean_of_the_metric_over_the_windows(darcy, tmp_path):
    run = api.train_model(recipe(), darcy, tmp_path / "run")
    windows = api.open_windows(darcy, recipe(), "test")
    history, future = windows.batch(range(len(windows)))
    frames = api.rollout(run.path, history.numpy(), 1).frames
    assert torch.equal(frames, api.rollout(sigmasolver.load(run.path), history, 1).frames)
    expected = sigmasolver.metrics.relative_l2(frames, future).mean()
    records = api.evaluate_run(run)
    found = [row["value"] for row in records if row["metric"] == "relative_l2" and row["model"] == "transolver-sigma"]
    assert found == pytest.approx([float(expected)], rel=1e-12)
    assert api.evaluate_run(str(run.path)) == records  # read, not measured again


def test_imported_arrays_are_those_of_the_file(tmp_path):
    values = np.random.default_rng(0).normal(size=(4, 5, 6, 7, 2)).astype(np.float32)
    np.save(tmp_path / "own.npy", values)
    with api.open_dataset(tmp_path / "own.npy", tmp_path / "own.h5", fields=["u", "v"]) as dataset:
        assert np.array_equal(dataset[:], values) and dataset.header.layout.fields == ("u", "v")
        assert api.infer_recipe(dataset).task.inputs == ("u", "v")


def test_windows_serve_a_data_loader(darcy):
    windows = api.open_windows(darcy, recipe())
    (history, future), *_ = torch.utils.data.DataLoader(windows, batch_size=4)
    assert all(torch.equal(one, other) for one, other in zip((history, future), windows.batch(range(4)), strict=True))


class Scaled(nn.Module):
    """y = a x + b: nothing but two numbers."""

    def __init__(self, config):
        super().__init__()
        self.factor, self.offset = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.zeros(config.out_channels))

    def forward(self, x):
        return self.factor * x + self.offset


def test_a_registered_model_is_built_trained_loaded_and_listed(darcy, tmp_path, models):
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


def test_a_run_of_a_model_that_is_not_registered_says_so_at_the_command_line(darcy, tmp_path, models, call):
    sigmasolver.register_model("scaled", Scaled)
    run = api.train_model(recipe(model="scaled"), darcy, tmp_path / "run")
    del variants.MODELS["scaled"]
    for command in (("evaluate", run.path), ("train", "--resume", run.path)):
        code, _, error = call(*command)
        assert code == 2 and "sigmasolver.register_model first" in error and error.count("\n") == 1


def test_own_arrays_are_described_in_the_words_of_the_command_line(tmp_path):
    values = np.random.default_rng(0).normal(size=(6, 5, 8, 6, 2)).astype(np.float32)
    np.save(tmp_path / "a.npy", values.transpose(4, 3, 2, 1, 0))
    words = {"fields": ["u", "v"], "axes": ["field", "y", "x", "time", "count"], "boundary": ["periodic", "wall"]}
    words |= {"dt": 0.5, "units": ["m/s", "m/s"]}
    with api.open_dataset(tmp_path / "a.npy", **words) as data:
        layout = data.header.layout
        assert (layout.boundary, layout.units, layout.times[1]) == (("periodic", "wall"), ("m/s", "m/s"), 0.5)
        np.testing.assert_array_equal(data[:], values)
        sizes = ["model.width=8", "model.depth=1", "model.heads=2", "model.slices=2", "model.modes=2"]
        sizes += ["task.history=2", "task.block=1", "task.horizon=2", "train.updates=2"]
        chosen = api.infer_recipe(data, settings=sizes)
        assert chosen.model.options.padding == ("circular", "zeros")
        run = api.train_model(chosen, data, tmp_path / "run")
    assert not list((tmp_path / "run").glob("*.h5"))
    rows = api.evaluate_run(run)
    with api.open_dataset(tmp_path / "a.npy", tmp_path / "a.h5", **words) as store:
        np.testing.assert_array_equal(store[:], values)
        assert store.header.layout.boundary == ("periodic", "wall")
        again = api.evaluate_run(api.train_model(chosen, store, tmp_path / "again"))
    for one, two in zip(rows, again, strict=True):
        assert one["value"] == two["value"], "read in place or imported, the numbers are the same"


@pytest.mark.parametrize(
    ("use", "said"),
    [
        (lambda: sigmasolver.register_model("fno", Scaled), 'The model "fno" already exists'),
        (lambda: sigmasolver.register_model("my model", Scaled), '"my model" is not a valid name for a model'),
        (lambda: sigmasolver.register_model("", Scaled), "is not a valid name for a model"),
        (lambda: sigmasolver.register_model("mine", 3), "must be a function of a SolverConfig, not int"),
        (lambda: sigmasolver.build_model("scaled", grid=(8,), in_channels=1, out_channels=1), "Unknown model"),
    ],
)
def test_what_cannot_be_registered_is_refused(use, said, models):
    before = sigmasolver.list_models()
    with pytest.raises(ValueError, match=said):
        use()
    assert sigmasolver.list_models() == before


def test_a_builder_that_returns_no_module_is_told(models):
    sigmasolver.register_model("broken", SolverConfig.__str__)
    with pytest.raises(ValueError, match=r'The builder of "broken" returned str; it must return an nn\.Module'):
        sigmasolver.build_model("broken", grid=(8,), in_channels=1, out_channels=1)


@pytest.mark.parametrize(
    ("use", "said"),
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
def test_bad_input_is_told_in_one_sentence_before_anything_is_written(darcy, tmp_path, use, said):
    with pytest.raises(ValueError, match=said) as error:
        use(darcy, tmp_path)
    assert "\n" not in str(error.value) and not [one for one in tmp_path.iterdir() if one.name != "waves.npy"]
