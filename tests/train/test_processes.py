"""Two processes on one machine give the weights and errors of a single process with the same global batch."""

import os
import socket
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
TASK = Task("tiny", ("vorticity",), ("vorticity",), (16, 16), 2, 1, 3, 6, 2, "channel", symmetries="kolmogorov-4")
MODEL = ModelRecipe(width=16, depth=2, heads=2, slices=4, modes=3)
RECIPE = Recipe(TASK, MODEL, TrainRecipe(updates=10, batch=4, seed=3, clip=1.0, checks=1, augment=True))
RECOMPUTED = changed(RECIPE, ["train.recompute=true"])
FORCED = changed(RECIPE, ["model.depth=1", "train.objective=teacher_forced", "train.updates=6"])
ACCUMULATED = changed(FORCED, ["train.accumulate=true"])
MUON = changed(RECIPE, ["train.optimiser=muon"])


def work(path: str, folder: str) -> None:
    """Run all trainings in every process, one after the other, because starting processes takes longer than training:
    replicated and sharded models, a resumed sharded one, recomputed blocks, accumulated gradients."""
    torch.set_num_threads(1)
    with join(torch.device("cpu")) as world:
        learn(path, Run(f"{folder}/two"), Execution(world))
        learn(path, Run(f"{folder}/split"), Execution(world, shard=True))
        run, execution = Run(f"{folder}/resumed"), Execution(world, shard=True)
        with pytest.raises(KeyboardInterrupt):  # stop midway, then resume
            train_half(path, run, execution)
        world.wait()
        assert read_facts(run.resume)["step"] == 5
        learn(path, run, execution)
        for shard, name in ((False, "two"), (True, "split")):
            execution = Execution(world, shard=shard)
            job.train_run(RECOMPUTED, path, Run(f"{folder}/{name}-recomputed"), execution)
            job.train_run(ACCUMULATED, path, Run(f"{folder}/{name}-accumulated"), execution)
        job.train_run(MUON, path, Run(f"{folder}/two-muon"), Execution(world))
        with pytest.raises(ValueError, match="Muon needs whole matrices, but --shard splits them"):
            job.train_run(MUON, path, Run(f"{folder}/split-muon"), Execution(world, shard=True))


def learn(path, run, execution):
    job.train_run(RECIPE, path, run, execution)
    evaluate_run(run, Request(batch=3), world=execution.world)


def train_half(path, run, execution):
    """Run half of the ten steps, saving the state after every five."""
    original = Stepper.run

    def limited(self, step):
        if step == 7:
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
    job.train_run(MUON, folder / "flow.h5", Run(folder / "one-muon"))
    code = f"from tests.train.test_processes import work; work({str(folder / 'flow.h5')!r}, {str(folder)!r})"
    port = free_port()
    for process in [start_rank(code, rank, 2, port) for rank in range(2)]:
        error = process.communicate(timeout=300)[1]
        assert process.returncode == 0, error
    return {path.name: Run(path) for path in folder.iterdir() if path.is_dir()}


def distance(first, second):
    """Relative distance of all weights as one vector. (Adam amplifies the round-off of a vanishing gradient to a full
    step, so a single small parameter may differ more.)"""
    alone, together = (read_tensors(run.weights)[0] for run in (first, second))
    assert set(alone) == set(together)
    a, b = (torch.cat([tensors[key].flatten().double() for key in alone]) for tensors in (alone, together))
    return float((a - b).norm() / a.norm())


@pytest.mark.parametrize("name", ["two", "split"])
def test_two_processes_match_one(runs, name):
    assert distance(runs["one"], runs[name]) < 1e-5


def test_muon_in_two_processes_matches_one(runs):
    assert distance(runs["one-muon"], runs["two-muon"]) < 1e-3
    assert distance(runs["one-muon"], runs["one"]) > 0.01


@pytest.mark.parametrize("name", ["two", "split"])
def test_recompute_in_two_processes_gives_identical_weights(runs, name):
    plain, recomputed = (read_tensors(runs[key].weights)[0] for key in (name, f"{name}-recomputed"))
    assert set(plain) == set(recomputed) and all(torch.equal(plain[key], recomputed[key]) for key in plain)


@pytest.mark.parametrize("name", ["two", "split"])
def test_accumulate_in_two_processes_matches_folded_frames(runs, name):
    folded, accumulated = runs["one-forced"], runs[f"{name}-accumulated"]
    assert distance(folded, accumulated) < 1e-4
    losses = [read_rows(run.log)[-1]["loss"] for run in (folded, accumulated)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


@pytest.mark.parametrize("name", ["two", "split"])
def test_logged_loss_is_that_of_the_global_batch(runs, name):
    alone, together = (read_rows(runs[key].log)[-1] for key in ("one", name))
    assert together["loss"] == pytest.approx(alone["loss"], rel=1e-5)
    assert together["error"] == pytest.approx(alone["error"], rel=1e-5)


def test_distributed_evaluation_matches_one_process(runs):
    """Weights differ by round-off, so persistence, which has none, must agree exactly, and the model approximately."""
    alone, together = (read_rows(runs[key].records) for key in ("one", "two"))
    assert len(alone) == len(together) > 20
    for expected, actual in zip(alone, together, strict=True):
        assert all(expected[key] == actual[key] for key in ("model", "metric", "field", "lead", "windows"))
        if expected["model"] == "persistence" or expected["value"] is None:
            assert expected["value"] == actual["value"]
        else:
            assert actual["value"] == pytest.approx(expected["value"], rel=1e-3)


def test_sharded_run_resumes_to_the_same_weights(runs):
    """The saved state is not sharded, so a run started by two processes can be finished by any number."""
    assert distance(runs["one"], runs["resumed"]) < 1e-5


def test_suite_with_a_time_limit_stops_in_all_processes(tmp_path):
    """Rank 0 simulates while the others wait; an interrupted simulation must not leave them waiting."""
    launch = "import os, sys; os.chdir(sys.argv.pop(1)); from torch.distributed.run import main; main()"
    launcher = ["--standalone", "--nproc-per-node=2", "-m", "sigmasolver"]
    sizes = [option for setting in ("task.train=2", "task.test=1") for option in ("--set", setting)]
    arguments = ["suite", "ledger", "--only", "darcy-ffno-*", "--data-seed", "0", "--minutes", "1e-9", *sizes]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    process = Forked(launch, tmp_path, *launcher, *arguments, "--device", "cpu", env=environment)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert "stopped by --minutes while simulating darcy (0.0 % trained)" in out


# --- processes without a launcher, which would end the others when one of them dies


def start_rank(code, rank, size, port):
    """Start Python code in a process of this rank."""
    variables = {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    environment = {**os.environ, **{name: str(value) for name, value in variables.items()}, "GLOO_SOCKET_IFNAME": "lo"}
    return Forked(code, env=environment)


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def error_message(process):
    error = process.communicate(timeout=60)[1]
    messages = [line for line in error.splitlines() if line.startswith("sigmasolver: ")]
    assert process.returncode == 2 and "Traceback" not in error and len(messages) == 1, error
    return messages[0]


@pytest.mark.parametrize(
    ("size", "killed"), [(2, 1), pytest.param(3, 0, marks=pytest.mark.slow), pytest.param(3, 2, marks=pytest.mark.slow)]
)
def test_killed_process_ends_the_others(tmp_path, size, killed):
    generate(FLOW, 8, 0, tmp_path / "flow.h5")
    sizes = ("model.width=16", "model.depth=1", "model.heads=2", "model.slices=4", "model.modes=3")
    plan = ("train.updates=1000000", "train.batch=6", "train.checks=0")
    arguments = ["train", "--data", str(tmp_path / "flow.h5"), "--history", "2", "--block", "1", "--horizon", "3"]
    arguments += [option for setting in (*sizes, *plan) for option in ("--set", setting)]
    arguments += ["--out", str(tmp_path / "run"), "--device", "cpu"]
    code = f"import sys; from sigmasolver.cli import main; sys.argv = ['sigmasolver', *{arguments}]; main()"
    port = free_port()
    processes = [start_rank(code, rank, size, port) for rank in range(size)]
    try:
        deadline = time.monotonic() + 120
        while not Run(tmp_path / "run").log.exists():
            assert time.monotonic() < deadline and all(process.poll() is None for process in processes)
            time.sleep(0.1)
        processes[killed].kill()
        for rank, process in enumerate(processes):
            if rank != killed:
                assert f"Process {rank} of {size} lost contact with another process" in error_message(process)
    finally:
        for process in processes:
            process.kill()
            process.communicate()


WAITS_FOR_RANK_1 = """
import sys
from datetime import timedelta
from sigmasolver.runtime import parallel
from sigmasolver.cli import main
parallel.ARRIVAL = timedelta(seconds=15)
sys.argv = ["sigmasolver", "evaluate", "none", "--device", "cpu"]
main()
"""
JOINS_AND_DIES = "import os; from torch.distributed import TCPStore; TCPStore('127.0.0.1', {}, 2, False); os._exit(0)"


@pytest.mark.parametrize("joins", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_rendezvous_fails_when_a_rank_is_missing_or_dies(joins):
    port = free_port()
    waiting = start_rank(WAITS_FOR_RANK_1 if joins else WAITS_FOR_RANK_1.replace("15", "1"), 0, 2, port)
    other = start_rank(JOINS_AND_DIES.format(port), 1, 2, port) if joins else None
    try:
        assert "Process 0 could not join the process group of WORLD_SIZE 2 at 127.0.0.1" in error_message(waiting)
    finally:
        for process in (waiting, other):
            if process is not None:
                process.kill()
                process.communicate()


@pytest.mark.slow
def test_rank_zero_may_work_longer_than_the_rendezvous_timeout():
    code = (
        "import time, torch; from datetime import timedelta; from sigmasolver.runtime import parallel\n"
        "parallel.ARRIVAL = timedelta(seconds=15)\n"
        "with parallel.join(torch.device('cpu')) as world:\n"
        "    time.sleep(17 if world.first else 0)\n"
        "    world.wait()\n"
    )
    port = free_port()
    processes = [start_rank(code, rank, 2, port) for rank in range(2)]
    for process in processes:
        error = process.communicate(timeout=90)[1]
        assert process.returncode == 0, error
