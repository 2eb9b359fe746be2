"""The output of `sigmasolver inspect` for fixtures, as shown in the documentation.

`python -m tests.simulate.pages` writes the current output into the pages.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path
from tempfile import TemporaryDirectory

from typer.testing import CliRunner

from sigmasolver.cli import app
from sigmasolver.simulate.fixtures import FIXTURES

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ("formats.md", "realpdebench.md", "realm.md")
BLOCK = re.compile(r"```text\n\$ sigmasolver inspect ([\w./-]+)\n(.*?)```", re.DOTALL)


def documented_output(page: str) -> Iterator[tuple[str, str]]:
    """The inspected paths, each with the output in the page."""
    return ((match[1], match[2]) for match in BLOCK.finditer((DOCS / page).read_text()))


def inspect_output(path: str) -> str:
    """The output for a path in the current folder, whose first component is the name of a fixture."""
    fixture = path.partition("/")[0]
    if not Path(fixture).exists():
        FIXTURES[fixture].write(Path(fixture), 0)
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["inspect", path])
    if result.exit_code:
        raise RuntimeError(f"{path}: {result.output} {result.exception}")
    return "".join(f"{line.rstrip()}\n" for line in result.stdout.splitlines())


def main() -> None:
    for page in PAGES:
        text = (DOCS / page).read_text()
        with TemporaryDirectory() as folder, chdir(folder):
            text = BLOCK.sub(
                lambda match: f"```text\n$ sigmasolver inspect {match[1]}\n{inspect_output(match[1])}```", text
            )
        (DOCS / page).write_text(text)


if __name__ == "__main__":
    os.environ["COLUMNS"] = "200"
    main()
