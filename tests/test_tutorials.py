"""The tutorials do what they say: their commands and scripts run in the order of the text."""

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
from tests.registered import forgotten

ROOT = Path(__file__).parents[1]
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
SMALLER = {
    "simulate demo": "simulate demo --set grid=64 --set burn_in=0.5",
    "--count 24": "--count 6",
    "--count 10": "--count 4",
    "train=8, test=2": "train=2, test=2",
    "--windows 4": "--windows 2",
}
HANDED_OVER = """
import json, socket, sys
with socket.socket(socket.AF_UNIX) as other:
    other.connect("commands")
    other.sendall(json.dumps(sys.argv[1:]).encode() + b"\\n")
    code, out, err = json.loads(other.makefile().read())
sys.stdout.write(out)
sys.stderr.write(err)
sys.exit(code)
"""


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_runs_at_a_smaller_size(path, tmp_path, simulated, monkeypatch):
    """Every command and script, on a few coarse flows and with a few updates of small batches; one flow for all.

    The shell runs its blocks as printed, but `sigmasolver` hands its words over to this process, which has everything
    imported already; the scripts run here too.
    """
    text = path.read_text()
    for printed, smaller in SMALLER.items():
        text = text.replace(printed, smaller)
    text = re.sub(r"train\.updates=\d+", "train.updates=4 --set train.batch=2 --set train.checks=1", text)
    script = tmp_path / "sigmasolver.py"
    script.write_text(HANDED_OVER)
    environment = environment_with(tmp_path, f'exec "{sys.executable}" -SE "{script}" "$@"')
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    with socket.socket(socket.AF_UNIX) as door:
        door.bind("commands")  # relative to the folder, since the name of a socket must be short
        door.listen()
        door.settimeout(0.02)
        for kind, code in blocks_of(text):
            if kind == "python":
                with forgotten(), contextlib.redirect_stdout(io.StringIO()):
                    exec(compile(code, path.name, "exec"), {"__name__": "__main__"})
            else:
                run_shell(code, environment, door, simulated)


@pytest.fixture(scope="module")
def simulated():
    """What a command of `simulate` left in its folder, by its words: the tutorials begin with the same one."""
    return {}


def run_shell(code, environment, door, simulated):
    """A block in bash, whose calls of `sigmasolver` are answered here."""
    told = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(["bash", "-e", "-c", code], env=environment, **told) as shell:
        while shell.poll() is None:
            with contextlib.suppress(TimeoutError):
                asked, _ = door.accept()
                with asked:
                    asked.settimeout(None)
                    words = json.loads(asked.makefile().readline())
                    asked.sendall(json.dumps(answer_once(words, simulated)).encode())
        said = shell.stdout.read()
    assert shell.returncode == 0, f"{code}\n{said[-4000:]}"


def answer_once(words, simulated):
    if words[0] != "simulate":
        return answer(words)
    file, known = Path(words[words.index("--out") + 1]), tuple(words)
    if known not in simulated:
        simulated[known] = answer(words), file.read_bytes()
    said, contents = simulated[known]
    file.write_bytes(contents)
    return said


def answer(words):
    """Exit code, stdout and stderr of a command in this process."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with (
        forgotten(),
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        patch.setattr(sys, "argv", ["sigmasolver", *words])
        try:
            main()
        except SystemExit as leaving:
            code = leaving.code or 0
    return code, out.getvalue(), err.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_runs_as_printed_and_its_models_beat_persistence(path, tmp_path):
    environment = environment_with(tmp_path, f'exec "{sys.executable}" -m sigmasolver "$@"')
    folder = tmp_path / "work"
    folder.mkdir()
    for kind, code in blocks_of(path.read_text()):
        words = ["bash", "-e", "-c", code] if kind == "bash" else [sys.executable, "-c", code]
        done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=1200)
        assert done.returncode == 0, f"{code}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
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
    """The environment, with a command `sigmasolver` that is this line of a shell."""
    commands = folder / "bin"
    commands.mkdir()
    command = commands / "sigmasolver"
    command.write_text(f"#!/bin/sh\n{line}\n")
    command.chmod(0o755)
    path = f"{commands}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def test_links_of_the_tutorials_lead_somewhere():
    for path in TUTORIALS:
        prose = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
        for target in re.findall(r"\]\(([^)#:]+)\)", prose):
            assert (path.parent / target).exists(), f"{path.name}: {target}"
