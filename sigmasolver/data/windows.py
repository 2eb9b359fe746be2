"""Windows: what a model sees and what it must predict, cut out of trajectories.

    history (B, T_in, *grid, q_in)  →  future (B, H, *grid, q_out)

A trajectory is thinned first (every `time_stride`-th frame, every `space_stride`-th point of each axis). A window is
T_in + H consecutive frames of what remains; windows start at 0, stride, 2·stride, … In a steady task the future is the
same frame in other fields. The parts of a split are whole trajectories, so no frame lies in two of them; only a data
set that names its windows one by one may part them otherwise.

Letters: B batch, T_in history, H horizon, q fields.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from math import prod
from typing import NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch

from sigmasolver.data.header import DTYPES, Header
from sigmasolver.data.reader import Reader
from sigmasolver.settings import suggest

__all__ = ["Pair", "Resident", "Row", "Source", "WindowSpec", "Windows", "spread_evenly"]

Pair: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""History and future."""


class Source(Protocol):
    """Where trajectories come from: a Reader, a Stream, or anything that gives one by its number.

    With a length it is a sequence of that many trajectories; without (or if `len` raises TypeError) it is endless.
    """

    header: Header

    def __getitem__(self, index: int, /) -> np.ndarray | torch.Tensor: ...


@runtime_checkable
class BatchedSource(Protocol):
    """A source that makes several trajectories at once, such as a `simulate.generate.Stream`."""

    @property
    def batch_size(self) -> int: ...

    def batch(self, indices: Sequence[int]) -> torch.Tensor: ...


@dataclass(frozen=True)
class WindowSpec:
    """Which fields and frames make a window. Everything but the strides of thinning counts thinned frames."""

    inputs: tuple[str, ...]
    targets: tuple[str, ...]
    history: int
    horizon: int
    starts: int | None = None
    """Windows per trajectory; None: all that fit."""
    stride: int = 1
    """Frames from one start to the next."""
    time_stride: int = 1
    space_stride: int = 1
    steady: bool = False
    """The future is the history's own frame, in other fields."""
    skip: int = 0
    """Frames before the first window."""

    def __post_init__(self) -> None:
        for role in ("inputs", "targets"):
            names = getattr(self, role)
            if not names or len(set(names)) < len(names):
                raise ValueError(f"The {role} are ({', '.join(names)}); give at least one field, and each only once.")
        for name in ("history", "horizon", "starts", "stride", "time_stride", "space_stride"):
            number = getattr(self, name)
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
        """The frames one window touches."""
        return 1 if self.steady else self.history + self.horizon

    def starts_in(self, frames: int) -> int:
        """How many windows a trajectory of so many stored frames gives; an error if it gives too few."""
        thinned = -(-frames // self.time_stride) - self.skip
        if thinned < self.span:
            raise ValueError(
                f"A window needs {self.span} frames, but {frames} stored frames with time_stride {self.time_stride} "
                f"leave {thinned}; shorten history or horizon."
            )
        fitting = (thinned - self.span) // self.stride + 1
        if self.starts is not None and self.starts > fitting:
            raise ValueError(
                f"starts is {self.starts} windows per trajectory, but only {fitting} fit into {thinned} frames."
            )
        return fitting if self.starts is None else self.starts


class Row(NamedTuple):
    """A window by its numbers in the source: trajectory, and frames as stored, before thinning."""

    trajectory: int
    history: int
    """First frame of the history."""
    future: int
    """First frame of the future."""
    last: int
    """Last frame of the future."""


class Windows:
    """The windows of some trajectories, in order, each read from the source when asked for.

    A sequence of `(history, future)`; it can be handed to workers, by fork or by pickle. With `listed`, (trajectory,
    first frame) of each, the windows are these in their order; those that reach beyond the last frame are left out.
    """

    on_device: Resident | None = None
    """Where the trajectories lie on a device, see `resident`; None: each window is read when asked for."""

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
        """What is read: the inputs, then the targets that are not among them."""
        for name in self.fields:
            if name not in layout.fields:
                raise ValueError(f'Unknown field "{name}"; {suggest(name, layout.fields)}')
        self.starts = None if listed is not None else spec.starts_in(len(layout.times))
        """Windows per trajectory; None where they are listed."""
        _check_space(source.header, spec.space_stride)
        _check_trajectories(source, self.trajectories)
        self.coordinates = tuple(axis[:: spec.space_stride] for axis in layout.coordinates)
        """Of the thinned grid."""
        self.times = layout.times[:: spec.time_stride]
        """Of the thinned frames."""
        self._channels = [layout.fields.index(name) for name in self.fields]
        self._inputs = [layout.fields.index(name) for name in spec.inputs]
        self._targets = [layout.fields.index(name) for name in spec.targets]
        self._places = self._regular() if listed is None else self._fitting(listed)

    def _regular(self) -> torch.Tensor:
        """(windows, 2): position in `trajectories` and first frame, the starts of one trajectory after another."""
        assert self.starts is not None
        first = self.spec.skip + self.spec.stride * torch.arange(self.starts)
        return torch.cartesian_prod(torch.arange(len(self.trajectories)), first)

    def _fitting(self, listed: Sequence[tuple[int, int]]) -> torch.Tensor:
        """The same of the listed windows that the trajectories are long enough for."""
        spec = self.spec
        if (spec.starts, spec.time_stride, spec.skip) != (None, 1, 0):
            raise ValueError(
                "The data set lists its windows explicitly; omit starts, skip and time_stride, or set "
                "task.split=trajectories."
            )
        position = {trajectory: number for number, trajectory in enumerate(self.trajectories)}
        last = len(self.times) - spec.span
        places = [(position[trajectory], first) for trajectory, first in listed if first <= last]
        if not places:
            raise ValueError(
                f"A window needs {spec.span} frames, but all {len(listed)} listed windows are shorter; "
                "shorten history or horizon."
            )
        return torch.tensor(places)

    def of_trajectories(self, chosen: Collection[int]) -> Windows:
        """Those of these trajectories alone."""
        kept = [trajectory for trajectory in self.trajectories if trajectory in chosen]
        if self.starts is not None:
            return Windows(self.source, kept, self.spec)
        named = [(self.trajectories[position], first) for position, first in self._places.tolist()]
        return Windows(self.source, kept, self.spec, [window for window in named if window[0] in chosen])

    @property
    def grid(self) -> tuple[int, ...]:
        """The number of points per axis after thinning."""
        return tuple(len(axis) for axis in self.coordinates)

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> Pair:
        """One window: float32 `(T_in, *grid, q_in)` and `(H, *grid, q_out)`."""
        history, future = self.batch([index])
        return history[0], future[0]

    def batch(self, indices: Sequence[int] | torch.Tensor) -> Pair:
        """These windows together: float32 `(B, T_in, *grid, q_in)` and `(B, H, *grid, q_out)`."""
        if self.on_device is not None:
            return self._gathered(self.on_device, indices)
        places = self._places[self._checked(indices)].tolist()
        if isinstance(self.source, Reader):
            return self._copied(self.source, places)
        frames = torch.stack(list(self._made(places))).to(torch.float32)
        spec, steady = self.spec, self.spec.steady
        history, future = frames[:, : spec.history], frames if steady else frames[:, spec.history :]
        return self._select(history, spec.inputs).contiguous(), self._select(future, spec.targets).contiguous()

    def _gathered(self, held: Resident, indices: Sequence[int] | torch.Tensor) -> Pair:
        if not isinstance(indices, torch.Tensor) or indices.device.type == "cpu":
            checked = torch.tensor(self._checked(indices), pin_memory=held.values.is_cuda)
            indices = checked.to(held.values.device, non_blocking=True)
        return held.batch(indices)

    def _copied(self, source: Reader, places: list[list[int]]) -> Pair:
        """Windows given as (position in `trajectories`, first frame): what the source reads goes to its place at once.

        By NumPy and not by torch, whose threads wait for one another: far longer than a copy takes, where other
        programs have a core.
        """
        spec, dtype = self.spec, getattr(torch, source.header.dtype)
        history = torch.empty(len(places), spec.history, *self.grid, len(spec.inputs), dtype=dtype)
        future = torch.empty(len(places), spec.horizon, *self.grid, len(spec.targets), dtype=dtype)
        parts = (
            (history.numpy(), slice(0, spec.history), self._inputs),
            (future.numpy(), slice(spec.span - spec.horizon, spec.span), self._targets),
        )
        for row, (position, first) in enumerate(places):
            trajectory = self.trajectories[position]
            source.check(trajectory)
            frames, *space = self._key(first, spec.span)
            apart = source.fields(trajectory, frames.start, frames.stop, self._channels)
            if apart is None:
                values = source[(trajectory, frames, *space)]
                for out, cut, channels in parts:
                    _put(out[row], values[cut], channels)
            else:
                thin = (slice(None, None, spec.time_stride), *space)
                fields = dict(zip(self._channels, (one[thin] for one in apart), strict=True))
                for out, cut, channels in parts:
                    for place, channel in enumerate(channels):
                        out[row, ..., place] = fields[channel][cut]
        return history.to(torch.float32), future.to(torch.float32)

    def frame_times(self, indices: Sequence[int] | torch.Tensor) -> torch.Tensor:
        """float64 (B, 1 + H), on the CPU: the time of the last given frame of these windows, then of the future frames;
        (B, 1) in a steady task."""
        spec = self.spec
        first = self._places[self._checked(indices), 1]
        frames = first[:, None] + torch.arange(spec.history - 1, spec.span)
        return torch.from_numpy(np.asarray(self.times, dtype=np.float64))[frames]

    def rows(self) -> list[Row]:
        """Every window in order."""
        step, spec = self.spec.time_stride, self.spec
        return [
            Row(
                self.trajectories[position],
                step * start,
                step * (start + spec.span - spec.horizon),
                step * (start + spec.span - 1),
            )
            for position, start in self._places.tolist()
        ]

    def each(self) -> Iterator[torch.Tensor]:
        """The trajectories one by one, thinned but whole: float32 `(frames, *grid, fields)`."""
        whole = self._read_whole(self.trajectories) if self.on_device is None else self.on_device.values
        return (values.to(torch.float32) for values in whole)

    def each_covered(self) -> Iterator[torch.Tensor]:
        """Like `each`; of trajectories whose windows are listed, only the frames that one of these windows touches."""
        return (self._covered(position, values) for position, values in enumerate(self.each()))

    def _covered(self, position: int, values: torch.Tensor) -> torch.Tensor:
        if self.starts is not None:
            return values
        first = self._places[self._places[:, 0] == position, 1]
        return values[(first[:, None] + torch.arange(self.spec.span)).unique().to(values.device)]

    def nbytes(self, dtype: str | None = None) -> int:
        """What `resident` would hold, in bytes."""
        values = len(self.trajectories) * len(self.times) * prod(self.grid) * len(self.fields)
        return values * DTYPES[self._held(dtype)].itemsize

    def fits(self, device_bytes: int, dtype: str | None = None) -> bool:
        """Whether `resident` would hold no more than this."""
        return self.nbytes(dtype) <= device_bytes

    def resident(self, device: torch.device | str, dtype: str | None = None) -> Windows:
        """The same windows, their trajectories on a device in the stored type or in `dtype`; reads each of them."""
        windows = copy(self)
        windows.on_device = Resident(self, device, self._held(dtype))
        return windows

    @property
    def values_on_device(self) -> torch.Tensor:
        """What `resident` put there, `(trajectories, frames, *grid, fields)`, thinned; else empty."""
        return torch.zeros(0) if self.on_device is None else self.on_device.values

    def _held(self, dtype: str | None) -> str:
        name = self.source.header.dtype if dtype is None else dtype
        if name not in DTYPES:
            raise ValueError(f"Trajectories are held in memory as float32 or float16, not {name!r}.")
        return name

    def _checked(self, indices: Iterable[int] | torch.Tensor) -> list[int]:
        numbers = indices.tolist() if isinstance(indices, torch.Tensor) else [operator.index(one) for one in indices]
        if not numbers:
            raise ValueError("A batch must contain at least one window.")
        for index in numbers:
            if not -len(self) <= index < len(self):
                raise IndexError(f"Window {index} is out of range: there are {len(self)} (indices start at 0).")
        return [index % len(self) for index in numbers]

    def _select(self, frames: torch.Tensor, names: tuple[str, ...]) -> torch.Tensor:
        return _channels(frames, [self.fields.index(name) for name in names])

    def _key(self, start: int, count: int) -> tuple[slice, ...]:
        """Thinned frames `start`, …, `start` + `count` - 1 and the thinned grid, as slices of what is stored."""
        step = self.spec.time_stride
        space = slice(None, None, self.spec.space_stride)
        return (slice(step * start, step * (start + count - 1) + 1, step), *(space for _ in self.coordinates))

    def _made(self, places: list[list[int]]) -> Iterator[torch.Tensor]:
        """The frames of windows given as (position in `trajectories`, first frame), of a source that cannot be sliced:
        each trajectory is made whole, once for the batch."""
        wanted = list(dict.fromkeys(self.trajectories[position] for position, _ in places))
        whole = dict(zip(wanted, self._read_whole(wanted), strict=True))
        for position, first in places:
            yield whole[self.trajectories[position]][first : first + self.spec.span]

    def _read_whole(self, trajectories: Sequence[int]) -> Iterator[torch.Tensor]:
        """Thinned trajectories in the type of the source."""
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
                given = self.source[trajectory]
                values = given if isinstance(given, torch.Tensor) else torch.tensor(given)
                if values.shape != self.source.header.shape:
                    raise ValueError(
                        f"Trajectory {trajectory} has shape {tuple(values.shape)}, but its header has "
                        f"{self.source.header.shape}."
                    )
                yield _channels(values[key], self._channels)

    @property
    def sides(self) -> tuple[float, ...] | None:
        """The side lengths of a periodic box; None where an axis ends."""
        if set(self.source.header.layout.boundary) != {"periodic"}:
            return None
        return tuple(len(axis) * float(axis[1] - axis[0]) if len(axis) > 1 else 1.0 for axis in self.coordinates)

    def each_finite(self, part: str) -> Iterator[torch.Tensor]:
        """Like `each_covered`; the first value of this `part` of a split that is not finite is named."""
        for position, (trajectory, values) in enumerate(zip(self.trajectories, self.each(), strict=True)):
            finite = values.isfinite()
            if not bool(finite.all()):
                frame, *_, field = (int(one) for one in (~finite).nonzero()[0])
                path = getattr(self.source, "path", None)
                raise ValueError(
                    f"{part.capitalize()} trajectory {trajectory}{f' of {path}' if path else ''} contains "
                    f"non-finite values, the first in frame {frame * self.spec.time_stride} of "
                    f"{self.fields[field]}; skip "
                    "it with `train --skip-bad`."
                )
            yield self._covered(position, values)

    def check_finite(self, part: str) -> None:
        """Read every trajectory of this `part` of a split; the first value that is not finite is named."""
        for _ in self.each_finite(part):
            pass

    def refuse_non_finite(self, indices: torch.Tensor, *frames: torch.Tensor) -> None:
        """`frames` (B, ...) of the windows `indices`: one that is not finite is named by its trajectory."""
        finite = torch.stack([one.isfinite().flatten(1).all(1) for one in frames]).all(0).cpu()
        if not bool(finite.all()):
            trajectory = self.trajectories[int(self._places[int(indices[~finite][0]), 0])]
            raise ValueError(f"Trajectory {trajectory} of the data contains non-finite values; remove it.")


def spread_evenly(count: int, asked: int | None) -> torch.Tensor:
    """`asked` of `count` numbers from the first to the last; all without `asked`."""
    kept = count if asked is None else min(asked, count)
    return torch.linspace(0, count - 1, kept, dtype=torch.float64).round().long()


class Resident:
    """The trajectories of windows on a device, as one tensor; batches are gathered there.

    With indices that are on the device already, a batch costs the host nothing but the launches: it never waits.
    """

    def __init__(self, windows: Windows, device: torch.device | str, dtype: str) -> None:
        shape = (len(windows.trajectories), len(windows.times), *windows.grid, len(windows.fields))
        self.values = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
        """All trajectories, thinned: `(trajectories, frames, *grid, fields)`."""
        for position, values in enumerate(windows._read_whole(windows.trajectories)):
            self.values[position] = values.to(self.values.device)
            narrowed = self.values.element_size() < values.element_size()
            if narrowed and int(self.values[position].isinf().sum()) > int(values.isinf().sum()):
                raise ValueError(
                    f"Trajectory {windows.trajectories[position]} contains values too large for {dtype}; use float32."
                )
        spec, device = windows.spec, self.values.device
        self._first = (windows._places[:, 0] * len(windows.times) + windows._places[:, 1]).to(device)
        self._history = torch.arange(spec.history, device=device)
        self._future = torch.arange(spec.span - spec.horizon, spec.span, device=device)
        self._inputs = [windows.fields.index(name) for name in spec.inputs]
        self._targets = [windows.fields.index(name) for name in spec.targets]

    def batch(self, indices: torch.Tensor) -> Pair:
        """The windows of indices that lie on the device; those on a GPU are not checked here, but by the GPU."""
        first = self._first.index_select(0, torch.where(indices < 0, indices + len(self._first), indices))
        history = _channels(self._gather(first, self._history), self._inputs)
        return history, _channels(self._gather(first, self._future), self._targets)

    def _gather(self, first: torch.Tensor, frames: torch.Tensor) -> torch.Tensor:
        places = (first[:, None] + frames).flatten()
        gathered = self.values.flatten(0, 1).index_select(0, places)
        return gathered.unflatten(0, (-1, len(frames))).to(torch.float32)


def _channels(values: torch.Tensor, channels: list[int]) -> torch.Tensor:
    """These channels of the last axis; a view where they are neighbours."""
    first, stop = channels[0], channels[0] + len(channels)
    if channels == list(range(first, stop)):
        return values[..., first:stop]
    return torch.stack([values[..., channel] for channel in channels], dim=-1)


def _put(out: np.ndarray, values: np.ndarray, channels: list[int]) -> None:
    """Copy these channels of the last axis. Those of a point that lie in one piece are copied as one element, others
    field by field: NumPy's innermost loop would be over the channels, and so short a loop is slow."""
    first, stop = channels[0], channels[0] + len(channels)
    if channels == list(range(first, stop)) and values.strides[-1] == values.itemsize and values.dtype == out.dtype:
        point = np.dtype((np.void, len(channels) * out.itemsize))
        out.view(point)[...] = values[..., first:stop].view(point)
        return
    for place, channel in enumerate(channels):
        out[..., place] = values[..., channel]


def _check_space(header: Header, stride: int) -> None:
    for axis, (size, boundary) in enumerate(zip(header.grid, header.layout.boundary, strict=True)):
        if stride > size:
            raise ValueError(f"space_stride {stride} exceeds the {size} points of axis {'xyz'[axis]}.")
        if boundary == "periodic" and size % stride:
            raise ValueError(
                f"space_stride {stride} does not divide the {size} points of the periodic axis {'xyz'[axis]}, "
                "so the thinned grid would not be periodic; choose a divisor."
            )


def _check_trajectories(source: Source, trajectories: tuple[int, ...]) -> None:
    if not trajectories:
        raise ValueError("No trajectories to take windows from; give at least one.")
    if len(set(trajectories)) < len(trajectories):
        raise ValueError("A trajectory to take windows from is listed twice; list each only once.")
    try:
        count = len(source)  # type: ignore[arg-type]
    except TypeError:
        count = None
    for trajectory in trajectories:
        if trajectory < 0 or (count is not None and trajectory >= count):
            there = "indices start at 0" if count is None else f"there are {count} (indices start at 0)"
            raise ValueError(f"Trajectory {trajectory} is out of range: {there}.")
