"""`choose_threads`: defaults set before torch is loaded, user settings kept, results unchanged."""

import json
import os
import subprocess
import sys

import pytest

from sigmasolver.runtime.threads import WAITING, cpu_quota


def run(code, **variables):
    inherited = {name: value for name, value in os.environ.items() if name not in (*WAITING, "OMP_NUM_THREADS")}
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**inherited, **variables}
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


CHOSEN = """
import json, os, sys
import sigmasolver.runtime.threads
sigmasolver.runtime.threads.cpu_quota = lambda: QUOTA
os.sched_getaffinity = lambda _: {0, 1, 2, 3}
sigmasolver.runtime.threads.choose_threads()
assert "torch" not in sys.modules
print(json.dumps([os.environ.get(name) for name in ("OMP_WAIT_POLICY", "OMP_NUM_THREADS")]))
"""


@pytest.mark.parametrize(
    ("quota", "environment", "chosen"),
    [
        (None, {}, ["PASSIVE", None]),
        (4, {}, ["PASSIVE", None]),
        (3, {}, ["PASSIVE", "3"]),
        (3, {"OMP_NUM_THREADS": "7"}, ["PASSIVE", "7"]),
        (None, {"OMP_WAIT_POLICY": "ACTIVE"}, ["ACTIVE", None]),
        (None, {"GOMP_SPINCOUNT": "5"}, [None, None]),
        (1, {"KMP_BLOCKTIME": "0"}, [None, "1"]),
    ],
)
def test_choose_threads_keeps_user_settings_and_applies_the_quota(quota, environment, chosen):
    assert json.loads(run(CHOSEN.replace("QUOTA", repr(quota)), **environment)) == chosen


@pytest.mark.parametrize(
    ("membership", "files", "quota"),
    [
        ("0::/", {"cpu.max": "150000 100000"}, 2),
        ("0::/", {"cpu.max": "max 100000"}, None),
        ("0::/", {"cpu.max": "1000 100000"}, 1),
        ("0::/a/b", {"a/b/cpu.max": "max 100000", "a/cpu.max": "300000 100000", "cpu.max": "max 100000"}, 3),
        ("0::/not/here", {"cpu.max": "200000 100000"}, 2),
        ("3:cpu,cpuacct:/j", {"cpu,cpuacct/j/cpu.cfs_quota_us": "5000", "cpu,cpuacct/j/cpu.cfs_period_us": "1000"}, 5),
        ("3:cpu,cpuacct:/j", {"cpu,cpuacct/j/cpu.cfs_quota_us": "-1", "cpu,cpuacct/j/cpu.cfs_period_us": "1000"}, None),
        ("4:memory:/", {"memory/cpu.max": "100000 100000"}, None),
        ("0::/", {"cpu.max": "what"}, None),
    ],
)
def test_cpu_quota_of_cgroups(tmp_path, membership, files, quota):
    (tmp_path / "own").write_text(membership + "\n")
    for name, text in files.items():
        path = tmp_path / "fs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    assert cpu_quota(tmp_path / "fs", tmp_path / "own") == quota


NUMBERS = """
import hashlib
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.LayerNorm(256), torch.nn.Linear(256, 1))
for _ in range(2):
    model(torch.randn(512, 64)).square().mean().backward()
numbers = b"".join(parameter.grad.numpy().tobytes() for parameter in model.parameters())
print(torch.get_num_threads(), hashlib.sha256(numbers).hexdigest())
"""


def test_choose_threads_does_not_change_results():
    if cpu_quota() is not None:
        pytest.skip("a quota may lower the count here")
    chosen = "from sigmasolver.runtime.threads import choose_threads\nchoose_threads()"
    assert run(NUMBERS) == run(chosen + NUMBERS)


def test_command_sets_the_passive_wait_policy():
    """The environment is set before libgomp is loaded, which prints its settings."""
    inherited = {name: value for name, value in os.environ.items() if name not in WAITING}
    result = subprocess.run(
        [sys.executable, "-m", "sigmasolver", "inspect", "missing.h5"],
        capture_output=True,
        text=True,
        env={**inherited, "OMP_DISPLAY_ENV": "VERBOSE"},
    )
    assert "missing.h5 not found" in result.stderr and "GOMP_SPINCOUNT = '0'" in result.stderr, result.stderr
