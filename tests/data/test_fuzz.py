"""Thousands of mutated stores and arrays: each is used or refused with a sentence, and none breaks, hangs or crashes.

A crash or a hang ends the process that tries them; it is counted, and the next process goes on behind it.
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
"""A hang is no answer for so many seconds: more than the computing time that a damaged file is given."""


def outcomes(folder: Path, first: int, stop: int, module: str = "tests.data.fuzz") -> tuple[Counter[str], list[str]]:
    """How often each outcome of the inputs of this module came, and what is known of those that must not come."""
    count, bad = Counter[str](), list[str]()
    while first < stop:
        ours, theirs = os.pipe()
        child = Forked(f"from {module} import main; main()", folder, first, stop, stdout=theirs)
        os.close(theirs)
        with open(ours, "rb") as answers:
            with selectors.DefaultSelector() as waiting:
                waiting.register(answers, selectors.EVENT_READ)
                line, hung = b"", False
                while first < stop:
                    hung = not waiting.select(SECONDS)
                    line = b"" if hung else answers.readline()
                    if not line:
                        break
                    _, outcome, *rest = line.decode(errors="replace").split(maxsplit=2)
                    count[outcome] += 1
                    bad += [f"{first}: {rest}"] if outcome == "traceback" else []
                    first += 1
            child.kill()
            child.wait()
        if first < stop:
            count["hang" if hung else "crash"] += 1
            bad.append(f"{first}: {'hang' if hung else 'crash'} {child.returncode}")
            first += 1
    return count, bad


def test_the_fuzz_sees_what_must_not_come(tmp_path: Path) -> None:
    """A few inputs of every kind; whole ones are used to the end, or the count would say nothing."""
    for kind, (name, make) in fuzz.KINDS.items():
        make(tmp_path / name)
        fuzz.use(tmp_path / name, kind)
        (tmp_path / name).unlink()
        (tmp_path / name).with_suffix(".out").unlink(missing_ok=True)
    count, bad = outcomes(tmp_path, 0, 60)
    assert count["refused"] and count["harmless"] and sum(count.values()) == 60
    assert not bad, bad


@pytest.mark.slow
def test_mutated_stores_and_arrays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = SEED * 1_000_000
    count, bad = outcomes(tmp_path, first, first + INPUTS)
    with capsys.disabled():
        sys.stdout.write(f"\n{INPUTS} mutated inputs, seed {SEED}: {dict(count)}\n")
    assert not bad, bad
    assert min(count["refused"], count["harmless"]) > INPUTS // 10 and sum(count.values()) == INPUTS
