"""The command that prepares a run for publishing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sigmasolver.cli.app import app
from sigmasolver.cli.terminal import console

__all__ = ["save_pretrained"]


@app.command("save-pretrained")
def save_pretrained(
    run: Annotated[Path, typer.Argument(help="The folder of a finished run.")],
    out: Annotated[Path, typer.Option(help="The folder to write.")],
) -> None:
    """Write a run as a folder to publish: safetensors, config.json and a model card, as Hugging Face lays them out."""
    from sigmasolver.model_cards.share import save_pretrained as write

    write(run, out)
    console().print(f"{out}: read README.md before you upload it\nload it: sigmasolver.load({str(out)!r})")
