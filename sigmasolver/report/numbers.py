"""The numbers of a page to take along: the rows that it was made from, as CSV and as JSON."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping
from typing import Any

from sigmasolver.report.study import Study

__all__ = ["to_csv", "to_json"]

MEASURED = ("task", "model", "seed", "run", "diagnostic", "protocol", "part", "windows", "horizon", "grid", "cohort")
"""Who was measured, and on what."""
NUMBER = ("metric", "field", "lead", "time", "layer", "case", "value", "deviation")
"""A number; `deviation` is over windows, `time` that of the lead."""
SOURCE = ("step", "weights", "data", "precision", "forecast_precision", "package", "torch", "machine", "commit", "date")
"""Where it comes from."""


def to_csv(study: Study) -> str:
    """One line for each row; nothing is rounded, and what is not finite or not given is empty."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([*MEASURED, *NUMBER])
    for row in study.records:
        cells = [*(row.get(name) for name in MEASURED), *(_number(study, row, name) for name in NUMBER)]
        writer.writerow(["×".join(map(str, cell)) if isinstance(cell, list) else cell for cell in cells])
    return file.getvalue()


def to_json(study: Study) -> str:
    """The same numbers below who was measured and where they come from; what is not finite is null."""
    known = study.dimensions
    groups: dict[str, dict[str, Any]] = {}
    for row in study.records:
        facts = {name: row[name] for name in (*MEASURED, *SOURCE) if row.get(name) is not None}
        group = groups.setdefault(json.dumps(facts), {**facts, "rows": []})
        number = {name: _number(study, row, name) for name in NUMBER}
        group["rows"].append({name: value for name, value in number.items() if value is not None or name == "value"})
    units = {**known.units, "time": known.time_unit, "length": known.length_unit}
    plain = {
        "title": study.title,
        "sample": study.sample,
        "time_step": known.step,
        "units": {name: unit for name, unit in units.items() if unit},
        "measurements": list(groups.values()),
    }
    return json.dumps(plain, ensure_ascii=False, separators=(",", ":"))


def _number(study: Study, row: Mapping[str, Any], name: str) -> Any:
    if name != "time":
        return row.get(name)
    return None if row.get("lead") is None or study.dimensions.step is None else study.dimensions.step * row["lead"]
