"""What is inside a store or a foreign file: its header, statistics of its values, what is wrong with them, and a
picture.

Statistics run over the finite values, in float64, one pass, a few megabytes at a time. Groups of n values
with mean m and squared deviations S merge exactly (Chan, Golub and LeVeque):

    n = n₁ + n₂,   δ = m₂ - m₁,   m = m₁ + δ n₂/n,   S = S₁ + S₂ + δ² n₁n₂/n.

In the picture each field has one colour scale for all its frames, symmetric about zero where the values have
both signs; both colour maps can be read with any common kind of colour blindness.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sigmasolver.data.domain import time_steps, unevenly_spaced
from sigmasolver.data.formats import Reading, guess_kind, open_data
from sigmasolver.data.formats.in_place import ForeignReader
from sigmasolver.data.header import Header, StoreError
from sigmasolver.data.layout import turn
from sigmasolver.data.moments import merge
from sigmasolver.data.reader import Reader
from sigmasolver.data.split import Split
from sigmasolver.data.store import StoreReader, is_store
from sigmasolver.runs.files import plain_errors, replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.collections import QuadMesh

__all__ = ["FieldSummary", "Summary", "draw", "open_any", "summarise"]

_BLOCK = 16 * 2**20
TINY = 1e-5
"""Of the mean: a standard deviation below it is lost in float32."""
MOST_SHOWN = 5
_SIGNED, _ONE_SIGN = "RdBu_r", "viridis"


@dataclass(frozen=True)
class FieldSummary:
    """One field over all trajectories, frames and points; NaN where no value is finite."""

    name: str
    unit: str
    minimum: float
    maximum: float
    mean: float
    std: float
    frame_mean: tuple[float, ...]
    frame_std: tuple[float, ...]
    nans: int
    infinities: int

    @property
    def constant(self) -> bool:
        """Whether there is one value only, so that the field tells nothing."""
        return self.minimum == self.maximum


@dataclass(frozen=True)
class Summary:
    """A store or a foreign data set in numbers."""

    path: Path
    header: Header
    package: str | None
    """The version of the package that wrote a store; None: foreign files."""
    count: int
    """How many trajectories it is meant for."""
    whole: int
    """How many it holds."""
    size: int
    """Bytes that the whole trajectories take."""
    fields: tuple[FieldSummary, ...]
    fingerprint: str | None
    """None: it is of all trajectories, and only some were read."""
    damaged: tuple[int, ...]
    """The trajectories whose values are no longer those that were written."""
    notes: tuple[str, ...] = ()
    """What foreign files do not say and was taken as known."""
    twins: tuple[tuple[int, int], ...] = ()
    """Pairs of trajectories with the same values."""
    read: int = 0
    """How many trajectories the statistics are of."""
    bad: int = 0
    """How many of these have values that are not finite."""

    @property
    def published_split(self) -> Split | None:
        return Split.from_plain(self.header.parameters.get("split"))

    def problems(self) -> list[str]:
        """What may spoil a training, one sentence each."""
        found = []
        for field in self.fields if self.read else ():
            if field.nans or field.infinities:
                found.append(
                    f"{field.name} has {field.nans} NaN and {field.infinities} infinite values; fix them, "
                    "or skip these trajectories with --skip-bad."
                )
            if field.constant:
                found.append(f"{field.name} is constant and carries no information.")
            elif field.std < TINY * abs(field.mean):
                found.append(
                    f"{field.name} varies by only {field.std / abs(field.mean):.1g} of its mean, "
                    "which float32 resolves poorly; "
                    "subtract a constant from it."
                )
        return found + self._twin_problems() + self._axis_problems()

    def _twin_problems(self) -> list[str]:
        split = self.published_split
        place = {} if split is None else {one: part for part, ones in asdict(split).items() for one in ones}
        found = []
        for first, second in self.twins[:MOST_SHOWN]:
            pair = f"Trajectories {first} and {second} have identical values"
            if split is None:
                found.append(f"{pair}; keep them in the same split, or remove one.")
            elif place.get(first) != place.get(second):
                found.append(
                    f"{pair}, but one is in the {place.get(first, 'unused')} split and the other in the "
                    f"{place.get(second, 'unused')} split; remove one."
                )
        if len(self.twins) > MOST_SHOWN:
            found.append(f"{len(self.twins)} pairs of trajectories have identical values.")
        return found

    def _axis_problems(self) -> list[str]:
        layout, found = self.header.layout, []
        uneven = unevenly_spaced(time_steps(layout.times))
        if uneven is not None:
            found.append(f"The frames are {uneven}; resample them, or train with model.options.time_embedding=true.")
        for name, axis in zip(layout.axis_names, layout.coordinates, strict=True):
            steps = time_steps(axis)
            if unevenly_spaced(steps) is not None:
                found.append(
                    f"{name} is unevenly spaced, {steps[0]:g} to {steps[1]:g} apart; models treat it as uniform."
                )
        if self.whole == 1:
            found.append("Only one trajectory; training and testing need at least two, so split it in time.")
        return found


class _Moments:
    """Count, mean, squared deviations, extremes, NaNs and infinities, each `(frames, fields)`."""

    def __init__(self, frames: int, fields: int) -> None:
        self.n, self.mean, self.S = (np.zeros((frames, fields)) for _ in range(3))
        self.low, self.high = np.full((frames, fields), np.inf), np.full((frames, fields), -np.inf)
        self.nans, self.infinities = (np.zeros((frames, fields), np.int64) for _ in range(2))

    def add(self, frames: slice, block: np.ndarray) -> None:
        """Take in `(frames, *grid, fields)` values of these frames."""
        values = block.reshape(len(block), -1, block.shape[-1]).transpose(0, 2, 1).astype(np.float64, order="C")
        finite = np.isfinite(values)
        n = finite.sum(-1).astype(np.float64)
        if not finite.all():
            nans = np.isnan(values)
            self.nans[frames] += nans.sum(-1)
            self.infinities[frames] += (~finite & ~nans).sum(-1)
        low = values.min(-1, initial=np.inf, where=finite)
        high = values.max(-1, initial=-np.inf, where=finite)
        self.low[frames] = np.minimum(self.low[frames], low)
        self.high[frames] = np.maximum(self.high[frames], high)
        values[~finite] = 0
        mean = values.sum(-1) / np.maximum(n, 1)
        values -= mean[..., None]
        values[~finite] = 0
        S = np.einsum("fqn,fqn->fq", values, values)
        self.n[frames], self.mean[frames], self.S[frames] = merge(
            (self.n[frames], self.mean[frames], self.S[frames]), (n, mean, S)
        )

    @property
    def not_finite(self) -> int:
        return int(self.nans.sum() + self.infinities.sum())

    def over_frames(self) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard deviation per field, all frames together."""
        total = (self.n[0], self.mean[0], self.S[0])
        for frame in range(1, len(self.n)):
            total = merge(total, (self.n[frame], self.mean[frame], self.S[frame]))
        return _mean_and_std(*total)

    def per_frame(self) -> tuple[np.ndarray, np.ndarray]:
        return _mean_and_std(self.n, self.mean, self.S)


def _mean_and_std(n: np.ndarray, mean: np.ndarray, S: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    none = n == 0
    return np.where(none, np.nan, mean), np.where(none, np.nan, np.sqrt(S / np.maximum(n, 1)))


def open_any(path: str | Path, steady: bool | None = None) -> Reader:
    """A store, or foreign files of any kind."""
    path = Path(path)
    if steady is not None and path.exists() and not is_store(path) and guess_kind(path).select is not None:
        return open_data(path, Reading(steady=steady))
    return open_data(path)


def summarise(
    path: str | Path,
    progress: Callable[[int, int], None] | None = None,
    steady: bool | None = None,
    first: int | None = None,
) -> Summary:
    """Read every whole trajectory once: statistics, twins, and whether it still has the digest it was written with.

    `progress` is called with the trajectories done and their number. `steady`: a user's own arrays have no axis of
    time. `first`: read only so many trajectories.
    """
    if first is not None and first < 1:
        raise ValueError(f"first is {first}; it must be at least 1.")
    with open_any(path, steady) as data:
        header = data.header
        moments = _Moments(header.shape[0], header.shape[-1])
        number = len(data) if first is None else min(first, len(data))
        damaged, twins, seen, bad = [], [], dict[bytes, int](), 0
        store = data if isinstance(data, StoreReader) else None
        for index in range(number):
            before = moments.not_finite
            digest = _take_in(data, index, moments)
            bad += moments.not_finite > before
            if store is not None and digest != store.digests[index]:
                damaged.append(index)
            twin = seen.setdefault(digest, index)
            if twin != index:
                twins.append((twin, index))
            if progress is not None:
                progress(index + 1, number)
        known = not isinstance(data, ForeignReader) or data.examined
        return Summary(
            path=data.path,
            header=header,
            package=None if store is None else store.package,
            count=len(data) if store is None else store.count,
            whole=len(data),
            size=len(data) * header.nbytes,
            fields=_fields(header, moments),
            fingerprint=data.fingerprint if number == len(data) or known else None,
            damaged=tuple(damaged),
            notes=tuple(data.notes),
            twins=tuple(twins),
            read=number,
            bad=bad,
        )


def _take_in(store: Reader, index: int, moments: _Moments) -> bytes:
    """Add one trajectory to the moments; return the digest of its values."""
    frames = store.header.shape[0]
    step = max(1, _BLOCK * frames // store.header.nbytes)
    digest = hashlib.sha256()
    for start in range(0, frames, step):
        block = store[index, start : start + step]
        digest.update(np.ascontiguousarray(block).data)
        moments.add(slice(start, start + len(block)), block)
    return digest.digest()


def _fields(header: Header, moments: _Moments) -> tuple[FieldSummary, ...]:
    mean, std = moments.over_frames()
    frame_mean, frame_std = moments.per_frame()
    low, high = moments.low.min(0), moments.high.max(0)
    none = low > high
    low, high = np.where(none, np.nan, low), np.where(none, np.nan, high)
    return tuple(
        FieldSummary(
            name=name,
            unit=header.layout.units[q],
            minimum=float(low[q]),
            maximum=float(high[q]),
            mean=float(mean[q]),
            std=float(std[q]),
            frame_mean=tuple(frame_mean[:, q].tolist()),
            frame_std=tuple(frame_std[:, q].tolist()),
            nans=int(moments.nans[:, q].sum()),
            infinities=int(moments.infinities[:, q].sum()),
        )
        for q, name in enumerate(header.layout.fields)
    )


def draw(path: str | Path, picture: str | Path, index: int = 0, columns: int = 5) -> None:
    """Draw trajectory `index`: a row per field, and up to `columns` frames evenly from the first to the last.

    Of a 3-D field the plane in the middle of the second axis is shown.
    """
    from matplotlib.figure import Figure

    picture = Path(picture)
    with open_any(path) as store:
        header = store.header
        if not 0 <= index < len(store):
            raise StoreError(f"{path} has no trajectory {index}: it has {len(store)} (indices start at 0).")
        if len(header.grid) == 1:
            raise StoreError(f"{path} has one-dimensional fields; only fields on two or three axes can be drawn.")
        frames = np.unique(np.linspace(0, header.shape[0] - 1, columns).round().astype(int))
        order = header.layout.upright
        values = np.stack([_plane(turn(store[index, int(frame)], 0, order)) for frame in frames]).astype(np.float64)
        header = replace(header, layout=header.layout.turned(order))
    rows = len(header.layout.fields)
    figure = Figure(figsize=(2.2 * len(frames) + 1.5, 2.1 * rows + 0.8), layout="constrained", dpi=120)
    axes = figure.subplots(rows, len(frames), squeeze=False, sharex=True, sharey=True)
    for row in range(rows):
        colours = _colours(values[..., row])
        images = [
            _panel(panel, field, header, colours) for panel, field in zip(axes[row], values[..., row], strict=True)
        ]
        figure.colorbar(images[0], ax=list(axes[row]), pad=0.01, aspect=15)
        unit = header.layout.units[row]
        axes[row, 0].set_ylabel(header.layout.fields[row] + ("" if unit == "1" else f" [{unit}]"), fontsize=10)
    for panel, frame in zip(axes[0], frames, strict=True):
        panel.set_title(f"t = {header.layout.times[frame]:.4g}", fontsize=10)
    figure.suptitle(_title(header, index), fontsize=11)
    drawn = BytesIO()
    try:
        figure.savefig(drawn, format=picture.suffix.removeprefix(".") or "png")
    except ValueError as error:  # an ending that matplotlib does not know
        raise StoreError(f"Cannot write the image {picture}: {error}.") from error
    with plain_errors(picture, kind=StoreError), replacing(picture) as file:
        file.write(drawn.getvalue())


def _plane(frame: np.ndarray) -> np.ndarray:
    return frame[:, frame.shape[1] // 2] if frame.ndim == 4 else frame


def _colours(values: np.ndarray) -> tuple[str, float, float]:
    """The colour map and its ends for all the frames of one field."""
    finite = values[np.isfinite(values)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
    if low < 0 < high:
        return _SIGNED, -max(-low, high), max(-low, high)
    return _ONE_SIGN, low, high


def _panel(panel: Axes, field: np.ndarray, header: Header, colours: tuple[str, float, float]) -> QuadMesh:
    """One field at one time, x to the right and the last axis up; what is not finite stays grey."""
    name, low, high = colours
    panel.set_facecolor("0.6")
    panel.set_aspect("equal")
    panel.tick_params(labelsize=7)
    x, y = header.layout.coordinates[0], header.layout.coordinates[-1]
    return panel.pcolormesh(x, y, np.ma.masked_invalid(field.T), cmap=name, vmin=low, vmax=high, shading="nearest")


def _title(header: Header, index: int) -> str:
    parts = [header.source, f"trajectory {index}"]
    if header.seed is not None:
        parts.append(f"seed {header.seed}")
    if len(header.grid) == 3:
        y = header.layout.coordinates[1]
        parts.append(f"plane x-z at y = {y[len(y) // 2]:.4g}")
    else:
        parts.append("plane x-y")
    return ", ".join(parts)
