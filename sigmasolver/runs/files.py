"""Atomic writes: a file is written completely under a temporary name, then renamed.

A temporary file is created exclusively under a unique name and removed by the process that created it. It is locked
while it is written; an unlocked one was left by a killed process and is removed by the next writer of the same file.
Locks and temporary files never follow a symbolic link and never truncate an existing file.

OS errors on writing (a full disk, a read-only folder) or reading become a ValueError of one sentence.
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
    "open_lock",
    "os_errors_as_value_errors",
    "read_bytes",
    "refuse_folder",
    "remove_abandoned",
    "rename_into_place",
    "replacing",
    "replacing_folder",
    "temporary",
]

_SUFFIX = ".partial"


def refuse_folder(path: Path, kind: type[ValueError] = ValueError) -> None:
    """Raise an error of this kind if a file is to be written where a folder is."""
    if path.is_dir():
        raise kind(f"{path} is a folder; pass a file name.")


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a new file to write; on exit it is synced and renamed to `path`, on an error `path` is unchanged."""
    with temporary(path) as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
        rename_into_place(file, path)


@contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """Yield a new folder to write into; on exit it is renamed to `path`, which must be missing or an empty folder.
    Temporary folders left by killed processes are removed."""
    for name in filter(_temporary_pattern(path).fullmatch, os.listdir(path.parent)):
        _remove_folder_if_unlocked(path.with_name(name))
    folder = path.with_name(f".{_name_prefix(path)}.{secrets.token_hex(8)}{_SUFFIX}")
    folder.mkdir()
    lock = os.open(folder, os.O_RDONLY)
    try:
        _try_lock(lock)
        yield folder
        os.replace(folder, path)
    finally:
        os.close(lock)
        shutil.rmtree(folder, ignore_errors=True)


def _remove_folder_if_unlocked(folder: Path) -> None:
    with suppress(OSError):
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | _NOFOLLOW)
        try:
            if _try_lock(lock):
                shutil.rmtree(folder)
        finally:
            os.close(lock)


@contextmanager
def temporary(path: Path) -> Iterator[BinaryIO]:
    """A new, empty, locked file next to `path`; removed on exit unless it was renamed."""
    refuse_folder(path)
    remove_abandoned(path)
    file = _create_locked(path)
    try:
        yield file
    finally:
        try:
            file.close()  # flushing the buffer fails on a full disk
        finally:
            Path(file.name).unlink(missing_ok=True)


def rename_into_place(file: BinaryIO, path: Path) -> None:
    """Rename the complete temporary file to `path` atomically, and sync the folder against power loss."""
    os.replace(file.name, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _create_locked(path: Path) -> BinaryIO:
    while True:
        # File names have at most 255 bytes, so the name may have to be shortened.
        name = path.with_name(f".{_name_prefix(path)}.{secrets.token_hex(8)}{_SUFFIX}")
        with suppress(FileExistsError):
            file = open(name, "x+b")  # noqa: SIM115
            # Before it is locked, another writer may consider it abandoned and remove it.
            if _try_lock(file.fileno()) is not False and name.exists():
                return file
            file.close()


def remove_abandoned(path: Path) -> None:
    """Remove temporary files of `path` left by killed processes."""
    for name in filter(_temporary_pattern(path).fullmatch, os.listdir(path.parent)):
        with suppress(OSError):
            descriptor = os.open(path.with_name(name), os.O_RDWR | _NOFOLLOW | _NONBLOCK)
            try:
                if stat.S_ISREG(os.fstat(descriptor).st_mode) and _try_lock(descriptor):
                    path.with_name(name).unlink()
            finally:
                os.close(descriptor)


def _temporary_pattern(path: Path) -> re.Pattern[str]:
    """Pattern of the names of temporary files of `path`."""
    return re.compile(re.escape(f".{_name_prefix(path)}.") + "[0-9a-f]{16}" + re.escape(_SUFFIX))


def _name_prefix(path: Path) -> str:
    return os.fsdecode(os.fsencode(path.name)[:200])


def _try_lock(descriptor: int) -> bool | None:
    """Try to lock an open file; False: another process holds the lock, None: locks are not supported."""
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
    """Open a lock file, created if missing and never modified."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | _NOFOLLOW | _NONBLOCK, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR):
            raise _not_a_lock(path) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _not_a_lock(path)
    return descriptor


def _not_a_lock(path: Path) -> ValueError:
    return ValueError(f"{path} is a link or not a regular file and cannot be used as a lock; remove it.")


@contextmanager
def os_errors_as_value_errors(path: Path, kept: str = "", kind: type[ValueError] = ValueError) -> Iterator[None]:
    """Turn an OSError on writing into a ValueError of one sentence; `kept` states what data survives."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            reason = f"the disk or the user's quota is full{kept}; free some space and rerun the command"
        elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            reason = "permission denied; choose another folder"
        else:
            reason = f"the system reports {error.strerror or str(error)!r}{kept}"
        raise kind(f"{path} cannot be written: {reason}.") from error


def read_bytes(path: Path) -> bytes:
    """Read a regular file; raises FileNotFoundError if missing, ValueError if it cannot be read."""
    try:
        if path.exists() and not path.is_file():  # reading a pipe would block
            raise ValueError(f"{path} is not a regular file; remove it, or copy the file again.")
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path)) from None
    except PermissionError as error:
        raise ValueError(f"Permission denied: cannot read {path}; check its permissions.") from error
    except OSError as error:
        raise ValueError(f"{path} cannot be read: the system reports {error.strerror or str(error)!r}.") from error
