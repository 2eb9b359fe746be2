"""The commands and scripts of the tutorials run in the order of the text."""

import contextlib
import io
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from sigmasolver.cli import main
from sigmasolver.train import dry_run
from tests.registered import forgotten

ROOT = Path(__file__).parents[1]
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
SMALLER = {
    "simulate demo": "simulate demo --set grid=64 --set burn_in=0.5",
    "--count 24": "--count 6",
    "--count 10": "--count 4",
    "train=8, test=2": "train=2, test=2",
    "--windows 4": "--windows 2",
    "(32, 32), history=2": "(16, 16), history=2",
    "space_stride=2": "space_stride=4",
}
FORWARD_COMMAND = """
import json, socket, sys
with socket.socket(socket.AF_UNIX) as client:
    client.connect("commands")
    client.sendall(json.dumps(sys.argv[1:]).encode() + b"\\n")
    code, out, err = json.loads(client.makefile().read())
sys.stdout.write(out)
sys.stderr.write(err)
sys.exit(code)
"""


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_tutorial_runs_at_a_smaller_size(path, tmp_path, simulated, monkeypatch):
    """Every command and script, on a few coarse flows and with a few updates of small batches; simulations are cached.

    The shell runs its blocks as printed, but `sigmasolver` forwards its arguments to this process, which has already
    imported everything; the scripts run here too.
    """
    text = path.read_text()
    for printed, smaller in SMALLER.items():
        text = text.replace(printed, smaller)
    text = re.sub(r"train\.updates=\d+", "train.updates=4 --set train.batch=2 --set train.checks=1", text)
    script = tmp_path / "sigmasolver.py"
    script.write_text(FORWARD_COMMAND)
    environment = environment_with(tmp_path, f'exec "{sys.executable}" -SE "{script}" "$@"')
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(dry_run, "TIMING_SECONDS", 0.0)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("commands")  # a relative path, since socket names must be short
        server.listen()
        server.settimeout(0.02)
        for kind, code in blocks_of(text):
            if kind == "python":
                with forgotten(), contextlib.redirect_stdout(io.StringIO()):
                    exec(compile(code, path.name, "exec"), {"__name__": "__main__"})
            else:
                run_shell(code, environment, server, simulated)


@pytest.fixture(scope="module")
def simulated():
    """Cached results of `simulate` by arguments: all tutorials start with the same command."""
    return {}


def run_shell(code, environment, server, simulated):
    """Run a block in bash; its calls of `sigmasolver` are executed in this process."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(["bash", "-e", "-c", code], env=environment, **streams) as shell:
        while shell.poll() is None:
            with contextlib.suppress(TimeoutError):
                connection, _ = server.accept()
                with connection:
                    connection.settimeout(None)
                    args = json.loads(connection.makefile().readline())
                    connection.sendall(json.dumps(run_command_cached(args, simulated)).encode())
        output = shell.stdout.read()
    assert shell.returncode == 0, f"{code}\n{output[-4000:]}"


def run_command_cached(args, simulated):
    if args[0] != "simulate":
        return run_command(args)
    file, key = Path(args[args.index("--out") + 1]), tuple(args)
    if key not in simulated:
        simulated[key] = run_command(args), file.read_bytes()
    result, contents = simulated[key]
    file.write_bytes(contents)
    return result


def run_command(args):
    """Exit code, stdout and stderr of a command in this process."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with (
        forgotten(),
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        patch.setattr(sys, "argv", ["sigmasolver", *args])
        try:
            main()
        except SystemExit as system_exit:
            code = system_exit.code or 0
    return code, out.getvalue(), err.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_tutorial_runs_as_printed_and_models_beat_persistence(path, tmp_path):
    environment = environment_with(tmp_path, f'exec "{sys.executable}" -m sigmasolver "$@"')
    folder = tmp_path / "work"
    folder.mkdir()
    for kind, code in blocks_of(path.read_text()):
        command = ["bash", "-e", "-c", code] if kind == "bash" else [sys.executable, "-c", code]
        result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=1200)
        assert result.returncode == 0, f"{code}\n{result.stdout[-2000:]}\n{result.stderr[-2000:]}"
    for run in (tmp_path / "work").glob("runs/*/records.jsonl"):
        rows = [json.loads(line) for line in run.read_text().splitlines()]
        errors = {}
        for row in rows:
            if row["metric"] in ("relative_l2", "relative_l2_lead") and row["protocol"] == "free":
                errors.setdefault(row["model"] == "persistence", {})[row["field"], row["lead"]] = row["value"]
        assert all(value < errors[True][key] for key, value in errors[False].items()), run.parent.name


def blocks_of(text):
    blocks = re.findall(r"^```(bash|python)\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    assert blocks
    return blocks


def environment_with(folder, line):
    """The environment with a command `sigmasolver` that runs this line of shell."""
    scripts = folder / "bin"
    scripts.mkdir()
    command = scripts / "sigmasolver"
    command.write_text(f"#!/bin/sh\n{line}\n")
    command.chmod(0o755)
    path = f"{scripts}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def test_tutorial_links_exist():
    for path in TUTORIALS:
        prose = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
        for target in re.findall(r"\]\(([^)#:]+)\)", prose):
            assert (path.parent / target).exists(), f"{path.name}: {target}"
