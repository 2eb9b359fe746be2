"""The frames that a forecast starts from, read from any supported file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from sigmasolver.data.formats.fields import UNNAMED, check_field, field_index
from sigmasolver.data.formats.hdf5 import is_store
from sigmasolver.data.formats.metadata import check_names, is_list, read_list, stored_names
from sigmasolver.data.formats.source import Array
from sigmasolver.data.formats.user_arrays import open_arrays
from sigmasolver.data.reader import Reader

__all__ = ["has_header", "history_of", "read_history", "read_times"]


def read_history(path: Path, names: Sequence[str], axes: int, steady: bool = False) -> np.ndarray:
    """Read histories of the fields `names` on `axes` spatial axes as float32 `(count, frames, *grid, len(names))`.

    The file (.npy, .npz, .pt or HDF5) holds `(frames, *grid, channels)`, optionally with a leading axis `count`, or one
    array per field without channels; or it is a store or a self-describing data set. `steady`: arrays have shape
    `(*grid, channels)`, optionally with a leading axis `count`. Non-finite values raise ValueError, as a forecast would
    spread them.
    """
    path, names = Path(path), check_names(names)
    if has_header(path):
        with open_data(path) as reader:
            return history_of(reader, path, names, axes)
    values = _read_arrays(path, names, axes, steady)
    if steady and values.ndim == axes + 2:
        values = values[:, None]
    return _as_finite_float32(values[(None,) * (axes + 3 - values.ndim)], path, names)


def history_of(reader: Reader, path: Path, names: Sequence[str], axes: int) -> np.ndarray:
    """Like `read_history`, from an open reader; `path` is its source, for messages."""
    channels = [field_index(path, reader.header.layout.fields, name) for name in names]
    if len(reader.header.grid) != axes:
        raise ValueError(f"{path} has {len(reader.header.grid)} spatial axes; expected {axes}.")
    if not len(reader):
        raise ValueError(f"{path} has no complete trajectory yet; wait until it is written.")
    values = np.stack([reader.trajectory(index)[..., channels] for index in range(len(reader))])
    return _as_finite_float32(values, path, names)


def _as_finite_float32(values: np.ndarray, path: Path, names: Sequence[str]) -> np.ndarray:
    """Convert to contiguous float32; raise ValueError if a value is not finite."""
    with np.errstate(over="ignore"):
        history = np.ascontiguousarray(values, dtype=np.float32)
    finite = np.isfinite(history)
    if not finite.all():
        trajectory, frame, *point, field = (int(i) for i in np.argwhere(~finite)[0])
        raise ValueError(
            f"{path} has {int((~finite).sum())} values that are not finite in float32, the first in trajectory "
            f"{trajectory}, frame {frame}, point {tuple(point)} of {names[field]!r}; a forecast needs finite values."
        )
    return history


def read_times(path: Path, frames: int) -> np.ndarray | None:
    """Read the times of the `frames` frames in a file as increasing float64; None if it has no times."""
    if has_header(path):
        with open_data(path) as data:
            return data.header.axes()["t"]
    arrays = open_arrays(path)
    name = next((key for key in ("times", "t") if is_list(arrays.get(key))), None)
    if name is None:
        return None
    times = np.asarray(read_list(path, arrays, name, frames, "numbers"), dtype=np.float64)
    if not np.isfinite(times).all() or bool((np.diff(times) <= 0).any()):
        raise ValueError(f"The {name} in {path} must be finite, increasing numbers.")
    return times


def has_header(path: Path) -> bool:
    """Whether this is a store or a self-describing data set; both specify their axes, units and times."""
    from sigmasolver.data.formats import describes_itself  # avoids a circular import

    return is_store(path) or describes_itself(path)


def open_data(path: Path) -> Reader:
    from sigmasolver.data import formats

    return formats.open_data(path)


def _read_arrays(path: Path, names: tuple[str, ...], axes: int, steady: bool) -> np.ndarray:
    arrays = open_arrays(path)
    combined = arrays.get(UNNAMED, arrays.get("fields"))
    if combined is None:
        return _read_separate(path, arrays, names, axes, steady)
    # A single field needs no channel axis.
    if combined is arrays.get(UNNAMED) and len(names) == 1 and _lacks_channels(combined.shape, axes, steady):
        check_field(combined, _axis_labels(len(combined.shape), axes, steady))
        return combined.whole()[..., None]
    check_field(combined, (*_axis_labels(len(combined.shape) - 1, axes, steady), "channels"))
    own = stored_names(path, arrays, combined.shape[-1])
    if own is None and combined.shape[-1] != len(names):
        raise ValueError(
            f"{combined.where} has {combined.shape[-1]} channels; expected {len(names)}, in the order "
            f"{', '.join(names)}."
        )
    return combined.whole() if own is None else combined.whole()[..., [field_index(path, own, name) for name in names]]


def _axis_labels(ndim: int, axes: int, steady: bool) -> tuple[str, ...]:
    """Return the expected axis labels of a field with `ndim` axes, channels excluded."""
    leading = ndim - axes
    if steady:
        return (*("count", "frames")[: max(0, leading)], *"xyz"[:axes])
    return (*("count",) * (leading == 2), "frames", *"xyz"[:axes])


def _lacks_channels(shape: tuple[int, ...], axes: int, steady: bool) -> bool:
    """Whether an array of one field has no channel axis; a last axis of length 1 counts as channels."""
    extra = len(shape) - axes
    if not steady:
        return extra == 1 or (extra == 2 and shape[-1] != 1)
    return extra == 0 or (extra in (1, 2) and shape[-1] != 1 and (extra == 1 or shape[1] == 1))


def _read_separate(
    path: Path, arrays: Mapping[str, Array], names: tuple[str, ...], axes: int, steady: bool
) -> np.ndarray:
    """Read each field from an array of its own and stack them along a channel axis."""
    fields = [list(arrays.values())[field_index(path, list(arrays), name)] for name in names]
    for field in fields:
        check_field(field, _axis_labels(len(field.shape), axes, steady))
        if field.shape != fields[0].shape:
            raise ValueError(
                f"{field.where} has shape {field.shape}, but the first has {fields[0].shape}; all must agree."
            )
    return np.stack([field.whole() for field in fields], axis=-1)
