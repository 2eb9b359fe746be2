"""The command line: one sub-command per verb, no science. A mistake of the user ends in one sentence, exit code 2.

Heavy imports stand inside the commands, so that `--help` and a typing mistake answer at once.
"""

from __future__ import annotations

import sys

from sigmasolver.cli import data, diagnose, learn, ledger, measure, plan, report, use
from sigmasolver.cli.app import app
from sigmasolver.memory import keep_freed_memory
from sigmasolver.terminal import Interrupts, console

__all__ = ["app", "data", "diagnose", "learn", "ledger", "main", "measure", "plan", "report", "use"]


def main() -> None:
    keep_freed_memory()
    errors = console(stderr=True)
    stopped = "sigmasolver: stopped; the same command continues."
    with Interrupts():
        try:
            app()
        except SystemExit as leaving:  # typer ends every command so, Ctrl-C with 130
            if leaving.code == 130:
                errors.print(stopped, soft_wrap=True)
            raise
        except Exception as error:
            if Interrupts.asked:
                errors.print(stopped, soft_wrap=True)
                sys.exit(130)
            sentence = _sentence(error)
            if sentence is None:
                raise
            errors.print(f"sigmasolver: {sentence}", soft_wrap=True)
            sys.exit(2)


def _sentence(error: Exception) -> str | None:
    """What to tell the user, or None for a fault of ours, which keeps its traceback."""
    if isinstance(error, ValueError):
        return str(error)
    if isinstance(error, MemoryError) or "allocate" in str(error) or "out of memory" in str(error):
        return "There is not enough memory for this; ask for a coarser grid, fewer frames or fewer trajectories."
    return None
