"""The bytes under the store: how a file is made, and how trajectories enter it so that a kill does no harm.

HDF5 lays the file out once, empty but at full size. It does so in memory, since an HDF5 library whose file system
refuses a write may crash; the few pages that it wrote go to a sparse file, and an atomic rename gives it its name. From
then on no byte of HDF5's own structure changes: the dataset is uncompressed and allocated in one
piece, so trajectory i lies at a known offset and is put there with plain writes, in the order values, digest, (with the
last one: fingerprint), and at the end one byte in `whole`. A single byte cannot be half written: at every instant the
file opens, and the trajectories marked whole are whole.
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
from sigmasolver.runs.files import open_lock
from sigmasolver.version import __version__

__all__ = [
    "SlotFile",
    "cast",
    "check_room",
    "create",
    "lock",
    "unlock",
]

_CHUNK = 4 * 2**20
"""A trajectory up to this many bytes is one chunk; a longer one has a chunk per frame."""


def create(target: BinaryIO, header: Header, count: int) -> None:
    """Make the empty file `target` an HDF5 file of full size with no whole trajectory yet, and sync it.

    Its bytes depend on the arguments only.
    """
    dtype, shape = DTYPES[header.dtype], header.shape
    chunk = (1, *shape) if header.nbytes <= _CHUNK else (1, 1, *shape[1:])
    if int(np.prod(chunk, dtype=np.int64)) * dtype.itemsize >= 2**32:
        raise StoreError("One frame takes 4 GiB or more, the limit of an HDF5 chunk; use a coarser grid.")
    pages = _Pages()
    with _new_file(pages) as file:
        file.attrs["format"] = _text(FORMAT)
        file.attrs["version"] = VERSION
        file.attrs["package"] = _text(__version__)
        file.attrs["source"] = _text(header.source)
        file.attrs["parameters"] = _text(canonical(dict(header.parameters)))
        if header.seed is not None:
            file.attrs["seed"] = header.seed
        for name in ("fields", "units", "boundary"):
            file.attrs[name] = _text(*getattr(header.layout, name), one=False)
        if header.layout.axis_names != tuple(sorted(header.layout.axis_names)):
            file.attrs["axes"] = _text(*header.layout.axis_names, one=False)
        for name, values in header.axes().items():
            file.create_dataset("times" if name == "t" else f"coordinates/{name}", data=values)
        file.create_dataset("whole", data=np.zeros(count, "u1"))
        file.create_dataset("digests", data=np.zeros((count, 32), "u1"))
        file.create_dataset("fingerprint", data=np.bytes_(b"0" * 64))
        plan = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plan.set_chunk(chunk)
        plan.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        plan.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        plan.set_obj_track_times(False)
        space = h5py.h5s.create_simple((count, *shape))
        h5py.h5d.create(file.id, b"fields", h5py.h5t.py_create(dtype), space, plan)
    pages.copy_to(target)
    os.fsync(target.fileno())


class _Pages(io.RawIOBase):
    """A file in memory that holds only the pages that were written; the rest are zeros."""

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
            for page, inside, taken in self._pieces(len(view)):
                self._pages.setdefault(page, bytearray(self.SIZE))[inside] = view[taken]
            self._position += len(view)
            self._end = max(self._end, self._position)
            return len(view)

    def readinto(self, target: Any) -> int:
        with memoryview(target).cast("B") as view:
            empty = bytes(self.SIZE)
            for page, inside, taken in self._pieces(len(view)):
                view[taken] = self._pages.get(page, empty)[inside]
            self._position += len(view)
            return len(view)

    def _pieces(self, length: int) -> Iterator[tuple[int, slice, slice]]:
        """The next `length` bytes page by page: the page, which bytes of it, and which of the `length` they are."""
        start, stop = self._position, self._position + length
        while start < stop:
            page, inside = divmod(start, self.SIZE)
            taken = min(self.SIZE - inside, stop - start)
            done = start - self._position
            yield page, slice(inside, inside + taken), slice(done, done + taken)
            start += taken

    def copy_to(self, target: BinaryIO) -> None:
        for page, data in sorted(self._pages.items()):
            target.seek(page * self.SIZE)
            target.write(data[: max(0, self._end - page * self.SIZE)])
        target.truncate(self._end)
        target.flush()


def _new_file(pages: _Pages) -> h5py.File:
    """The oldest format that has what is needed, so that other programs' older HDF5 reads it too.

    All attributes stay in the header of the file's root, which HDF5 guards by a checksum: elsewhere (in heaps, where
    more than eight of them or texts of free length would go) one wrong byte can make the library loop for ever.
    """
    creation, access = h5py.h5p.create(h5py.h5p.FILE_CREATE), h5py.h5p.create(h5py.h5p.FILE_ACCESS)
    creation.set_attr_phase_change(32, 0)
    creation.set_obj_track_times(False)  # or the bytes would depend on the hour
    access.set_libver_bounds(h5py.h5f.LIBVER_V110, h5py.h5f.LIBVER_V110)
    access.set_fileobj_driver(h5py.h5fd.fileobj_driver, pages)
    return h5py.File(h5py.h5f.create(b"in memory", h5py.h5f.ACC_TRUNC, creation, access))


def _text(*texts: str, one: bool = True) -> np.ndarray:
    """Texts of fixed length in UTF-8, as HDF5 keeps them in place."""
    encoded = [text.encode() for text in texts]
    kind = h5py.string_dtype("utf-8", max(1, *map(len, encoded)))
    return np.array(encoded[0] if one else encoded, dtype=kind)


class SlotFile:
    """A store open for writing: `digests` are those of its whole trajectories, and `put` adds to them."""

    def __init__(self, path: Path, header: Header, count: int, digests: Sequence[bytes] = ()) -> None:
        self.header, self.count, self.digests = header, count, list(digests)
        with h5py.File(path, "r", locking=False) as file:
            self._fields = _start_of_values(path, file["fields"])
            self._digests, self._whole, self._fingerprint = (
                file[name].id.get_offset() for name in ("digests", "whole", "fingerprint")
            )
        self._fd = os.open(path, os.O_RDWR)

    def put(self, stored: np.ndarray) -> None:
        """Write trajectories of the stored type behind those present; the order of writes is the safety."""
        start, new = len(self.digests), list[bytes]()
        for index, trajectory in enumerate(stored, start):
            new.append(hashlib.sha256(trajectory.data).digest())
            self._write(trajectory.reshape(-1).view(np.uint8).data, self._fields + index * self.header.nbytes)
            self._write(new[-1], self._digests + 32 * index)
        if start + len(new) == self.count:
            self._write(fingerprint(self.header, self.digests + new).encode(), self._fingerprint)
        os.fsync(self._fd)
        for index, digest in enumerate(new, start):
            self._write(b"\1", self._whole + index)
            self.digests.append(digest)
        os.fsync(self._fd)

    def _write(self, data: bytes | memoryview, offset: int) -> None:
        view = memoryview(data)
        while len(view):  # the system may take the bytes in several pieces
            done = os.pwrite(self._fd, view, offset)
            view, offset = view[done:], offset + done

    def close(self) -> None:
        os.close(self._fd)


def _start_of_values(path: Path, fields: h5py.Dataset) -> int:
    """The offset of the values, after a check that they lie in one piece and in order."""
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
    """The values as stored; one that would become infinite is refused."""
    with np.errstate(over="ignore"):
        stored = np.ascontiguousarray(trajectories, dtype=dtype)
    if dtype != trajectories.dtype and np.any(np.isinf(stored) & ~np.isinf(trajectories)):
        largest = np.nanmax(np.abs(trajectories))
        raise StoreError(f"Values up to {largest:.3g} overflow {dtype.name}; use a wider dtype.")
    return stored


def check_room(path: Path, needed: int) -> None:
    """Refuse at the start what would fill the disk hours later."""
    free = shutil.disk_usage(path.parent).free
    if needed > free:
        raise StoreError(
            f"{path} needs {needed / 1e6:,.3f} MB, but its folder has {free / 1e6:,.3f} MB free; use fewer "
            "trajectories or float16, or stream them instead of storing them."
        )


def lock(path: Path) -> int:
    """Hold `path`.lock, so that no two processes write one file; the system drops it when the holder dies."""
    import fcntl  # not on Windows, where stores can only be read

    name = _lock_name(path)
    held = open_lock(name)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            os.close(held)
            raise _busy(path) from None
        warnings.warn(
            f"The folder of {path} does not support file locks: make sure only one process writes to it.", stacklevel=4
        )
    # The holder before may have removed the name between our opening and our locking it.
    if not name.exists() or not os.path.samestat(name.stat(), os.fstat(held)):
        os.close(held)
        raise _busy(path)
    return held


def unlock(path: Path, held: int) -> None:
    """Let go of the lock and remove its file, unless it holds something: then it is not ours."""
    if os.fstat(held).st_size == 0:
        _lock_name(path).unlink(missing_ok=True)
    os.close(held)


def _lock_name(path: Path) -> Path:
    return path.with_name(path.name + ".lock")


def _busy(path: Path) -> StoreError:
    return StoreError(f"Another process is writing to {path}; wait for it or choose another file name.")
