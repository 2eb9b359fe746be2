"""Worker process that reads foreign HDF5, MATLAB, NetCDF and Zarr files, because a damaged file can make their
libraries crash or loop.

A standalone script, started by `isolated.py`; it imports nothing from the package, so that it starts quickly. Requests
and answers are one line of JSON each; the bytes of an array follow the answer. HDF5 links to other files and values
stored in other files are listed but never followed.

Variable-length strings are read without the library. A dataset of them is an array of descriptors, each referring to an
object in a global heap collection of the file:

    descriptor   length u32 · address of the collection u64 · number of the object u32
    collection   "GCOL" · version u8 · 3 bytes · size u64 · objects
    object       number u16 · 6 bytes · length u64 · bytes, padded to a multiple of 8
"""

from __future__ import annotations

import itertools
import json
import math
import os
import struct
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import h5py
import numpy as np

__all__ = ["DEEPEST", "serve"]

DEEPEST = 64
"""Maximum nesting of groups; the library gets slow with deeper paths."""
_MAX_HEAP_SIZE = 2**24


class TooDeepError(Exception):
    """Groups are nested too deeply."""


class UnnamedDimensionsError(Exception):
    """Arrays have no dimension names."""


def _open(path: str) -> h5py.File:
    return h5py.File(path, "r", locking=False)


def _is_store(path: str, marker: str) -> bool:
    """Whether the file is a store; only a fixed-length format string is read."""
    with _open(path) as file:
        fixed = "format" in file.attrs and file.attrs.get_id("format").dtype.kind == "S"
        return bool(fixed and file.attrs["format"] == marker.encode())


def _names(path: str) -> list[str]:
    """Names of the top-level entries."""
    with _open(path) as file:
        return [name for name in file if isinstance(name, str)]


def _entries(path: str) -> list[dict[str, Any]]:
    """Every dataset once, under its first path, and every external link."""
    with _open(path) as file:
        return [_entry(name, item) for name, item in _walk(file)]


def _walk(file: h5py.File, groups: bool = False) -> Iterator[tuple[str, h5py.Dataset | h5py.Group | h5py.ExternalLink]]:
    """Iterate over datasets and external links, and over `groups` if set."""
    seen = {h5py.h5o.get_info(file["/"].id).addr}
    pending: list[tuple[str, h5py.Group]] = [("", file["/"])]
    while pending:
        prefix, group = pending.pop()
        if prefix.count("/") > DEEPEST:
            raise TooDeepError
        subgroups = []
        for name in group:  # a name that is not UTF-8 is returned as bytes
            path = prefix + (name if isinstance(name, str) else name.decode("utf-8", "backslashreplace"))
            link = group.get(name, getlink=True)
            if isinstance(link, h5py.ExternalLink):
                yield path, link
            if not isinstance(link, h5py.HardLink):
                continue
            item = group[name]
            address = h5py.h5o.get_info(item.id).addr
            if address in seen:
                continue
            seen.add(address)
            if isinstance(item, h5py.Group):
                subgroups.append((f"{path}/", item))
                if groups:
                    yield path, item
            elif isinstance(item, h5py.Dataset):
                yield path, item
        pending += reversed(subgroups)


def _entry(name: str, item: h5py.Dataset | h5py.ExternalLink) -> dict[str, Any]:
    if isinstance(item, h5py.ExternalLink):
        reason = "is a link to another file, which is not followed; import that file, or copy the array into this one"
        return {"name": name, "shape": [0], "dtype": "V1", "fault": reason, "link": True}
    text = False
    try:
        dtype = item.dtype
        text = h5py.check_string_dtype(dtype) is not None
    except (TypeError, ValueError):  # a type without a NumPy equivalent
        dtype = np.dtype("V1")
    if dtype.hasobject:
        dtype = np.dtype("U1") if text else np.dtype("V1")
    shape = (0,) if item.shape is None else tuple(item.shape)
    kind = dtype.str if dtype.names is None and dtype.subdtype is None else "V1"
    return {
        "name": name, "shape": shape, "dtype": kind, "text": text, "chunks": item.chunks,
        "fault": _fault(item, dtype) if dtype.kind in "fiu" or text else None,
    }  # fmt: skip


def _fault(dataset: h5py.Dataset, dtype: np.dtype) -> str | None:
    """Why not all values can be read, or None; HDF5 itself would return zeros for missing ones."""
    properties = dataset.id.get_create_plist()
    kind, complete = properties.get_layout(), True
    if kind == h5py.h5d.VIRTUAL:
        return (
            "is a virtual dataset made from other files and would read as zeros where one of them is missing; "
            "import those files instead"
        )
    if properties.get_external_count():
        return "stores its values in an external file, which is not read; save it again with its values inside"
    if not all(
        h5py.h5z.filter_avail(properties.get_filter(position)[0]) for position in range(properties.get_nfilters())
    ):
        return "uses a compression filter that this HDF5 does not support; save it again with gzip or uncompressed"
    if kind == h5py.h5d.CHUNKED:
        chunk_counts = [math.ceil(size / step) for size, step in zip(dataset.shape, dataset.chunks, strict=True)]
        complete = dataset.id.get_num_chunks() >= math.prod(chunk_counts)
    elif kind == h5py.h5d.CONTIGUOUS:
        complete = dataset.id.get_storage_size() >= dataset.id.get_type().get_size() * math.prod(dataset.shape or (0,))
    return None if complete else "is incomplete; wait until it is written, or save the existing values separately"


def _rows(path: str, name: str, start: int, stop: int, last: bool) -> np.ndarray:
    """Read a range of the first or last axis; a scalar dataset is read as a whole."""
    with _open(path) as file:
        dataset = file[name]
        key: Any = () if not dataset.shape else (..., slice(start, stop)) if last else slice(start, stop)
        ranges = [(0, size) for size in dataset.shape]
        if ranges:
            ranges[-1 if last else 0] = (start, stop)
        _check_chunks(dataset, ranges)
        return np.asarray(dataset[key])


def _box(path: str, name: str, ranges: list[list[int]]) -> np.ndarray:
    """Read the ranges (start, stop) along each axis."""
    with _open(path) as file:
        dataset = file[name]
        _check_chunks(dataset, ranges)
        return np.asarray(dataset[tuple(slice(*bounds) for bounds in ranges)])


def _attributes(path: str) -> dict[str, dict[str, Any]]:
    """Attributes of every group and dataset by path; those of the root under "". Links are not followed."""
    with _open(path) as file:
        attributes = {"": file.attrs}
        for name, item in _walk(file, groups=True):
            if not isinstance(item, h5py.ExternalLink):
                attributes[name] = item.attrs
        return {name: {str(key): plain_value(values[key]) for key in values} for name, values in attributes.items()}


def plain_value(value: Any) -> Any:
    """Convert an attribute to a JSON-compatible value; non-finite numbers become strings."""
    if isinstance(value, h5py.Empty):
        return ""
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    if isinstance(value, np.ndarray | list | tuple):
        return [plain_value(item) for item in (value.tolist() if isinstance(value, np.ndarray) else value)]
    if isinstance(value, np.generic):
        return plain_value(value.item())
    if isinstance(value, str | bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return str(value)


_VERIFIED_CHUNKS: dict[tuple[Any, ...], set[tuple[int, ...]]] = {}
"""Chunks known to be complete, by file state and dataset, so that each is decompressed for the check only once."""


def _check_chunks(dataset: h5py.Dataset, ranges: Sequence[Sequence[int]]) -> None:
    """Raise EOFError if a chunk in these ranges does not decompress to its full size: the library would read beyond its
    end, returning arbitrary memory or crashing."""
    if dataset.chunks is None:
        return
    size = math.prod(dataset.chunks) * dataset.id.get_type().get_size()
    properties = dataset.id.get_create_plist()
    filters = [properties.get_filter(position)[0] for position in range(properties.get_nfilters())]
    if not set(filters) <= {h5py.h5z.FILTER_DEFLATE, h5py.h5z.FILTER_SHUFFLE, h5py.h5z.FILTER_FLETCHER32}:
        return  # other filters cannot be decompressed here
    corners = [
        range(start // step * step, min(stop, length), step)
        for (start, stop), length, step in zip(ranges, dataset.shape, dataset.chunks, strict=True)
    ]
    checked = _VERIFIED_CHUNKS.setdefault((_file_state(dataset.file.filename), dataset.name), set())
    for corner in itertools.product(*corners):
        if corner in checked:
            continue
        filter_mask, data = dataset.id.read_direct_chunk(corner)
        for position, filter_id in reversed(list(enumerate(filters))):
            if filter_mask >> position & 1:
                continue
            if filter_id == h5py.h5z.FILTER_FLETCHER32:
                data = data[:-4]
            elif filter_id == h5py.h5z.FILTER_DEFLATE:
                stream = zlib.decompressobj()
                data = stream.decompress(data, size + 5)  # leaves room for a checksum
        if len(data) != size:
            raise EOFError
        checked.add(corner)


def _file_state(path: str) -> tuple[str, int, int, int]:
    """Cache key that changes when a file or folder is rewritten."""
    status = os.stat(path)
    return path, status.st_ino, status.st_mtime_ns, status.st_size


def _texts(path: str, name: str) -> Any:
    """Read fixed- or variable-length strings as nested lists."""
    with _open(path) as file:
        dataset = file[name]
        _check_chunks(dataset, [(0, size) for size in dataset.shape])
        offset, sizes = dataset.id.get_offset(), dataset.file.id.get_create_plist().get_sizes()
        if h5py.check_string_dtype(dataset.dtype).length is None and offset is not None and sizes == (8, 8):
            texts = _heap_texts(path, offset, dataset.size, dataset.file.userblock_size)
            return np.array(texts, dtype=str).reshape(dataset.shape).tolist()
        return np.array(dataset.asstr()[()], dtype=str).tolist()


def _heap_texts(path: str, offset: int, count: int, base: int) -> list[str]:
    """Read `count` variable-length strings whose descriptors are at `offset`; addresses are relative to `base`.

    May raise any exception on invalid bytes.
    """
    with open(path, "rb") as file:

        def read_at(position: int, size: int) -> bytes:
            file.seek(position)
            data = file.read(size)
            if len(data) != size:
                raise EOFError
            return data

        def read_collection(address: int) -> dict[int, bytes]:
            magic, size = struct.unpack("<4s4xQ", read_at(base + address, 16))
            if magic != b"GCOL" or size > _MAX_HEAP_SIZE:
                raise EOFError
            data, position, objects = read_at(base + address, size), 16, dict[int, bytes]()
            while position + 16 <= size:
                number, length = struct.unpack_from("<H6xQ", data, position)
                if number == 0:  # the remainder is free space
                    break
                objects[number] = data[position + 16 : position + 16 + length]
                position += 16 + (length + 7) // 8 * 8
            return objects

        texts = list[str]()
        collections = dict[int, dict[int, bytes]]()
        for length, address, number in struct.iter_unpack("<IQI", read_at(offset, 16 * count)):
            if length and address not in collections:
                collections[address] = read_collection(address)
            # Some programs include the terminating null byte in the length.
            texts.append(collections[address][number][:length].rstrip(b"\0").decode() if length else "")
    return texts


def _matlab_names(path: str) -> list[str]:
    """Names of the variables in a MATLAB file before version 7.3."""
    import scipy.io

    return [name for name, _, _ in scipy.io.whosmat(path)]


def _matlab_values(path: str, name: str, limit: int | None) -> np.ndarray | None:
    """The first `limit` entries, or all if None; None if the variable is not a numeric array."""
    import scipy.io

    values = scipy.io.loadmat(path, variable_names=[name])[name]
    if not isinstance(values, np.ndarray) or values.dtype.hasobject or values.dtype.names is not None:
        return None
    return values[:limit]


# --- NetCDF and Zarr


_OPEN_DATASETS: dict[str, tuple[tuple[Any, ...], Any]] = {}
"""Cache of open data sets by path: opening one takes longer than reading a window."""
_MAX_OPEN = 32
_METADATA = ("zarr.json", ".zmetadata", ".zattrs", ".zgroup")


def _dataset(path: str) -> Any:
    """Open a NetCDF file or Zarr group lazily with xarray; times are not decoded."""
    import xarray

    metadata_files = [os.path.join(path, name) for name in _METADATA]
    state = tuple(_file_state(entry) for entry in (path, *metadata_files) if os.path.exists(entry))
    cached_state, dataset = _OPEN_DATASETS.get(path, (None, None))
    if cached_state == state:
        return dataset
    if dataset is not None:
        _OPEN_DATASETS.pop(path)[1].close()
    elif len(_OPEN_DATASETS) == _MAX_OPEN:
        _OPEN_DATASETS.pop(next(iter(_OPEN_DATASETS)))[1].close()
    engine, options = _engine(path)
    try:
        dataset = xarray.open_dataset(
            path, engine=engine, decode_times=False, decode_coords="all", cache=False, chunks=None, **options
        )
    except (KeyError, ValueError) as error:
        if engine == "zarr" and ("_ARRAY_DIMENSIONS" in str(error) or "dimension" in str(error)):
            raise UnnamedDimensionsError from error
        raise
    _OPEN_DATASETS[path] = (state, dataset)
    return dataset


def _engine(path: str) -> tuple[str, dict[str, Any]]:
    if os.path.isdir(path):
        import zarr

        if isinstance(zarr.open(path, mode="r"), zarr.Array):
            raise UnnamedDimensionsError
        return "zarr", {"consolidated": os.path.exists(os.path.join(path, ".zmetadata")) or None}
    with open(path, "rb") as file:
        signature = file.read(4)
    if signature == b"\x89HDF":
        import h5netcdf  # noqa: F401

        return "h5netcdf", {"phony_dims": "access", "driver_kwds": {"locking": False}}
    if signature[:3] == b"CDF":
        return "scipy", {}
    raise OSError("no signature")


def _labelled(path: str) -> dict[str, Any]:
    """Variables of a NetCDF file or Zarr group: names, dimensions, dtypes and attributes."""
    faults = {} if os.path.isdir(path) or _engine(path)[0] != "h5netcdf" else _faults(path)
    dataset = _dataset(path)
    variables = [
        {
            "name": str(name), "dims": [str(dimension) for dimension in variable.dims], "shape": variable.shape,
            "dtype": _dtype_name(variable), "coordinate": name in dataset.coords,
            "attributes": {str(key): plain_value(value) for key, value in variable.attrs.items()},
            "fault": faults.get(str(name)),
        }
        for name, variable in dataset.variables.items()
    ]  # fmt: skip
    return {
        "variables": variables,
        "attributes": {str(key): plain_value(value) for key, value in dataset.attrs.items()},
        "missing": _missing_chunks(path) if os.path.isdir(path) else {},
    }


def _dtype_name(variable: Any) -> str:
    """Dtype of a variable: U1 for variable-length strings, V1 for other, unreadable objects."""
    if not variable.dtype.hasobject:
        return variable.dtype.str
    few = variable.ndim == 1 and variable.size <= 4096
    return "U1" if few and all(isinstance(value, str) for value in variable.values) else "V1"


def _faults(path: str) -> dict[str, str | None]:
    with _open(path) as file:
        return {name: _entry(name, item)["fault"] for name, item in _walk(file)}


def _missing_chunks(path: str) -> dict[str, list[int]]:
    """Number of missing chunks and of all chunks, by array."""
    import zarr

    arrays = zarr.open_group(path, mode="r").arrays()
    counts = {name: (array.nchunks_initialized, array.nchunks) for name, array in arrays}
    return {name: [total - present, total] for name, (present, total) in counts.items() if present < total}


def _labelled_box(path: str, name: str, ranges: list[list[int]]) -> np.ndarray:
    """Read the ranges (start, stop) of a variable along each axis, decoded according to its attributes."""
    dataset = _dataset(path)
    if os.path.isfile(path) and _engine(path)[0] == "h5netcdf":
        with _open(path) as file:
            _check_chunks(file[name], ranges)
    values = dataset.variables[name][tuple(slice(*bounds) for bounds in ranges)].values
    if values.dtype.hasobject or values.dtype.kind == "U":
        return np.array(values.tolist(), dtype="U")
    return np.asarray(values)


OPERATIONS: dict[str, Callable[..., Any]] = {
    "is_store": _is_store,
    "names": _names,
    "entries": _entries,
    "rows": _rows,
    "box": _box,
    "attributes": _attributes,
    "labelled": _labelled,
    "labelled_box": _labelled_box,
    "texts": _texts,
    "matlab_names": _matlab_names,
    "matlab_values": _matlab_values,
}


def _error_code(error: BaseException) -> str:
    if isinstance(error, TooDeepError):
        return "deep"
    if isinstance(error, PermissionError):
        return "permission"
    if isinstance(error, MemoryError):
        return "memory"
    if isinstance(error, ImportError):
        return "package"
    if isinstance(error, UnnamedDimensionsError):
        return "nameless"
    return "kind" if isinstance(error, OSError) and "signature" in str(error) else "damage"


def _limit_cpu_time(seconds: float) -> None:
    """Limit the CPU time of the next request; the OS ends this process beyond it. I/O waits do not count."""
    try:
        import resource
    except ImportError:  # Windows
        return
    used = resource.getrusage(resource.RUSAGE_SELF)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    soft = math.ceil(used.ru_utime + used.ru_stime + seconds)
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard < 0 else min(soft, hard), hard))


def serve() -> None:
    """Answer requests until stdin is closed."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # keep the output of libraries out of the answers
    for line in sys.stdin.buffer:
        request = json.loads(line)
        _limit_cpu_time(request["seconds"])
        array: np.ndarray | None = None
        answer: dict[str, Any]
        try:
            value = OPERATIONS[request["operation"]](*request["arguments"])
            if isinstance(value, np.ndarray):
                # Fortran order, as in MATLAB files, is sent transposed to avoid a copy of gigabytes.
                turned = value.flags.f_contiguous and not value.flags.c_contiguous
                array = np.ascontiguousarray(value.T if turned else value)
                # The shape comes from `value`: ascontiguousarray turns a scalar into a 1-D array.
                answer = {"dtype": value.dtype.str, "shape": (value.T if turned else value).shape, "turned": turned}
            else:
                answer = {"value": value}
        except Exception as error:  # libraries raise all kinds of exceptions on damaged files
            answer = {"error": _error_code(error)}
        answers.write(json.dumps(answer).encode() + b"\n")
        if array is not None:
            answers.write(array.reshape(-1).view(np.uint8).data)
        answers.flush()


if __name__ == "__main__":
    serve()
