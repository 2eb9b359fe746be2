"""The documentation: the notebook runs, and the site builds without warnings."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import matplotlib
import pytest

from sigmasolver.report.figures import FIGURES

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def run_notebook(folder, monkeypatch, change=lambda code: code):
    """Run the code cells in order, as Jupyter would, in an empty folder."""
    matplotlib.use("agg")
    monkeypatch.chdir(folder)
    notebook = json.loads((DOCS / "notebook.ipynb").read_text())
    assert notebook["nbformat"] == 4 and all(not cell.get("outputs") for cell in notebook["cells"])
    namespace: dict[str, object] = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            exec(change("".join(cell["source"])), namespace)
    assert (folder / "forecast.png").stat().st_size > 10_000
    return namespace["errors"]


def test_notebook_runs_at_a_smaller_size(tmp_path, monkeypatch, capsys):
    errors = run_notebook(tmp_path, monkeypatch, lambda code: code.replace("train.updates=150", "train.updates=5"))
    assert sorted(errors) == ["persistence", "transolver-sigma"]
    assert len(re.findall("%", capsys.readouterr().out)) == 12


@pytest.mark.slow
def test_notebook_model_beats_persistence(tmp_path, monkeypatch):
    errors = run_notebook(tmp_path, monkeypatch)
    assert all(errors["transolver-sigma"][lead] < errors["persistence"][lead] for lead in range(1, 7))


def test_gallery_shows_every_figure_with_its_command():
    text = (DOCS / "gallery.md").read_text()
    for name in FIGURES:
        assert f"sigmasolver figure {name} " in text and f"](pictures/gallery/{name}.png)" in text, name
    for picture in re.findall(r"!\[[^\]]+\]\(([^)]+)\)", text):
        assert (DOCS / picture).is_file(), picture


@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="needs mkdocs")
def test_mkdocs_site_builds_without_warnings(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    pages = {path.relative_to(tmp_path / "site").as_posix() for path in (tmp_path / "site").rglob("*.html")}
    assert {"index.html", "start.html", "gallery.html", "reference.html", "notebook.html", "results.html"} <= pages
    reference = (tmp_path / "site" / "reference.html").read_text()
    assert all(f'id="sigmasolver.api.{name}"' in reference for name in ("train_model", "open_dataset", "rollout"))
    for page in (tmp_path / "site").rglob("*.html"):
        loaded = re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="(https?:[^"]+)"', page.read_text())
        assert not loaded, f"{page.name} loads {loaded}"
