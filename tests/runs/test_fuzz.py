"""Thousands of mutated recipes, run folders and records: each is read or refused with one sentence, no traceback, hang
or crash."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.data.test_fuzz import SEED, outcomes
from tests.runs import fuzz

INPUTS = 4500


def test_run_fuzz_reports_every_outcome(tmp_path: Path) -> None:
    """Some inputs of every kind; unmutated runs must be read completely, or the counts would mean nothing."""
    fuzz.make(tmp_path)
    for use in dict.fromkeys(use for uses in fuzz.USES.values() for use in uses):
        fuzz.restore(tmp_path, "half" if use is fuzz.use_half else "run")
        use(tmp_path, 0)
    counts, failures = outcomes(tmp_path, 0, 60, "tests.runs.fuzz")
    assert counts["refused"] and counts["harmless"] and sum(counts.values()) == 60
    assert not failures, failures


@pytest.mark.slow
def test_fuzz_recipes_runs_and_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = SEED * 1_000_000
    counts, failures = outcomes(tmp_path, first, first + INPUTS, "tests.runs.fuzz")
    with capsys.disabled():
        sys.stdout.write(f"\n{INPUTS} mutated files of runs, seed {SEED}: {dict(counts)}\n")
    assert not failures, failures
    assert min(counts["refused"], counts["harmless"]) > INPUTS // 20 and sum(counts.values()) == INPUTS
