"""Commands as a user runs them: real files, one-sentence errors, and real processes where that matters."""

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
from tests.forked import COMMAND, Forked

ROOT = Path(sigmasolver.__file__).parents[1]
SMALL = ["--set", "grid=32", "--set", "stored=16", "--set", "step=0.03125", "--set", "frames=3"]


def run_process(*args):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    command = [sys.executable, "-m", "sigmasolver", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


@pytest.fixture
def run(call):
    """Like `run_process`, but in this process."""
    return lambda *args: SimpleNamespace(**dict(zip(("returncode", "stdout", "stderr"), call(*args), strict=True)))


def fingerprint(result):
    assert result.returncode == 0, result.stderr
    return re.search(r"fingerprint ([0-9a-f]{64})", result.stdout)[1]


def test_simulate_in_a_process_and_inspect(tmp_path, run):
    file, plot = tmp_path / "demo.h5", tmp_path / "demo.png"
    simulated = run_process(
        "simulate", "demo", "--count", 3, "--seed", 4, "--out", file, *SMALL, "--set", "viscosity=0.01"
    )
    inspected = run("inspect", file, "--plot", plot, "--index", 2)
    assert fingerprint(simulated) == fingerprint(inspected)
    assert (
        "viscosity=0.01" in inspected.stdout and "3 trajectories" in inspected.stdout and "intact" in inspected.stdout
    )
    assert "seed 4" in inspected.stdout and f"sigmasolver {sigmasolver.__version__}" in inspected.stdout
    with open_store(file) as store:
        values = np.asarray(store[0:3], np.float64)
        assert store.shape[1:] == (3, 16, 16, 1)
    assert f"{values.std():.4g}" in inspected.stdout
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_simulate_more_trajectories_keeps_existing_ones(tmp_path, run):
    few, many = tmp_path / "few.h5", tmp_path / "many.h5"
    assert fingerprint(run("simulate", "demo", "--count", 5, "--out", many, *SMALL))
    run("simulate", "demo", "--count", 2, "--out", few, *SMALL)
    continued = run("simulate", "demo", "--count", 5, "--out", few, *SMALL)
    assert "2 of them already present" in continued.stdout
    assert few.read_bytes() == many.read_bytes()


def test_simulate_resumes_after_kill_with_identical_file(tmp_path, run):
    reference, killed = tmp_path / "reference.h5", tmp_path / "killed.h5"
    args = ["simulate", "demo", "--count", 40, *SMALL]
    expected = fingerprint(run(*args, "--out", reference))
    process = Forked(COMMAND, *args, "--out", killed)
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
    assert fingerprint(run(*args, "--out", killed)) == expected
    assert killed.read_bytes() == reference.read_bytes()


def test_import_data_npz_arrays(tmp_path, run):
    fields = np.random.default_rng(0).normal(size=(3, 4, 8, 6, 2)).astype(np.float32)
    np.savez(tmp_path / "mine.npz", fields=fields)
    imported = run("import-data", tmp_path / "mine.npz", "--out", tmp_path / "mine.h5")
    assert "3 trajectories of 4 × 8 × 6 × 2" in imported.stdout, imported.stderr
    with open_store(tmp_path / "mine.h5") as store:
        np.testing.assert_array_equal(store[0:3], fields)


def test_import_data_fno_darcy_pair(tmp_path, run):
    first, second = (tmp_path / f"darcy_smooth{number}.mat" for number in (1, 2))
    for index, path in enumerate((first, second)):
        cases = np.broadcast_to(np.arange(1000.0)[:, None, None] + 5000 * index, (1000, 3, 3))
        scipy.io.savemat(path, {"coeff": cases, "sol": cases})
    imported = run("import-data", second, first, "--out", tmp_path / "darcy.h5")
    assert "1200 trajectories of 1 × 3 × 3 × 2 from fno-darcy" in imported.stdout, imported.stderr
    assert "0 to 999 are the first 1000 cases of darcy_smooth1.mat (training), 1000 to 1199" in imported.stdout
    with open_store(tmp_path / "darcy.h5") as store:
        assert store[:, 0, 0, 0, 0].tolist() == [*range(1000), *range(5000, 5200)]


@pytest.mark.parametrize(
    ("args", "message"),
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
def test_data_command_errors_are_one_sentence(args, message, tmp_path, monkeypatch, run):
    monkeypatch.chdir(tmp_path)
    result = run(*args)
    assert result.returncode == 2 and result.stdout == ""
    assert message in result.stderr and result.stderr.count("\n") == 1, result.stderr
    assert not list(tmp_path.iterdir()), "nothing is left behind"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_device_cuda_without_gpu_is_an_error(tmp_path, run):
    result = run("simulate", "demo", "--out", tmp_path / "x.h5", "--device", "cuda")
    assert result.returncode == 2 and "torch found no GPU" in result.stderr


def test_inspect_reports_damaged_trajectories(tmp_path, run):
    file = tmp_path / "demo.h5"
    run("simulate", "demo", "--count", 2, "--out", file, *SMALL)
    with h5py.File(file, "r+") as store:
        store["fields"][1, 0, 0, 0, 0] += 1
    inspected = run("inspect", file)
    assert inspected.returncode == 1
    assert "DAMAGED" in inspected.stdout and "trajectories 1 " in inspected.stdout, inspected.stdout + inspected.stderr


def test_file_name_with_brackets_is_not_markup(tmp_path, run):
    file = tmp_path / "a[red].h5"
    simulated = run("simulate", "demo", "--count", 1, "--out", file, *SMALL)
    assert file.exists() and str(file) in simulated.stdout
    assert fingerprint(run("inspect", file)) == fingerprint(simulated)


def test_ctrl_c_prints_how_to_resume(tmp_path):
    count = 20_000  # more than finish in time
    process = Forked(COMMAND, "simulate", "demo", "--count", count, "--out", tmp_path / "x.h5", *SMALL)
    deadline = time.monotonic() + 60
    while not (tmp_path / "x.h5").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    try:
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130 and err.strip() == "sigmasolver: stopped; the same command resumes."


def test_swallowed_ctrl_c_is_raised_again_by_progress_update():
    before = signal.getsignal(signal.SIGINT)
    with Interrupts(), progress("working", 3) as update:
        update(1)
        with pytest.raises(KeyboardInterrupt):  # caught here, as a library might
            os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            update(2)
    assert signal.getsignal(signal.SIGINT) is before and not Interrupts.requested


def test_interrupts_keep_ignored_sigint():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Interrupts():
            os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_main_reports_error_after_ctrl_c_as_stopped(monkeypatch, capsys):
    def failing_command():
        with contextlib.suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        raise RuntimeError("cannot release un-acquired lock")

    monkeypatch.setattr("sigmasolver.cli._command", lambda: failing_command)
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 130 and "stopped; the same command resumes" in capsys.readouterr().err


def test_simulate_replaces_store_without_trajectories(tmp_path, run):
    file = tmp_path / "x.h5"
    with Writer(file, header_of(SIMULATORS["demo"], 0), 3):
        pass
    inspected = run("inspect", file)
    assert "no trajectory is complete yet" in inspected.stdout and "finite" not in inspected.stdout
    assert fingerprint(run("simulate", "demo", "--count", 1, "--out", file, *SMALL))


def test_out_of_memory_is_one_sentence(tmp_path):
    sizes = ("--set", "grid=9999999", "--set", "stored=1", "--count", 1)
    process = Forked(COMMAND, "simulate", "demo", "--out", tmp_path / "x.h5", *sizes)
    _, err = process.communicate()
    assert process.returncode == 2 and "Out of memory" in err, err


def test_simulate_help_lists_every_task(run):
    assert all(task in run("simulate", "--help").stdout for task in SIMULATORS)
