"""Thousands of mutated recipes, run folders and records: each is used or refused with a sentence, none breaks, hangs or
crashes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.data.test_fuzz import SEED, outcomes
from tests.runs import fuzz

INPUTS = 4500


def test_the_fuzz_sees_what_must_not_come(tmp_path: Path) -> None:
    """Some inputs of every kind; whole runs are used to the end, or the count would say nothing."""
    fuzz.make(tmp_path)
    for use in dict.fromkeys(use for uses in fuzz.USES.values() for use in uses):
        fuzz.restore(tmp_path, "half" if use is fuzz.use_half else "run")
        use(tmp_path, 0)
    count, bad = outcomes(tmp_path, 0, 60, "tests.runs.fuzz")
    assert count["refused"] and count["harmless"] and sum(count.values()) == 60
    assert not bad, bad


@pytest.mark.slow
def test_mutated_recipes_runs_and_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = SEED * 1_000_000
    count, bad = outcomes(tmp_path, first, first + INPUTS, "tests.runs.fuzz")
    with capsys.disabled():
        sys.stdout.write(f"\n{INPUTS} mutated files of runs, seed {SEED}: {dict(count)}\n")
    assert not bad, bad
    assert min(count["refused"], count["harmless"]) > INPUTS // 20 and sum(count.values()) == INPUTS
