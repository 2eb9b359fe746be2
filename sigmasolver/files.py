"""Writing so that nothing is ever half there: a complete file under another name, then one rename.

What the system says against writing (a full disk, a read-only folder) becomes one plain sentence.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["new_name", "plain_errors", "replacing", "take_name"]


def new_name(path: Path) -> Path:
    """Where a file is made before it takes its name; what a killed run left there is overwritten."""
    return path.with_name(path.name + ".new")


def take_name(path: Path) -> None:
    """Let the complete new file take its name, in one step that also survives a power cut."""
    os.replace(new_name(path), path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the name to write to; after the block the file is on disk and has its own name, or nothing changed."""
    temporary = new_name(path)
    try:
        yield temporary
        with open(temporary, "rb") as handle:
            os.fsync(handle.fileno())
        take_name(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def plain_errors(path: Path, kept: str = "", kind: type[ValueError] = ValueError) -> Iterator[None]:
    """Turn what the system says against writing into one sentence; `kept` says what survives."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            why = f"the disk or the user's share of it is full{kept}; make room and repeat the command"
        elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            why = "this user may not write there; choose another folder"
        else:
            why = f"the system says {error.strerror or str(error)!r}{kept}"
        raise kind(f"{path} cannot be written: {why}.") from error
