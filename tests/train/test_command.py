"""The training command that `inspect` suggests: it runs as printed, with the task of the format and its settings."""

import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from sigmasolver import infer_recipe
from sigmasolver.cli import app
from sigmasolver.data.constant import constant_fields, stated_constant
from sigmasolver.data.formats import open_data
from sigmasolver.data.header import Header
from sigmasolver.data.inspect import Summary, summarise
from sigmasolver.data.layout import Layout
from sigmasolver.forecast.checkpoint import load_recipe
from sigmasolver.runs import Run
from sigmasolver.simulate.fixtures import FIXTURES
from sigmasolver.tasks import TASKS
from sigmasolver.train.command import train_command


def summary_of(header, count, path="data"):
    return Summary(Path(path), header, None, count, count, 0, (), None, ())


def header_of(task, fields, grid, frames=200, source="realpdebench", **parameters):
    coordinates, times = tuple(np.arange(float(points)) for points in grid), np.arange(float(frames))
    layout = Layout(fields, ("1",) * len(fields), ("open",) * len(grid), coordinates, times)
    return Header(layout, source, parameters)


def write_npz(path, values, **arrays):
    np.savez(path, fields=values, names=np.array(["u", "v", "w"][: values.shape[-1]]), **arrays)
    return path


def flow(count=4, frames=8, fields=2):
    return np.random.default_rng(0).standard_normal((count, frames, 6, 5, fields)).astype(np.float32)


TIMES = {"times": np.arange(8.0)}


@pytest.fixture(scope="module")
def fixtures(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fixtures")
    return {name: FIXTURES[name].write(folder / name, 0) for name in ("fsi", "combustion", "ignit-hit", "netcdf")}


@pytest.mark.parametrize("name", ["fsi", "combustion", "ignit-hit", "netcdf"])
def test_printed_command_trains_the_task_of_the_format(fixtures, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    data = next(iter(fixtures[name].glob("*.nc"))) if name == "netcdf" and fixtures[name].is_dir() else fixtures[name]
    output = CliRunner().invoke(app, ["inspect", str(data)]).stdout
    arguments = shlex.split(
        next(line for line in output.splitlines() if line.startswith("next: ")).removeprefix("next: ")
    )
    short = [
        option for setting in ("train.updates=1", "train.checks=0", "model.depth=1") for option in ("--set", setting)
    ]
    done = CliRunner().invoke(app, [*arguments[1:], *short])
    assert done.exit_code == 0, (arguments, done.output, done.exception)
    task = load_recipe(Run(Path(arguments[arguments.index("--out") + 1]))).task
    if name == "netcdf":
        assert task.targets == ("vorticity", "velocity_x", "velocity_y")
    else:
        assert (task.name, task.targets, task.normaliser) == (name, TASKS[name].targets, TASKS[name].normaliser)
        assert task.horizon == TASKS[name].horizon


def test_infer_recipe_takes_constant_parameters_as_inputs_only(fixtures):
    with open_data(fixtures["fsi"]) as data:
        assert stated_constant(data.header) == constant_fields(data) == ("reynolds", "mass_ratio", "damping")
    task = infer_recipe(fixtures["fsi"]).task
    assert task.targets == ("velocity_x", "velocity_y")
    assert task.inputs == (*task.targets, "reynolds", "mass_ratio", "damping")


FSI = ("velocity_x", "velocity_y", "reynolds", "mass_ratio", "damping")
CYLINDER = ("velocity_x", "velocity_y", "pressure", "reynolds")
LISTED = {"train": [(0, 0, 100, 10)], "validation": [], "test": [(0, 100, 160, 10)]}


@pytest.mark.parametrize(
    ("header", "count", "sets"),
    [
        (header_of("fsi", FSI, (128, 128)), 51, []),
        (header_of("fsi", FSI, (128, 128), windows=LISTED), 1, []),  # the window lists define the training part
        (header_of("fsi", FSI, (128, 128), windows=LISTED | {"train": [(0, 0, 3, 1)]}), 1, ["train.batch=3"]),
        (header_of("fsi", FSI, (128, 128)), 10, ["task.train=8", "task.test=2"]),
        (header_of("cylinder", CYLINDER, (128, 256)), 92, ["task.space_stride=2"]),
        (header_of("fsi", FSI, (20, 12), frames=40), 51, ["task.grid=(10, 6)", "model.modes=3"]),
        (header_of("ignit-hit", TASKS["ignit-hit"].targets, (128, 128), 12, "realm"), 36, ["task.horizon=11"]),
        (header_of("evolve-jet", TASKS["evolve-jet"].targets, (256, 256), 40, "realm"), 30, []),
    ],
)  # fmt: skip
def test_train_command_sets_options_for_partial_data(header, count, sets):
    arguments = shlex.split(train_command(summary_of(header, count)))
    assert arguments[2] == arguments[6].removeprefix("runs/") and arguments[2] in TASKS
    assert [arguments[index + 1] for index, argument in enumerate(arguments) if argument == "--set"] == sets


def test_train_command_of_too_few_frames_or_trajectories_names_no_task():
    short = header_of("fsi", FSI, (128, 128), frames=39)
    assert train_command(summary_of(short, 51)) == "sigmasolver train --data data --out runs/data"
    assert " fsi " not in train_command(summary_of(header_of("fsi", FSI, (128, 128)), 1))


def test_train_command_of_own_data_and_of_exact_tasks(tmp_path):
    summary = summarise(write_npz(tmp_path / "my flow.npz", flow(), **TIMES))
    assert train_command(summary) == f"sigmasolver train --data '{tmp_path}/my flow.npz' --out 'runs/my flow'"
    steady = summarise(write_npz(tmp_path / "steady.npz", flow()[:, :1], times=np.zeros(1)))
    assert train_command(steady).endswith("--out runs/steady --targets v")
    x = np.arange(64) / 64
    layout = Layout(("vorticity",), ("1/time",), ("periodic",) * 2, (x, x), np.arange(1.0, 21))
    task = replace(summary, header=Header(layout, "fno-ns", {}), whole=1200, path=Path("ns.h5"))
    assert train_command(task) == "sigmasolver train ns2d --data ns.h5 --out runs/ns2d"
    assert "train --data ns.h5" in train_command(replace(task, whole=100))


def test_train_command_of_bad_or_uneven_data_is_accepted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    values = flow()
    values[1, 2, 3, 3, 1] = np.nan
    bad = write_npz(tmp_path / "bad.npz", values, times=np.array([0.0, 1, 2, 3, 4, 5, 6, 9]))
    command = train_command(summarise(bad))
    assert command.endswith("--skip-bad --set model.options.time_embedding=true")
    done = CliRunner().invoke(app, [*shlex.split(command)[1:], "--set", "train.updates=1", "--set", "train.checks=0"])
    assert done.exit_code == 0, (done.output, done.exception)
    values[:3, 2, 3, 3, 1] = np.inf
    assert train_command(summarise(write_npz(tmp_path / "worse.npz", values, **TIMES))) is None
    output = CliRunner().invoke(app, ["inspect", str(tmp_path / "worse.npz")]).stdout
    assert output.endswith("next: fix the non-finite values\n")


def test_infer_recipe_takes_constant_fields_as_inputs_only(tmp_path):
    values = flow(fields=3)
    values[..., 1] = values[:, :1, ..., 1]
    values[..., 2] = values[:, :1, ..., 2]
    assert infer_recipe(write_npz(tmp_path / "two.npz", values, **TIMES)).task.targets == ("u",)
    assert infer_recipe(tmp_path / "two.npz").task.inputs == ("u", "v", "w")
    values[3, 5, 0, 0, 2] += 1  # one value, outside the frames that are checked first
    with open_data(write_npz(tmp_path / "one.npz", values, **TIMES)) as data:
        assert constant_fields(data) == ("v",) and constant_fields(data, ("u", "w")) == ()
    run = ["train", "--data", str(tmp_path / "one.npz"), "--out", str(tmp_path / "run"), "--set", "train.updates=1"]
    done = CliRunner().invoke(app, run)
    assert done.exit_code == 0, done.exception
    assert "fields: u, w forecast, other inputs: v" in done.stdout
    done = CliRunner().invoke(app, [*run[:4], str(tmp_path / "named"), *run[5:], "--targets", "u,v,w"])
    assert done.exit_code == 0 and "fields: u, v, w forecast, other inputs: none" in done.stdout  # explicit targets win
