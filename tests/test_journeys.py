"""The journeys of `docs/journeys` in an empty folder, with the package as its wheel holds it: none of them stumbles."""

import importlib.util
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
JOURNEYS = sorted((ROOT / "docs" / "journeys").glob("*.sh"))
needs_hatchling = pytest.mark.skipif(importlib.util.find_spec("hatchling") is None, reason="needs hatchling")


def commands(text):
    """The sub-commands of `sigmasolver` in a script or in what it printed."""
    return re.findall(r"sigmasolver ([a-z-]+)", text)


@pytest.mark.parametrize("script", JOURNEYS, ids=lambda path: path.stem)
def test_what_is_kept_is_what_the_script_prints(script):
    """The kept output has every command of the script, in order, and ends with its time."""
    kept = script.with_suffix(".txt").read_text()
    assert re.search(rf"The {script.stem} took \d+ seconds, \d+ of CPU time\.\n$", kept)
    asked = [name for name in commands(re.sub(r"^#.*", "", script.read_text(), flags=re.M)) if name != "s"]
    shown = commands("\n".join(line for line in kept.splitlines() if line.startswith("$ ")))
    assert set(asked) == set(shown)
    assert "should have been refused" not in kept and "Traceback" not in kept


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The files of the wheel, apart from the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    words = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(words, cwd=ROOT, check=True, capture_output=True)
    (made,) = folder.glob("*.whl")
    with zipfile.ZipFile(made) as archive:
        archive.extractall(folder / "site")
    commands = folder / "bin"
    commands.mkdir()
    for name, words in (("sigmasolver", "-m sigmasolver"), ("python", "")):
        (commands / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {words} "$@"\n')
        (commands / name).chmod(0o755)
    return folder


@needs_hatchling
@pytest.mark.slow
@pytest.mark.parametrize("script", JOURNEYS, ids=lambda path: path.stem)
def test_runs_outside_of_the_checkout(script, wheel, tmp_path):
    path = f"{wheel / 'bin'}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(wheel / "site"), "PYTHONSAFEPATH": "1"}
    words = ["bash", str(script)]
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert "Traceback" not in done.stdout + done.stderr
