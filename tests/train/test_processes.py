"""Two processes on one machine learn what one process learns from the same global batch, and measure the same."""

import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

import sigmasolver
from sigmasolver.data.generate import generate
from sigmasolver.evaluate import Request, evaluate_run
from sigmasolver.parallel import join
from sigmasolver.recipes import ModelRecipe, Recipe, TrainRecipe
from sigmasolver.runs import Run, read_facts, read_rows, read_tensors
from sigmasolver.simulate.vorticity import DEMO
from sigmasolver.tasks import Task
from sigmasolver.train import job
from sigmasolver.train.engine import Place, Stepper

ROOT = Path(sigmasolver.__file__).parents[1]
FLOW = replace(DEMO, grid=32, stored=16, step=1 / 64, burn_in=1.0, frames=8)
TASK = Task("tiny", ("vorticity",), ("vorticity",), (16, 16), 2, 1, 3, 6, 2, "channel")
MODEL = ModelRecipe(width=16, depth=2, heads=2, slices=4, modes=3)
RECIPE = Recipe(TASK, MODEL, TrainRecipe(updates=20, batch=4, seed=3, clip=1.0, checks=1))


def work(path: str, folder: str) -> None:
    """What every process does, one training after the other: whole models, split ones, split ones with a stop."""
    torch.set_num_threads(1)
    with join(torch.device("cpu")) as world:
        learn(path, Run(f"{folder}/two"), Place(world))
        learn(path, Run(f"{folder}/split"), Place(world, shard=True))
        run, place = Run(f"{folder}/resumed"), Place(world, shard=True)
        with pytest.raises(KeyboardInterrupt):  # stop in the middle, and go on
            train_half(path, run, place)
        world.wait()
        assert read_facts(run.resume)["step"] == 10
        learn(path, run, place)


def learn(path, run, place):
    job.train_run(RECIPE, path, run, place)
    evaluate_run(run, Request(batch=3), world=place.world)


def train_half(path, run, place):
    """Ten of the twenty steps, the state kept after every five."""
    original = Stepper.run

    def limited(self, step):
        if step == 12:
            raise KeyboardInterrupt
        original(self, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stepper, "run", limited)
        patch.setattr(job, "train", partial(job.train, look=5, keep_seconds=0))
        job.train_run(RECIPE, path, run, place)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    generate(FLOW, 8, 0, folder / "flow.h5")
    learn(folder / "flow.h5", Run(folder / "one"), Place())
    script = folder / "work.py"
    script.write_text("import sys; from tests.train.test_processes import work; work(*sys.argv[1:])")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [sys.executable, *launcher, str(script), str(folder / "flow.h5"), str(folder)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return {name: Run(folder / name) for name in ("one", "two", "split", "resumed")}


def distance(first, second):
    """Of all weights as one vector. (Adam blows the round-off of a vanishing gradient up to a step, so a single small
    parameter may differ more.)"""
    alone, together = (read_tensors(run.weights)[0] for run in (first, second))
    assert set(alone) == set(together)
    a, b = (torch.cat([tensors[key].flatten().double() for key in alone]) for tensors in (alone, together))
    return float((a - b).norm() / a.norm())


@pytest.mark.parametrize("name", ["two", "split"])
def test_two_processes_give_the_weights_of_one(runs, name):
    assert distance(runs["one"], runs[name]) < 1e-5


@pytest.mark.parametrize("name", ["two", "split"])
def test_the_log_tells_the_loss_of_the_whole_batch(runs, name):
    alone, together = (read_rows(runs[key].log)[-1] for key in ("one", name))
    assert together["loss"] == pytest.approx(alone["loss"], rel=1e-5)
    assert together["error"] == pytest.approx(alone["error"], rel=1e-5)


def test_the_shared_evaluation_has_every_window_once_and_the_same_numbers(runs):
    """The weights differ by round-off, so the yardstick (which has none) must agree exactly, the model nearly."""
    alone, together = (read_rows(runs[key].records) for key in ("one", "two"))
    assert len(alone) == len(together) > 20
    for one, two in zip(alone, together, strict=True):
        assert all(one[key] == two[key] for key in ("model", "metric", "field", "lead", "windows"))
        if one["model"] == "persistence" or one["value"] is None:
            assert one["value"] == two["value"]
        else:
            assert two["value"] == pytest.approx(one["value"], rel=1e-3)


def test_split_weights_go_on_where_they_stopped(runs):
    """What is kept is whole, so a run that was begun by two processes can be finished by any number."""
    assert distance(runs["one"], runs["resumed"]) < 1e-5


def test_processes_leave_a_suite_together_when_its_time_is_up(tmp_path):
    """One of them simulates, the others wait for it; a simulation that is cut off must not leave them waiting."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    sizes = [word for one in ("task.train=2", "task.test=1") for word in ("--set", one)]
    words = ["suite", "ledger", "--only", "darcy-ffno-*", "--data-seed", "0", "--minutes", "1e-9", *sizes]
    done = subprocess.run(
        [sys.executable, *launcher, "-m", "sigmasolver", *words, "--device", "cpu"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "stopped by --minutes while simulating darcy (0.0 % trained)" in done.stdout
