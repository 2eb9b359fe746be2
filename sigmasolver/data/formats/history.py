"""The frames that a forecast starts from, read from any supported file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from sigmasolver.data.formats.fields import UNNAMED, check_field, field_index
from sigmasolver.data.formats.hdf5 import is_store
from sigmasolver.data.formats.metadata import check_names, is_forecast, stored_names
from sigmasolver.data.formats.read_options import ReadOptions
from sigmasolver.data.formats.source import Array
from sigmasolver.data.formats.user_arrays import open_arrays
from sigmasolver.data.reader import Reader

__all__ = ["has_header", "history_of", "open_histories", "read_history"]


def read_history(path: Path, names: Sequence[str], axes: int, steady: bool = False) -> np.ndarray:
    """Read histories of the fields `names` on `axes` spatial axes as float32 `(count, frames, *grid, len(names))`.

    The file (.npy, .npz, .pt or HDF5) holds `(frames, *grid, channels)`, optionally with a leading axis `count`, or one
    array per field without channels; or it is a store or a self-describing data set. `steady`: arrays have shape
    `(*grid, channels)`, optionally with a leading axis `count`. Non-finite values raise ValueError, as a forecast would
    spread them.
    """
    path, names = Path(path), check_names(names)
    if has_header(path):
        with _open_data(path) as reader:
            return history_of(reader, path, names, axes)
    with open_histories(path, names, axes, steady, ReadOptions()) as reader:
        return history_of(reader, path, names, axes)


def open_histories(
    path: Path, names: Sequence[str], axes: int, steady: bool, options: ReadOptions, forecast: Sequence[str] = ()
) -> Reader:
    """Open a file of arrays as `train` does, but with or without the axis `count`.

    `names` are the fields that are needed, `forecast` those of a forecast in the order in which it is written. Unless
    the axes are specified, they follow from their number.
    """
    arrays = open_arrays(path)
    if is_forecast(arrays):  # its axes and times are those of the model
        options = replace(options, axes=None, dt=None)
    present = options.reorder_axes(path, arrays, 1)
    combined = present.get(UNNAMED, present.get("fields"))
    channels = None if combined is None or not combined.shape else combined.shape[-1]
    own = None if channels is None else stored_names(path, present, channels)
    if combined is not None and own is None:
        fields = _unnamed_fields(path, channels or 0, tuple(names), options.fields or tuple(names), forecast)
    else:
        known = tuple(present) if own is None else own
        extra = () if options.mask is None or options.mask in names or options.mask not in known else (options.mask,)
        fields = (*names, *extra)
    options = options.only(fields)
    if options.axes is None:
        options = replace(options, steady=None, axes=_axes_of(path, present, fields, axes, steady))
    return _open_data(path, options, "arrays")


def _unnamed_fields(
    path: Path, channels: int, names: tuple[str, ...], trained: tuple[str, ...], forecast: Sequence[str]
) -> tuple[str, ...]:
    """The fields of channels without names: all those of the training file (`trained`), or the needed ones (`names`).

    A forecast has another order than the training file if the user has chosen one for the targets. Nothing is guessed
    then, unless the number of channels is not that of a forecast.
    """
    ordered = tuple(name for name in trained if name in names)
    one_order = names == ordered
    trusted = one_order or len(trained) != len(forecast)
    if trusted and channels == len(trained):
        return trained
    if one_order:
        return names
    if trusted and channels != len(names):
        return trained  # for the error that says how many are expected
    raise ValueError(
        f"{path} has {channels} channels without names, which may have the order of the training data "
        f"({', '.join(ordered)}) or that of the model ({', '.join(names)}); save it as an .npz with `fields` and "
        "`names`."
    )


def history_of(reader: Reader, path: Path, names: Sequence[str], axes: int) -> np.ndarray:
    """Like `read_history`, from an open reader; `path` is its source, for messages."""
    channels = [field_index(path, reader.header.layout.fields, name) for name in names]
    if len(reader.header.grid) != axes:
        raise ValueError(f"{path} has {len(reader.header.grid)} spatial axes; expected {axes}.")
    if not len(reader):
        raise ValueError(f"{path} has no complete trajectory yet; wait until it is written.")
    with np.errstate(over="ignore"):
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


def has_header(path: Path) -> bool:
    """Whether this is a store or a self-describing data set; both specify their axes, units and times."""
    from sigmasolver.data.formats import describes_itself  # avoids a circular import

    return is_store(path) or describes_itself(path)


def _open_data(path: Path, options: ReadOptions | None = None, kind: str | None = None) -> Reader:
    from sigmasolver.data import formats  # avoids a circular import

    return formats.open_data(path, options, kind)


def _axes_of(
    path: Path, arrays: Mapping[str, Array], names: tuple[str, ...], axes: int, steady: bool
) -> tuple[str, ...]:
    """Return the meaning of each axis of the arrays of these fields, given the number of spatial axes."""
    combined = arrays.get(UNNAMED, arrays.get("fields"))
    if combined is None:
        return _as_options(_separate_axes(path, arrays, names, axes, steady))
    # A single field needs no channel axis.
    if combined is arrays.get(UNNAMED) and len(names) == 1 and _lacks_channels(combined.shape, axes, steady):
        labels = _axis_labels(len(combined.shape), axes, steady)
        check_field(combined, labels)
        return _as_options(labels)
    labels = (*_axis_labels(len(combined.shape) - 1, axes, steady), "channels")
    check_field(combined, labels)
    if stored_names(path, arrays, combined.shape[-1]) is None and combined.shape[-1] != len(names):
        raise ValueError(
            f"{combined.where} has {combined.shape[-1]} channels; expected {len(names)}, in the order "
            f"{', '.join(names)}."
        )
    return _as_options(labels)


def _as_options(labels: Sequence[str]) -> tuple[str, ...]:
    """The names of `read_options.AXES` for these axis labels."""
    return tuple({"frames": "time", "channels": "field"}.get(label, label) for label in labels)


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


def _separate_axes(
    path: Path, arrays: Mapping[str, Array], names: tuple[str, ...], axes: int, steady: bool
) -> tuple[str, ...]:
    """Return the axis labels of fields in arrays of their own, which must have one shape."""
    fields = [list(arrays.values())[field_index(path, list(arrays), name)] for name in names]
    for field in fields:
        check_field(field, _axis_labels(len(field.shape), axes, steady))
        if field.shape != fields[0].shape:
            raise ValueError(
                f"{field.where} has shape {field.shape}, but the first has {fields[0].shape}; all must agree."
            )
    return _axis_labels(len(fields[0].shape), axes, steady)
