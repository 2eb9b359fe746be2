"""The tutorials do what they say: their commands and scripts run in the order of the text."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_runs_at_a_smaller_size(path, tmp_path):
    """Every command and script, on a quarter of the flows and with a tenth of the updates or less."""
    text = path.read_text().replace("--count 24", "--count 6")
    text = re.sub(r"train\.updates=\d+", "train.updates=10 --set train.checks=1", text)
    run_blocks(text, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_runs_as_printed_and_its_models_beat_persistence(path, tmp_path):
    run_blocks(path.read_text(), tmp_path)
    for run in (tmp_path / "work").glob("runs/*/records.jsonl"):
        rows = [json.loads(line) for line in run.read_text().splitlines()]
        errors = {}
        for row in rows:
            if row["metric"] in ("relative_l2", "relative_l2_lead") and row["protocol"] == "free":
                errors.setdefault(row["model"] == "persistence", {})[row["field"], row["lead"]] = row["value"]
        assert all(value < errors[True][key] for key, value in errors[False].items()), run.parent.name


def run_blocks(text, tmp_path):
    commands = tmp_path / "bin"
    commands.mkdir()
    command = commands / "sigmasolver"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m sigmasolver "$@"\n')
    command.chmod(0o755)
    folder = tmp_path / "work"
    folder.mkdir()
    places = {"PATH": f"{commands}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    blocks = re.findall(r"^```(bash|python)\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    assert blocks
    for kind, code in blocks:
        words = ["bash", "-e", "-c", code] if kind == "bash" else [sys.executable, "-c", code]
        done = subprocess.run(
            words, cwd=folder, env={**os.environ, **places}, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, f"{code}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"


def test_links_of_the_tutorials_lead_somewhere():
    for path in TUTORIALS:
        for target in re.findall(r"\]\(([^)#:]+)\)", path.read_text()):
            assert (path.parent / target).exists(), f"{path.name}: {target}"
