"""The documentation: the notebook runs as it stands, and the site builds without a warning."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import matplotlib
import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def test_the_notebook_runs_offline_and_its_model_beats_persistence(tmp_path, monkeypatch, capsys):
    """Its code cells in order, as Jupyter would run them, in an empty folder."""
    notebook = json.loads((DOCS / "notebook.ipynb").read_text())
    assert notebook["nbformat"] == 4 and all(not cell.get("outputs") for cell in notebook["cells"])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("matplotlib.rcParams", matplotlib.RcParams(matplotlib.rcParams, backend="agg"))
    known: dict[str, object] = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), known)
    errors = known["errors"]
    assert all(errors["transolver-sigma"][lead] < errors["persistence"][lead] for lead in range(1, 7))
    assert len(re.findall("%", capsys.readouterr().out)) == 12
    assert (tmp_path / "forecast.png").stat().st_size > 10_000


@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="needs mkdocs")
def test_the_site_builds_without_a_warning(tmp_path):
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    pages = {path.relative_to(tmp_path / "site").as_posix() for path in (tmp_path / "site").rglob("*.html")}
    assert {"index.html", "start.html", "gallery.html", "reference.html", "notebook.html", "results.html"} <= pages
    reference = (tmp_path / "site" / "reference.html").read_text()
    assert all(f'id="sigmasolver.api.{name}"' in reference for name in ("train_model", "open_dataset", "rollout"))
    for page in (tmp_path / "site").rglob("*.html"):
        loaded = re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="(https?:[^"]+)"', page.read_text())
        assert not loaded, f"{page.name} loads {loaded}"
