"""The commands as a user runs them: real files, one sentence for every mistake; real processes where that matters."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
import scipy.io
import torch

import sigmasolver
from sigmasolver.cli import main
from sigmasolver.cli.terminal import progress
from sigmasolver.data.store import Writer, open_store
from sigmasolver.runtime.interrupts import Interrupts
from sigmasolver.simulate import SIMULATORS
from sigmasolver.simulate.generate import header_of
from tests.forked import Forked

ROOT = Path(sigmasolver.__file__).parents[1]
SMALL = ["--set", "grid=32", "--set", "stored=16", "--set", "step=0.03125", "--set", "frames=3"]


def command(*words):
    return [sys.executable, "-m", "sigmasolver", *map(str, words)]


def run_process(*words):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    return subprocess.run(command(*words), capture_output=True, text=True, env=environment)


@pytest.fixture
def run(call):
    """As `run_process`, in this process."""
    return lambda *words: SimpleNamespace(**dict(zip(("returncode", "stdout", "stderr"), call(*words), strict=True)))


def fingerprint(done):
    assert done.returncode == 0, done.stderr
    return re.search(r"fingerprint ([0-9a-f]{64})", done.stdout)[1]


def test_simulate_as_a_process_then_inspect(tmp_path, run):
    file, picture = tmp_path / "demo.h5", tmp_path / "demo.png"
    made = run_process("simulate", "demo", "--count", 3, "--seed", 4, "--out", file, *SMALL, "--set", "viscosity=0.01")
    seen = run("inspect", file, "--plot", picture, "--index", 2)
    assert fingerprint(made) == fingerprint(seen)
    assert "viscosity=0.01" in seen.stdout and "3 trajectories" in seen.stdout and "intact" in seen.stdout
    assert "seed 4" in seen.stdout and f"sigmasolver {sigmasolver.__version__}" in seen.stdout
    with open_store(file) as store:
        values = np.asarray(store[0:3], np.float64)
        assert store.shape[1:] == (3, 16, 16, 1)
    assert f"{values.std():.4g}" in seen.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_more_trajectories_keep_the_first_ones(tmp_path, run):
    few, many = tmp_path / "few.h5", tmp_path / "many.h5"
    assert fingerprint(run("simulate", "demo", "--count", 5, "--out", many, *SMALL))
    run("simulate", "demo", "--count", 2, "--out", few, *SMALL)
    continued = run("simulate", "demo", "--count", 5, "--out", few, *SMALL)
    assert "2 of them already present" in continued.stdout
    assert few.read_bytes() == many.read_bytes()


def test_killed_and_started_again_equals_uninterrupted(tmp_path, run):
    whole, killed = tmp_path / "whole.h5", tmp_path / "killed.h5"
    words = ["simulate", "demo", "--count", 40, *SMALL]
    expected = fingerprint(run(*words, "--out", whole))
    process = Forked("from sigmasolver.cli import main; main()", *words, "--out", killed)
    deadline = time.monotonic() + 60
    present = 0
    while time.monotonic() < deadline and not present and process.poll() is None:
        if killed.exists():
            with open_store(killed) as store:
                present = len(store)
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert present, "the kill came before the first trajectory"
    assert fingerprint(run(*words, "--out", killed)) == expected
    assert killed.read_bytes() == whole.read_bytes()


def test_import_your_own_arrays(tmp_path, run):
    fields = np.random.default_rng(0).normal(size=(3, 4, 8, 6, 2)).astype(np.float32)
    np.savez(tmp_path / "mine.npz", fields=fields)
    made = run("import-data", tmp_path / "mine.npz", "--out", tmp_path / "mine.h5")
    assert "3 trajectories of 4 × 8 × 6 × 2" in made.stdout, made.stderr
    with open_store(tmp_path / "mine.h5") as store:
        np.testing.assert_array_equal(store[0:3], fields)


def test_import_the_public_darcy_pair(tmp_path, run):
    one, two = (tmp_path / f"darcy_smooth{number}.mat" for number in (1, 2))
    for place, path in enumerate((one, two)):
        cases = np.broadcast_to(np.arange(1000.0)[:, None, None] + 5000 * place, (1000, 3, 3))
        scipy.io.savemat(path, {"coeff": cases, "sol": cases})
    made = run("import-data", two, one, "--out", tmp_path / "darcy.h5")
    assert "1200 trajectories of 1 × 3 × 3 × 2 from fno-darcy" in made.stdout, made.stderr
    assert "0 to 999 are the first 1000 cases of darcy_smooth1.mat (training), 1000 to 1199" in made.stdout
    with open_store(tmp_path / "darcy.h5") as store:
        assert store[:, 0, 0, 0, 0].tolist() == [*range(1000), *range(5000, 5200)]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("simulate", "ns3d", "--out", "x.h5"), "did you mean ns2d"),
        (("simulate", "demo", "--out", "x.h5", "--set", "viscsity=1"), "did you mean viscosity"),
        (("simulate", "demo", "--out", "x.h5", "--set", "viscosity=thick"), "viscosity must be a finite number"),
        (("simulate", "demo", "--out", "x.h5", "--set", "viscosity=-1"), "viscosity must not be negative"),
        (("simulate", "demo", "--out", "x.h5", "--count", "0"), "must be at least 1"),
        (("simulate", "demo", "--out", "x.h5", "--device", "abacus"), "use cpu, cuda"),
        (("simulate", "demo", "--out", "x.h5", "--dtype", "int8"), "float32 or float16"),
        (("inspect", "missing.h5"), "missing.h5 not found"),
        (("inspect", __file__), "is not an HDF5 file"),
        (("import-data", "missing.mat", "--out", "x.h5"), "missing.mat not found"),
        (("import-data", __file__, "--out", "x.h5"), "is not in a supported format"),
    ],
)
def test_mistakes_are_one_sentence(words, says, tmp_path, monkeypatch, run):
    monkeypatch.chdir(tmp_path)
    done = run(*words)
    assert done.returncode == 2 and done.stdout == ""
    assert says in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert not list(tmp_path.iterdir()), "nothing is left behind"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_that_is_not_there(tmp_path, run):
    done = run("simulate", "demo", "--out", tmp_path / "x.h5", "--device", "cuda")
    assert done.returncode == 2 and "torch found no GPU" in done.stderr


def test_a_damaged_file_is_named(tmp_path, run):
    file = tmp_path / "demo.h5"
    run("simulate", "demo", "--count", 2, "--out", file, *SMALL)
    with h5py.File(file, "r+") as store:
        store["fields"][1, 0, 0, 0, 0] += 1
    seen = run("inspect", file)
    assert seen.returncode == 1
    assert "DAMAGED" in seen.stdout and "trajectories 1 " in seen.stdout, seen.stdout + seen.stderr


def test_brackets_in_a_file_name_are_just_a_name(tmp_path, run):
    file = tmp_path / "a[red].h5"
    made = run("simulate", "demo", "--count", 1, "--out", file, *SMALL)
    assert file.exists() and str(file) in made.stdout
    assert fingerprint(run("inspect", file)) == fingerprint(made)


def test_ctrl_c_says_that_the_same_command_continues(tmp_path):
    process = subprocess.Popen(
        command("simulate", "demo", "--count", 20_000, "--out", tmp_path / "x.h5", *SMALL),  # more than is ever made
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not (tmp_path / "x.h5").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    try:
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130 and said.strip() == "sigmasolver: stopped; the same command resumes."


def test_a_ctrl_c_that_got_lost_comes_back_with_the_next_step_of_the_bar():
    before = signal.getsignal(signal.SIGINT)
    with Interrupts(), progress("working", 3) as move:
        move(1)
        with pytest.raises(KeyboardInterrupt):  # who swallows this one loses it
            os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            move(2)
    assert signal.getsignal(signal.SIGINT) is before and not Interrupts.asked


def test_what_ignores_ctrl_c_goes_on_doing_so():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Interrupts():
            os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_error_that_a_ctrl_c_left_behind_is_no_fault_of_ours(monkeypatch, capsys):
    def broken():
        with contextlib.suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        raise RuntimeError("cannot release un-acquired lock")

    monkeypatch.setattr("sigmasolver.cli._command", lambda: broken)
    with pytest.raises(SystemExit) as leaving:
        main()
    assert leaving.value.code == 130 and "stopped; the same command resumes" in capsys.readouterr().err


def test_a_file_without_a_trajectory_does_not_keep_its_name(tmp_path, run):
    file = tmp_path / "x.h5"
    with Writer(file, header_of(SIMULATORS["demo"], 0), 3):
        pass
    empty = run("inspect", file)
    assert "no trajectory is complete yet" in empty.stdout and "finite" not in empty.stdout
    assert fingerprint(run("simulate", "demo", "--count", 1, "--out", file, *SMALL))


def test_too_little_memory_is_one_sentence(tmp_path):
    done = run_process(
        "simulate", "demo", "--out", tmp_path / "x.h5", "--set", "grid=9999999", "--set", "stored=1", "--count", 1
    )
    assert done.returncode == 2 and "Out of memory" in done.stderr, done.stderr


def test_help_names_every_task(run):
    assert all(task in run("simulate", "--help").stdout for task in SIMULATORS)
