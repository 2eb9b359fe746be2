"""Summary of a store or a foreign file: header, statistics of the values, problems, and a plot.

Statistics are computed over the finite values, in float64, in one pass over blocks of a few megabytes. Groups of n
values with mean m and squared deviations S merge exactly (Chan, Golub and LeVeque):

    n = n₁ + n₂,   δ = m₂ - m₁,   m = m₁ + δ n₂/n,   S = S₁ + S₂ + δ² n₁n₂/n.

In the plot each field has one colour scale for all its frames, symmetric about zero if the values have both signs;
both colour maps are safe for the common kinds of colour blindness.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sigmasolver.data.domain import time_steps, unevenly_spaced
from sigmasolver.data.formats import ReadOptions, guess_format, open_data
from sigmasolver.data.formats.checks import FieldRanges
from sigmasolver.data.formats.in_place import ForeignReader
from sigmasolver.data.header import DTYPES, Header, StoreError, fingerprint
from sigmasolver.data.layout import transpose_axes
from sigmasolver.data.moments import merge
from sigmasolver.data.reader import Reader
from sigmasolver.data.split import Split
from sigmasolver.data.store import StoreReader, is_store
from sigmasolver.runs.files import os_errors_as_value_errors, replacing
from sigmasolver.sampling import evenly_spaced

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.collections import QuadMesh

__all__ = ["FieldSummary", "Summary", "draw", "open_any", "summarise"]

_BLOCK = 16 * 2**20
MAX_SHOWN = 5
_SIGNED, _UNSIGNED = "RdBu_r", "viridis"


@dataclass(frozen=True)
class FieldSummary:
    """Statistics of a field over all trajectories, frames and points; NaN if no value is finite."""

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
    unresolved: str | None = None
    """A sentence if float32 does not resolve its variation."""

    @property
    def constant(self) -> bool:
        """Whether all values are equal."""
        return self.minimum == self.maximum


@dataclass(frozen=True)
class Summary:
    """Summary of a store or a foreign data set."""

    path: Path
    header: Header
    package: str | None
    """Version of the package that wrote the store; None for foreign files."""
    count: int
    """Number of trajectories that it has room for."""
    whole: int
    """Number of complete trajectories."""
    size: int
    """Size of the complete trajectories in bytes."""
    fields: tuple[FieldSummary, ...]
    fingerprint: str | None
    """None if only some of the trajectories were read."""
    damaged: tuple[int, ...]
    """Trajectories with a checksum mismatch."""
    notes: tuple[str, ...] = ()
    """Assumptions about what foreign files leave unspecified."""
    duplicates: tuple[tuple[int, int], ...] = ()
    """Pairs of trajectories with identical values."""
    read: int = 0
    """Number of trajectories covered by the statistics."""
    bad: int = 0
    """Number of these with non-finite values."""

    @property
    def published_split(self) -> Split | None:
        return Split.from_plain(self.header.parameters.get("split"))

    def problems(self) -> list[str]:
        """Problems that may harm a training, one sentence each."""
        problems = []
        for field in self.fields if self.read else ():
            if field.nans or field.infinities:
                problems.append(
                    f"{field.name} has {field.nans} NaN and {field.infinities} infinite values; fix them, "
                    "or skip these trajectories with --skip-bad."
                )
            if field.unresolved is not None:
                problems.append(field.unresolved)
            elif field.constant:
                problems.append(f"{field.name} is constant and carries no information.")
        return problems + self._duplicate_problems() + self._axis_problems()

    def _duplicate_problems(self) -> list[str]:
        split = self.published_split
        part_of = {} if split is None else {index: part for part, members in asdict(split).items() for index in members}
        problems = []
        for first, second in self.duplicates[:MAX_SHOWN]:
            pair = f"Trajectories {first} and {second} have identical values"
            if split is None:
                problems.append(f"{pair}; keep them in the same split, or remove one.")
            elif part_of.get(first) != part_of.get(second):
                problems.append(
                    f"{pair}, but one is in the {part_of.get(first, 'unused')} split and the other in the "
                    f"{part_of.get(second, 'unused')} split; remove one."
                )
        if len(self.duplicates) > MAX_SHOWN:
            problems.append(f"{len(self.duplicates)} pairs of trajectories have identical values.")
        return problems

    def _axis_problems(self) -> list[str]:
        layout, problems = self.header.layout, []
        uneven = unevenly_spaced(time_steps(layout.times))
        if uneven is not None:
            problems.append(f"The frames are {uneven}; resample them, or train with model.options.time_embedding=true.")
        for name, axis in zip(layout.axis_names, layout.coordinates, strict=True):
            steps = time_steps(axis)
            if unevenly_spaced(steps) is not None:
                problems.append(
                    f"{name} is unevenly spaced, {steps[0]:g} to {steps[1]:g} apart; models treat it as uniform."
                )
        if self.whole == 1:
            what, remedy = ("trajectory", "split it in time") if len(layout.times) > 1 else ("case", "add some")
            problems.append(f"Only one {what}; training and testing need at least two, so {remedy}.")
        return problems


class _Moments:
    """Running count, mean, squared deviations, extremes, NaNs and infinities, each `(frames, fields)`."""

    def __init__(self, frames: int, fields: int) -> None:
        self.n, self.mean, self.S = (np.zeros((frames, fields)) for _ in range(3))
        self.low, self.high = np.full((frames, fields), np.inf), np.full((frames, fields), -np.inf)
        self.nans, self.infinities = (np.zeros((frames, fields), np.int64) for _ in range(2))

    def add(self, frames: slice, block: np.ndarray) -> None:
        """Add a block `(frames, *grid, fields)` of these frames."""
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

    def pooled_over_frames(self) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard deviation per field over all frames."""
        total = (self.n[0], self.mean[0], self.S[0])
        for frame in range(1, len(self.n)):
            total = merge(total, (self.n[frame], self.mean[frame], self.S[frame]))
        return _mean_and_std(*total)

    def per_frame(self) -> tuple[np.ndarray, np.ndarray]:
        return _mean_and_std(self.n, self.mean, self.S)


def _mean_and_std(n: np.ndarray, mean: np.ndarray, S: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    empty = n == 0
    return np.where(empty, np.nan, mean), np.where(empty, np.nan, np.sqrt(S / np.maximum(n, 1)))


def open_any(path: str | Path, steady: bool | None = None) -> Reader:
    """Open a store, or foreign files of any format."""
    path = Path(path)
    if steady is not None and path.exists() and not is_store(path) and guess_format(path).select is not None:
        return open_data(path, ReadOptions(steady=steady))
    return open_data(path)


def summarise(
    path: str | Path,
    progress: Callable[[int, int], None] | None = None,
    steady: bool | None = None,
    first: int | None = None,
) -> Summary:
    """Read every complete trajectory once: compute statistics, find duplicates and verify checksums.

    `progress` is called with the trajectories done and their total. `steady`: the user's arrays have no time axis.
    `first`: read only this many trajectories.
    """
    if first is not None and first < 1:
        raise ValueError(f"first is {first}; it must be at least 1.")
    with open_any(path, steady) as data:
        header = data.header
        moments, ranges = _Moments(header.shape[0], header.shape[-1]), FieldRanges(header)
        total = len(data) if first is None else min(first, len(data))
        damaged, duplicates, digests, seen, bad = [], [], list[bytes](), dict[bytes, int](), 0
        store = data if isinstance(data, StoreReader) else None
        for index in range(total):
            before = moments.not_finite
            digest = _add_trajectory(data, index, moments, ranges)
            digests.append(digest)
            bad += moments.not_finite > before
            if store is not None and digest != store.digests[index]:
                damaged.append(index)
            original = seen.setdefault(digest, index)
            if original != index:
                duplicates.append((original, index))
            if progress is not None:
                progress(index + 1, total)
        return Summary(
            path=data.path,
            header=header,
            package=None if store is None else store.package,
            count=len(data) if store is None else store.count,
            whole=len(data),
            size=len(data) * header.nbytes,
            fields=_field_summaries(header, moments, ranges),
            fingerprint=_fingerprint(data, digests),
            damaged=tuple(damaged),
            notes=tuple(data.notes),
            duplicates=tuple(duplicates),
            read=total,
            bad=bad,
        )


def _add_trajectory(store: Reader, index: int, moments: _Moments, ranges: FieldRanges) -> bytes:
    """Add a trajectory to the moments and ranges; return the digest of its values."""
    frames = store.header.shape[0]
    step = max(1, _BLOCK * frames // store.header.nbytes)
    digest = hashlib.sha256()
    for start in range(0, frames, step):
        span = slice(start, min(start + step, frames))
        values = store.unconverted(index, span) if isinstance(store, ForeignReader) else store[index, span]
        ranges.add(values)
        with np.errstate(over="ignore", under="ignore"):
            block = values.astype(DTYPES[store.header.dtype], copy=False)
        digest.update(np.ascontiguousarray(block).data)
        moments.add(slice(start, start + len(block)), block)
    return digest.digest()


def _fingerprint(data: Reader, digests: Sequence[bytes]) -> str | None:
    """The fingerprint of data of which the first trajectories have these digests; None if only some of them were read
    and it would require the rest."""
    if not isinstance(data, ForeignReader) or data.examined:
        return data.fingerprint
    if len(digests) < len(data):
        return None
    return data.fingerprint if data.checked else fingerprint(data.header, digests)  # the former also checks the values


def _field_summaries(header: Header, moments: _Moments, ranges: FieldRanges) -> tuple[FieldSummary, ...]:
    mean, std = moments.pooled_over_frames()
    frame_mean, frame_std = moments.per_frame()
    low, high = moments.low.min(0), moments.high.max(0)
    empty = low > high
    low, high = np.where(empty, np.nan, low), np.where(empty, np.nan, high)
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
            unresolved=ranges.problem(q),
        )
        for q, name in enumerate(header.layout.fields)
    )


def draw(path: str | Path, picture: str | Path, index: int = 0, columns: int = 5) -> None:
    """Plot trajectory `index`: a row per field, and up to `columns` evenly spaced frames from the first to the last.

    Of a 3-D field, the middle plane of the second axis is shown.
    """
    from matplotlib.figure import Figure

    picture = Path(picture)
    with open_any(path) as store:
        header = store.header
        if not 0 <= index < len(store):
            raise StoreError(f"{path} has no trajectory {index}: it has {len(store)} (indices start at 0).")
        if len(header.grid) == 1:
            raise StoreError(f"{path} has one-dimensional fields; only fields on two or three axes can be drawn.")
        frames = evenly_spaced(header.shape[0], columns)
        order = header.layout.upright
        values = np.stack([_plane(transpose_axes(store[index, frame], 0, order)) for frame in frames]).astype(
            np.float64
        )
        header = replace(header, layout=header.layout.transposed(order))
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
    buffer = BytesIO()
    try:
        figure.savefig(buffer, format=picture.suffix.removeprefix(".") or "png")
    except ValueError as error:  # a file extension that matplotlib does not support
        raise StoreError(f"Cannot write the image {picture}: {error}.") from error
    with os_errors_as_value_errors(picture, kind=StoreError), replacing(picture) as file:
        file.write(buffer.getvalue())


def _plane(frame: np.ndarray) -> np.ndarray:
    return frame[:, frame.shape[1] // 2] if frame.ndim == 4 else frame


def _colours(values: np.ndarray) -> tuple[str, float, float]:
    """Colour map and its limits for all frames of a field."""
    finite = values[np.isfinite(values)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
    if low < 0 < high:
        return _SIGNED, -max(-low, high), max(-low, high)
    return _UNSIGNED, low, high


def _panel(panel: Axes, field: np.ndarray, header: Header, colours: tuple[str, float, float]) -> QuadMesh:
    """Plot a field at one time, x to the right and the last axis up; non-finite values are grey."""
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
