"""The frames that a forecast starts from, out of whatever file holds them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from sigmasolver.data.formats.fields import UNNAMED, check_field, pick
from sigmasolver.data.formats.hdf5 import is_store
from sigmasolver.data.formats.metadata import check_names, is_list, own_names, read_list
from sigmasolver.data.formats.source import Array
from sigmasolver.data.formats.user_arrays import open_arrays
from sigmasolver.data.reader import Reader

__all__ = ["has_header", "history_of", "read_history", "read_times"]


def read_history(path: Path, names: Sequence[str], axes: int, steady: bool = False) -> np.ndarray:
    """Histories of the fields `names` on `axes` spatial axes, float32 `(count, frames, *grid, len(names))`.

    The file holds `(frames, *grid, channels)`, with an axis `count` before or not, or one array per field without the
    channels, as .npy, .npz, .pt or HDF5; or it is a store, or files that describe themselves. `steady`: arrays hold
    `(*grid, channels)`, with an axis `count` before or not. A value that is not finite is refused, as it would spread.
    """
    path, names = Path(path), check_names(names)
    if has_header(path):
        with open_data(path) as reader:
            return history_of(reader, path, names, axes)
    values = _from_arrays(path, names, axes, steady)
    if steady and values.ndim == axes + 2:
        values = values[:, None]
    return _finite(values[(None,) * (axes + 3 - values.ndim)], path, names)


def history_of(reader: Reader, path: Path, names: Sequence[str], axes: int) -> np.ndarray:
    """Like `read_history`, of data that are open; `path` is where they come from."""
    places = [pick(path, reader.header.layout.fields, name) for name in names]
    if len(reader.header.grid) != axes:
        raise ValueError(f"{path} has {len(reader.header.grid)} spatial axes; expected {axes}.")
    if not len(reader):
        raise ValueError(f"{path} has no complete trajectory yet; wait until it is written.")
    values = np.stack([reader.trajectory(index)[..., places] for index in range(len(reader))])
    return _finite(values, path, names)


def _finite(values: np.ndarray, path: Path, names: Sequence[str]) -> np.ndarray:
    """As float32, if all of them are finite."""
    with np.errstate(over="ignore"):
        history = np.ascontiguousarray(values, dtype=np.float32)
    finite = np.isfinite(history)
    if not finite.all():
        trajectory, frame, *point, field = (int(one) for one in np.argwhere(~finite)[0])
        raise ValueError(
            f"{path} has {int((~finite).sum())} values that are not finite in float32, the first in trajectory "
            f"{trajectory}, frame {frame}, point {tuple(point)} of {names[field]!r}; a forecast needs finite values."
        )
    return history


def read_times(path: Path, frames: int) -> np.ndarray | None:
    """The times of the `frames` frames in the file, float64, increasing; None: it says nothing of them."""
    if has_header(path):
        with open_data(path) as data:
            return data.header.axes()["t"]
    arrays = open_arrays(path)
    name = next((one for one in ("times", "t") if is_list(arrays.get(one))), None)
    if name is None:
        return None
    times = np.asarray(read_list(path, arrays, name, frames, "numbers"), dtype=np.float64)
    if not np.isfinite(times).all() or bool((np.diff(times) <= 0).any()):
        raise ValueError(f"The {name} in {path} must be finite, increasing numbers.")
    return times


def has_header(path: Path) -> bool:
    """Whether this is a store, or files that describe themselves: both know their axes, units and times."""
    from sigmasolver.data.formats import describes_itself  # which imports this module

    return is_store(path) or describes_itself(path)


def open_data(path: Path) -> Reader:
    from sigmasolver.data import formats

    return formats.open_data(path)


def _from_arrays(path: Path, names: tuple[str, ...], axes: int, steady: bool) -> np.ndarray:
    arrays = open_arrays(path)
    lone = arrays.get(UNNAMED, arrays.get("fields"))
    if lone is None:
        return _apart(path, arrays, names, axes, steady)
    # One field needs no channel axis.
    if lone is arrays.get(UNNAMED) and len(names) == 1 and _lacks_channels(lone.shape, axes, steady):
        check_field(lone, _labels(len(lone.shape), axes, steady))
        return lone.whole()[..., None]
    check_field(lone, (*_labels(len(lone.shape) - 1, axes, steady), "channels"))
    own = own_names(path, arrays, lone.shape[-1])
    if own is None and lone.shape[-1] != len(names):
        raise ValueError(
            f"{lone.where} has {lone.shape[-1]} channels; expected {len(names)}, in the order {', '.join(names)}."
        )
    return lone.whole() if own is None else lone.whole()[..., [pick(path, own, name) for name in names]]


def _labels(number: int, axes: int, steady: bool) -> tuple[str, ...]:
    """The axes of a field that has so many of them, without its channels."""
    free = number - axes
    if steady:
        return (*("count", "frames")[: max(0, free)], *"xyz"[:axes])
    return (*("count",) * (free == 2), "frames", *"xyz"[:axes])


def _lacks_channels(shape: tuple[int, ...], axes: int, steady: bool) -> bool:
    """Whether an array of one field has no axis of channels: a last axis of one point is taken for it."""
    free = len(shape) - axes
    if not steady:
        return free == 1 or (free == 2 and shape[-1] != 1)
    return free == 0 or (free in (1, 2) and shape[-1] != 1 and (free == 1 or shape[1] == 1))


def _apart(path: Path, arrays: Mapping[str, Array], names: tuple[str, ...], axes: int, steady: bool) -> np.ndarray:
    """One array per field."""
    fields = [list(arrays.values())[pick(path, list(arrays), name)] for name in names]
    for field in fields:
        check_field(field, _labels(len(field.shape), axes, steady))
        if field.shape != fields[0].shape:
            raise ValueError(
                f"{field.where} has shape {field.shape}, but the first has {fields[0].shape}; all must agree."
            )
    return np.stack([field.whole() for field in fields], axis=-1)
