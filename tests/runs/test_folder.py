"""The run folder: exact round trips, kills at any instant, full disks, damaged and foreign files."""

import json
import os
import resource
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from sigmasolver.runs import Run, append_row, provenance, read_rows, read_tensors, replace_rows, write_tensors
from tests.forked import Forked, check_output


def tensors():
    return {
        "a": torch.randn(3, 4, dtype=torch.float64),
        "half": torch.randn(5).bfloat16(),
        "rng": torch.get_rng_state(),
        "turned": torch.randn(4, 6).T,
        "scalar": torch.tensor(3),
    }


def test_write_tensors_round_trip_is_exact(tmp_path):
    written, facts = tensors(), {"step": 17, "rate": 1e-3, "names": ["u", "v"]}
    write_tensors(tmp_path / "x.safetensors", written, facts)
    read, read_facts = read_tensors(tmp_path / "x.safetensors")
    assert read_facts == facts and set(read) == set(written)
    assert all(torch.equal(read[name], written[name]) and read[name].dtype == written[name].dtype for name in written)
    assert os.listdir(tmp_path) == ["x.safetensors"]


def test_write_tensors_is_deterministic_and_readable_by_safetensors(tmp_path):
    written, facts = tensors(), {"step": 17, "rate": 1e-3, "names": ["u", "v"]}
    for number in range(8):  # the library writes metadata in random order
        write_tensors(tmp_path / str(number), dict(reversed(written.items())) if number % 2 else written, facts)
    assert len({(tmp_path / str(number)).read_bytes() for number in range(8)}) == 1
    read = load_file(tmp_path / "0")
    assert all(torch.equal(read[name], written[name]) and read[name].dtype == written[name].dtype for name in written)


WRITER = """
import sys, torch
from pathlib import Path
from sigmasolver.runs import append_row, write_tensors
folder = Path(sys.argv[1])
for step in range(100000):
    write_tensors(folder / "resume.safetensors", {"a": torch.full((20000,), float(step))}, {"step": step})
    append_row(folder / "log.jsonl", {"step": step, "padding": "x" * 1000})
"""


@pytest.mark.parametrize("delay", [0.0, 0.013, 0.031, 0.057])
def test_kill_leaves_a_consistent_state_and_complete_rows(tmp_path, delay):
    process = Forked(WRITER, tmp_path)
    deadline = time.monotonic() + 60
    while not (tmp_path / "log.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.005)
    time.sleep(delay)
    process.send_signal(signal.SIGKILL)
    process.wait()
    read, facts = read_tensors(tmp_path / "resume.safetensors")
    assert (read["a"] == facts["step"]).all()
    rows = read_rows(tmp_path / "log.jsonl")
    assert [row["step"] for row in rows] == list(range(len(rows)))
    assert facts["step"] - 1 <= len(rows) <= facts["step"] + 1


def test_truncated_row_is_dropped_by_readers_and_writers(tmp_path):
    log = tmp_path / "log.jsonl"
    append_row(log, {"step": 0})
    with log.open("ab") as file:
        file.write(b'{"step": 1, "lo')
    assert read_rows(log) == [{"step": 0}]
    append_row(log, {"step": 1})
    assert read_rows(log) == [{"step": 0}, {"step": 1}]


def test_truncated_row_longer_than_the_search_block(tmp_path):
    log = tmp_path / "log.jsonl"
    append_row(log, {"step": 0})
    with log.open("ab") as file:
        file.write(b'"' + b"x" * 200_000)
    append_row(log, {"step": 1})
    assert read_rows(log) == [{"step": 0}, {"step": 1}]


def test_full_disk_is_one_sentence_and_keeps_the_previous_file(tmp_path):
    file, log = tmp_path / "resume.safetensors", tmp_path / "log.jsonl"
    write_tensors(file, {"a": torch.arange(10)}, {"step": 1})
    append_row(log, {"step": 1})
    code = f"""
import resource, signal, torch
from pathlib import Path
from sigmasolver.runs import append_row, write_tensors
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
for write in (
    lambda: write_tensors(Path({str(file)!r}), {{"a": torch.zeros(100000)}}, {{"step": 2}}),
    lambda: append_row(Path({str(log)!r}), {{"long": "x" * 10000}}),
):
    try:
        write()
    except ValueError as error:
        print(error)
"""
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[1] == resource.RLIM_INFINITY
    first, second = check_output(code).splitlines()
    assert "full" in first and "the previous file is kept" in first
    assert "full" in second and "the previous rows are kept" in second
    assert read_tensors(file)[1] == {"step": 1} and read_rows(log) == [{"step": 1}]
    assert sorted(os.listdir(tmp_path)) == ["log.jsonl", "resume.safetensors"]


def test_run_start_refuses_another_recipe(tmp_path):
    run = Run(tmp_path / "runs" / "first")
    run.start({"model": "physolver", "seed": 42, "grid": (8, 8)})
    run.start({"model": "physolver", "seed": 42, "grid": (8, 8)})
    assert run.recipe() == {"model": "physolver", "seed": 42, "grid": [8, 8]}
    with pytest.raises(ValueError, match=r"different recipe \(seed\)"):
        run.start({"model": "physolver", "seed": 43, "grid": (8, 8)})


def test_run_file_errors(tmp_path):
    with pytest.raises(ValueError, match="is not a run"):
        Run(tmp_path).recipe()
    for data in (b"{", b"[1]", b"\xff"):
        (tmp_path / "recipe.json").write_bytes(data)
        with pytest.raises(ValueError, match=r"recipe\.json"):
            Run(tmp_path).recipe()
    with pytest.raises(ValueError, match="not found"):
        read_tensors(tmp_path / "weights.safetensors")
    save_file({"a": torch.zeros(1)}, tmp_path / "foreign.safetensors")
    with pytest.raises(ValueError, match="written by another version"):
        read_tensors(tmp_path / "foreign.safetensors")
    (tmp_path / "log.jsonl").write_text('{"a": 1}\nnonsense\n')
    with pytest.raises(ValueError, match="Line 2 of"):
        read_rows(tmp_path / "log.jsonl")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.integers(0, 400), flip=st.none() | st.tuples(st.integers(0, 399), st.integers(1, 255)))
def test_read_tensors_of_damaged_files(tmp_path, cut, flip):
    file = tmp_path / "x.safetensors"
    write_tensors(file, {"a": torch.arange(20, dtype=torch.float32)}, {"step": 1})
    data = bytearray(file.read_bytes())
    if flip is not None:
        data[flip[0] % len(data)] ^= flip[1]
    file.write_bytes(data[: len(data) - cut] if cut < len(data) else b"")
    try:
        read, facts = read_tensors(file)
    except ValueError as error:
        assert str(error).endswith(".") and "\n" not in str(error)
    else:
        assert cut == 0 and json.dumps(facts) and sum(tensor.numel() for tensor in read.values()) <= 80


def test_provenance_commit(monkeypatch):
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        pytest.skip("not a checkout")
    monkeypatch.delenv("SIGMASOLVER_COMMIT", raising=False)
    head = subprocess.run(["git", "-C", root, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout
    assert head.startswith(provenance(torch.device("cpu"))["commit"].removesuffix("-dirty"))


def test_training_seconds_sum_over_restarts(tmp_path):
    run = Run(tmp_path)
    assert run.training_seconds() is None
    times = [1.0, 2.5, 4.0, 0.5, 3.0]  # restarted after the third row
    replace_rows(run.log, [{"step": step, "loss": 0.1, "seconds": seconds} for step, seconds in enumerate(times)])
    assert run.training_seconds() == 7.0
    replace_rows(run.log, [{"step": 1, "loss": 0.1}, {"step": 2, "loss": 0.1, "seconds": 1.0}])
    assert run.training_seconds() is None, "a log of an older version"
