"""Windows: pairs of history and future, cut from trajectories.

    history (B, T_in, *grid, q_in)  →  future (B, H, *grid, q_out)

A trajectory is first subsampled (every `time_stride`-th frame, every `space_stride`-th point of each axis). A window is
T_in + H consecutive frames of the result; windows start at 0, stride, 2·stride, … In a steady task the future is the
same frame in other fields. Splits consist of whole trajectories, so no frame is in two of them, unless the data set
lists its windows for each split.

Letters: B batch, T_in history, H horizon, q fields.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Iterator, Sequence, Sized
from copy import copy
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch

from sigmasolver.data.domain import STEP_TOLERANCE, time_steps, unevenly_spaced
from sigmasolver.data.header import DTYPES, Header
from sigmasolver.data.reader import Reader
from sigmasolver.sampling import evenly_spaced
from sigmasolver.settings import suggest

__all__ = ["Pair", "Resident", "Row", "Source", "WindowSpec", "Windows", "spread_evenly"]

Pair: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""History and future."""


class Source(Protocol):
    """A source of trajectories: a Reader, a Stream, or any object that returns one by index.

    With a length it is a finite sequence; without one (or if `len` raises TypeError) it is endless.
    """

    header: Header

    def __getitem__(self, index: int, /) -> np.ndarray | torch.Tensor: ...


@runtime_checkable
class BatchedSource(Protocol):
    """A source that produces several trajectories at once, such as a `simulate.generate.Stream`."""

    @property
    def batch_size(self) -> int: ...

    def batch(self, indices: Sequence[int]) -> torch.Tensor: ...


@dataclass(frozen=True)
class WindowSpec:
    """Fields and frames of a window. Everything except `time_stride` and `space_stride` counts subsampled frames."""

    inputs: tuple[str, ...]
    targets: tuple[str, ...]
    history: int
    horizon: int
    windows_per_trajectory: int | None = None
    """None: all that fit."""
    stride: int = 1
    """Frames from one start to the next."""
    time_stride: int = 1
    space_stride: int = 1
    steady: bool = False
    """The future is the frame of the history, in other fields."""
    skip: int = 0
    """Frames before the first window."""

    def __post_init__(self) -> None:
        for role in ("inputs", "targets"):
            names = getattr(self, role)
            if not names or len(set(names)) < len(names):
                raise ValueError(f"The {role} are ({', '.join(names)}); give at least one field, and each only once.")
        settings = {
            name: getattr(self, name) for name in ("history", "horizon", "stride", "time_stride", "space_stride")
        }
        for name, number in {**settings, "starts": self.windows_per_trajectory}.items():  # `starts` of a task
            if number is not None and number < 1:
                raise ValueError(f"{name} is {number}; it must be at least 1.")
        if self.skip < 0:
            raise ValueError(f"skip is {self.skip}; it must be at least 0.")
        if self.steady and (self.history, self.horizon) != (1, 1):
            raise ValueError(
                f"A steady task has one input and one output frame, not {self.history} and {self.horizon}."
            )
        if self.steady and set(self.inputs) & set(self.targets):
            shared = ", ".join(name for name in self.inputs if name in self.targets)
            raise ValueError(f"{shared} is both an input and a target, which a steady task does not allow.")

    @property
    def span(self) -> int:
        """Number of frames covered by a window."""
        return 1 if self.steady else self.history + self.horizon

    def count_in(self, frames: int) -> int:
        """Number of windows in a trajectory of this many stored frames; raises ValueError if too few fit."""
        subsampled = -(-frames // self.time_stride) - self.skip
        if subsampled < self.span:
            raise ValueError(
                f"A window needs {self.span} frames, but {frames} stored frames with time_stride {self.time_stride} "
                f"leave {subsampled}; shorten history or horizon."
            )
        available = (subsampled - self.span) // self.stride + 1
        requested = self.windows_per_trajectory
        if requested is not None and requested > available:
            raise ValueError(
                f"starts is {requested} windows per trajectory, but only {available} fit into {subsampled} frames."
            )
        return available if requested is None else requested

    def limited_to(self, frames: int) -> WindowSpec:
        """The same windows, or all that fit into a trajectory of this many stored frames if those are fewer."""
        every = replace(self, windows_per_trajectory=None)
        requested = self.windows_per_trajectory
        return self if requested is None or requested <= every.count_in(frames) else every


class Row(NamedTuple):
    """Location of a window in the source: trajectory, and stored frames before subsampling."""

    trajectory: int
    history: int
    """First frame of the history."""
    future: int
    """First frame of the future."""
    last: int
    """Last frame of the future."""


class Windows:
    """The windows of some trajectories, in order, read lazily from the source.

    A sequence of `(history, future)`; it can be passed to worker processes, by fork or by pickle. `listed` gives
    (trajectory, first frame) of each window explicitly; those that extend beyond the last frame are dropped.
    """

    on_device: Resident | None = None
    """Trajectories kept on a device, see `resident`; None: windows are read on access."""

    def __init__(
        self,
        source: Source,
        trajectories: Sequence[int],
        spec: WindowSpec,
        listed: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        layout = source.header.layout
        self.source, self.trajectories, self.spec = source, tuple(trajectories), spec
        self.fields = tuple(dict.fromkeys((*spec.inputs, *spec.targets)))
        """Fields to read: the inputs, then the targets that are not among them."""
        for name in self.fields:
            if name not in layout.fields:
                raise ValueError(f'Unknown field "{name}"; {suggest(name, layout.fields)}')
        self.windows_per_trajectory = None if listed is not None else spec.count_in(len(layout.times))
        """None if the windows are listed."""
        _check_space_stride(source.header, spec.space_stride)
        _check_trajectories(source, self.trajectories)
        self.coordinates = tuple(axis[:: spec.space_stride] for axis in layout.coordinates)
        """Coordinates of the subsampled grid."""
        self.times = layout.times[:: spec.time_stride]
        """Times of the subsampled frames."""
        self._channels = [layout.fields.index(name) for name in self.fields]
        self._inputs = [layout.fields.index(name) for name in spec.inputs]
        self._targets = [layout.fields.index(name) for name in spec.targets]
        self._locations = self._regular_locations() if listed is None else self._listed_locations(listed)

    def _regular_locations(self) -> torch.Tensor:
        """(windows, 2): position in `trajectories` and first frame, ordered by trajectory."""
        assert self.windows_per_trajectory is not None
        first = self.spec.skip + self.spec.stride * torch.arange(self.windows_per_trajectory)
        return torch.cartesian_prod(torch.arange(len(self.trajectories)), first)

    def _listed_locations(self, listed: Sequence[tuple[int, int]]) -> torch.Tensor:
        """The same for the listed windows that fit into the trajectories."""
        spec = self.spec
        if (spec.windows_per_trajectory, spec.time_stride, spec.skip) != (None, 1, 0):
            raise ValueError(
                "The data set lists its windows explicitly; omit starts, skip and time_stride, or set "
                "task.split=trajectories."
            )
        position = {trajectory: number for number, trajectory in enumerate(self.trajectories)}
        last = len(self.times) - spec.span
        locations = [(position[trajectory], first) for trajectory, first in listed if first <= last]
        if not locations:
            raise ValueError(
                f"A window needs {spec.span} frames, but all {len(listed)} listed windows are shorter; "
                "shorten history or horizon."
            )
        return torch.tensor(locations)

    def of_trajectories(self, chosen: Collection[int]) -> Windows:
        """The windows of only these trajectories."""
        selected = [trajectory for trajectory in self.trajectories if trajectory in chosen]
        if self.windows_per_trajectory is not None:
            return Windows(self.source, selected, self.spec)
        windows = [(self.trajectories[position], first) for position, first in self._locations.tolist()]
        return Windows(self.source, selected, self.spec, [window for window in windows if window[0] in chosen])

    @property
    def grid(self) -> tuple[int, ...]:
        """Points per axis after subsampling."""
        return tuple(len(axis) for axis in self.coordinates)

    def __len__(self) -> int:
        return len(self._locations)

    def __getitem__(self, index: int) -> Pair:
        """A window: float32 `(T_in, *grid, q_in)` and `(H, *grid, q_out)`."""
        history, future = self.batch([index])
        return history[0], future[0]

    def batch(self, indices: Sequence[int] | torch.Tensor) -> Pair:
        """A batch of windows: float32 `(B, T_in, *grid, q_in)` and `(B, H, *grid, q_out)`."""
        if self.on_device is not None:
            return self._gather_resident(self.on_device, indices)
        locations = self._locations[self._check_indices(indices)].tolist()
        if isinstance(self.source, Reader):
            return self._copy_windows(self.source, locations)
        frames = torch.stack(list(self._slice_trajectories(locations))).to(torch.float32)
        spec, steady = self.spec, self.spec.steady
        history, future = frames[:, : spec.history], frames if steady else frames[:, spec.history :]
        return self._select(history, spec.inputs).contiguous(), self._select(future, spec.targets).contiguous()

    def _gather_resident(self, resident: Resident, indices: Sequence[int] | torch.Tensor) -> Pair:
        if not isinstance(indices, torch.Tensor) or indices.device.type == "cpu":
            checked = torch.tensor(self._check_indices(indices), pin_memory=resident.values.is_cuda)
            indices = checked.to(resident.values.device, non_blocking=True)
        return resident.batch(indices)

    def _copy_windows(self, source: Reader, locations: list[list[int]]) -> Pair:
        """Read windows, given as (position in `trajectories`, first frame), directly into the batch.

        Copies with NumPy instead of torch, whose threads synchronise: on a busy machine that takes far longer than the
        copy itself.
        """
        spec, dtype = self.spec, getattr(torch, source.header.dtype)
        history = torch.empty(len(locations), spec.history, *self.grid, len(spec.inputs), dtype=dtype)
        future = torch.empty(len(locations), spec.horizon, *self.grid, len(spec.targets), dtype=dtype)
        outputs = (
            (history.numpy(), slice(0, spec.history), self._inputs),
            (future.numpy(), slice(spec.span - spec.horizon, spec.span), self._targets),
        )
        for row, (position, first) in enumerate(locations):
            trajectory = self.trajectories[position]
            source.check(trajectory)
            frames, *space = self._key(first, spec.span)
            separate = source.fields(trajectory, frames.start, frames.stop, self._channels)
            if separate is None:
                values = source[(trajectory, frames, *space)]
                for out, frame_range, channels in outputs:
                    _copy_channels(out[row], values[frame_range], channels)
            else:
                key = (slice(None, None, spec.time_stride), *space)
                fields = dict(zip(self._channels, (field_values[key] for field_values in separate), strict=True))
                for out, frame_range, channels in outputs:
                    for column, channel in enumerate(channels):
                        out[row, ..., column] = fields[channel][frame_range]
        return history.to(torch.float32), future.to(torch.float32)

    def frame_times(self, indices: Sequence[int] | torch.Tensor) -> torch.Tensor:
        """float64 (B, 1 + H), on the CPU: the time of the last history frame, then of the future frames; (B, 1) in a
        steady task."""
        spec = self.spec
        first = self._locations[self._check_indices(indices), 1]
        frames = first[:, None] + torch.arange(spec.history - 1, spec.span)
        return torch.from_numpy(np.asarray(self.times, dtype=np.float64))[frames]

    def lead_times(self, indices: Sequence[int] | torch.Tensor) -> torch.Tensor | None:
        """float64 (H,), on the CPU: the time from the last history frame to each future frame; None if it is not the
        same in all of these windows."""
        if self.spec.steady or unevenly_spaced(time_steps(self.times)) is None:
            step = float(self.times[1] - self.times[0]) if len(self.times) > 1 else 1.0
            return step * torch.arange(1, self.spec.horizon + 1, dtype=torch.float64)
        times = self.frame_times(indices)
        leads = times[:, 1:] - times[:, :1]
        return leads[0] if torch.allclose(leads, leads[:1], rtol=STEP_TOLERANCE, atol=0) else None

    def rows(self) -> list[Row]:
        """Locations of all windows in order."""
        step, spec = self.spec.time_stride, self.spec
        return [
            Row(
                self.trajectories[position],
                step * start,
                step * (start + spec.span - spec.horizon),
                step * (start + spec.span - 1),
            )
            for position, start in self._locations.tolist()
        ]

    def each(self) -> Iterator[torch.Tensor]:
        """Iterate over the subsampled full trajectories: float32 `(frames, *grid, fields)`."""
        trajectories = self._read_trajectories(self.trajectories) if self.on_device is None else self.on_device.values
        return (values.to(torch.float32) for values in trajectories)

    def each_covered(self) -> Iterator[torch.Tensor]:
        """Like `each`, but if windows are listed, only the frames covered by one of them."""
        return (self._covered_frames(position, values) for position, values in enumerate(self.each()))

    def _covered_frames(self, position: int, values: torch.Tensor) -> torch.Tensor:
        if self.windows_per_trajectory is not None:
            return values
        first = self._locations[self._locations[:, 0] == position, 1]
        return values[(first[:, None] + torch.arange(self.spec.span)).unique().to(values.device)]

    def nbytes(self, dtype: str | None = None) -> int:
        """Memory that `resident` would use, in bytes."""
        values = len(self.trajectories) * len(self.times) * prod(self.grid) * len(self.fields)
        return values * DTYPES[self._resident_dtype(dtype)].itemsize

    def fits(self, device_bytes: int, dtype: str | None = None) -> bool:
        """Whether `resident` would fit into this much memory."""
        return self.nbytes(dtype) <= device_bytes

    def resident(self, device: torch.device | str, dtype: str | None = None) -> Windows:
        """The same windows with all trajectories loaded on a device, in the stored dtype or in `dtype`."""
        windows = copy(self)
        windows.on_device = Resident(self, device, self._resident_dtype(dtype))
        return windows

    @property
    def values_on_device(self) -> torch.Tensor:
        """Subsampled trajectories on the device, `(trajectories, frames, *grid, fields)`; empty if not resident."""
        return torch.zeros(0) if self.on_device is None else self.on_device.values

    def _resident_dtype(self, dtype: str | None) -> str:
        name = self.source.header.dtype if dtype is None else dtype
        if name not in DTYPES:
            raise ValueError(f"Trajectories are held in memory as float32 or float16, not {name!r}.")
        return name

    def _check_indices(self, indices: Iterable[int] | torch.Tensor) -> list[int]:
        numbers = (
            indices.tolist() if isinstance(indices, torch.Tensor) else [operator.index(index) for index in indices]
        )
        if not numbers:
            raise ValueError("A batch must contain at least one window.")
        for index in numbers:
            if not -len(self) <= index < len(self):
                raise IndexError(f"Window {index} is out of range: there are {len(self)} (indices start at 0).")
        return [index % len(self) for index in numbers]

    def _select(self, frames: torch.Tensor, names: tuple[str, ...]) -> torch.Tensor:
        return _channels(frames, [self.fields.index(name) for name in names])

    def _key(self, start: int, count: int) -> tuple[slice, ...]:
        """Slices of the stored data for subsampled frames `start`, …, `start` + `count` - 1 on the subsampled grid."""
        step = self.spec.time_stride
        space = slice(None, None, self.spec.space_stride)
        return (slice(step * start, step * (start + count - 1) + 1, step), *(space for _ in self.coordinates))

    def _slice_trajectories(self, locations: list[list[int]]) -> Iterator[torch.Tensor]:
        """Frames of windows, given as (position in `trajectories`, first frame), from a source that cannot be sliced:
        each full trajectory is computed once per batch."""
        needed = list(dict.fromkeys(self.trajectories[position] for position, _ in locations))
        loaded = dict(zip(needed, self._read_trajectories(needed), strict=True))
        for position, first in locations:
            yield loaded[self.trajectories[position]][first : first + self.spec.span]

    def _read_trajectories(self, trajectories: Sequence[int]) -> Iterator[torch.Tensor]:
        """Subsampled full trajectories in the dtype of the source."""
        key = self._key(0, len(self.times))
        if isinstance(self.source, Reader):
            for trajectory in trajectories:
                yield _channels(torch.from_numpy(self.source.trajectory(trajectory)[key]), self._channels)
        elif isinstance(self.source, BatchedSource):
            size = self.source.batch_size
            for start in range(0, len(trajectories), size):
                for values in self.source.batch(trajectories[start : start + size]):
                    yield _channels(values[key], self._channels)
        else:
            for trajectory in trajectories:
                raw = self.source[trajectory]
                values = raw if isinstance(raw, torch.Tensor) else torch.tensor(raw)
                if values.shape != self.source.header.shape:
                    raise ValueError(
                        f"Trajectory {trajectory} has shape {tuple(values.shape)}, but its header has "
                        f"{self.source.header.shape}."
                    )
                yield _channels(values[key], self._channels)

    @property
    def sides(self) -> tuple[float, ...] | None:
        """Side lengths of a periodic box; None if an axis is not periodic."""
        if set(self.source.header.layout.boundary) != {"periodic"}:
            return None
        return tuple(len(axis) * float(axis[1] - axis[0]) if len(axis) > 1 else 1.0 for axis in self.coordinates)

    def each_finite(self, part: str) -> Iterator[torch.Tensor]:
        """Like `each_covered`, but raises ValueError at the first non-finite value; `part` names the split."""
        for position, (trajectory, values) in enumerate(zip(self.trajectories, self.each(), strict=True)):
            finite = values.isfinite()
            if not bool(finite.all()):
                frame, *_, field = (int(i) for i in (~finite).nonzero()[0])
                path = getattr(self.source, "path", None)
                raise ValueError(
                    f"{part.capitalize()} trajectory {trajectory}{f' of {path}' if path else ''} contains "
                    f"non-finite values, the first in frame {frame * self.spec.time_stride} of "
                    f"{self.fields[field]}; skip "
                    "it with `train --skip-bad`."
                )
            yield self._covered_frames(position, values)

    def check_finite(self, part: str) -> None:
        """Read every trajectory and raise ValueError at the first non-finite value; `part` names the split."""
        for _ in self.each_finite(part):
            pass

    def refuse_non_finite(self, indices: torch.Tensor, *frames: torch.Tensor) -> None:
        """Raise ValueError, naming the trajectory, if `frames` (B, ...) of the windows `indices` are not finite."""
        finite = torch.stack([values.isfinite().flatten(1).all(1) for values in frames]).all(0).cpu()
        if not bool(finite.all()):
            trajectory = self.trajectories[int(self._locations[int(indices[~finite][0]), 0])]
            raise ValueError(f"Trajectory {trajectory} of the data contains non-finite values; remove it.")


def spread_evenly(count: int, requested: int | None) -> torch.Tensor:
    """`requested` evenly spaced indices from 0 to `count` - 1; all if None."""
    if requested is None or requested >= count:
        return torch.arange(count)
    return torch.tensor(evenly_spaced(count, requested), dtype=torch.long)


class Resident:
    """All trajectories of some windows in one tensor on a device, where batches are gathered.

    With indices already on the device, a batch costs only kernel launches, without a host sync.
    """

    def __init__(self, windows: Windows, device: torch.device | str, dtype: str) -> None:
        shape = (len(windows.trajectories), len(windows.times), *windows.grid, len(windows.fields))
        self.values = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
        """All subsampled trajectories: `(trajectories, frames, *grid, fields)`."""
        for position, values in enumerate(windows._read_trajectories(windows.trajectories)):
            self.values[position] = values.to(self.values.device)
            narrowed = self.values.element_size() < values.element_size()
            if narrowed and int(self.values[position].isinf().sum()) > int(values.isinf().sum()):
                raise ValueError(
                    f"Trajectory {windows.trajectories[position]} contains values too large for {dtype}; use float32."
                )
        spec, device = windows.spec, self.values.device
        self._first = (windows._locations[:, 0] * len(windows.times) + windows._locations[:, 1]).to(device)
        self._history = torch.arange(spec.history, device=device)
        self._future = torch.arange(spec.span - spec.horizon, spec.span, device=device)
        self._inputs = [windows.fields.index(name) for name in spec.inputs]
        self._targets = [windows.fields.index(name) for name in spec.targets]

    def batch(self, indices: torch.Tensor) -> Pair:
        """The windows of indices on the device; on a GPU, bounds are checked only by the kernel."""
        first = self._first.index_select(0, torch.where(indices < 0, indices + len(self._first), indices))
        history = _channels(self._gather(first, self._history), self._inputs)
        return history, _channels(self._gather(first, self._future), self._targets)

    def _gather(self, first: torch.Tensor, frames: torch.Tensor) -> torch.Tensor:
        indices = (first[:, None] + frames).flatten()
        gathered = self.values.flatten(0, 1).index_select(0, indices)
        return gathered.unflatten(0, (-1, len(frames))).to(torch.float32)


def _channels(values: torch.Tensor, channels: list[int]) -> torch.Tensor:
    """Select channels of the last axis; a view if they are contiguous."""
    first, stop = channels[0], channels[0] + len(channels)
    if channels == list(range(first, stop)):
        return values[..., first:stop]
    return torch.stack([values[..., channel] for channel in channels], dim=-1)


def _copy_channels(out: np.ndarray, values: np.ndarray, channels: list[int]) -> None:
    """Copy channels of the last axis. Contiguous channels of a point are copied as one element, others field by field:
    NumPy's innermost loop would otherwise run over the few channels, which is slow."""
    first, stop = channels[0], channels[0] + len(channels)
    if channels == list(range(first, stop)) and values.strides[-1] == values.itemsize and values.dtype == out.dtype:
        point = np.dtype((np.void, len(channels) * out.itemsize))
        out.view(point)[...] = values[..., first:stop].view(point)
        return
    for column, channel in enumerate(channels):
        out[..., column] = values[..., channel]


def _check_space_stride(header: Header, stride: int) -> None:
    for axis, (size, boundary) in enumerate(zip(header.grid, header.layout.boundary, strict=True)):
        if stride > size:
            raise ValueError(f"space_stride {stride} exceeds the {size} points of axis {'xyz'[axis]}.")
        if boundary == "periodic" and size % stride:
            raise ValueError(
                f"space_stride {stride} does not divide the {size} points of the periodic axis {'xyz'[axis]}, "
                "so the subsampled grid would not be periodic; choose a divisor."
            )


def _check_trajectories(source: Source, trajectories: tuple[int, ...]) -> None:
    if not trajectories:
        raise ValueError("No trajectories to take windows from; give at least one.")
    if len(set(trajectories)) < len(trajectories):
        raise ValueError("A trajectory to take windows from is listed twice; list each only once.")
    try:
        count = len(source) if isinstance(source, Sized) else None
    except TypeError:  # an endless stream
        count = None
    for trajectory in trajectories:
        if trajectory < 0 or (count is not None and trajectory >= count):
            bounds = "indices start at 0" if count is None else f"there are {count} (indices start at 0)"
            raise ValueError(f"Trajectory {trajectory} is out of range: {bounds}.")
