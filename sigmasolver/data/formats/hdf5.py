"""Other people's HDF5 files: which arrays lie in them, at any depth, read by slices.

A dataset in groups goes by its path, `group/u`. Links to other places and files are not followed.
"""

from __future__ import annotations

import math
from pathlib import Path

import h5py
import numpy as np

from sigmasolver.data.formats.foreign import Array
from sigmasolver.data.formats.heap import heap_texts
from sigmasolver.data.header import FORMAT

__all__ = ["fault", "is_store", "open_hdf5"]


def is_store(path: Path) -> bool:
    """Whether this is a store already, whole or not."""
    try:
        if not h5py.is_hdf5(path):
            return False
        with h5py.File(path, "r", locking=False) as file:
            # Ours has a fixed length; reading one of free length may never end in a damaged file.
            fixed = "format" in file.attrs and file.attrs.get_id("format").dtype.kind == "S"
            return fixed and file.attrs["format"] == FORMAT.encode()
    except Exception:  # a damaged file is none; what is wrong with it is said by whoever reads it
        return False


def open_hdf5(path: Path) -> dict[str, Array]:
    """The datasets of a foreign HDF5 file by path, in the order of their names."""
    if is_store(path):
        raise ValueError(f"{path} already is a sigmasolver store; use it as it is.")
    found: dict[str, Array] = {}

    def visit(name: str | bytes, item: h5py.Group | h5py.Dataset) -> None:
        if isinstance(item, h5py.Dataset):  # a name that is no UTF-8 comes as bytes
            shown = name if isinstance(name, str) else name.decode("utf-8", "backslashreplace")
            found[shown] = _array(path, shown, item)

    try:
        with h5py.File(path, "r", locking=False) as file:
            file.visititems(visit)
    except Exception as error:  # h5py answers damage with whatever exception comes first
        raise _plain(path, error) from error
    return dict(sorted(found.items()))


def _array(path: Path, name: str, dataset: h5py.Dataset) -> Array:
    text = False
    try:
        dtype = dataset.dtype
        text = h5py.check_string_dtype(dtype) is not None
    except (TypeError, ValueError):  # a type that NumPy has no word for
        dtype = np.dtype("V1")
    if dtype.hasobject:
        dtype = np.dtype("U1") if text else np.dtype("V1")
    shape = (0,) if dataset.shape is None else tuple(dataset.shape)

    def rows(start: int, stop: int) -> np.ndarray:
        key = slice(start, stop) if shape else ()
        try:
            with h5py.File(path, "r", locking=False) as file:
                return np.asarray(_texts(path, file[name])[key] if text else file[name][key])
        except Exception as error:
            raise _plain(path, error) from error

    return Array(f"{name!r} in {path}", shape, dtype, rows, fault(dataset) if dtype.kind in "fiu" else None)


def _texts(path: Path, dataset: h5py.Dataset) -> np.ndarray:
    """Words, of fixed or of free length."""
    place, sizes = dataset.id.get_offset(), dataset.file.id.get_create_plist().get_sizes()
    if h5py.check_string_dtype(dataset.dtype).length is None and place is not None and sizes == (8, 8):
        texts = heap_texts(path, place, dataset.size, dataset.file.userblock_size)
        return np.array(texts, dtype=str).reshape(dataset.shape)
    return np.array(dataset.asstr()[()], dtype=str)


def fault(dataset: h5py.Dataset) -> str | None:
    """Why not all its values can be had; HDF5 itself would give zeros for those that were never written."""
    plan = dataset.id.get_create_plist()
    if not all(h5py.h5z.filter_avail(plan.get_filter(place)[0]) for place in range(plan.get_nfilters())):
        return "is packed in a way that this HDF5 does not know; save it again with gzip or unpacked"
    kind, whole = plan.get_layout(), True
    if kind == h5py.h5d.CHUNKED:
        pieces = [math.ceil(size / step) for size, step in zip(dataset.shape, dataset.chunks, strict=True)]
        whole = dataset.id.get_num_chunks() >= math.prod(pieces)
    elif kind == h5py.h5d.CONTIGUOUS and not plan.get_external_count():
        whole = dataset.id.get_storage_size() >= dataset.dtype.itemsize * math.prod(dataset.shape or (0,))
    return None if whole else "is written in part only; let its writer finish, or save what is there by itself"


def _plain(path: Path, error: Exception) -> ValueError:
    """Why this file cannot be read, in one sentence."""
    if not path.exists():
        return ValueError(f"There is no file {path}.")
    if isinstance(error, PermissionError):
        return ValueError(f"This user may not read {path}; ask its owner.")
    if isinstance(error, OSError) and "signature" in str(error):
        return ValueError(f"{path} is not an HDF5 file; save it again.")
    return ValueError(f"{path} is truncated or damaged; copy or download it again.")
