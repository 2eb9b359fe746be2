"""The process that reads other people's HDF5, MATLAB, NetCDF and Zarr files, whose libraries a damaged file can crash
or make loop.

A script of its own, started by `isolated.py`; it imports nothing of the package, so that it is there in a moment.
A request is one line of JSON; so is the answer, and the bytes of an array follow it. HDF5 links to other files are
listed but never followed, as are values that lie in other files.

Texts of free length are read without the library. A dataset of them is a row of descriptors, each naming a text in a
collection elsewhere in the file:

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
"""Groups within groups; paths through deeper ones take the library ever longer."""
_LARGEST = 2**24


class DeepError(Exception):
    """Groups within groups within groups."""


class NamelessError(Exception):
    """Arrays whose dimensions have no names."""


def _open(path: str) -> h5py.File:
    return h5py.File(path, "r", locking=False)


def _is_store(path: str, marker: str) -> bool:
    """Whether the file calls itself a store; our text has a fixed length, and no other is read."""
    with _open(path) as file:
        fixed = "format" in file.attrs and file.attrs.get_id("format").dtype.kind == "S"
        return bool(fixed and file.attrs["format"] == marker.encode())


def _names(path: str) -> list[str]:
    """What lies at the top."""
    with _open(path) as file:
        return [name for name in file if isinstance(name, str)]


def _entries(path: str) -> list[dict[str, Any]]:
    """Every dataset once, under the first of its paths, and every link to another file."""
    with _open(path) as file:
        return [_entry(name, item) for name, item in _walk(file)]


def _walk(file: h5py.File, groups: bool = False) -> Iterator[tuple[str, h5py.Dataset | h5py.Group | h5py.ExternalLink]]:
    """Datasets and external links; with `groups` these too."""
    seen = {h5py.h5o.get_info(file["/"].id).addr}
    waiting: list[tuple[str, h5py.Group]] = [("", file["/"])]
    while waiting:
        prefix, group = waiting.pop()
        if prefix.count("/") > DEEPEST:
            raise DeepError
        inner = []
        for name in group:  # one that is no UTF-8 comes as bytes
            shown = prefix + (name if isinstance(name, str) else name.decode("utf-8", "backslashreplace"))
            link = group.get(name, getlink=True)
            if isinstance(link, h5py.ExternalLink):
                yield shown, link
            if not isinstance(link, h5py.HardLink):
                continue
            item = group[name]
            address = h5py.h5o.get_info(item.id).addr
            if address in seen:
                continue
            seen.add(address)
            if isinstance(item, h5py.Group):
                inner.append((f"{shown}/", item))
                if groups:
                    yield shown, item
            elif isinstance(item, h5py.Dataset):
                yield shown, item
        waiting += reversed(inner)


def _entry(name: str, item: h5py.Dataset | h5py.ExternalLink) -> dict[str, Any]:
    if isinstance(item, h5py.ExternalLink):
        why = "is a link to another file, which is not followed; import that file, or copy the array into this one"
        return {"name": name, "shape": [0], "dtype": "V1", "fault": why, "link": True}
    text = False
    try:
        dtype = item.dtype
        text = h5py.check_string_dtype(dtype) is not None
    except (TypeError, ValueError):  # a type that NumPy has no word for
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
    """Why not all its values can be had; HDF5 itself would give zeros for those that are not there."""
    plan = dataset.id.get_create_plist()
    kind, whole = plan.get_layout(), True
    if kind == h5py.h5d.VIRTUAL:
        return (
            "is a virtual dataset made from other files and would read as zeros where one of them is missing; "
            "import those files instead"
        )
    if plan.get_external_count():
        return "stores its values in an external file, which is not read; save it again with its values inside"
    if not all(h5py.h5z.filter_avail(plan.get_filter(place)[0]) for place in range(plan.get_nfilters())):
        return "uses a compression filter that this HDF5 does not support; save it again with gzip or uncompressed"
    if kind == h5py.h5d.CHUNKED:
        pieces = [math.ceil(size / step) for size, step in zip(dataset.shape, dataset.chunks, strict=True)]
        whole = dataset.id.get_num_chunks() >= math.prod(pieces)
    elif kind == h5py.h5d.CONTIGUOUS:
        whole = dataset.id.get_storage_size() >= dataset.id.get_type().get_size() * math.prod(dataset.shape or (0,))
    return None if whole else "is incomplete; wait until it is written, or save the existing values separately"


def _rows(path: str, name: str, start: int, stop: int, last: bool) -> np.ndarray:
    """Entries of the first axis, or of the last; the value itself without axes."""
    with _open(path) as file:
        dataset = file[name]
        key: Any = () if not dataset.shape else (..., slice(start, stop)) if last else slice(start, stop)
        ranges = [(0, size) for size in dataset.shape]
        if ranges:
            ranges[-1 if last else 0] = (start, stop)
        _check_chunks(dataset, ranges)
        return np.asarray(dataset[key])


def _box(path: str, name: str, ranges: list[list[int]]) -> np.ndarray:
    """The entries between `start` and `stop` along each axis."""
    with _open(path) as file:
        dataset = file[name]
        _check_chunks(dataset, ranges)
        return np.asarray(dataset[tuple(slice(*one) for one in ranges)])


def _attributes(path: str) -> dict[str, dict[str, Any]]:
    """The attributes of every group and dataset by path; those of the file under "". Links are not followed."""
    with _open(path) as file:
        found = {"": file.attrs}
        for name, item in _walk(file, groups=True):
            if not isinstance(item, h5py.ExternalLink):
                found[name] = item.attrs
        return {name: {str(key): plain_value(held[key]) for key in held} for name, held in found.items()}


def plain_value(value: Any) -> Any:
    """An attribute as JSON holds it; what is not finite as a word."""
    if isinstance(value, h5py.Empty):
        return ""
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    if isinstance(value, np.ndarray | list | tuple):
        return [plain_value(one) for one in (value.tolist() if isinstance(value, np.ndarray) else value)]
    if isinstance(value, np.generic):
        return plain_value(value.item())
    if isinstance(value, str | bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return str(value)


_CHECKED: dict[tuple[Any, ...], set[tuple[int, ...]]] = {}
"""The chunks that were found to be whole, by file, its state and dataset: each is unpacked for this only once."""


def _check_chunks(dataset: h5py.Dataset, ranges: Sequence[Sequence[int]]) -> None:
    """Raise where a chunk of these entries does not unpack to its full size: the library would read on behind its end,
    which gives whatever lies in the memory there, or a crash."""
    if dataset.chunks is None:
        return
    size = math.prod(dataset.chunks) * dataset.id.get_type().get_size()
    plan = dataset.id.get_create_plist()
    filters = [plan.get_filter(place)[0] for place in range(plan.get_nfilters())]
    if not set(filters) <= {h5py.h5z.FILTER_DEFLATE, h5py.h5z.FILTER_SHUFFLE, h5py.h5z.FILTER_FLETCHER32}:
        return  # nothing here could unpack them
    corners = [
        range(start // step * step, min(stop, length), step)
        for (start, stop), length, step in zip(ranges, dataset.shape, dataset.chunks, strict=True)
    ]
    checked = _CHECKED.setdefault((_state(dataset.file.filename), dataset.name), set())
    for corner in itertools.product(*corners):
        if corner in checked:
            continue
        skipped, data = dataset.id.read_direct_chunk(corner)
        for place, one in reversed(list(enumerate(filters))):
            if skipped >> place & 1:
                continue
            if one == h5py.h5z.FILTER_FLETCHER32:
                data = data[:-4]
            elif one == h5py.h5z.FILTER_DEFLATE:
                stream = zlib.decompressobj()
                data = stream.decompress(data, size + 5)  # room for a checksum inside
        if len(data) != size:
            raise EOFError
        checked.add(corner)


def _state(path: str) -> tuple[str, int, int, int]:
    """What changes when a file or folder is written anew."""
    status = os.stat(path)
    return path, status.st_ino, status.st_mtime_ns, status.st_size


def _texts(path: str, name: str) -> Any:
    """Words, of fixed or of free length, as nested lists."""
    with _open(path) as file:
        dataset = file[name]
        _check_chunks(dataset, [(0, size) for size in dataset.shape])
        place, sizes = dataset.id.get_offset(), dataset.file.id.get_create_plist().get_sizes()
        if h5py.check_string_dtype(dataset.dtype).length is None and place is not None and sizes == (8, 8):
            texts = _heap_texts(path, place, dataset.size, dataset.file.userblock_size)
            return np.array(texts, dtype=str).reshape(dataset.shape).tolist()
        return np.array(dataset.asstr()[()], dtype=str).tolist()


def _heap_texts(path: str, offset: int, count: int, base: int) -> list[str]:
    """`count` texts whose descriptors lie at `offset`; addresses in the file count from `base`.

    Raises some exception or other where the bytes make no sense.
    """
    with open(path, "rb") as file:

        def at(place: int, size: int) -> bytes:
            file.seek(place)
            data = file.read(size)
            if len(data) != size:
                raise EOFError
            return data

        def collection(address: int) -> dict[int, bytes]:
            magic, size = struct.unpack("<4s4xQ", at(base + address, 16))
            if magic != b"GCOL" or size > _LARGEST:
                raise EOFError
            data, place, objects = at(base + address, size), 16, dict[int, bytes]()
            while place + 16 <= size:
                number, length = struct.unpack_from("<H6xQ", data, place)
                if number == 0:  # what follows is free
                    break
                objects[number] = data[place + 16 : place + 16 + length]
                place += 16 + (length + 7) // 8 * 8
            return objects

        texts = list[str]()
        known = dict[int, dict[int, bytes]]()
        for length, address, number in struct.iter_unpack("<IQI", at(offset, 16 * count)):
            if length and address not in known:
                known[address] = collection(address)
            # Some programs count the closing zero byte among the text.
            texts.append(known[address][number][:length].rstrip(b"\0").decode() if length else "")
    return texts


def _matlab_names(path: str) -> list[str]:
    """Of a MATLAB file before version 7.3."""
    import scipy.io

    return [name for name, _, _ in scipy.io.whosmat(path)]


def _matlab_values(path: str, name: str, most: int | None) -> np.ndarray | None:
    """The first `most` entries, or all; None for what is no array of numbers."""
    import scipy.io

    values = scipy.io.loadmat(path, variable_names=[name])[name]
    if not isinstance(values, np.ndarray) or values.dtype.hasobject or values.dtype.names is not None:
        return None
    return values[:most]


# --- NetCDF and Zarr


_DATASETS: dict[str, tuple[tuple[Any, ...], Any]] = {}
"""The data sets that were opened last, kept open: to open one takes longer than to read a window."""
_MOST_OPEN = 32
_METADATA = ("zarr.json", ".zmetadata", ".zattrs", ".zgroup")


def _dataset(path: str) -> Any:
    """A NetCDF file or a Zarr group as xarray sees it, nothing loaded; times stay numbers, with their unit."""
    import xarray

    inner = [os.path.join(path, name) for name in _METADATA]
    state = tuple(_state(one) for one in (path, *inner) if os.path.exists(one))
    known, held = _DATASETS.get(path, (None, None))
    if known == state:
        return held
    if held is not None:
        _DATASETS.pop(path)[1].close()
    elif len(_DATASETS) == _MOST_OPEN:
        _DATASETS.pop(next(iter(_DATASETS)))[1].close()
    engine, options = _engine(path)
    try:
        held = xarray.open_dataset(
            path, engine=engine, decode_times=False, decode_coords="all", cache=False, chunks=None, **options
        )
    except (KeyError, ValueError) as error:
        if engine == "zarr" and ("_ARRAY_DIMENSIONS" in str(error) or "dimension" in str(error)):
            raise NamelessError from error
        raise
    _DATASETS[path] = (state, held)
    return held


def _engine(path: str) -> tuple[str, dict[str, Any]]:
    if os.path.isdir(path):
        import zarr

        if isinstance(zarr.open(path, mode="r"), zarr.Array):
            raise NamelessError
        return "zarr", {"consolidated": os.path.exists(os.path.join(path, ".zmetadata")) or None}
    with open(path, "rb") as file:
        start = file.read(4)
    if start == b"\x89HDF":
        import h5netcdf  # noqa: F401

        return "h5netcdf", {"phony_dims": "access", "driver_kwds": {"locking": False}}
    if start[:3] == b"CDF":
        return "scipy", {}
    raise OSError("no signature")


def _labelled(path: str) -> dict[str, Any]:
    """The variables of a NetCDF file or Zarr group: names, dimensions, types and attributes."""
    faults = {} if os.path.isdir(path) or _engine(path)[0] != "h5netcdf" else _faults(path)
    held = _dataset(path)
    variables = [
        {
            "name": str(name), "dims": [str(one) for one in variable.dims], "shape": variable.shape,
            "dtype": _kind(variable), "coordinate": name in held.coords,
            "attributes": {str(key): plain_value(value) for key, value in variable.attrs.items()},
            "fault": faults.get(str(name)),
        }
        for name, variable in held.variables.items()
    ]  # fmt: skip
    return {
        "variables": variables,
        "attributes": {str(key): plain_value(value) for key, value in held.attrs.items()},
        "missing": _missing(path) if os.path.isdir(path) else {},
    }


def _kind(variable: Any) -> str:
    """Its type; texts of free length are texts, other objects nothing that can be read."""
    if not variable.dtype.hasobject:
        return variable.dtype.str
    few = variable.ndim == 1 and variable.size <= 4096
    return "U1" if few and all(isinstance(one, str) for one in variable.values) else "V1"


def _faults(path: str) -> dict[str, str | None]:
    with _open(path) as file:
        return {name: _entry(name, item)["fault"] for name, item in _walk(file)}


def _missing(path: str) -> dict[str, list[int]]:
    """By array, how many of its chunks are not there, and how many there should be."""
    import zarr

    arrays = zarr.open_group(path, mode="r").arrays()
    counts = {name: (array.nchunks_initialized, array.nchunks) for name, array in arrays}
    return {name: [total - there, total] for name, (there, total) in counts.items() if there < total}


def _labelled_box(path: str, name: str, ranges: list[list[int]]) -> np.ndarray:
    """The entries of a variable between `start` and `stop` along each axis, unpacked as its attributes say."""
    held = _dataset(path)
    if os.path.isfile(path) and _engine(path)[0] == "h5netcdf":
        with _open(path) as file:
            _check_chunks(file[name], ranges)
    values = held.variables[name][tuple(slice(*one) for one in ranges)].values
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


def _reason(error: BaseException) -> str:
    if isinstance(error, DeepError):
        return "deep"
    if isinstance(error, PermissionError):
        return "permission"
    if isinstance(error, MemoryError):
        return "memory"
    if isinstance(error, ImportError):
        return "package"
    if isinstance(error, NamelessError):
        return "nameless"
    return "kind" if isinstance(error, OSError) and "signature" in str(error) else "damage"


def _limit(seconds: float) -> None:
    """Let the system end this process if the next request computes for longer; waiting for a disk does not count."""
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
    """Answer requests until there are no more."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints must not get among the answers
    for line in sys.stdin.buffer:
        request = json.loads(line)
        _limit(request["seconds"])
        array: np.ndarray | None = None
        answer: dict[str, Any]
        try:
            value = OPERATIONS[request["operation"]](*request["arguments"])
            if isinstance(value, np.ndarray):
                # MATLAB's own order is sent as it lies in memory, which spares a copy of gigabytes.
                turned = value.flags.f_contiguous and not value.flags.c_contiguous
                array = np.ascontiguousarray(value.T if turned else value)
                # A copy made contiguous has an axis where a single number has none.
                answer = {"dtype": value.dtype.str, "shape": (value.T if turned else value).shape, "turned": turned}
            else:
                answer = {"value": value}
        except Exception as error:  # the libraries answer damage with whatever exception comes first
            answer = {"error": _reason(error)}
        answers.write(json.dumps(answer).encode() + b"\n")
        if array is not None:
            answers.write(array.reshape(-1).view(np.uint8).data)
        answers.flush()


if __name__ == "__main__":
    serve()
