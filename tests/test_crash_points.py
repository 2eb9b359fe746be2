"""Killed before or after any write, rename and sync, every command that writes leaves whole files and starts again."""

import json

import pytest

from tests.crash_points import CASES
from tests.forked import check_output

SOME = {"train": 60, "train best": 60, "train more": 60, "suite": 40, "measure": 6, "demo": 12}
"""Moments of commands that have hundreds of them, or take long; of the others all are tried."""


def killed(folder, names, points):
    said = check_output(f"from tests.crash_points import main; main({str(folder)!r}, {names!r}, {points})")
    for name, line in zip(names, said.splitlines(), strict=True):
        told = json.loads(line)
        assert told["case"] == name and told["wrong"] == [], told["wrong"]
        assert told["moments"] >= 5 and told["killed"] >= min(told["moments"], points or told["moments"]) - 1


def test_killed_in_the_middle(tmp_path):
    killed(tmp_path, ["simulate", "forecast h5"], 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_killed_everywhere(tmp_path, name):
    killed(tmp_path, [name], SOME.get(name, 0))
