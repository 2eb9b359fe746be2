"""The command line: one sub-command per verb, no science. A mistake of the user ends in one sentence, exit code 2.

Heavy imports stand inside the commands, so that `--help` and a typing mistake answer at once.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any

from typer.main import get_command

from sigmasolver.cli import (
    data,
    demo,
    diagnose,
    evaluate,
    export,
    forecast,
    ledger,
    make_fixture,
    measure,
    models,
    plan,
    report,
    settings,
    share,
    submit,
    suite,
    train,
)
from sigmasolver.cli.app import app
from sigmasolver.cli.help import arrange
from sigmasolver.cli.terminal import console
from sigmasolver.ops.memory import keep_freed_memory
from sigmasolver.runtime.interrupts import STOPPED, Interrupts, LostProcessError

__all__ = [
    "app",
    "data",
    "demo",
    "diagnose",
    "evaluate",
    "export",
    "forecast",
    "ledger",
    "main",
    "make_fixture",
    "measure",
    "models",
    "plan",
    "report",
    "settings",
    "share",
    "submit",
    "suite",
    "train",
]

arrange(app)


def main() -> None:
    keep_freed_memory()
    if isinstance(sys.stdout, io.TextIOWrapper):  # a name that the terminal cannot show must not end the command
        sys.stdout.reconfigure(errors="backslashreplace")
    errors = console(stderr=True)
    with Interrupts():
        try:
            _check_names(sys.argv[1:])
            _command()()
        except SystemExit as leaving:  # typer ends every command so, Ctrl-C with 130
            if leaving.code == 130:
                errors.print(STOPPED, soft_wrap=True)
            raise
        except Exception as error:
            if Interrupts.asked:
                errors.print(STOPPED, soft_wrap=True)
                sys.exit(130)
            sentence = _sentence(error)
            if sentence is None:
                raise
            errors.print(f"sigmasolver: {sentence}", soft_wrap=True)
            if isinstance(error, LostProcessError):  # at exit, torch's threads may wait for it forever
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(2)
            sys.exit(2)


@cache
def _command() -> Any:
    """Made once in a process: typer reads the signatures of all commands for it."""
    return get_command(app)


def _check_names(words: Sequence[str]) -> None:
    """Files and messages here are UTF-8, and a name that is not could be written into neither."""
    for word in words:
        if not word.isascii() and word.encode(errors="replace").decode() != word:
            shown = word.encode(errors="backslashreplace").decode()
            raise ValueError(f'"{shown}" is not UTF-8; rename the file or folder.')


def _sentence(error: Exception) -> str | None:
    """What to tell the user, or None for a fault of ours, which keeps its traceback."""
    if isinstance(error, ValueError):
        return str(error)
    if isinstance(error, PermissionError) and error.filename is not None:
        return f"Permission denied: {error.filename}; check its permissions."
    if isinstance(error, MemoryError) or "allocate" in str(error) or "out of memory" in str(error):
        return "Out of memory; use a coarser grid, fewer frames or fewer trajectories."
    return None
