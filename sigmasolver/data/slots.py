"""Byte-level access to a store: how the file is created, and how trajectories are written crash-safely.

HDF5 lays out the file once, empty but at full size. It does so in memory, because the HDF5 library may crash when the
file system refuses a write; the few pages that it wrote go to a sparse file, which is renamed atomically. From then on
no byte of HDF5's own structure changes: the dataset is uncompressed and contiguous, so trajectory i lies at a known
offset and is written there with plain writes, in the order values, digest, (after the last one: fingerprint), and
finally one byte in `whole`. A single byte is written atomically: at every instant the file can be opened, and the
trajectories marked in `whole` are complete.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import shutil
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import h5py
import numpy as np

from sigmasolver.data.header import DTYPES, FORMAT, VERSION, Header, StoreError, canonical, fingerprint
from sigmasolver.runs.files import open_lock, refuse_folder
from sigmasolver.version import __version__

__all__ = [
    "SlotFile",
    "cast",
    "check_disk_space",
    "create",
    "lock",
    "unlock",
]

_CHUNK = 4 * 2**20
"""A trajectory up to this many bytes is one chunk; a larger one has a chunk per frame."""


def create(target: BinaryIO, header: Header, count: int) -> None:
    """Turn the empty file `target` into an HDF5 file of full size without complete trajectories, and sync it.

    Its bytes depend only on the arguments.
    """
    dtype, shape = DTYPES[header.dtype], header.shape
    chunk = (1, *shape) if header.nbytes <= _CHUNK else (1, 1, *shape[1:])
    if int(np.prod(chunk, dtype=np.int64)) * dtype.itemsize >= 2**32:
        raise StoreError("One frame takes 4 GiB or more, the limit of an HDF5 chunk; use a coarser grid.")
    buffer = _SparseFile()
    with _create_hdf5(buffer) as file:
        file.attrs["format"] = _text(FORMAT)
        file.attrs["version"] = VERSION
        file.attrs["package"] = _text(__version__)
        file.attrs["source"] = _text(header.source)
        file.attrs["parameters"] = _text(canonical(dict(header.parameters)))
        if header.seed is not None:
            file.attrs["seed"] = header.seed
        for name in ("fields", "units", "boundary"):
            file.attrs[name] = _text(*getattr(header.layout, name), scalar=False)
        if header.layout.axis_names != tuple(sorted(header.layout.axis_names)):
            file.attrs["axes"] = _text(*header.layout.axis_names, scalar=False)
        for name, values in header.axes().items():
            file.create_dataset("times" if name == "t" else f"coordinates/{name}", data=values)
        file.create_dataset("whole", data=np.zeros(count, "u1"))
        file.create_dataset("digests", data=np.zeros((count, 32), "u1"))
        file.create_dataset("fingerprint", data=np.bytes_(b"0" * 64))
        properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        properties.set_chunk(chunk)
        properties.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        properties.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        properties.set_obj_track_times(False)
        space = h5py.h5s.create_simple((count, *shape))
        h5py.h5d.create(file.id, b"fields", h5py.h5t.py_create(dtype), space, properties)
    buffer.copy_to(target)
    os.fsync(target.fileno())


class _SparseFile(io.RawIOBase):
    """A sparse in-memory file: only written pages are allocated, all others read as zeros."""

    SIZE = 4096

    def __init__(self) -> None:
        self._pages: dict[int, bytearray] = {}
        self._position = self._end = 0

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._end}[whence]
        return self._position

    def tell(self) -> int:
        return self._position

    def truncate(self, size: int | None = None) -> int:
        self._end = self._position if size is None else size
        return self._end

    def write(self, data: Any) -> int:
        with memoryview(data).cast("B") as view:
            for page, span, chunk in self._page_spans(len(view)):
                self._pages.setdefault(page, bytearray(self.SIZE))[span] = view[chunk]
            self._position += len(view)
            self._end = max(self._end, self._position)
            return len(view)

    def readinto(self, target: Any) -> int:
        with memoryview(target).cast("B") as view:
            zeros = bytes(self.SIZE)
            for page, span, chunk in self._page_spans(len(view)):
                view[chunk] = self._pages.get(page, zeros)[span]
            self._position += len(view)
            return len(view)

    def _page_spans(self, length: int) -> Iterator[tuple[int, slice, slice]]:
        """Split the next `length` bytes by page: page number, span within the page, span within the `length` bytes."""
        start, stop = self._position, self._position + length
        while start < stop:
            page, offset = divmod(start, self.SIZE)
            length_in_page = min(self.SIZE - offset, stop - start)
            done = start - self._position
            yield page, slice(offset, offset + length_in_page), slice(done, done + length_in_page)
            start += length_in_page

    def copy_to(self, target: BinaryIO) -> None:
        for page, data in sorted(self._pages.items()):
            target.seek(page * self.SIZE)
            target.write(data[: max(0, self._end - page * self.SIZE)])
        target.truncate(self._end)
        target.flush()


def _create_hdf5(buffer: _SparseFile) -> h5py.File:
    """Create an HDF5 file in the oldest sufficient format version, so that older HDF5 libraries can read it.

    All attributes stay in the object header of the root group, which HDF5 protects with a checksum. In heaps, which
    hold more than eight attributes or variable-length strings, one wrong byte can make the library loop forever.
    """
    creation, access = h5py.h5p.create(h5py.h5p.FILE_CREATE), h5py.h5p.create(h5py.h5p.FILE_ACCESS)
    creation.set_attr_phase_change(32, 0)
    creation.set_obj_track_times(False)  # keeps the bytes reproducible
    access.set_libver_bounds(h5py.h5f.LIBVER_V110, h5py.h5f.LIBVER_V110)
    access.set_fileobj_driver(h5py.h5fd.fileobj_driver, buffer)
    return h5py.File(h5py.h5f.create(b"in memory", h5py.h5f.ACC_TRUNC, creation, access))


def _text(*texts: str, scalar: bool = True) -> np.ndarray:
    """Fixed-length UTF-8 strings, which HDF5 stores in place."""
    encoded = [text.encode() for text in texts]
    kind = h5py.string_dtype("utf-8", max(1, *map(len, encoded)))
    return np.array(encoded[0] if scalar else encoded, dtype=kind)


class SlotFile:
    """A store open for writing; `digests` are those of its complete trajectories."""

    def __init__(self, path: Path, header: Header, count: int, digests: Sequence[bytes] = ()) -> None:
        self.header, self.count, self.digests = header, count, list(digests)
        with h5py.File(path, "r", locking=False) as file:
            self._values_start = _values_offset(path, file["fields"])
            self._digests_start, self._marks_start, self._fingerprint_start = (
                file[name].id.get_offset() for name in ("digests", "whole", "fingerprint")
            )
        self._fd = os.open(path, os.O_RDWR)

    def put(self, stored: np.ndarray) -> None:
        """Append trajectories in the stored dtype; the order of the writes makes this crash-safe."""
        start, new = len(self.digests), list[bytes]()
        for index, trajectory in enumerate(stored, start):
            new.append(hashlib.sha256(trajectory.data).digest())
            self._write(trajectory.reshape(-1).view(np.uint8).data, self._values_start + index * self.header.nbytes)
            self._write(new[-1], self._digests_start + 32 * index)
        if start + len(new) == self.count:
            self._write(fingerprint(self.header, self.digests + new).encode(), self._fingerprint_start)
        os.fsync(self._fd)
        for index, digest in enumerate(new, start):
            self._write(b"\1", self._marks_start + index)
            self.digests.append(digest)
        os.fsync(self._fd)

    def _write(self, data: bytes | memoryview, offset: int) -> None:
        view = memoryview(data)
        while len(view):  # pwrite may write fewer bytes than requested
            done = os.pwrite(self._fd, view, offset)
            view, offset = view[done:], offset + done

    def close(self) -> None:
        os.close(self._fd)


def _values_offset(path: Path, fields: h5py.Dataset) -> int:
    """Offset of the values, after checking that they are contiguous and in order."""
    if fields.chunks is not None and not fields.compression:
        corner = tuple((size - 1) // step * step for size, step in zip(fields.shape, fields.chunks, strict=True))
        first = fields.id.get_chunk_info_by_coord((0,) * fields.ndim)
        last = fields.id.get_chunk_info_by_coord(corner)
        if last.byte_offset + last.size - first.byte_offset == fields.nbytes:
            return int(first.byte_offset)
    raise StoreError(
        f"{path} was repacked by another program and can be read but not resumed; choose another file name."
    )


def cast(trajectories: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Convert the values to the stored dtype; raises StoreError on overflow."""
    with np.errstate(over="ignore"):
        stored = np.ascontiguousarray(trajectories, dtype=dtype)
    if dtype != trajectories.dtype and np.any(np.isinf(stored) & ~np.isinf(trajectories)):
        largest = np.nanmax(np.abs(trajectories))
        raise StoreError(f"Values up to {largest:.3g} overflow {dtype.name}; use a wider dtype.")
    return stored


def check_disk_space(path: Path, needed: int) -> None:
    """Raise StoreError now rather than when the disk is full hours later."""
    free = shutil.disk_usage(path.parent).free
    if needed > free:
        raise StoreError(
            f"{path} needs {needed / 1e6:,.3f} MB, but its folder has {free / 1e6:,.3f} MB free; use fewer "
            "trajectories or float16, or stream them instead of storing them."
        )


def lock(path: Path) -> int:
    """Lock `path`.lock, so that only one process writes the file; the OS releases it when the process dies."""
    import fcntl  # not on Windows, where stores can only be read

    refuse_folder(path, StoreError)
    lock_path = _lock_path(path)
    descriptor = open_lock(lock_path)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            os.close(descriptor)
            raise _locked_error(path) from None
        warnings.warn(
            f"The folder of {path} does not support file locks: make sure only one process writes to it.", stacklevel=4
        )
    # The previous holder may have removed the file between our open and our lock.
    if not lock_path.exists() or not os.path.samestat(lock_path.stat(), os.fstat(descriptor)):
        os.close(descriptor)
        raise _locked_error(path)
    return descriptor


def unlock(path: Path, descriptor: int) -> None:
    """Release the lock and remove its file, unless it has contents: then the user created it."""
    if os.fstat(descriptor).st_size == 0:
        _lock_path(path).unlink(missing_ok=True)
    os.close(descriptor)


def _lock_path(path: Path) -> Path:
    return path.with_name(path.name + ".lock")


def _locked_error(path: Path) -> StoreError:
    return StoreError(f"Another process is writing to {path}; wait for it or choose another file name.")
