"""Commands killed between any two writes, renames and syncs leave complete files and can be rerun."""

import json

import pytest

from tests.crash_points import CASES
from tests.forked import check_output

POINTS = {"train": 60, "train best": 60, "train more": 60, "suite": 40, "measure": 6, "demo": 12}
"""Number of kill points for commands that have hundreds or are slow; the others are killed at every point."""


def check_kills(folder, names, points):
    output = check_output(f"from tests.crash_points import main; main({str(folder)!r}, {names!r}, {points})")
    for name, line in zip(names, output.splitlines(), strict=True):
        trial = json.loads(line)
        assert trial["case"] == name and trial["wrong"] == [], trial["wrong"]
        assert trial["moments"] >= 5 and trial["killed"] >= min(trial["moments"], points or trial["moments"]) - 1


def test_commands_killed_at_two_points(tmp_path):
    check_kills(tmp_path, ["simulate", "forecast h5"], 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_commands_killed_at_every_point(tmp_path, name):
    check_kills(tmp_path, [name], POINTS.get(name, 0))
