"""The command that prepares a run for publishing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sigmasolver.cli.app import Plugins, app
from sigmasolver.cli.evaluate import warn_other_code
from sigmasolver.cli.terminal import console

__all__ = ["save_pretrained"]


@app.command("save-pretrained")
def save_pretrained(
    run: Annotated[Path, typer.Argument(help="Folder of a finished run.")],
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    plugin: Plugins = None,
) -> None:
    """Write a run as a folder to publish in Hugging Face layout: safetensors, config.json and a model card."""
    from sigmasolver.model_cards.share import save_pretrained as write
    from sigmasolver.runs import Run

    warn_other_code(Run(run))
    write(run, out)
    console().print(f"{out}: check README.md before uploading\nload with: sigmasolver.load({str(out)!r})")
