"""The store: an HDF5 file of trajectories `(count, frames, *grid, fields)`, with crash-safe writes and lazy reads.

The layout, the fingerprint and the crash safety are described in docs/data_format.md.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import closing, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import h5py
import numpy as np

from sigmasolver.data import slots
from sigmasolver.data.header import DTYPES, FORMAT, VERSION, Header, OtherStoreError, StoreError, fingerprint
from sigmasolver.data.isolated import ask
from sigmasolver.data.layout import Layout
from sigmasolver.data.reader import Key, Reader, contiguous
from sigmasolver.runs.files import os_errors_as_value_errors, rename_into_place, replacing, temporary

__all__ = ["LEGACY_AXES", "Header", "StoreError", "StoreReader", "Writer", "is_store", "open_store", "write_store"]

_BLOCK = 16 * 2**20
LEGACY_AXES: dict[str, tuple[str, ...]] = {"realpdebench": ("y", "x")}
"""Axes, by source, of stores and runs written before axes had names; these stores name their coordinates x, y."""
_verified: dict[tuple[int, ...], set[int]] = {}
"""Trajectories already verified by this process, by device, inode, size and mtime of the file. The rows of a suite
reopen the same store many times, and hashing 10 GB each time takes longer than a short training."""


class Writer:
    """Appends trajectories to a store, which is created or resumed.

    One process writes at a time; any number may read concurrently. A store of another count is first copied into one of
    the requested count, which needs disk space for both.
    """

    def __init__(self, path: str | Path, header: Header, count: int) -> None:
        if count < 1:
            raise StoreError(f"count is {count}; it must be at least 1.")
        self.path, self.header, self.count = Path(path), header, count
        with os_errors_as_value_errors(self.path, kind=StoreError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = slots.lock(self.path)
            try:
                self._file: slots.SlotFile | None = _prepare(self.path, header, count)
            except BaseException:
                slots.unlock(self.path, self._lock)
                raise

    @property
    def whole(self) -> int:
        """Number of complete trajectories."""
        return len(self._open.digests)

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the complete trajectories."""
        return fingerprint(self.header, self._open.digests)

    @property
    def _open(self) -> slots.SlotFile:
        if self._file is None:
            raise StoreError(f"{self.path} is closed; reopen it for writing.")
        return self._file

    def append(self, trajectories: np.ndarray) -> None:
        """Append trajectories `(n, frames, *grid, fields)`."""
        if trajectories.shape[1:] != self.header.shape:
            raise StoreError(
                f"Got a trajectory of shape {trajectories.shape[1:]}, but those of {self.path} "
                f"have shape {self.header.shape}."
            )
        if self.whole + len(trajectories) > self.count:
            raise StoreError(f"{self.path} has room for {self.count} trajectories, but more were given.")
        stored = slots.cast(trajectories, DTYPES[self.header.dtype])
        survives = f", and its {self.whole} complete trajectories are kept" if self.whole else ""
        with os_errors_as_value_errors(self.path, survives, StoreError):
            self._open.put(stored)

    def close(self) -> None:
        """Close the file. Appended trajectories persist whether or not this is called."""
        if self._file is not None:
            self._file.close()
            slots.unlock(self.path, self._lock)
            self._file = None

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _prepare(path: Path, header: Header, count: int) -> slots.SlotFile:
    """Create, resize or check the store at `path` for this header and `count`, and open it."""
    if not path.exists() or _is_empty(path):
        slots.check_disk_space(path, header.nbytes * count)
        with temporary(path) as file:
            slots.create(file, header, count)
            rename_into_place(file, path)
        return slots.SlotFile(path, header, count)
    with open_store(path) as old:
        difference = old.header.difference(header)
        if difference is not None:
            raise OtherStoreError(f"{path} cannot be resumed: {difference}; choose another file name.")
        if len(old) > count:
            raise StoreError(f"{path} has {len(old)} trajectories, more than {count}; choose another file name.")
        if old.count == count:
            return slots.SlotFile(path, header, count, old.digests)
        return _resize(path, old, count)


def _is_empty(path: Path) -> bool:
    """Whether the store has no complete trajectory, so that recreating it loses nothing."""
    with open_store(path) as old:
        return len(old) == 0


def _resize(path: Path, old: StoreReader, count: int) -> slots.SlotFile:
    """Copy a store into one with room for `count`, and rename the complete copy to `path`."""
    slots.check_disk_space(path, old.header.nbytes * count)
    with temporary(path) as file:
        slots.create(file, old.header, count)
        new = slots.SlotFile(Path(file.name), old.header, count)
        try:
            for index in range(len(old)):
                new.put(old[index : index + 1])
                if new.digests[index] != old.digests[index]:
                    raise StoreError(f"{path} is corrupt in trajectory {index}; generate it again.")
            rename_into_place(file, path)
        except BaseException:
            new.close()
            raise
    return new


def write_store(path: Path, header: Header, trajectories: np.ndarray) -> None:
    """Write a finished store of these trajectories atomically."""
    stored = slots.cast(trajectories, DTYPES[header.dtype])
    with os_errors_as_value_errors(path, kind=StoreError):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = slots.lock(path)
        try:
            slots.check_disk_space(path, header.nbytes * len(stored))
            with replacing(path) as file:
                slots.create(file, header, len(stored))
                with closing(slots.SlotFile(Path(file.name), header, len(stored))) as slot_file:
                    slot_file.put(stored)
        finally:
            slots.unlock(path, descriptor)


class StoreReader(Reader):
    """A store open for reading; only complete trajectories count. Every process opens its own handle."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._handle: h5py.File | None = None
        self._process = -1
        try:
            if not self.path.is_file():  # opening a pipe could block forever
                raise OSError
            status = self.path.stat()
            file_key = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
            self._verified = _verified.setdefault(file_key, set())
            if not _has_checksums(self.path) and h5py.is_hdf5(self.path) and not is_store(self.path):
                raise _not_a_store(self.path)
            self._read_header()
        except StoreError:
            self.close()
            raise
        except Exception as error:  # h5py raises all kinds of exceptions on damaged files
            self.close()
            raise StoreError(_diagnosis(self.path, error)) from error

    def _read_header(self) -> None:
        file = self._file()
        _check_format(self.path, file)
        _check_no_external_data(self.path, file)
        fields, complete = file["fields"], file["whole"][:]
        self.header = _header(file)
        self.package = _text(file.attrs["package"])
        """Version of the package that wrote the file."""
        self.count = len(complete)
        """Number of trajectories that the file has room for; `len` is the number of complete ones."""
        self._complete = int(np.argmin(complete)) if not complete.all() else self.count
        if fields.shape != (self.count, *self.header.shape):
            raise StoreError(f"{self.path} is corrupt: the shape of its values does not match its header.")
        self._digests = [bytes(row) for row in file["digests"][: self._complete]]
        self._fingerprint = fingerprint(self.header, self.digests)
        if self.finished and file["fingerprint"][()].decode() != self.fingerprint:
            raise StoreError(
                f"{self.path} was modified after it was written: its fingerprint does not match its header."
            )

    @property
    def digests(self) -> list[bytes]:
        return self._digests

    @property
    def fingerprint(self) -> str:
        """Hash of the header and the digests of the complete trajectories; `verify` compares values with digests."""
        return self._fingerprint

    @property
    def finished(self) -> bool:
        return self._complete == self.count

    def __len__(self) -> int:
        return self._complete

    def __getitem__(self, key: Key) -> np.ndarray:
        """Index complete trajectories with any integers, slices and one ellipsis; keeps the stored dtype."""
        ranges = contiguous(key, self.shape)
        try:
            values = self._file()["fields"][tuple(bounds for bounds, _ in ranges)]
        except OSError as error:
            raise StoreError(_diagnosis(self.path, error)) from error
        return values[tuple(inner for _, inner in ranges)]

    def verify(self, index: int) -> bool:
        """Whether the values of this trajectory match its digest; reads all of them."""
        digest, step = hashlib.sha256(), max(1, _BLOCK * self.header.shape[0] // self.header.nbytes)
        for start in range(0, self.header.shape[0], step):
            digest.update(self[index, start : start + step].data)
        return digest.digest() == self.digests[index]

    def check(self, index: int) -> None:
        """Verify the checksum of a trajectory, once per process and file; raises StoreError on a mismatch."""
        if index not in self._verified:
            if not self.verify(index):
                raise _checksum_error(self.path, index)
            self._verified.add(index)

    def trajectory(self, index: int) -> np.ndarray:
        """A full trajectory, verified as by `check` in the same read."""
        values = self[index]
        if index not in self._verified:
            if hashlib.sha256(values.data).digest() != self.digests[index]:
                raise _checksum_error(self.path, index)
            self._verified.add(index)
        return values

    def _file(self) -> h5py.File:
        if self._handle is None or self._process != os.getpid():
            # The HDF5 structure never changes after the rename, so reading needs no lock.
            self._handle, self._process = h5py.File(self.path, "r", locking=False), os.getpid()
        return self._handle

    def close(self) -> None:
        """Close the file; it is reopened on the next access."""
        if self._handle is not None and self._process == os.getpid():
            with suppress(Exception):  # closing a damaged file may fail, without consequences
                self._handle.close()
        self._handle = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_handle": None, "_process": -1}


def open_store(path: str | Path) -> StoreReader:
    """Open a store for reading; raises StoreError with the reason if it is not a valid store."""
    return StoreReader(path)


def is_store(path: Path) -> bool:
    """Whether this file is a store, complete or not."""
    try:
        if not path.is_file() or not h5py.is_hdf5(path):
            return False
        if not _has_checksums(path):
            return bool(ask(path, "is_store", [FORMAT]))
        with h5py.File(path, "r", locking=False) as file:
            # Stores use a fixed-length string; reading a variable-length one may hang on a damaged file.
            fixed = "format" in file.attrs and file.attrs.get_id("format").dtype.kind == "S"
            return fixed and file.attrs["format"] == FORMAT.encode()
    except Exception:  # a damaged file is not a store; its reader reports what is wrong
        return False


def _has_checksums(path: Path) -> bool:
    """Whether HDF5 protects the structure of the file with checksums, as in every store; damage in other files can
    crash the library, so they are first examined by another process."""
    with open(path, "rb") as file:
        signature = file.read(9)
    return signature[:8] == b"\x89HDF\r\n\x1a\n" and signature[8] >= 2


def _checksum_error(path: Path, index: int) -> StoreError:
    return StoreError(f"{path} is corrupt in trajectory {index}: checksum mismatch; copy or generate it again.")


def _not_a_store(path: Path) -> StoreError:
    return StoreError(f"{path} is an HDF5 file but not a sigmasolver store; convert it with import-data.")


def _check_format(path: Path, file: h5py.File) -> None:
    if "format" not in file.attrs or _text(file.attrs["format"]) != FORMAT:
        raise _not_a_store(path)
    version = int(file.attrs["version"])
    if version > VERSION:
        raise StoreError(
            f"{path} has format version {version}, but this version supports up to {VERSION}; update sigmasolver."
        )
    if version < VERSION:
        raise StoreError(f"{path} has the old format version {version}, not {VERSION}; generate or import it again.")


def _check_no_external_data(path: Path, file: h5py.File) -> None:
    """Raise StoreError if the store refers to another file, whose bytes would be read as its own."""
    axes = [f"coordinates/{name}" for name in "xyz"]
    for name in ("fields", "whole", "digests", "fingerprint", "times", "coordinates", *axes):
        link = file.get(name, getlink=True) if name not in axes or name in file else None
        internal = link is None or isinstance(link, h5py.HardLink)
        if internal and link is not None and name != "coordinates":
            properties = file[name].id.get_create_plist()
            internal = properties.get_layout() != h5py.h5d.VIRTUAL and not properties.get_external_count()
        if not internal:
            raise StoreError(
                f"{path} stores its {name} in an external file, which is not read; copy the values into it."
            )


def _header(file: h5py.File) -> Header:
    attributes = file.attrs
    names = {name: tuple(map(_text, attributes[name])) for name in ("fields", "units", "boundary")}
    axes = tuple(map(_text, attributes["axes"])) if "axes" in attributes else ()
    coordinates = tuple(file["coordinates"][name][:] for name in axes or "xyz"[: len(names["boundary"])])
    axes = axes or LEGACY_AXES.get(_text(attributes["source"]), ())
    layout = Layout(names["fields"], names["units"], names["boundary"], coordinates, file["times"][:], axes)
    seed = int(attributes["seed"]) if "seed" in attributes else None
    return Header(
        layout,
        _text(attributes["source"]),
        json.loads(_text(attributes["parameters"])),
        seed,
        file["fields"].dtype.name,
    )


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _diagnosis(path: Path, error: Exception) -> str:
    """Explain in one sentence why this file cannot be read."""
    if not path.exists():
        return f"{path} not found; create it with simulate or import-data."
    if not path.is_file():
        return f"{path} is not a file; give the path of the store."
    if isinstance(error, PermissionError):
        return f"Permission denied: {path}."
    with suppress(OSError):
        if not h5py.is_hdf5(path):
            return f"{path} is not an HDF5 file; convert foreign files with import-data."
    if "truncated" in str(error):
        return f"{path} is truncated at {path.stat().st_size} bytes; copy or generate it again."
    return f"{path} is corrupt and cannot be read; copy or generate it again."
