"""The files of a diagnosis, in the folder `diagnose/` of a run.

    NAME.jsonl   tidy rows, each with the facts that say where its number comes from
    NAME.npz     arrays, where a diagnostic has any; nothing is pickled

Each file is replaced whole, the rows last, so rows that are there are complete. They tell how many they are and what
their arrays hash to: a file that was cut or mixed with another is refused.
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
from sigmasolver.runs.files import plain_errors, replacing

__all__ = ["MEMBERS", "read_findings", "rows_file", "write_findings"]

MEMBERS = "members"
"""The fact that names the runs of other seeds that were looked at together."""
KEYS = ("metric", "field", "lead", "layer", "case", "value", "deviation")


def rows_file(run: Run, name: str) -> Path:
    """Where the rows of a diagnosis lie."""
    return run.path / "diagnose" / f"{name}.jsonl"


def write_findings(run: Run, name: str, findings: Findings, facts: Mapping[str, Any]) -> None:
    """Put a diagnosis into the run folder, in place of an earlier one of this name."""
    if not findings.rows:
        raise ValueError(f"The diagnostic {name} returned no rows, so its arrays would have no provenance.")
    rows, arrays = rows_file(run, name), rows_file(run, name).with_suffix(".npz")
    with plain_errors(rows.parent):
        rows.parent.mkdir(parents=True, exist_ok=True)
        rows.unlink(missing_ok=True)  # old rows must not stand beside new arrays
        arrays.unlink(missing_ok=True)
    digest = _write_arrays(arrays, findings.arrays) if findings.arrays else None
    common = {**facts, "diagnostic": name, "rows": len(findings.rows), "arrays": digest}
    replace_rows(rows, [{**common, **{key: _plain(row.get(key)) for key in KEYS}} for row in findings.rows])


def read_findings(run: Run, name: str, source: Mapping[str, Any] | None = None) -> Findings | None:
    """A diagnosis that is there and has these facts, or None.

    Rows of one run alone are also found in a diagnosis that looked at other seeds beside it.
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
    if source is not None and not _same(source, rows[0]):
        return None
    return Findings(rows, {} if rows[0]["arrays"] is None else _read_arrays(path.with_suffix(".npz"), rows[0]))


def _same(source: Mapping[str, Any], held: Mapping[str, Any]) -> bool:
    wanted = {key: value for key, value in source.items() if key != MEMBERS}
    members = _digests(source)
    return same_source(wanted, held) and (not members or members == _digests(held))


def _digests(facts: Mapping[str, Any]) -> list[str]:
    """The weights of the other seeds; the names of their folders before them are labels."""
    return [member.rpartition(" ")[2] for member in facts.get(MEMBERS) or ()]


def _plain(value: Any) -> Any:
    """Not finite becomes null: JSON has no word for it."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> str:
    with plain_errors(path), replacing(path) as file:
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
