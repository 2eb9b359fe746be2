"""What `sigmasolver inspect` prints for fixtures, as the pages of the documentation show it.

`python -m tests.simulate.pages` writes today's output into the pages.
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


def shown(page: str) -> Iterator[tuple[str, str]]:
    """What is inspected, and the output shown for it."""
    return ((found[1], found[2]) for found in BLOCK.finditer((DOCS / page).read_text()))


def printed(what: str) -> str:
    """The output for a file of a fixture, whose name is the first folder; in the folder at hand."""
    fixture = what.partition("/")[0]
    if not Path(fixture).exists():
        FIXTURES[fixture].write(Path(fixture), 0)
    done = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["inspect", what])
    if done.exit_code:
        raise RuntimeError(f"{what}: {done.output} {done.exception}")
    return "".join(f"{line.rstrip()}\n" for line in done.stdout.splitlines())


def main() -> None:
    for page in PAGES:
        text = (DOCS / page).read_text()
        with TemporaryDirectory() as folder, chdir(folder):
            text = BLOCK.sub(lambda found: f"```text\n$ sigmasolver inspect {found[1]}\n{printed(found[1])}```", text)
        (DOCS / page).write_text(text)


if __name__ == "__main__":
    os.environ["COLUMNS"] = "200"
    main()
