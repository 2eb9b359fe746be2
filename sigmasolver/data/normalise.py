"""Normalisers: affine maps between physical and normalised units, fitted on training trajectories only.

    encode(x) = (x - mean) / scale,      decode(x) = x · scale + mean

Each row is a kind: the mean and scale of trajectories v_i (frames, *grid, fields), computed in one pass in float64. σ
is the standard deviation over all points and frames of a trajectory, σ_t the one over time at a point.

    none         0                        1
    channel      mean of everything       std of everything                the default for a user's own data
    scalar       mean of everything       unbiased std + 1e-8              Darcy
    pixel        mean at each point       unbiased std at each point + 1e-5
    temporal     mean of everything       mean over points and i of σ_t    KF2D
    trajectory   (1/N) Σ_i mean(v_i)      (1 + Σ_i σ(v_i))/N + 1e-6        IT3D, Smoke3D; velocities share one statistic
    box-cox      mean of everything       unbiased std + 1e-10             REALM
    published    those of the data set, otherwise like channel             RealPDEBench
    numerical    those of the data set, otherwise like channel, fitted on  RealPDEBench
                 its numerical training windows
    the-well     those of stats.yaml, which is required                    The Well

In the kind "box-cox", mass fractions (fields named species_...) first go through a Box-Cox transform with λ = 0.1,

    z = (max(x, ε)^λ - 1)/λ,              x = max(λ z + 1, 0)^(1/λ),

because the species of a flame span many orders of magnitude. Fit and encoding use the same ε = 1e-8. The kind
"box-cox-released" reproduces the public code: 1e-40 in the fit and 1e-8 in the encoding, so that encoded fields are
offset by the difference (a species that is absent everywhere is 1.584 there, and 0 here). Forecasts have no floor: a
network may predict values below that of the data, down to z = -1/λ, where the mass fraction is zero;
`encode_forecast` recovers them. Where the power overflows, the forecast is infinite and the rollout stops.

"Everything" is per field. The 1 in "trajectory" comes from the public loader, whose sum starts at 1. If all fields that
share a statistic are constant, the scale is 1; such fields are reported in `constant`. Groups of n values with mean m
and squared deviations S merge exactly (Chan, Golub and LeVeque).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from sigmasolver.data.mask import in_fluid
from sigmasolver.data.moments import merge
from sigmasolver.data.reader import Reader
from sigmasolver.data.windows import Windows
from sigmasolver.settings import check_types, lookup, suggest
from sigmasolver.tasks import field_groups

__all__ = ["NORMALISERS", "Fit", "Normaliser", "TimeScale", "fit", "fit_trajectories"]

_KEYS = ("kind", "fields", "mean", "scale", "constant")
_EXPONENT = 0.1
_FLOORS = {"box-cox": (1e-8, 1e-8), "box-cox-released": (1e-40, 1e-8)}
"""Floor of the mass fractions in the fit and in the encoding, for kinds that transform species."""
_FORECAST_FLOOR = 1e-37
"""Floor of the mass fractions of a forecast: close to the smallest normal float32."""
_WITH_EPSILON, _MIN_RANGE = ("scalar", "pixel", "trajectory"), 1e-4
"""Kinds that add a constant to the scale, and the smallest useful range of a normalised field."""
_WITH_STATISTICS = ("published", "numerical", "the-well")
"""Kinds that use statistics published with a data set."""
_REQUIRED = {
    "numerical": ("realpdebench", "statistics of numerical training data (mean_std.pt)"),
    "the-well": ("the-well", "statistics of The Well (stats.yaml next to the folder data)"),
}
"""Those that require published statistics: the source of the data, and a description for messages."""
_Statistics = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""Mean, scale, and a mask of the fields to transform (None: none)."""


@dataclass(frozen=True, eq=False)
class Normaliser:
    """Affine map of some fields. Statistics are float64, per field `(q,)` or per point `(*grid, q)`."""

    kind: str
    fields: tuple[str, ...]
    mean: torch.Tensor
    scale: torch.Tensor
    constant: tuple[str, ...] = ()
    """Fields that were constant in the training data."""
    _casts: dict[tuple[torch.device, torch.dtype], _Statistics] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        lookup(NORMALISERS, self.kind, "normaliser")
        for name in ("mean", "scale"):
            values = getattr(self, name)
            if values.dtype != torch.float64 or values.ndim < 1 or values.shape[-1] != len(self.fields):
                raise ValueError(
                    f"The {name} has dtype {values.dtype} and shape {tuple(values.shape)}; expected float64 with "
                    f"a last axis of {len(self.fields)} fields."
                )
        if self.mean.shape != self.scale.shape:
            raise ValueError(
                f"The mean has shape {tuple(self.mean.shape)} and the scale {tuple(self.scale.shape)}; they must agree."
            )
        if not bool((self.mean.isfinite() & self.scale.isfinite() & (self.scale > 0)).all()):
            raise ValueError("A mean or scale is not finite, or a scale is not positive; fit the normaliser again.")

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise values `(..., *grid, q)` in physical units; keeps the dtype of `x`."""
        return self._encode(x, _FLOORS.get(self.kind, (0.0, 0.0))[1])

    def encode_forecast(self, x: torch.Tensor) -> torch.Tensor:
        """Invert `decode`: recovers the network output and its gradient even below the floor of the data."""
        return self._encode(x, _FORECAST_FLOOR)

    def _encode(self, x: torch.Tensor, floor: float) -> torch.Tensor:
        mean, scale, species = self._statistics_for(x)
        return ((_box_cox(x, species, floor) - mean) / scale).to(x.dtype)

    @property
    def transforms(self) -> bool:
        """Whether species go through a Box-Cox transform."""
        return self.kind in _FLOORS

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        """The inverse of `encode`."""
        mean, scale, species = self._statistics_for(x)
        return _inverse_box_cox(x * scale + mean, species).to(x.dtype)

    def prepare(self, device: torch.device | str, dtype: torch.dtype = torch.float32) -> Normaliser:
        """Cache the statistics on a device before the first compiled or captured call; returns self."""
        self._statistics_for(torch.empty(self.mean.shape, dtype=dtype, device=device))
        return self

    def select(self, fields: Sequence[str]) -> Normaliser:
        """The normaliser of only these fields, in this order."""
        for name in fields:
            if name not in self.fields:
                raise ValueError(f'The normaliser has no field "{name}"; {suggest(name, self.fields)}')
        channels = [self.fields.index(name) for name in fields]
        constant = tuple(name for name in fields if name in self.constant)
        return Normaliser(self.kind, tuple(fields), self.mean[..., channels], self.scale[..., channels], constant)

    def to_dict(self) -> dict[str, Any]:
        """Plain values that round-trip exactly through JSON."""
        return {
            "kind": self.kind,
            "fields": list(self.fields),
            "mean": self.mean.tolist(),
            "scale": self.scale.tolist(),
            "constant": list(self.constant),
        }

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Normaliser:
        """The inverse of `to_dict`."""
        for key in values:
            if key not in _KEYS:
                raise ValueError(f'Unknown normaliser entry "{key}"; {suggest(key, _KEYS)}')
        for key in _KEYS:
            if key not in values:
                raise ValueError(f'Normaliser entry "{key}" is missing; save the normaliser with to_dict.')
        mean, scale = (torch.tensor(values[name], dtype=torch.float64) for name in ("mean", "scale"))
        return Normaliser(values["kind"], tuple(values["fields"]), mean, scale, tuple(values["constant"]))

    def _statistics_for(self, x: torch.Tensor) -> _Statistics:
        """Mean and scale on the device of `x`, in its dtype but at least float32."""
        if x.shape[x.ndim - self.mean.ndim :] != self.mean.shape:
            raise ValueError(
                f"Got values of shape {tuple(x.shape)}; the last axes must be {tuple(self.mean.shape)} "
                f"for ({', '.join(self.fields)})."
            )
        key = (x.device, torch.promote_types(x.dtype, torch.float32))
        if key in self._casts:
            return self._casts[key]
        if torch.compiler.is_compiling():  # the next replay of a graph may overwrite its tensors: do not cache
            return self._cast(*key)
        with torch.inference_mode(False):  # inference tensors cannot be used in autograd later
            self._casts[key] = self._cast(*key)
        return self._casts[key]

    def _cast(self, device: torch.device, dtype: torch.dtype) -> _Statistics:
        species = _species_mask(self.fields).to(device) if self.transforms else None
        return self.mean.to(device, dtype), self.scale.to(device, dtype), species

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_casts": {}}


@dataclass(frozen=True)
class TimeScale:
    """Map from physical times to model times, in frames of the training data since the first one.

    The highest frequency of the model's time embedding is one radian per frame, so frames are distinguishable and the
    embedding is smooth between them.
    """

    origin: float = 0.0
    unit: float = 1.0

    def __post_init__(self) -> None:
        check_types(self)
        if self.unit <= 0:
            raise ValueError(f"The unit of time is {self.unit}; it must be positive.")

    def encode(self, times: torch.Tensor) -> torch.Tensor:
        """Convert in float64, so that large times that are close together stay distinct."""
        return (times.double() - self.origin) / self.unit

    @staticmethod
    def of(times: np.ndarray) -> TimeScale:
        """From the times of the (strided) training frames; the unit is their mean spacing."""
        first, last = float(times[0]), float(times[-1])
        return TimeScale(first, (last - first) / (len(times) - 1) if len(times) > 1 else 1.0)


def fit(kind: str, windows: Windows, mask: str | None = None) -> tuple[Normaliser, Normaliser]:
    """Fit the normalisers of the inputs and of the targets on the full trajectories of these training windows.

    Reads every trajectory once, with the strides of the windows; published statistics are used if the kind says so.
    With a `mask`, only fluid points count.
    """
    if kind in _WITH_STATISTICS and isinstance(windows.source, Reader):
        statistics, source = windows.source.published_statistics, windows.source.header.source
        required_source, description = _REQUIRED.get(kind, (source, ""))
        if description and (statistics is None or source != required_source):
            if kind == "numerical" and source == required_source and (numerical := _fit_numerical(windows)) is not None:
                return numerical.select(windows.spec.inputs), numerical.select(windows.spec.targets)
            raise ValueError(
                f"{windows.source.path} has no {description}; add the file, or set task.normaliser=channel "
                "to fit them on the training windows."
            )
        if statistics is not None:
            return _published(kind, windows, statistics, "inputs"), _published(kind, windows, statistics, "targets")
    trajectories = windows.each_finite("training")
    if mask is not None:
        channel = windows.fields.index(mask)
        trajectories = (in_fluid(values, values[0, ..., channel] < 0.5) for values in trajectories)
    both = fit_trajectories(kind, windows.fields, trajectories)
    return both.select(windows.spec.inputs), both.select(windows.spec.targets)


def _fit_numerical(windows: Windows) -> Normaliser | None:
    """Fit on the numerical training windows of the same data set, on the shared grid points; None if there are none."""
    from sigmasolver.data.formats import open_data  # deferred: imports every reader
    from sigmasolver.data.formats.realpdebench import numerical_branch

    folder = numerical_branch(windows.source.path) if isinstance(windows.source, Reader) else None
    if folder is None:
        return None
    with open_data(folder) as data:
        missing = [name for name in windows.fields if name not in data.header.layout.fields]
        if missing:
            raise ValueError(
                f"The numerical data in {folder} have no {', '.join(missing)}, so the normaliser cannot be fitted on "
                "them; set task.normaliser=channel to fit it on the measured windows."
            )
        # Some numerical data have twice the resolution of the measurements.
        space_stride = -(-data.header.grid[0] // len(windows.coordinates[0]))
        window_lists = data.published_windows
        listed = None if window_lists is None else window_lists.windows("train")
        members = range(len(data)) if window_lists is None else window_lists.trajectories("train")
        numerical = Windows(data, members, replace(windows.spec, space_stride=space_stride), listed)
        return fit_trajectories("numerical", windows.fields, numerical.each_finite("numerical training"))


def _published(kind: str, windows: Windows, published: Mapping[str, Any], role: str) -> Normaliser:
    """The normaliser of the inputs or targets from published statistics. The Well has none for the parameters of a
    trajectory: these are fitted."""
    fields, statistics = getattr(windows.spec, role), dict(published[role])
    parameters = published.get("fitted", ())
    missing = [name for name in fields if name not in statistics and name in parameters]
    if missing:
        channels = [windows.fields.index(name) for name in missing]
        fitted = fit_trajectories(
            "channel", missing, (values[..., channels] for values in windows.each_finite("training"))
        )
        statistics |= zip(missing, zip(fitted.mean.tolist(), fitted.scale.tolist(), strict=True), strict=True)
    return _from_statistics(kind, fields, statistics)


def _from_statistics(kind: str, fields: Sequence[str], statistics: Mapping[str, Sequence[float]]) -> Normaliser:
    for name in fields:
        if name not in statistics:
            raise ValueError(
                f"The published statistics have no field {name} (available: {', '.join(statistics)}); set "
                "task.normaliser=channel to fit them on the training windows."
            )
    mean, scale = torch.tensor([statistics[name] for name in fields], dtype=torch.float64).unbind(-1)
    return Normaliser(kind, tuple(fields), mean, scale)


def fit_trajectories(kind: str, fields: Sequence[str], trajectories: Iterable[torch.Tensor]) -> Normaliser:
    """Fit a normaliser of this kind on trajectories `(frames, *grid, fields)`, one at a time."""
    tracked = _RangeTracker(fields, trajectories)
    mean, scale = lookup(NORMALISERS, kind, "normaliser")(tracked)
    shared = kind == "trajectory"
    for group in map(list, field_groups(fields).values()) if shared else [[q] for q in range(len(fields))]:
        if all(fields[q] in tracked.constant for q in group):
            scale[..., group] = 1
        elif not bool((scale[..., group] > 0).all()):
            raise ValueError(f"The field {fields[group[0]]} is constant in time; set task.normaliser=channel.")
        elif kind in _WITH_EPSILON:
            largest = max(tracked.range_of(q) for q in group)
            if largest < _MIN_RANGE * float(scale[..., group].min()):
                raise ValueError(
                    f"The field {fields[group[0]]} has a range of only {largest:.3g}, negligible against the constant "
                    f'of the normaliser "{kind}"; set task.normaliser=channel, or convert the data to other units.'
                )
    return Normaliser(kind, tuple(fields), mean.cpu(), scale.cpu(), tracked.constant)


def _species_mask(fields: Sequence[str]) -> torch.Tensor:
    return torch.tensor([name.startswith("species_") for name in fields])


def _box_cox(x: torch.Tensor, species: torch.Tensor | None, floor: float) -> torch.Tensor:
    if species is None:
        return x
    # For other fields the power may overflow, and infinity times the zero gradient of `where` is NaN.
    base = torch.where(species, x.clamp(min=floor), 1.0)
    return torch.where(species, (base**_EXPONENT - 1) / _EXPONENT, x)


def _inverse_box_cox(z: torch.Tensor, species: torch.Tensor | None) -> torch.Tensor:
    if species is None:
        return z
    base = torch.where(species, (_EXPONENT * z + 1).clamp(min=0), 1.0)
    return torch.where(species, base ** (1 / _EXPONENT), z)


class _RangeTracker:
    """Iterate over trajectories in float64 and track the minimum and maximum of each field."""

    def __init__(self, fields: Sequence[str], trajectories: Iterable[torch.Tensor]) -> None:
        self.fields = tuple(fields)
        self._trajectories = trajectories
        self._low: torch.Tensor | None = None
        self._high: torch.Tensor | None = None

    @property
    def constant(self) -> tuple[str, ...]:
        """Fields that were constant over all trajectories seen so far."""
        if self._low is None or self._high is None:
            return ()
        return tuple(name for name, same in zip(self.fields, (self._low == self._high).tolist(), strict=True) if same)

    def range_of(self, channel: int) -> float:
        """Maximum minus minimum of a field over all trajectories seen so far."""
        assert self._low is not None and self._high is not None
        return float(self._high[channel] - self._low[channel])

    def __iter__(self) -> Iterator[torch.Tensor]:
        for number, values in enumerate(self._trajectories):
            wide = values.to(torch.float64)
            if not bool(wide.isfinite().all()):
                raise ValueError(
                    f"Training trajectory {number} (indices start at 0) contains non-finite values; remove it."
                )
            low, high = wide.flatten(0, -2).amin(0), wide.flatten(0, -2).amax(0)
            self._low = low if self._low is None else torch.minimum(self._low, low)
            self._high = high if self._high is None else torch.maximum(self._high, high)
            yield wide
        if self._low is None:
            raise ValueError("No trajectories to fit a normaliser on; give at least one.")


Fit = Callable[[_RangeTracker], tuple[torch.Tensor, torch.Tensor]]


def _moments(trajectories: Iterable[torch.Tensor], per_point: bool) -> tuple[int, torch.Tensor, torch.Tensor]:
    """Count n, mean m and squared deviations S, per field, or per point and field."""
    total: tuple[int, torch.Tensor, torch.Tensor] = (0, torch.zeros(()), torch.zeros(()))
    for values in trajectories:
        values = values if per_point else values.flatten(0, -2)
        mean = values.mean(0)
        block = (len(values), mean, (values - mean).square().sum(0))
        total = merge(total, block) if total[0] else block
    return total


def _unbiased(n: int, S: torch.Tensor) -> torch.Tensor:
    if n < 2:
        raise ValueError("The standard deviation needs more than one value; give more training trajectories.")
    return (S / (n - 1)).sqrt()


def _none(trajectories: _RangeTracker) -> tuple[torch.Tensor, torch.Tensor]:
    q = len(trajectories.fields)
    return torch.zeros(q, dtype=torch.float64), torch.ones(q, dtype=torch.float64)


def _channel(trajectories: _RangeTracker) -> tuple[torch.Tensor, torch.Tensor]:
    n, mean, S = _moments(trajectories, per_point=False)
    return mean, (S / n).sqrt()


def _scalar(trajectories: _RangeTracker) -> tuple[torch.Tensor, torch.Tensor]:
    n, mean, S = _moments(trajectories, per_point=False)
    return mean, _unbiased(n, S) + 1e-8


def _pixel(trajectories: _RangeTracker) -> tuple[torch.Tensor, torch.Tensor]:
    n, mean, S = _moments(trajectories, per_point=True)
    return mean, _unbiased(n, S) + 1e-5


def _temporal(trajectories: _RangeTracker) -> tuple[torch.Tensor, torch.Tensor]:
    means, deviations = [], []
    for values in trajectories:
        means.append(values.flatten(0, -2).mean(0))
        deviations.append(values.std(0, correction=0).flatten(0, -2).mean(0))
    return torch.stack(means).mean(0), torch.stack(deviations).mean(0)


def _trajectory(trajectories: _RangeTracker) -> tuple[torch.Tensor, torch.Tensor]:
    groups = [list(group) for group in field_groups(trajectories.fields).values()]
    statistics = [
        torch.stack([torch.stack(torch.std_mean(values[..., group], correction=0)) for group in groups])
        for values in trajectories
    ]
    std_sum, mean_sum = torch.stack(statistics).sum(0).unbind(-1)
    N = len(statistics)
    mean, scale = (torch.empty(len(trajectories.fields), dtype=torch.float64) for _ in range(2))
    for group, m, s in zip(groups, mean_sum / N, (1 + std_sum) / N + 1e-6, strict=True):
        mean[group], scale[group] = m.cpu(), s.cpu()
    return mean, scale


def _box_cox_fit(kind: str, trajectories: _RangeTracker) -> tuple[torch.Tensor, torch.Tensor]:
    species, (floor, _) = _species_mask(trajectories.fields), _FLOORS[kind]
    transformed = (_box_cox(values, species.to(values.device), floor) for values in trajectories)
    n, mean, S = _moments(transformed, per_point=False)
    std = _unbiased(n, S)
    return mean, torch.where(std < 1e-10, 1.0, std + 1e-10)  # a species below the floor everywhere has zero variance


NORMALISERS: dict[str, Fit] = {
    "none": _none,
    "channel": _channel,
    "scalar": _scalar,
    "pixel": _pixel,
    "temporal": _temporal,
    "trajectory": _trajectory,
    **{kind: partial(_box_cox_fit, kind) for kind in _FLOORS},
    "published": _channel,
    "numerical": _channel,
    "the-well": _channel,
}
