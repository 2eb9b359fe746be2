"""Hooks of the site (`mkdocs.yml`): the README is its first page, the notebook a page of its own."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(!?)\[([^\]]+)\]\(([^)#\s:]+)(#[^)\s]*)?\)")


def on_config(config: Any) -> Any:
    """Pages of the navigation that are not there are left out."""
    config.nav = _present(config.nav)
    return config


def _present(nav: list[Any]) -> list[Any]:
    made = {"index.md", "notebook.md"}
    kept: list[Any] = []
    for entry in nav:
        if isinstance(entry, str):
            kept += [entry] if entry in made or (ROOT / "docs" / entry).exists() else []
        else:
            ((title, inner),) = entry.items()
            inner = _present(inner) if isinstance(inner, list) else (_present([inner]) or [None])[0]
            kept += [{title: inner}] if inner else []
    return kept


def on_files(files: Any, config: Any) -> Any:
    readme = (ROOT / "README.md").read_text().replace("](docs/", "](")
    files.append(File.generated(config, "index.md", content=readme))
    files.append(File.generated(config, "notebook.md", content=_notebook(ROOT / "docs" / "notebook.ipynb")))
    return files


def _notebook(path: Path) -> str:
    """Its text and code; results are left to those who run it."""
    parts = []
    for cell in json.loads(path.read_text())["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
    return "\n\n".join(parts) + "\n\n[Download the notebook](notebook.ipynb).\n"


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """A link to a file of the repository that is no page becomes its name; other links are left for mkdocs to check."""
    docs = ROOT / "docs"
    here = (docs / page.file.src_uri).parent

    def keep(found: re.Match[str]) -> str:
        _, text, target, _ = found.groups()
        path = (here / target).resolve()
        foreign = not path.is_relative_to(docs) or (page.file.src_uri == "index.md" and (ROOT / target).exists())
        return text if foreign else found[0]

    return LINK.sub(keep, markdown)
