"""Two processes on one machine learn what one process learns from the same global batch, and measure the same."""

import os
import socket
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

import sigmasolver
from sigmasolver.evaluate import Request, evaluate_run
from sigmasolver.recipes import ModelRecipe, Recipe, TrainRecipe, changed
from sigmasolver.runs import Run, read_facts, read_rows, read_tensors
from sigmasolver.runtime.parallel import join
from sigmasolver.simulate.generate import generate
from sigmasolver.simulate.vorticity import DEMO
from sigmasolver.tasks import Task
from sigmasolver.train import job
from sigmasolver.train.engine import Execution, Stepper
from tests.forked import Forked

ROOT = Path(sigmasolver.__file__).parents[1]
FLOW = replace(DEMO, grid=32, stored=16, step=1 / 64, burn_in=1.0, frames=8)
TASK = Task("tiny", ("vorticity",), ("vorticity",), (16, 16), 2, 1, 3, 6, 2, "channel")
MODEL = ModelRecipe(width=16, depth=2, heads=2, slices=4, modes=3)
RECIPE = Recipe(TASK, MODEL, TrainRecipe(updates=20, batch=4, seed=3, clip=1.0, checks=1))
RECOMPUTED = changed(RECIPE, ["train.recompute=true"])
FORCED = changed(RECIPE, ["model.depth=1", "train.objective=teacher_forced", "train.updates=12"])
ACCUMULATED = changed(FORCED, ["train.accumulate=true"])


def work(path: str, folder: str) -> None:
    """What every process does, one training after the other, because starting two processes takes longer than these:
    whole models, split ones, split ones with a stop; blocks that run again; accumulated updates."""
    torch.set_num_threads(1)
    with join(torch.device("cpu")) as world:
        learn(path, Run(f"{folder}/two"), Execution(world))
        learn(path, Run(f"{folder}/split"), Execution(world, shard=True))
        run, execution = Run(f"{folder}/resumed"), Execution(world, shard=True)
        with pytest.raises(KeyboardInterrupt):  # stop in the middle, and go on
            train_half(path, run, execution)
        world.wait()
        assert read_facts(run.resume)["step"] == 10
        learn(path, run, execution)
        for shard, name in ((False, "two"), (True, "split")):
            execution = Execution(world, shard=shard)
            job.train_run(RECOMPUTED, path, Run(f"{folder}/{name}-recomputed"), execution)
            job.train_run(ACCUMULATED, path, Run(f"{folder}/{name}-accumulated"), execution)


def learn(path, run, execution):
    job.train_run(RECIPE, path, run, execution)
    evaluate_run(run, Request(batch=3), world=execution.world)


def train_half(path, run, execution):
    """Ten of the twenty steps, the state kept after every five."""
    original = Stepper.run

    def limited(self, step):
        if step == 12:
            raise KeyboardInterrupt
        original(self, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stepper, "run", limited)
        patch.setattr(job, "train", partial(job.train, look=5, keep_seconds=0))
        job.train_run(RECIPE, path, run, execution)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    generate(FLOW, 8, 0, folder / "flow.h5")
    learn(folder / "flow.h5", Run(folder / "one"), Execution())
    job.train_run(FORCED, folder / "flow.h5", Run(folder / "one-forced"))
    code = f"from tests.train.test_processes import work; work({str(folder / 'flow.h5')!r}, {str(folder)!r})"
    port = free_port()
    for process in [by_hand(code, rank, 2, port) for rank in range(2)]:
        said = process.communicate(timeout=300)[1]
        assert process.returncode == 0, said
    return {path.name: Run(path) for path in folder.iterdir() if path.is_dir()}


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
def test_recomputed_blocks_end_in_the_same_weights(runs, name):
    plain, again = (read_tensors(runs[key].weights)[0] for key in (name, f"{name}-recomputed"))
    assert set(plain) == set(again) and all(torch.equal(plain[key], again[key]) for key in plain)


@pytest.mark.parametrize("name", ["two", "split"])
def test_two_processes_accumulate_what_one_folds(runs, name):
    folded, accumulated = runs["one-forced"], runs[f"{name}-accumulated"]
    assert distance(folded, accumulated) < 1e-4
    losses = [read_rows(run.log)[-1]["loss"] for run in (folded, accumulated)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


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


# --- processes that were started by hand: nobody ends the others when one of them dies


def by_hand(code, rank, size, port):
    """Python code in a process of this rank."""
    places = {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    environment = {**os.environ, **{name: str(value) for name, value in places.items()}, "GLOO_SOCKET_IFNAME": "lo"}
    return Forked(code, env=environment)


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def sentence_of(process):
    said = process.communicate(timeout=60)[1]
    told = [line for line in said.splitlines() if line.startswith("sigmasolver: ")]
    assert process.returncode == 2 and "Traceback" not in said and len(told) == 1, said
    return told[0]


@pytest.mark.parametrize(
    ("size", "lost"), [(2, 1), pytest.param(3, 0, marks=pytest.mark.slow), pytest.param(3, 2, marks=pytest.mark.slow)]
)
def test_the_others_end_when_one_process_is_killed(tmp_path, size, lost):
    generate(FLOW, 8, 0, tmp_path / "flow.h5")
    sizes = ("model.width=16", "model.depth=1", "model.heads=2", "model.slices=4", "model.modes=3")
    plan = ("train.updates=1000000", "train.batch=6", "train.checks=0")
    words = ["train", "--data", str(tmp_path / "flow.h5"), "--history", "2", "--block", "1", "--horizon", "3"]
    words += [word for one in (*sizes, *plan) for word in ("--set", one)]
    words += ["--out", str(tmp_path / "run"), "--device", "cpu"]
    code = f"import sys; from sigmasolver.cli import main; sys.argv = ['sigmasolver', *{words}]; main()"
    port = free_port()
    processes = [by_hand(code, rank, size, port) for rank in range(size)]
    try:
        deadline = time.monotonic() + 120
        while not Run(tmp_path / "run").log.exists():
            assert time.monotonic() < deadline and all(one.poll() is None for one in processes)
            time.sleep(0.1)
        processes[lost].kill()
        for rank, one in enumerate(processes):
            if rank != lost:
                assert f"Process {rank} of {size} lost contact with another process" in sentence_of(one)
    finally:
        for one in processes:
            one.kill()
            one.communicate()


LONELY = """
import sys
from datetime import timedelta
from sigmasolver.runtime import parallel
from sigmasolver.cli import main
parallel.ARRIVAL = timedelta(seconds=15)
sys.argv = ["sigmasolver", "evaluate", "none", "--device", "cpu"]
main()
"""
DIES_EARLY = "import os; from torch.distributed import TCPStore; TCPStore('127.0.0.1', {}, 2, False); os._exit(0)"


@pytest.mark.parametrize("came", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_process_whose_fellow_never_comes_or_dies_at_the_door(came):
    port = free_port()
    waiting = by_hand(LONELY if came else LONELY.replace("15", "1"), 0, 2, port)
    other = by_hand(DIES_EARLY.format(port), 1, 2, port) if came else None
    try:
        assert "Process 0 could not join the process group of WORLD_SIZE 2 at 127.0.0.1" in sentence_of(waiting)
    finally:
        for one in (waiting, other):
            if one is not None:
                one.kill()
                one.communicate()


@pytest.mark.slow
def test_the_work_of_the_first_process_may_take_longer_than_the_arrival_of_the_others():
    code = (
        "import time, torch; from datetime import timedelta; from sigmasolver.runtime import parallel\n"
        "parallel.ARRIVAL = timedelta(seconds=15)\n"
        "with parallel.join(torch.device('cpu')) as world:\n"
        "    time.sleep(17 if world.first else 0)\n"
        "    world.wait()\n"
    )
    port = free_port()
    processes = [by_hand(code, rank, 2, port) for rank in range(2)]
    for one in processes:
        said = one.communicate(timeout=90)[1]
        assert one.returncode == 0, said
