"""One HTML page for one study: curves, table, maps and provenance in a single file that asks no one for anything.

Script and style stand in the page, pictures are data URIs, and the page's own policy lets a browser load nothing else
and run nothing but that one script.
"""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

from sigmasolver.report.chart import chart
from sigmasolver.report.numbers import to_csv, to_json
from sigmasolver.report.pictures import PERCENTILE, film
from sigmasolver.report.study import Curve, Maps, Study, Table
from sigmasolver.runs.files import plain_errors, replacing

__all__ = ["Curve", "Maps", "Study", "Table", "render", "write_page"]

_HERE = Path(__file__).parent
PIXELS = 138
"""To an inch of a drawing: one of two columns then is as wide as the page."""


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


def _data_uri(kind: str, content: bytes) -> str:
    return f"data:{kind};base64," + base64.b64encode(content).decode("ascii")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii")
