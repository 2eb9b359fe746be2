"""Diagnosis files in the folder `diagnose/` of a run.

    NAME.jsonl   tidy rows, each with its provenance
    NAME.npz     arrays, if the diagnostic has any; never pickled

Files are renamed atomically, the rows last, so existing rows are complete. Rows store their number and the hash of
their arrays, so truncated or mismatched files are rejected.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from sigmasolver.diagnose.subject import Findings
from sigmasolver.evaluate import same_source
from sigmasolver.runs import Run, read_records, replace_rows
from sigmasolver.runs.files import os_errors_as_value_errors, replacing

__all__ = ["MEMBERS", "read_findings", "rows_file", "write_findings"]

MEMBERS = "members"
"""Key of the runs with other seeds that were included."""
KEYS = ("metric", "field", "lead", "layer", "case", "value", "deviation")


def rows_file(run: Run, name: str) -> Path:
    """Path of the rows of a diagnosis."""
    return run.path / "diagnose" / f"{name}.jsonl"


def write_findings(run: Run, name: str, findings: Findings, facts: Mapping[str, Any]) -> None:
    """Write a diagnosis into the run folder, replacing an earlier one of this name."""
    if not findings.rows:
        raise ValueError(f"The diagnostic {name} returned no rows, so its arrays would have no provenance.")
    rows, arrays = rows_file(run, name), rows_file(run, name).with_suffix(".npz")
    with os_errors_as_value_errors(rows.parent):
        rows.parent.mkdir(parents=True, exist_ok=True)
        rows.unlink(missing_ok=True)  # never leave old rows with new arrays
        arrays.unlink(missing_ok=True)
    digest = _write_arrays(arrays, findings.arrays) if findings.arrays else None
    common = {**facts, "diagnostic": name, "rows": len(findings.rows), "arrays": digest}
    replace_rows(rows, [{**common, **{key: _finite_or_none(row.get(key)) for key in KEYS}} for row in findings.rows])


def read_findings(run: Run, name: str, source: Mapping[str, Any] | None = None) -> Findings | None:
    """Read a stored diagnosis that matches `source`; None if there is none.

    A source without other seeds also matches a diagnosis that included some.
    """
    path = rows_file(run, name)
    if not path.exists():
        return None
    damaged = ValueError(f"{path} is truncated or damaged; remove it and diagnose the run again.")
    try:
        rows = read_records(path)
    except ValueError:
        raise damaged from None
    if not rows or rows[0].get("rows") != len(rows) or any(key not in row for row in rows for key in KEYS):
        raise damaged
    if source is not None and not _matches(source, rows[0]):
        return None
    return Findings(rows, {} if rows[0]["arrays"] is None else _read_arrays(path.with_suffix(".npz"), rows[0]))


def _matches(source: Mapping[str, Any], facts: Mapping[str, Any]) -> bool:
    required = {key: value for key, value in source.items() if key != MEMBERS}
    members = _digests(source)
    return same_source(required, facts) and (not members or members == _digests(facts))


def _digests(facts: Mapping[str, Any]) -> list[str]:
    """Digests of the weights of the other seeds, without the folder names, which are only labels."""
    return [member.rpartition(" ")[2] for member in facts.get(MEMBERS) or ()]


def _finite_or_none(value: Any) -> Any:
    """Replace non-finite numbers by None: JSON cannot represent them."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> str:
    with os_errors_as_value_errors(path), replacing(path) as file:
        np.savez_compressed(file, allow_pickle=False, **arrays)
        file.flush()
        return _hash(Path(file.name))


def _read_arrays(path: Path, facts: Mapping[str, Any]) -> dict[str, np.ndarray]:
    if not path.exists() or _hash(path) != facts["arrays"]:
        raise ValueError(f"{path} is missing, truncated or does not match its rows; remove both and diagnose again.")
    with np.load(path, allow_pickle=False) as file:
        return {key: file[key] for key in file.files}


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
