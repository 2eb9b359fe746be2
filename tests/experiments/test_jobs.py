"""Commands as jobs: submitted once, restarted at the time limit, skipped when finished, reported when failed."""

import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from sigmasolver.experiments import jobs as jobs_module
from sigmasolver.experiments.jobs import Command, Jobs, JobSpec, slurm_options, supervise
from sigmasolver.recipes import changed, suite_of
from sigmasolver.runs import Run, read_rows, read_tensors
from sigmasolver.runtime.interrupts import TERMINATED, Termination
from sigmasolver.simulate.generate import generate
from sigmasolver.train.job import train_run
from sigmasolver.version import __version__
from tests.data.waves import Waves
from tests.forked import COMMAND, Forked

submitit = pytest.importorskip("submitit")
ROOT = Path(__file__).parents[2]
ROWS = ("ns2d-transolver-sigma-42", "ns2d-transolver-sigma-43")
SETTINGS = (
    "task.grid=(12,12)", "task.history=2", "task.horizon=3", "task.train=2", "task.test=1", "task.inputs=('height',)",
    "task.targets=('height',)", "task.space_stride=1", "model.width=16", "model.depth=1", "model.heads=2",
    "model.slices=4", "model.modes=2", "train.updates=150", "train.batch=2", "train.checks=0",
)  # fmt: skip


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def wait_for(condition, process=None):
    deadline = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < deadline and (process is None or process.poll() is None)
        time.sleep(0.05)


def children_of(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.skipif(sys.platform != "linux", reason="looks for the processes of a job in /proc")
def test_suite_on_local_restarts_and_reports_jobs(tmp_path, call):
    """One row gets submitit's signal before its time limit: it saves its state, is restarted and ends with the weights
    of an uninterrupted training. The other one fails and is reported with its log."""
    data, runs = tmp_path / "data", tmp_path / "runs"
    data.mkdir()
    generate(Waves(), 3, 0, data / "ns2d.h5")
    args = [word for setting in SETTINGS for word in ("--set", setting)]
    args = ["suite", "main", "--data", data, "--out", runs, *args, "--only", ROWS[0]]
    damaged = Run(runs / ROWS[1])
    damaged.path.mkdir(parents=True)
    damaged.resume.write_bytes(b"no state")
    jobs, run, states = Jobs(tmp_path / "runs-jobs"), Run(runs / ROWS[0]), []

    def send_signal():
        wait_for(run.log.exists)
        number = int(jobs.find(ROWS[0]).number)
        (task,) = children_of(number)
        os.kill(task, getattr(signal, f"SIG{submitit.JobEnvironment.USR_SIG}"))
        states.append(Jobs(tmp_path / "runs-jobs").active([ROWS[0]]))  # as seen by another process

    sender = threading.Thread(target=send_signal)
    sender.start()
    code, out, _ = call(*args, "--only", ROWS[1], "--device", "cpu", "--on", "local", "--jobs", "2")
    sender.join()
    assert states == [{ROWS[0]: "running"}]
    log = jobs.find(ROWS[0]).log.read_text()
    assert "stopped by SIGTERM while training" in log and log.count("training from") == 2, log
    assert f"{ROWS[0]}: finished" in out and f"{ROWS[1]}: failed; see {jobs.find(ROWS[1]).log}: " in out, out
    assert out.count("submitted") == 2 and code == 1, "a restarted job is not submitted again"
    train_run(changed(suite_of("main")[ROWS[0]], SETTINGS), data / "ns2d.h5", Run(tmp_path / "alone"))
    restarted, uninterrupted = (read_tensors(r.weights)[0] for r in (run, Run(tmp_path / "alone")))
    assert restarted.keys() == uninterrupted.keys() and all(
        torch.equal(restarted[name], uninterrupted[name]) for name in restarted
    )
    assert read_rows(run.records), "the run is evaluated"
    ledger = tmp_path / "ledger.jsonl"
    code, out, _ = call(*args, "--on", "local", "--ledger", ledger)
    assert code == 0 and "submitted" not in out and f"{ROWS[0]}: finished" in out
    assert {row["run"] for row in read_rows(ledger)} == {ROWS[0]}
    code, out, _ = call(*args, "--on", "local", "--ledger", ledger)
    assert code == 0 and out.strip() == f"{ledger}: has 1 of 1 runs"


def test_supervise_runs_jobs_after_their_dependencies(tmp_path):
    """The commands do almost nothing: only their order matters."""
    lines, jobs = [], Jobs(tmp_path)

    def printed(name):
        job = jobs.find(name)
        return job is not None and job.log.exists() and __version__ in job.log.read_text()

    specs = [
        JobSpec("make", Command(["--version"]), partial(printed, "make")),
        JobSpec("lost", Command(["--no-such-option"]), partial(printed, "lost")),
        JobSpec("look", Command(["--version"]), partial(printed, "look"), after="make"),
        JobSpec("never", Command(["--version"]), partial(printed, "never"), after="lost"),
    ]
    failed = supervise(specs, jobs, "local", {}, 2, lines.append, seconds=0.1)
    assert sorted(failed) == ["lost", "never"]
    assert "never: not started, because lost failed" in lines
    assert f"lost: failed; see {jobs.find('lost').log}" in lines
    order = [line.partition(",")[0] for line in lines if line.startswith(("make", "look"))]
    assert order == ["make: submitted", "make: finished", "look: submitted", "look: finished"]


def test_slurm_script_has_the_sbatch_options(tmp_path, monkeypatch):
    """The script as written by submitit, without a cluster."""
    scripts = []

    class Stop(Exception):
        pass

    def record_script(self, command):
        scripts.append(self._make_submission_file_text(command, "0"))
        raise Stop

    monkeypatch.setattr(submitit.SlurmExecutor, "affinity", classmethod(lambda cls: 2))
    monkeypatch.setattr(submitit.SlurmExecutor, "_submit_command", record_script)
    options = slurm_options(["partition=gpu", "time=600", "gpus_per_node=4", "--exclusive"])
    with pytest.raises(Stop):
        Jobs(tmp_path).submit("row", "slurm", Command(["train"], processes=4, nodes=2), options)
    lines = scripts[0].splitlines()
    for line in ("partition=gpu", "time=600", "gpus-per-node=4", "exclusive", "nodes=2", "ntasks-per-node=1",
                 "requeue", "job-name=row", "open-mode=append"):  # fmt: skip
        assert f"#SBATCH --{line}" in lines, line


def test_command_line_with_torchrun(monkeypatch):
    single = [sys.executable, "-m", "sigmasolver", "train", "kf2d"]
    assert Command(["train", "kf2d"])._command_line() == single
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    assert Command(["train", "kf2d"], processes=4)._command_line() == [
        *torchrun, "--standalone", "--nproc-per-node=4", *single[1:],
    ]  # fmt: skip
    slurm = {"SUBMITIT_EXECUTOR": "slurm", "SLURM_JOB_ID": "20017", "SLURM_JOB_NODELIST": "node[07-08]"}
    for name, value in slurm.items():
        monkeypatch.setenv(name, value)
    assert Command(["train", "kf2d"], processes=4, nodes=2)._command_line() == [
        *torchrun, "--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=node07:20017", "--rdzv-id=20017",
        "--nproc-per-node=4", *single[1:],
    ]  # fmt: skip


@pytest.mark.slow
def test_command_on_two_nodes_matches_one_process(tmp_path):
    """Two processes here, each with the environment that Slurm sets: they match a single-process training."""
    generate(Waves(), 8, 0, tmp_path / "waves.h5")
    sizes = [word for name in (*SETTINGS[8:13], "train.updates=20", "train.batch=2") for word in ("--set", name)]
    args = ["train", "--data", str(tmp_path / "waves.h5"), *sizes, "--device", "cpu", "--out"]
    number = str(os.getpid() % 10000)
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "SUBMITIT_EXECUTOR": "slurm", "SLURM_JOB_ID": number}
    environment |= {"SLURM_JOB_NODELIST": "localhost", "CUDA_VISIBLE_DEVICES": ""}
    command = f"from sigmasolver.experiments.jobs import Command; Command({[*args, str(tmp_path / 'two')]}, 1, 2)()"
    tasks = [
        subprocess.Popen(
            [sys.executable, "-c", command], env={**environment, "SLURM_PROCID": str(rank)}, stderr=subprocess.PIPE
        )
        for rank in range(2)
    ]
    for task in tasks:
        err = task.communicate(timeout=240)[1]
        assert task.returncode == 0, err[-2000:]
    subprocess.run([sys.executable, "-m", "sigmasolver", *args, str(tmp_path / "one")], check=True)
    two, one = (read_tensors(Run(tmp_path / name).weights)[0] for name in ("two", "one"))
    a, b = (torch.cat([tensors[name].flatten().double() for name in one]) for tensors in (two, one))
    assert (a - b).norm() < 1e-4 * b.norm()


def test_sigterm_stops_training_and_saves_its_state(tmp_path):
    generate(Waves(), 3, 0, tmp_path / "waves.h5")
    sizes = [word for setting in SETTINGS[8:13] for word in ("--set", setting)]
    run = Run(tmp_path / "run")
    args = ["train", "--data", tmp_path / "waves.h5", "--out", run.path, *sizes, "--set", "train.updates=1000000"]
    environment = {**os.environ, "COLUMNS": "200"}
    process = Forked(COMMAND, *args, "--device", "cpu", env=environment)
    wait_for(run.log.exists, process)
    process.send_signal(signal.SIGTERM)
    out = process.communicate(timeout=60)[0]
    assert process.returncode == TERMINATED == 143 and "run: stopped" in out
    assert f"train --resume {run.path}" in " ".join(out.split())
    assert run.resume.exists() and not run.finished


def test_termination_restores_the_default_handler():
    with Termination():
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        os.kill(os.getpid(), signal.SIGTERM)
        assert Termination.requested
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    Termination.requested = False


def test_jobs_active_reads_slurm_states(tmp_path, monkeypatch):
    """With a script in place of squeue: jobs in a terminal state are not active."""
    (tmp_path / "squeue").write_text("#!/bin/sh\nprintf '7 PENDING\\n8 RUNNING\\n9 COMPLETED\\n10 COMPLETING\\n'\n")
    (tmp_path / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for number in (7, 8, 9, 10, 11):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "job.json").write_text(f'{{"on": "slurm", "number": "{number}"}}')
    active = Jobs(tmp_path).active(["7", "8", "9", "10", "11", "none"])
    assert active == {"7": "queued", "8": "running", "10": "running"}


def test_job_errors_are_one_sentence(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    suite = ("suite", "main", "--only", ROWS[0])
    cases = [
        ((*suite, "--on", "cloud"), 'Unknown --on "cloud"'),
        ((*suite, "--on", "local"), "Store data/ns2d.h5 not found"),
        ((*suite, "--on", "local", "--nodes", "2"), "--nodes requires --on slurm"),
        ((*suite, "--on", "local", "--minutes", "3"), "limit a job with --slurm time"),
        ((*suite, "--on", "slurm", "--detach", "--jobs", "2"), "--jobs requires this command to wait"),
        ((*suite, "--on", "slurm", "--detach", "--ledger", "l.jsonl"), "--ledger requires this command to wait"),
        ((*suite, "--slurm", "time=60"), "--slurm applies only to jobs; add --on"),
        ((*suite, "--on", "slurm", "--slurm", "time=2h"), "whole minutes, at least"),
        ((*suite, "--on", "slurm", "--slurm", "partition="), "must be NAME=VALUE"),
        ((*suite, "--on", "slurm", "--slurm", "nodes=2"), "--nodes and --processes"),
        (("submit", "name", "--", "trane", "kf2d"), "is not a command that a job can run"),
        (("submit", "a/b", "--", "train", "kf2d"), "is not a valid job name"),
        (("submit", "name", "--nodes", "2", "--", "simulate", "demo"), "simulate runs in one process"),
    ]
    for args, message in cases:
        code, _, err = call(*args)
        assert code == 2 and message in err and err.count("\n") == 1, (args, err)
    monkeypatch.setattr(submitit.SlurmExecutor, "affinity", classmethod(lambda cls: -1))
    assert "Slurm not found on this machine" in call("submit", "name", "--", "train", "kf2d")[2]
    monkeypatch.setitem(sys.modules, "submitit", None)
    assert 'pip install "sigmasolver[slurm]"' in call("submit", "name", "--", "train", "kf2d")[2]
    assert jobs_module.Jobs(tmp_path / "jobs").find("name") is None
