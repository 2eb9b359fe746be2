"""Commands as jobs: submitted once, warned and started again, finished ones skipped, failed ones named."""

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
from sigmasolver.experiments.jobs import Command, Jobs, Work, slurm_options, supervise
from sigmasolver.recipes import changed, suite_of
from sigmasolver.runs import Run, read_rows, read_tensors
from sigmasolver.runtime.interrupts import TERMINATED, Termination
from sigmasolver.simulate.generate import generate
from sigmasolver.train.job import train_run
from sigmasolver.version import __version__
from tests.data.waves import Waves
from tests.forked import Forked

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
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.skipif(sys.platform != "linux", reason="looks for the processes of a job in /proc")
def test_a_suite_of_two_rows(tmp_path, call):
    """One row is warned ahead of its time limit, as submitit does it: it saves its state, is started again and ends in
    the weights of a training that nobody disturbed. The other one fails and is named with its log."""
    data, out = tmp_path / "data", tmp_path / "runs"
    data.mkdir()
    generate(Waves(), 3, 0, data / "ns2d.h5")
    words = [word for one in SETTINGS for word in ("--set", one)]
    words = ["suite", "main", "--data", data, "--out", out, *words, "--only", ROWS[0]]
    damaged = Run(out / ROWS[1])
    damaged.path.mkdir(parents=True)
    damaged.resume.write_bytes(b"no state")
    jobs, run, seen = Jobs(tmp_path / "runs-jobs"), Run(out / ROWS[0]), []

    def warn():
        wait_for(run.log.exists)
        number = int(jobs.find(ROWS[0]).number)
        (task,) = children_of(number)
        os.kill(task, getattr(signal, f"SIG{submitit.JobEnvironment.USR_SIG}"))
        seen.append(Jobs(tmp_path / "runs-jobs").active([ROWS[0]]))  # as another process would ask

    warning = threading.Thread(target=warn)
    warning.start()
    code, said, _ = call(*words, "--only", ROWS[1], "--device", "cpu", "--on", "local", "--jobs", "2")
    warning.join()
    assert seen == [{ROWS[0]: "running"}]
    log = jobs.find(ROWS[0]).log.read_text()
    assert "stopped by SIGTERM while training" in log and log.count("training from") == 2, log
    assert f"{ROWS[0]}: finished" in said and f"{ROWS[1]}: failed; see {jobs.find(ROWS[1]).log}: " in said, said
    assert said.count("submitted") == 2 and code == 1, "what was requeued was not submitted again"
    train_run(changed(suite_of("main")[ROWS[0]], SETTINGS), data / "ns2d.h5", Run(tmp_path / "alone"))
    ours, alone = (read_tensors(one.weights)[0] for one in (run, Run(tmp_path / "alone")))
    assert ours.keys() == alone.keys() and all(torch.equal(ours[name], alone[name]) for name in ours)
    assert read_rows(run.records), "and evaluated"
    code, said, _ = call(*words, "--on", "local")
    assert code == 0 and "submitted" not in said and f"{ROWS[0]}: finished" in said


def test_work_waits_for_what_it_needs(tmp_path):
    """Commands that do next to nothing, because the order matters here."""
    lines, jobs = [], Jobs(tmp_path)

    def printed(name):
        job = jobs.find(name)
        return job is not None and job.log.exists() and __version__ in job.log.read_text()

    works = [
        Work("make", Command(["--version"]), partial(printed, "make")),
        Work("lost", Command(["--no-such-option"]), partial(printed, "lost")),
        Work("look", Command(["--version"]), partial(printed, "look"), after="make"),
        Work("never", Command(["--version"]), partial(printed, "never"), after="lost"),
    ]
    failed = supervise(works, jobs, "local", {}, 2, lines.append, seconds=0.1)
    assert sorted(failed) == ["lost", "never"]
    assert "never: not started, because lost failed" in lines
    assert f"lost: failed; see {jobs.find('lost').log}" in lines
    order = [line.partition(",")[0] for line in lines if line.startswith(("make", "look"))]
    assert order == ["make: submitted", "make: finished", "look: submitted", "look: finished"]


def test_what_is_submitted_to_slurm(tmp_path, monkeypatch):
    """The script, by submitit's own writer; a real cluster is not at hand here."""
    written = []

    class Refused(Exception):
        pass

    def keep(self, command):
        written.append(self._make_submission_file_text(command, "0"))
        raise Refused

    monkeypatch.setattr(submitit.SlurmExecutor, "affinity", classmethod(lambda cls: 2))
    monkeypatch.setattr(submitit.SlurmExecutor, "_submit_command", keep)
    options = slurm_options(["partition=gpu", "time=600", "gpus_per_node=4", "--exclusive"])
    with pytest.raises(Refused):
        Jobs(tmp_path).submit("row", "slurm", Command(["train"], processes=4, nodes=2), options)
    lines = written[0].splitlines()
    for line in ("partition=gpu", "time=600", "gpus-per-node=4", "exclusive", "nodes=2", "ntasks-per-node=1",
                 "requeue", "job-name=row", "open-mode=append"):  # fmt: skip
        assert f"#SBATCH --{line}" in lines, line


def test_the_line_of_torchrun(monkeypatch):
    plain = [sys.executable, "-m", "sigmasolver", "train", "kf2d"]
    assert Command(["train", "kf2d"])._line() == plain
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    assert Command(["train", "kf2d"], processes=4)._line() == [
        *torchrun, "--standalone", "--nproc-per-node=4", *plain[1:],
    ]  # fmt: skip
    slurm = {"SUBMITIT_EXECUTOR": "slurm", "SLURM_JOB_ID": "20017", "SLURM_JOB_NODELIST": "node[07-08]"}
    for name, value in slurm.items():
        monkeypatch.setenv(name, value)
    assert Command(["train", "kf2d"], processes=4, nodes=2)._line() == [
        *torchrun, "--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=node07:20017", "--rdzv-id=20017",
        "--nproc-per-node=4", *plain[1:],
    ]  # fmt: skip


@pytest.mark.slow
def test_the_tasks_of_two_machines_meet(tmp_path):
    """Both on this one, each with the environment that Slurm gives it: they learn what one process learns."""
    generate(Waves(), 8, 0, tmp_path / "waves.h5")
    sizes = [word for one in (*SETTINGS[8:13], "train.updates=20", "train.batch=2") for word in ("--set", one)]
    words = ["train", "--data", str(tmp_path / "waves.h5"), *sizes, "--device", "cpu", "--out"]
    number = str(os.getpid() % 10000)
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "SUBMITIT_EXECUTOR": "slurm", "SLURM_JOB_ID": number}
    environment |= {"SLURM_JOB_NODELIST": "localhost", "CUDA_VISIBLE_DEVICES": ""}
    command = f"from sigmasolver.experiments.jobs import Command; Command({[*words, str(tmp_path / 'two')]}, 1, 2)()"
    tasks = [
        subprocess.Popen(
            [sys.executable, "-c", command], env={**environment, "SLURM_PROCID": str(rank)}, stderr=subprocess.PIPE
        )
        for rank in range(2)
    ]
    for task in tasks:
        said = task.communicate(timeout=240)[1]
        assert task.returncode == 0, said[-2000:]
    subprocess.run([sys.executable, "-m", "sigmasolver", *words, str(tmp_path / "one")], check=True)
    two, one = (read_tensors(Run(tmp_path / name).weights)[0] for name in ("two", "one"))
    a, b = (torch.cat([tensors[name].flatten().double() for name in one]) for tensors in (two, one))
    assert (a - b).norm() < 1e-5 * b.norm()


def test_sigterm_stops_a_training_with_its_state_kept(tmp_path):
    generate(Waves(), 3, 0, tmp_path / "waves.h5")
    sizes = [word for one in SETTINGS[8:13] for word in ("--set", one)]
    run = Run(tmp_path / "run")
    words = ["train", "--data", tmp_path / "waves.h5", "--out", run.path, *sizes, "--set", "train.updates=1000000"]
    environment = {**os.environ, "COLUMNS": "200"}
    process = Forked("from sigmasolver.cli import main; main()", *words, "--device", "cpu", env=environment)
    wait_for(run.log.exists, process)
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=60)[0]
    assert process.returncode == TERMINATED == 143 and "run: stopped" in said
    assert f"train --resume {run.path}" in " ".join(said.split())
    assert run.resume.exists() and not run.finished


def test_sigterm_elsewhere_ends_the_process_at_once():
    with Termination():
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        os.kill(os.getpid(), signal.SIGTERM)
        assert Termination.asked
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    Termination.asked = False


def test_states_of_slurm_jobs(tmp_path, monkeypatch):
    """What squeue prints, from a script in its place: jobs that will not run again are not active."""
    (tmp_path / "squeue").write_text("#!/bin/sh\nprintf '7 PENDING\\n8 RUNNING\\n9 COMPLETED\\n10 COMPLETING\\n'\n")
    (tmp_path / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for number in (7, 8, 9, 10, 11):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "job.json").write_text(f'{{"on": "slurm", "number": "{number}"}}')
    active = Jobs(tmp_path).active(["7", "8", "9", "10", "11", "none"])
    assert active == {"7": "queued", "8": "running", "10": "running"}


def test_mistakes_are_one_sentence(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    suite = ("suite", "main", "--only", ROWS[0])
    cases = [
        ((*suite, "--on", "cloud"), 'Unknown --on "cloud"'),
        ((*suite, "--on", "local"), "Store data/ns2d.h5 not found"),
        ((*suite, "--on", "local", "--nodes", "2"), "--nodes requires --on slurm"),
        ((*suite, "--on", "local", "--minutes", "3"), "limit a job with --slurm time"),
        ((*suite, "--on", "slurm", "--detach", "--jobs", "2"), "--jobs requires this command to wait"),
        ((*suite, "--slurm", "time=60"), "--slurm applies only to jobs; add --on"),
        ((*suite, "--on", "slurm", "--slurm", "time=2h"), "whole minutes, at least"),
        ((*suite, "--on", "slurm", "--slurm", "partition="), "must be NAME=VALUE"),
        ((*suite, "--on", "slurm", "--slurm", "nodes=2"), "--nodes and --processes"),
        (("submit", "name", "--", "trane", "kf2d"), "is not a command that a job can run"),
        (("submit", "a/b", "--", "train", "kf2d"), "is not a valid job name"),
        (("submit", "name", "--nodes", "2", "--", "simulate", "demo"), "simulate runs in one process"),
    ]
    for words, says in cases:
        code, _, said = call(*words)
        assert code == 2 and says in said and said.count("\n") == 1, (words, said)
    monkeypatch.setattr(submitit.SlurmExecutor, "affinity", classmethod(lambda cls: -1))
    assert "Slurm not found on this machine" in call("submit", "name", "--", "train", "kf2d")[2]
    monkeypatch.setitem(sys.modules, "submitit", None)
    assert 'pip install "sigmasolver[slurm]"' in call("submit", "name", "--", "train", "kf2d")[2]
    assert jobs_module.Jobs(tmp_path / "jobs").find("name") is None
