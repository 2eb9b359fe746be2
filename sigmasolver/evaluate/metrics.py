"""Error metrics of forecasts (app:experiment-metrics, app:rollout-comparison): pure functions of frames.

Frames are (B, H, *grid, q): samples, leads, one to three spatial axes, fields. Lead 1 is the first *predicted* frame;
input frames are excluded. Physical units, unless a function says otherwise. The paper's relative error averages ratios,

    E_rel = 1/B Σ_b ‖ŷ_b − y_b‖₂ / ‖y_b‖₂,

so functions keep the sample axis and the caller finishes with `.mean(dim=0)`. Results of several batches are
concatenated along the samples first; operations that are not a mean over samples (the root in RMSE) come afterwards.
Such a metric has a function of frames, for users, and one of concatenated results, which `evaluation` calls; both share
the formula: `frmse` is `frmse_from` of `fourier_energy`, `rmse` and `mae` are `mean_except`, `realm_correlation` is
`mean_correlation`.

Sums are accumulated in float64 whatever the input dtype, there is no host sync, and no epsilon hides a zero: a ratio
with zero denominator is inf, or NaN if the numerator is zero too. Non-finite predictions give non-finite errors.

Letters: B samples, H leads, N points of the grid, q fields, G groups of fields, K shells or bins.

Example:
    >>> import torch
    >>> from sigmasolver import metrics
    >>> true = torch.ones(2, 5, 8, 8, 3)
    >>> metrics.relative_l2(1.5 * true, true).mean(dim=0)
    tensor([0.5000, 0.5000, 0.5000], dtype=torch.float64)
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from sigmasolver.data.layout import shape_text

__all__ = [
    "absolute_error",
    "blow_up",
    "component_mean",
    "correlation_time",
    "energy_spectrum",
    "fourier_energy",
    "frequency_error",
    "frmse",
    "frmse_bands",
    "frmse_bands_from",
    "frmse_from",
    "frmse_per_bin",
    "grouped_squared_error",
    "is_constant",
    "kinetic_energy",
    "mae",
    "mean_correlation",
    "mean_except",
    "pearson",
    "r2",
    "r2_from",
    "ratio_of_norms",
    "realm_correlation",
    "realm_error",
    "realm_error_from",
    "realm_error_per_call",
    "realm_error_per_call_from",
    "relative_l2",
    "relative_l2_final",
    "relative_l2_final_from",
    "relative_l2_joint",
    "relative_l2_per_lead",
    "relative_spectrum_error",
    "rmse",
    "squared_error",
    "variance_from",
]

_SAMPLE_LEAD_FIELD = ("sample", "lead", "field")


def relative_l2(predicted: Tensor, true: Tensor) -> Tensor:
    """(B, q): per sample and field, leads and points in one norm (the paper's error for dynamic tasks)."""
    predicted, true = _checked_pair(predicted, true)
    return ratio_of_norms(predicted, true, range(1, true.ndim - 1))


def relative_l2_per_lead(predicted: Tensor, true: Tensor) -> Tensor:
    """(B, H, q): per sample, lead and field, points in one norm.

    Its mean over leads (the rollout curves of the paper) is not `relative_l2`, which weighs leads by their norm.
    """
    predicted, true = _checked_pair(predicted, true)
    return ratio_of_norms(predicted, true, range(2, true.ndim - 1))


def relative_l2_final(predicted: Tensor, true: Tensor) -> Tensor:
    """(B, q): the last of `relative_l2_per_lead` (the "final" columns)."""
    return relative_l2_final_from(relative_l2_per_lead(predicted, true))


def relative_l2_final_from(per_lead: Tensor) -> Tensor:
    """`relative_l2_final` from the `relative_l2_per_lead` (B, H, q) of all samples."""
    return per_lead[:, -1]


def relative_l2_joint(predicted: Tensor, true: Tensor) -> Tensor:
    """(B,): leads, points and fields in one norm (the convention of RealPDEBench; pass only the measured fields)."""
    predicted, true = _checked_pair(predicted, true)
    return ratio_of_norms(predicted, true, range(1, true.ndim))


def ratio_of_norms(predicted: Tensor, true: Tensor, axes: Sequence[int]) -> Tensor:
    """‖ŷ − y‖₂ / ‖y‖₂ over these axes, in the dtype of the input and differentiable (used as a loss).

    Both norms are computed of fields divided by a power of two, so that squares neither overflow nor underflow. This
    division is exact: value and gradient are bit-identical to those of the plain ratio wherever that is finite.
    """
    dim = tuple(axes)
    unit = _power_of_two(torch.linalg.vector_norm(true, torch.inf, dim=dim, keepdim=True))
    difference = torch.linalg.vector_norm((predicted - true) / unit, dim=dim)
    ratio: Tensor = difference / torch.linalg.vector_norm(true / unit, dim=dim)
    return ratio


def component_mean(errors: Tensor, components: Sequence[int]) -> Tensor:
    """(...) from `errors` (..., q): mean over some fields, such as the components of a velocity.

    The mean of component-wise errors, as in the paper; in the error of the vector a weak component would hardly count.
    """
    fields = errors.shape[-1]
    if not components or not all(0 <= component < fields for component in components):
        raise ValueError(
            f"Components {list(components)} are not valid indices of {fields} fields; pass at least one index from 0 "
            f"to {fields - 1}."
        )
    # Indexing with a list would copy it to the device; views do not.
    return torch.stack([errors[..., component] for component in components]).mean(dim=0)


def squared_error(predicted: Tensor, true: Tensor) -> Tensor:
    """(B, H, q): mean over points of (ŷ − y)²."""
    predicted, true = _checked_pair(predicted, true)
    return (predicted - true).square().mean(dim=_spatial_axes(true))


def absolute_error(predicted: Tensor, true: Tensor) -> Tensor:
    """(B, H, q): mean over points of |ŷ − y|."""
    predicted, true = _checked_pair(predicted, true)
    return (predicted - true).abs().mean(dim=_spatial_axes(true))


def rmse(predicted: Tensor, true: Tensor, *per: str) -> Tensor:
    """Root mean square error over all axes except those named in `per` ("sample", "lead", "field").

    Without names one number (RealPDEBench); `rmse(predicted, true, "lead", "field")` gives (H, q). The axes of the
    result keep the order of the frames.
    """
    return mean_except(squared_error(predicted, true), *per).sqrt()


def mae(predicted: Tensor, true: Tensor, *per: str) -> Tensor:
    """Mean absolute error over all axes except those named in `per`, as in `rmse`."""
    return mean_except(absolute_error(predicted, true), *per)


def mean_except(errors: Tensor, *per: str) -> Tensor:
    """Mean of `errors` (B, H, q) over all axes except those named in `per`, as in `rmse`."""
    axes = _axes_except(per)
    return errors.mean(dim=axes) if axes else errors  # torch reads an empty tuple as all axes


def fourier_energy(frames: Tensor) -> Tensor:
    """(B, K, q): Σ |F|² / (H N)² in bins of the index radius, F the unnormalised transform over leads and space.

    Exactly RealPDEBench's convention: indices from 0 to below half of each length (no Nyquist, no negative
    frequencies), bin = ⌊radius⌋, K = half of the shortest length rounded down, larger radii dropped; a sum per bin,
    not a mean. Radii count indices, not physical wavenumbers.
    """
    frames = _checked_frames(frames)
    lengths = frames.shape[1:-1]
    K = min(lengths) // 2
    if K == 0:
        raise ValueError(
            f"The Fourier error requires at least two leads and two points per axis, got {lengths[0]} leads on a "
            f"grid of {shape_text(lengths[1:])}."
        )
    axes = tuple(range(1, frames.ndim - 1))
    spectrum = torch.fft.fftn(frames, dim=axes, norm="forward")
    for axis, length in zip(axes, lengths, strict=True):
        spectrum = spectrum.narrow(axis, 0, length // 2)
    index = [torch.arange(length // 2, device=frames.device).double() for length in lengths]
    bins = _radius(index).floor().long().clamp(max=K)  # an extra bin collects the dropped radii
    return _sum_in_bins(spectrum.abs().square().flatten(1, -2), bins, K + 1)[:, :K]


def frmse_per_bin(predicted: Tensor, true: Tensor, relative: bool = False) -> Tensor:
    """(K, q): root of the mean over samples of the error's `fourier_energy`; relative: over the same of the truth."""
    predicted, true = _checked_pair(predicted, true)
    error = _root_of_mean(fourier_energy(predicted - true))
    return error / _root_of_mean(fourier_energy(true)) if relative else error


def frmse(predicted: Tensor, true: Tensor) -> Tensor:
    """One number, RealPDEBench's fRMSE: mean of `frmse_per_bin` over bins and fields."""
    predicted, true = _checked_pair(predicted, true)
    return frmse_from(fourier_energy(predicted - true))


def frmse_from(energy: Tensor) -> Tensor:
    """`frmse` from the `fourier_energy` (B, K, q) of the errors of all samples."""
    return _root_of_mean(energy).mean()


def frmse_bands(predicted: Tensor, true: Tensor, relative: bool = False) -> Tensor:
    """(3,): the mean over the low, middle and high third of the bins; NaN for a third without bins (K = 1 or 2)."""
    return _thirds(frmse_per_bin(predicted, true, relative))


def frmse_bands_from(energy: Tensor) -> Tensor:
    """`frmse_bands`, not relative, from the `fourier_energy` (B, K, q) of the errors of all samples."""
    return _thirds(_root_of_mean(energy))


def _thirds(per_bin: Tensor) -> Tensor:
    K = per_bin.shape[0]
    low, high = round(K / 3), round(2 * K / 3)
    return torch.stack([band.mean() for band in (per_bin[:low], per_bin[low:high], per_bin[high:])])


def r2(predicted: Tensor, true: Tensor) -> Tensor:
    """One number, RealPDEBench's coefficient of determination: 1 − Σ (ŷ − y)² / Σ (y − ȳ)², where ȳ is the mean over
    the samples at every lead, point and field; −inf for a single sample."""
    predicted, true = _checked_pair(predicted, true)
    return r2_from((predicted - true).square().sum(), (true - true.mean(dim=0)).square().sum())


def r2_from(squared_error: Tensor, variance: Tensor) -> Tensor:
    """`r2` from the squared error and the variance of the truth, both as sums or both as means over all samples."""
    return 1 - squared_error / variance


def variance_from(mean_square: Tensor, mean: Tensor) -> Tensor:
    """(q,): variance over the samples, averaged over leads and points, from moments that batches can accumulate: the
    mean square (q,) over samples, leads and points, and the mean frames (H, *grid, q) over the samples."""
    return mean_square - mean.square().flatten(0, -2).mean(0)


def kinetic_energy(predicted: Tensor, true: Tensor) -> Tensor:
    """(B,): RealPDEBench's error of the fluctuating kinetic energy, mean over points of |ê − e|, where e = ½ (var u +
    var v), variances (biased) along the leads at each point, of the first two fields; 0 for a single field."""
    predicted, true = _checked_pair(predicted, true)
    if true.shape[-1] < 2:
        return true.new_zeros(len(true))
    e_predicted, e_true = (0.5 * frames[..., :2].var(dim=1, correction=0).sum(-1) for frames in (predicted, true))
    return (e_predicted - e_true).abs().flatten(1).mean(1)


def frequency_error(predicted: Tensor, true: Tensor) -> Tensor:
    """(B,): RealPDEBench's frequency error, mean of |F̂ − F| over frequencies, F the unnormalised transform along the
    leads of the sum over points and fields: it grows with the grid."""
    predicted, true = _checked_pair(predicted, true)
    spectrum: Tensor = torch.fft.fft((predicted - true).sum(dim=tuple(range(2, true.ndim))), dim=1)
    return spectrum.abs().mean(1)


def pearson(predicted: Tensor, true: Tensor) -> Tensor:
    """(B, H, q): correlation over points; NaN where the prediction or the truth is constant or not finite."""
    predicted, true = (_minus_first_point(frames) for frames in _checked_pair(predicted, true))
    return (_unit_fluctuation(predicted) * _unit_fluctuation(true)).sum(dim=_spatial_axes(true))


def is_constant(frames: Tensor) -> Tensor:
    """(B, H, q) of bool: fields with one value at all points, for which no correlation exists."""
    frames = _checked_frames(frames)
    return frames.amax(dim=_spatial_axes(frames)) == frames.amin(dim=_spatial_axes(frames))


def realm_correlation(predicted: Tensor, true: Tensor) -> tuple[Tensor, Tensor]:
    """REALM's score on decoded fields: `pearson` averaged over samples, leads and fields, and the excluded count.

    Exactly the entries with a constant truth are excluded. A constant or non-finite prediction of a truth that
    varies is a failure of the model and makes the mean NaN; so does a truth that is constant everywhere.
    """
    constant = is_constant(true)
    return mean_correlation(pearson(predicted, true), constant), constant.sum()


def mean_correlation(correlation: Tensor, constant: Tensor, *per: str) -> Tensor:
    """Mean of `pearson` (B, H, q) where the truth is not constant (`is_constant`), over all axes but those in `per`."""
    axes = _axes_except(per)
    return torch.where(constant, 0.0, correlation).sum(dim=axes) / (~constant).sum(dim=axes)


def correlation_time(correlation: Tensor, lead_times: Tensor, threshold: float = 0.8) -> Tensor:
    """(...) from `correlation` (H, ...): the first of `lead_times` (H,) at which it is below `threshold`.

    Pass a mean over samples, such as `pearson(...).mean(dim=0)`. The result is one of the lead times (no
    interpolation), or inf if the correlation never drops. A NaN counts as dropped.
    """
    if correlation.ndim == 0 or lead_times.shape != correlation.shape[:1]:
        raise ValueError(
            "Expected one lead time for each entry of the first axis of correlations of shape "
            f"{tuple(correlation.shape)}, got lead times of shape {tuple(lead_times.shape)}."
        )
    times = lead_times.to(correlation.device, torch.float64).view(-1, *[1] * (correlation.ndim - 1))
    return torch.where(correlation.double() >= threshold, math.inf, times).amin(dim=0)


def energy_spectrum(frames: Tensor, side_lengths: Sequence[float] | None = None) -> Tensor:
    """(B, H, K, q): E(k) = ½ Σ |û(κ)|² over the shell k − ½ ≤ |κ| < k + ½ of a periodic grid, û = FFT / N.

    Shell 0 is the mean; Σ_k E(k) is half the mean square, because the partly filled shells in the corners of the
    spectrum are kept (beyond half the shortest axis). κ counts waves along the longest side; without `side_lengths`
    all sides are equally long, whatever their number of points. The spectrum of a vector is the sum of those of its
    components.
    """
    frames = _checked_frames(frames)
    points = frames.shape[2:-1]
    sides = tuple(side_lengths) if side_lengths is not None else (1.0,) * len(points)
    if len(sides) != len(points) or not all(0 < side < math.inf for side in sides):
        raise ValueError(
            f"Side lengths {list(sides)} do not match a grid of {shape_text(points)}; pass one positive length per "
            "axis."
        )
    stretch = [max(sides) / side for side in sides]
    K = math.floor(math.hypot(*(n // 2 * s for n, s in zip(points, stretch, strict=True))) + 0.5) + 1
    spectrum = torch.fft.fftn(frames, dim=_spatial_axes(frames), norm="forward")
    waves = [_wavenumbers(n, frames.device) * s for n, s in zip(points, stretch, strict=True)]
    shells = (_radius(waves) + 0.5).floor().long().clamp(max=K - 1)
    return 0.5 * _sum_in_bins(spectrum.abs().square().flatten(2, -2), shells, K)


def relative_spectrum_error(predicted: Tensor, true: Tensor, side_lengths: Sequence[float] | None = None) -> Tensor:
    """(B, H, q): Σ_k |Ê(k) − E(k)| / Σ_k E(k) over k ≥ 1: the energy at wrong scales, independent of phase and mean.

    A log-spectral distance would be dominated by shells that contain only round-off; this one is not.
    """
    predicted, true = (_minus_first_point(frames) for frames in _checked_pair(predicted, true))
    E_predicted, E_true = (energy_spectrum(frames, side_lengths)[:, :, 1:] for frames in (predicted, true))
    return (E_predicted - E_true).abs().sum(dim=2) / E_true.sum(dim=2)


def blow_up(predicted: Tensor, true: Tensor, multiple: float = 10.0) -> tuple[Tensor, Tensor]:
    """(B,) bool, whether the forecast blew up; (B,) int, how many leads it survived: the index of the lead, H if never.

    A lead is blown up when a field is not finite or its norm exceeds `multiple` times the largest norm that the true
    field of this sample has at any lead. A field that is zero in truth is judged by finiteness alone.
    """
    if not 0 < multiple < math.inf:
        raise ValueError(f"The multiple of the true norm must be positive, got {multiple}.")
    predicted, true = _checked_pair(predicted, true)
    size, largest = (torch.linalg.vector_norm(frames, dim=_spatial_axes(frames)) for frames in (predicted, true))
    largest = largest.amax(dim=1, keepdim=True)
    bound = torch.where(largest == 0, torch.finfo(torch.float64).max, multiple * largest)
    bad = ~(size <= bound).all(dim=-1)  # a NaN is not ≤ anything
    H = bad.shape[1]
    survived = torch.where(bad, torch.arange(H, device=bad.device), H).amin(dim=1)
    return survived < H, survived


def grouped_squared_error(predicted: Tensor, true: Tensor, group_sizes: Sequence[int]) -> Tensor:
    """(B, H, G): mean over points and over the fields of each group (species, temperature, ...), normalised space.

    `group_sizes` counts the fields of each group in the order of the field axis, such as (8, 1, 1, 2).
    """
    errors = squared_error(predicted, true)
    if min(group_sizes, default=0) < 1 or sum(group_sizes) != errors.shape[-1]:
        raise ValueError(
            f"Group sizes {list(group_sizes)} must be positive and sum to the number of fields, {errors.shape[-1]}; "
            "omit empty groups."
        )
    return torch.stack([group.mean(dim=-1) for group in errors.split(list(group_sizes), dim=-1)], dim=-1)


def realm_error(predicted: Tensor, true: Tensor, group_sizes: Sequence[int]) -> Tensor:
    """One number: mean over samples, sum over groups, SUM over leads (the released evaluator)."""
    return realm_error_from(grouped_squared_error(predicted, true, group_sizes))


def realm_error_from(grouped: Tensor) -> Tensor:
    """`realm_error` from the `grouped_squared_error` (B, H, G) of all samples."""
    return grouped.mean(dim=0).sum(dim=-1).sum()


def realm_error_per_call(predicted: Tensor, true: Tensor, group_sizes: Sequence[int]) -> Tensor:
    """One number: `realm_error` with the MEAN over leads instead of the sum."""
    return realm_error_per_call_from(grouped_squared_error(predicted, true, group_sizes))


def realm_error_per_call_from(grouped: Tensor) -> Tensor:
    """`realm_error_per_call` from the `grouped_squared_error` (B, H, G) of all samples."""
    return grouped.mean(dim=0).sum(dim=-1).mean()


def _checked_frames(frames: Tensor) -> Tensor:
    if not 4 <= frames.ndim <= 6 or 0 in frames.shape or frames.is_complex():
        raise ValueError(
            "Expected real, non-empty frames of shape (batch, leads, one to three spatial axes, fields), got "
            f"{str(frames.dtype).removeprefix('torch.')} of shape {tuple(frames.shape)}."
        )
    return frames.double()


def _checked_pair(predicted: Tensor, true: Tensor) -> tuple[Tensor, Tensor]:
    if predicted.shape != true.shape:
        raise ValueError(
            f"Predicted frames have shape {tuple(predicted.shape)} and true frames {tuple(true.shape)}; pass the "
            "same leads, grid and fields for both, without the history."
        )
    return _checked_frames(predicted), _checked_frames(true)


def _spatial_axes(frames: Tensor) -> tuple[int, ...]:
    return tuple(range(2, frames.ndim - 1))


def _power_of_two(size: Tensor) -> Tensor:
    """The largest power of two that is not above `size`, without a host sync; 1 where `size` is zero or not finite."""
    mantissa, _ = torch.frexp(size)
    # Dividing a number by its own mantissa is exact; a computed power may not be.
    return torch.where((size > 0) & size.isfinite(), size / (2 * mantissa), 1.0)


def _axes_except(per: Sequence[str]) -> tuple[int, ...]:
    unknown = [name for name in per if name not in _SAMPLE_LEAD_FIELD]
    if unknown:
        raise ValueError(f"Unknown error axes {', '.join(unknown)}; choose from {', '.join(_SAMPLE_LEAD_FIELD)}.")
    return tuple(axis for axis, name in enumerate(_SAMPLE_LEAD_FIELD) if name not in per)


def _root_of_mean(energy: Tensor) -> Tensor:
    return energy.mean(dim=0).sqrt()


def _minus_first_point(frames: Tensor) -> Tensor:
    """Subtract the value at the first point: a constant field becomes exactly zero, unlike with its rounded mean.

    This also preserves the digits of small fluctuations around a large mean.
    """
    first = frames
    for axis in _spatial_axes(frames):
        first = first.narrow(axis, 0, 1)
    return frames - first


def _unit_fluctuation(frames: Tensor) -> Tensor:
    axes = _spatial_axes(frames)
    fluctuation = frames - frames.mean(dim=axes, keepdim=True)
    norm: Tensor = torch.linalg.vector_norm(fluctuation, dim=axes, keepdim=True)
    return fluctuation / norm


def _wavenumbers(points: int, device: torch.device) -> Tensor:
    """|wavenumber| of each entry of a transform of this length."""
    index = torch.arange(points, device=device)
    return torch.minimum(index, points - index).double()


def _radius(axes: Sequence[Tensor]) -> Tensor:
    """Length of every index vector of the product grid, flattened. Squares of integers are summed exactly."""
    squares = torch.zeros((), dtype=torch.float64, device=axes[0].device)
    for axis in axes:
        squares = squares[..., None] + axis.square()
    return squares.sqrt().flatten()


def _sum_in_bins(power: Tensor, bins: Tensor, count: int) -> Tensor:
    """(..., count, q) from `power` (..., points, q) and the bin of each point."""
    binned = power.new_zeros(*power.shape[:-2], count, power.shape[-1])
    return binned.index_add(-2, bins, power)
