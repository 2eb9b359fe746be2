"""Writing so that nothing is ever half there: a complete file under a name of its own, then one rename.

A temporary is created exclusively, under a name that no one else has, and removed by the process that made it. It is
locked while it is written; one that nobody has locked was left by a killed process and is removed by the next writer of
the same file. Locks and temporaries never follow a symbolic link and never truncate what they find.

What the system says against writing (a full disk, a read-only folder) or reading becomes one plain sentence.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

__all__ = [
    "making_folder",
    "open_lock",
    "plain_errors",
    "read_bytes",
    "remove_abandoned",
    "replacing",
    "take_name",
    "temporary",
]

_ENDING = ".partial"


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a new file to write to; after the block it is on disk and has its name, or nothing changed."""
    with temporary(path) as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
        take_name(file, path)


@contextmanager
def making_folder(path: Path) -> Iterator[Path]:
    """Yield a new folder to write into; after the block it is called `path`, which must be free or an empty folder,
    or nothing changed. What killed processes left of earlier attempts is removed."""
    for name in filter(_pattern(path).fullmatch, os.listdir(path.parent)):
        _remove_folder_if_unlocked(path.with_name(name))
    folder = path.with_name(f".{_start(path)}.{secrets.token_hex(8)}{_ENDING}")
    folder.mkdir()
    lock = os.open(folder, os.O_RDONLY)
    try:
        _locked(lock)
        yield folder
        os.replace(folder, path)
    finally:
        os.close(lock)
        shutil.rmtree(folder, ignore_errors=True)


def _remove_folder_if_unlocked(folder: Path) -> None:
    with suppress(OSError):
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | _NOFOLLOW)
        try:
            if _locked(lock):
                shutil.rmtree(folder)
        finally:
            os.close(lock)


@contextmanager
def temporary(path: Path) -> Iterator[BinaryIO]:
    """A new, empty file beside `path`, open and locked; removed after the block unless it took another name."""
    remove_abandoned(path)
    file = _create(path)
    try:
        yield file
    finally:
        try:
            file.close()  # a full disk may refuse what is still in the buffer
        finally:
            Path(file.name).unlink(missing_ok=True)


def take_name(file: BinaryIO, path: Path) -> None:
    """Let the complete temporary take its name, in one step that also survives a power cut."""
    os.replace(file.name, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _create(path: Path) -> BinaryIO:
    while True:
        # Names have at most 255 bytes, so that of the file may not fit whole.
        name = path.with_name(f".{_start(path)}.{secrets.token_hex(8)}{_ENDING}")
        with suppress(FileExistsError):
            file = open(name, "x+b")  # noqa: SIM115
            # Another writer may take it for abandoned in the instant before it is locked.
            if _locked(file.fileno()) is not False and name.exists():
                return file
            file.close()


def remove_abandoned(path: Path) -> None:
    """Remove what killed processes left of earlier attempts to write `path`."""
    for name in filter(_pattern(path).fullmatch, os.listdir(path.parent)):
        with suppress(OSError):
            descriptor = os.open(path.with_name(name), os.O_RDWR | _NOFOLLOW | _NONBLOCK)
            try:
                if stat.S_ISREG(os.fstat(descriptor).st_mode) and _locked(descriptor):
                    path.with_name(name).unlink()
            finally:
                os.close(descriptor)


def _pattern(path: Path) -> re.Pattern[str]:
    """The names of its temporaries."""
    return re.compile(re.escape(f".{_start(path)}.") + "[0-9a-f]{16}" + re.escape(_ENDING))


def _start(path: Path) -> str:
    return os.fsdecode(os.fsencode(path.name)[:200])


def _locked(descriptor: int) -> bool | None:
    """Lock an open file; False: another process has it, None: there are no locks here."""
    try:
        import fcntl  # not on Windows

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError):
        return None
    return True


_NOFOLLOW, _NONBLOCK = getattr(os, "O_NOFOLLOW", 0), getattr(os, "O_NONBLOCK", 0)


def open_lock(path: Path) -> int:
    """Open a file to lock, made if it is missing and left as it is if not."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | _NOFOLLOW | _NONBLOCK, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR):
            raise _no_lock(path) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _no_lock(path)
    return descriptor


def _no_lock(path: Path) -> ValueError:
    return ValueError(f"{path} is a link or not a regular file and cannot be used as a lock; remove it.")


@contextmanager
def plain_errors(path: Path, kept: str = "", kind: type[ValueError] = ValueError) -> Iterator[None]:
    """Turn what the system says against writing into one sentence; `kept` says what survives."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            why = f"the disk or the user's quota is full{kept}; free some space and rerun the command"
        elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            why = "permission denied; choose another folder"
        else:
            why = f"the system reports {error.strerror or str(error)!r}{kept}"
        raise kind(f"{path} cannot be written: {why}.") from error


def read_bytes(path: Path) -> bytes:
    """The contents of a plain file; a missing one is FileNotFoundError, anything else that forbids it a sentence."""
    try:
        if path.exists() and not path.is_file():  # a pipe would be waited for
            raise ValueError(f"{path} is not a regular file; remove it, or copy the file again.")
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path)) from None
    except PermissionError as error:
        raise ValueError(f"Permission denied: cannot read {path}; check its permissions.") from error
    except OSError as error:
        raise ValueError(f"{path} cannot be read: the system reports {error.strerror or str(error)!r}.") from error
