"""Thousands of mutated stores and arrays: each is read or refused with one sentence, no traceback, hang or crash.

A crash or hang ends the process that reads them; it is counted, and the next process continues after it.
"""

from __future__ import annotations

import os
import selectors
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.data import fuzz
from tests.forked import Forked

INPUTS, SEED, SECONDS = 6000, 17, 90
"""No answer for SECONDS is a hang; longer than the CPU time limit for a damaged file."""


def outcomes(folder: Path, first: int, stop: int, module: str = "tests.data.fuzz") -> tuple[Counter[str], list[str]]:
    """Number of each outcome over the inputs of this module, and descriptions of the failures."""
    counts, failures = Counter[str](), list[str]()
    while first < stop:
        read_end, write_end = os.pipe()
        child = Forked(f"from {module} import main; main()", folder, first, stop, stdout=write_end)
        os.close(write_end)
        with open(read_end, "rb") as answers:
            with selectors.DefaultSelector() as selector:
                selector.register(answers, selectors.EVENT_READ)
                line, hung = b"", False
                while first < stop:
                    hung = not selector.select(SECONDS)
                    line = b"" if hung else answers.readline()
                    if not line:
                        break
                    _, outcome, *details = line.decode(errors="replace").split(maxsplit=2)
                    counts[outcome] += 1
                    failures += [f"{first}: {details}"] if outcome == "traceback" else []
                    first += 1
            child.kill()
            child.wait()
        if first < stop:
            counts["hang" if hung else "crash"] += 1
            failures.append(f"{first}: {'hang' if hung else 'crash'} {child.returncode}")
            first += 1
    return counts, failures


def test_fuzz_reports_every_outcome(tmp_path: Path) -> None:
    """A few inputs of every kind; unmutated files must be read completely, or the counts would mean nothing."""
    for kind, (name, make) in fuzz.SEED_FILES.items():
        make(tmp_path / name)
        fuzz.use(tmp_path / name, kind)
        (tmp_path / name).unlink()
        (tmp_path / name).with_suffix(".out").unlink(missing_ok=True)
    counts, failures = outcomes(tmp_path, 0, 60)
    assert counts["refused"] and counts["harmless"] and sum(counts.values()) == 60
    assert not failures, failures


@pytest.mark.slow
def test_fuzz_stores_and_arrays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = SEED * 1_000_000
    counts, failures = outcomes(tmp_path, first, first + INPUTS)
    with capsys.disabled():
        sys.stdout.write(f"\n{INPUTS} mutated inputs, seed {SEED}: {dict(counts)}\n")
    assert not failures, failures
    assert min(counts["refused"], counts["harmless"]) > INPUTS // 10 and sum(counts.values()) == INPUTS
