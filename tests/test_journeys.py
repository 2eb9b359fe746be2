"""The scripts of `docs/journeys` run in an empty folder with the package installed from its wheel."""

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
    """The subcommands of `sigmasolver` in a script or its output."""
    return re.findall(r"sigmasolver ([a-z-]+)", text)


@pytest.mark.parametrize("script", JOURNEYS, ids=lambda path: path.stem)
def test_recorded_journey_output_matches_the_script(script):
    """The recorded output has every command of the script and ends with its time."""
    output = script.with_suffix(".txt").read_text()
    assert re.search(rf"The {script.stem} took \d+ seconds, \d+ of CPU time\.\n$", output)
    expected = [name for name in commands(re.sub(r"^#.*", "", script.read_text(), flags=re.M)) if name != "s"]
    actual = commands("\n".join(line for line in output.splitlines() if line.startswith("$ ")))
    assert set(expected) == set(actual)
    assert "should have been refused" not in output and "Traceback" not in output


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The unpacked wheel, outside of the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (file,) = folder.glob("*.whl")
    with zipfile.ZipFile(file) as archive:
        archive.extractall(folder / "site")
    scripts = folder / "bin"
    scripts.mkdir()
    for name, arguments in (("sigmasolver", "-m sigmasolver"), ("python", "")):
        (scripts / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments} "$@"\n')
        (scripts / name).chmod(0o755)
    return folder


@needs_hatchling
@pytest.mark.slow
@pytest.mark.parametrize("script", JOURNEYS, ids=lambda path: path.stem)
def test_journey_runs_with_the_wheel(script, wheel, tmp_path):
    path = f"{wheel / 'bin'}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(wheel / "site"), "PYTHONSAFEPATH": "1"}
    command = ["bash", str(script)]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=1200)
    assert result.returncode == 0, f"{result.stdout[-3000:]}\n{result.stderr[-3000:]}"
    assert "Traceback" not in result.stdout + result.stderr
