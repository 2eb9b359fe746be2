"""Trajectories as an `xarray.Dataset` and back: one variable per field, with names, coordinates, units and times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from sigmasolver.data.header import BOUNDARIES
from sigmasolver.data.layout import Layout

if TYPE_CHECKING:
    import xarray

__all__ = ["from_xarray", "is_dataset", "to_xarray"]

TRAJECTORY = ("trajectory", "sample", "count", "case", "run", "batch", "member", "realization")
TIME = ("time", "t", "frame")


def is_dataset(source: object) -> bool:
    """Whether this is an `xarray.Dataset`, which need not be installed to ask."""
    return type(source).__module__.partition(".")[0] == "xarray" and type(source).__name__ == "Dataset"


def to_xarray(values: np.ndarray, fields: Sequence[str], layout: Layout | None = None) -> xarray.Dataset:
    """Trajectories `(count, frames, *grid, fields)`; with a `layout`, its coordinates, units and boundaries too.

    The second axis is called time where the layout has as many times as there are frames, and lead (from 1) elsewhere.
    """
    try:
        import xarray
    except ImportError:
        raise ValueError("This needs xarray; install it: pip install 'sigmasolver[data]'.") from None
    grid, frames = values.shape[2:-1], values.shape[1]
    letters = "xyz"[: len(grid)]
    coordinates: dict[str, Any] = {}
    units: dict[str, str] = {}
    timed = layout is not None and len(layout.times) == frames
    if layout is not None:
        if tuple(map(len, layout.coordinates)) != grid:
            sizes = tuple(map(len, layout.coordinates))
            raise ValueError(f"The layout has axes of {sizes} points and the values of {grid}; leave it out.")
        units = dict(zip(layout.fields, layout.units, strict=True))
        for letter, axis, boundary in zip(letters, layout.coordinates, layout.boundary, strict=True):
            coordinates[letter] = ((letter,), axis, {"boundary": boundary})
    second = "time" if timed else "lead"
    coordinates[second] = layout.times if timed and layout is not None else np.arange(1, frames + 1)
    dims = ("trajectory", second, *letters)
    variables = {
        name: (dims, values[..., place], {"units": units[name]} if name in units else {})
        for place, name in enumerate(fields)
    }
    return xarray.Dataset(variables, coordinates)


def from_xarray(dataset: xarray.Dataset, fields: Sequence[str] | None = None) -> tuple[Layout, np.ndarray]:
    """What the axes and channels mean, and the trajectories `(count, frames, *grid, fields)`.

    A dimension called trajectory or sample counts trajectories, one called time or t is time, and the one to three
    others are of space, in the order of the first variable. A variable that lacks one of them is repeated along it.
    """
    chosen = list(dataset.data_vars) if fields is None else list(fields)
    missing = [str(name) for name in chosen if name not in dataset.data_vars]
    if missing or not chosen:
        there = ", ".join(map(str, dataset.data_vars)) or "none"
        raise ValueError(f"The data set has no variable {', '.join(missing) or 'at all'}; its variables: {there}.")
    dims = list(dict.fromkeys(dim for name in chosen for dim in dataset[name].dims))
    count, time = (next((dim for dim in dims if str(dim).lower() in names), None) for names in (TRAJECTORY, TIME))
    space = [dim for dim in dims if dim not in (count, time)]
    if not 1 <= len(space) <= 3:
        raise ValueError(
            f"The variables have the dimensions {', '.join(map(str, dims))}, of which {len(space)} are of space; "
            "one to three are needed besides trajectory and time: rename them, or choose variables with fields."
        )
    order = [dim for dim in (count, time, *space) if dim is not None]
    sizes = {dim: dataset.sizes[dim] for dim in order}
    arrays = [dataset[name].broadcast_like(dataset[chosen], exclude=()).transpose(*order) for name in chosen]
    values = np.stack([np.asarray(one.values) for one in arrays], axis=-1)
    if values.dtype.kind not in "fiu":
        raise ValueError(f"The variables hold {values.dtype} values; real numbers are needed.")
    values = values.reshape(sizes.get(count, 1), sizes.get(time, 1), *(sizes[dim] for dim in space), len(chosen))
    ends = tuple(str(dataset[dim].attrs.get("boundary", "open")) if dim in dataset.coords else "open" for dim in space)
    unknown = [end for end in ends if end not in BOUNDARIES]
    if unknown:
        raise ValueError(f'The boundary "{unknown[0]}" is unknown; choose among {", ".join(BOUNDARIES)}.')
    layout = Layout(
        tuple(map(str, chosen)),
        tuple(str(dataset[name].attrs.get("units", "1")) for name in chosen),
        ends,
        tuple(_axis(dataset, dim) for dim in space),
        _axis(dataset, time) if time is not None else np.zeros(1),
    )
    return layout, values


def _axis(dataset: xarray.Dataset, dim: Any) -> np.ndarray:
    """Its coordinate, or 0, 1, 2, ...; dates become seconds after the first."""
    if dim not in dataset.coords:
        return np.arange(dataset.sizes[dim], dtype=np.float64)
    values = np.asarray(dataset[dim].values)
    if values.dtype.kind == "M":
        values = (values - values[0]) / np.timedelta64(1, "s")
    elif values.dtype.kind == "m":
        values = values / np.timedelta64(1, "s")
    if values.dtype.kind not in "fiu":
        raise ValueError(f"The coordinate {dim} holds {values.dtype} values; numbers or dates are needed.")
    return values.astype(np.float64)
