"""One HTML page for one study: curves, table, maps and provenance in a single file that asks no one for anything.

Script and style stand in the page, pictures are data URIs, and the page's own policy lets a browser load nothing else
and run nothing but that one script. The rows that it was made from can be taken along, as CSV and as JSON.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sigmasolver.report.chart import chart
from sigmasolver.report.pictures import PERCENTILE, film
from sigmasolver.report.study import Study
from sigmasolver.runs.files import plain_errors, replacing

__all__ = ["render", "to_csv", "to_json", "write_page"]

_HERE = Path(__file__).parent
PIXELS = 138
"""To an inch of a drawing: one of two columns then is as wide as the page."""
MEASURED = ("task", "model", "seed", "run", "diagnostic", "protocol", "part", "windows", "horizon", "grid", "cohort")
"""Columns of the CSV: who was measured, and on what."""
NUMBER = ("metric", "field", "lead", "time", "layer", "case", "value", "deviation")
"""A number; `deviation` is over windows, `time` that of the lead."""
SOURCE = ("step", "weights", "data", "precision", "forecast_precision", "package", "torch", "machine", "commit", "date")
"""Where it comes from."""


def write_page(path: Path, study: Study) -> None:
    """Write the page of a study; a page that is already there is replaced whole."""
    text = render(study)
    with plain_errors(path), replacing(path) as file:
        file.write(text.encode())


def render(study: Study) -> str:
    """The page as text."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(_HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    style, script = ((_HERE / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    return environment.get_template("page.html.j2").render(
        study=study,
        chart=chart(study.curves, study.dimensions),
        films=[film(maps) for maps in study.films],
        csv=_data_uri("text/csv", to_csv(study).encode()) if study.records else None,
        json=_data_uri("application/json", to_json(study).encode()) if study.records else None,
        data_uri=_data_uri,
        pixels=PIXELS,
        percentile=PERCENTILE,
        style=style,
        script=script,
        style_hash=_hash(style),
        script_hash=_hash(script),
    )


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


def _data_uri(kind: str, content: bytes) -> str:
    return f"data:{kind};base64," + base64.b64encode(content).decode("ascii")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii")
