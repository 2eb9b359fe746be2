"""Render a study as one self-contained HTML page: curves, table, maps and provenance.

Script and style are inlined and images are data URIs; the content security policy of the page allows no other resource
or script. The underlying rows can be downloaded as CSV and JSON.
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
from sigmasolver.report.pictures import PERCENTILE, encode_animation
from sigmasolver.report.study import Study
from sigmasolver.runs.files import os_errors_as_value_errors, replacing

__all__ = ["render", "to_csv", "to_json", "write_page"]

_HERE = Path(__file__).parent
PIXELS_PER_INCH = 138
"""CSS pixels per inch of a figure; a two-column figure is as wide as the page."""
MEASURED = (
    "task", "model", "seed", "run", "diagnostic", "protocol", "part", "windows", "horizon", "grid", "cohort",
    "symmetries",
)  # fmt: skip
"""CSV columns that identify a measurement."""
NUMBER = ("metric", "field", "lead", "time", "layer", "case", "value", "deviation")
"""CSV columns of a value; `deviation` is over windows, `time` is the time of the lead."""
SOURCE = ("step", "weights", "data", "precision", "forecast_precision", "package", "torch", "machine", "commit", "date")
"""Keys that record the provenance."""


def write_page(path: Path, study: Study) -> None:
    """Write the page of a study; an existing page is replaced atomically."""
    text = render(study)
    with os_errors_as_value_errors(path), replacing(path) as file:
        file.write(text.encode())


def render(study: Study) -> str:
    """Render the page as a string."""
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
        animations=[encode_animation(maps) for maps in study.animations],
        csv=_data_uri("text/csv", to_csv(study).encode()) if study.records else None,
        json=_data_uri("application/json", to_json(study).encode()) if study.records else None,
        data_uri=_data_uri,
        pixels=PIXELS_PER_INCH,
        percentile=PERCENTILE,
        style=style,
        script=script,
        style_hash=_hash(style),
        script_hash=_hash(script),
    )


def to_csv(study: Study) -> str:
    """Format records as CSV, one line per row, without rounding; missing and non-finite values are empty."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([*MEASURED, *NUMBER])
    for row in study.records:
        cells = [*(row.get(name) for name in MEASURED), *(_number(study, row, name) for name in NUMBER)]
        writer.writerow(["×".join(map(str, cell)) if isinstance(cell, list) else cell for cell in cells])
    return file.getvalue()


def to_json(study: Study) -> str:
    """Format records as JSON, grouped by measurement with its provenance; non-finite values are null."""
    known = study.dimensions
    groups: dict[str, dict[str, Any]] = {}
    for row in study.records:
        facts = {name: row[name] for name in (*MEASURED, *SOURCE) if row.get(name) is not None}
        group = groups.setdefault(json.dumps(facts), {**facts, "rows": []})
        number = {name: _number(study, row, name) for name in NUMBER}
        group["rows"].append({name: value for name, value in number.items() if value is not None or name == "value"})
    units = {**known.units, "time": known.time_unit, "length": known.length_unit}
    document = {
        "title": study.title,
        "sample": study.sample,
        "time_step": known.step,
        "units": {name: unit for name, unit in units.items() if unit},
        "measurements": list(groups.values()),
    }
    return json.dumps(document, ensure_ascii=False, separators=(",", ":"))


def _number(study: Study, row: Mapping[str, Any], name: str) -> Any:
    if name != "time":
        return row.get(name)
    return None if row.get("lead") is None or study.dimensions.step is None else study.dimensions.step * row["lead"]


def _data_uri(kind: str, content: bytes) -> str:
    return f"data:{kind};base64," + base64.b64encode(content).decode("ascii")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii")
