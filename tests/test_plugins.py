"""User-defined models, losses, optimisers and tasks: from a program, a plugin file and an installed package."""

import hashlib
import json
import sys
from dataclasses import replace

import pytest
import torch

import sigmasolver
from sigmasolver import plugins
from sigmasolver.data.normalise import fit
from sigmasolver.diagnose.workload import _in_a_process
from sigmasolver.forecast.checkpoint import build, load
from sigmasolver.recipes import ModelRecipe, Recipe, TrainRecipe, changed, register_task
from sigmasolver.runs import Run, read_tensors
from sigmasolver.simulate.generate import generate
from sigmasolver.simulate.vorticity import DEMO
from sigmasolver.symmetries import SYMMETRIES, SymmetryGroup, register_symmetries
from sigmasolver.tasks import Task
from sigmasolver.train.engine import Execution, Stepper
from sigmasolver.train.job import resume_run, train_run
from sigmasolver.train.loop import StepPlan
from sigmasolver.train.objectives import Loss, register_loss
from sigmasolver.train.optimisers import register_optimiser
from tests.registered import forgotten

FLOW = replace(DEMO, grid=32, stored=16, step=1 / 64, burn_in=1.0, frames=8)
TASK = Task("tiny", ("vorticity",), ("vorticity",), (16, 16), 2, 1, 3, 6, 2, "channel")
RECIPE = Recipe(TASK, ModelRecipe(name="fno", width=8, depth=1, heads=2), TrainRecipe(updates=8, batch=4, checks=2))

PLUGIN = """
import torch, sigmasolver
from sigmasolver.recipes import register_task
from sigmasolver.tasks import Task
from sigmasolver.train.objectives import register_loss
from sigmasolver.train.optimisers import register_optimiser

class Mine(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.layer = torch.nn.Linear(config.in_channels, config.out_channels)
    def forward(self, x):
        return self.layer(x)

def mean_absolute(recipe, normaliser):
    return lambda prediction, truth: (normaliser.encode(prediction) - normaliser.encode(truth)).abs().flatten(1).mean(1)

sigmasolver.register_model("mine", Mine)
register_loss("mean_absolute", mean_absolute)
register_optimiser("momentum", lambda parameters, train: torch.optim.SGD(parameters, momentum=0.9))
register_task(
    "mine-task", Task("mine-task", ("vorticity",), ("vorticity",), (16, 16), 2, 1, 3, 6, 2, "channel")
)
"""
OWN = (
    "--model",
    "mine",
    "--set",
    "train.loss=mean_absolute",
    "--set",
    "train.optimiser=momentum",
    "--set",
    "train.updates=3",
)


@pytest.fixture(autouse=True, name="forgotten")
def forgets():
    """Undo registrations and plugin imports after each test; call the fixture to undo them earlier."""
    with forgotten() as forget:
        yield forget


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "flow.h5"
    generate(FLOW, 8, 0, path)
    return path


@pytest.fixture
def plugin(tmp_path):
    (tmp_path / "mine.py").write_text(PLUGIN)
    return tmp_path / "mine.py"


def trained(data, folder, **settings):
    run = Run(folder)
    train_run(replace(RECIPE, train=replace(RECIPE.train, **settings)), data, run)
    return read_tensors(run.weights)[0]


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


# --- losses and optimisers


def test_registered_copies_of_loss_and_optimiser_train_identically(data, tmp_path):
    register_loss("twin", lambda recipe, normaliser: lambda p, t: Loss(((0,),))(p, t))
    register_optimiser(
        "twin", lambda parameters, train: torch.optim.AdamW(parameters, weight_decay=train.weight_decay, fused=True)
    )
    expected = trained(data, tmp_path / "built-in")
    assert same(trained(data, tmp_path / "own", loss="twin", optimiser="twin"), expected)
    assert not same(trained(data, tmp_path / "other", loss="squared"), expected)


def test_registered_optimiser_may_have_a_scheduler(data, tmp_path):
    """The trainer sets the learning rate anyway."""

    def scheduled(parameters, train):
        optimiser = torch.optim.SGD(parameters, momentum=0.9)
        torch.optim.lr_scheduler.ConstantLR(optimiser, factor=1.0)
        return optimiser

    register_optimiser("scheduled", scheduled)
    register_optimiser("momentum", lambda parameters, train: torch.optim.SGD(parameters, momentum=0.9))
    assert same(*(trained(data, tmp_path / name, optimiser=name) for name in ("scheduled", "momentum")))


def test_registered_loss_gets_physical_units_and_the_target_normaliser(data, tmp_path):
    calls = []

    def build(recipe, normaliser):
        def loss(prediction, truth):
            calls.append((recipe, normaliser, truth))
            return (prediction - truth).square().flatten(1).mean(1)

        return loss

    register_loss("record_slices", build)
    trained(data, tmp_path / "run", loss="record_slices", updates=1)
    recipe, normaliser, truth = calls[0]
    assert recipe.task == TASK and normaliser.fields == TASK.targets and truth.shape == (4, 1, 16, 16, 1)
    encoded = normaliser.encode(truth)
    assert 0.5 < float(encoded.std()) < 2 and not torch.equal(encoded, truth)


class Descent(torch.optim.Optimizer):
    """Gradient descent with a float learning rate and a Python step count."""

    def __init__(self, parameters, rates):
        super().__init__(parameters, {"lr": 1.0})
        self.rates = rates

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            self.rates.append(group["lr"])
            for parameter in group["params"]:
                count = self.state[parameter]["count"] = self.state[parameter].get("count", 0) + 1
                parameter.sub_((group["lr"] * 0.9**count) * parameter.grad)


def test_registered_optimiser_gets_the_learning_rate_of_every_step(data, tmp_path):
    rates = []
    register_optimiser("descent", lambda parameters, train: Descent(parameters, rates))
    trained(data, tmp_path / "run", optimiser="descent")
    with sigmasolver.open_dataset(data):
        windows = sigmasolver.open_windows(data, RECIPE)
        expected = StepPlan(RECIPE, windows).rates().tolist()
    assert rates == expected and len(set(rates)) > 5


@pytest.mark.parametrize("name", ["descent", "plain-descent", "momentum"])
def test_registered_optimiser_resumes_exactly(data, tmp_path, name):
    """With numbers, tensors, or nothing in the optimiser state."""
    register_optimiser("descent", lambda parameters, train: Descent(parameters, []))
    register_optimiser("plain-descent", lambda parameters, train: torch.optim.SGD(parameters))
    register_optimiser("momentum", lambda parameters, train: torch.optim.SGD(parameters, momentum=0.9))
    uninterrupted, run = trained(data, tmp_path / "whole", optimiser=name), Run(tmp_path / "stopped")
    stops = iter((False, False, True))
    recipe = replace(RECIPE, train=replace(RECIPE.train, optimiser=name))
    train_run(recipe, data, run, stop=lambda: next(stops, True))
    assert not run.weights.exists()
    resume_run(run)
    assert same(uninterrupted, read_tensors(run.weights)[0])


class Hoarder(torch.optim.SGD):
    def step(self):
        super().step()
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["past"] = [1, 2]


@pytest.mark.parametrize(
    ("register", "settings", "message"),
    [
        (lambda: None, {"loss": "relativ_l2"}, 'Unknown loss "relativ_l2"; did you mean relative_l2?'),
        (lambda: None, {"optimiser": "adam"}, 'Unknown optimiser "adam"; did you mean adamw?'),
        (
            lambda: register_loss("scalar", lambda recipe, normaliser: lambda p, t: (p - t).mean()),
            {"loss": "scalar"},
            'The loss "scalar" returned the shape (); it must return one number for each of 4 samples.',
        ),
        (
            lambda: register_loss("number", lambda recipe, normaliser: lambda p, t: 3.0),
            {"loss": "number"},
            'The loss "number" returned float',
        ),
        (
            lambda: register_loss("nothing", lambda recipe, normaliser: None),
            {"loss": "nothing"},
            "returned NoneType; it must return a function",
        ),
        (
            lambda: register_optimiser("nothing", lambda parameters, train: None),
            {"optimiser": "nothing"},
            "returned NoneType; it must return a torch.optim.Optimizer",
        ),
        (
            lambda: register_optimiser("hoarder", lambda parameters, train: Hoarder(parameters)),
            {"optimiser": "hoarder"},
            "The optimiser hoarder keeps past as list",
        ),
        (
            lambda: register_loss(
                "detached", lambda recipe, normaliser: lambda p, t: (p - t).detach().flatten(1).sum(1)
            ),
            {"loss": "detached"},
            'The loss "detached" of the model "fno" has no gradient',
        ),
        (
            lambda: register_optimiser("newton", lambda parameters, train: torch.optim.LBFGS(parameters)),
            {"optimiser": "newton"},
            'The optimiser "newton" needs a closure that evaluates the loss again',
        ),
    ],
)
def test_registered_loss_and_optimiser_errors(data, tmp_path, register, settings, message):
    register()
    with pytest.raises(ValueError) as caught:
        trained(data, tmp_path / "run", **settings)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_model_without_trainable_parameters_is_refused(data, tmp_path):
    class Frozen(torch.nn.Linear):
        def __init__(self, config):
            super().__init__(config.in_channels, config.out_channels)
            self.requires_grad_(False)

    sigmasolver.register_model("average", lambda config: torch.nn.AvgPool1d(config.in_channels // config.out_channels))
    sigmasolver.register_model("frozen", Frozen)
    for name in ("average", "frozen"):
        recipe = replace(RECIPE, model=replace(RECIPE.model, name=name))
        with pytest.raises(ValueError, match=f'The model "{name}" has no trainable parameters; give it at least one'):
            train_run(recipe, data, Run(tmp_path / name))
        assert not (tmp_path / name).exists()


def test_captured_step_refuses_an_optimiser_that_is_not_capturable(data, monkeypatch):
    register_optimiser("momentum", lambda parameters, train: torch.optim.SGD(parameters, momentum=0.9))
    execution = Execution()
    monkeypatch.setattr(Execution, "captured", True)
    recipe = replace(RECIPE, train=replace(RECIPE.train, optimiser="momentum"))
    windows = sigmasolver.open_windows(data, recipe)
    with pytest.raises(ValueError, match=r"needs an optimiser with capturable=True, but momentum is not one"):
        plan = StepPlan(recipe, windows)
        Stepper(recipe, build(recipe, *fit("channel", windows)), windows, plan.members, plan.rates(), execution)


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda: register_loss("squared", print), 'The loss "squared" already exists'),
        (lambda: register_optimiser("my own", print), '"my own" is not a valid name for an optimiser'),
        (lambda: register_loss("mine", 3), "must be a function of a recipe and a normaliser, not int"),
        (lambda: register_optimiser("mine", 3), "must be a function of parameters and settings, not int"),
        (lambda: register_task("mine", "kf2d"), '"mine" must be a Task or a Recipe, not str'),
        (lambda: register_task("kf2d", TASK), 'The recipe "kf2d" already exists'),
    ],
)
def test_register_errors(use, message):
    with pytest.raises(ValueError) as caught:
        use()
    assert message in str(caught.value)


def test_register_task_gives_a_recipe_with_default_settings():
    register_task("tiny", TASK)
    register_task("tiny-fno", RECIPE)
    assert sigmasolver.recipe_of("tiny", seed=3) == Recipe(TASK, train=TrainRecipe(seed=3))
    assert sigmasolver.recipe_of("tiny-fno") == RECIPE


# --- plugin files


def test_plugin_works_with_every_command_and_is_reported_if_missing(call, data, plugin, tmp_path, forgotten):
    run = tmp_path / "run"
    with_plugin = ("--plugin", plugin, "--device", "cpu")
    code, _, err = call("train", "mine-task", "--data", data, "--out", run, *OWN, *with_plugin)
    assert code == 0, err
    expected = {"plugin": "mine.py", "sha256": hashlib.sha256(plugin.read_bytes()).hexdigest()}
    assert json.loads((run / "origins.json").read_text()) == {
        "model": expected,
        "loss": expected,
        "optimiser": expected,
    }
    train = json.loads((run / "recipe.json").read_text())["train"]
    assert (train["loss"], train["optimiser"]) == ("mean_absolute", "momentum")
    forgotten()
    (tmp_path / "run" / "mine.py").write_text("raise SystemExit('a run folder was executed')")
    for arguments in (
        ("evaluate", run),
        ("diagnose", run),
        ("forecast", run, "--input", data, "--out", tmp_path / "f.h5"),
    ):
        code, _, err = call(*arguments)
        origin = f"mine.py (sha256 {expected['sha256'][:12]})"
        text = f'trained with the model "mine" from the plugin {origin}, which is not registered'
        assert code == 2 and text in err and "pass that file with --plugin" in err and err.count("\n") == 1, arguments
    for arguments in (
        ("evaluate", run, *with_plugin),
        ("forecast", run, "--input", data, "--out", tmp_path / "f.h5", *with_plugin),
        ("plan", "mine-task", *OWN, *with_plugin),
        ("report", run, "--out", tmp_path / "page.html", "--plugin", plugin),
        ("train", "--resume", run, *with_plugin),
        ("settings", "mine-task", "--plugin", plugin),
    ):
        forgotten()
        code, out, err = call(*arguments)
        assert code == 0, (arguments, out, err)
    assert "mine" in (tmp_path / "page.html").read_text()


def test_save_pretrained_publishes_a_plugin_model(call, data, plugin, tmp_path, forgotten):
    run, folder = tmp_path / "run", tmp_path / "published"
    assert call("train", "mine-task", "--data", data, "--out", run, *OWN, "--plugin", plugin, "--device", "cpu")[0] == 0
    forgotten()
    code, _, err = call("save-pretrained", run, "--out", folder)
    assert code == 2 and "pass that file with --plugin" in err and not folder.exists()
    code, _, err = call("save-pretrained", run, "--out", folder, "--plugin", plugin)
    assert code == 0, err
    assert "The model `mine` is custom" in (folder / "README.md").read_text()
    history = torch.randn(2, 2, 16, 16, 1)
    assert torch.equal(load(folder)(history), load(run)(history))
    forgotten()
    with pytest.raises(ValueError, match=r'model "mine" from the plugin mine\.py'):
        load(folder)


def test_missing_plugin_loss_stops_training_but_not_evaluation(call, data, plugin, tmp_path, forgotten):
    arguments = ("train", "mine-task", "--data", data, "--out", tmp_path / "run", *OWN, "--set", "model.name=fno")
    assert call(*arguments, "--plugin", plugin, "--device", "cpu")[0] == 0
    forgotten()
    run = Run(tmp_path / "run")
    assert load(run.path)(torch.zeros(1, 2, 16, 16, 1)).shape == (1, 1, 16, 16, 1)
    assert call("evaluate", run.path, "--device", "cpu")[0] == 0
    code, out, err = call("diagnose", run.path, "--only", "efficiency", "--device", "cpu")
    assert code == 0 and "parameters" in out and "s per epoch" not in out, err
    with pytest.raises(ValueError, match=r'with the loss "mean_absolute" from the plugin mine\.py'):
        resume_run(run)


def test_changed_plugin_is_reported(call, data, plugin, tmp_path, forgotten):
    run = tmp_path / "run"
    arguments = ("train", "mine-task", "--data", data, "--out", run, *OWN)
    assert call(*arguments, "--plugin", plugin, "--device", "cpu")[0] == 0
    forgotten()
    plugin.write_text(PLUGIN + "# another line\n")
    code, _, err = call("evaluate", run, "--plugin", plugin, "--device", "cpu")
    digest = hashlib.sha256(plugin.read_bytes()).hexdigest()[:12]
    assert code == 0 and "was trained with the model from the plugin mine.py" in err and digest in err
    assert json.loads((run / "origins.json").read_text())["model"]["sha256"][:12] != digest


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import torch\nx = 1 / 0\n", "failed at line 2 with ZeroDivisionError: division by zero"),
        ("def f(:\n", "failed at line 1 with SyntaxError"),
        ("import sys\nsys.exit(3)\n", "failed at line 2 with SystemExit: 3"),
        ("import torch\n", "registers nothing; call sigmasolver.register_model"),
        ("import sigmasolver\nsigmasolver.register_model('fno', print)\n", 'The model "fno" already exists'),
        (None, "not found; pass a Python file"),
    ],
)
def test_plugin_errors(call, tmp_path, text, message):
    if text is not None:
        (tmp_path / "bad.py").write_text(text)
    code, _, err = call("plan", "darcy", "--plugin", tmp_path / "bad.py")
    assert code == 2 and message in err and err.count("\n") == 1


def test_load_plugin_runs_once_and_allows_imports_beside_it(tmp_path):
    (tmp_path / "beside_the_plugin.py").write_text("NAME = 'beside'\n")
    (tmp_path / "mine.py").write_text(
        "import sigmasolver, beside_the_plugin\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass Sizes:\n    width: int = 3\n"
        "sigmasolver.register_model(beside_the_plugin.NAME, lambda config: None)\n"
    )
    for _ in range(2):
        plugins.load_plugin(tmp_path / "mine.py")
    assert "beside" in sigmasolver.list_models() and plugins.loaded_plugins() == ((tmp_path / "mine.py").resolve(),)


def test_plugin_is_loaded_in_measuring_processes(plugin, data):
    plugins.load_plugin(plugin)
    recipe = replace(RECIPE, model=ModelRecipe(name="mine"), train=replace(RECIPE.train, loss="mean_absolute", batch=2))
    timing = _in_a_process("mine", recipe, data, torch.device("cpu"), 0.01)
    assert timing.update_seconds > 0 and timing.peak > 0


# --- installed packages


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An installed package as pip writes it: a module, and metadata with entry points."""
    site = tmp_path / "site"
    info = site / "foreign_package-1.2.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: foreign-package\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(
        "[sigmasolver.models]\nforeign = foreign_package:build\n\n"
        "[sigmasolver.losses]\nforeign = foreign_package:loss\n\n"
        "[sigmasolver.optimisers]\nforeign = foreign_package:optimiser\n\n"
        "[sigmasolver.tasks]\nforeign = foreign_package:TASK\n"
    )
    (site / "foreign_package.py").write_text(
        "import torch\nfrom sigmasolver.tasks import Task\n"
        "def build(config):\n    return torch.nn.Linear(config.in_channels, config.out_channels)\n"
        "def loss(recipe, normaliser):\n    return lambda p, t: (p - t).square().flatten(1).mean(1)\n"
        "def optimiser(parameters, train):\n    return torch.optim.SGD(parameters)\n"
        "TASK = Task('foreign', ('vorticity',), ('vorticity',), (16, 16), 2, 1, 3, 6, 2, 'channel')\n"
    )
    monkeypatch.syspath_prepend(site)
    return site


def test_entry_point_package_is_loaded_on_first_use(package, data, tmp_path, forgotten, monkeypatch):
    sigmasolver.build_model("fno", grid=(8, 8), in_channels=1, out_channels=1, width=8, heads=2, depth=1)
    assert "foreign" in sigmasolver.list_models() and "foreign_package" not in sys.modules
    recipe = sigmasolver.recipe_of(
        "foreign", "foreign", settings=["train.loss=foreign", "train.optimiser=foreign", "train.updates=2"]
    )
    assert recipe.task.name == "foreign" and "foreign_package" in sys.modules
    train_run(recipe, data, Run(tmp_path / "run"))
    expected = {"package": "foreign-package", "version": "1.2"}
    origins = json.loads((tmp_path / "run" / "origins.json").read_text())
    assert origins == {"model": expected, "loss": expected, "optimiser": expected}
    forgotten()
    monkeypatch.undo()
    sys.path[:] = [entry for entry in sys.path if entry != str(package)]
    with pytest.raises(
        ValueError, match=r'"foreign" from the package foreign-package 1\.2, which .*; install that package'
    ):
        load(tmp_path / "run")


# --- symmetries


def test_registered_symmetries_are_used_and_missed(data, tmp_path, forgotten):
    mirror = SymmetryGroup(SYMMETRIES["kolmogorov-4"].isometries[:2], periodic=True)
    register_symmetries("half-turn", mirror)
    recipe = changed(RECIPE, ["task.symmetries=half-turn", "train.augment=true"])
    run = Run(tmp_path / "run")
    train_run(recipe, data, run)
    assert not same(read_tensors(run.weights)[0], trained(data, tmp_path / "usual"))
    with pytest.raises(ValueError, match="must be a SymmetryGroup, not str"):
        register_symmetries("square-again", "square")
    forgotten()
    with pytest.raises(ValueError, match='was trained with the symmetry group "half-turn", which is not registered'):
        resume_run(run, data)
    with pytest.raises(ValueError, match='Unknown symmetry group "half-turn"'):
        train_run(recipe, data, Run(tmp_path / "other"))
