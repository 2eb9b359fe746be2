"""The command line: one subcommand per verb, no science. A user error prints one sentence and exits with code 2.

Heavy imports are local to the commands, so that `--help` and usage errors are fast.
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
from sigmasolver.cli.help import group_commands
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

group_commands(app)


def main() -> None:
    keep_freed_memory()
    if isinstance(sys.stdout, io.TextIOWrapper):  # a name the terminal cannot encode must not abort the command
        sys.stdout.reconfigure(errors="backslashreplace")
    errors = console(stderr=True)
    with Interrupts():
        try:
            _check_names(sys.argv[1:])
            _command()()
        except SystemExit as system_exit:  # typer ends every command this way; 130: Ctrl-C
            if system_exit.code == 130:
                errors.print(STOPPED, soft_wrap=True)
            raise
        except Exception as error:
            if Interrupts.requested:
                errors.print(STOPPED, soft_wrap=True)
                sys.exit(130)
            message = _sentence(error)
            if message is None:
                raise
            errors.print(f"sigmasolver: {message}", soft_wrap=True)
            if isinstance(error, LostProcessError):  # at exit, torch's threads may block on the lost process
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(2)
            sys.exit(2)


@cache
def _command() -> Any:
    """The click command, built once per process: typer inspects the signatures of all commands."""
    return get_command(app)


def _check_names(arguments: Sequence[str]) -> None:
    """Reject names that are not valid UTF-8: files and messages are written in UTF-8."""
    for argument in arguments:
        if not argument.isascii() and argument.encode(errors="replace").decode() != argument:
            escaped = argument.encode(errors="backslashreplace").decode()
            raise ValueError(f'"{escaped}" is not UTF-8; rename the file or folder.')


def _sentence(error: Exception) -> str | None:
    """The message for a user error, or None for a bug, which keeps its traceback."""
    if isinstance(error, ValueError):
        return str(error)
    if isinstance(error, PermissionError) and error.filename is not None:
        return f"Permission denied: {error.filename}; check its permissions."
    if isinstance(error, MemoryError) or "allocate" in str(error) or "out of memory" in str(error):
        return "Out of memory; use a coarser grid, fewer frames or fewer trajectories."
    return None
